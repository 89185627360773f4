"""A reply as OpenAI's Responses API says it: output items, the response around them, a stream.

Owns the items and the events. Never reads a request's fields but those that a response repeats.
Invariant: the response that ends a stream is the one without stream, and its items are those that
were streamed, in that order.

Calls stand behind the text in a reply, whatever the model wrote between them, and a stream has its
items one after the other: so the calls of a stream follow its text, at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..types import ChatReply, ChatRequest, Delta, ErrorKind, Event, Refusal
from .openai_chat import sampled_log_probs

ID_PREFIX = "resp_"
_PIECE_CHARS = 1024
_BEGIN = ("response.created", "response.in_progress")
_FAILED: dict[ErrorKind, str] = {
    ErrorKind.INVALID: "invalid_prompt",
    ErrorKind.TOO_LONG: "context_length_exceeded",
    ErrorKind.CONFLICT: "invalid_prompt",
    ErrorKind.BUSY: "rate_limit_exceeded",
}
"""Codes of a stream that breaks; everything else is `server_error`."""


@dataclass(slots=True)
class _Open:
    """An item of a stream that is not done."""

    kind: str
    id: str
    pieces: list[str]


class ResponseStream:
    """One reply as events: items of reasoning and text as they come, calls behind them."""

    def __init__(self, request: ChatRequest, reply_id: str, created_unix_s: float) -> None:
        self._request, self._reply_id, self._created = request, reply_id, created_unix_s
        self._done: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._number = len(_BEGIN)
        """Of the next event; a server may ask for the beginning only once there is more to send."""

    def begin(self) -> list[Event]:
        """Return `response.created` and `response.in_progress`."""
        response = self._response("in_progress")
        return [
            (name, {"type": name, "sequence_number": number, "response": response})
            for number, name in enumerate(_BEGIN)
        ]

    def delta(self, delta: Delta) -> list[Event]:
        """Return a piece of reasoning or of text; calls wait for the end."""
        events: list[Event] = []
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if piece := delta.get(name):
                events += self._switch(kind)
                events.append(self._piece(piece))
        return events

    def end(self, reply: ChatReply) -> list[Event]:
        """Return what is missing of the text, the calls, and the whole response."""
        request, calls = self._request, reply.message.get("tool_calls") or ()
        events: list[Event] = []
        if not calls and not self._has("message"):
            events += self._switch("message")
        log_probs = _log_probs(request, reply)
        events += self._close("completed" if calls else _status(reply), log_probs)
        for place, call in enumerate(calls):
            is_last = place == len(calls) - 1
            events += self._call(call, place, _status(reply) if is_last else "completed")
        response = ended_response(request, reply, self._done, self._created)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def error(self, refusal: Refusal) -> list[Event]:
        """Return `response.failed`, the last event."""
        code = _FAILED.get(refusal.kind, "server_error")
        failed = self._response("failed")
        failed |= {"output": self._done, "error": {"code": code, "message": refusal.message}}
        return [self._event("response.failed", response=failed)]

    def ping(self) -> Event | None:
        """Return None: a comment line, which SDKs skip."""
        return None

    def _has(self, kind: str) -> bool:
        is_open = self._open is not None and self._open.kind == kind
        return is_open or any(item["type"] == kind for item in self._done)

    def _switch(self, kind: str) -> list[Event]:
        """Return what opens an item of a kind, empty where one of it is open."""
        if self._open is not None and self._open.kind == kind:
            return []
        events = self._close("completed", [])
        again = sum(item["type"] == kind for item in self._done)
        self._open = _Open(kind, _item_id(kind, self._reply_id, again), [])
        item = _text_item(kind, self._open.id, None, "in_progress", [])
        part = _part(kind, "", [])
        return [
            *events,
            self._event("response.output_item.added", output_index=len(self._done), item=item),
            self._in_item("response.content_part.added", content_index=0, part=part),
        ]

    def _piece(self, text: str) -> Event:
        assert self._open is not None
        self._open.pieces.append(text)
        if self._open.kind == "reasoning":
            return self._in_item("response.reasoning_text.delta", content_index=0, delta=text)
        return self._in_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _close(self, status: str, log_probs: list[dict[str, Any]]) -> list[Event]:
        if self._open is None:
            return []
        kind, text = self._open.kind, "".join(self._open.pieces)
        part = _part(kind, text, log_probs)
        if kind == "reasoning":
            done = self._in_item("response.reasoning_text.done", content_index=0, text=text)
        else:
            done = self._in_item(
                "response.output_text.done", content_index=0, text=text, logprobs=log_probs
            )
        events = [done, self._in_item("response.content_part.done", content_index=0, part=part)]
        item = _text_item(kind, self._open.id, text, status, log_probs)
        self._open = None
        return [*events, self._item_done(item)]

    def _call(self, call: Mapping[str, Any], place: int, status: str) -> list[Event]:
        item = _call_item(call, _item_id("function_call", self._reply_id, place), status)
        begun = {**item, "arguments": "", "status": "in_progress"}
        at = {"item_id": item["id"], "output_index": len(self._done)}
        written = item["arguments"]
        events = [
            self._event("response.output_item.added", output_index=len(self._done), item=begun),
            *(
                self._event(
                    "response.function_call_arguments.delta",
                    **at,
                    delta=written[start : start + _PIECE_CHARS],
                )
                for start in range(0, len(written), _PIECE_CHARS)
            ),
            self._event("response.function_call_arguments.done", **at, arguments=written),
        ]
        return [*events, self._item_done(item)]

    def _item_done(self, item: dict[str, Any]) -> Event:
        self._done.append(item)
        return self._event("response.output_item.done", output_index=len(self._done) - 1, item=item)

    def _in_item(self, name: str, **fields: Any) -> Event:
        assert self._open is not None
        return self._event(name, item_id=self._open.id, output_index=len(self._done), **fields)

    def _event(self, name: str, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return name, {"type": name, "sequence_number": number, **fields}

    def _response(self, status: str) -> dict[str, Any]:
        return begun_response(self._request, self._reply_id, self._created, status)


def ended_response(
    request: ChatRequest, reply: ChatReply, output: list[dict[str, Any]], created_unix_s: float
) -> dict[str, Any]:
    """Return a response that is complete, or was cut.

    Args:
        request: what it answers.
        reply: as stored.
        output: its items.
        created_unix_s: when it was begun.
    """
    response = begun_response(request, reply.id, created_unix_s, _status(reply))
    sampled = len(reply.ids)
    response["output"] = output
    if response["status"] == "incomplete":
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    response["usage"] = {
        "input_tokens": reply.num_prompt,
        "input_tokens_details": {"cached_tokens": reply.num_cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": reply.num_reasoning or 0},
        "total_tokens": reply.num_prompt + sampled,
    }
    return response


def begun_response(
    request: ChatRequest, reply_id: str, created_unix_s: float, status: str
) -> dict[str, Any]:
    """Return a response with nothing in it; what was asked for comes back as it was asked."""
    asked, mark = request.extra["asked"], request.extra["mark"]
    metadata = asked["metadata"]
    return {
        **asked,
        "id": f"{ID_PREFIX}{reply_id}_{mark}" if mark else f"{ID_PREFIX}{reply_id}",
        "object": "response",
        "created_at": int(created_unix_s),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "metadata": metadata if isinstance(metadata, Mapping) else {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.max_calls is None,
        "reasoning": {"effort": None, "summary": None},
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": str(request.call_rule),
        "tools": asked["tools"] or [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def output_items(request: ChatRequest, reply: ChatReply) -> Iterator[dict[str, Any]]:
    """Yield the items of a reply: reasoning, a message, calls.

    There is a message where there are no calls, be it empty: clients end their loops with one.
    """
    message, last = reply.message, _status(reply)
    calls = message.get("tool_calls") or ()
    if thought := message.get("reasoning_content"):
        item_id = _item_id("reasoning", reply.id, 0)
        yield _text_item("reasoning", item_id, thought, "completed", [])
    if message.get("content") or not calls:
        item_id, status = _item_id("message", reply.id, 0), "completed" if calls else last
        log_probs = _log_probs(request, reply)
        yield _text_item("message", item_id, message.get("content") or "", status, log_probs)
    for place, call in enumerate(calls):
        is_last = place == len(calls) - 1
        item_id = _item_id("function_call", reply.id, place)
        yield _call_item(call, item_id, last if is_last else "completed")


def _status(reply: ChatReply) -> str:
    return "incomplete" if reply.finish == "length" else "completed"


def _log_probs(request: ChatRequest, reply: ChatReply) -> list[dict[str, Any]]:
    if not request.log_probs:
        return []
    return list(sampled_log_probs(reply.pieces, reply.log_probs))


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _item_id(kind: str, reply_id: str, place: int) -> str:
    """Return the id of an item; `responses_input.ITEM_ID` reads it."""
    return f"{_PREFIXES[kind]}_{reply_id}_{place}"


def _part(kind: str, text: str, log_probs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "annotations": [], "logprobs": log_probs, "text": text}


def _text_item(
    kind: str, item_id: str, text: str | None, status: str, log_probs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return an item of reasoning or text; a text of None has no part yet."""
    content = [] if text is None else [_part(kind, text, log_probs)]
    own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"id": item_id, "type": kind, "status": status, "content": content, **own}


def _call_item(call: Mapping[str, Any], item_id: str, status: str) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": item_id,
        "type": "function_call",
        "status": status,
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
    }
