"""The three dialects as a client speaks them, and as an auditor reads them.

Owns bodies, the assembly of streams from their deltas, and the reading of bodies and replies as
turns. Written from the APIs' documents; knows nothing of the gateway. Invariant: what `turns_of`
reads of a body is what the client said, turn by turn, with the words of its own replies as it
echoes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Item = dict[str, Any]
MODEL = "policy"
_FINISH = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
"""Anthropic's words."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, the same whatever the dialect."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments with sorted keys)"""
    call_ids: tuple[str, ...] = field(default=(), compare=False)
    """Turns that say the same are told apart by them."""


@dataclass(frozen=True, slots=True)
class Said:
    """One reply, as its client read it."""

    id: str
    thought: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    """(call id, name, arguments as text)"""
    finish: str
    """`stop`, `length` or `tool_calls`."""
    items: tuple[Item, ...]
    """How its client echoes it."""

    def turn(self) -> Turn:
        """Return it as a turn."""
        calls = tuple((name, sorted_json(arguments)) for _, name, arguments in self.calls)
        return Turn("assistant", self.text, calls, tuple(call_id for call_id, _, _ in self.calls))


def sorted_json(text: str) -> str:
    """Return JSON in one spelling; what is none as it is."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


class Dialect(Protocol):
    """One of the three."""

    path: str

    def body(self, system: str, items: Sequence[Item], *, tool: Item | None, most: int,
             stream: bool, previous: str) -> dict[str, Any]: ...  # fmt: skip
    def user(self, text: str) -> list[Item]: ...
    def results(self, results: Sequence[tuple[str, str]]) -> list[Item]: ...
    def joined(self, events: Sequence[dict[str, Any]]) -> dict[str, Any] | None: ...
    def said(self, reply: dict[str, Any], *, thinks: bool = True) -> Said: ...
    def turns_of(self, body: dict[str, Any]) -> list[Turn]: ...


def events_of(raw: str) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events; an end mark is none."""
    for block in raw.replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(
            line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")
        )
        if data and data != "[DONE]":
            yield json.loads(data)


def _text_of(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text", "") for part in content)


class Chat:
    """OpenAI's chat completions."""

    path = "chat/completions"

    def body(self, system: str, items: Sequence[Item], *, tool: Item | None, most: int,
             stream: bool, previous: str) -> dict[str, Any]:  # fmt: skip
        del previous
        body: dict[str, Any] = {
            "model": MODEL, "max_completion_tokens": most, "stream": stream, "temperature": 1.0,
            "messages": [{"role": "system", "content": system}, *items],
        }  # fmt: skip
        if tool is not None:
            body["tools"] = [{"type": "function", "function": tool}]
        if stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def user(self, text: str) -> list[Item]:
        return [{"role": "user", "content": text}]

    def results(self, results: Sequence[tuple[str, str]]) -> list[Item]:
        return [{"role": "tool", "tool_call_id": i, "content": text} for i, text in results]

    def joined(self, events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        calls: dict[int, Any] = {}
        finish = None
        for event in events:
            if "error" in event:
                return None
            for choice in event["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning_content"):
                    if delta.get(name) is not None:
                        message[name] = (message.get(name) or "") + delta[name]
                for piece in delta.get("tool_calls") or ():
                    call = calls.setdefault(
                        piece["index"],
                        {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
                    )
                    call["id"] += piece.get("id") or ""
                    for name in ("name", "arguments"):
                        call["function"][name] += piece.get("function", {}).get(name) or ""
                finish = choice["finish_reason"] or finish
        if finish is None:
            return None
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return {"id": events[0]["id"], "choices": [choice]}

    def said(self, reply: dict[str, Any], *, thinks: bool = True) -> Said:
        choice = reply["choices"][0]
        message = choice["message"]
        calls = message.get("tool_calls") or []
        item = {"role": "assistant", "content": message.get("content")}
        thought = message.get("reasoning_content") or ""
        if thought and thinks:
            item["reasoning_content"] = thought
        if calls:
            item["tool_calls"] = calls
        said = tuple((c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls)
        text = message.get("content") or ""
        return Said(reply["id"], thought, text, said, choice["finish_reason"], (item,))

    def turns_of(self, body: dict[str, Any]) -> list[Turn]:
        return [
            Turn(
                message["role"],
                _text_of(message.get("content")),
                tuple(
                    (c["function"]["name"], sorted_json(c["function"]["arguments"]))
                    for c in message.get("tool_calls") or ()
                ),
                tuple(c["id"] for c in message.get("tool_calls") or ()),
            )
            for message in body["messages"]
        ]


class Anthropic:
    """Anthropic's messages."""

    path = "messages"

    def body(self, system: str, items: Sequence[Item], *, tool: Item | None, most: int,
             stream: bool, previous: str) -> dict[str, Any]:  # fmt: skip
        del previous
        body: dict[str, Any] = {
            "model": MODEL, "max_tokens": most, "stream": stream, "system": system,
            "messages": list(items),
        }  # fmt: skip
        if tool is not None:
            shape = {"name": tool["name"], "description": tool["description"]}
            body["tools"] = [{**shape, "input_schema": tool["parameters"]}]
        return body

    def user(self, text: str) -> list[Item]:
        return [{"role": "user", "content": [{"type": "text", "text": text}]}]

    def results(self, results: Sequence[tuple[str, str]]) -> list[Item]:
        blocks = [{"type": "tool_result", "tool_use_id": i, "content": t} for i, t in results]
        return [{"role": "user", "content": blocks}]

    def joined(self, events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        reply: dict[str, Any] | None = None
        inputs: dict[int, str] = {}
        for event in events:
            kind = event["type"]
            if kind == "error":
                return None
            if kind == "message_start":
                reply = {**event["message"], "content": []}
            assert reply is not None or kind == "ping"
            if kind == "content_block_start":
                reply["content"].append(dict(event["content_block"]))  # type: ignore[index]
            elif kind == "content_block_delta":
                block, delta = reply["content"][event["index"]], event["delta"]  # type: ignore[index]
                if delta["type"] == "input_json_delta":
                    at = event["index"]
                    inputs[at] = inputs.get(at, "") + delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] = block.get(name, "") + delta[name]
            elif kind == "message_delta":
                reply |= event["delta"]  # type: ignore[operator]
            elif kind == "message_stop":
                for at, text in inputs.items():
                    reply["content"][at]["input"] = json.loads(text or "{}")  # type: ignore[index]
                return reply
        return None

    def said(self, reply: dict[str, Any], *, thinks: bool = True) -> Said:
        blocks = reply["content"]
        kept = [b for b in blocks if thinks or b["type"] != "thinking"]
        calls = tuple(
            (b["id"], b["name"], json.dumps(b["input"])) for b in blocks if b["type"] == "tool_use"
        )
        thought = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        finish = _FINISH.get(reply["stop_reason"], reply["stop_reason"])
        items = ({"role": "assistant", "content": kept},)
        return Said(reply["id"], thought, text, calls, finish, items)

    def turns_of(self, body: dict[str, Any]) -> list[Turn]:
        turns = [Turn("system", _text_of(body["system"]))] if body.get("system") else []
        for message in body["messages"]:
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if message["role"] == "assistant":
                calls = tuple(
                    (b["name"], json.dumps(b["input"], sort_keys=True))
                    for b in blocks
                    if b["type"] == "tool_use"
                )
                text = "".join(b["text"] for b in blocks if b["type"] == "text")
                ids = tuple(b["id"] for b in blocks if b["type"] == "tool_use")
                turns.append(Turn("assistant", text, calls, ids))
                continue
            turns += [
                Turn("tool", _text_of(b["content"])) for b in blocks if b["type"] == "tool_result"
            ]
            if texts := [b["text"] for b in blocks if b["type"] == "text"]:
                turns.append(Turn("user", "".join(texts)))
        return turns


class Responses:
    """OpenAI's responses."""

    path = "responses"

    def body(self, system: str, items: Sequence[Item], *, tool: Item | None, most: int,
             stream: bool, previous: str) -> dict[str, Any]:  # fmt: skip
        body: dict[str, Any] = {
            "model": MODEL, "max_output_tokens": most, "stream": stream, "instructions": system,
            "input": list(items),
        }  # fmt: skip
        if tool is not None:
            body["tools"] = [{"type": "function", **tool, "strict": False}]
        if previous:
            body["previous_response_id"] = previous
        return body

    def user(self, text: str) -> list[Item]:
        return [{"role": "user", "content": [{"type": "input_text", "text": text}]}]

    def results(self, results: Sequence[tuple[str, str]]) -> list[Item]:
        return [{"type": "function_call_output", "call_id": i, "output": t} for i, t in results]

    def joined(self, events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        pieces: dict[str, str] = {}
        for event in events:
            kind = event["type"]
            if kind.endswith("_text.delta") or kind == "response.function_call_arguments.delta":
                pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
            elif kind in ("response.failed", "error"):
                return None
            elif kind in ("response.completed", "response.incomplete"):
                reply: dict[str, Any] = event["response"]
                # What was read along is what counts: the whole response could say anything.
                for item in reply["output"]:
                    told = pieces.get(item["id"], "")
                    if item["type"] == "function_call":
                        item["arguments"] = told
                    elif item["content"]:
                        item["content"][0]["text"] = told
                return reply
        return None

    def said(self, reply: dict[str, Any], *, thinks: bool = True) -> Said:
        output = reply["output"]
        kept = tuple(i for i in output if thinks or i["type"] != "reasoning")
        calls = tuple(
            (i["call_id"], i["name"], i["arguments"])
            for i in output
            if i["type"] == "function_call"
        )
        thought = "".join(_text_of(i["content"]) for i in output if i["type"] == "reasoning")
        text = "".join(_text_of(i["content"]) for i in output if i["type"] == "message")
        finish = "tool_calls" if calls else "stop"
        finish = "length" if reply["status"] == "incomplete" else finish
        return Said(reply["id"], thought, text, calls, finish, kept)

    def turns_of(self, body: dict[str, Any]) -> list[Turn]:
        turns: list[Turn] = []
        if body.get("instructions") and not body.get("previous_response_id"):
            turns.append(Turn("system", body["instructions"]))
        text: list[str] = []
        calls: list[tuple[str, str]] = []
        ids: list[str] = []

        def close() -> None:
            if text or calls:
                turns.append(Turn("assistant", "".join(text), tuple(calls), tuple(ids)))
                text.clear()
                calls.clear()
                ids.clear()

        for item in body["input"]:
            kind = item.get("type", "message")
            if kind == "function_call":
                calls.append((item["name"], sorted_json(item["arguments"])))
                ids.append(item["call_id"])
            elif kind == "message" and item["role"] == "assistant":
                text.append(_text_of(item["content"]))
            elif kind != "reasoning":
                close()
                role = "tool" if kind == "function_call_output" else item["role"]
                turns.append(Turn(role, _text_of(item.get("output") or item.get("content"))))
        close()
        return turns


DIALECTS: Mapping[str, Dialect] = {
    "chat": Chat(), "anthropic": Anthropic(), "responses": Responses(),
}  # fmt: skip


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a request's path."""
    return next(one for one in DIALECTS.values() if path.endswith(one.path))


def reply_in(path: str, raw: str) -> dict[str, Any] | None:
    """Return the reply in an answer of 200, put together where it was streamed; None: broken."""
    if raw.startswith("{"):
        reply: dict[str, Any] = json.loads(raw)
        return reply
    return dialect_of(path).joined(list(events_of(raw)))
