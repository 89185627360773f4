"""The result of an MCP tool, as what the model reads of it.

Owns the rules for its parts. Never cuts: the cap on an observation does. Invariant: the same result
gives the same text; nothing that is no text reaches the model as bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..text import blob_text, text_of

if TYPE_CHECKING:
    from mcp_types import CallToolResult


def text_of_result(result: CallToolResult) -> str:
    """Return the texts of its parts, one below the other; structured content where it has none.

    An image, a sound or a file is named with its type and size, a link with its address.
    """
    if result.content:
        return "\n".join(_part(part) for part in result.content)
    return "" if result.structured_content is None else text_of(result.structured_content)


def _part(part: Any) -> str:
    match part.type:
        case "text":
            return str(part.text)
        case "image" | "audio":
            return _binary(part.mime_type, part.data)
        case "resource_link":
            return f"[{part.name}: {part.uri}]"
        case "resource":
            inner = part.resource
            text = getattr(inner, "text", None)
            if text is not None:
                return str(text)
            return _binary(inner.mime_type or "application/octet-stream", inner.blob)
    return f"[{part.type}]"


def _binary(mime_type: str, base64: str) -> str:
    return blob_text(mime_type, len(base64) * 3 // 4 - base64[-2:].count("="))
