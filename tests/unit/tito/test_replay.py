"""Routed experts of a trajectory: what is asked for, how patches join, what stays unknown."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import STATUS_OF, MergeFault, StopReason
from rollstream.sample import Call, PrefixCacheInfo, Sample, SpecInfo
from tests.builders import a_sample
from tests.toy import a_completion, array
from worker.tito.fold import fold_samples
from worker.tito.ids import prompt_ids
from worker.tito.merge import TurnRecord, merge_turns
from worker.tito.replay import num_known
from worker.tito.trajectory import Trajectory
from worker.types import Completion, Finish, Replay

PROMPT = [1, 2, 3]
LAYERS, TOP_K = 2, 2


def rows(values: Sequence[int], top_k: int = TOP_K) -> Any:
    """Return rows that hold one number each."""
    made = np.zeros((len(values), LAYERS, top_k), np.int32)
    return made + np.array(values, np.int32).reshape(-1, 1, 1)


def numbers(sample: Sample, name: str = "rollout_routed_experts") -> list[int]:
    """Return the number of each row, all values of a row being the same."""
    held = getattr(sample, name)
    assert held.dtype == np.int32
    assert (held == held[:, :1, :1]).all()
    plain: list[int] = held[:, 0, 0].tolist()
    return plain


def answer(trajectory: Trajectory, ids: list[int], turn: int, **fields: Any) -> Completion:
    """Add a reply that brings the rows that were asked for: turn * 100 + position."""
    request = trajectory.request()
    assert request.replay_start is not None
    fed = range(request.replay_start, request.num_tokens + len(ids) - 1)
    given = Replay(request.replay_start, rows([turn * 100 + position for position in fed]))
    completion = a_completion(ids, **({"routed_experts": given} | fields))
    trajectory.add_completion(completion, dispatched_version=1, sampling={})
    return completion


def held_rows(trajectory: Trajectory) -> list[Any]:
    """Return the arrays of rows that a trajectory keeps alive."""
    assert trajectory._rows is not None
    patches = trajectory._rows["rollout_routed_experts"]._patches
    return [patch.replay.rows for patch in patches if patch.replay is not None]


def start_of(trajectory: Trajectory) -> int | None:
    return trajectory.request().replay_start


# --- conformance 69 and 24 -----------------------------------------------------------------------
def test_69_the_first_call_asks_from_0_and_later_ones_behind_what_is_there() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    assert start_of(trajectory) == 0
    answer(trajectory, [10, 11], 0)
    assert start_of(trajectory) == len([*PROMPT, 10, 11]) - 1
    trajectory.add_observation(array([20, 21]))
    assert start_of(trajectory) == 4
    assert start_of(trajectory) == 4, "a retry asks the same"
    answer(trajectory, [30, 31], 1)
    assert start_of(trajectory) == 8
    assert start_of(Trajectory(prompt_ids(PROMPT), (2,))) is None


def test_24_rows_are_one_less_than_tokens_each_out_of_the_call_that_fed_it() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0)
    trajectory.add_observation(array([20, 21]))
    answer(trajectory, [30, 31], 1)
    sample = trajectory.write_to(Sample())
    assert numbers(sample) == [0, 1, 2, 3, 104, 105, 106, 107]
    assert len(sample.tokens) == 9


def test_24_a_reply_that_brings_all_rows_replaces_what_was_there() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0)
    whole = Replay(0, rows(range(500, 506)))
    answer(trajectory, [30, 31], 1, routed_experts=whole)
    assert numbers(trajectory.write_to(Sample())) == [*range(500, 506)]
    assert len(held_rows(trajectory)) == 1, "the rows that were replaced are let go"


# --- rows that no engine brought -----------------------------------------------------------------
def test_rows_of_an_observation_behind_the_last_call_are_marked() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0)
    trajectory.add_observation(array([20, 21]))
    sample = trajectory.write_to(Sample())
    # Row 4 is of the last sampled token, which no call fed either.
    assert numbers(sample) == [0, 1, 2, 3, -1, -1]


def test_rows_of_a_reply_aborted_in_the_queue_are_left_to_the_next_call() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10], 0)
    trajectory.add_observation(array([20]))
    answer(trajectory, [], 1, routed_experts=None, finish=Finish.ABORT)
    assert start_of(trajectory) == 3
    assert numbers(trajectory.write_to(Sample())) == [0, 1, 2, -1]
    answer(trajectory, [30, 31], 2)
    assert numbers(trajectory.write_to(Sample())) == [0, 1, 2, 203, 204, 205]


def test_65_a_call_that_brought_no_rows_though_others_did_is_a_fault_that_says_which() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0)
    answer(trajectory, [30, 31], 1, routed_experts=None)
    with pytest.raises(MergeFault, match="record 2 has no routed_experts payload for its 2 rows"):
        trajectory.write_to(Sample())
    answer(trajectory, [40], 2)  # asks from row 4 again, so nothing is missing any more
    assert numbers(trajectory.write_to(Sample())) == [0, 1, 2, 3, 204, 205, 206]


def test_66_without_any_payload_there_is_no_replay_data() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0, routed_experts=None)
    assert start_of(trajectory) == 0
    assert trajectory.write_to(Sample()).rollout_routed_experts is None
    empty = Trajectory(prompt_ids(PROMPT), (2,), replay=True).write_to(Sample())
    assert empty.rollout_routed_experts is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Replay(3, rows([1, 2, 3])), "record 2 starts at row 3; expected 4"),
        (Replay(5, rows([1])), "record 2 starts at row 5; expected 4"),
        (Replay(4, rows([1])), "record 2 has 1 rows from row 4; its prompt and reply fed 6 tok"),
        (Replay(4, rows([1, 2, 3])), "record 2 has 3 rows from row 4"),
        (Replay(4, rows([1, 2], top_k=3)), r"record 2 has \(layers, top_k\) \(2, 3\); .* \(2, 2\)"),
        (Replay(4, np.zeros((2, 4), np.int32)), r"is int32 of shape \(2, 4\)"),
        (Replay(4, np.zeros((2, 2, 2), np.float32)), "is float32 of shape"),
    ],
)
def test_63_68_rows_that_do_not_join_are_a_fault_and_change_nothing(
    given: Replay, said: str
) -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0)
    with pytest.raises(MergeFault, match=said) as caught:
        answer(trajectory, [30, 31], 1, routed_experts=given)
    assert caught.value.detail == "replay"
    assert (trajectory.num_tokens, len(trajectory.calls)) == (5, 1)
    assert numbers(trajectory.write_to(Sample())) == [0, 1, 2, 3]


def test_67_an_empty_payload_says_nothing_about_later_ones() -> None:
    trajectory = Trajectory(prompt_ids([1]), (2,), replay=True)
    answer(trajectory, [], 0, routed_experts=Replay(0, rows([], top_k=0)), finish=Finish.ABORT)
    rows_of_none = trajectory.write_to(Sample()).rollout_routed_experts
    assert rows_of_none is not None
    assert (rows_of_none.shape, rows_of_none.dtype) == ((0, 2, 0), np.dtype(np.int32))
    answer(trajectory, [10, 11], 1)
    answer(trajectory, [], 2, routed_experts=Replay(2, rows([], top_k=0)), finish=Finish.ABORT)
    answer(trajectory, [12], 3)
    assert numbers(trajectory.write_to(Sample())) == [100, 101, 302]


def test_12_41_indexer_choices_are_kept_beside_the_experts_and_alone() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0, indexer_topk=Replay(0, rows([7, 7, 7, 7], top_k=1)))
    answer(trajectory, [30], 1, indexer_topk=Replay(0, rows([8, 8, 8, 8, 8], top_k=1)))
    sample = trajectory.write_to(Sample())
    assert numbers(sample, "rollout_indexer_topk") == [8] * 5
    assert numbers(sample) == [0, 1, 2, 3, 104]
    alone = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(alone, [10, 11], 0, routed_experts=None, indexer_topk=Replay(0, rows([7] * 4)))
    assert start_of(alone) == 4
    assert alone.write_to(Sample()).rollout_routed_experts is None


def test_rows_that_nobody_asked_for_are_ignored() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,))
    completion = a_completion([10], routed_experts=Replay(9, rows([1])))
    trajectory.add_completion(completion, dispatched_version=1, sampling={})
    assert trajectory.write_to(Sample()).rollout_routed_experts is None


# --- resume --------------------------------------------------------------------------------------
def test_a_parked_sample_goes_on_from_its_rows_and_asks_for_those_it_lacks() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10, 11], 0)
    trajectory.add_observation(array([20]))
    parked = trajectory.write_to(Sample())
    after = Trajectory.from_sample(parked, (2,), replay=True)
    assert start_of(after) == 4
    assert numbers(after.write_to(replace(parked))) == [0, 1, 2, 3, -1]
    answer(after, [30, 31], 2)
    assert numbers(after.write_to(replace(parked))) == [0, 1, 2, 3, 204, 205, 206]
    assert numbers(parked) == [0, 1, 2, 3, -1]


def test_a_sample_parked_without_rows_asks_for_all_of_them() -> None:
    parked = a_sample(prompt_ids=PROMPT, turns=[((10, 11), ())])
    after = Trajectory.from_sample(parked, (2,), replay=True)
    assert start_of(after) == 0
    answer(after, [30], 2)
    assert numbers(after.write_to(replace(parked))) == [200, 201, 202, 203, 204]


def test_a_longer_sample_does_not_keep_what_was_of_a_shorter_one() -> None:
    parked = a_sample(prompt_ids=PROMPT, turns=[((10, 11), ())])
    parked.teacher_log_probs = np.array([-1, -2], np.float32)
    parked.rollout_routed_experts = rows([0, 1, 2, 3])
    same = Trajectory.from_sample(parked, (2,)).write_to(replace(parked))
    assert same.teacher_log_probs is not None
    assert numbers(same) == [0, 1, 2, 3]
    after = Trajectory.from_sample(parked, (2,))
    after.add_completion(a_completion([30]), dispatched_version=1, sampling={})
    longer = after.write_to(replace(parked))
    assert (longer.teacher_log_probs, longer.rollout_routed_experts) == (None, None)


@pytest.mark.parametrize(("known", "total"), [(0, 0), (0, 3), (3, 3), (5, 3000), (2999, 3000)])
def test_known_rows_end_before_the_marked_ones(known: int, total: int) -> None:
    held = rows([-1] * total)
    held[:known, 0, 1] = 0
    assert num_known(held) == known


# --- both paths ----------------------------------------------------------------------------------
IDS = st.integers(1, 4)
SCRIPTS = st.lists(
    st.tuples(st.lists(IDS, max_size=4), st.lists(IDS, max_size=3), st.booleans()),
    min_size=1,
    max_size=6,
)
"""Per turn: sampled ids, observed ids, whether the call was answered with all rows."""


@dataclass
class Played:
    grown: Sample
    records: list[TurnRecord]
    parts: list[Sample]


def play(prompt: list[int], script: Any, last: Finish, *, replay: bool) -> Played:
    """Grow a trajectory; keep the records and the samples of its turns beside it."""
    trajectory = Trajectory(prompt_ids(prompt), (2,), replay)
    records, parts, held = [], [], list(prompt)
    for turn, (output, observed, is_whole) in enumerate(script):
        is_last = turn + 1 == len(script)
        asked = start_of(trajectory)
        start = 0 if is_whole else asked
        fed = len(held) + len(output) - 1
        given_rows = None
        if replay and start is not None and fed >= start:
            given_rows = Replay(start, rows([turn * 100 + p for p in range(start, fed)]))
        reply = a_completion(
            output, version=turn, rid=f"{turn:032x}", finish=last if is_last else Finish.STOP,
            cache=PrefixCacheInfo(turn, len(held)), spec=SpecInfo(1, 2, 3, len(output)),
            routed_experts=given_rows,
        )  # fmt: skip
        sampling = {"seed": turn}
        trajectory.add_completion(reply, dispatched_version=turn, sampling=sampling)
        records.append(
            TurnRecord.of(array(held), reply, dispatched_version=turn, sampling=sampling)
        )
        so_far = trajectory.write_to(Sample())
        held += output
        parts.append(_part(so_far, trajectory.calls[-1], reply, len(output)))
        if not is_last:
            trajectory.add_observation(array(observed))
            held += observed
    grown = trajectory.write_to(Sample(), lambda ids: str(ids.tolist()))
    return Played(grown, records, parts)


REASONS = {
    Finish.STOP: StopReason.STOP,
    Finish.LENGTH: StopReason.TURN_LENGTH,
    Finish.ABORT: StopReason.ABORT_REQUESTED,
}


def _part(so_far: Sample, call: Call, reply: Completion, count: int) -> Sample:
    """Return the turn alone: its whole context is the prompt."""
    reason = REASONS[reply.finish]
    part = replace(so_far, response_length=count, calls=[call], response="")
    part.loss_mask = np.ones(count, np.uint8)
    part.rollout_log_probs = reply.log_probs
    part.spec_info, part.prefix_cache_info = replace(reply.spec), replace(reply.cache)
    part.finish(reason, STATUS_OF[reason])
    part.derive_weight_versions()
    part.validate()
    return part


def same(one: Sample, other: Sample) -> bool:
    """Whether two samples are equal bit for bit, but for text and how they ended."""
    plain, others = one.to_dict(), other.to_dict()
    for name in ("rollout_routed_experts", "rollout_indexer_topk"):
        a, b = getattr(one, name), getattr(other, name)
        if (a is None) != (b is None):
            return False
        if a is not None and (a.dtype != b.dtype or a.tobytes() != b.tobytes()):
            return False
    for name in ("response", "status", "stop_reason"):
        del plain[name], others[name]
    return plain == others


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(IDS, min_size=1, max_size=4), script=SCRIPTS,
    last=st.sampled_from(Finish), replay=st.booleans(),
)  # fmt: skip
def test_growth_merge_of_records_and_fold_of_samples_are_bitwise_the_same(
    prompt: list[int], script: Any, last: Finish, replay: bool
) -> None:
    played = play(prompt, script, last, replay=replay)
    merged = merge_turns(played.records, decode=lambda ids: str(ids.tolist()))
    assert merged.sample is not None
    assert same(merged.sample, played.grown)
    assert same(fold_samples(played.parts, lambda ids: ""), played.grown)
    assert merged.sample.response == played.grown.response
    for record, part in zip(played.records, played.parts, strict=True):
        part.teacher_log_probs = np.arange(-len(record.output_ids), 0, dtype=np.float32)
        record.per_token = {"teacher_log_probs": part.teacher_log_probs}
    taught = merge_turns(played.records).sample
    assert taught is not None
    assert taught.teacher_log_probs is not None
    assert same(fold_samples(played.parts, lambda ids: ""), taught)
    if replay:
        assert played.grown.rollout_routed_experts is not None


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(st.tuples(st.lists(IDS, max_size=3), st.lists(IDS, max_size=2)), max_size=6),
    data=st.data(),
)
def test_a_trajectory_that_is_parked_anywhere_ends_bitwise_as_one_that_was_not(
    script: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    through = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    parked = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    for turn, (output, observed) in enumerate(script):
        finish = data.draw(st.sampled_from([Finish.STOP, Finish.ABORT]))
        brings = finish is Finish.STOP or data.draw(st.booleans())
        assert start_of(parked) == start_of(through)
        for one in (through, parked):
            fields: dict[str, Any] = {"finish": finish} | (
                {} if brings else {"routed_experts": None}
            )
            answer(one, output, turn, **fields)
            if finish is Finish.STOP:
                one.add_observation(array(observed))
        if data.draw(st.booleans()):
            parked = Trajectory.from_sample(parked.write_to(Sample()), (2,), replay=True)
    assert same(parked.write_to(Sample()), through.write_to(Sample()))


# --- cost ----------------------------------------------------------------------------------------
def served(trajectory: Trajectory, ids: list[int], turn: int, dtype: str) -> None:
    """Add a reply whose rows come in a dtype of the server's."""
    start = trajectory.request().replay_start
    assert start is not None
    fed = range(start, trajectory.request().num_tokens + len(ids) - 1)
    given = Replay(start, rows([turn * 50 + position for position in fed]).astype(dtype))
    trajectory.add_completion(
        a_completion(ids, routed_experts=given), dispatched_version=1, sampling={}
    )


def finished(trajectory: Trajectory) -> Any:
    """Return the rows of the finished sample."""
    return trajectory.write_to(Sample()).rollout_routed_experts


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_rows_stay_in_the_dtype_in_which_they_were_served(dtype: str) -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    served(trajectory, [4, 5], 1, dtype)
    served(trajectory, [6], 2, dtype)
    held = finished(trajectory)
    assert held.dtype == dtype
    assert held[:, 0, 0].tolist() == [50, 51, 52, 53, 104]


def test_rows_become_int32_only_where_one_is_missing() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    served(trajectory, [4, 5], 1, "uint8")
    trajectory.add_observation(array([7, 8]))
    held = finished(trajectory)
    assert held.dtype == np.int32
    assert held[:, 0, 0].tolist() == [50, 51, 52, 53, -1, -1]


def test_rows_that_were_parked_with_a_gap_are_narrow_again_once_it_is_filled() -> None:
    parked = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    served(parked, [4, 5], 1, "uint8")
    parked.add_observation(array([7]))
    again = Trajectory.from_sample(parked.write_to(Sample()), (2,), replay=True)
    served(again, [9], 2, "uint8")
    held = finished(again)
    assert held.dtype == np.uint8
    assert held[:, 0, 0].tolist() == [50, 51, 52, 53, 104, 105]


def test_rows_that_no_narrow_type_holds_stay_int32_beside_narrow_ones() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    given = Replay(0, rows([300, 301, 302, 303]))
    trajectory.add_completion(
        a_completion([4, 5], routed_experts=given), dispatched_version=1, sampling={}
    )
    served(trajectory, [6], 2, "uint8")
    held = finished(trajectory)
    assert held.dtype == np.int32
    assert held[:, 0, 0].tolist() == [300, 301, 302, 303, 104]


def test_rows_wider_than_int32_are_refused_where_they_cannot_be_one() -> None:
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    wide = rows([1, 2, 3, 4]).astype(np.int64) << 33
    with pytest.raises(MergeFault, match="no int32"):
        trajectory.add_completion(
            a_completion([4, 5], routed_experts=Replay(0, wide)), dispatched_version=1, sampling={}
        )


def test_rows_are_held_once_and_copied_once() -> None:
    layers, top_k, turns = 16, 4, 40
    trajectory = Trajectory(prompt_ids(list(range(100))), (2,), replay=True)

    def grow() -> None:
        for turn in range(turns):
            request = trajectory.request()
            assert request.replay_start is not None
            count = request.num_tokens + 50 - 1 - request.replay_start
            payload = np.full(count * layers * top_k, turn, np.int32).tobytes()
            given = np.frombuffer(payload, "<i4").reshape(count, layers, top_k)
            completion = a_completion([7] * 50, routed_experts=Replay(request.replay_start, given))
            trajectory.add_completion(completion, dispatched_version=1, sampling={})
            trajectory.add_observation(array([8] * 50))

    tracemalloc.start()
    try:
        grow()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        sample = trajectory.write_to(Sample())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sample.rollout_routed_experts is not None
    whole = sample.rollout_routed_experts.nbytes
    assert held < 1.2 * whole
    assert peak - held < 1.2 * whole


def test_a_view_of_larger_rows_is_copied_and_a_whole_payload_is_not() -> None:
    large = rows(range(1000))
    trajectory = Trajectory(prompt_ids(PROMPT), (2,), replay=True)
    answer(trajectory, [10], 0, routed_experts=Replay(0, large[:3]))
    payload = rows([3]).tobytes()
    view = np.frombuffer(payload, "<i4").reshape(1, LAYERS, TOP_K)
    answer(trajectory, [11], 1, routed_experts=Replay(3, view))
    held = held_rows(trajectory)
    assert not np.shares_memory(held[0], large)
    assert np.shares_memory(held[1], view)
