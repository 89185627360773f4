"""One engine call as it was recorded, and what several of them say together.

Owns the record that merges start from, and the rules for what is summed, listed or must agree.
Never looks at ids. Invariant: nothing is guessed: a number that one record has and another lacks
is a fault or a documented default, never an average or a zero in its place.

Axes: P prompt ids of a turn, C its sampled ids, R everything after the first prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.errors import EngineFault, MergeFault
from rollstream.sample import (
    ARRAY_DTYPES,
    UNKNOWN_VERSION,
    LogProbs,
    PrefixCacheInfo,
    SpecInfo,
    TokenIds,
)

from ..types import Completion, Finish, Replay
from .ids import as_ids

PER_TOKEN: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in ARRAY_DTYPES.items()
    if name not in ("tokens", "loss_mask", "rollout_log_probs")
}
"""Optional fields of a sample with one value per response token, 0 where nothing was sampled."""
REPLAY = {
    "rollout_routed_experts": "routed_experts",
    "rollout_indexer_topk": "indexer_topk",
}
"""Replay fields: {of a sample: of a record and a completion}."""

_FINISH = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.ABORT,
}


@dataclass(slots=True)
class TurnRecord:
    """One engine call as it was recorded."""

    prompt_ids: TokenIds | None
    """[P] all that the engine saw; None where the record lacks them, which no merge accepts."""
    output_ids: TokenIds
    """[C] what it sampled, end token included."""
    log_probs: LogProbs | None
    """[C] of the same ids."""
    finish: Finish | str = Finish.STOP
    """`tool_calls` counts as `stop`; any other unknown word is an engine fault."""
    versions: list[tuple[int, int, int]] = field(default_factory=list)
    """[(weight version, start, end)] over 0..C."""
    metadata: dict[str, Any] = field(default_factory=dict)
    rid: str = ""
    engine: str = ""
    dispatched_version: int = UNKNOWN_VERSION
    logprob_mode: str = "temperature"
    sampling: dict[str, Any] = field(default_factory=dict)
    cache: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    spec: SpecInfo = field(default_factory=SpecInfo)
    routed_experts: Replay | None = None
    """Rows from where they were asked for (0, or the rows held) to P + C - 1."""
    indexer_topk: Replay | None = None
    per_token: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """{field of `PER_TOKEN`: [C] values of the sampled ids}, `teacher_log_probs` say."""

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int] | npt.NDArray[np.integer],
        completion: Completion,
        *,
        dispatched_version: int = UNKNOWN_VERSION,
        current_version: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> TurnRecord:
        """Return the record of one reply.

        Args:
            prompt_ids: exactly what the engine was sent.
            completion: what it answered.
            dispatched_version: the weight version known when it was sent.
            current_version: the one known when the reply came.
            sampling: the effective parameters.
            fields: `metadata`, `per_token`.
        """
        return cls(
            as_ids(prompt_ids),
            completion.ids,
            completion.log_probs,
            completion.finish,
            versions_of(completion, dispatched_version, current_version),
            rid=completion.rid,
            engine=completion.engine,
            dispatched_version=dispatched_version,
            logprob_mode=completion.logprob_mode,
            sampling=dict(sampling or {}),
            cache=completion.cache,
            spec=completion.spec,
            routed_experts=completion.routed_experts,
            indexer_topk=completion.indexer_topk,
            **fields,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TurnRecord:
        """Build a record from plain containers, as a session or a file holds them.

        The keys are the fields' names. `cache` and `spec` are the engine's counters under their
        old or new names, or its whole `meta_info`; replay is {"start": row, "rows": nested lists
        or an array}. Unknown keys are ignored.

        Raises:
            ValueError: replay rows without their start.
        """
        known: dict[str, Any] = {name: data[name] for name in _PLAIN if name in data}
        prompt, log_probs = data.get("prompt_ids"), data.get("log_probs")
        output = as_ids(data.get("output_ids", ()))
        return cls(
            None if prompt is None else as_ids(prompt),
            output,
            None if log_probs is None else np.asarray(log_probs, np.float32),
            versions=[tuple(span) for span in data.get("versions") or ()],
            cache=PrefixCacheInfo.from_dict(data.get("cache") or {}),
            spec=SpecInfo.from_dict(data.get("spec") or {}, num_sampled=len(output)),
            routed_experts=_replay(data, "routed_experts"),
            indexer_topk=_replay(data, "indexer_topk"),
            per_token={
                name: np.asarray(values, PER_TOKEN.get(name))
                for name, values in (data.get("per_token") or {}).items()
            },
            **known,
        )


_PLAIN = (
    "finish", "metadata", "rid", "engine", "dispatched_version", "logprob_mode", "sampling",
)  # fmt: skip


def _replay(data: Mapping[str, Any], name: str) -> Replay | None:
    held = data.get(name)
    if held is None:
        return None
    if held.get("start") is None:
        raise ValueError(f"{name} of a record has no start row; record where it was asked from")
    return Replay(int(held["start"]), np.asarray(held["rows"]))


def versions_of(
    completion: Completion, dispatched: int, current: int | None
) -> list[tuple[int, int, int]]:
    """Return the weight versions of a reply as spans over 0..C.

    Where the engine reports none: the one at dispatch, and the one when the reply came as an empty
    span behind it, if it is another; nobody knows where it changed. An unknown span of an engine
    that knows others stays unknown: it is neither the one before it nor the one at dispatch.
    """
    count, reported = len(completion.ids), completion.versions
    if any(version != UNKNOWN_VERSION for version, _, _ in reported):
        return list(reported)
    spans = [(dispatched, 0, count)]
    if current is not None and current != dispatched:
        spans.append((current, count, count))
    return spans


def finish_of(word: Finish | str) -> Finish:
    """Return how an engine's finish word counts.

    Raises:
        EngineFault: an unknown word; never taken for pending or completed.
    """
    known = _FINISH.get(word)
    if known is None:
        raise EngineFault(
            f"unknown finish reason {word!r}; known: {', '.join(_FINISH)}", detail="unknown_finish"
        )
    return known


def add_metadata(into: dict[str, Any], turns: Sequence[dict[str, Any]]) -> None:
    """Add the metadata of turns: `lifecycle` as a list, the last `messages`, the rest agreed.

    Raises:
        MergeFault: a key on which two turns differ.
    """
    lifecycle: list[Any] = []
    for metadata in turns:
        for key, value in metadata.items():
            if key == "lifecycle":
                lifecycle += value if isinstance(value, list) else [value]
            elif key != "messages" and key in into and into[key] != value:
                raise MergeFault(
                    f"turns differ in metadata {key!r}: {into[key]!r} and {value!r}",
                    detail="metadata",
                )
            else:
                into[key] = value
    if lifecycle:
        into["lifecycle"] = lifecycle if len(turns) > 1 else turns[0]["lifecycle"]


@dataclass(frozen=True, slots=True)
class Part:
    """One turn's values of an optional per-token field, and where they belong."""

    values: npt.NDArray[Any] | None
    count: int
    """How many there must be."""
    at: int
    """Index into the response of the first."""
    size: int
    """How many of them the result holds."""


def join_per_token(name: str, parts: Sequence[Part], length: int) -> npt.NDArray[Any] | None:
    """Return an optional per-token field of the whole response; None where no turn has it.

    Shape: [length] of the field's dtype; 0 where no turn sampled.

    Raises:
        MergeFault: `detail` is `per_token`: values of another length, or a turn that sampled ids
            without values beside one that has them.
    """
    if all(part.values is None for part in parts):
        return None
    whole = np.zeros(length, PER_TOKEN[name])
    for place, part in enumerate(parts):
        if part.values is None:
            if part.count:
                raise MergeFault(
                    f"turn {place} has no {name}, but other turns have; give them for every turn "
                    "that sampled, or for none",
                    detail="per_token",
                )
            continue
        if len(part.values) != part.count:
            raise MergeFault(
                f"turn {place} has {len(part.values)} {name} for {part.count} ids",
                detail="per_token",
            )
        whole[part.at : part.at + part.size] = part.values[: part.size]
    return whole
