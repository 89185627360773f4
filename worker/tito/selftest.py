"""Is this vocabulary, under this template, append-only? Tried before a worker takes work.

Owns the conversation that is tried and what must hold of it. Never repairs: what does not hold is
one `ConfigError` that says behind which message, and with which ids, it broke. Invariant: a
renderer that passes extends its own conversations by the ids that its template writes there.

The conversation has a system message, tools, parallel calls, reasoning, texts that vocabularies
split in surprising places, a user message behind an assistant turn and one behind a tool result.
It is tried with and without reasoning; what a template has no form for at all (tools, a system
message) is left out. Two things are told apart, behind every assistant turn:

    equal        the full rendering of the longer conversation begins with that of the shorter one,
                 and `extend` gives exactly the ids that it has more. Must hold where tool results
                 follow: there the template itself is append-only.
    append-only  the full rendering changes earlier turns (many templates drop earlier reasoning
                 when a user speaks). What the engine saw stays, and `extend` gives exactly the ids
                 with which the full rendering ends, behind the close of the turn. Allowed where a
                 user speaks.

Everywhere: the full rendering, encoded as one text, gives the same ids (tokenization in context
and out of context agree); extending over the window gives the same as over everything held; the
calls of the turn are read back; no control string of anybody's text becomes a control id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollstream.errors import ConfigError, MergeFault

from ..types import Renderer
from .compare import Difference, describe, differences
from .ids import as_ids

MAX_CONTROLS = 64
"""So many control strings of a vocabulary are tried as text."""


class Kind(StrEnum):
    """What was proven behind a turn."""

    EQUAL = "equal"
    APPEND_ONLY = "append-only"


@dataclass(frozen=True, slots=True)
class Checked:
    """One assistant turn and what follows it."""

    message: int
    """Index of the assistant message."""
    roles: tuple[str, ...]
    """Of the messages behind it."""
    reasoning: bool
    """The conversation had reasoning in it."""
    kind: Kind
    num_ids: int
    """Ids of the suffix."""


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
]
_TEXT = "naïve \t x = 12_345;\r\n\r\n日本語 🙂 it's"


def self_test(
    renderer: Renderer,
    name: str,
    *,
    thinking: bool = True,
    opens_reasoning: bool = False,
    parallel_calls: bool = True,
    rewrites_turns: bool = False,
    reads_calls: bool = True,
    system: bool = True,
    tools: bool = True,
) -> list[Checked]:
    """Return what was proven, or refuse a vocabulary and template that are not append-only.

    Args:
        renderer: to be tried; its attributes `control_ids` and `turn_ends`, where it has them,
            are the ids that no text may give, and those that may stand behind a turn.
        name: of the tokenizer, for the message.
        thinking: try it with reasoning, too.
        opens_reasoning: and only so: the generation prompt opens a block, so no turn is without.
        parallel_calls: the template takes several calls in one turn.
        rewrites_turns: the template is append-only nowhere; only suffixes can be compared.
        reads_calls: the calls that the template writes must be read back.
        system: the template takes a system message; the conversation has one.
        tools: the template takes calls and their results; without, the conversation has neither,
            and no specs.

    Raises:
        ConfigError: names the message behind which it broke, and the ids.
    """
    trial = _Trial(renderer, name, reads_calls, rewrites_turns, _TOOLS if tools else None)
    trial.texts()
    checked: list[Checked] = []
    for reasoning in (True,) if opens_reasoning else (True, False) if thinking else (False,):
        messages = _conversation(reasoning=reasoning, calls=2 if parallel_calls else 1)
        if not tools:
            messages = [_spoken(message) for message in messages if message["role"] != "tool"]
            messages = _alternating(messages)
        messages = messages if system else messages[1:]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for place, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            checked.append(trial.turn(messages, place, following, reasoning=reasoning))
    return checked


def _conversation(*, reasoning: bool, calls: int) -> list[dict[str, Any]]:
    number = iter(range(10_000, 10_100))

    def assistant(text: str, *words: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = f"Hm, {text.lower() or 'a word'} \n\nSo."
        if words:
            message["tool_calls"] = [
                {
                    "id": f"functions.look:{next(number)}",  # Kimi's template writes no name
                    "type": "function",
                    "function": {"name": "look", "arguments": {"word": word}},
                }
                for word in words
            ]
        return message

    def results(turn: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": text}
            for call, text in zip(turn["tool_calls"], texts, strict=False)
        ]

    first = assistant("I look.", *["né", "naïve"][:calls])
    second = assistant("", "日本")
    third = assistant("Once\nmore.", "🙂")
    return [
        {"role": "system", "content": "Answer briefly.\n"},
        {"role": "user", "content": "What does né mean? 🙂 It's 12_345."},
        first,
        *results(first, "born\n", " (male)"),
        second,
        *results(second, ""),
        assistant("It means “born”."),
        {"role": "user", "content": "Sure?\n\n"},
        third,
        *results(third, '{"a": [1, 2]}'),
        {"role": "user", "content": " Go on."},
    ]


def _spoken(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without calls."""
    plain = {key: said for key, said in message.items() if key != "tool_calls"}
    return plain | {"content": message["content"] or "日本"}


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a user between any two assistant turns: some templates insist."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if found and found[-1]["role"] == message["role"] == "assistant":
            found.append({"role": "user", "content": f"\n And {len(found)}?"})
        found.append(message)
    return found


class _Trial:
    """A renderer while it is tried."""

    def __init__(
        self,
        renderer: Renderer,
        name: str,
        reads_calls: bool,
        rewrites_turns: bool,
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self._renderer, self._name, self._reads_calls = renderer, name, reads_calls
        self._rewrites_turns, self._tools = rewrites_turns, tools
        self._stops = renderer.stop_token_ids
        self._ends = frozenset(getattr(renderer, "turn_ends", ())) | frozenset(self._stops)
        self._controls = frozenset(getattr(renderer, "control_ids", self._stops))

    def texts(self) -> None:
        """Try texts that anybody may write."""
        encode, decode = self._renderer.encode, self._renderer.decode
        controls = [decode(as_ids([number])) for number in sorted(self._controls)[:MAX_CONTROLS]]
        for text in (_TEXT, "".join(controls), *controls):
            ids = encode(text)
            found = sorted(self._controls.intersection(ids.tolist()))
            if found:
                raise ConfigError(
                    f"model.tokenizer: {self._name!r} reads {text!r:.80}, written by anybody, as "
                    f"control ids {found[:8]}"
                )
            if decode(ids) != text:
                raise ConfigError(
                    f"model.tokenizer: {self._name!r} does not decode to the text it encoded: "
                    f"{text!r:.80} became {decode(ids)!r:.80}"
                )

    def turn(
        self, messages: list[dict[str, Any]], place: int, following: int, *, reasoning: bool
    ) -> Checked:
        """Try the assistant turn at `place` and the messages up to `following` behind it."""
        try:
            held = self._renderer.render(messages[:place], self._tools).tolist()
            full = self._renderer.render(messages[:following], self._tools).tolist()
        except ValueError as error:
            raise self._refusal(messages, place, f"it cannot be rendered: {error}") from error
        new = messages[place + 1 : following]
        stop, suffix = self._suffix(messages, place, held, full, new)
        body = full[: len(full) - len(suffix)]
        kind = Kind.EQUAL if body[: len(held)] == held else Kind.APPEND_ONLY
        only_tools = all(message["role"] == "tool" for message in new)
        if kind is Kind.APPEND_ONLY and only_tools and not self._rewrites_turns:
            raise self._refusal(
                messages,
                place,
                "the rendering of an earlier part is not a prefix of a later one: "
                + describe(self._differences(held, full[: len(held)]), 1),
            )
        # What a model would have written; it ends by a stop token, whatever a template shows.
        fine = self._renderer.encode("Fine.").tolist()
        reply = [*(body[len(held) : -1] if kind is Kind.EQUAL else fine), stop]
        for seen in (held, _window(held, self._stops)):
            got = self._extended(messages, place, seen, reply, new)
            if got != suffix:
                raise self._refusal(
                    messages,
                    place,
                    "extending it gives other ids than rendering it whole: "
                    + describe(self._differences(suffix, got)),
                )
        self._in_context(messages, place, full)
        if kind is Kind.EQUAL and self._reads_calls:
            self._read_back(messages, place, reply, held)
        roles = tuple(message["role"] for message in new)
        return Checked(place, roles, reasoning, kind, len(suffix))

    def _suffix(
        self, messages: list[Any], place: int, held: list[int], full: list[int], new: list[Any]
    ) -> tuple[int, list[int]]:
        """Return the stop id that ends the turn in the template, and what follows it.

        Families end a turn by several ids; the right one is that with which `extend` gives the
        end of the full rendering, behind an id that ends a turn.
        """
        tried: list[tuple[int, list[int]]] = []
        for stop in self._stops:
            suffix = self._extended(messages, place, _window(held, self._stops), [stop], new)
            body = full[: len(full) - len(suffix)]
            end = body[-1] if body else -1
            if full[len(body) :] == suffix and (
                end == stop or (end in self._ends and end not in self._stops)
            ):
                return stop, suffix
            tried.append((stop, suffix))
        stop, suffix = tried[0]
        tail = full[-len(suffix) - 1 :]
        found = self._differences(tail, [stop, *suffix])
        raise self._refusal(
            messages,
            place,
            "extending it gives other ids than rendering it whole: " + describe(found),
        )

    def _extended(
        self, messages: list[Any], place: int, held: list[int], reply: list[int], new: list[Any]
    ) -> list[int]:
        try:
            ids = self._renderer.extend(as_ids(held), as_ids(reply), new, self._tools)
        except MergeFault as fault:
            raise self._refusal(messages, place, fault.message) from fault
        suffix: list[int] = ids.tolist()
        return suffix

    def _in_context(self, messages: list[Any], place: int, full: list[int]) -> None:
        whole = self._renderer.encode_raw(self._renderer.decode(as_ids(full))).tolist()
        if whole != full:
            raise self._refusal(
                messages,
                place,
                "the pieces of the rendering have other ids than the whole text: "
                + describe(self._differences(whole, full)),
            )

    def _read_back(
        self, messages: list[Any], place: int, reply: list[int], held: list[int]
    ) -> None:
        wanted = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in messages[place].get("tool_calls", ())
        ]
        tail = as_ids(_window(held, self._stops))
        found = self._renderer.parse(as_ids(reply), tail, self._tools).tool_calls
        got = [(call.name, call.arguments) for call in found if call.problem is None]
        if got != wanted or len(found) != len(wanted):
            problems = [call.problem_text for call in found if call.problem is not None]
            raise self._refusal(
                messages,
                place,
                f"its calls are read as {got}, expected {wanted}"
                + (f" ({'; '.join(problems)})" if problems else ""),
            )

    def _differences(self, expected: list[int], got: list[int]) -> list[Difference]:
        return differences(
            expected, got, special_ids=self._controls | self._ends, decode=self._renderer.decode
        )

    def _refusal(self, messages: list[Any], place: int, why: str) -> ConfigError:
        reasoning = "with" if "reasoning_content" in messages[place] else "without"
        return ConfigError(
            f"model.tokenizer: {self._name!r} cannot extend a conversation {reasoning} reasoning "
            f"behind message {place}: {why}; is it the tokenizer.json of the model that the "
            "engines serve, and model.renderer the model's chat format?"
        )


def _window(held: list[int], stops: Iterable[int]) -> list[int]:
    """Return the tail that a trajectory gives: from the last id that ended a turn on, or all."""
    known = frozenset(stops)
    last = next((i for i in range(len(held) - 1, -1, -1) if held[i] in known), 0)
    return held[last:]
