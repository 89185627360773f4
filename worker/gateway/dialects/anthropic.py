"""Anthropic's Messages API: `messages` and `messages/count_tokens`, whole and as a stream.

Owns the rule of every parameter, the reply as content blocks, the events of a stream, errors in
Anthropic's words. Never holds a session, never renders; what a client sends is read in
`anthropic_input`. Invariant: a stream, put together by its client, is the reply without stream, and
the echo of either is the stored message.

Calls stand behind the text in a reply, whatever the model wrote between them, and a stream has its
blocks one after the other: so the calls of a stream follow its text, at its end.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any, Protocol

from rollstream.sample import Message

from ..types import ChatReply, ChatRequest, Delta, ErrorKind, Event, Refusal, Streamer
from . import anthropic_input as given
from .rules import (
    EVERYWHERE,
    Table,
    cap,
    is_empty,
    lowered,
    no_effect,
    pinned,
    refused,
    retry_of,
    sort_fields,
    switch,
    text,
    used,
)

TABLE: Table = {
    **EVERYWHERE,
    **used("model messages system tools tool_choice stream output_config"),
    **lowered("max_tokens", "required, as in the API"),
    **pinned("stop_sequences", "the run's own stop strings are sampled with"),
    **pinned("thinking", "the run's chat format says whether the model thinks"),
    **pinned(
        "context_management compaction",
        "conversations are append-only: nothing is cleared or summarized here",
    ),
    **no_effect(
        "cache_control metadata service_tier speed inference_geo diagnostics betas "
        "anthropic_version anthropic_beta user_profile_id workspace_id billing_policy fallbacks "
        "fallback_credit_token"
    ),
    **refused("output_format", "replies are sampled without a grammar; say it in the prompt"),
    **refused("container", "nothing here runs code; run it yourself, as a tool"),
    **refused(
        "mcp_servers", "no server is asked from here; connect it in the agent", is_empty, "[]"
    ),
    **refused("thread", "send all messages with every request"),
}

_ERROR_TYPES: dict[ErrorKind, str] = {
    ErrorKind.INVALID: "invalid_request_error",
    ErrorKind.TOO_LONG: "invalid_request_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.CONFLICT: "conflict_error",
    ErrorKind.GONE: "not_found_error",
    ErrorKind.TOO_LARGE: "request_too_large",
    ErrorKind.BUSY: "rate_limit_error",
    ErrorKind.ENGINE: "overloaded_error",
    ErrorKind.INTERNAL: "api_error",
}
_TOO_LONG = "prompt is too long"
"""Clients look for these words to know that they have to compact."""
_JSON_PIECE_CHARS = 1024
"""Arguments in a stream; SDKs parse all of them anew at every piece, so there are few."""


class Counter(Protocol):
    """The part of a session that counts."""

    def count(self, request: ChatRequest) -> int | Awaitable[int]:
        """Return how many prompt tokens a request would have."""
        ...


class AnthropicMessages:
    """The dialect of the `anthropic` SDKs and of Claude Code."""

    name = "anthropic"
    paths: tuple[str, ...] = ("messages",)
    cannot_carry: Mapping[str, str] = {
        "images, documents, search results, server tools and their results": "400",
        "tools of Anthropic's own types (`web_search_…`, `bash_…`, …), `defer_loading`": "400",
        "`tool_choice` `any` and `tool`, `output_config.format`": "400: sampling is never forced",
        "a last message of the assistant (prefill)": "400",
        "`thinking`, `output_config.effort`, `temperature`, `top_p`, `top_k`, `stop_sequences`": (
            "pinned: the run's own"
        ),
        "`context_management`": "pinned: nothing is cleared or summarized here",
        "`redacted_thinking` in a history": "left out: nobody can read it",
        "`is_error` of a tool result": "not shown: the model reads the result's text",
        "`input_examples`, `strict` of a tool": "not shown; `strict` is pinned",
        "text before a tool result in a user message": "stands behind the result",
        "a call between two pieces of text": "calls stand behind the text",
        "the line `x-anthropic-billing-header` of a system prompt": "left out: it is never the same"
        " twice",
        "a reply without any text": "`content: []`",
    }

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ChatRequest:
        """Translate a request; see `Dialect`.

        Raises:
            Refusal: says which field, and what to do.
        """
        if body.get("max_tokens") is None:
            raise Refusal(
                ErrorKind.INVALID, "max_tokens: field required, a whole number", param="max_tokens"
            )
        return _request(body, headers)

    async def count(self, session: Counter, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to `messages/count_tokens`, of the ids that would be sent.

        Raises:
            Refusal: as `parse`, or of the session.
        """
        found = session.count(_request(body, {}))
        return {"input_tokens": await found if inspect.isawaitable(found) else found}

    def reply(self, request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
        """Return a `message`."""
        return {
            **_message(request, reply.id),
            "content": [*_said(reply.message), *_calls(reply.message)],
            **_ending(reply),
            "usage": _usage(reply),
        }

    def streamer(self, request: ChatRequest, reply_id: str, created_unix_s: float) -> Streamer:
        """Return a writer of `message_start` to `message_stop`."""
        return MessageStream(request, reply_id)

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of an error."""
        return _error(refusal)


class MessageStream:
    """One reply as events: blocks of thinking and text as they come, calls behind them."""

    def __init__(self, request: ChatRequest, reply_id: str) -> None:
        self._request, self._reply_id = request, reply_id
        self._index = -1
        """Of the newest block."""
        self._open = ""
        """Its kind, empty where none is open."""
        self._seal = _Seal()

    def begin(self) -> list[Event]:
        """Return `message_start`. What the prompt costs is told at the end."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {
            **_message(self._request, self._reply_id),
            "content": [],
            **_end(None),
            "usage": usage,
        }
        return [_event("message_start", message=message)]

    def delta(self, delta: Delta) -> list[Event]:
        """Return a piece of thinking or of text; calls wait for the end."""
        events: list[Event] = []
        if thought := delta.get("reasoning_content"):
            events += self._switch("thinking", {"thinking": "", "signature": ""})
            self._seal.add(thought)
            events.append(self._piece("thinking_delta", thinking=thought))
        if words := delta.get("content"):
            events += self._switch("text", {"text": ""})
            events.append(self._piece("text_delta", text=words))
        return events

    def end(self, reply: ChatReply) -> list[Event]:
        """Return the calls, why it ended, usage."""
        events = self._close()
        for block in _calls(reply.message):
            written = json.dumps(block["input"], ensure_ascii=False, separators=(",", ":"))
            events += self._switch("tool_use", {**block, "input": {}})
            events += [
                self._piece("input_json_delta", partial_json=written[at : at + _JSON_PIECE_CHARS])
                for at in range(0, len(written), _JSON_PIECE_CHARS)
            ]
            events += self._close()
        events.append(_event("message_delta", delta=_ending(reply), usage=_usage(reply)))
        events.append(_event("message_stop"))
        return events

    def error(self, refusal: Refusal) -> list[Event]:
        """Return an `error` event, the last one."""
        return [("error", _error(refusal))]

    def ping(self) -> Event | None:
        """Return a `ping` event."""
        return _event("ping")

    def _switch(self, kind: str, start: dict[str, Any]) -> list[Event]:
        """Return what opens a block of a kind, empty where one of it is open."""
        if self._open == kind:
            return []
        events = self._close()
        self._index += 1
        self._open = kind
        block = {"type": kind, **start}
        return [*events, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        events: list[Event] = []
        if self._open == "thinking":
            events.append(self._piece("signature_delta", signature=self._seal.close()))
        self._open = ""
        return [*events, _event("content_block_stop", index=self._index)]

    def _piece(self, kind: str, **fields: Any) -> Event:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._index, delta=delta)


class _Seal:
    """The signature of a thinking block: of its text alone, so that every way of telling it agrees.

    Nothing is proven by it: an echo counts by its text, and one that was changed is another turn.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, thought: str) -> None:
        self._digest.update(thought.encode("utf-8", "surrogatepass"))

    def close(self) -> str:
        """Return the signature; a new block begins."""
        found = base64.b64encode(self._digest.digest()).decode()
        self._digest = hashlib.sha256()
        return found


def _request(body: dict[str, Any], headers: Mapping[str, str]) -> ChatRequest:
    fields = sort_fields(body, TABLE)
    tools, strict = given.function_tools(body.get("tools"))
    rule, max_calls = given.call_rule(body.get("tool_choice"))
    retry, retry_key = retry_of(headers)
    return ChatRequest(
        messages=[
            *given.system_messages(body.get("system")),
            *given.conversation(body.get("messages")),
        ],
        tools=tools,
        model=text(body, "model"),
        max_tokens=cap(body, "max_tokens"),
        call_rule=rule,
        max_calls=max_calls,
        stream=switch(body, "stream", default=False),
        retry=retry,
        retry_key=retry_key,
        pinned=(
            *fields.pinned,
            *_pinned_output(body.get("output_config")),
            *(("tools.strict",) if strict else ()),
        ),
        ignored=fields.ignored,
    )


def _pinned_output(config: Any) -> Iterator[str]:
    """Yield what of `output_config` is the run's own.

    Raises:
        Refusal: it asks for a format.
    """
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise Refusal(ErrorKind.INVALID, "output_config: expected an object", param="output_config")
    if config.get("format") is not None:
        raise Refusal(
            ErrorKind.INVALID,
            "output_config.format: replies are sampled without a grammar; say in the prompt which "
            "form you want",
            param="output_config.format",
        )
    yield from (f"output_config.{name:.40}" for name, value in config.items() if value is not None)


def _message(request: ChatRequest, reply_id: str) -> dict[str, Any]:
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
    }


def _said(message: Message) -> Iterator[dict[str, Any]]:
    if thought := message.get("reasoning_content"):
        seal = _Seal()
        seal.add(thought)
        yield {"type": "thinking", "thinking": thought, "signature": seal.close()}
    if words := message.get("content"):
        yield {"type": "text", "text": words}


def _calls(message: Message) -> Iterator[dict[str, Any]]:
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": found}


def _ending(reply: ChatReply) -> dict[str, Any]:
    if reply.finish == "length":
        return _end("max_tokens")
    if reply.finish == "tool_calls":
        return _end("tool_use")
    if reply.stop_text:
        return _end("stop_sequence", reply.stop_text)
    return _end("end_turn")


def _end(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _usage(reply: ChatReply) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "input_tokens": reply.num_prompt - reply.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.num_cached,
        "output_tokens": len(reply.ids),
    }
    if reply.num_reasoning is not None:
        usage["output_tokens_details"] = {"thinking_tokens": reply.num_reasoning}
    return usage


def _error(refusal: Refusal) -> dict[str, Any]:
    message = refusal.message
    if refusal.kind is ErrorKind.TOO_LONG and _TOO_LONG not in message:
        message = f"{_TOO_LONG}: {message}"
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES[refusal.kind], "message": message},
        "request_id": None,
    }


def _event(name: str, **fields: Any) -> Event:
    return name, {"type": name, **fields}
