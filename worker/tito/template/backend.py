"""The backend over any Hugging Face chat template.

Owns one template over one vocabulary as a `Renderer`: messages to ids, the suffix behind a turn,
replies to messages. Never renders the history that an engine saw a second time, never decides what
a good call is. Invariant: `extend` returns a suffix that is a function of the new messages and the
tools alone; what was sampled is never changed, trimmed or re-encoded.

What a template says of its own is never guessed at run time: which id closes a turn, which roles
may follow, how it wants arguments, whether it writes a BOS is found by probes at start
(`form`, `turns`), or the model is refused.

    BOS       exactly one, at index 0, where the template or the tokenizer's post-processor writes
              one; a template that writes it again behind a turn is refused
    date      `strftime_now` says `model.template_date`, for the whole run
    T-STRIP   templates that drop earlier reasoning drop it from histories that are given to
              `render`; the own loop is append-only, so what the engine saw stays
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.errors import ConfigError, MergeFault
from rollstream.sample import Message, TokenIds

from ...types import AssistantMessage
from ..compare import Comparator
from ..ids import as_ids
from ..messages import normalize_messages
from ..renderer import VocabularyRenderer
from ..settled import Settler
from ..tokenizer import Tokenizer
from .boundaries import AUTO, Boundary, choose_rule
from .files import TemplateSource, read_template
from .replies import ReplyParser

if TYPE_CHECKING:
    from .sandbox import ChatTemplate, PlainTools, Specs

    Base = VocabularyRenderer[PlainTools]
else:
    Base = VocabularyRenderer


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What the operator says of a template."""

    chat_template: str = ""
    """Path of another template than the folder's."""
    boundaries: str = AUTO
    """A row of `BOUNDARIES`, `auto`, or `derived`."""
    tool_parser: str = ""
    """How calls are spelled; empty reads calls as text."""
    reasoning_parser: str = ""
    """`think`, `none`, or empty for the vocabulary's own markers."""
    date: str = ""
    """What `strftime_now` says, ISO."""
    names: Mapping[str, Any] = field(default_factory=dict)
    """What else the template sees: `{"enable_thinking": false}`."""


class TemplateBackend(Base):
    """A `worker.types.Renderer` for one chat template and one vocabulary."""

    name = "template"

    def __init__(
        self, tokenizer: Tokenizer, source: TemplateSource, options: TemplateOptions
    ) -> None:
        """Compile a template and try it.

        Raises:
            ConfigError: it is no template, cannot be extended append-only, or an option does not
                fit it; the message says at which message and which ids.
        """
        # jinja2 takes 50 ms: only who uses a template pays them.
        from .form import probe_form, takes_parts_only
        from .sandbox import ChatTemplate, PlainTools
        from .turns import Turns, derive_boundary

        super().__init__(tokenizer, PlainTools)
        self.origin = source.origin
        self._names = {**source.special, **options.names}
        self._default = ChatTemplate(source.default, name=source.origin, date=options.date)
        self._tool_use = self._default
        if source.tool_use is not None:
            self._tool_use = ChatTemplate(
                source.tool_use, name=f"{source.origin} (tool_use)", date=options.date
            )
        texts = [source.default, source.tool_use or ""]
        stops = self._configured_stops(source)
        rule = choose_rule(options.boundaries, tokenizer, texts)
        self._parts = False
        self._parts = takes_parts_only(self._text)
        self._form = probe_form(self._text, source.origin)
        boundary = derive_boundary(rule, self._text, tokenizer, stops, source.origin)
        self._turns = Turns(self._text, self._form, tokenizer, boundary, source.origin)
        self._parser = ReplyParser(
            tokenizer, boundary, options.tool_parser, options.reasoning_parser
        )
        self._bos = self._find_bos(source)

    @classmethod
    def load(
        cls,
        tokenizer: Tokenizer,
        folder_or_template: str | Path | TemplateSource,
        options: TemplateOptions | None = None,
    ) -> TemplateBackend:
        """Return the renderer of a model's folder (or of its `tokenizer.json`).

        Args:
            tokenizer: the vocabulary of the same model.
            folder_or_template: where the template is, or the template itself.
            options: the operator's.

        Raises:
            ConfigError: see `read_template` and the constructor.
        """
        options = options or TemplateOptions()
        source = folder_or_template
        if not isinstance(source, TemplateSource):
            source = read_template(source, options.chat_template)
        return cls(tokenizer, source, options)

    @property
    def boundary(self) -> Boundary:
        """The rule at the end of a turn, with the roles that may follow."""
        return self._turns.boundary

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        return self.boundary.stop_ids

    @property
    def turn_ends(self) -> frozenset[int]:
        """Ids that may stand behind an assistant turn in the template."""
        return self.boundary.end_ids

    @property
    def reads_calls(self) -> bool:
        """Whether calls are read from replies."""
        return self._parser.reads_calls

    @property
    def drops(self) -> frozenset[str]:
        """What the template leaves out; see `form.Form`."""
        return self._form.drops

    @property
    def takes_tools(self) -> bool:
        """Whether a conversation with calls and results can be rendered.

        Where it cannot, the self-test's conversation has none.
        """
        missing = self._form.drops & {"tool", "calls", "calls beside text"}
        return not missing and {"tool", "user"} <= set(self.boundary.roles)

    @property
    def shows_tools(self) -> bool:
        """Whether a model is told of its tools and may use them."""
        return self.takes_tools and "tools" not in self._form.drops

    @property
    def no_system(self) -> str:
        """Why a conversation cannot begin with a system message; empty where it can."""
        from .sandbox import RenderError

        if "system" in self._form.drops:
            return "the template does not write it"
        asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        try:
            self._text(asked)
        except RenderError as error:
            return f"the template says: {error}"
        return ""

    @property
    def traits(self) -> dict[str, bool]:
        """What the self-test must know: keywords of `selftest.self_test`."""
        return {
            "thinking": "reasoning" not in self._form.drops,
            "parallel_calls": self._form.parallel_calls,
            "reads_calls": self.reads_calls,
            "system": not self.no_system,
            "tools": self.takes_tools,
        }

    def describe(self) -> list[str]:
        """Return what was found of the template, a sentence each, for people."""
        boundary, decode = self.boundary, self.tokenizer.decode
        closes = [decode([number]) for number in boundary.close_ids]
        said = [
            f"template: {self.origin}",
            f"boundaries: {boundary.name}; a turn is closed by "
            + (" or ".join(closes) if closes else "the next role token")
            + (f", then {decode(list(boundary.behind))!r}" if boundary.behind else ""),
            f"stop tokens: {' '.join(decode([number]) for number in boundary.stop_ids)}",
            f"roles behind an assistant turn: {', '.join(boundary.roles)}",
        ]
        said += [f"not {role}: {reason}" for role, reason in self._turns.refused.items()]
        if self._form.drops:
            said.append(f"the template does not write: {', '.join(sorted(self._form.drops))}")
        if self.no_system:
            said.append(f"tried without a system message: {self.no_system}")
        if not self.takes_tools:
            said.append("tried without calls and results, which the template does not take")
        if not self.reads_calls:
            said.append("calls are text: no model.tool_parser")
        return said

    def comparator(self) -> Comparator:
        """Return what compares two sequences under this template."""
        boundary = self.boundary
        return Comparator(
            self.control_ids,
            self.decode,
            assistant=self.tokenizer.encode(boundary.assistant),
            ends=boundary.end_ids,
            trim=boundary.trim_ids,
        )

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> TokenIds:
        """Return the prompt ids of a conversation, generation prompt included.

        Raises:
            ValueError: no messages, one that has no text form, or one that the template does not
                take; names its index and its role.
        """
        from .sandbox import RenderError

        if not messages:
            raise ValueError("a prompt needs at least one message")
        plain = self._adapted(messages)
        specs = self._specs_of(tools)
        try:
            text = self._text(plain, specs)
        except RenderError as error:
            place = self._culprit(plain, specs)
            raise ValueError(
                f"message {place} (role {messages[place].get('role')!r}): the chat template "
                f"does not take it here: {error}"
            ) from None
        return as_ids(self._with_bos(self.tokenizer.encode(text)))

    def extend(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> TokenIds:
        """Return only the ids to append behind `completion` for the next request.

        Whatever the reply ended with stays. Where it is not a close, the close is part of what is
        returned, behind the end of a reasoning block that was left open; ids that were sampled
        behind the close and that the template writes there anyway are not written twice.

        Raises:
            MergeFault: the messages cannot follow here; `detail` is one of `no_messages`,
                `bad_message`, `bad_tools`, `assistant_message`, `role`, `template`,
                `lost_message`, `generation_prompt`, `bos`.
        """
        messages, specs = self._extension(new_messages, tools, self._adapted)
        tail = self._turns.behind(messages, specs).ids
        if self._bos is not None and self._bos in tail:
            raise MergeFault("the suffix has a BOS in it", detail="bos")
        sampled = completion.tolist()
        suffix = self.boundary.append(sampled, tail)
        if not any(number in self.stop_token_ids for number in sampled):
            suffix = [*self._parser.unfinished(sampled, window.tolist()), *suffix]
        return as_ids(suffix)

    def parse(
        self,
        completion: TokenIds,
        prompt_tail: TokenIds,
        tools: Sequence[Message] | None = None,
    ) -> AssistantMessage:
        """Parse one reply from its ids alone; never raises for what a model wrote."""
        return self._parser.parse(completion, prompt_tail, tools)

    def settler(self, window: TokenIds) -> Settler:
        """Return what reads a reply while it is sampled, behind `window`."""
        return self._parser.settler(window)

    def _text(
        self,
        messages: list[dict[str, Any]],
        tools: Specs = None,
        *,
        prompt: bool = True,
    ) -> str:
        if self._parts:
            from .form import as_parts

            messages = as_parts(messages)
        template: ChatTemplate = self._tool_use if tools else self._default
        return template.render(messages, tools, add_generation_prompt=prompt, names=self._names)

    def _adapted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        plain = normalize_messages(messages, self.tokenizer, self._parser.markup)
        return self._form.apply(plain, messages, self.tokenizer.escape)

    def _culprit(self, messages: list[dict[str, Any]], tools: Specs) -> int:
        """Return the first message with which the conversation cannot be rendered."""
        from .sandbox import RenderError

        for count in range(1, len(messages)):
            try:
                self._text(messages[:count], tools)
            except RenderError:
                return count - 1
        return len(messages) - 1

    def _configured_stops(self, source: TemplateSource) -> list[int]:
        eos = source.special.get("eos_token")
        number = self.tokenizer.token_id(eos) if isinstance(eos, str) else None
        stops = [number] if number is not None else []
        return [*stops, *(n for n in source.stop_ids if 0 <= n <= self.tokenizer.max_token_id)]

    def _find_bos(self, source: TemplateSource) -> int | None:
        """Return the id that must begin every prompt, None for none.

        Raises:
            ConfigError: the template writes it behind turns as well.
        """
        token = source.special.get("bos_token")
        number = self.tokenizer.token_id(token) if isinstance(token, str) else None
        framing = self.tokenizer.framing()
        ids = self.tokenizer.encode(self._text([{"role": "user", "content": "hi"}]))
        written = number is not None and ids[:1] == [number]
        if not written:
            number = framing[0] if framing else None
        if number is None or number in self.boundary.opener_ids:
            return None  # where a BOS opens every turn (`<|im_start|>`), the template counts them
        behind = self._turns.behind([{"role": "user", "content": "hi"}], None)
        if number in behind.ids:
            raise ConfigError(
                f"{self.origin}: the template writes the BOS {self.tokenizer.decode([number])} "
                "again in front of message 2 (role 'user'); a prompt has one, at its beginning; "
                "set model.chat_template to a template that does not"
            )
        return number

    def _with_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        return [self._bos, *ids[start:]]
