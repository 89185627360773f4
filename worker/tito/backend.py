"""The backend over the package `renderers`: one class for every family it covers.

Owns what `renderers` does not promise: escaping, our own assertion that a bridge kept what the
engine sampled, the endings a model really produces, and calls as data. Never renders by itself.
Invariant: `extend` returns a suffix; what was held before it is never changed, trimmed or
re-encoded.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from rollstream.errors import MergeFault
from rollstream.sample import Message, TokenIds

from ..types import AssistantMessage, ProblemKind, ToolCall
from .calls import closes_behind, judge_call, judge_parsed, new_call_id
from .families import CallForm, Family
from .ids import as_ids
from .messages import normalize_messages
from .pieces import Joins
from .reasoning import Reasoning, Split, joined
from .renderer import VocabularyRenderer
from .settled import Marked, Nothing, Openings, Settler
from .tokenizer import Tokenizer

_INVOKE = re.compile(r"<invoke .*?</invoke>", re.DOTALL)
_TEMPLATE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What the package raises for messages or replies that its authors did not think of."""


class RenderersBackend(VocabularyRenderer[list[dict[str, Any]]]):
    """A `worker.types.Renderer` for one family and one vocabulary."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        inner: Any,
        close: int | None,
        reasoning: tuple[int, int] | None = None,
        *,
        closes: Iterable[int] = (),
        stand_in: int | None = None,
        markup: Iterable[str] = (),
        form: CallForm = CallForm.JSON_BLOCK,
        name: str = "",
        shows_tools: bool = True,
    ) -> None:
        """Wrap a renderer of the package's protocol.

        Args:
            tokenizer: the one that `inner` encodes with.
            inner: has `render_ids`, `bridge_to_next_turn`, `parse_response`, `get_stop_token_ids`;
                and `closing(sampled, held)` where it knows itself what closes a turn.
            close: the id that is written behind a turn that did not close itself; None where the
                next message's role id does it.
            reasoning: ids that open and close a reasoning block, where the family has them.
            closes: ids that end a turn as the template means it; `close` where there are none.
            stand_in: the id behind which `inner` leaves nothing of the next message out; `close`
                where it is None.
            markup: control strings that stay whole in the content of an assistant message.
            form: how calls are read.
            name: of the family.
            shows_tools: the template has a place for tool specs.
        """
        super().__init__(tokenizer, list)
        self.name = name
        self.shows_tools = shows_tools
        """Whether a model is told of its tools."""
        self._inner = inner
        self._stop_ids = tuple(int(number) for number in inner.get_stop_token_ids())
        self._close = [] if close is None else [close]
        self._closes = frozenset(closes) or frozenset(self._close)
        # A turn that is nothing but its end: what follows a closed turn is the same for all turns.
        self._stand_in = self._close if stand_in is None else [stand_in]
        # A renderer of ours says itself how it spells reasoning.
        self._reasoning: Reasoning | None = getattr(inner, "reasoning", None)
        if self._reasoning is None and reasoning is not None:
            opener, closer = (tokenizer.decode([number]) for number in reasoning)
            self._reasoning = Reasoning(tokenizer, (opener, closer), self._stop_ids)
        self._markup = frozenset(markup)
        self._form = form

    @classmethod
    def of_family(cls, tokenizer: Tokenizer, family: Family, name: str = "") -> RenderersBackend:
        """Return the renderer of a family over a vocabulary that has the family's ids."""
        if family.build is not None:
            inner = family.build(tokenizer, family)
        else:
            kind = getattr(import_renderers(family.module), family.renderer)
            config = getattr(import_renderers("configs"), family.config)(**family.options)
            inner = kind(tokenizer, config)

        def number(token: str) -> int:
            found = tokenizer.token_id(token)
            assert found is not None, f"the vocabulary was checked to have {token}"
            return found

        opener, closer = family.reasoning or ("", "")
        return cls(
            tokenizer,
            inner,
            number(family.close) if family.close else None,
            (number(opener), number(closer)) if family.reasoning else None,
            closes=[number(token) for token in family.closes],
            stand_in=number(family.stand_in) if family.stand_in else None,
            markup=(*family.markup, *(family.reasoning or ())),
            form=family.call_form,
            name=name,
            shows_tools=family.shows_tools,
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        return self._stop_ids

    @property
    def turn_ends(self) -> frozenset[int]:
        """Ids that may stand behind an assistant turn in the template."""
        return self._closes | frozenset(self._close)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> TokenIds:
        """Return the prompt ids of a conversation, generation prompt included.

        Raises:
            ValueError: no messages; one that has no text form or that the template refuses where
                it stands; a tool that is no function. Names role and index.
        """
        if not messages:
            raise ValueError("a prompt needs at least one message")
        plain, specs = self._normal(messages), self._specs_of(tools)
        try:
            return as_ids(self._inner.render_ids(plain, tools=specs, add_generation_prompt=True))
        except _TEMPLATE_ERRORS as error:
            raise ValueError(self._refused(plain, specs, error)) from error

    def extend(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> TokenIds:
        """Return only the ids to append behind `completion` for the next request.

        Whatever the reply ended with stays. Where it is not one of the template's closes, a close
        is part of what is returned (nothing, where the next message's role id closes a turn); ids
        sampled behind the close that the template would write there anyway (a newline) are not
        written twice.

        Raises:
            MergeFault: the messages cannot follow here; `detail` is one of `no_messages`,
                `bad_message`, `bad_tools`, `assistant_message`, `no_bridge`, `prefix`.
        """
        messages, specs = self._extension(new_messages, tools, self._normal)
        held, sampled = window.tolist(), completion.tolist()
        closed = _last_index(sampled, self._closes)
        if closed >= 0:
            end = closed + 1
            suffix = self._bridge(held, sampled[:end], messages, specs)
            if suffix is None:  # the package leaves a turn alone that closed inside its reasoning
                suffix = self._behind(sampled[closed], messages, specs)
            behind = sampled[end:]
            if suffix[: len(behind)] == behind:
                return as_ids(suffix[len(behind) :])
        # Cut, ended by another stop id, or gone on behind the close: all of it stays.
        closing = self._closing(sampled, held)
        return as_ids([*closing, *self._behind(self._stand_in[0], messages, specs)])

    def parse(
        self,
        completion: TokenIds,
        prompt_tail: TokenIds,
        tools: Sequence[Message] | None = None,
    ) -> AssistantMessage:
        """Parse one reply from its ids alone; never raises for what a model wrote.

        A call counts only outside reasoning: drafts in a block, finished or not, are reasoning,
        wherever in the reply the block begins.
        """
        sampled, tail = completion.tolist(), prompt_tail.tolist()
        stop = next((i for i, number in enumerate(sampled) if number in self._stop_ids), None)
        abnormal = stop is None or sampled[stop] not in self._closes
        ids = sampled[:stop]
        split = Split(None, False, [ids])
        if self._reasoning is not None:
            split = self._reasoning.split(ids, tail)
        # With the stop id: where several end a turn, it says what the turn was.
        end = [] if stop is None else [sampled[stop]]
        contents: list[str] = []
        thoughts = [] if split.reasoning is None else [split.reasoning]
        calls: list[ToolCall] = []
        for piece in split.pieces:
            # The tail says whether reasoning is open, which a piece never is.
            before = tail if self._reasoning is None else []
            said = self._parse_piece(piece, end, before, tools)
            if not calls:
                contents.append(said.content)
            calls += said.tool_calls
            thoughts += [] if said.reasoning is None else [said.reasoning]
        reasoning = joined(thoughts) if thoughts else None
        # Where the inner parser finds reasoning in a piece, its ids are not known.
        is_known = len(thoughts) == (split.reasoning is not None)
        num = len(ids) - sum(map(len, split.pieces)) if is_known else None
        return AssistantMessage(joined(contents), reasoning, calls, abnormal, num)

    def settler(self, window: TokenIds) -> Settler:
        """Return what reads a reply while it is sampled, behind `window`."""
        if self.tokenizer.joins is Joins.UNKNOWN:
            return Nothing()
        own = getattr(self._inner, "settler", None)
        if own is not None:
            settler: Settler = own()
            return settler
        openings: Openings | None = getattr(self._inner, "openings", None)
        return Marked(self.tokenizer, self._stop_ids, self._reasoning, window.tolist(), openings)

    def _parse_piece(
        self, ids: list[int], end: list[int], tail: list[int], tools: Sequence[Message] | None
    ) -> AssistantMessage:
        """Parse what is no reasoning."""
        try:
            parsed = self._inner.parse_response([*ids, *end], prompt_ids=tail, tools=_specs(tools))
        except _TEMPLATE_ERRORS as error:
            # Numbers of thousands of digits, or brackets of thousands of levels.
            text = self.decode(as_ids(ids))
            call = ToolCall(new_call_id(), "", {}, text, ProblemKind.INVALID_JSON, str(error))
            return AssistantMessage(text, None, [call], False)
        if parsed.reasoning_complete is False:
            return AssistantMessage("", parsed.reasoning_content or "", [], False)
        if self._form is CallForm.JSON_BLOCK:
            calls = self._judged(parsed.tool_calls, ids)
        else:
            calls = [
                judge_parsed(
                    block.raw, name=block.name, arguments=block.arguments,
                    status=str(block.status), call_id=block.id,
                )
                for block in parsed.tool_calls
            ]  # fmt: skip
            self._write_down(calls, [block.token_span for block in parsed.tool_calls], ids)
        return AssistantMessage(parsed.content, parsed.reasoning_content, calls, False)

    def _judged(self, found: Sequence[Any], ids: list[int]) -> list[ToolCall]:
        """Return what the parser found as calls, each block as long as its JSON needs.

        The closing marker inside a string argument is the same id as the one that closes the
        block, so a block that is no JSON may go on to a later marker.
        """
        calls: list[ToolCall] = []
        behind = 0
        for block in found:
            start, end = block.token_span or (behind, behind)
            if start < behind:
                continue  # part of the block before it
            call = judge_call(block.raw, closed=block.status != "unclosed_block")
            behind = end
            if call.problem is ProblemKind.INVALID_JSON and start < end:
                for later in closes_behind(ids, end, ids[end - 1]):
                    longer = judge_call(self.decode(as_ids(ids[start + 1 : later])), closed=True)
                    if longer.problem is not ProblemKind.INVALID_JSON:
                        call, behind = longer, later + 1
                        break
            call.written = self._written(ids, (start, behind), call.raw)
            calls.append(call)
        return calls

    def _write_down(
        self, calls: list[ToolCall], spans: list[tuple[int, int] | None], ids: list[int]
    ) -> None:
        """Say of each call what the model wrote, where its place is known."""
        shared = Counter(spans)
        sections: dict[tuple[int, int] | None, list[str]] = {}
        for call, span in zip(calls, spans, strict=True):
            if shared[span] == 1:
                call.written = self._written(ids, span, call.raw)
                continue
            # A section with several calls is the raw text of each of them.
            if span not in sections:
                parts = _INVOKE.findall(call.raw)
                sections[span] = parts[::-1] if len(parts) == shared[span] else []
            if sections[span]:
                call.written = sections[span].pop()

    def _written(self, ids: list[int], span: tuple[int, int] | None, raw: str) -> str:
        """Return the text of a block with its markers; "" where its place is not known."""
        text = "" if span is None else self.decode(as_ids(ids[span[0] : span[1]]))
        return text if raw in text else ""

    def _normal(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return normalize_messages(messages, self.tokenizer, self._markup)

    def _bridge(
        self,
        held: list[int],
        sampled: list[int],
        messages: list[dict[str, Any]],
        specs: list[dict[str, Any]] | None,
    ) -> list[int] | None:
        """Return what `inner` appends, None where it appends nothing here."""
        try:
            found = self._inner.bridge_to_next_turn(held, sampled, messages, tools=specs)
        except _TEMPLATE_ERRORS as error:
            raise MergeFault(f"cannot extend: {error!r}", detail="no_bridge") from error
        if found is None:
            return None
        ids: list[int] = found.token_ids
        before = len(held) + len(sampled)
        if ids[: len(held)] != held or ids[len(held) : before] != sampled:
            raise MergeFault(
                f"the bridge changed what was held: {_difference(ids, held + sampled)}",
                detail="prefix",
            )
        return ids[before:]

    def _behind(
        self, end: int, messages: list[dict[str, Any]], specs: list[dict[str, Any]] | None
    ) -> list[int]:
        """Return what follows a turn that `end` closed, whatever the turn was."""
        suffix = self._bridge([end], [end], messages, specs)
        if suffix is not None:
            return suffix
        counts = range(1, len(messages))
        refused = (n for n in counts if self._bridge([end], [end], messages[:n], specs) is None)
        place = next(refused, len(messages)) - 1
        raise MergeFault(
            f"the template of {self.name or 'this family'} does not take message {place}, of role "
            f"{messages[place]['role']!r}, where it stands",
            detail="no_bridge",
        )

    def _closing(self, sampled: list[int], held: list[int]) -> list[int]:
        """Return what closes a turn that has no close, or none at its end."""
        own = getattr(self._inner, "closing", None)
        if own is not None:
            return list(own(sampled, held))
        if self._reasoning is None or any(number in self._stop_ids for number in sampled):
            return self._close
        if not self._reasoning.split(sampled, held).is_open:
            return self._close
        return [*self._reasoning.closing, *self._close]

    def _refused(
        self, plain: list[dict[str, Any]], specs: list[dict[str, Any]] | None, error: Exception
    ) -> str:
        """Return which message the template refused, found by rendering ever more of them."""
        if str(error).startswith("message "):
            return str(error)  # it says so itself
        for place in range(len(plain)):
            try:
                self._inner.render_ids(plain[: place + 1], tools=specs, add_generation_prompt=True)
            except _TEMPLATE_ERRORS as refusal:
                return (
                    f"message {place}: the template of {self.name or 'this family'} does not take "
                    f"role {plain[place]['role']!r} where it stands: {refusal!r}"
                )
        return f"the template of {self.name or 'this family'} refused the messages: {error!r}"


def import_renderers(submodule: str) -> ModuleType:
    """Import `renderers.<submodule>` without the rest of the package.

    `renderers/__init__.py` imports the package's HTTP client, and with it openai: 1.2 s of the
    two seconds in which a worker must be ready. A bare package of the same name and path stands
    in while the submodule is imported; later imports of `renderers` find the real one. Should the
    package change so that this fails, the plain import decides.
    """
    name = f"renderers.{submodule}"
    if name in sys.modules or "renderers" in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.find_spec("renderers")
    if spec is None or spec.submodule_search_locations is None:
        return importlib.import_module(name)
    bare = ModuleType("renderers")
    bare.__path__ = list(spec.submodule_search_locations)
    bare.__spec__ = spec
    sys.modules["renderers"] = bare
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError):
        for loaded in [n for n in sys.modules if n.startswith("renderers.")]:
            del sys.modules[loaded]
        del sys.modules["renderers"]
        return importlib.import_module(name)
    del sys.modules["renderers"]
    return sys.modules[name]


def _specs(tools: Sequence[Message] | None) -> list[Message] | None:
    return list(tools) if tools else None


def _last_index(ids: list[int], wanted: frozenset[int]) -> int:
    for place in range(len(ids) - 1, -1, -1):
        if ids[place] in wanted:
            return place
    return -1


def _difference(got: list[int], expected: list[int]) -> str:
    for place, number in enumerate(expected):
        if place >= len(got):
            return f"it ends at {place} of {len(expected)} ids"
        if got[place] != number:
            return f"id {got[place]} instead of {number} at {place} of {len(expected)}"
    return "no difference"
