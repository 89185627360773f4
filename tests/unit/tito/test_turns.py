"""Records of turns: out of completions and plain containers, with every name of a counter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollstream.arrays import Row, stack
from rollstream.group import PromptGroup
from rollstream.sample import UNKNOWN_VERSION, PrefixCacheInfo, Sample, SpecInfo
from rollstream.wire import decode_body, encode_body
from tests.toy import a_completion
from worker.tito.masks import mask_off_policy, on_policy_mask
from worker.tito.merge import Kept, TurnRecord, _call_of, merge_turns
from worker.types import Finish, Replay

OLD = {"spec_accept_token_num": 10, "spec_draft_token_num": 15, "spec_verify_ct": 3}
NEW = {"spec_num_correct_drafts": 10, "spec_num_proposed_drafts": 15, "spec_verify_ct": 3}


@pytest.mark.parametrize("names", [OLD, NEW, NEW | dict.fromkeys(list(OLD)[:2]), OLD | {"x": 1}])
def test_speculative_counters_are_read_under_old_and_new_names(names: dict[str, Any]) -> None:
    expected = SpecInfo(10, 15, 3, 5)
    assert SpecInfo.from_dict(names, num_sampled=5) == expected
    assert SpecInfo.from_dict(names | {"completion_token_num": 5}) == expected
    assert SpecInfo.from_dict(names | {"completion_tokens": 5}) == expected
    sample = Sample.from_dict({"spec_info": names | {"completion_token_num": 5}})
    assert sample.spec_info == expected


def test_prefix_cache_counters_are_read_under_our_names_and_an_engines() -> None:
    for names in ({"total_prompt_tokens": 7}, {"prompt_tokens": 7}):
        assert PrefixCacheInfo.from_dict(names | {"cached_tokens": 3}) == PrefixCacheInfo(3, 7)
    assert PrefixCacheInfo.from_dict({"cached_tokens": None}) == PrefixCacheInfo(0, 0)


def test_44_counters_of_plain_records_are_summed_whatever_their_names() -> None:
    first = {"prompt_ids": [1], "output_ids": [2, 3], "log_probs": [-0.5, -0.25],
             "spec": OLD, "cache": {"cached_tokens": 0, "prompt_tokens": 3}}  # fmt: skip
    second = {"prompt_ids": [1, 2, 3], "output_ids": [4], "log_probs": [-1], "spec": NEW,
              "cache": {"cached_tokens": 5, "total_prompt_tokens": 7}, "unknown": 1}  # fmt: skip
    sample = merge_turns([TurnRecord.from_dict(one) for one in (first, second)]).sample
    assert sample is not None
    assert sample.spec_info == SpecInfo(20, 30, 6, 3)
    assert sample.prefix_cache_info == PrefixCacheInfo(5, 10)
    assert sample.tokens.dtype == np.int32
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.dtype == np.float32


def test_a_plain_record_is_read_whole() -> None:
    record = TurnRecord.from_dict(
        {
            "prompt_ids": [1], "output_ids": [2, 3], "log_probs": [-0.5, -0.25],
            "finish": "length", "versions": [[4, 0, 2]], "metadata": {"k": 1}, "rid": "r",
            "engine": "e", "dispatched_version": 4, "logprob_mode": "raw", "sampling": {"seed": 1},
            "routed_experts": {"start": 0, "rows": [[[1, 2]], [[3, 4]]]},
            "per_token": {"teacher_log_probs": [-1, -2]},
        }
    )  # fmt: skip
    sample = merge_turns([record]).sample
    assert sample is not None
    (call,) = sample.calls
    assert (call.rid, call.engine, call.finish, call.versions) == ("r", "e", "length", [(4, 1, 3)])
    assert (call.dispatched_version, call.logprob_mode, call.sampling) == (4, "raw", {"seed": 1})
    assert sample.metadata == {"k": 1}
    assert sample.rollout_routed_experts is not None
    assert sample.rollout_routed_experts.tolist() == [[[1, 2]], [[3, 4]]]
    assert sample.teacher_log_probs is not None
    assert sample.teacher_log_probs.tolist() == [-1.0, -2.0]


def test_56_68_what_a_plain_record_lacks_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="turn 0 has no prompt ids"):
        merge_turns([TurnRecord.from_dict({"output_ids": [1], "log_probs": [-1]})])
    with pytest.raises(ValueError, match="routed_experts of a record has no start row"):
        TurnRecord.from_dict({"prompt_ids": [1], "routed_experts": {"rows": [[[1]]]}})


@pytest.mark.parametrize(
    ("reported", "current", "versions"),
    [
        ([(4, 0, 1), (5, 1, 2)], 9, [(4, 0, 1), (5, 1, 2)]),
        ([(UNKNOWN_VERSION, 0, 2)], 3, [(3, 0, 2)]),
        ([(4, 0, 1), (UNKNOWN_VERSION, 1, 2)], 9, [(4, 0, 1), (UNKNOWN_VERSION, 1, 2)]),
        ([(3, 0, 0), (UNKNOWN_VERSION, 0, 2)], 9, [(3, 0, 0), (UNKNOWN_VERSION, 0, 2)]),
        ([], 6, [(3, 0, 2), (6, 2, 2)]),
    ],
)
def test_a_record_of_a_completion_has_its_provenance(
    reported: list[tuple[int, int, int]], current: int, versions: list[tuple[int, int, int]]
) -> None:
    rows = Replay(0, np.zeros((2, 1, 1), np.int32))
    completion = a_completion(
        [2, 3], finish=Finish.LENGTH, versions=reported, cache=PrefixCacheInfo(1, 2),
        spec=SpecInfo(1, 2, 3, 2), routed_experts=rows, indexer_topk=rows,
    )  # fmt: skip
    record = TurnRecord.of(
        [1], completion, dispatched_version=3, current_version=current, sampling={"seed": 2},
        metadata={"k": 1},
    )  # fmt: skip
    assert record.versions == versions
    assert record.prompt_ids is not None
    assert record.prompt_ids.tolist() == [1]
    assert (record.finish, record.rid, record.engine) == ("length", "r" * 32, "http://engine")
    assert (record.cache, record.spec) == (PrefixCacheInfo(1, 2), SpecInfo(1, 2, 3, 2))
    assert record.routed_experts is rows
    assert record.indexer_topk is rows
    assert (record.sampling, record.metadata) == ({"seed": 2}, {"k": 1})
    sample = merge_turns([record]).sample
    assert sample is not None
    assert sample.version_range() == (
        min(v for v, _, _ in versions if v >= 0),
        max(v for v, _, _ in versions),
    )


U = UNKNOWN_VERSION


@pytest.mark.parametrize(
    ("spans", "size", "kept"),
    [
        ([(5, 0, 4), (6, 4, 4)], 3, [(5, 1, 4), (6, 4, 4)]),
        ([(5, 0, 4), (6, 4, 4)], 4, [(5, 1, 5), (6, 5, 5)]),
        ([(5, 0, 2), (U, 2, 3), (6, 3, 4)], 3, [(5, 1, 3), (U, 3, 4), (6, 4, 4)]),
    ],
)
def test_newer_weights_that_came_in_at_nobody_knows_which_token_outlast_a_cut(
    spans: list[tuple[int, int, int]], size: int, kept: list[tuple[int, int, int]]
) -> None:
    turn = TurnRecord.from_dict(
        {"prompt_ids": [9], "output_ids": [1, 2, 3, 4], "log_probs": [-0.5] * 4, "versions": spans}
    )
    assert _call_of(Kept(turn, place=0, start=1, size=size)).versions == kept


def test_unknown_spans_between_known_ones_are_no_age_and_not_the_newest_on_either_side() -> None:
    spans = [(5, 0, 1), (U, 1, 2), (6, 2, 3)]
    completion = a_completion([1, 2, 3], versions=spans)
    record = TurnRecord.of([9], completion, dispatched_version=5, current_version=7)
    assert record.versions == spans
    merged = merge_turns([record]).sample
    assert merged is not None
    back = decode_body(encode_body(merged), PromptGroup(0, 1, []))
    assert isinstance(back, Sample)
    for sample in (merged, back):
        assert sample.calls[0].versions == [(5, 1, 2), (U, 2, 3), (6, 3, 4)]
        assert (sample.weight_versions, sample.version_range()) == ([6], (5, 6))
        assert on_policy_mask(sample, 5).tolist() == [1, 0, 1], "an unknown one counts as old"
        arrays = stack([Row(sample, sample.sampled_mask(), 0.0, 3)], 0)
        assert (arrays["min_version"].tolist(), arrays["max_version"].tolist()) == ([5], [6])
    mask_off_policy([back])
    assert back.loss_mask is not None
    assert back.loss_mask.tolist() == [0, 0, 1]
