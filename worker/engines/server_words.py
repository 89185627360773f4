"""The words of SGLang and vLLM on the server's side: how they refuse, measure and report.

Owns what the engines of ours that speak these protocols (`sim`, `hf`) must say alike. Never samples
and does no I/O. Invariant: a client cannot tell these answers from the servers' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from rollstream.errors import RollstreamError


class Refused(RollstreamError):
    """The request is answered with HTTP 400, in SGLang's shape."""

    status = 400

    def __init__(self, message: str, *, contract: bool = False) -> None:
        super().__init__(message)
        self.body = error_body(message, contract=contract)
        self.is_contract = contract
        """SGLang refuses it before anything else, also where a stream was asked for."""


class VllmRefused(Refused):
    """The request is answered with an error in vLLM's shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "BadRequestError",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = vllm_error_body(message, status, kind, param)


def error_body(message: str, *, contract: bool = False) -> bytes:
    """Return an error in SGLang's shape; its contract gate answers the text itself."""
    return msgspec.json.encode({"error": message if contract else {"message": message}})


def vllm_error_body(
    message: str, status: int = 400, kind: str | None = None, param: str | None = None
) -> bytes:
    """Return an error in vLLM's shape.

    Args:
        message: what is wrong.
        status: of HTTP; it is the error's `code`, too.
        kind: the error's `type`; None names the status.
        param: the field that is wrong.
    """
    kind = HTTPStatus(status).phrase if kind is None else kind
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def vllm_check_length(num_prompt: int, context_tokens: int) -> None:
    """Refuse a prompt that leaves no room; a budget over the room is cut, not refused, by vLLM."""
    if num_prompt > context_tokens:
        raise VllmRefused(
            f"The decoder prompt (length {num_prompt}) is longer than the maximum model length of "
            f"{context_tokens}. Make sure that `max_model_len` is no smaller than the number of "
            "text tokens."
        )
    if num_prompt == context_tokens:
        raise VllmRefused(
            f"The decoder prompt (length {num_prompt}) plus the number of requested output tokens "
            f"(at least 1) is longer than the maximum model length of {context_tokens}. Make sure "
            "that `max_model_len` is no smaller than the number of text tokens (prompt + requested "
            "output tokens)."
        )


def check_length(num_prompt: int, num_new: int | None, context_tokens: int) -> None:
    """Refuse what does not fit the context.

    Args:
        num_prompt: ids of the prompt.
        num_new: tokens asked for, None for as many as fit.
        context_tokens: of the model.
    """
    if num_prompt >= context_tokens:
        raise Refused(
            f"The input ({num_prompt} tokens) is longer than the model's context length "
            f"({context_tokens} tokens)."
        )
    if num_new is not None and num_prompt + num_new > context_tokens:
        raise Refused(
            f"Requested token count exceeds the model's maximum context length of "
            f"{context_tokens} tokens. You requested a total of {num_prompt + num_new} tokens."
        )


def weight_label(version: Any) -> str:
    """Return a version as SGLang keeps it: text."""
    if isinstance(version, bool) or not isinstance(version, (str, int)):
        raise Refused(f"new_version {version!r} is not text")
    return str(version)


def version_spans(
    changes: Sequence[tuple[str, int]], current: str, num_tokens: int
) -> list[dict[str, Any]]:
    """Return which version sampled which tokens of one reply, as SGLang reports it.

    Args:
        changes: (version that ended, after how many tokens), in order.
        current: the version at the end.
        num_tokens: C.
    """
    spans: list[dict[str, Any]] = []
    behind = 0
    for version, end in [*changes, (current, num_tokens)]:
        end = min(end, num_tokens)  # a reply may be cut before a change
        if end <= behind and spans:
            continue
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = end
        else:
            spans.append({"version": version, "start": behind, "end": end})
        behind = end
    return spans
