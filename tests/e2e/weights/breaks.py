"""What `--break` damages: each is a mistake that real systems make, and must make the proof fail.

Owns the damages and the figure that each must show in. Never used by a run that is to be believed.
Invariant: a damaged sample still holds the record's own invariant (`Sample.validate`), so only the
proof can see it.

Of a *worker*: the worker's own generate function does it (`rollout`). Of the *record*: what the
trainer and the observer wrote down is changed before it is judged. Of the *run*: a script of the
run's in Redis is gone behind. Of the *trainer*: its side of an update leaves something out (`run`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollstream.sample import Call, Sample
from tests.e2e.weights.findings import Kind
from tests.e2e.weights.record import Dropped, Record

Place = Literal["worker", "record", "run", "trainer"]


@dataclass(frozen=True, slots=True)
class Break:
    """One damage."""

    place: Place
    shows_in: Kind | Literal["resumed"]
    damage: Callable[[Record], None] | None = None
    """Of a record, in place."""


# --- of the record -------------------------------------------------------------------------------
def dispatched(record: Record) -> None:
    """Record the version that was current when a call was sent, whatever the engine says."""
    for sample in record.samples():
        _respan(sample, lambda call: call.dispatched_version)


def newest(record: Record) -> None:
    """Record the version that was current when the reply came."""
    for sample in record.samples():
        _respan(sample, lambda call: max(version for version, _, _ in call.versions))


def drop(record: Record) -> None:
    """Lose the last token of every reply that was stopped."""
    for sample in record.samples():
        for call in sample.calls[:-1]:
            if call.finish == "abort" and call.end - call.start > 1:
                _delete(sample, call, call.end - 1)
                break


def logprob(record: Record) -> None:
    """Let the log-probs pass through half precision."""
    for sample in record.samples():
        assert sample.rollout_log_probs is not None
        sample.rollout_log_probs = sample.rollout_log_probs.astype(np.float16).astype(np.float32)


def seed(record: Record) -> None:
    """Sample a resumed reply under another seed."""
    for sample in record.samples():
        for before, call in zip(sample.calls, sample.calls[1:], strict=False):
            if before.end == call.start:
                call.sampling = {**call.sampling, "seed": call.sampling["seed"] + 1}


def budget(record: Record) -> None:
    """Ask for the whole budget again after a stop."""
    for sample in record.samples():
        for before, call in zip(sample.calls, sample.calls[1:], strict=False):
            if before.end == call.start > before.start:
                most = before.sampling["max_new_tokens"]
                call.sampling = {**call.sampling, "max_new_tokens": most}


def lost(record: Record) -> None:
    """Forget a group between its hand-out and its ack."""
    record.acked[-1] = record.acked[-1][1:]


def ack_twice(record: Record) -> None:
    """Ack a group in two batches."""
    record.acked[-1] = [*record.acked[-1], record.acked[0][0]]


def hand_twice(record: Record) -> None:
    """Hand a group out again."""
    record.handed[-1].groups.append(record.handed[0].groups[0])


def stale(record: Record) -> None:
    """Hand a group out however old it is."""
    for batch in record.handed:
        batch.version += 10
        for group in batch.groups:
            group.staleness += 10


def mask(record: Record) -> None:
    """Turn the off-policy mask over."""
    for sample in record.samples():
        assert sample.loss_mask is not None
        sample.loss_mask = sample.sampled_mask()
        if not record.scene.mask_offpolicy:
            sample.loss_mask[: len(sample.loss_mask) // 2] = 0


def pause(record: Record) -> None:
    """Make a call in the middle of an update."""
    update = next(one for one in record.updates if one.mode == "abort")
    rid = next(iter(record.pid_of))
    middle = (update.entered_s + update.left_s) / 2
    record.engine_calls[rid] = replace(record.engine_calls[rid], started_s=middle)


def leak(record: Record) -> None:
    """Train on an evaluation's sample."""
    for evaluation in record.evaluations:
        if evaluation.samples:
            group = record.handed[-1].groups[-1]
            group.samples = [*group.samples[1:], evaluation.samples[0]]


def short(record: Record) -> None:
    """Drop a group because one of its members failed."""
    record.drops.append(Dropped(str(record.scene.rows - 1), "short_group", "a member failed"))


def ran_twice(record: Record) -> None:
    """Run a tool a second time in the same attempt."""
    record.executions.append(replace(record.executions[0], nonce="0" * 12))


BREAKS: dict[str, Break] = {
    "dispatched": Break("record", Kind.VERSION, dispatched),
    "newest": Break("record", Kind.VERSION, newest),
    "drop": Break("record", Kind.TOKEN, drop),
    "logprob": Break("record", Kind.TOKEN, logprob),
    "seed": Break("record", Kind.TOKEN, seed),
    "budget": Break("record", Kind.BUDGET, budget),
    "lost": Break("record", Kind.LOST, lost),
    "ack-twice": Break("record", Kind.TWICE, ack_twice),
    "hand-twice": Break("record", Kind.TWICE, hand_twice),
    "stale": Break("record", Kind.STALE, stale),
    "pause": Break("record", Kind.PAUSE, pause),
    "mask": Break("record", Kind.MASK, mask),
    "leak": Break("record", Kind.EVALUATION, leak),
    "short": Break("record", Kind.DROP, short),
    "ran-twice": Break("record", Kind.TOOL, ran_twice),
    "tail": Break("worker", Kind.TOKEN),
    "rerun": Break("worker", Kind.TOOL),
    "forget": Break("worker", "resumed"),
    "account": Break("run", Kind.ACCOUNT),
    "late-label": Break("trainer", Kind.VERSION),
}
NAMES = tuple(BREAKS)


def _respan(sample: Sample, version_of: Callable[[Call], int]) -> None:
    sample.calls = [
        replace(call, versions=[(version_of(call), call.start, call.end)]) for call in sample.calls
    ]
    sample.derive_weight_versions()


def _delete(sample: Sample, shorter: Call, at: int) -> None:
    """Take one sampled token away, and move everything behind it."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    place = at - sample.prompt_length
    sample.tokens = np.delete(sample.tokens, at)
    sample.loss_mask = np.delete(sample.loss_mask, place)
    sample.rollout_log_probs = np.delete(sample.rollout_log_probs, place)
    sample.response_length -= 1

    def moved(index: int) -> int:
        return index - (index > at)

    sample.calls = [
        replace(
            copy.copy(call),
            start=moved(call.start),
            end=moved(call.end),
            versions=[(v, moved(a), moved(b)) for v, a, b in call.versions],
        )
        for call in sample.calls
    ]
