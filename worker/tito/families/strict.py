"""A renderer of the package `renderers`, held to one reading of what a model wrote.

Owns what the package's renderers do differently from each other, or not at all: what closes a turn
that was cut, system messages that come late, arguments that are no object. Never renders by
itself, never changes an id; where reasoning is, `worker.tito.reasoning` says. Invariant: an attempt
at a call is never lost; a suffix does not depend on what it follows.

Its methods are those of the package's protocol, so `worker.tito.backend` takes either.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rollstream.errors import ConfigError, MergeFault

from ..reasoning import Reasoning
from ..settled import Openings


@dataclass(frozen=True, slots=True)
class Rules:
    """What a family's renderer must be told, or be kept from."""

    close: str = ""
    """The token that closes an assistant turn; empty where the next message's role token does."""
    stand_in: str = ""
    """The stop token behind which the package writes the whole next message, if not `close`."""
    reasoning: tuple[str, str] | None = None
    """Markers of a reasoning block; found by id where the vocabulary has them, else as text."""
    attempt: str = ""
    """The token with which an attempt at calls begins, where the family has one."""
    behind_closer: bool = False
    """The parser starts inside reasoning, so it is given the closing marker first."""
    late_system: bool = True
    """A system message may stand anywhere."""
    parallel_calls: bool = True
    """A turn may hold several calls."""
    tagged: bool = False
    """Arguments are written one by one, so that they must be an object."""


class Strict:
    """The package's renderer `inner` under `rules`."""

    openings = Openings()
    """How calls may begin where no control token begins them."""

    def __init__(self, tokenizer: Any, inner: Any, rules: Rules) -> None:
        self._tokenizer, self._inner, self._rules = tokenizer, inner, rules
        self._stop_ids = frozenset(inner.get_stop_token_ids())
        self._close = tokenizer.token_id(rules.close) if rules.close else None
        self._attempt = tokenizer.token_id(rules.attempt) if rules.attempt else None
        closer = rules.reasoning[1] if rules.reasoning else ""
        self._closer = tokenizer.token_id(closer) if closer else None
        self.reasoning: Reasoning | None = None
        """Splits a reply; what is given to `parse_response` has no reasoning in it."""
        if rules.reasoning:
            self.reasoning = Reasoning(tokenizer, rules.reasoning, self._stop_ids)
        # A turn that ended by itself, for suffixes: they are the same behind any turn.
        end = tokenizer.token_id(rules.stand_in or rules.close)
        closed = [self._closer] if rules.behind_closer and self._closer is not None else []
        self._turn: list[int] = [*closed, end]

    def get_stop_token_ids(self) -> list[int]:
        """Return the ids that end an assistant turn."""
        return sorted(self._stop_ids)

    def render_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation.

        Raises:
            ValueError: something that the family's template cannot say; names the message.
        """
        ids: list[int] = self._inner.render_ids(
            self._checked(messages, start=True),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
        return ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
    ) -> SimpleNamespace | None:
        """Return everything held, what closes the turn, and the new messages; None for no way."""
        try:
            messages = self._checked(new_messages, start=False)
        except ValueError as error:
            raise MergeFault(f"cannot extend: {error}", detail="no_bridge") from None
        sampled = previous_completion_ids
        suffix = self._suffix(messages, sampled, tools)
        if suffix is None:
            return None
        closing: list[int] = []
        if not sampled or sampled[-1] not in self._stop_ids:
            closing = self.closing(sampled, previous_prompt_ids)
        elif self._close is None and suffix[:1] == sampled[-1:]:
            suffix = suffix[1:]  # the role token that the engine sampled is the next message's
        return SimpleNamespace(token_ids=[*previous_prompt_ids, *sampled, *closing, *suffix])

    def closing(self, sampled: list[int], held: list[int]) -> list[int]:
        """Return what is written behind a turn that did not close itself.

        Args:
            sampled: the reply.
            held: the tail of what the engine saw; says whether reasoning was open.
        """
        close = [] if self._close is None else [self._close]
        if self.reasoning is None or self._stop_ids.intersection(sampled):
            return close
        is_open = self.reasoning.split(sampled, held).is_open
        return [*self.reasoning.closing, *close] if is_open else close

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[Any] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> SimpleNamespace:
        """Return content and calls of a piece without reasoning."""
        end = next((i for i, n in enumerate(token_ids) if n in self._stop_ids), len(token_ids))
        content, calls = self._parse_piece(token_ids[:end], tools)
        return SimpleNamespace(
            content=content, reasoning_content=None, tool_calls=calls, reasoning_complete=True
        )

    def _parse_piece(self, ids: list[int], tools: list[Any] | None) -> tuple[str, list[Any]]:
        """Return the content and the calls; spans are of `ids`."""
        return self._read(self._inner, ids, tools)

    def _read(self, reader: Any, ids: list[int], tools: list[Any] | None) -> tuple[str, list[Any]]:
        lead = [self._closer] if self._rules.behind_closer and self._closer is not None else []
        parsed = reader.parse_response([*lead, *ids], tools=tools)
        for call in parsed.tool_calls:
            if call.token_span is not None:
                begin, end = call.token_span
                call.token_span = (begin - len(lead), end - len(lead))
        calls, content = list(parsed.tool_calls), parsed.content or ""
        for call in calls:
            if str(call.status) in ("ok", "unknown_tool"):
                self._judge(call, ids)
        attempt = _first(ids, self._attempt)
        if not calls and attempt < len(ids):
            raw = self._tokenizer.decode(ids[attempt + 1 :])
            calls = [lost_attempt(raw, (attempt, len(ids)))]
        if self._closer is not None and self._closer in ids[:attempt]:
            content = self._tokenizer.decode(ids[:attempt]).strip()  # it closes nothing: text
        return content, calls

    def _judge(self, call: Any, ids: list[int]) -> None:
        """Set another status on a call that the package read loosely; spans are of `ids`."""

    def _suffix(
        self, messages: list[dict[str, Any]], sampled: list[int], tools: list[Any] | None
    ) -> list[int] | None:
        """Return the ids of new messages and the generation prompt."""
        found = self._inner.bridge_to_next_turn(self._turn, self._turn, messages, tools=tools)
        if found is None:
            return None
        ids: list[int] = list(found.token_ids)
        before = self._turn * 2
        assert ids[: len(before)] == before
        return ids[len(before) :]

    def _checked(self, messages: list[dict[str, Any]], *, start: bool) -> list[dict[str, Any]]:
        """Return messages that the package renders without losing a piece."""
        checked: list[dict[str, Any]] = []
        for place, message in enumerate(messages):
            if message["role"] == "system" and not self._rules.late_system and (place or not start):
                raise ValueError(
                    f"message {place}: this family's template takes a system message only as the "
                    "first of all; write it as a user message"
                )
            calls = message.get("tool_calls") or []
            if len(calls) > 1 and not self._rules.parallel_calls:
                raise ValueError(
                    f"message {place}: this family's template takes one call per turn, "
                    f"not {len(calls)}"
                )
            if self._rules.tagged and calls:
                message = {**message, "tool_calls": [_with_object(call) for call in calls]}
            checked.append(message)
        return checked


def lost_attempt(raw: str, span: tuple[int, int] | None) -> SimpleNamespace:
    """Return an attempt in which the package's parser found no call."""
    return SimpleNamespace(
        raw=raw, name=None, arguments={}, token_span=span, status="malformed_structure", id=None
    )


def package(family: Any, tokenizer: Any) -> Any:
    """Return the package's renderer of a family as it is.

    Raises:
        ConfigError: the vocabulary lacks a token that the package looks up.
    """
    from ..backend import import_renderers

    kind = getattr(import_renderers(family.module), family.renderer)
    config = getattr(import_renderers("configs"), family.config)(**family.options)
    try:
        return kind(tokenizer, config)
    except AssertionError as error:
        raise ConfigError(
            f"model.tokenizer: {tokenizer.name_or_path!r} is no vocabulary of this family: {error}"
        ) from None


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments can be written one by one, with nothing left out."""
    function = call["function"]
    if isinstance(function["arguments"], dict):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def _first(ids: list[int], wanted: int | None) -> int:
    """Return the index of the first `wanted`, the length where there is none."""
    return next((i for i, number in enumerate(ids) if number == wanted), len(ids))
