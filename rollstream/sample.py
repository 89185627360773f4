"""The record of one trajectory: its tokens, and the proof of where every token came from.

Owns `Sample`, `Call` and the two counters. Never touches Redis, an engine or a tokenizer.
Invariant (`Sample.validate`): a response position is *sampled* exactly when a call covers it; the
loss mask is a subset of the sampled positions; log-probs are the engine's there and 0.0 elsewhere.

Axes: L all tokens of the trajectory, R = response_length (everything after the first prompt).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rollstream.errors import ContractError, Status, StopReason

TokenIds: TypeAlias = npt.NDArray[np.int32]
LogProbs: TypeAlias = npt.NDArray[np.float32]
LossMask: TypeAlias = npt.NDArray[np.uint8]
Message: TypeAlias = dict[str, Any]
Prompt: TypeAlias = str | list[Message]
Reward: TypeAlias = float | dict[str, Any] | None

UNKNOWN_VERSION = -1
"""The weight version of tokens whose engine reported none."""


def empty_ids() -> TokenIds:
    """Return a token array of length 0."""
    return np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class SpecInfo:
    """Counters of speculative decoding, summed over the calls of a trajectory."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted per drafted token, 0.0 where nothing was drafted."""
        return _ratio(self.spec_accept_token_num, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Completion tokens per verification step, 0.0 where there was none."""
        return _ratio(self.completion_token_num, self.spec_verify_ct)

    def add(self, other: SpecInfo) -> None:
        """Add the counters of another call or turn."""
        self.spec_accept_token_num += other.spec_accept_token_num
        self.spec_draft_token_num += other.spec_draft_token_num
        self.spec_verify_ct += other.spec_verify_ct
        self.completion_token_num += other.completion_token_num

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, num_sampled: int = 0) -> SpecInfo:
        """Build it from counters under an engine's old or new names; other keys are ignored.

        `num_sampled` counts where the data does not say how many tokens were sampled.
        """
        return cls(
            _counter(data, "spec_num_correct_drafts", "spec_accept_token_num"),
            _counter(data, "spec_num_proposed_drafts", "spec_draft_token_num"),
            _counter(data, "spec_verify_ct"),
            _counter(data, "completion_token_num", "completion_tokens") or num_sampled,
        )


@dataclass(slots=True)
class PrefixCacheInfo:
    """Prompt tokens that the engine found in its prefix cache, summed over calls."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached per prompt token, 0.0 where there was no prompt."""
        return _ratio(self.cached_tokens, self.total_prompt_tokens)

    def add(self, other: PrefixCacheInfo) -> None:
        """Add the counters of another call or turn."""
        self.cached_tokens += other.cached_tokens
        self.total_prompt_tokens += other.total_prompt_tokens

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrefixCacheInfo:
        """Build it from counters under our names or an engine's; other keys are ignored."""
        return cls(
            _counter(data, "cached_tokens"),
            _counter(data, "total_prompt_tokens", "prompt_tokens"),
        )


def _counter(data: Mapping[str, Any], *names: str) -> int:
    return next((int(data[name]) for name in names if data.get(name) is not None), 0)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass(slots=True)
class Call:
    """One engine request and its reply, as a span of `Sample.tokens`."""

    rid: str
    """Request id: 32 hex, new for every call and every retry."""
    engine: str
    """Base URL of the engine that answered."""
    start: int
    """Index into `tokens` of the first sampled token; `tokens[:start]` is what the engine saw."""
    end: int
    """Index into `tokens` behind the last sampled token."""
    finish: str
    """`stop`, `length` or `abort`, as the engine said."""
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    """[(weight version, start, end)] over `tokens`, covering start..end in order."""
    dispatched_version: int = UNKNOWN_VERSION
    """The version that the worker knew as current when it sent the request."""
    logprob_mode: str = "temperature"
    """Of which distribution the log-probs are: `temperature`, `processed` or `raw`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """The effective sampling parameters of this request, with its seed."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, for the wire and for dumps."""
        plain = {name: getattr(self, name) for name in _CALL_FIELDS}
        plain["versions"] = [list(span) for span in self.versions]
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Call:
        """Build a call from `to_dict()`'s answer; unknown keys are ignored."""
        known = {name: data[name] for name in _CALL_FIELDS if name in data}
        known["versions"] = [tuple(span) for span in data.get("versions", ())]
        return cls(**known)


_CALL_FIELDS = tuple(f.name for f in fields(Call))


@dataclass(slots=True)
class Span:
    """How long one part of one trajectory took."""

    name: str
    """`queue_wait`, `generate`, `tool`, `reward`, `merge`, `submit`, `group_wait`, `ready_wait`."""
    turn: int
    """Turn it belongs to, from 0; -1 where it belongs to the whole trajectory."""
    start_unix_s: float
    duration_s: float
    outcome: str = "ok"
    """`ok`, `error` or `cancelled`."""


@dataclass(slots=True)
class Sample:
    """The trajectory of one member of a prompt group.

    Source: names and meanings are those of miles' `Sample`, with provenance added.
    """

    group_index: int | None = None
    member: int = 0
    """Place in the group, 0..n-1."""
    index: int | None = None
    """Unique in the run: group_index * stride + member."""
    rollout_id: int | None = None
    """Equals `index`; shared only by the leaves of one trajectory."""
    prompt: Prompt = ""
    label: Any = None
    tokens: TokenIds = field(default_factory=empty_ids)
    """[L] first prompt, then everything sampled and observed."""
    response: str = ""
    """The tokenizer's decoding of the last `response_length` ids, special tokens kept."""
    response_length: int = 0
    """R: how many of `tokens` come after the first prompt."""
    loss_mask: LossMask | None = None
    """[R] 1 where the trainer may take a loss; entry i speaks of response token i itself."""
    rollout_log_probs: LogProbs | None = None
    """[R] log-prob of response token i itself, 0.0 where no call covers it."""
    calls: list[Call] = field(default_factory=list)
    weight_versions: list[Any] = field(default_factory=list)
    """One entry per call, in order (derived from `calls` where there are calls)."""
    status: Status = Status.PENDING
    stop_reason: StopReason | None = None
    reward: Reward = None
    """None is "no verdict", which is never 0."""
    metadata: dict[str, Any] = field(default_factory=dict)
    train_metadata: dict[str, Any] | None = None
    generate_function_path: str | None = None
    reward_spec: dict[str, Any] | None = None
    routing_key: str | None = None
    remove_sample: bool = False
    non_generation_time: float = 0.0
    """Seconds spent in tools, rewards and environments."""
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    rollout_routed_experts: npt.NDArray[Any] | None = None
    """[L-1, layers, top_k] uint8, uint16 or int32, as the engine served them; int32 where rows are
    -1 throughout, which no engine brought."""
    rollout_indexer_topk: npt.NDArray[Any] | None = None
    """[L-1, layers, top_k] int32"""
    teacher_log_probs: LogProbs | None = None
    """[R]"""
    opd_reverse_kl: LogProbs | None = None
    """[R]"""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    adapter: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """The group's sampling parameters; each call has its own effective ones."""
    logprob_mode: str = "temperature"
    attempts: int = 0
    """Attempts that were charged to this member before this one."""
    spans: list[Span] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys that `from_dict` did not know; `to_dict` gives them back."""

    def finish(self, stop_reason: StopReason, status: Status) -> None:
        """Record how the trajectory ended."""
        self.stop_reason, self.status = stop_reason, status

    @property
    def prompt_length(self) -> int:
        """How many of `tokens` are the first prompt."""
        return len(self.tokens) - self.response_length

    @property
    def num_sampled(self) -> int:
        """How many tokens the engine sampled, whatever the mask."""
        return sum(call.end - call.start for call in self.calls)

    @property
    def effective_response_length(self) -> int:
        """How many response tokens the trainer may take a loss on."""
        if self.loss_mask is None:
            return self.response_length
        return int(np.count_nonzero(self.loss_mask))

    def sampled_mask(self) -> LossMask:
        """Return which response positions a call covers.

        Shape: [R] uint8.
        """
        sampled = np.zeros(self.response_length, dtype=np.uint8)
        offset = self.prompt_length
        for call in self.calls:
            sampled[call.start - offset : call.end - offset] = 1
        return sampled

    def derive_weight_versions(self) -> None:
        """Set `weight_versions` from `calls`: the newest version of every call, in order."""
        self.weight_versions = [
            max((version for version, _, _ in call.versions), default=UNKNOWN_VERSION)
            for call in self.calls
        ]

    def version_range(self) -> tuple[int, int] | None:
        """Return the oldest and the newest known weight version of any sampled token."""
        known = [v for call in self.calls for v, _, _ in call.versions if v != UNKNOWN_VERSION]
        return (min(known), max(known)) if known else None

    def validate(self) -> None:
        """Check the invariant of this module.

        Raises:
            ContractError: with both numbers that disagree.
        """
        num_tokens, length = len(self.tokens), self.response_length
        if length < 0 or num_tokens < length:
            raise self._broken(f"response_length {length} does not fit {num_tokens} tokens")
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "opd_reverse_kl"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise self._broken(f"{name} has {len(values)} entries, response_length is {length}")
        experts = self.rollout_routed_experts
        num_rows = max(0, num_tokens - 1)
        if experts is not None and len(experts) != num_rows:
            raise self._broken(
                f"rollout_routed_experts has {len(experts)} rows, expected {num_rows}"
            )
        if self.calls:
            self._validate_provenance(num_tokens)

    def _validate_provenance(self, num_tokens: int) -> None:
        offset = behind = self.prompt_length
        for call in self.calls:
            if call.start < behind or call.end < call.start or call.end > num_tokens:
                raise self._broken(
                    f"call {call.rid} spans {call.start}..{call.end}, but the last one ended at "
                    f"{behind} and there are {num_tokens} tokens"
                )
            self._check_unsampled(behind - offset, call.start - offset)
            behind = call.end
        self._check_unsampled(behind - offset, self.response_length)
        if self.rollout_log_probs is not None and not _all_finite(self.rollout_log_probs):
            raise self._broken("rollout_log_probs is not finite")

    def _check_unsampled(self, start: int, end: int) -> None:
        """Check a stretch of the response that no call covers."""
        if start == end:
            return
        if self.loss_mask is not None and bool(self.loss_mask[start:end].any()):
            raise self._broken("loss_mask is set where no call sampled")
        if self.rollout_log_probs is not None and bool(self.rollout_log_probs[start:end].any()):
            raise self._broken("rollout_log_probs is not 0.0 where no call sampled")

    def _broken(self, what: str) -> ContractError:
        return ContractError(f"sample {self.group_index}:{self.member}: {what}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers under miles' names, plus ours, plus unknown keys as they came."""
        plain: dict[str, Any] = {}
        for name in SAMPLE_FIELDS:
            value = getattr(self, name)
            plain[name] = value.tolist() if isinstance(value, np.ndarray) else value
        plain["status"] = self.status.value
        plain["stop_reason"] = None if self.stop_reason is None else self.stop_reason.value
        plain["calls"] = [call.to_dict() for call in self.calls]
        for name in ("spec_info", "prefix_cache_info"):
            plain[name] = _slots_dict(getattr(self, name))
        plain["spans"] = [_slots_dict(span) for span in self.spans]
        return {**self.extra, **plain}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Build a sample from `to_dict()`'s answer, of ours or of miles.

        Raises:
            ValueError: an unknown status or stop reason.
        """
        known = {name: data[name] for name in SAMPLE_FIELDS if name in data}
        for name, dtype in _PLAIN_LISTS.items():
            if known.get(name) is not None:
                known[name] = np.asarray(known[name], dtype=dtype)
        for name in ("rollout_routed_experts", "rollout_indexer_topk"):
            if isinstance(known.get(name), list):
                known[name] = np.asarray(known[name], dtype=np.int32)
        known["status"] = Status(known.get("status", Status.PENDING))
        if known.get("stop_reason") is not None:
            known["stop_reason"] = StopReason(known["stop_reason"])
        known["calls"] = [Call.from_dict(call) for call in known.get("calls", ())]
        known["spec_info"] = SpecInfo.from_dict(known.get("spec_info") or {})
        known["prefix_cache_info"] = PrefixCacheInfo.from_dict(known.get("prefix_cache_info") or {})
        known["spans"] = [Span(**span) for span in known.get("spans", ())]
        extra = {k: v for k, v in data.items() if k not in _SAMPLE_FIELD_SET}
        return cls(**known, extra=extra)


def _all_finite(values: LogProbs) -> bool:
    # A sum of squares is finite only where every value is, and BLAS is the quickest look; a sum
    # that overflows says nothing.
    try:
        if math.isfinite(np.dot(values, values)):
            return True
    except RuntimeWarning:
        pass
    return bool(np.isfinite(values).all())


def _slots_dict(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


SAMPLE_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Sample) if f.name != "extra")
"""Every field of a sample, in order; the wire's list is derived from it."""
_SAMPLE_FIELD_SET = frozenset(SAMPLE_FIELDS)

ARRAY_DTYPES: dict[str, str] = {
    "tokens": "<i4",
    "loss_mask": "|u1",
    "rollout_log_probs": "<f4",
    "teacher_log_probs": "<f4",
    "opd_reverse_kl": "<f4",
}
"""Per-token arrays of one dimension, with the dtype they have in memory and on the wire."""
_PLAIN_LISTS = ARRAY_DTYPES
