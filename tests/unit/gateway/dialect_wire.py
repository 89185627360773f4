"""What stands between a dialect and a real SDK in unit tests: bytes instead of a network.

Owns replies to random models' texts, their deltas cut at random, and a transport that answers an
SDK with what a dialect wrote and keeps what the SDK sent.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rollstream.sample import Message
from tests.toy import toy_renderer
from worker.gateway.growing import GrowingReply
from worker.gateway.reply import finish_word, reply_message
from worker.gateway.types import CallRule, ChatReply, ChatRequest, Delta, Event, Streamer
from worker.tito.deltas import call_deltas
from worker.types import AssistantMessage, Finish, ProblemKind, ToolCall

_TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.text(st.sampled_from("abcxyz_-09"), min_size=1, max_size=12)


@st.composite
def parsed_replies(draw: st.DrawFn) -> AssistantMessage:
    """Return a reply as a parser found it: reasoning, content, good and malformed calls."""
    calls = []
    for place in range(draw(st.integers(0, 3))):
        good = draw(st.booleans())
        calls.append(
            ToolCall(
                id=f"call_{place:024x}",
                name=draw(_NAMES),
                arguments=draw(st.dictionaries(_TEXT, _JSON, max_size=3)) if good else {},
                raw=f"<tool_call>{draw(_TEXT)}</tool_call>",
                problem=None if good else ProblemKind.INVALID_JSON,
            )
        )
    return AssistantMessage(
        content=draw(_TEXT), reasoning=draw(st.none() | _TEXT), tool_calls=calls
    )


def a_reply(
    parsed: AssistantMessage | Message | str,
    *,
    finish: Finish = Finish.STOP,
    rule: CallRule = CallRule.AUTO,
    max_calls: int | None = None,
    **fields: Any,
) -> ChatReply:
    """Return what a session hands to a dialect; a text is a reply of content alone."""
    if isinstance(parsed, str):
        parsed = {"role": "assistant", "content": parsed}
    message = parsed
    if isinstance(parsed, AssistantMessage):
        message = reply_message(parsed, rule, max_calls)
    known: dict[str, Any] = {
        "id": "0f" * 16,
        "message": message,
        "finish": finish_word(finish, message),
        "ids": np.arange(7, dtype=np.int32),
        "log_probs": -np.arange(7, dtype=np.float32) / 8,
        "pieces": (),
        "num_prompt": 40,
        "num_cached": 32,
        "created_unix_s": 1_700_000_000.5,
    }
    return ChatReply(**(known | fields))


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Return a text in pieces, none of them empty."""
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(at) if end > start]


def deltas_of(message: Message, places: Sequence[int], late_content: bool) -> list[Delta]:
    """Return a message as it grows; `late_content` has the last piece of text behind the calls."""
    found: list[Delta] = []
    found += [
        {"reasoning_content": one} for one in cut(message.get("reasoning_content", ""), places)
    ]
    texts: list[Delta] = [{"content": one} for one in cut(message["content"], places)]
    late = [texts.pop()] if texts and late_content else []
    found += texts
    for index, call in enumerate(message.get("tool_calls", ())):
        found += call_deltas(call, index)
    return found + late


def stream_events(streamer: Streamer, deltas: Iterable[Delta], reply: ChatReply) -> list[Event]:
    """Return all events of a stream, with a ping in the middle."""
    events: list[Event] = []
    for place, delta in enumerate(deltas):
        ping = streamer.ping()
        if place == 1 and ping is not None:
            events.append(ping)
        events += streamer.delta(delta)
    # A server asks for the beginning only once there is something to send.
    return [*streamer.begin(), *events, *streamer.end(reply)]


def sse_bytes(events: Iterable[Event]) -> bytes:
    """Return events as they stand on the wire."""
    lines = []
    for name, data in events:
        if name:
            lines.append(f"event: {name}\n")
        lines.append(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n")
    return "".join(lines).encode()


_RENDERER = toy_renderer()
_WINDOW = _RENDERER.render([{"role": "user", "content": "hi"}], None)
_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "\u00e9"}}\n</tool_call>'
_PIECES = (
    "<think>", "</think>", _CALL, "<tool_call>", "</tool_call>", "{bad}", "\n", " ", "hello",
    "\u00e9\U0001f600", "a < b",
)  # fmt: skip


@st.composite
def grown_replies(draw: st.DrawFn) -> tuple[Message, list[Delta]]:
    """Return a reply that was parsed from ids, and its deltas as they came while it grew."""
    written = "".join(draw(st.lists(st.sampled_from(_PIECES), max_size=8)))
    ids = [*_RENDERER.encode_raw(written).tolist(), 2]
    parsed = _RENDERER.parse(np.array(ids, dtype=np.int32), _WINDOW)
    message = reply_message(parsed)
    growing = GrowingReply(_RENDERER, _WINDOW)
    deltas: list[Delta] = []
    at = 0
    while at < len(ids):
        step = draw(st.integers(1, 6))
        deltas += growing.feed(ids[at : at + step])
        at += step
    return message, deltas + growing.finish(message)


@st.composite
def broken_bodies(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """Return a request with one place of it replaced by, or added as, something else."""
    body: dict[str, Any] = copy.deepcopy(good)
    at: Any = body
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return body
        key = draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and draw(st.integers(0, 3)):
            at = at[key]
            continue
        if isinstance(at, dict) and draw(st.booleans()):
            del at[key]
        else:
            at[key] = draw(_JSON | st.sampled_from(ODD))
        return body


ODD: tuple[Any, ...] = (
    [[]], {"type": []}, {"type": {}}, [{"type": "text", "text": 1}], "auto", True, -1, [None], "",
)  # fmt: skip


class Wire:
    """A handler of requests for an SDK's transport: answers what a dialect wrote.

    `make_response` is the class of responses of the SDK's HTTP library (httpx or its successor).
    """

    def __init__(self, make_response: Callable[..., Any]) -> None:
        self._make_response = make_response
        self.bodies: list[dict[str, Any]] = []
        """What the SDK sent, in order."""
        self.headers: list[dict[str, str]] = []
        self.answers: list[tuple[int, bytes, str]] = []
        """(status, body, content type), taken from the front."""

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        """Answer the next request with JSON."""
        self.answers.append((status, json.dumps(body).encode(), "application/json"))

    def stream(self, events: Iterable[Event]) -> None:
        """Answer the next request with a stream."""
        self.answers.append((200, sse_bytes(events), "text/event-stream"))

    def __call__(self, request: Any) -> Any:
        """Handle one request."""
        self.bodies.append(json.loads(request.content))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        status, body, kind = self.answers.pop(0)
        return self._make_response(status, content=body, headers={"content-type": kind})


def a_request(**fields: Any) -> ChatRequest:
    """Return a request that a dialect parsed."""
    known: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "model": "m"}
    return ChatRequest(**(known | fields))
