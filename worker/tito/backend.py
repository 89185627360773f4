"""The backend over the package `renderers`: one class for every family it covers.

Owns what `renderers` does not promise: escaping, our own assertion that a bridge kept what the
engine sampled, the endings a model really produces, and calls as data. Never renders by itself.
Invariant: `extend` returns a suffix; what was held before it is never changed, trimmed or
re-encoded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from rollstream.errors import MergeFault
from rollstream.sample import Message, TokenIds

from ..types import AssistantMessage, ProblemKind, ToolCall
from .calls import closes_behind, judge_call, new_call_id
from .families import Family
from .ids import as_ids
from .messages import normalize_messages, normalize_tools
from .tokenizer import Tokenizer


class RenderersBackend:
    """A `worker.types.Renderer` for one family and one vocabulary."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        inner: Any,
        close: int,
        reasoning: tuple[int, int] | None = None,
        markup: Iterable[str] = (),
    ) -> None:
        """Wrap a renderer of the package's protocol.

        Args:
            tokenizer: the one that `inner` encodes with.
            inner: has `render_ids`, `bridge_to_next_turn`, `parse_response`, `get_stop_token_ids`.
            close: the id that closes an assistant turn in the template.
            reasoning: ids that open and close a reasoning block, where the family has them.
            markup: control strings that stay whole in the content of an assistant message.
        """
        self.tokenizer = tokenizer
        self._inner = inner
        self._scan = import_renderers("reasoning").scan_reasoning
        self._stop_ids = tuple(int(number) for number in inner.get_stop_token_ids())
        self._close = close
        self._reasoning = reasoning
        self._markup = frozenset(markup)

    @classmethod
    def of_family(cls, tokenizer: Tokenizer, family: Family) -> RenderersBackend:
        """Return the renderer of a family over a vocabulary that has the family's ids."""
        kind = getattr(import_renderers(family.module), family.renderer)
        config = getattr(import_renderers("configs"), family.config)(**family.options)
        ids = {token: tokenizer.token_id(token) for token in family.tokens}
        return cls(
            tokenizer,
            kind(tokenizer, config),
            _id(ids, family.close),
            family.reasoning and (_id(ids, family.reasoning[0]), _id(ids, family.reasoning[1])),
            (*family.markup, *(family.reasoning or ())),
        )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        return self._stop_ids

    @property
    def max_token_id(self) -> int:
        """The largest id of the vocabulary."""
        return self.tokenizer.max_token_id

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> TokenIds:
        """Return the prompt ids of a conversation, generation prompt included.

        Raises:
            ValueError: no messages, or one that has no text form, or a tool that is no function;
                names its index.
        """
        if not messages:
            raise ValueError("a prompt needs at least one message")
        plain = normalize_messages(messages, self.tokenizer, self._markup)
        specs = normalize_tools(tools, self.tokenizer)
        return as_ids(self._inner.render_ids(plain, tools=specs, add_generation_prompt=True))

    def extend(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> TokenIds:
        """Return only the ids to append behind `completion` for the next request.

        Whatever the reply ended with stays. Where it is not the template's close, the close is
        part of what is returned; ids sampled behind the close that the template would write
        there anyway (a newline) are not written twice.

        Raises:
            MergeFault: the messages cannot follow here; `detail` is one of `no_messages`,
                `bad_message`, `bad_tools`, `assistant_message`, `no_bridge`, `prefix`.
        """
        messages = self._extension(new_messages)
        held, sampled = window.tolist(), completion.tolist()
        closed = _last_index(sampled, self._close)
        if closed >= 0:
            suffix = self._bridge(held, sampled[: closed + 1], messages, tools)
            behind = sampled[closed + 1 :]
            if suffix[: len(behind)] == behind:
                return as_ids(suffix[len(behind) :])
        if any(number in self._stop_ids for number in sampled):
            # Ended by another stop id, or went on behind the close: both stay, a close is added.
            return as_ids(
                [self._close, *self._bridge(held, [*sampled, self._close], messages, tools)]
            )
        return as_ids(self._bridge(held, sampled, messages, tools))

    def parse(
        self,
        completion: TokenIds,
        prompt_tail: TokenIds,
        tools: Sequence[Message] | None = None,
    ) -> AssistantMessage:
        """Parse one reply from its ids alone; never raises for what a model wrote.

        A call counts only outside the reasoning block, and only where that block ended by its own
        marker: drafts in it, finished or not, are reasoning.
        """
        ids, tail = completion.tolist(), prompt_tail.tolist()
        end = next((i for i, number in enumerate(ids) if number in self._stop_ids), len(ids))
        abnormal = end == len(ids) or ids[end] != self._close
        ids = ids[:end]
        unfinished = self._unfinished_reasoning(ids, tail)
        if unfinished is not None:
            return AssistantMessage("", unfinished, [], abnormal)
        try:
            parsed = self._inner.parse_response(ids, prompt_ids=tail, tools=_specs(tools))
        except (ValueError, RecursionError) as error:
            # Numbers of thousands of digits, or brackets of thousands of levels.
            text = self.decode(as_ids(ids))
            call = ToolCall(new_call_id(), "", {}, text, ProblemKind.INVALID_JSON, str(error))
            return AssistantMessage(text, None, [call], abnormal)
        calls = self._judged(parsed.tool_calls, ids)
        return AssistantMessage(parsed.content, parsed.reasoning_content, calls, abnormal)

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
            calls.append(call)
        return calls

    def encode(self, text: str) -> TokenIds:
        """Encode plain text; control strings in it do not become control ids."""
        return as_ids(self.tokenizer.encode_plain(text))

    def encode_raw(self, text: str) -> TokenIds:
        """Encode a prompt that is rendered already; control strings in it become their ids."""
        return as_ids(self.tokenizer.encode_raw(text))

    def decode(self, ids: TokenIds) -> str:
        """Decode with special tokens kept; partial UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(ids.tolist())

    def _extension(self, new_messages: Sequence[Message]) -> list[dict[str, Any]]:
        if not new_messages:
            raise MergeFault("no message to extend the conversation with", detail="no_messages")
        try:
            messages = normalize_messages(new_messages, self.tokenizer, self._markup)
        except ValueError as error:
            raise MergeFault(f"cannot extend: {error}", detail="bad_message") from None
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                raise MergeFault(
                    f"cannot extend: message {place} is an assistant message, which only the "
                    "engine may add",
                    detail="assistant_message",
                )
        return messages

    def _bridge(
        self,
        held: list[int],
        sampled: list[int],
        messages: list[dict[str, Any]],
        tools: Sequence[Message] | None,
    ) -> list[int]:
        try:
            specs = normalize_tools(tools, self.tokenizer)
        except ValueError as error:
            raise MergeFault(f"cannot extend: {error}", detail="bad_tools") from None
        found = self._inner.bridge_to_next_turn(held, sampled, messages, tools=specs)
        if found is None:
            # A turn that was closed inside its reasoning, or a prompt without any id: the suffix
            # behind a closed turn is the same for all turns, so an empty one stands in.
            if sampled and sampled[-1] == self._close:
                held, sampled = [self._close], [self._close]
                found = self._inner.bridge_to_next_turn(held, sampled, messages, tools=specs)
            if found is None:
                raise MergeFault(
                    "the family's template cannot be extended by messages of roles "
                    f"{[message['role'] for message in messages]} here",
                    detail="no_bridge",
                )
        ids: list[int] = found.token_ids
        before = len(held) + len(sampled)
        if ids[: len(held)] != held or ids[len(held) : before] != sampled:
            raise MergeFault(
                f"the bridge changed what was held: {_difference(ids, held + sampled)}",
                detail="prefix",
            )
        return ids[before:]

    def _unfinished_reasoning(self, ids: list[int], tail: list[int]) -> str | None:
        if self._reasoning is None:
            return None
        opener, closer = self._reasoning
        if closer in ids or (opener not in ids and opener not in tail):
            return None
        boundary = self._scan(
            self.tokenizer, ids, prompt_ids=tail, stop_ids=set(self._stop_ids),
            open_id=opener, close_id=closer,
        )  # fmt: skip
        return boundary.text.strip() if boundary.is_open else None


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


def _id(ids: dict[str, int | None], token: str) -> int:
    found = ids[token]
    assert found is not None, f"the vocabulary was checked to have {token}"
    return found


def _specs(tools: Sequence[Message] | None) -> list[Message] | None:
    return list(tools) if tools else None


def _last_index(ids: list[int], wanted: int) -> int:
    for place in range(len(ids) - 1, -1, -1):
        if ids[place] == wanted:
            return place
    return -1


def _difference(got: list[int], expected: list[int]) -> str:
    for place, number in enumerate(expected):
        if place >= len(got):
            return f"it ends at {place} of {len(expected)} ids"
        if got[place] != number:
            return f"id {got[place]} instead of {number} at {place} of {len(expected)}"
    return "no difference"
