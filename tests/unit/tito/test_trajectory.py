"""The append-only trajectory: what it holds, what it costs, how it resumes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ContractError
from rollstream.sample import UNKNOWN_VERSION, PrefixCacheInfo, Sample, SpecInfo
from tests import toy
from tests.builders import a_sample
from tests.toy import A1, A2, P0, U1, a_completion
from worker.sampling import Sampling
from worker.tito import ids as ids_module
from worker.tito import trajectory as trajectory_module
from worker.tito.ids import prompt_ids
from worker.tito.trajectory import Trajectory
from worker.types import Completion, Finish, RequestIds


def _trajectory(prompt: list[int] = P0) -> Trajectory:
    return Trajectory(prompt_ids(prompt), (2, 3))


def _add(trajectory: Trajectory, ids: list[int], **fields: Any) -> None:
    trajectory.add_completion(a_completion(ids, **fields), dispatched_version=1, sampling={})


# --- growth --------------------------------------------------------------------------------------
def test_every_id_is_written_as_json_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def counted(ids: Any) -> bytes:
        written.append(len(ids))
        return ids_module.ids_json(ids)

    prompt = prompt_ids(list(range(500)))
    monkeypatch.setattr(trajectory_module, "ids_json", counted)
    trajectory = Trajectory(prompt, (2, 3))
    for turn in range(64):
        request = trajectory.request()
        assert request.pieces[0] is prompt.json
        assert len(request.pieces) == 1 + 2 * turn
        _add(trajectory, [11] * 20)
        trajectory.add_observation(toy.array([12] * 10))
    # Completions bring their own JSON from the reply; observations are written here, each once.
    assert written == [10] * 64


def test_request_taken_earlier_does_not_grow() -> None:
    trajectory = _trajectory()
    first = trajectory.request()
    _add(trajectory, A1)
    assert (list(first.pieces), first.num_tokens) == ([b"1,21,10,1104,1105,2,10,1,22,10"], 10)
    assert toy.sent_ids(trajectory) == P0 + A1


def test_members_share_the_prompt_and_cannot_change_it() -> None:
    prompt = prompt_ids(P0)
    one, other = Trajectory(prompt, (2,)), Trajectory(prompt, (2,))
    assert one.request().pieces[0] is other.request().pieces[0]
    with pytest.raises(ValueError, match="read-only"):
        prompt.ids[0] = 5


def test_held_token_costs_at_most_16_bytes_up_to_32k() -> None:
    rng = np.random.default_rng(3)
    prompt = prompt_ids(rng.integers(0, 151_000, 400))
    sampling = Sampling(stop_token_ids=(151645, 151643))
    trajectory = Trajectory(prompt, (151645, 151643))
    while trajectory.num_tokens < 32_768:
        completion = _random_completion(rng, 261)
        record = sampling.to_dict() | {"seed": int(rng.integers(2**31))}
        trajectory.add_completion(completion, dispatched_version=7, sampling=record)
        trajectory.add_observation(rng.integers(0, 151_000, 202, dtype=np.int32))
    held = _size_of(trajectory, skip=(prompt,))
    assert held / (trajectory.num_tokens - len(prompt.ids)) <= 16


def _random_completion(rng: np.random.Generator, count: int) -> Completion:
    ids = rng.integers(0, 151_000, count).tolist()
    rid = rng.bytes(16).hex()
    return a_completion(ids, (-rng.random(count)).tolist(), version=7, rid=rid)


def _size_of(root: object, skip: tuple[object, ...]) -> int:
    """Return the bytes of everything that `root` keeps alive alone, each object once."""
    seen, total, queue = {id(one) for one in skip}, 0, [root]
    while queue:
        one = queue.pop()
        if id(one) in seen or (isinstance(one, type | str) and sys.getrefcount(one) > 60):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, np.ndarray) and one.base is not None:
            queue.append(one.base)
        if isinstance(one, dict):
            queue += one.values()  # the keys are interned names
        elif isinstance(one, list | tuple):
            queue += one
        else:
            queue += [getattr(one, name) for name in getattr(one, "__slots__", ())]
    return total


def test_views_of_larger_arrays_are_not_kept_alive() -> None:
    whole = np.arange(100_000, dtype=np.int32)
    trajectory = _trajectory()
    trajectory.add_observation(whole[:3])
    completion = a_completion([5, 6])
    completion.ids = whole[5:7]
    trajectory.add_completion(completion, dispatched_version=1, sampling={})
    assert trajectory.last_completion().base is None
    whole[:] = 0
    assert toy.sent_ids(trajectory)[-5:] == [0, 1, 2, 5, 6]


# --- window and turns ----------------------------------------------------------------------------
def test_window_begins_at_the_last_close_before_the_reply() -> None:
    trajectory = _trajectory()
    assert trajectory.window().tolist() == [2, 10, 1, 22, 10]
    _add(trajectory, A1)
    assert trajectory.window().tolist() == [2, 10, 1, 22, 10]
    trajectory.add_observation(toy.array(U1))
    assert trajectory.last_completion().tolist() == []
    _add(trajectory, A2)
    assert trajectory.window().tolist() == [2, 10, 1, 22, 10]
    assert trajectory.last_completion().tolist() == A2


def test_window_reaches_back_over_chunks_without_a_close() -> None:
    trajectory = _trajectory([2, *[9] * 1000])
    _add(trajectory, [31, 32])
    trajectory.add_observation(toy.array([40, 41]))
    _add(trajectory, [30, 2])
    assert trajectory.window().tolist() == [2, *[9] * 1000, 31, 32, 40, 41]


def test_window_is_everything_where_nothing_closes_a_turn() -> None:
    trajectory = _trajectory([31, 30])
    _add(trajectory, A1)
    assert trajectory.window().tolist() == [31, 30]


def test_resumed_reply_is_one_turn_of_two_calls() -> None:
    trajectory = _trajectory()
    _add(trajectory, [31], finish=Finish.ABORT)
    _add(trajectory, [32, 2])
    assert trajectory.last_completion().tolist() == [31, 32, 2]
    assert (trajectory.num_turns, len(trajectory.calls), trajectory.num_sampled) == (1, 2, 3)
    sample = trajectory.write_to(Sample())
    assert [(call.start, call.end) for call in sample.calls] == [(10, 11), (11, 13)]


def test_empty_reply_adds_a_call_and_no_ids() -> None:
    trajectory = _trajectory()
    _add(trajectory, [], finish=Finish.ABORT)
    sample = trajectory.write_to(Sample())
    assert (sample.response_length, len(sample.calls), len(sample.tokens)) == (0, 1, 10)
    assert toy.sent_ids(trajectory) == P0


def test_trajectory_without_a_call_writes_its_prompt() -> None:
    sample = _trajectory().write_to(Sample(), lambda ids: str(len(ids)))
    assert sample.tokens.tolist() == P0
    assert sample.loss_mask is not None
    assert (sample.response_length, len(sample.loss_mask), sample.response) == (0, 0, "0")


# --- provenance ----------------------------------------------------------------------------------
def test_reported_versions_are_shifted_to_the_tokens() -> None:
    trajectory = _trajectory()
    call = trajectory.add_completion(
        a_completion(A1, versions=[(4, 0, 1), (5, 1, 3)]),
        dispatched_version=4,
        sampling={"seed": 9},
    )
    assert call.versions == [(4, 10, 11), (5, 11, 13)]
    assert (call.dispatched_version, call.sampling) == (4, {"seed": 9})
    assert trajectory.write_to(Sample()).weight_versions == [5]


@pytest.mark.parametrize("reported", [[], [(UNKNOWN_VERSION, 0, 3)]])
@pytest.mark.parametrize(
    ("current", "versions", "span"),
    [
        (None, [(4, 10, 13)], (4, 4)),
        (4, [(4, 10, 13)], (4, 4)),
        (6, [(4, 10, 13), (6, 13, 13)], (4, 6)),
    ],
)
def test_engine_without_versions_is_known_by_dispatch_and_reply(
    reported: list[tuple[int, int, int]], current: int | None,
    versions: list[tuple[int, int, int]], span: tuple[int, int],
) -> None:  # fmt: skip
    trajectory = _trajectory()
    call = trajectory.add_completion(
        a_completion(A1, versions=reported),
        dispatched_version=4,
        current_version=current,
        sampling={},
    )
    assert call.versions == versions
    assert trajectory.write_to(Sample()).version_range() == span


def test_counters_are_summed_over_calls() -> None:
    trajectory = _trajectory()
    for cached, total in ((0, 3), (5, 7)):
        completion = a_completion(
            A1, cache=PrefixCacheInfo(cached, total), spec=SpecInfo(10, 15, 3, 5)
        )
        trajectory.add_completion(completion, dispatched_version=1, sampling={})
    sample = trajectory.write_to(Sample())
    assert sample.prefix_cache_info == PrefixCacheInfo(5, 10)
    assert sample.spec_info == SpecInfo(20, 30, 6, 10)
    assert trajectory.write_to(Sample()).spec_info == SpecInfo(20, 30, 6, 10)


def test_sampling_of_every_call_comes_back_as_it_was_given() -> None:
    given: list[dict[str, Any]] = [
        {"seed": 1, "temperature": 1.0},
        {"seed": 2, "temperature": 1.0},
        {"seed": 3},
        {"seed": 4, "stop": [2], "temperature": 0.5},
        {},
    ]
    trajectory, reused = _trajectory(), {"seed": 0}
    for sampling in given:
        trajectory.add_completion(a_completion([5]), dispatched_version=1, sampling=sampling)
    trajectory.add_completion(a_completion([5]), dispatched_version=1, sampling=reused)
    reused["seed"] = 9
    assert [call.sampling for call in trajectory.calls] == [*given, {"seed": 0}]
    assert trajectory.calls[1:3] == list(trajectory.calls)[1:3]
    assert trajectory.calls[-1].sampling == {"seed": 0}


def test_reply_whose_log_probs_do_not_fit_is_refused() -> None:
    trajectory = _trajectory()
    with pytest.raises(ContractError, match="3 ids and 2 log-probs"):
        _add(trajectory, A1, log_probs=[-0.5, -0.25])
    assert toy.sent_ids(trajectory) == P0


# --- resume --------------------------------------------------------------------------------------
def test_from_sample_continues_with_the_same_tokens_masks_and_calls() -> None:
    before = _trajectory()
    _add(before, A1)
    before.add_observation(toy.array(U1))
    _add(before, [30], finish=Finish.ABORT)
    parked = before.write_to(Sample(group_index=3))
    assert parked.loss_mask is not None
    parked.loss_mask[0] = 0  # an off-policy token that somebody masked
    parked.spec_info, parked.prefix_cache_info = SpecInfo(1, 2, 3, 4), PrefixCacheInfo(5, 6)

    after = Trajectory.from_sample(parked, (2, 3), before.prompt)
    assert toy.sent_ids(after) == P0 + A1 + U1 + [30]
    assert after.request().pieces[0] is before.prompt.json
    assert (after.num_turns, after.last_completion().tolist()) == (2, [30])
    _add(after, [2])
    sample = after.write_to(Sample(group_index=3))
    assert sample.tokens.tolist() == P0 + A1 + U1 + A2
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [0, 1, 1] + [0] * 11 + [1, 1]
    assert [c.rid for c in sample.calls[:2]] == [c.rid for c in parked.calls]
    assert len(parked.calls) == 2
    assert sample.spec_info == SpecInfo(1, 2, 3, 4) == parked.spec_info
    assert sample.prefix_cache_info == PrefixCacheInfo(5, 6) == parked.prefix_cache_info


def test_from_sample_of_the_wire_owns_writable_arrays() -> None:
    parked = a_sample(turns=[((4, 5), (6,)), ((7,), ())])
    parked.tokens.flags.writeable = False
    sample = Trajectory.from_sample(parked, (2,)).write_to(Sample())
    assert sample.tokens.tolist() == parked.tokens.tolist()
    assert sample.tokens.flags.writeable
    assert sample.calls == parked.calls


def test_from_sample_takes_a_record_without_calls_by_its_mask() -> None:
    plain = Sample(
        tokens=toy.array([1, 2, 3, 10, 11, 20, 30]),
        response_length=4,
        loss_mask=np.array([1, 1, 0, 1], dtype=np.uint8),
        rollout_log_probs=np.array([-0.1, -0.2, 0.0, -0.3], dtype=np.float32),
    )
    sample = Trajectory.from_sample(plain, (2,)).write_to(Sample())
    assert [(call.start, call.end) for call in sample.calls] == [(3, 5), (6, 7)]
    assert sample.weight_versions == [UNKNOWN_VERSION, UNKNOWN_VERSION]
    assert sample.rollout_log_probs is not None
    assert plain.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == plain.rollout_log_probs.tolist()


def test_from_sample_trains_nothing_that_has_no_log_probs() -> None:
    plain = Sample(tokens=toy.array([1, 2, 10, 11]), response_length=2)
    trajectory = Trajectory.from_sample(plain, (2,))
    assert (trajectory.num_tokens, trajectory.response_length) == (4, 2)
    sample = trajectory.write_to(Sample())
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [0, 0]


def test_from_sample_refuses_another_groups_prompt() -> None:
    with pytest.raises(ContractError, match="not the group's"):
        Trajectory.from_sample(a_sample(prompt_ids=(1, 2, 3)), (2,), prompt_ids([1, 2, 4]))


def test_request_ids_are_what_the_engine_client_joins() -> None:
    trajectory = _trajectory([7])
    trajectory.add_observation(toy.array([]))
    _add(trajectory, [8])
    assert trajectory.request() == RequestIds(pieces=(b"7", b"8"), num_tokens=2)
