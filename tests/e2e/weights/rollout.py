"""What the workers run: `multi_turn` with a witness, and a tool whose side effect is a line.

Owns the notes of attempts, replies and executions, and the damages that only a worker can do.
Never changes what is generated, but for those. Invariant: an execution is on the disk before its
result exists.

It is told where to write, and what to damage, by the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.errors import RolloutFault, Status
from rollstream.sample import Sample
from tests.e2e.weights.journal import Journal
from worker.generate import multi_turn, resumable
from worker.types import Completion, Engine, GenerateInput, GenerateOutput

FOLDER, DAMAGE = "WEIGHTS_FOLDER", "WEIGHTS_DAMAGE"
TOOL_S = 0.03
"""How long the tool takes: some updates fall into it."""


@dataclass(slots=True)
class _Attempt:
    """One call of the generate function, as its tool sees it."""

    id: str
    group: str
    member: int
    turns_held: int
    """Turns whose observation the sample held when it came."""
    rid: str
    """Of the last reply."""
    places: Counter[str] = field(default_factory=Counter)
    """Executions so far, by reply."""


_current: ContextVar[_Attempt] = ContextVar("attempt")
_journal: Journal | None = None


def journal() -> Journal:
    """Return this process's journal."""
    global _journal
    if _journal is None:
        _journal = Journal(Path(os.environ[FOLDER]) / f"worker-{os.getpid()}.jsonl")
    return _journal


class Noted:
    """An engine that notes every reply."""

    def __init__(self, engine: Engine, attempt: _Attempt) -> None:
        self._engine, self._attempt = engine, attempt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **how: Any) -> Completion:
        completion = await self._engine.generate(*args, **how)
        self._attempt.rid = completion.rid
        journal().write("call", rid=completion.rid, pid=os.getpid())
        return completion


@resumable
async def generate(given: GenerateInput) -> GenerateOutput:
    """Run `multi_turn`, and note it."""
    damage = os.environ.get(DAMAGE, "")
    sample = given.sample
    if damage:
        given.sample = sample = _DAMAGES.get(damage, _unharmed)(sample)
    group = str(sample.routing_key) if given.evaluation else str(sample.group_index)
    attempt = _Attempt(
        id=secrets.token_hex(8),
        group=group,
        member=sample.member,
        turns_held=turns_observed(sample),
        rid=sample.calls[-1].rid if sample.calls else "",
    )
    _current.set(attempt)
    # In place: what moves the deadline of a pause holds this very record.
    given.engine = Noted(given.engine, attempt)
    journal().write(
        "begin", id=attempt.id, group=group, member=sample.member, pid=os.getpid(),
        held=sample.response_length,
    )  # fmt: skip
    how = "raised"
    try:
        output = await multi_turn(given)
        assert isinstance(output.samples, Sample)
        if given.evaluation:
            # Seeds depend on the name that Redis has for the group, which nothing else carries.
            output.samples.metadata["group_id"] = group
        how = str(output.samples.status)
        return output
    except (RolloutFault, asyncio.CancelledError):
        raise
    finally:
        journal().write("end", id=attempt.id, how=how)


def turns_observed(sample: Sample) -> int:
    """Return how many of a sample's turns have an observation behind them."""
    behind = [*(call.start for call in sample.calls[1:]), len(sample.tokens)]
    return sum(start > call.end for call, start in zip(sample.calls, behind, strict=False))


async def compute(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: like "2 + 3".
    """
    attempt, nonce = _current.get(), secrets.token_hex(6)
    rid = attempt.rid
    place = attempt.places[rid]
    attempt.places[rid] += 1
    # Every call that the policy writes can be run, so a turn with an observation has one here.
    turn = attempt.turns_held + len(attempt.places) - 1
    journal().write(
        "tool", attempt=attempt.id, group=attempt.group, member=attempt.member, turn=turn,
        rid=rid, place=place, nonce=nonce, pid=os.getpid(),
    )  # fmt: skip
    await asyncio.sleep(TOOL_S)
    return f"{value_of(expression)} (run {nonce})"


def value_of(expression: str) -> str:
    """Return the value of `a + b`, `a - b` or `a * b`."""
    with contextlib.suppress(ValueError):
        left, sign, right = expression.split()
        a, b = int(left), int(right)
        return str({"+": a + b, "-": a - b, "*": a * b}.get(sign, 0))
    return "unknown"


# --- damages that only a worker can do -----------------------------------------------------------
def _unharmed(sample: Sample) -> Sample:
    return sample


def _without_tail(sample: Sample) -> Sample:
    """Go on from a parked sample without its last token, as an off-by-one would."""
    if sample.calls and sample.calls[-1].end == len(sample.tokens) > sample.calls[-1].start:
        return _cut(sample, len(sample.tokens) - 1)
    return sample


def _without_observation(sample: Sample) -> Sample:
    """Forget what the tools of the last turn gave, so that they run again."""
    if sample.calls and sample.calls[-1].end < len(sample.tokens):
        return _cut(sample, sample.calls[-1].end)
    return sample


def _without_everything(sample: Sample) -> Sample:
    """Begin a parked sample anew."""
    return _cut(sample, sample.prompt_length) if sample.calls else sample


def _cut(sample: Sample, length: int) -> Sample:
    """Return a sample of its first tokens, sound by its own invariant."""
    gone = len(sample.tokens) - length
    kept = sample.response_length - gone
    cut = Sample(**{name: getattr(sample, name) for name in Sample.__dataclass_fields__})
    cut.tokens = np.array(sample.tokens[:length])
    cut.response_length = kept
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    cut.loss_mask = np.array(sample.loss_mask[:kept])
    cut.rollout_log_probs = np.array(sample.rollout_log_probs[:kept])
    cut.calls = [call for call in sample.calls if call.start < length]
    for call in cut.calls:
        call.end = min(call.end, length)
        call.versions = [(v, min(a, length), min(b, length)) for v, a, b in call.versions]
    cut.derive_weight_versions()
    if not cut.calls:
        cut.status = Status.PENDING
    return cut


_DAMAGES = {
    "tail": _without_tail,
    "rerun": _without_observation,
    "forget": _without_everything,
}
