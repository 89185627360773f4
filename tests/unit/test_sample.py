"""The record of a trajectory: its invariant, the names it shares with miles, its counters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ContractError, Status, StopReason
from rollstream.group import INDEX_STRIDE, sample_index
from rollstream.sample import (
    SAMPLE_FIELDS,
    UNKNOWN_VERSION,
    Call,
    PrefixCacheInfo,
    Sample,
    SpecInfo,
)
from tests.builders import a_sample

MILES = json.loads((Path(__file__).resolve().parents[1] / "data" / "miles_sample.json").read_text())
"""Every field of miles' `Sample.to_dict()`, each with a value that is not its default."""


# --- names and identity --------------------------------------------------------------------------
def test_every_field_of_miles_is_a_field_of_ours_or_survives_as_unknown() -> None:
    assert len(MILES) == 29
    assert set(MILES) - set(SAMPLE_FIELDS) == set()


def test_from_dict_and_to_dict_are_the_identity_on_the_fields_of_miles() -> None:
    back = Sample.from_dict(MILES).to_dict()
    assert {name: back[name] for name in MILES} == MILES


def test_to_dict_is_plain_and_from_dict_gives_the_same_sample_again() -> None:
    sample = a_sample(
        turns=[((4, 5), (6,)), ((7,), ())], metadata={"a": [1]}, spec_info=SpecInfo(1, 2, 3, 4)
    )
    plain = sample.to_dict()
    again = Sample.from_dict(json.loads(json.dumps(plain)))
    assert again.to_dict() == plain
    assert again.tokens.dtype == np.int32
    assert again.calls == sample.calls
    again.validate()


def test_replay_rows_are_plain_in_a_dict_and_int32_again_out_of_json() -> None:
    sample = a_sample()
    shape = (len(sample.tokens) - 1, 3, 2)
    rows = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    sample.rollout_routed_experts, sample.rollout_indexer_topk = rows, -rows
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    for held, expected in (
        (again.rollout_routed_experts, rows), (again.rollout_indexer_topk, -rows),
    ):  # fmt: skip
        assert held is not None
        assert (held.dtype, held.tolist()) == (np.int32, expected.tolist())
    again.validate()


def test_unknown_keys_survive_and_never_hide_a_known_field() -> None:
    back = Sample.from_dict({**MILES, "tomorrow": {"x": 1}})
    assert back.extra == {"tomorrow": {"x": 1}}
    assert back.to_dict()["tomorrow"] == {"x": 1}
    back.extra["reward"] = "wrong"
    assert back.to_dict()["reward"] == MILES["reward"]


@pytest.mark.parametrize("field", ["status", "stop_reason"])
def test_from_dict_refuses_an_unknown_ending(field: str) -> None:
    with pytest.raises(ValueError, match="tired"):
        Sample.from_dict({field: "tired"})


def test_from_dict_of_little_is_a_pending_sample() -> None:
    sample = Sample.from_dict({"prompt": "x"})
    assert (sample.status, sample.stop_reason, sample.reward) == (Status.PENDING, None, None)
    assert sample.tokens.tolist() == []
    sample.validate()


def test_two_samples_share_no_mutable_default() -> None:
    one, other = Sample(), Sample()
    for name in ("metadata", "calls", "spans", "extra", "sampling", "weight_versions", "spec_info"):
        assert getattr(one, name) is not getattr(other, name)


# --- the invariant -------------------------------------------------------------------------------
def _broken(**changes: Any) -> Sample:
    sample = a_sample(7, 1, prompt_ids=[1, 2], turns=[((10, 11), (20,)), ((12,), ())])
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def test_validate_accepts_a_whole_sample_and_one_without_calls() -> None:
    _broken().validate()
    Sample().validate()
    _broken(loss_mask=None, rollout_log_probs=None).validate()
    _broken(loss_mask=np.zeros(4, np.uint8)).validate()
    _broken(rollout_routed_experts=np.zeros((5, 2, 2))).validate()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"response_length": 7}, "response_length 7 does not fit 6 tokens"),
        ({"response_length": -1}, "response_length -1 does not fit 6 tokens"),
        ({"loss_mask": np.ones(3, np.uint8)}, "loss_mask has 3 entries, response_length is 4"),
        ({"rollout_log_probs": np.zeros(5, np.float32)}, "rollout_log_probs has 5 entries"),
        ({"teacher_log_probs": np.zeros(1, np.float32)}, "teacher_log_probs has 1 entries"),
        ({"opd_reverse_kl": np.zeros(1, np.float32)}, "opd_reverse_kl has 1 entries"),
        ({"rollout_routed_experts": np.zeros((6, 2))}, "has 6 rows, expected 5"),
        ({"loss_mask": np.array([1, 1, 1, 1], np.uint8)}, "loss_mask is set where no call"),
        (
            {"rollout_log_probs": np.array([-1, -1, -1, -1], np.float32)},
            "rollout_log_probs is not 0.0 where no call sampled",
        ),
        (
            {"rollout_log_probs": np.array([-1, np.nan, 0, -1], np.float32)},
            "rollout_log_probs is not finite",
        ),
        (
            {"rollout_log_probs": np.array([-1, -np.inf, 0, -1], np.float32)},
            "rollout_log_probs is not finite",
        ),
    ],
)
def test_validate_says_which_two_numbers_disagree(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ContractError, match=f"sample 7:1: .*{what}"):
        _broken(**changes).validate()


@pytest.mark.parametrize(
    ("start", "end"), [(1, 3), (3, 2), (5, 7), (0, 1)], ids=["prompt", "back", "beyond", "before"]
)
def test_validate_refuses_a_call_outside_the_response(start: int, end: int) -> None:
    call = Call(rid="r", engine="e", start=start, end=end, finish="stop")
    with pytest.raises(ContractError, match=f"call r spans {start}..{end}"):
        _broken(calls=[call]).validate()


def test_validate_refuses_calls_that_overlap() -> None:
    sample = _broken()
    sample.calls[1].start = 3
    with pytest.raises(ContractError, match=r"spans 3\.\.6, but the last one ended at 4"):
        sample.validate()


def test_log_probs_whose_squares_overflow_are_still_finite() -> None:
    _broken(rollout_log_probs=np.array([-3e38, -3e38, 0, -1], np.float32)).validate()


# --- what follows from the calls -----------------------------------------------------------------
def test_sampled_positions_are_those_that_a_call_covers() -> None:
    sample = _broken()
    assert sample.sampled_mask().tolist() == [1, 1, 0, 1]
    assert (sample.num_sampled, sample.prompt_length) == (3, 2)
    assert sample.effective_response_length == 3
    sample.loss_mask = None
    assert sample.effective_response_length == 4


def test_weight_versions_are_the_newest_of_every_call() -> None:
    sample = _broken()
    sample.calls[0].versions = [(3, 2, 3), (4, 3, 4)]
    sample.calls[1].versions = []
    sample.derive_weight_versions()
    assert sample.weight_versions == [4, UNKNOWN_VERSION]
    assert sample.version_range() == (3, 4)
    sample.calls[0].versions = [(UNKNOWN_VERSION, 2, 4)]
    assert sample.version_range() is None


def test_counters_add_up_and_their_rates_are_zero_where_nothing_was_counted() -> None:
    spec, cache = SpecInfo(), PrefixCacheInfo()
    assert (spec.spec_accept_rate, spec.spec_accept_length, cache.prefix_cache_hit_rate) == (
        0.0, 0.0, 0.0
    )  # fmt: skip
    for _ in range(2):
        spec.add(SpecInfo(3, 4, 2, 5))
        cache.add(PrefixCacheInfo(1, 4))
    assert spec == SpecInfo(6, 8, 4, 10)
    assert (spec.spec_accept_rate, spec.spec_accept_length) == (0.75, 2.5)
    assert cache.prefix_cache_hit_rate == 0.25


def test_index_never_repeats_whatever_n_the_groups_have() -> None:
    seen = {sample_index(gid, member) for gid in range(3) for member in range(INDEX_STRIDE)}
    assert len(seen) == 3 * INDEX_STRIDE


def test_finish_records_reason_and_status() -> None:
    sample = Sample()
    sample.finish(StopReason.MAX_TURNS, Status.COMPLETED)
    assert (sample.stop_reason, sample.status) == (StopReason.MAX_TURNS, Status.COMPLETED)
