"""Merges and policies against the slow, obvious reference, over random clients and engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import MergeFault
from rollstream.sample import Sample
from tests.unit.tito import reference_merge as reference
from tests.unit.tito.reference_merge import Outcome, Turn, Whole
from worker.tito.divergence import resolve
from worker.tito.ids import as_ids
from worker.tito.merge import Merged, TurnRecord, merge_turns
from worker.types import DivergencePolicy, Replay

IDS = st.integers(1, 3)
SHAPE = (2, 1)
Made = TypeVar("Made")


@st.composite
def clients(draw: Any, *, rewrites: bool = True) -> list[Turn]:
    """Return the turns of a client that mostly appends, and sometimes does anything else."""
    with_rows, with_teacher = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    turns: list[Turn] = []
    for place in range(draw(st.integers(0, 6))):
        prompt = _prompt(draw, turns, rewrites=rewrites)
        output = draw(st.lists(IDS, max_size=3))
        turn = Turn(
            prompt,
            output,
            [-(place * 16 + i + 1) / 1024 for i in range(len(output))],
            draw(st.sampled_from(["stop"] * 7 + ["length", "abort"])),
        )
        if with_teacher and draw(st.integers(0, 15)):
            turn.teacher = [-(place * 16 + i + 1) / 512 for i in range(len(output))]
        if with_rows:
            _add_rows(draw, turns, turn, place)
        turns.append(turn)
    return turns


def _prompt(draw: Any, turns: list[Turn], *, rewrites: bool) -> list[int]:
    if not turns:
        return draw(st.lists(IDS, max_size=4))
    kind = draw(st.sampled_from(["append"] * 5 + ["trim", "earlier", "cut", "change", "other"]))
    kind = kind if rewrites or kind == "trim" else "append"
    held = list(turns[-1].held)
    if kind == "earlier":
        held = list(turns[draw(st.integers(0, len(turns) - 1))].held)
    elif kind == "trim" and turns[-1].output:
        held.pop()
    elif kind == "cut" and held:
        del held[draw(st.integers(0, len(held) - 1)) :]
    elif kind == "change" and held:
        held[draw(st.integers(0, len(held) - 1))] = draw(IDS)
    elif kind == "other":
        held = []
    return held + draw(st.lists(IDS, max_size=3))


def _add_rows(draw: Any, turns: list[Turn], turn: Turn, place: int) -> None:
    fed = len(turn.held) - 1
    known = [0, len(turns[-1].held) - 1, len(turns[-1].held) - 2] if turns else [0]
    if turns:
        known.append(max((reference.common(t.held, turn.prompt) for t in turns), default=0) - 1)
    start = draw(st.sampled_from([*known[-3:], *known[-3:], *known[-3:], None, 0, 2]))
    if start is None or not 0 <= start <= fed:
        return
    turn.start = start
    turn.rows = [place * 1000 + position for position in range(start, fed)]


def record(turn: Turn, memory: np.ndarray | None = None) -> TurnRecord:
    prompt = as_ids(turn.prompt) if memory is None else memory[: len(turn.prompt)]
    replay = None
    if turn.start is not None:
        rows = np.zeros((len(turn.rows), *SHAPE), np.int32)
        rows += np.array(turn.rows, np.int32).reshape(-1, 1, 1)
        replay = Replay(turn.start, rows)
    return TurnRecord(
        prompt, as_ids(turn.output), np.array(turn.log_probs, np.float32), turn.finish,
        routed_experts=replay,
        per_token={} if turn.teacher is None else {
            "teacher_log_probs": np.array(turn.teacher, np.float32)
        },
    )  # fmt: skip


def records(turns: list[Turn]) -> list[TurnRecord]:
    """Return the records, numbered by their versions so that a test knows which is which."""
    made = []
    for place, turn in enumerate(turns):
        one = record(turn)
        one.versions = [(place, 0, len(turn.output))]
        made.append(one)
    return made


def attempt(call: Callable[[], Made]) -> Made | str:
    """Return what a merge gave, or the detail of its fault."""
    try:
        return call()
    except MergeFault as fault:
        return fault.detail


def assert_equal(sample: Sample | None, whole: Whole) -> None:
    assert sample is not None
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert sample.tokens.tolist() == whole.tokens
    assert sample.prompt_length == whole.prompt_length
    calls = [(call.versions[0][0], call.start, call.end) for call in sample.calls]
    assert calls == whole.calls
    assert sample.loss_mask.tolist() == whole.mask
    assert sample.rollout_log_probs.tolist() == whole.log_probs
    teacher = sample.teacher_log_probs
    assert (None if teacher is None else teacher.tolist()) == whole.teacher
    rows = sample.rollout_routed_experts
    if whole.rows is None:
        assert rows is None
    else:
        assert rows is not None
        assert rows.dtype == np.int32
        layers, top_k = SHAPE
        assert rows.tolist() == [[[row] * top_k] * layers for row in whole.rows]
    assert sample.status == whole.status


def assert_outcome(merged: list[Merged], outcome: Outcome) -> None:
    found = [one for one in merged if one.sample is not None]
    assert len(found) == len(outcome.samples)
    for one, whole in zip(found, outcome.samples, strict=True):
        assert_equal(one.sample, whole)
    if not found:
        assert merged[0].empty_reason == outcome.reason


@settings(max_examples=300, deadline=None)
@given(
    turns=clients(rewrites=False), max_seq_len=st.one_of(st.none(), st.integers(0, 20)),
    max_trim=st.integers(0, 1),
)  # fmt: skip
def test_merge_equals_the_reference_with_rows_trims_and_optional_fields(
    turns: list[Turn], max_seq_len: int | None, max_trim: int
) -> None:
    outcome = reference.linear(turns, max_seq_len, max_trim)
    held = None
    if max_trim:
        held = as_ids(outcome.samples[0].tokens if outcome.samples else [])
    merged = attempt(
        lambda: merge_turns(
            records(turns), accumulated=held, max_trim=max_trim, max_seq_len=max_seq_len
        )
    )
    if isinstance(merged, str):
        assert merged == outcome.reason
        return
    assert_outcome([merged], outcome)
    assert merged.left_out == outcome.left_out


@settings(max_examples=400, deadline=None)
@given(
    turns=clients(), policy=st.sampled_from(DivergencePolicy),
    max_seq_len=st.one_of(st.none(), st.integers(3, 20)),
)  # fmt: skip
def test_policies_equal_the_reference_and_keep_only_what_the_engine_saw(
    turns: list[Turn], policy: DivergencePolicy, max_seq_len: int | None
) -> None:
    outcome = reference.resolved(turns, policy.value, max_seq_len)
    result = attempt(lambda: resolve(records(turns), policy, max_seq_len=max_seq_len))
    if isinstance(result, str):
        assert result == outcome.reason
        return
    found = [(one.turn, one.index, one.dropped_tokens) for one in result.divergences]
    assert found == outcome.divergences
    if result.fault is not None:
        assert (policy, result.fault.detail) == (DivergencePolicy.REJECT, outcome.reason)
        return
    assert_outcome(result.merged, outcome)
    assert result.left_out == outcome.left_out
    _assert_the_engine_saw_it(result.merged, turns)
    samples = [one.sample for one in result.merged if one.sample is not None]
    noted = [one for sample in samples for one in sample.metadata.get("divergences", [])]
    if samples:
        assert sorted(noted, key=lambda one: one["turn"]) == [
            one.to_dict() for one in result.divergences
        ]


def _assert_the_engine_saw_it(merged: list[Merged], turns: list[Turn]) -> None:
    trained: list[int] = []
    for one in merged:
        if one.sample is None:
            continue
        tokens = one.sample.tokens.tolist()
        for call in one.sample.calls:
            turn = turns[call.versions[0][0]]
            trained.append(call.versions[0][0])
            assert tokens[: call.start] == turn.prompt
            assert turn.output[: call.end - call.start] == tokens[call.start : call.end]
    assert len(trained) == len(set(trained))


@settings(max_examples=80, deadline=None)
@given(turns=clients(), policy=st.sampled_from(list(DivergencePolicy)[1:]))
def test_prompts_that_are_views_of_one_memory_diverge_like_copies(
    turns: list[Turn], policy: DivergencePolicy
) -> None:
    whole = max((turn.prompt for turn in turns), key=len, default=[])
    memory = as_ids(whole)
    views = records(turns)
    for turn, view in zip(turns, views, strict=True):
        if turn.prompt == whole[: len(turn.prompt)]:
            view.prompt_ids = memory[: len(turn.prompt)]
    outcome = reference.resolved(turns, policy.value)
    result = attempt(lambda: resolve(views, policy))
    if isinstance(result, str):
        assert result == outcome.reason
        return
    assert_outcome(result.merged, outcome)
