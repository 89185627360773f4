"""From a client's messages and tools to the ids that an engine is asked with.

Owns the seam between sessions and the renderer: what belongs in a thread, which spec objects the
renderer sees, the order of tool results, and what a client is told of messages that cannot be
rendered. Never changes a message, never renders a history twice. Invariant: whatever a client sent,
there are ids or there is a `Refusal` that names the message; nothing else is raised.

The rules for roles, parts and arguments are those of `worker.tito.messages`; whether a template
takes a late system message in its place, or refuses it by name, is the template's own matter and
the same on every turn.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from rollstream.errors import MergeFault
from rollstream.sample import Message, TokenIds

from ..functions import describe
from ..offload import call, is_long
from ..tito.history import order_tool_results
from ..tito.load import render_prompt
from ..types import PromptIds, Renderer
from .types import ErrorKind, Refusal

MAX_HELD_TOOLS = 32
"""So many sets of tools are one object for all sessions; the renderer holds twice as many."""
MAX_HELD_TOOLS_BYTES = 1 << 20
"""A larger set is its session's own."""
TOOLS_BYTES_PER_CHAR = 32
"""A suffix reads the tools at most once, where a prompt tokenizes them."""
MAX_ERROR_CHARS = 600

_PLACE = re.compile(r"\bmessage (\d+)\b")
_TOOL = re.compile(r"\btool \d+\b")
_UNFORESEEN = (TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError)
"""What renderers raise for messages that nobody thought of."""


class Prompter:
    """The prompts of all sessions of a worker, over one renderer."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self._held: OrderedDict[bytes, list[Message]] = OrderedDict()
        """Spec objects by their exact JSON: renderers know specs by identity."""

    def tools_key(self, tools: Sequence[Message] | None) -> bytes:
        """Return what is the same for tools that mean the same; empty for none.

        The order of keys does not count, nor does the flat form; the order of the tools does.

        Raises:
            Refusal: JSON of thousands of levels.
        """
        if not tools:
            return b""
        return _digest(_json([_function(tool) for tool in tools], in_order=True))

    async def first(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> PromptIds:
        """Return the ids of a conversation that begins, generation prompt included.

        Raises:
            Refusal: it cannot be rendered; names role and index.
        """
        specs, num_bytes = self._specs(tools)
        try:
            long = is_long(messages, num_bytes)
            return await call(long, render_prompt, self.renderer, list(messages), specs)
        except (ValueError, MergeFault, *_UNFORESEEN) as error:
            raise _refusal(error, messages, 0) from error

    async def append(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        reply: Message | None = None,
        first_place: int = 0,
    ) -> TokenIds:
        """Return only the ids to append behind `completion`.

        Args:
            window: the tail of what the engine saw before it.
            completion: what was sampled; never changed.
            new_messages: what a client wrote behind the reply.
            tools: as rendered in the prompt.
            reply: the message that `completion` is, so that results are put in the order of its
                calls.
            first_place: of the first new message in what the client sent, for errors.

        Raises:
            Refusal: the messages cannot follow; names role and index.
        """
        specs, num_bytes = self._specs(tools)
        try:
            long = is_long(new_messages, num_bytes // TOOLS_BYTES_PER_CHAR)
            return await call(long, self._extend, window, completion, new_messages, specs, reply)
        except (ValueError, MergeFault, *_UNFORESEEN) as error:
            raise _refusal(error, new_messages, first_place) from error

    def _extend(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: Sequence[Message],
        tools: list[Message] | None,
        reply: Message | None,
    ) -> TokenIds:
        if reply is not None:
            try:
                new_messages = order_tool_results([reply, *new_messages])[1:]
            except ValueError as error:
                raise ValueError(_moved(str(error), -1)) from None
        return self.renderer.extend(window, completion, new_messages, tools)

    def _specs(self, tools: Sequence[Message] | None) -> tuple[list[Message] | None, int]:
        """Return the one object for these very specs, and how many bytes their JSON has."""
        if not tools:
            return None, 0
        text = _json(tools, in_order=False)
        if len(text) > MAX_HELD_TOOLS_BYTES:
            return list(tools), len(text)
        key = _digest(text)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = list(tools)
            if len(self._held) > MAX_HELD_TOOLS:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(key)
        return held, len(text)


def _function(tool: Any) -> Any:
    """Return a tool in the flat form that both forms have in common."""
    if not isinstance(tool, dict):
        return tool
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        return tool
    return {"type": "function", **tool, **function, "function": None}


def _json(value: Any, *, in_order: bool) -> bytes:
    try:
        return msgspec.json.encode(value, order="sorted" if in_order else None)
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(value, sort_keys=in_order).encode()
    except RecursionError:
        raise Refusal(
            ErrorKind.INVALID, "tools: JSON of too many levels; write a flatter schema",
            param="tools",
        ) from None  # fmt: skip


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=16).digest()


def _refusal(error: Exception, messages: Sequence[Message], first_place: int) -> Refusal:
    """Return what a client is told of an error of the renderer."""
    text = str(error)
    if isinstance(error, MergeFault) and error.detail == "prefix":
        return Refusal(ErrorKind.INTERNAL, _clean(text))
    if isinstance(error, RecursionError):
        text = "JSON of too many levels in a message or a tool"
    elif isinstance(error, _UNFORESEEN):
        text = f"these messages cannot be rendered: {describe(error)}"
    is_tools = _TOOL.match(text) is not None or (
        isinstance(error, MergeFault) and error.detail == "bad_tools"
    )
    if is_tools:
        return Refusal(ErrorKind.INVALID, _clean(text), param="tools")
    found = _PLACE.search(text)
    place = int(found[1]) if found else -1
    if 0 <= place < len(messages):
        text = _moved(text, first_place)
        message = messages[place]
        role = message.get("role") if isinstance(message, dict) else None
        if "role" not in text and isinstance(role, str):
            text = f"{text} (message {first_place + place} has role {role[:40]!r})"
    return Refusal(ErrorKind.INVALID, _clean(text), param="messages")


def _moved(text: str, by: int) -> str:
    """Return an error text whose first message has another index."""
    return _PLACE.sub(lambda found: f"message {int(found[1]) + by}", text, count=1)


def _clean(text: str) -> str:
    if len(text) > MAX_ERROR_CHARS:
        text = text[:MAX_ERROR_CHARS] + " …"
    return text.encode("utf-8", "replace").decode()
