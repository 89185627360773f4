"""The merge against a slow and obvious one, and against the trajectory that grew by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ContractError, MergeFault
from rollstream.sample import Sample
from tests.builders import a_sample
from tests.toy import a_completion, array
from worker.tito import ids
from worker.tito.ids import prompt_ids
from worker.tito.merge import Merged, TurnRecord, fold_samples, merge_turns
from worker.tito.trajectory import Trajectory
from worker.types import Finish


@dataclass
class Turn:
    """A turn in plain lists."""

    prompt: list[int]
    output: list[int]
    log_probs: list[float]
    finish: str = "stop"

    def record(self, memory: np.ndarray | None = None) -> TurnRecord:
        prompt = array(self.prompt) if memory is None else memory[: len(self.prompt)]
        return TurnRecord(
            prompt, array(self.output), np.array(self.log_probs, np.float32), self.finish,
            versions=[(len(self.prompt), 0, len(self.output))],
        )  # fmt: skip


@dataclass
class Slow:
    """What the obvious merge gives: one row per token, written as it is read."""

    rows: list[tuple[int, int, float]]
    """(id, mask, log-prob), prompt included."""
    prompt_length: int
    status: str


def slow_merge(turns: list[Turn], max_seq_len: int | None, max_trim: int) -> Slow | str:
    """Return the merged rows, or why there are none."""
    kept: list[Turn] = []
    for turn in turns:
        if max_seq_len is not None and len(turn.prompt) + len(turn.output) > max_seq_len:
            break
        kept.append(turn)
        if turn.finish != "stop":
            break
    if not kept:
        return "all_truncated" if turns else "no_records"
    rows: list[tuple[int, int, float]] = []
    sampled = 0
    for turn in kept:
        for trim in range(min(max_trim, sampled) + 1):
            held = rows[: len(rows) - trim]
            if turn.prompt[: len(held)] == [row[0] for row in held]:
                break
        else:
            return "fault"
        rows = held + [(number, 0, 0.0) for number in turn.prompt[len(held) :]]
        rows += [(n, 1, p) for n, p in zip(turn.output, turn.log_probs, strict=True)]
        sampled = len(turn.output)
    status = {"stop": "completed", "length": "truncated", "abort": "aborted"}[kept[-1].finish]
    return Slow(rows, len(kept[0].prompt), status)


IDS = st.integers(1, 4)
LOG_PROBS = st.integers(-1000, -1).map(lambda n: n / 1024)


@st.composite
def conversations(draw: Any) -> list[Turn]:
    """Return turns that are append-only but for what a mutation may have broken."""
    held = draw(st.lists(IDS, max_size=4))
    turns = []
    for _ in range(draw(st.integers(0, 5))):
        output = draw(st.lists(IDS, max_size=4))
        log_probs = draw(st.lists(LOG_PROBS, min_size=len(output), max_size=len(output)))
        finish = draw(st.sampled_from(["stop"] * 8 + ["length", "abort"]))
        turns.append(Turn(list(held), output, log_probs, finish))
        left_out = draw(st.sampled_from([0, 0, 0, 1, 2]))
        held = held + output[: len(output) - min(left_out, len(output))]
        held = held + draw(st.lists(IDS, max_size=3))
    if turns and draw(st.booleans()):
        broken = turns[draw(st.integers(0, len(turns) - 1))].prompt
        if broken:
            place = draw(st.integers(0, len(broken) - 1))
            if draw(st.booleans()):
                broken[place] = draw(IDS)
            else:
                del broken[place:]
    return turns


def _outcome(turns: list[TurnRecord], max_seq_len: int | None) -> Merged | str:
    try:
        merged = merge_turns(turns, max_seq_len=max_seq_len)
    except MergeFault:
        return "fault"
    return merged if merged.empty_reason is None else merged.empty_reason


def _assert_equal(merged: Merged | str, slow: Slow | str) -> None:
    if isinstance(slow, str) or isinstance(merged, str):
        assert merged == slow
        return
    sample = merged.sample
    assert sample is not None
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    response = slow.rows[slow.prompt_length :]
    assert sample.tokens.tolist() == [row[0] for row in slow.rows]
    assert sample.loss_mask.tolist() == [row[1] for row in response]
    assert sample.rollout_log_probs.tolist() == [row[2] for row in response]
    assert sample.sampled_mask().tolist() == [row[1] for row in response]
    assert (sample.prompt_length, sample.status) == (slow.prompt_length, slow.status)


@settings(max_examples=120, deadline=None)
@given(turns=conversations(), max_seq_len=st.one_of(st.none(), st.integers(0, 20)))
def test_merge_equals_the_obvious_one(turns: list[Turn], max_seq_len: int | None) -> None:
    records = [turn.record() for turn in turns]
    _assert_equal(_outcome(records, max_seq_len), slow_merge(turns, max_seq_len, 0))


@settings(max_examples=120, deadline=None)
@given(turns=conversations(), max_trim=st.integers(0, 2))
def test_merge_with_a_trim_equals_the_obvious_one(turns: list[Turn], max_trim: int) -> None:
    slow = slow_merge(turns, None, max_trim)
    records = [turn.record() for turn in turns]
    held = array([row[0] for row in slow.rows] if isinstance(slow, Slow) else [])
    try:
        merged = merge_turns(records, accumulated=held, max_trim=max_trim)
    except MergeFault:
        assert slow == "fault"
        return
    _assert_equal(merged if merged.sample is not None else str(merged.empty_reason), slow)


@settings(max_examples=100, deadline=None)
@given(turns=conversations())
def test_prompts_in_one_memory_merge_like_copies(turns: list[Turn]) -> None:
    whole = max((turn.prompt for turn in turns), key=len, default=[])
    turns = [turn for turn in turns if turn.prompt == whole[: len(turn.prompt)]]
    memory = array(whole)
    shared = _outcome([turn.record(memory) for turn in turns], None)
    _assert_equal(shared, slow_merge(turns, None, 0))


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(IDS, max_size=4),
    turns=st.lists(
        st.tuples(st.lists(IDS, min_size=1, max_size=4), st.lists(IDS, min_size=1, max_size=3)),
        min_size=1,
        max_size=6,
    ),
)
def test_merge_of_records_equals_the_trajectory_that_grew(
    prompt: list[int], turns: list[tuple[list[int], list[int]]]
) -> None:
    trajectory = Trajectory(prompt_ids(prompt), (2,))
    records, held = [], list(prompt)
    for place, (output, observed) in enumerate(turns):
        reply = a_completion(output, version=place, rid=f"{place:032x}")
        records.append(
            TurnRecord(
                array(held), reply.ids, reply.log_probs, reply.finish, reply.versions,
                rid=reply.rid, engine=reply.engine, dispatched_version=place,
                sampling={"seed": place},
            )
        )  # fmt: skip
        trajectory.add_completion(reply, dispatched_version=place, sampling={"seed": place})
        held = held + output
        if place + 1 < len(turns):
            trajectory.add_observation(array(observed))
            held = held + observed
    grown = trajectory.write_to(Sample(), lambda ids: str(ids.tolist()))
    merged = merge_turns(records, decode=lambda ids: str(ids.tolist())).sample
    assert merged is not None
    merged.finish(grown.stop_reason, grown.status)  # type: ignore[arg-type]  # both set
    assert merged.to_dict() == grown.to_dict()


def test_fold_of_samples_equals_the_merge_of_their_records() -> None:
    turns = [((4, 5), (6,)), ((7,), (8, 9)), ((10, 11), ())]
    whole = a_sample(turns=turns, versions=[1, 2, 3])
    ends = [call.end for call in whole.calls]
    parts = []
    for place, call in enumerate(whole.calls):
        part = a_sample(turns=turns, versions=[1, 2, 3])
        part.tokens = whole.tokens[: ends[place]].copy()
        part.response_length = call.end - call.start
        assert whole.loss_mask is not None
        assert whole.rollout_log_probs is not None
        span = slice(call.start - whole.prompt_length, call.end - whole.prompt_length)
        part.loss_mask, part.rollout_log_probs = (
            whole.loss_mask[span],
            whole.rollout_log_probs[span],
        )
        part.calls, part.weight_versions = [call], [place + 1]
        parts.append(part)
    folded = fold_samples(parts, lambda ids: "")
    assert folded.to_dict() == whole.to_dict()


def test_merge_leaves_the_template_alone_and_shares_no_container_with_it() -> None:
    template = Sample(group_index=3, index=12288, metadata={"k": 1}, extra={"x": 1})
    before = template.to_dict()
    records = [Turn([1], [2], [-0.5]).record(), Turn([1, 2, 3], [4], [-0.5]).record()]
    one, other = (merge_turns(records, template=template).sample for _ in range(2))
    assert one is not None
    assert other is not None
    one.metadata["mine"], one.extra["mine"] = True, True
    one.spans.append(None)  # type: ignore[arg-type]  # a mark
    assert template.to_dict() == before
    assert "mine" not in other.metadata
    assert one.index == template.index


def test_merge_compares_shared_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    original = ids._compare

    def counted(a: np.ndarray, b: np.ndarray) -> Any:
        compared.append(len(a))
        return original(a, b)

    monkeypatch.setattr(ids, "_compare", counted)
    for turns in (16, 64):
        compared.clear()
        memory = np.arange(turns * 10, dtype=np.int32)
        records = [
            TurnRecord(memory[: 10 * k + 5], memory[10 * k + 5 : 10 * k + 10].copy(),
                       np.zeros(5, np.float32), Finish.STOP)
            for k in range(turns)
        ]  # fmt: skip
        merge_turns(records)
        assert sum(compared) == (turns - 1) * 5


def test_merge_refuses_log_probs_that_are_no_numbers() -> None:
    record = Turn([1], [2, 3], [float("nan"), -0.5]).record()
    with pytest.raises(ContractError, match="not finite"):
        merge_turns([record])
