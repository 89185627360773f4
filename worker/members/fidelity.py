"""The check on every production sample: is what is trained what was really sent and sampled?

Owns the record of what an engine client put on the wire during one attempt, and the comparison
with the finished sample, whatever generate function made it. Never reads a trajectory's own arrays,
never repairs anything. Invariant: a sample with a call whose request, sampled ids or log-probs are
not the sample's own never leaves the worker as trainable: it is a `MergeFault`, counted and logged
with the first position. What another worker sent (earlier calls of a resumed sample) is unknown
here: it was checked there before it was parked, and is held against what was parked, and as far as
a later request of this worker contains it against that.

How it costs next to nothing: a request is joined from pieces that its trajectory holds anyway, and
only pieces that an earlier call of the same sample did not have are looked at. A piece that is the
JSON of a reply, as the client itself wrote it, has that reply's ids; any other piece (observations,
prompts, whatever a function made) is compared as text with the sample's ids. docs/tokens.md says
what it catches and what it measured.

Axes: L all tokens of a sample, R its response, C sampled tokens of one call.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import structlog

from rollstream.errors import MergeFault
from rollstream.group import Trajectory
from rollstream.sample import Call, Sample, TokenIds

from ..sampling import Sampling
from ..types import Completion, Engine, PromptIds, RequestIds

MAX_CALLS = 4096
"""Calls that one attempt remembers; of a function that makes more, the oldest are forgotten."""
_TOKEN_BYTES = 4
_ENCODER = msgspec.json.Encoder()
log = structlog.get_logger("worker")


class Kind(StrEnum):
    """What of a sample is not what happened; closed, a metric's label."""

    PREFIX = "prefix"
    """The tokens before a call are not those that the engine was sent."""
    SAMPLED = "sampled"
    """The tokens of a call are not those that the engine sampled."""
    LOG_PROB = "log_prob"
    """The log-probs of a call are not the engine's; or a rescoring says something else."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where a sample first differs from what was sent or sampled."""

    kind: Kind
    position: int
    """Index into the sample's tokens."""
    rid: str
    happened: str
    """What the engine was sent, or answered."""
    recorded: str
    """What the sample says."""

    def __str__(self) -> str:
        return (
            f"{_WORDS[self.kind]} at token {self.position} of call {self.rid}: "
            f"{self.happened}, but the sample has {self.recorded}"
        )


_WORDS = {
    Kind.PREFIX: "the engine was sent other tokens",
    Kind.SAMPLED: "the engine sampled other tokens",
    Kind.LOG_PROB: "the engine gave other log-probs",
}


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request that was answered: references to what the trajectory holds too, no copies."""

    pieces: tuple[bytes, ...]
    ids: TokenIds
    log_probs: Any
    json: bytes
    """Of `ids`, as the client wrote it: held, so that its identity stays its own."""


class Watch:
    """What one attempt sent and got; it dies with the attempt.

    Attributes:
        is_prompt_proven: the JSON of the group's prompt was compared with its ids.
        num_checked: calls that were held against what was sent.
        num_unknown: calls of which nobody here knows what was sent; samples that train tokens of no
            call.
    """

    __slots__ = (
        "_exchanges", "_known", "_parked", "_prompt", "is_prompt_proven", "num_checked",
        "num_unknown",
    )  # fmt: skip

    def __init__(self, prompt: PromptIds, *, is_prompt_proven: bool = False) -> None:
        """Begin with nothing sent.

        Args:
            prompt: of the group; its members share the array and the JSON.
            is_prompt_proven: by a sibling.
        """
        self._exchanges: dict[str, _Exchange] = {}
        self._prompt = prompt
        self._known: dict[int, TokenIds] = {}
        if is_prompt_proven:
            self._known[id(prompt.json)] = prompt.ids
        self.is_prompt_proven = is_prompt_proven
        self.num_checked = self.num_unknown = 0
        self._parked: _Parked | None = None

    def resume(self, sample: Sample) -> None:
        """Take the sample that the attempt goes on from, as it was parked."""
        self._parked = _Parked(sample)

    def add(self, pieces: tuple[bytes, ...], completion: Completion) -> None:
        """Take one answered request (`types.Witness`)."""
        if len(self._exchanges) >= MAX_CALLS:
            oldest = self._exchanges.pop(next(iter(self._exchanges)))
            self._known.pop(id(oldest.json), None)
        exchange = _Exchange(pieces, completion.ids, completion.log_probs, completion.json)
        self._exchanges[completion.rid] = exchange
        if exchange.json:
            self._known[id(exchange.json)] = exchange.ids

    def check(self, sample: Sample) -> Mismatch | None:
        """Return where the sample is not what happened; None where nothing is known to differ."""
        reading = _Reading(sample, self._known)
        for call in sample.calls:
            exchange = self._exchanges.get(call.rid)
            if exchange is None:
                parked = self._parked
                if parked is None or call.rid not in parked.calls:
                    self.num_unknown += 1
                elif (found := parked.check(sample, call)) is not None:
                    return found
                continue
            self.num_checked += 1
            found = reading.check(call, exchange)
            if found is not None:
                return found
            if exchange.pieces and exchange.pieces[0] is self._prompt.json:
                self.is_prompt_proven = True
        if not sample.calls and sample.loss_mask is not None and sample.loss_mask.any():
            self.num_unknown += 1
        return None


class _Reading:
    """One pass over one sample; what an earlier call proved is not proved again."""

    __slots__ = (
        "_at", "_known", "_last", "_log_probs", "_offset", "_proven", "_sample", "_tokens",
    )  # fmt: skip

    def __init__(self, sample: Sample, known: dict[int, TokenIds]) -> None:
        self._sample, self._known = sample, known
        self._tokens = sample.tokens.tobytes()
        held = sample.rollout_log_probs
        self._log_probs = None if held is None else held.tobytes()
        self._proven: tuple[bytes, ...] = ()
        self._at = 0
        """How many tokens the proven pieces are."""
        self._last: TokenIds | None = None
        """What was sampled right behind them, where that was proven too."""
        self._offset = sample.prompt_length

    def check(self, call: Call, exchange: _Exchange) -> Mismatch | None:
        """Return the first difference of one call; what follows is written for speed."""
        pieces, at, last = exchange.pieces, self._at, self._last
        count = len(self._proven)
        if pieces[:count] == self._proven:  # of pieces that are the same objects: pointers only
            new = pieces[count:]
        else:
            new, at, last = (*self._behind_proven(pieces), None)
        known, tokens, held = self._known, self._tokens, self._sample.tokens
        for piece in new:
            ids = known.get(id(piece))
            if ids is not None:
                size = len(ids)
                same = ids is last or tokens.startswith(ids.tobytes(), at * _TOKEN_BYTES)
            else:
                size = piece.count(b",") + 1
                same = _ENCODER.encode(held[at : at + size].tolist())[1:-1] == piece
            if not same:
                found = self._first_of(piece, ids, at, call)
                if found is not None:
                    return found
            at, last = at + size, None
        self._proven, self._at, self._last = pieces, at, None
        if at != call.start:
            return Mismatch(
                Kind.PREFIX, min(at, call.start), call.rid, f"{at} tokens were sent",
                f"{call.start} tokens before the call",
            )  # fmt: skip
        ids, log_probs, count = exchange.ids, exchange.log_probs, call.end - at
        if count != len(ids):
            # A merge may have left out the end of a reply (a stop token, say), never more.
            ids, log_probs = ids[:count], log_probs[:count]
        else:
            self._last = ids  # the next request goes on with it, right here
        start = (at - self._offset) * _TOKEN_BYTES
        if (
            len(ids) == count
            and tokens.startswith(ids.tobytes(), at * _TOKEN_BYTES)
            and (self._log_probs is None or self._log_probs.startswith(log_probs.tobytes(), start))
        ):
            return None
        return self._of_reply(call, exchange)

    def _behind_proven(self, pieces: tuple[bytes, ...]) -> tuple[tuple[bytes, ...], int]:
        """Return what is to be looked at of a request that is cut into other pieces, and where.

        A function that writes each request anew begins it with the same text as the one before.
        """
        text, proven = b",".join(pieces), b",".join(self._proven) + b","
        if text.startswith(proven):
            return (text[len(proven) :],), self._at
        return pieces, 0

    def _first_of(self, piece: bytes, ids: TokenIds | None, at: int, call: Call) -> Mismatch | None:
        """Return the first difference of one piece; None where only its spelling differs."""
        sent = ids
        if sent is None:
            try:
                sent = np.array(msgspec.json.decode(b"[%b]" % piece, type=list[int]), np.int64)
            except msgspec.DecodeError as error:
                return Mismatch(Kind.PREFIX, at, call.rid, f"no list of ids ({error})", "tokens")
        held = self._sample.tokens[at : at + len(sent)]
        count = len(held)
        differs = np.flatnonzero(np.asarray(sent[:count]) != held)
        if len(differs):
            place = int(differs[0])
            return Mismatch(
                Kind.PREFIX, at + place, call.rid, f"{int(sent[place])} was sent",
                str(int(held[place])),
            )  # fmt: skip
        if count < len(sent):
            return Mismatch(
                Kind.PREFIX, at + count, call.rid, f"{int(sent[count])} was sent", "no such token"
            )
        return None

    def _of_reply(self, call: Call, exchange: _Exchange) -> Mismatch | None:
        """Return the first difference between a reply and its place in the sample.

        None where only the sign of a zero differs, which a sum with 0.0 changes.
        """
        count, total = call.end - call.start, len(exchange.ids)
        if count > total:
            return Mismatch(
                Kind.SAMPLED, call.start + total, call.rid, f"{total} tokens were sampled",
                str(count),
            )  # fmt: skip
        ids, held = exchange.ids[:count], self._sample.tokens[call.start : call.end]
        if not np.array_equal(ids, held):
            place = _first_other(ids, held)
            return Mismatch(
                Kind.SAMPLED, call.start + place, call.rid, f"{int(ids[place])} was sampled",
                str(int(held[place])),
            )  # fmt: skip
        assert self._sample.rollout_log_probs is not None
        offset = call.start - self._offset
        given = exchange.log_probs[:count]
        recorded = self._sample.rollout_log_probs[offset : offset + count]
        if np.array_equal(given, recorded):
            return None
        place = _first_other(given, recorded)
        return Mismatch(
            Kind.LOG_PROB, call.start + place, call.rid,
            f"{float(given[place])!r} of id {int(ids[place])} was answered",
            repr(float(recorded[place])),
        )  # fmt: skip


class _Parked:
    """The sample that an attempt goes on from, as it was parked."""

    __slots__ = ("_agreed", "_leaf", "calls", "sample")

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.calls = {call.rid: call for call in sample.calls}
        self._leaf: Sample | None = None
        self._agreed = 0

    def check(self, leaf: Sample, call: Call) -> Mismatch | None:
        """Return the first difference between a call of an earlier attempt and what was parked."""
        parked, was = self.sample, self.calls[call.rid]
        if call.start != was.start or call.end > was.end:
            return Mismatch(
                Kind.PREFIX, min(call.start, was.start), call.rid,
                f"{was.start}..{was.end} was parked", f"{call.start}..{call.end}",
            )  # fmt: skip
        if self._leaf is not leaf:  # one look at all that its calls share
            count = min(len(leaf.tokens), len(parked.tokens))
            differs = np.flatnonzero(leaf.tokens[:count] != parked.tokens[:count])
            self._leaf, self._agreed = leaf, int(differs[0]) if len(differs) else count
        place = self._agreed
        if place < call.end:
            kind = Kind.PREFIX if place < call.start else Kind.SAMPLED
            return Mismatch(
                kind, place, call.rid, f"{int(parked.tokens[place])} was parked",
                str(int(leaf.tokens[place])),
            )  # fmt: skip
        assert leaf.rollout_log_probs is not None
        assert parked.rollout_log_probs is not None
        count = call.end - call.start
        given = parked.rollout_log_probs[call.start - parked.prompt_length :][:count]
        recorded = leaf.rollout_log_probs[call.start - leaf.prompt_length :][:count]
        if np.array_equal(given, recorded):
            return None
        place = _first_other(given, recorded)
        return Mismatch(
            Kind.LOG_PROB, call.start + place, call.rid, f"{float(given[place])!r} was parked",
            repr(float(recorded[place])),
        )  # fmt: skip


def _first_other(a: Any, b: Any) -> int:
    return int(np.argmax(a != b))


class WatchedEngine:
    """An engine whose requests of one attempt are witnessed; otherwise the engine itself."""

    __slots__ = ("_engine", "_watch")

    def __init__(self, engine: Engine, watch: Watch) -> None:
        self._engine, self._watch = engine, watch

    def generate(
        self,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        routing_key: str,
        version: int,
        deadline_s: float | None = None,
        salt: int | None = None,
    ) -> Coroutine[Any, Any, Completion]:
        """Sample a continuation of `prompt` (`types.Engine`)."""
        return self._engine.generate(
            RequestIds(
                prompt.pieces, prompt.num_tokens, prompt.replay_start, self._watch, prompt.sink
            ),
            sampling,
            routing_key=routing_key,
            version=version,
            deadline_s=deadline_s,
            salt=salt,
        )

    async def probe(self) -> bool:
        """Return whether at least one server answers."""
        return await self._engine.probe()

    async def aclose(self) -> None:
        """Do nothing: an attempt does not close what all attempts share."""


@dataclass(slots=True)
class FidelityCounters:
    """What the checks found, as plain ints; the telemetry reads them once a second."""

    mismatches: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    """Samples by the first thing that differed."""
    checked: int = 0
    """Calls."""
    unknown: int = 0
    """Calls of delivered samples that this worker did not send."""


class Fidelity:
    """The judge of a worker's samples."""

    def __init__(self) -> None:
        self.counters = FidelityCounters()

    def judge(self, trajectory: Trajectory, watch: Watch) -> None:
        """Hold every leaf against what was sent and sampled.

        Raises:
            MergeFault: one of them is not what happened. The policy, for every kind and every
                generate function: the member has failed (merge_error), with the first position in
                its error; its tokens are not delivered, and its siblings are untouched.
        """
        leaves = trajectory if isinstance(trajectory, list) else [trajectory]
        try:
            for place, leaf in enumerate(leaves):
                found = watch.check(leaf)
                if found is not None:
                    self._condemn(found, leaf, place, len(leaves))
        finally:
            self.counters.checked += watch.num_checked
            self.counters.unknown += watch.num_unknown

    def count(self, kind: Kind) -> None:
        """Count a sample that differs."""
        self.counters.mismatches[kind] += 1

    def _condemn(self, found: Mismatch, leaf: Sample, place: int, num_leaves: int) -> None:
        self.count(found.kind)
        where = "" if num_leaves == 1 else f"leaf {place}: "
        log.error(
            "token_mismatch",
            kind=found.kind.value,
            group_index=leaf.group_index,
            member=leaf.member,
            leaf=place,
            position=found.position,
            rid=found.rid,
            happened=found.happened,
            recorded=found.recorded,
            generate=leaf.generate_function_path,
            message="the sample is not what the engine saw and sampled; it is not trained on",
        )
        raise MergeFault(f"{where}{found}", detail=f"mismatch_{found.kind.value}")
