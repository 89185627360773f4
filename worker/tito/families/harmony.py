"""Harmony, the format of gpt-oss, over a vocabulary that is at hand.

Owns the layout of messages. The package's renderer asks `openai-harmony` for it, which downloads
its own vocabulary when it starts; here only ids of the given one are used. Never touches the
network, never asks for today's date. Invariant: what anybody wrote is plain text in any message,
and a message begins and ends with the same ids wherever it stands.

    <|start|>HEADER<|message|>TEXT<|end|>      <|call|> closes a call, <|return|> a sampled answer

A turn may be several messages: reasoning (`analysis`), calls (`commentary`, to a function), the
answer (`final`). The generation prompt is `<|start|>assistant`, as engines write it, so that the
model chooses the channel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ..calls import strict_json
from ..settled import CONTENT, REASONING, Decoding, Kind, Settled, Stripped
from .schema import tools_text
from .strict import lost_attempt

_IDENTITY = (
    "You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: {date}\n\nReasoning: {effort}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
_CALLS_CHANNEL = "\nCalls to these tools must go to the commentary channel: 'functions'."
_FUNCTIONS = "functions."


class Harmony:
    """Renders and parses Harmony; the methods are those of the package's protocol."""

    def __init__(self, tokenizer: Any, *, effort: str, date: str) -> None:
        """Look the control tokens up.

        Args:
            tokenizer: our `Tokenizer`.
            effort: `low`, `medium` or `high`, written into the system message.
            date: of the system message; fixed, or else a prompt would change at midnight.
        """
        self._tokenizer = tokenizer
        self._identity = _IDENTITY.format(date=date, effort=effort)
        names = ("start", "end", "return", "call", "channel", "message")
        self._start, self._end, self._return, self._call, self._channel, self._message = (
            tokenizer.token_id(f"<|{name}|>") for name in names
        )

    def get_stop_token_ids(self) -> list[int]:
        """Return the ids that end an assistant turn."""
        return [self._return, self._call]

    def settler(self) -> Growing:
        """Return what reads a turn while it is sampled."""
        return Growing(
            self._tokenizer,
            start=self._start,
            message=self._message,
            end=self._end,
            stops=self.get_stop_token_ids(),
        )

    def render_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation; a leading system message is the developer's."""
        instructions, rest = "", messages
        if messages and messages[0]["role"] == "system":
            instructions, rest = messages[0]["content"], messages[1:]
        identity = self._identity + (_CALLS_CHANNEL if tools else "")
        ids = self._block("system", identity)
        if instructions or tools:
            ids += self._block("developer", self._developer(instructions, tools))
        ids += self._blocks(rest, called=[])
        return [*ids, *self._generation_prompt()] if add_generation_prompt else ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
    ) -> SimpleNamespace:
        """Return everything held, what closes the turn, and the new messages."""
        sampled = previous_completion_ids
        called = [] if self._named(new_messages) else self._called(sampled)
        suffix = [*self._blocks(new_messages, called=called), *self._generation_prompt()]
        closing: list[int] = []
        if not sampled or sampled[-1] not in (self._end, self._return, self._call):
            closing = self.closing(sampled, previous_prompt_ids)
        return SimpleNamespace(token_ids=[*previous_prompt_ids, *sampled, *closing, *suffix])

    def closing(self, sampled: list[int], held: list[int]) -> list[int]:
        """Return what is written behind a turn that did not close itself."""
        ends = (self._end, self._return, self._call)
        last = max((_last(sampled, end) for end in ends), default=-1)
        begun = sampled[last + 1 :]
        if not begun and sampled:
            return []  # cut between two messages
        closing: list[int] = []
        in_header = self._message not in begun[_last(begun, self._start) + 1 :]
        if in_header and (last < 0 or self._start in begun):
            # Cut inside a header, or before it: a message without a header would be none.
            if self._channel not in begun:
                closing = [self._channel, *self._text("final")]
            closing.append(self._message)
        return [*closing, self._end]

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> SimpleNamespace:
        """Return what a turn says: reasoning, content, calls."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[SimpleNamespace] = []
        for start, header, text, end_id, end in self._messages(token_ids):
            channel, recipient = _read(header)
            if recipient:
                raw = f"to={recipient} {text}"
                calls.append(self._as_call(recipient, text, raw, end_id, (start, end)))
            elif channel == "analysis":
                reasoning.append(text)
            else:
                content.append(text)
        return SimpleNamespace(
            content="".join(content).strip(),
            reasoning_content="\n".join(reasoning).strip() or None,
            tool_calls=calls,
            reasoning_complete=True,
        )

    def _as_call(
        self, recipient: str, text: str, raw: str, end_id: int | None, span: tuple[int, int]
    ) -> SimpleNamespace:
        if not recipient.startswith(_FUNCTIONS):
            return lost_attempt(raw, span)
        name = recipient[len(_FUNCTIONS) :]
        status, arguments = "ok", _json_or_text(text)
        if end_id != self._call:
            status = "unclosed_block"
        elif not name:
            status = "missing_name"
        elif isinstance(arguments, str):
            status = "invalid_json"
        return SimpleNamespace(
            raw=raw, name=name, arguments=arguments, token_span=span, status=status, id=None
        )

    def _messages(self, ids: list[int]) -> list[tuple[int, str, str, int | None, int]]:
        """Return (start, header, text, end id or None, end) of each message of a reply.

        The reply begins inside a message, whose header's role the prompt wrote.
        """
        found: list[tuple[int, str, str, int | None, int]] = []
        place = 0
        ends = (self._end, self._return, self._call)
        while place < len(ids):
            end = next(
                (i for i in range(place, len(ids)) if ids[i] in ends or ids[i] == self._start),
                len(ids),
            )
            if end < len(ids) and ids[end] == self._start and self._reasons(ids[place:end]):
                # Reasoning ends by an end; what begins inside it is a draft.
                end = next((i for i in range(end, len(ids)) if ids[i] in ends), len(ids))
            block = ids[place:end]
            # A header that never ended has no text; it is shown as content, not lost.
            body = block.index(self._message) if self._message in block else -1
            header = self._tokenizer.decode(block[:body]) if body >= 0 else ""
            text = self._tokenizer.decode(block[body + 1 :])
            closed = end < len(ids) and ids[end] in ends
            behind = end + 1 if end < len(ids) else end
            if block or closed:
                found.append((place, header, text, ids[end] if closed else None, behind))
            place = behind
            if closed and place < len(ids) and ids[place] == self._start:
                place += 1
        return found

    def _reasons(self, block: list[int]) -> bool:
        """Return whether a message is reasoning."""
        if self._message not in block:
            return False
        channel, recipient = _read(self._tokenizer.decode(block[: block.index(self._message)]))
        return channel == "analysis" and not recipient

    def _blocks(self, messages: list[dict[str, Any]], called: list[str]) -> list[int]:
        ids: list[int] = []
        names = list(called)
        for message in messages:
            role = message["role"]
            if role == "assistant":
                calls = message.get("tool_calls") or []
                names = [call["function"]["name"] for call in calls]
                ids += self._turn(message, calls)
            elif role == "tool":
                name = message.get("name") or (names.pop(0) if names else "unknown")
                header = f"{_function(name)} to=assistant"
                ids += self._block(header, message["content"], channel="commentary")
            elif role == "system":
                ids += self._block("developer", self._developer(message["content"], None))
            else:
                ids += self._block("user", message["content"])
        return ids

    def _turn(self, message: dict[str, Any], calls: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = []
        reasoning, content = message.get("reasoning_content"), message["content"]
        if reasoning:
            ids += self._block("assistant", reasoning, channel="analysis")
        if content or not (calls or reasoning):
            # Beside calls it is what the user is told meanwhile; alone it is the answer.
            channel = "commentary" if calls else "final"
            ids += self._block("assistant", content, channel=channel)
        for call in calls:
            function = call["function"]
            header = f"assistant to={_function(function['name'])}"
            text = function["arguments"]
            if not isinstance(text, str):
                text = json.dumps(text, ensure_ascii=False)
            ids += self._block(header, text, channel="commentary", end=self._call)
        return ids

    def _block(
        self, header: str, text: str, *, channel: str = "", end: int | None = None
    ) -> list[int]:
        ids = [self._start, *self._text(header)]
        if channel:
            ids += [self._channel, *self._text(channel)]
        return [*ids, self._message, *self._text(text), self._end if end is None else end]

    def _generation_prompt(self) -> list[int]:
        return [self._start, *self._text("assistant")]

    def _text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_plain(self._tokenizer.unescape(text))
        return ids

    @staticmethod
    def _developer(instructions: str, tools: list[Any] | None) -> str:
        parts = [f"# Instructions\n\n{instructions}"] if instructions else []
        if tools:
            parts.append(tools_text(tools))
        return "\n\n".join(parts)

    @staticmethod
    def _named(messages: list[dict[str, Any]]) -> bool:
        return all(message.get("name") for message in messages if message["role"] == "tool")

    def _called(self, sampled: list[int]) -> list[str]:
        """Return the functions that a reply called, for results that do not say whose they are."""
        return [call.name for call in self.parse_response(sampled).tool_calls if call.name]


class Growing:
    """A turn while it is sampled: the text of reasoning and of answers, as it comes."""

    def __init__(
        self, tokenizer: Any, *, start: int, message: int, end: int, stops: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._start, self._message, self._end, self._stops = start, message, end, frozenset(stops)
        self._marks = frozenset((start, message, end, *stops))
        self._header: list[int] | None = []
        """None inside a message's text."""
        self._kind: Kind | None = CONTENT
        """Of that text; None is a call."""
        self._decoding = Decoding(tokenizer)
        self._said: dict[Kind, Stripped] = {CONTENT: Stripped(""), REASONING: Stripped("")}
        self._has_thought = self._has_ended = False

    def feed(self, ids: Sequence[int]) -> list[Settled]:
        """Return what the next sampled ids make certain, in order."""
        said: list[Settled] = []
        begin = 0
        for place, number in enumerate(ids):
            if self._has_ended:
                return said
            if number not in self._marks or not self._is_mark(number):
                continue
            self._text(ids[begin:place], said)
            begin = place + 1
            if number in self._stops:
                self._has_ended = True
            elif number == self._message:
                self._begin()
            else:
                self._finish(said)
        if not self._has_ended:
            self._text(ids[begin:], said)
        return said

    def _is_mark(self, number: int) -> bool:
        if number in self._stops or number == self._end:
            return True
        if self._header is not None:
            return True
        # In a text a second mark of its beginning is text; reasoning ends by an end alone.
        return number == self._start and self._kind != REASONING

    def _text(self, ids: Sequence[int], said: list[Settled]) -> None:
        if self._header is not None:
            self._header += ids
        elif self._kind is not None and ids:
            self._say(self._decoding.add(ids), said)

    def _begin(self) -> None:
        channel, recipient = _read(self._tokenizer.decode(self._header))
        self._header = None
        self._kind = None if recipient else REASONING if channel == "analysis" else CONTENT
        if self._kind == REASONING:
            if self._has_thought:
                self._said[REASONING].add("\n")
            self._has_thought = True

    def _finish(self, said: list[Settled]) -> None:
        """End a message, or what only began as one: that is shown as content."""
        if self._header is not None:
            self._kind = CONTENT
            self._say(self._decoding.add(self._header), said)
        if self._kind is not None:
            self._say(self._decoding.end(), said)
        self._header = []

    def _say(self, text: str, said: list[Settled]) -> None:
        assert self._kind is not None
        certain = self._said[self._kind].add(text)
        if certain:
            said.append((self._kind, certain))


def _read(header: str) -> tuple[str, str]:
    """Return channel and recipient of a header."""
    before, _, behind = header.partition("<|channel|>")
    words = behind.split()
    channel = words[0] if words and not words[0].startswith("to=") else ""
    recipient = next((word[3:] for word in [*before.split(), *words] if word.startswith("to=")), "")
    return channel, recipient.partition("<|constrain|>")[0]


def _function(name: str) -> str:
    return name if name.startswith(_FUNCTIONS) else _FUNCTIONS + name


def _json_or_text(text: str) -> Any:
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return text


def _last(ids: list[int], wanted: int) -> int:
    for place in range(len(ids) - 1, -1, -1):
        if ids[place] == wanted:
            return place
    return -1
