"""Replies under a chat template, read from their ids.

Owns where calls stand for formats that no family of ours describes; what is a good call is decided
in `calls`, what is reasoning in `reasoning`. Never renders, never raises for what a model wrote.
Invariant: a call counts only outside reasoning, finished or not.

`model.tool_parser` names how calls are spelled; without one, calls are text. `model.
reasoning_parser` names the reasoning markers; without one they are the vocabulary's own
`<think>` and `</think>`, where each is one token. Markers that are tokens are looked for as ids, so
text that only looks like one is text; others are looked for in the text of the ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rollstream.errors import ConfigError
from rollstream.sample import Message, TokenIds

from ...types import AssistantMessage, ProblemKind, ToolCall
from ..backend import import_renderers
from ..calls import MAX_LATER_CLOSES, closes_behind, judge_call, judge_parsed, new_call_id
from ..ids import as_ids
from ..pieces import Joins
from ..reasoning import Reasoning, joined
from ..settled import Marked, Nothing, Openings, Settler
from ..tokenizer import Tokenizer
from .boundaries import Boundary

JSON_BLOCK = ("<tool_call>", "</tool_call>")
"""Hermes, Qwen3: one object with name and arguments between two markers."""
PACKAGE_PARSERS = ("qwen3.5", "glm", "deepseek-v3")
"""Spellings that the package `renderers` reads."""
TOOL_PARSERS = ("qwen3", "hermes", *PACKAGE_PARSERS)
REASONING_MARKERS = {"think": ("<think>", "</think>")}
NO_REASONING = "none"


class ReplyParser:
    """Parses the replies of one template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        boundary: Boundary,
        tool_parser: str = "",
        reasoning_parser: str = "",
    ) -> None:
        """Bind the spellings.

        Args:
            tokenizer: of the vocabulary.
            boundary: says which ids end a turn.
            tool_parser: one of `TOOL_PARSERS`, or empty.
            reasoning_parser: a key of `REASONING_MARKERS`, `none`, or empty.

        Raises:
            ConfigError: an unknown name, or one whose tokens the vocabulary lacks.
        """
        self._tokenizer, self._boundary = tokenizer, boundary
        self._tool_parser = _known("model.tool_parser", tool_parser, TOOL_PARSERS)
        names = (*REASONING_MARKERS, NO_REASONING)
        reasoning = _known("model.reasoning_parser", reasoning_parser, names)
        self._reasoning: Reasoning | None = None
        if reasoning != NO_REASONING:
            found = Reasoning(tokenizer, REASONING_MARKERS[reasoning or "think"], boundary.end_ids)
            # Without a name, only tokens are markers: text may be about them.
            self._reasoning = found if found.atomic or reasoning else None
        self._call_ids = self._atomic(JSON_BLOCK)
        self._package: Any = None
        if self._tool_parser in PACKAGE_PARSERS:
            self._package = import_renderers("parsers").get_tool_parser(tool_parser, tokenizer)
            opener = "<｜tool▁calls▁begin｜>" if tool_parser == "deepseek-v3" else JSON_BLOCK[0]
            if tokenizer.token_id(opener) is None:
                raise ConfigError(
                    f"model.tool_parser: {tool_parser!r} needs {opener} as one token, which the "
                    "vocabulary lacks"
                )

    @property
    def markup(self) -> frozenset[str]:
        """Control strings that an assistant's own text may hold."""
        found: set[str] = set()
        if self._reasoning is not None:
            found.update(REASONING_MARKERS["think"])
        if self._tool_parser:
            found.update(JSON_BLOCK)
        if self._tool_parser == "glm":
            found.update(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"])
        if self._tool_parser == "deepseek-v3":
            found.update(token for token in self._tokenizer.controls if "tool▁" in token)
        return frozenset(found)

    @property
    def reads_calls(self) -> bool:
        """Whether calls are read at all."""
        return bool(self._tool_parser)

    def parse(
        self, completion: TokenIds, prompt_tail: TokenIds, tools: Sequence[Message] | None
    ) -> AssistantMessage:
        """Return the message that a reply is; see `worker.types.Renderer`."""
        sampled = completion.tolist()
        stops = frozenset(self._boundary.stop_ids)
        end = next((i for i, number in enumerate(sampled) if number in stops), len(sampled))
        closes = self._boundary.close_ids or tuple(self._boundary.opener_ids)
        abnormal = end == len(sampled) or sampled[end] not in closes
        ids = sampled[:end]
        pieces, reasoning = [ids], None
        if self._reasoning is not None:
            split = self._reasoning.split(ids, prompt_tail.tolist())
            pieces, reasoning = split.pieces, split.reasoning
        contents: list[str] = []
        calls: list[ToolCall] = []
        for piece in pieces:
            content, found = self._calls(piece, tools)
            if not calls:
                contents.append(content)
            calls += found
        num_reasoning = len(ids) - sum(map(len, pieces))
        return AssistantMessage(joined(contents), reasoning, calls, abnormal, num_reasoning)

    def settler(self, window: TokenIds) -> Settler:
        """Return what reads a reply while it is sampled; see `settled`."""
        if self._tokenizer.joins is Joins.UNKNOWN:
            return Nothing()
        openings = Openings(texts=JSON_BLOCK[:1] if self._reads_text else ())
        stops = self._boundary.stop_ids
        return Marked(self._tokenizer, stops, self._reasoning, window.tolist(), openings)

    @property
    def _reads_text(self) -> bool:
        """Whether calls are looked for in the text of the ids."""
        return self.reads_calls and self._package is None and self._call_ids is None

    def unfinished(self, sampled: Sequence[int], window: Sequence[int]) -> list[int]:
        """Return the closing marker, as ids, where a reply was cut inside its reasoning."""
        if self._reasoning is None or not self._reasoning.split(list(sampled), window).is_open:
            return []
        return self._reasoning.closing

    def _calls(self, ids: list[int], tools: Sequence[Message] | None) -> tuple[str, list[ToolCall]]:
        """Return the text before the calls, and the calls."""
        if not self._tool_parser:
            return self._decode(ids), []
        if self._package is not None:
            return self._package_calls(ids, tools)
        if self._call_ids is None:
            return _text_calls(self._decode(ids))
        return self._id_calls(ids, *self._call_ids)

    def _package_calls(
        self, ids: list[int], tools: Sequence[Message] | None
    ) -> tuple[str, list[ToolCall]]:
        try:
            content, found = self._package.extract(ids)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            text = self._decode(ids)
            call = ToolCall(new_call_id(), "", {}, text, ProblemKind.INVALID_JSON, str(error))
            return text, [call]
        calls = [
            judge_parsed(
                block.raw, name=block.name, arguments=block.arguments, status=str(block.status),
                tools=tools,
            )
            for block in found
        ]  # fmt: skip
        spans = Counter(block.token_span for block in found)
        for call, block in zip(calls, found, strict=True):
            if block.token_span is not None and spans[block.token_span] == 1:
                text = self._decode(ids[slice(*block.token_span)])
                call.written = text if call.raw in text else ""
        return self._decode(content), calls

    def _id_calls(self, ids: list[int], opener: int, closer: int) -> tuple[str, list[ToolCall]]:
        calls: list[ToolCall] = []
        first = place = _index(ids, opener, 0)
        while place < len(ids):
            start = place + 1
            ends = closes_behind(ids, start, closer)

            def between(end: int | None, start: int = start) -> str:
                return self._decode(ids[start:end])

            call, end = _first_that_reads(between, ends)
            call.written = self._decode(ids[place : len(ids) if end is None else end + 1])
            calls.append(call)
            place = len(ids) if end is None else _index(ids, opener, end + 1)
        return self._decode(ids[:first]), calls

    def _atomic(self, markers: tuple[str, str] | None) -> tuple[int, int] | None:
        ids = [self._tokenizer.token_id(marker) for marker in markers or ()]
        if len(ids) != 2 or ids[0] is None or ids[1] is None:
            return None
        return ids[0], ids[1]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(as_ids(ids).tolist()) if ids else ""


def _text_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text before the calls, and the calls, where their markers are no tokens."""
    opener, closer = JSON_BLOCK
    calls: list[ToolCall] = []
    first = place = text.find(opener)
    while place >= 0:
        start = place + len(opener)
        ends: list[int] = []
        at = start
        while len(ends) < MAX_LATER_CLOSES and (at := text.find(closer, at)) >= 0:
            ends.append(at)
            at += len(closer)

        def between(end: int | None, start: int = start) -> str:
            return text[start:end]

        call, end = _first_that_reads(between, ends)
        call.written = text[place : None if end is None else end + len(closer)]
        calls.append(call)
        place = -1 if end is None else text.find(opener, end + len(closer))
    return text if first < 0 else text[:first], calls


def _first_that_reads(
    between: Callable[[int | None], str], ends: list[int]
) -> tuple[ToolCall, int | None]:
    """Return the call between an opening marker and the first closing one that makes it JSON.

    A closing marker may stand inside a string argument. Where none makes it JSON, the first closes.

    Args:
        between: the text from the opener to a place; None is all that follows.
        ends: places of closing markers.

    Returns:
        The call, and the place of the marker that closed it, None for none.
    """
    if not ends:
        return judge_call(between(None).strip(), closed=False), None
    first = judge_call(between(ends[0]).strip(), closed=True)
    if first.problem is ProblemKind.INVALID_JSON:
        for end in ends[1:]:
            call = judge_call(between(end).strip(), closed=True)
            if call.problem is not ProblemKind.INVALID_JSON:
                return call, end
    return first, ends[0]


def _index(ids: list[int], wanted: int, start: int) -> int:
    try:
        return ids.index(wanted, start)
    except ValueError:
        return len(ids)


def _known(setting: str, name: str, known: Sequence[str]) -> str:
    if name and name not in known:
        raise ConfigError(f"{setting}: unknown parser {name!r}; known: {', '.join(known)}")
    return name
