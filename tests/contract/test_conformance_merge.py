"""Conformance sections 3 to 6: merging turns, on ids, masks, log-probs, status and replay data.

The numbers in the names are the cases'. Where the reference system asserts, the merge here raises
a typed fault that says where; the names say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.errors import EngineFault, MergeFault, Status, StopReason
from rollstream.sample import LogProbs, LossMask, PrefixCacheInfo, Sample
from worker.tito.ids import as_ids
from worker.tito.merge import TurnRecord, fold_samples, merge_samples, merge_turns
from worker.types import Finish, Replay


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


def _rows(count: int, first: int = 0, layers: int = 2, top_k: int = 2) -> Any:
    """Return rows of which each says in every value what position it is of."""
    rows = np.zeros((count, layers, top_k), np.int32)
    return rows + np.arange(first, first + count, dtype=np.int32).reshape(-1, 1, 1)


def test_39_a_pair_of_which_the_second_lacks_replay_data_is_a_fault() -> None:
    replay = _sample([1, 2], 1, rollout_routed_experts=_rows(1))
    with pytest.raises(MergeFault, match="first sample has rollout_routed_experts") as caught:
        merge_samples(replay, _sample([1, 2, 20, 3], 1), _decode)
    assert caught.value.detail == "replay"


def test_39_a_fold_stops_before_the_sample_that_lacks_replay_data() -> None:
    a = _sample([1, 2], 1, rollout_routed_experts=_rows(1))
    b = _sample([1, 2, 20, 3], 1)
    assert fold_samples([a, b], _decode) is a
    c = _sample([1, 2, 20, 3], 1, rollout_routed_experts=_rows(3))
    d = _sample([1, 2, 20, 3, 4], 1)
    folded = fold_samples([a, c, d, d], _decode)
    assert folded.tokens.tolist() == [1, 2, 20, 3]
    assert _same_rows(folded.rollout_routed_experts, _rows(3))


@pytest.mark.parametrize("name", ["rollout_routed_experts", "rollout_indexer_topk"])
def test_24_41_replay_data_of_the_result_is_the_second_samples(name: str) -> None:
    a = _sample([1, 2], 1, **{name: _rows(1, first=90)})
    b = _sample([1, 2, 20, 3], 1, **{name: _rows(3)})
    for first in (a, _sample([1, 2], 1)):
        assert _same_rows(getattr(merge_samples(first, b, _decode), name), _rows(3))
    narrow = _sample([1, 2], 1, **{name: _rows(1, top_k=1)})
    with pytest.raises(MergeFault, match=r"differ in the \(layers, top_k\)") as caught:
        merge_samples(narrow, b, _decode)
    assert caught.value.detail == "replay"


def _same_rows(got: Any, expected: Any) -> bool:
    return got is not None and got.dtype == expected.dtype and np.array_equal(got, expected)


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


PER_TOKEN = ("teacher_log_probs", "opd_reverse_kl")


@pytest.mark.parametrize("name", PER_TOKEN)
def test_42_per_token_field_of_a_pair_has_zeros_where_nothing_was_sampled(name: str) -> None:
    def pair(first: Any, second: Any) -> Sample:
        a = _sample([1, 2, 3], 2, **{name: first})
        b = _sample([1, 2, 3, 20, 21, 4, 5], 2, **{name: second})
        return merge_samples(a, b, _decode)

    one, two = np.array([-1, -1.1], np.float32), np.array([-1.2, -1.3], np.float32)
    merged = getattr(pair(one, two), name)
    assert merged.dtype == np.float32
    assert _plain(merged) == _f32([-1, -1.1, 0, 0, -1.2, -1.3])
    assert getattr(pair(None, None), name) is None
    for first, second, said in [
        (one, two[:1], f"turn 1 has 1 {name} for 2 ids"), (one, None, f"turn 1 has no {name}"),
        (None, two, f"turn 0 has no {name}"),
    ]:  # fmt: skip
        with pytest.raises(MergeFault, match=said) as caught:  # the reference asserts
            pair(first, second)
        assert caught.value.detail == "per_token"


@pytest.mark.parametrize("name", PER_TOKEN)
def test_42_per_token_field_of_records_has_zeros_where_nothing_was_sampled(name: str) -> None:
    def records(first: Any, second: Any) -> list[TurnRecord]:
        return [
            _record([1], [2, 3], per_token={} if first is None else {name: np.array(first)}),
            _record([1, 2, 3, 20, 21], [4, 5], per_token={name: np.array(second)}),
        ]

    merged = getattr(_merged(*records([-1, -1.1], [-1.2, -1.3])), name)
    assert _plain(merged) == _f32([-1, -1.1, 0, 0, -1.2, -1.3])
    assert getattr(_merged(_record([1], [2])), name) is None
    for wrong, said in [
        (records([-1, -1.1], [-1.2]), f"turn 1 has 1 {name} for 2 ids"),
        (records(None, [-1.2, -1.3]), f"turn 0 has no {name}"),
    ]:
        with pytest.raises(MergeFault, match=said) as caught:
            merge_turns(wrong)
        assert caught.value.detail == "per_token"


def test_42_a_turn_that_sampled_nothing_needs_no_per_token_field_and_unknown_ones_are_refused() -> (
    None
):
    given = {"teacher_log_probs": np.array([-1.0], np.float32)}
    sample = _merged(_record([1], []), _record([1], [2], per_token=given))
    assert _plain(sample.teacher_log_probs) == [-1.0]
    with pytest.raises(ValueError, match="unknown per-token field 'teachr'; known: teacher_log"):
        _merged(_record([1], [2], per_token={"teachr": np.array([1.0])}))


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


def test_fold_refuses_samples_of_different_members_and_images() -> None:
    a, b = _sample([1, 2], 1, index=4), _sample([1, 2, 3], 1, index=5)
    with pytest.raises(MergeFault, match="differ in index: 4") as caught:
        merge_samples(a, b, _decode)
    assert caught.value.detail == "field"
    image = _sample([1, 2], 1, multimodal_inputs={"image": b""})
    with pytest.raises(MergeFault, match="multimodal_inputs cannot be merged"):
        merge_samples(image, _sample([1, 2, 3], 1), _decode)


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


# --- 5, 6. replay ---------------------------------------------------------------------------------
def _with_rows(record: TurnRecord, start: int, layers: int = 3, top_k: int = 2) -> TurnRecord:
    assert record.prompt_ids is not None
    fed = len(record.prompt_ids) + len(record.output_ids) - 1
    record.routed_experts = Replay(start, _rows(fed - start, start, layers, top_k))
    return record


def _session_with_rows(second_start: int) -> list[TurnRecord]:
    first, second = (replace(turn) for turn in SESSION)
    return [_with_rows(first, 0), _with_rows(second, second_start)]


@pytest.mark.parametrize("second_start", [0, 4])
@pytest.mark.parametrize("max_seq_len", [None, 9, 100])
def test_57_replay_rows_are_as_many_as_tokens_less_one(
    second_start: int, max_seq_len: int | None
) -> None:
    sample = merge_turns(_session_with_rows(second_start), max_seq_len=max_seq_len).sample
    assert sample is not None
    assert _same_rows(sample.rollout_routed_experts, _rows(8, layers=3))


@pytest.mark.parametrize("second_start", [0, 4])
def test_59_replay_rows_are_cut_with_the_turns(second_start: int) -> None:
    sample = merge_turns(_session_with_rows(second_start), max_seq_len=5).sample
    assert sample is not None
    assert len(sample.tokens) == 5
    assert _same_rows(sample.rollout_routed_experts, _rows(4, layers=3))
    assert sample.status is Status.COMPLETED


def _records_of_8_tokens(first: Any, second: Any) -> list[TurnRecord]:
    """Return two records of 5 and 8 tokens: rows 0-3 are the first's, 4-6 the second's."""
    return [
        _record([1, 2, 3], [4, 5], routed_experts=first),
        _record([1, 2, 3, 4, 5, 6], [7, 8], routed_experts=second),
    ]


def test_62_two_patches_are_exactly_the_whole() -> None:
    records = _records_of_8_tokens(Replay(0, _rows(4)), Replay(4, _rows(3, 4)))
    assert _same_rows(_merged(*records).rollout_routed_experts, _rows(7))


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (_records_of_8_tokens(Replay(0, _rows(4)), Replay(3, _rows(4))),
         "record 2 starts at row 3; expected 4"),
        ([_record([1, 2, 3], [4, 5, 6], routed_experts=Replay(0, _rows(5))),
          _record([1, 2, 3, 4, 5, 6], [7], routed_experts=Replay(4, _rows(2)))],
         "record 2 starts at row 4; expected 5"),
        (_records_of_8_tokens(Replay(0, _rows(4)), Replay(5, _rows(2))),
         "record 2 starts at row 5; expected 4"),
        (_records_of_8_tokens(Replay(1, _rows(3)), Replay(4, _rows(3))),
         "record 1 starts at row 1; expected 0"),
        (_records_of_8_tokens(Replay(0, _rows(3)), Replay(4, _rows(3))),
         "record 1 has 3 rows from row 0; its prompt and reply fed 4 tokens"),
        (_records_of_8_tokens(Replay(0, _rows(4)), Replay(4, _rows(3, top_k=3))),
         r"record 2 has \(layers, top_k\) \(2, 3\); the records before it have \(2, 2\)"),
        (_records_of_8_tokens(Replay(0, np.zeros((4, 4), np.int32)), None),
         r"record 1 is int32 of shape \(4, 4\)"),
    ],
)  # fmt: skip
def test_63_68_patches_that_do_not_join_are_a_recorded_fault_with_the_references_words(
    records: list[TurnRecord], said: str
) -> None:
    with pytest.raises(MergeFault, match=said) as caught:
        merge_turns(records)
    assert caught.value.detail == "replay"


def test_65_a_merge_stops_before_the_record_that_has_no_payload_and_says_which() -> None:
    merged = merge_turns(_records_of_8_tokens(Replay(0, _rows(4)), None))
    assert merged.gap == "record 2 has no routed_experts payload for its 3 rows"
    assert (merged.num_turns, merged.left_out) == (1, 1)
    assert merged.sample is not None
    assert merged.sample.tokens.tolist() == [1, 2, 3, 4, 5]
    assert _same_rows(merged.sample.rollout_routed_experts, _rows(4))
    none = merge_turns(_records_of_8_tokens(None, Replay(4, _rows(3, 4))))
    assert (none.sample, none.empty_reason) == (None, "replay_gap")
    assert none.gap == "record 1 has no routed_experts payload for its 4 rows"


def test_65_rows_that_a_later_record_brings_are_no_gap() -> None:
    sample = _merged(*_records_of_8_tokens(None, Replay(0, _rows(7))))
    assert _same_rows(sample.rollout_routed_experts, _rows(7))


def test_66_without_any_payload_there_is_no_replay_data() -> None:
    assert _merged(*_records_of_8_tokens(None, None)).rollout_routed_experts is None


def test_67_an_empty_payload_is_an_empty_array() -> None:
    sample = _merged(_record([1], [], routed_experts=Replay(0, np.empty((0, 2, 0), np.int32))))
    rows = sample.rollout_routed_experts
    assert rows is not None
    assert (rows.shape, rows.dtype) == ((0, 2, 0), np.dtype(np.int32))


def test_rows_behind_an_aborted_call_that_brought_none_are_marked() -> None:
    aborted = _record([1, 2, 3, 4, 5, 6], [7, 8], finish="abort")
    first = _records_of_8_tokens(Replay(0, _rows(4)), None)[0]
    rows = _merged(first, aborted).rollout_routed_experts
    assert rows is not None
    assert _same_rows(rows[:4], _rows(4))
    assert (rows[4:] == -1).all()
    assert len(rows) == 7


@pytest.mark.parametrize("second_start", [3, 4])
def test_rows_of_a_trimmed_id_are_not_those_of_the_id_in_its_place(second_start: int) -> None:
    # Turn 0 sampled [4, 2]; the session holds [4] and goes on with 9: row 4 is 9's, not 2's.
    records = [
        _record([1, 2, 3], [4, 2], routed_experts=Replay(0, _rows(4, 100))),
        _record([1, 2, 3, 4, 9], [7], routed_experts=Replay(second_start, _rows(5 - second_start))),
    ]
    held = as_ids([1, 2, 3, 4, 9, 7])
    sample = merge_turns(records, accumulated=held, max_trim=1).sample
    assert sample is not None
    assert sample.rollout_routed_experts is not None
    expected = [*range(100, 100 + second_start), *range(5 - second_start)]
    assert sample.rollout_routed_experts[:, 0, 0].tolist() == expected


def test_51_65_the_turn_before_a_gap_keeps_its_stop_as_a_single_turn_does() -> None:
    records = [
        _record([1, 2, 3], [4, 2], [-0.5, -0.25], routed_experts=Replay(0, _rows(4))),
        _record([1, 2, 3, 4, 9], [7]),
    ]
    merged = merge_turns(records, accumulated=as_ids([1, 2, 3, 4, 9, 7]), max_trim=1)
    assert merged.gap == "record 2 has no routed_experts payload for its 1 rows"
    assert merged.sample is not None
    assert merged.sample.tokens.tolist() == [1, 2, 3, 4, 2]
    assert _plain(merged.sample.loss_mask) == [1, 1]
    assert _plain(merged.sample.rollout_log_probs) == [-0.5, -0.25]
