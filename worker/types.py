"""The seams of the worker: what an engine, a renderer, a tool and a generate function are.

Owns the protocols and the small records that cross them. Never implements one.
Invariant: token ids cross a seam as int32 arrays, and text never comes back from an engine.

Axes: L all tokens of a trajectory so far, C sampled tokens of one reply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeAlias

import numpy.typing as npt

from rollstream.group import Trajectory
from rollstream.sample import (
    UNKNOWN_VERSION,
    LogProbs,
    Message,
    PrefixCacheInfo,
    Sample,
    Span,
    SpecInfo,
    TokenIds,
)

from .sampling import Sampling


class Finish(StrEnum):
    """Why an engine stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The rendered prompt of a group, shared by its members.

    `json` is the ids as comma-separated decimals without brackets: a request body is a join of
    such pieces, so the prefix is encoded once however long the trajectory gets.
    """

    ids: TokenIds
    json: bytes


@dataclass(frozen=True, slots=True)
class Replay:
    """Rows of routed experts (R3) or of an indexer, of consecutive positions of a trajectory."""

    start: int
    """Position of the first row: row r is what was routed when token `start + r` was fed in."""
    rows: npt.NDArray[Any]
    """[rows, layers, top_k] int32."""


class Witness(Protocol):
    """Is told what an engine client really sent and got, to hold it against the sample."""

    def add(self, pieces: tuple[bytes, ...], completion: Completion) -> None:
        """Take one answered request: the pieces as they were joined into its body."""
        ...


class TokenSink(Protocol):
    """Is told what an engine samples while it samples, for a client that reads along."""

    def begin(self, rid: str) -> bool:
        """Take the beginning of a try, before it is sent; False where it must not be made.

        So it is where something of an earlier try was passed on: what a reader saw cannot be taken
        back.
        """
        ...

    def add(self, ids: TokenIds) -> None:
        """Take the next sampled ids of this try. Not checked yet: the completion is what counts.

        Shape: [any] int32
        """
        ...


@dataclass(slots=True)
class RequestIds:
    """The token ids of one request, as pieces of JSON that the engine client joins."""

    pieces: Sequence[bytes]
    """Comma-separated decimals without brackets; join with b",". Empty pieces do not occur."""
    num_tokens: int
    replay_start: int | None = None
    """First position of which routed experts are wanted; None asks for none."""
    witness: Witness | None = None
    """Set by the worker itself (`worker.members.fidelity`), never by a generate function."""
    sink: TokenSink | None = None
    """Asks the engine to stream, and is told what comes; what is returned is the same."""


@dataclass(slots=True)
class Completion:
    """One engine reply, validated, as arrays."""

    ids: TokenIds
    """[C] what the engine sampled, end token included."""
    log_probs: LogProbs
    """[C] of the same ids, finite."""
    json: bytes
    """The ids as comma-separated decimals (empty for C = 0), ready to extend a request prefix."""
    finish: Finish
    versions: list[tuple[int, int, int]]
    """[(weight version, start, end)] over 0..C, covering it."""
    engine: str
    rid: str
    matched: int | str | None = None
    """Stop id or stop string that ended it."""
    cache: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    spec: SpecInfo = field(default_factory=SpecInfo)
    logprob_mode: str = "temperature"
    dispatched_version: int = UNKNOWN_VERSION
    """The weight version that was current when the try that brought this was sent (a call may wait
    for a pause to end, or be tried again, and then begins under another version than its caller
    knew); unknown where an engine does not say."""
    routed_experts: Replay | None = None
    """Where the request asked for them: rows from its `replay_start` to the last position that was
    fed in (the last sampled token never was)."""
    indexer_topk: Replay | None = None


class Engine(Protocol):
    """Something that continues token ids: one server, or a pool of them behind one face."""

    async def generate(
        self,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        routing_key: str,
        version: int,
        deadline_s: float | None = None,
        salt: int | None = None,
    ) -> Completion:
        """Sample a continuation of `prompt`; a new rid for every try.

        Args:
            prompt: all tokens held so far.
            sampling: the effective parameters; `max_new_tokens` is at least 1.
            routing_key: calls of one trajectory, and members of one group, share it.
            version: the weight version current at dispatch.
            deadline_s: seconds that all tries together may take.
            salt: the weight version at the trajectory's first call, which salts the engine's
                prefix cache; None is `version`.

        Raises:
            EngineFault: after the retries that its class allows.
        """
        ...

    async def probe(self) -> bool:
        """Return whether at least one server answers."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class ProblemKind(StrEnum):
    """What was wrong with a tool call that the model wrote."""

    INVALID_JSON = "invalid_json"
    UNCLOSED = "unclosed"
    NO_NAME = "no_name"
    BAD_ARGUMENTS = "bad_arguments"
    TOO_MANY = "too_many"
    """Good by itself, behind as many as one turn may make."""
    BAD_STRUCTURE = "bad_structure"
    """Of formats that are no JSON: a marker is missing, or there is text where none may be."""


@dataclass(slots=True)
class ToolCall:
    """One call as the model wrote it, in order; `problem` where it cannot be executed."""

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str = ""
    """The text of the call block as decoded from its ids, mostly without its markers."""
    problem: ProblemKind | None = None
    problem_text: str = ""
    """For the model: what was wrong and what is expected."""
    written: str = ""
    """The block with its markers, where they are known; see `as_written`."""

    @property
    def as_written(self) -> str:
        """The block as the model wrote it, for where it is text and no call."""
        return self.written or self.raw


@dataclass(slots=True)
class AssistantMessage:
    """A completion parsed from its ids."""

    content: str
    reasoning: str | None
    tool_calls: list[ToolCall]
    abnormal_end: bool = False
    """The turn did not end with the family's turn-close token."""
    num_reasoning: int | None = 0
    """Ids that were reasoning, its markers included; None where that cannot be told."""


class Renderer(Protocol):
    """Turns messages into ids and ids into messages, for one model family."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None) -> TokenIds:
        """Return the prompt ids of a conversation, generation prompt included."""
        ...

    def extend(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Message] | None,
    ) -> TokenIds:
        """Return only the ids to append behind `completion` for the next request.

        Args:
            window: the tail of what the engine saw, from the last turn-close token on (or all).
            completion: what it sampled since; never changed.
            new_messages: tool, user or system messages.
            tools: as rendered in the prompt.

        Raises:
            MergeFault: the family's template cannot be extended here.
        """
        ...

    def parse(
        self,
        completion: TokenIds,
        prompt_tail: TokenIds,
        tools: Sequence[Message] | None = None,
    ) -> AssistantMessage:
        """Parse one reply from its ids alone.

        Args:
            completion: what the engine sampled.
            prompt_tail: the tail of what it saw; says whether the prompt opened a reasoning block.
            tools: as rendered in the prompt. Formats that write arguments without quotes
                (`<parameter=zip>01234</parameter>`) have their types from there alone.
        """
        ...

    def encode(self, text: str) -> TokenIds:
        """Encode plain text; control strings in it do not become control ids."""
        ...

    def encode_raw(self, text: str) -> TokenIds:
        """Encode a prompt that is rendered already; control strings in it become their ids."""
        ...

    def decode(self, ids: TokenIds) -> str:
        """Decode with special tokens kept; partial UTF-8 becomes U+FFFD."""
        ...

    def pieces(self, ids: TokenIds) -> list[str]:
        """Return what each id alone stands for; half a character is surrogates (PEP 383).

        Shape: [len(ids)]; `piece.encode("utf-8", "surrogateescape")` is its bytes.
        """
        ...


class Tool(Protocol):
    """A tool that the model may call."""

    name: str
    spec: dict[str, Any]
    """OpenAI's JSON: {"type": "function", "function": {"name", "description", "parameters"}}."""

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        """Run it; text, or anything that `worker.tools` turns into text.

        Raises:
            RolloutFault: what runs it broke; the sample ends (`worker.tools.run`).
            Exception: anything else is told to the model.
        """
        ...


class SpanRecorder(Protocol):
    """Collects spans of one trajectory; a no-op in evaluation."""

    def record(
        self, name: str, turn: int, start_unix_s: float, duration_s: float, outcome: str = "ok"
    ) -> None:
        """Add one span."""
        ...

    def ended(
        self, name: str, turn: int, start_mono_s: float, error: BaseException | None = None
    ) -> float:
        """Add the span of a part that ended just now, and return its seconds.

        Args:
            name: of the part.
            turn: it belongs to; -1 is the whole trajectory.
            start_mono_s: when it began, by `time.monotonic()`.
            error: what ended it; None where it ended well.
        """
        ...

    def unix_s(self, mono_s: float) -> float:
        """Return a time of `time.monotonic()` by the wall clock that spans go by."""
        ...

    @property
    def spans(self) -> list[Span]:
        """What was recorded, in order."""
        ...


class DivergencePolicy(StrEnum):
    """What becomes of a trajectory whose client rewrote history (`worker.tito.divergence`)."""

    REJECT = "reject"
    """A merge error, recorded; nothing is trained."""
    FORK = "fork"
    """Several samples of one rollout, each append-only; every sampled token is in exactly one."""
    KEEP_PREFIX = "keep_prefix"
    """One sample along the newest context; sampled tokens that it no longer holds are dropped."""


CutSide: TypeAlias = Literal["middle", "left", "right"]
"""Which part of a text that is too long is cut away."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one trajectory, in tokens unless named otherwise."""

    max_turns: int
    max_context: int
    """Prompt and response together may never exceed it."""
    max_response: int | None = None
    """Everything after the first prompt, sampled or observed."""
    max_seq_len: int | None = None
    """Turns that end beyond it are cut before the merge."""
    tool_timeout_s: float = 30.0
    tool_output_chars: int = 16384
    """Cap of one tool result, in characters, the marker of the cut included."""
    tool_output_tokens: int | None = None
    """The same in tokens of the model."""
    tool_output_side: CutSide = "middle"
    """Which part of a longer one is cut away."""
    max_parallel_calls: int | None = None
    """Calls of one turn that are run; the others are answered with an error."""
    execute_last_turn: bool = False
    on_divergence: DivergencePolicy = DivergencePolicy.REJECT
    """Of functions that record turns and merge them (`worker.generate.records`)."""


@dataclass(slots=True)
class GenerateInput:
    """Everything that a generate function gets."""

    sample: Sample
    """Pending: ids, prompt, label, metadata, sampling are set; tokens are empty. A function that
    is resumable may get an aborted one, with all tokens, calls and metadata that it returned."""
    sampling: Sampling
    """Of the group; `turn_seed` gives each call's seed."""
    engine: Engine
    renderer: Renderer
    tools: Mapping[str, Tool]
    spans: SpanRecorder
    deadline: float
    """`time.monotonic()` by which it must have returned; it is cancelled then. A pause of the run
    moves it: read it anew before each wait."""
    prompt: PromptIds
    """The rendered prompt, shared by the group's members."""
    limits: Limits
    version: Callable[[], int]
    """The weight version that this worker knows as current."""
    turn_seed: Callable[[int], int]
    """Turn → seed; the same under retry and resume."""
    evaluation: bool = False
    """Nobody trains on it: no spans are recorded, and parameters may leave the distribution."""
    parks: bool = False
    """What the function returns as `abort_weights` is stored, and goes on with the next attempt:
    its text is not read."""
    debug_messages: bool = False
    """Keep the conversation as messages in `metadata["messages"]`, for people."""
    replay: bool = False
    """Ask for routed experts and keep them (R3)."""
    opened: Callable[[], Awaitable[None]] | None = None
    """Returns once calls may be made again, behind a pause that stops them. None where a sample
    that was stopped begins anew (`weights.partial` is off): nothing follows an aborted call."""


@dataclass(slots=True)
class GenerateOutput:
    """What a generate function returns; the type of `samples` alone decides the shape."""

    samples: Trajectory


GenerateFunction: TypeAlias = Callable[[GenerateInput], Awaitable[GenerateOutput]]
