"""`Batch.to_arrays`: what stands where, for every shape a group can have."""

from __future__ import annotations

import numpy as np
import pytest

from rollstream.batch import Batch
from rollstream.errors import Status, StopReason
from rollstream.group import Missing
from tests.builders import a_group, a_sample


def test_to_arrays_puts_every_mask_and_log_prob_on_its_own_token() -> None:
    sample = a_sample(7, 1, prompt_ids=[1, 2], turns=[([10, 11], [20]), ([12], [])])
    short = a_sample(7, 0, prompt_ids=[1, 2], turns=[([9], [])])
    arrays = Batch([a_group(7, [short, sample])]).to_arrays(pad_id=99)
    assert arrays["tokens"].tolist() == [[1, 2, 9, 99, 99, 99], [1, 2, 10, 11, 20, 12]]
    assert arrays["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert arrays["loss_mask"].tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 1]]
    expected = np.array([[0, 0, -0.009, 0, 0, 0], [0, 0, -0.01, -0.011, 0, -0.012]], np.float32)
    assert np.array_equal(arrays["log_probs"], expected)
    assert arrays["group_index"].tolist() == [7, 7]
    assert arrays["index"].tolist() == [7 * 4096, 7 * 4096 + 1]
    assert arrays["rollout_mask_sum"].tolist() == [1, 3]


def test_to_arrays_returns_writable_arrays_of_its_own() -> None:
    sample = a_sample()
    for array in (sample.tokens, sample.loss_mask, sample.rollout_log_probs):
        assert array is not None
        array.flags.writeable = False
    arrays = Batch([a_group(0, [sample])]).to_arrays()
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray)
        assert array.flags.writeable, name
        array[...] = 5
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5]


def test_to_arrays_makes_leaves_rows_that_share_one_rollout_and_its_mask_sum() -> None:
    index = 3 * 4096
    leaves = [
        a_sample(3, 0, turns=[([4, 5], [])], rollout_id=index),
        a_sample(3, 0, turns=[([6, 7, 8], [])], rollout_id=index),
    ]
    scalar = a_sample(3, 1, turns=[([9], [])])
    batch = Batch([a_group(3, [leaves, scalar])])
    arrays = batch.to_arrays()
    assert arrays["rollout_id"].tolist() == [index, index, index + 1]
    assert arrays["rollout_mask_sum"].tolist() == [5, 5, 1]
    assert [len(s.tokens) for s in batch.flat()] == [5, 6, 4]


def test_micro_batches_keep_the_mask_sum_of_a_trajectory_that_they_cut_apart() -> None:
    long = a_sample(1, 0, turns=[(list(range(10, 20)), [])], rollout_id=4096)
    short = a_sample(1, 0, turns=[([4], [])], rollout_id=4096)
    pieces = list(Batch([a_group(1, [[long, short]])]).to_arrays(max_tokens=13))
    assert [piece["tokens"].shape for piece in pieces] == [(1, 13), (1, 4)]
    assert [piece["rollout_mask_sum"].tolist() for piece in pieces] == [[11], [11]]


def test_micro_batches_never_exceed_the_bound_and_lose_no_row() -> None:
    rng = np.random.default_rng(3)
    samples = [
        a_sample(g, m, turns=[(rng.integers(1, 99, rng.integers(1, 40)).tolist(), [])])
        for g in range(6)
        for m in range(4)
    ]
    batch = Batch([a_group(g, samples[4 * g : 4 * g + 4]) for g in range(6)])
    pieces = list(batch.to_arrays(max_tokens=64))
    assert all(piece["tokens"].size <= 64 for piece in pieces)
    assert len(pieces) < len(samples)
    seen = sorted(int(i) for piece in pieces for i in piece["index"])
    assert seen == sorted(s.index for s in samples if s.index is not None)


def test_micro_batches_refuse_a_sample_that_fits_in_none_by_name() -> None:
    batch = Batch([a_group(5, [a_sample(5, 2, turns=[(list(range(30)), [])])])])
    with pytest.raises(ValueError, match=r"5:2 has 33 tokens.*max_tokens=32"):
        batch.to_arrays(max_tokens=32)


def test_to_arrays_gives_a_removed_sample_a_row_without_a_mask() -> None:
    removed = a_sample(0, 0, remove_sample=True)
    arrays = Batch([a_group(0, [removed, a_sample(0, 1)])]).to_arrays()
    assert arrays["loss_mask"].sum(axis=1).tolist() == [0, 2]
    assert arrays["rollout_mask_sum"].tolist() == [0, 2]
    assert arrays["tokens"].shape == (2, 5)


@pytest.mark.parametrize(
    ("reward", "key", "expected"),
    [
        (None, None, None),
        (0.0, None, 0.0),
        (float("nan"), None, None),
        (True, None, 1.0),
        (float("inf"), None, None),
        (10**400, None, None),
        ([1.0], None, None),
        ("1", None, None),
        ({"score": {"score": 1.0}}, "score", None),
        ({"score": 10**400}, "score", None),
        ({"score": 0.25, "len": 3}, "score", 0.25),
        ({"score": 0.25}, None, None),
    ],
)
def test_to_arrays_never_takes_no_verdict_for_zero(
    reward: object, key: str | None, expected: float | None
) -> None:
    group = a_group(0, [a_sample(0, 0, reward=reward)], reward_key=key)
    value = Batch([group]).to_arrays()["reward"][0]
    assert np.isnan(value) if expected is None else value == expected


@pytest.mark.parametrize("value", [None, "hot", [1], {}, 1e308])
def test_to_arrays_takes_a_temperature_that_is_none_for_none(value: object) -> None:
    sample = a_sample(0, 0)
    sample.calls[0].sampling["temperature"] = sample.sampling["temperature"] = value
    given = Batch([a_group(0, [sample])]).to_arrays()["temperature"][0]
    assert given == np.finfo(np.float32).max if value == 1e308 else np.isnan(given)


def test_to_arrays_masks_by_the_calls_where_a_sample_has_no_mask() -> None:
    sample = a_sample(0, 0, turns=[([4], [30, 31]), ([5], [])], loss_mask=None)
    assert Batch([a_group(0, [sample])]).to_arrays()["loss_mask"].tolist() == [
        [0, 0, 0, 1, 0, 0, 1]
    ]


def test_to_arrays_marks_missing_log_probs_as_nan_only_where_they_would_count() -> None:
    sample = a_sample(0, 0, turns=[([4], [30])], rollout_log_probs=None)
    row = Batch([a_group(0, [sample])]).to_arrays()["log_probs"][0]
    assert np.isnan(row).tolist() == [False, False, False, True, False]


def test_to_arrays_reports_versions_and_temperature_per_row() -> None:
    turns = [([4], [30]), ([5], [])]
    mixed = a_sample(0, 0, turns=turns, versions=[3, 5], temperature=0.5)
    unknown = a_sample(0, 1, turns=turns, versions=[-1, -1])
    arrays = Batch([a_group(0, [mixed, unknown])]).to_arrays()
    assert arrays["min_version"].tolist() == [3, -1]
    assert arrays["max_version"].tolist() == [5, -1]
    assert arrays["temperature"].tolist() == [0.5, 1.0]


def test_to_arrays_of_nothing_is_empty() -> None:
    assert Batch([]).to_arrays()["tokens"].shape == (0, 0)
    assert list(Batch([]).to_arrays(max_tokens=8)) == []


def test_batch_keeps_uneven_groups_apart_by_their_id() -> None:
    missing = [Missing(1, Status.FAILED, "engine_error")]
    first = a_group(0, [a_sample(0, 0, reward=1.0), a_sample(0, 1, reward=3.0)])
    second = a_group(1, [a_sample(1, 0, reward=5.0)], missing=missing)
    arrays = Batch([first, second]).to_arrays()
    means = {
        int(g): float(arrays["reward"][arrays["group_index"] == g].mean())
        for g in np.unique(arrays["group_index"])
    }
    assert means == {0: 2.0, 1: 5.0}


def test_batch_metrics_count_members_not_leaves() -> None:
    leaves = [a_sample(0, 0, reward=1.0, rollout_id=0) for _ in range(9)]
    truncated = a_sample(0, 1, reward=0.0, stop_reason=StopReason.TURN_LENGTH)
    gone = [Missing(2, Status.FAILED, "crashed"), Missing(3, Status.FAILED, "crashed")]
    group = a_group(0, [leaves, truncated], missing=gone, staleness=2)
    group.spans = {"group_wait": [0.5, 1.5], "ready_wait": [0.25]}
    figures = Batch([group]).metrics()
    assert figures["batch/reward_mean"] == 0.5
    assert figures["batch/samples"] == 10
    assert figures["batch/truncated"] == 1
    assert figures["batch/missing/crashed"] == 2
    assert figures["batch/staleness_max"] == 2
    assert figures["batch/span/group_wait_s_mean"] == 1.0
    assert figures["batch/span/ready_wait_s_max"] == 0.25
