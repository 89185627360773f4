"""Conformance sections 3 to 5: merging turns, on ids, masks, log-probs, status and metadata.

The numbers in the names are the cases'. Where the reference system asserts, the merge here raises
a typed fault that says where; the names say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollstream.errors import EngineFault, MergeFault, Status, StopReason
from rollstream.sample import LogProbs, LossMask, PrefixCacheInfo, Sample
from worker.tito.ids import as_ids
from worker.tito.merge import TurnRecord, fold_samples, merge_samples, merge_turns
from worker.types import Finish


def _f32(values: Sequence[float]) -> list[float]:
    plain: list[float] = np.array(values, dtype=np.float32).tolist()
    return plain


def _plain(values: LossMask | LogProbs | None) -> list[Any]:
    assert values is not None
    plain: list[Any] = values.tolist()
    return plain


def _decode(ids: Any) -> str:
    return "".join(f"<{number}>" for number in ids.tolist())


def _sample(
    tokens: Sequence[int], length: int, mask: Sequence[int] | None = None,
    log_probs: Sequence[float] | None = None, **fields: Any,
) -> Sample:  # fmt: skip
    known: dict[str, Any] = {
        "tokens": as_ids(tokens),
        "response_length": length,
        "response": _decode(as_ids(tokens)[len(tokens) - length :]),
        "loss_mask": None if mask is None else np.array(mask, np.uint8),
        "rollout_log_probs": None if log_probs is None else np.array(log_probs, np.float32),
        "status": Status.COMPLETED,
        "stop_reason": StopReason.STOP,
    }
    return Sample(**(known | fields))


def _record(
    prompt: Sequence[int], output: Sequence[int], log_probs: Sequence[float] | None = None,
    **fields: Any,
) -> TurnRecord:  # fmt: skip
    given = [-0.5] * len(output) if log_probs is None else log_probs
    return TurnRecord(as_ids(prompt), as_ids(output), np.array(given, np.float32), **fields)


A36 = _sample([1, 2, 3, 10, 11, 12], 3, [1, 1, 1], [-0.1, -0.2, -0.3])
B36 = _sample(
    [1, 2, 3, 10, 11, 12, 20, 21, 30, 31, 32], 3, [1, 1, 1], [-0.4, -0.5, -0.6],
    status=Status.TRUNCATED, stop_reason=StopReason.TURN_LENGTH,
)  # fmt: skip


# --- 3. pairwise merge ---------------------------------------------------------------------------
def test_36_pair_gives_observation_mask_0_and_the_second_status() -> None:
    merged = merge_samples(A36, B36, _decode)
    assert merged.tokens.tolist() == B36.tokens.tolist()
    assert merged.response_length == 8
    assert _plain(merged.loss_mask) == [1, 1, 1, 0, 0, 1, 1, 1]
    assert _plain(merged.rollout_log_probs) == _f32([-0.1, -0.2, -0.3, 0, 0, -0.4, -0.5, -0.6])
    assert (merged.status, merged.stop_reason) == (Status.TRUNCATED, StopReason.TURN_LENGTH)
    assert merged.response == A36.response + "<20><21>" + B36.response
    assert (A36.response_length, B36.response_length) == (3, 3)


def test_37_pair_without_masks_and_log_probs_counts_as_sampled_with_zeros() -> None:
    merged = merge_samples(_sample([1, 2], 1), _sample([1, 2, 20, 3], 1), _decode)
    assert _plain(merged.loss_mask) == [1, 0, 1]
    assert _plain(merged.rollout_log_probs) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("merge", [lambda *pair: merge_samples(*pair, _decode),
                                   lambda *pair: fold_samples(pair, _decode)])  # fmt: skip
def test_39_replay_data_on_one_side_is_a_fault_for_a_pair_and_for_a_fold(merge: Any) -> None:
    # Replay data has rules of its own; until they are here no merge loses it.
    replay = _sample([1, 2], 1, rollout_routed_experts=np.zeros((1, 2, 2), np.int32))
    with pytest.raises(MergeFault, match="rollout_routed_experts cannot be merged") as caught:
        merge(replay, _sample([1, 2, 20, 3], 1))
    assert caught.value.detail == "unsupported"


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.COMPLETED])
def test_40_fold_stops_at_a_sample_that_was_not_completed(status: Status) -> None:
    cut = _sample([1, 2, 3, 10, 11, 12], 3, status=status)
    assert fold_samples([cut, B36], _decode) is cut
    with pytest.raises(MergeFault) as caught:
        merge_samples(cut, B36, _decode)
    assert caught.value.detail == "status"


def test_41_fold_of_one_is_the_same_object() -> None:
    assert fold_samples([A36], _decode) is A36
    with pytest.raises(ValueError, match="no samples"):
        fold_samples([], _decode)


def test_44_prefix_cache_counters_are_summed() -> None:
    a = _sample([1, 2], 1, prefix_cache_info=PrefixCacheInfo(0, 3))
    b = _sample([1, 2, 20, 3], 1, prefix_cache_info=PrefixCacheInfo(5, 7))
    info = merge_samples(a, b, _decode).prefix_cache_info
    assert (info.cached_tokens, info.total_prompt_tokens) == (5, 10)
    assert info.prefix_cache_hit_rate == 0.5
    none = merge_samples(_sample([1, 2], 1), _sample([1, 2, 20, 3], 1), _decode).prefix_cache_info
    assert (none.cached_tokens, none.prefix_cache_hit_rate) == (0, 0.0)


def test_45_lifecycle_becomes_a_list_and_messages_are_the_last() -> None:
    a = _sample([1, 2], 1, metadata={"lifecycle": {"turn": 1}, "messages": ["a"], "k": 1})
    b = _sample([1, 2, 20, 3], 1, metadata={"lifecycle": {"turn": 2}, "messages": ["b"], "k": 1})
    c = _sample([1, 2, 20, 3, 4], 1, metadata={"lifecycle": {"turn": 3}})
    merged = fold_samples([a, b, c], _decode)
    assert merged.metadata == {
        "lifecycle": [{"turn": 1}, {"turn": 2}, {"turn": 3}], "messages": ["b"], "k": 1,
    }  # fmt: skip
    assert a.metadata["lifecycle"] == {"turn": 1}


def test_45_differing_metadata_is_a_typed_fault_instead_of_an_assertion() -> None:
    a, b = _sample([1, 2], 1, metadata={"k": 1}), _sample([1, 2, 3], 1, metadata={"k": 2})
    with pytest.raises(MergeFault, match="metadata 'k': 1 and 2") as caught:
        merge_samples(a, b, _decode)
    assert caught.value.detail == "metadata"


def test_fold_refuses_samples_of_different_members_and_replay_data() -> None:
    a, b = _sample([1, 2], 1, index=4), _sample([1, 2, 3], 1, index=5)
    with pytest.raises(MergeFault, match="differ in index: 4") as caught:
        merge_samples(a, b, _decode)
    assert caught.value.detail == "field"
    replay = _sample([1, 2], 1, rollout_routed_experts=np.zeros((1, 2, 2), np.int32))
    with pytest.raises(MergeFault, match="rollout_routed_experts cannot be merged"):
        merge_samples(replay, _sample([1, 2, 3], 1), _decode)


def test_fold_keeps_what_one_side_alone_says_and_never_trains_a_removed_part() -> None:
    a = _sample([1, 2], 1, adapter="x", attempts=1, non_generation_time=1.5)
    b = _sample(
        [1, 2, 3], 1, remove_sample=True, routing_key="g1", attempts=2, non_generation_time=2.0
    )
    merged = merge_samples(a, b, _decode)
    assert (merged.remove_sample, merged.adapter, merged.routing_key) == (True, "x", "g1")
    assert (merged.attempts, merged.non_generation_time) == (2, 3.5)
    unlike = _sample([1, 2, 3], 1, label="8")
    with pytest.raises(MergeFault, match="differ in label"):
        merge_samples(a, unlike, _decode)


# --- 4. record assembly --------------------------------------------------------------------------
def _merged(*records: TurnRecord, **options: Any) -> Sample:
    sample = merge_turns(records, **options).sample
    assert sample is not None
    return sample


def test_46_one_record() -> None:
    sample = _merged(_record([1, 2, 3], [10, 11]))
    assert (len(sample.tokens), sample.response_length) == (5, 2)


R47 = (_record([1, 2, 3], [10, 11]), _record([1, 2, 3, 10, 11, 20, 21], [30, 31]))


def test_47_two_records() -> None:
    sample = _merged(*R47)
    assert _plain(sample.loss_mask) == [1, 1, 0, 0, 1, 1]
    assert sample.response_length == 6
    assert sample.tokens.tolist() == [1, 2, 3, 10, 11, 20, 21, 30, 31]
    assert _plain(sample.rollout_log_probs) == [-0.5, -0.5, 0.0, 0.0, -0.5, -0.5]


def test_48_three_records() -> None:
    sample = _merged(
        _record([1, 2], [10]), _record([1, 2, 10, 20], [30]), _record([1, 2, 10, 20, 30, 40], [50])
    )
    assert sample.response_length == 5
    assert _plain(sample.loss_mask) == [1, 0, 1, 0, 1]
    assert sample.tokens.tolist() == [1, 2, 10, 20, 30, 40, 50]


def test_49_prompt_that_rewrites_what_was_sampled_is_a_fault_that_says_where() -> None:
    with pytest.raises(MergeFault, match=r"turn 1 .* at index 3 its prompt has 99, .* sampled 10"):
        merge_turns([R47[0], _record([1, 2, 3, 99, 99, 20, 21], [30])])


@pytest.mark.parametrize(
    ("prompt", "where"),
    [([9, 2, 3, 10, 11], "index 0 .* was sent 1"), ([1, 2, 3, 10], "index 4 its prompt ends"),
     ([1, 2], "index 2 its prompt ends, where turn 0 was sent 3")],
)  # fmt: skip
def test_49_prompt_that_is_shorter_or_begins_otherwise_is_a_fault_that_says_where(
    prompt: list[int], where: str
) -> None:
    with pytest.raises(MergeFault, match=where) as caught:
        merge_turns([R47[0], _record(prompt, [30])])
    assert caught.value.detail == "prefix"


def test_51_nothing_is_trimmed_without_a_trailing_stop_or_without_accumulated() -> None:
    merged = merge_turns(R47, accumulated=as_ids([1, 2, 3, 10, 11, 20, 21, 30, 31]), max_trim=1)
    assert merged.trimmed == 0
    stopped = _record([1, 2, 3], [10, 11, 2])
    single = merge_turns([stopped], accumulated=as_ids([1, 2, 3, 10, 11]), max_trim=1)
    assert single.sample is not None
    assert single.sample.tokens.tolist() == [1, 2, 3, 10, 11, 2]
    with pytest.raises(MergeFault, match=r"at index 5 its prompt has 20, .* sampled 2"):
        merge_turns([stopped, R47[1]], max_trim=1)


def test_51_trailing_stop_that_no_later_prompt_holds_is_trimmed_within_its_bound() -> None:
    stopped = _record([1, 2, 3], [10, 11, 2], [-0.1, -0.2, -0.3], versions=[(4, 0, 3)])
    held = as_ids([1, 2, 3, 10, 11, 20, 21, 30, 31])
    merged = merge_turns([stopped, R47[1]], accumulated=held, max_trim=1)
    assert merged.trimmed == 1
    assert merged.sample is not None
    assert merged.sample.tokens.tolist() == held.tolist()
    assert _plain(merged.sample.loss_mask) == [1, 1, 0, 0, 1, 1]
    assert merged.sample.calls[0].versions == [(4, 3, 5)]
    two = _record([1, 2, 3], [10, 11, 2, 2])
    with pytest.raises(MergeFault, match="at index 5"):
        merge_turns([two, R47[1]], accumulated=held, max_trim=1)


@pytest.mark.parametrize("extra", [[99], [99, 99]])
def test_53_extra_accumulated_id_is_a_fault_about_the_cursor(extra: list[int]) -> None:
    held = as_ids([1, 2, 3, 10, 11, 20, 21, 30, 31, *extra])
    with pytest.raises(MergeFault, match=r"stands at 9 of 9 ids, .* accumulated 1") as caught:
        merge_turns(R47, accumulated=held, max_trim=2)
    assert caught.value.detail == "cursor"


def test_53_accumulated_that_differs_or_is_too_short_is_a_fault_about_the_cursor() -> None:
    for held in ([1, 2, 3, 10, 11, 20, 21, 30, 99], [1, 2, 3, 10, 11, 20, 21]):
        with pytest.raises(MergeFault, match="cursor"):
            merge_turns(R47, accumulated=as_ids(held), max_trim=1)


def test_54_history_without_its_thinking_is_a_fault_and_never_trained() -> None:
    thought = _record([1, 2, 3], [4, 30, 5, 10, 11])
    with pytest.raises(MergeFault, match="at index 3 its prompt has 10, where turn 0 sampled 4"):
        merge_turns([thought, R47[1]])


@pytest.mark.parametrize(
    ("word", "status"),
    [("stop", Status.COMPLETED), ("tool_calls", Status.COMPLETED), ("length", Status.TRUNCATED),
     ("abort", Status.ABORTED), (Finish.LENGTH, Status.TRUNCATED)],
)  # fmt: skip
def test_55_finish_words_become_statuses(word: str, status: Status) -> None:
    assert _merged(_record([1], [2], finish=word)).status is status


def test_55_unknown_finish_word_is_an_engine_fault_instead_of_pending() -> None:
    with pytest.raises(EngineFault, match="unknown finish reason 'content_filter'") as caught:
        merge_turns([_record([1], [2], finish="content_filter")])
    assert caught.value.reason is StopReason.ENGINE_ERROR


def test_56_record_without_prompt_ids_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="turn 1 has no prompt ids"):
        merge_turns([R47[0], TurnRecord(None, as_ids([3]), None)])


@pytest.mark.parametrize("log_probs", [None, [-0.5], [-0.5] * 3])
def test_log_probs_are_never_padded_or_cut(log_probs: list[float] | None) -> None:
    given = None if log_probs is None else np.array(log_probs, np.float32)
    with pytest.raises(MergeFault, match="turn 1 has 2 sampled ids and") as caught:
        merge_turns([R47[0], TurnRecord(R47[1].prompt_ids, R47[1].output_ids, given)])
    assert caught.value.detail == "log_probs"


# --- 5. length truncation ------------------------------------------------------------------------
SESSION = (
    _record(
        [1, 2, 3], [10, 11], [-0.125, -0.25], versions=[(1, 0, 2)], finish="tool_calls",
        cache=PrefixCacheInfo(0, 3), metadata={"lifecycle": {"turn": 1, "t0": None, "t1": 0.0}},
    ),
    _record(
        [1, 2, 3, 10, 11, 20, 21], [30, 31], [-0.5, -1.0], versions=[(2, 0, 2)],
        cache=PrefixCacheInfo(5, 7),
        metadata={"lifecycle": {"turn": 2, "t0": None, "t1": 30.0, "prev_t1": 0.0}},
    ),
)  # fmt: skip


@pytest.mark.parametrize("max_seq_len", [None, 9, 100])
def test_57_session_within_its_length_is_whole(max_seq_len: int | None) -> None:
    merged = merge_turns(SESSION, max_seq_len=max_seq_len)
    sample = merged.sample
    assert sample is not None
    assert sample.tokens.tolist() == [1, 2, 3, 10, 11, 20, 21, 30, 31]
    assert _plain(sample.loss_mask) == [1, 1, 0, 0, 1, 1]
    assert _plain(sample.rollout_log_probs) == [-0.125, -0.25, 0, 0, -0.5, -1]
    assert sample.weight_versions == [1, 2]
    assert sample.prefix_cache_info == PrefixCacheInfo(5, 10)
    assert sample.metadata["lifecycle"] == [
        {"turn": 1, "t0": None, "t1": 0.0},
        {"turn": 2, "t0": None, "t1": 30.0, "prev_t1": 0.0},
    ]
    assert (len(sample.tokens), sample.response_length) == (9, 6)
    assert [(call.start, call.end) for call in sample.calls] == [(3, 5), (7, 9)]
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert (merged.num_turns, merged.left_out) == (2, 0)


@pytest.mark.parametrize("max_seq_len", [5, 8])
def test_59_turns_beyond_the_length_are_cut_and_the_status_is_the_last_kept(
    max_seq_len: int,
) -> None:
    merged = merge_turns(SESSION, max_seq_len=max_seq_len)
    assert merged.sample is not None
    assert merged.sample.tokens.tolist() == [1, 2, 3, 10, 11]
    assert _plain(merged.sample.loss_mask) == [1, 1]
    assert _plain(merged.sample.rollout_log_probs) == [-0.125, -0.25]
    assert merged.sample.weight_versions == [1]
    assert merged.sample.prefix_cache_info == PrefixCacheInfo(0, 3)
    assert merged.sample.status is Status.COMPLETED
    assert (merged.num_turns, merged.left_out) == (1, 1)
    assert merged.sample.metadata["lifecycle"]["turn"] == 1


@pytest.mark.parametrize("max_seq_len", [2, 4])
def test_60_session_of_which_nothing_is_left_says_all_truncated(max_seq_len: int) -> None:
    merged = merge_turns(SESSION, max_seq_len=max_seq_len)
    assert (merged.sample, merged.empty_reason) == (None, "all_truncated")


def test_61_session_without_a_record_says_no_records() -> None:
    merged = merge_turns([])
    assert (merged.sample, merged.empty_reason) == (None, "no_records")


def test_turns_behind_one_that_was_not_completed_are_left_out() -> None:
    cut = _record([1, 2, 3], [10, 11], finish="length")
    merged = merge_turns([cut, R47[1]], accumulated=as_ids([1, 2, 3, 10, 11, 20, 21, 30, 31]))
    assert merged.sample is not None
    assert merged.sample.tokens.tolist() == [1, 2, 3, 10, 11]
    assert merged.sample.stop_reason is StopReason.TURN_LENGTH
    assert merged.left_out == 1
