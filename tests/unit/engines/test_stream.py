"""Replies in chunks: both kinds of streams, the broken ones, and the count at the end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import EngineFault
from worker.engines.stream import StreamedReply, StreamKind

IDS = [31, 32, 2]
LOG_PROBS = [-0.5, -0.25, -0.125]
CUMULATIVE = [[31], [31, 32], [31, 32, 2]]
INCREMENTS = [[31], [32], [2]]


def fed(kind: StreamKind, chunks: list[list[int]]) -> StreamedReply:
    """Feed chunks whose log-probs are -id/64."""
    reply = StreamedReply(kind, "http://engine")
    for ids in chunks:
        reply.add(ids, [-number / 64 for number in ids])
    return reply


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [(StreamKind.CUMULATIVE, CUMULATIVE), (StreamKind.INCREMENTS, INCREMENTS)],
)
def test_case_65_both_kinds_of_streams_give_the_same_reply(
    kind: StreamKind, chunks: list[list[int]]
) -> None:
    ids, log_probs = fed(kind, chunks).finish(completion_tokens=3)
    assert (ids.tolist(), ids.dtype) == (IDS, np.int32)
    assert log_probs.dtype == np.float32
    assert log_probs.tolist() == [-31 / 64, -0.5, -2 / 64]


@pytest.mark.parametrize("kind", list(StreamKind))
def test_case_65_a_stream_that_mixes_both_is_rejected(kind: StreamKind) -> None:
    with pytest.raises(EngineFault) as caught:
        fed(kind, [[31], [32, 2], [2]]).finish(completion_tokens=3)
    assert caught.value.detail in ("bad_reply", "logprob_length_mismatch")
    assert caught.value.retryable


@pytest.mark.parametrize(
    "chunks", [[[31], [31, 32], [31]], [[31, 32], [30, 32, 2]], [[31, 32], []]]
)
def test_a_cumulative_stream_that_lost_or_changed_its_beginning_is_rejected(
    chunks: list[list[int]],
) -> None:
    with pytest.raises(EngineFault, match="does not go on from the"):
        fed(StreamKind.CUMULATIVE, chunks).finish(completion_tokens=None)


def test_a_log_prob_that_changed_on_the_way_is_rejected() -> None:
    reply = StreamedReply(StreamKind.CUMULATIVE, "http://engine")
    reply.add([31], [-0.5])
    reply.add([31, 32], [-0.25, -0.25])
    with pytest.raises(EngineFault, match="does not go on"):
        reply.finish(completion_tokens=2)


def test_an_id_that_changed_on_the_way_is_rejected() -> None:
    reply = StreamedReply(StreamKind.CUMULATIVE, "http://engine")
    for ids in ([30, 31], [30, 31, 32], [29, 31, 32]):
        reply.add(ids, [-0.5] * len(ids))
    with pytest.raises(EngineFault, match="does not go on"):
        reply.finish(completion_tokens=3)


def test_case_60_chunks_that_never_came_are_seen_by_the_count() -> None:
    reply = fed(StreamKind.INCREMENTS, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(EngineFault, match="hold 6 ids, completion_tokens is 14") as caught:
        reply.finish(completion_tokens=14)
    assert caught.value.detail == "logprob_length_mismatch"


def test_case_53_a_chunk_with_fewer_log_probs_than_ids_is_rejected_at_once() -> None:
    reply = StreamedReply(StreamKind.INCREMENTS, "http://engine")
    with pytest.raises(EngineFault, match="3 ids and 2 log-probs"):
        reply.add(IDS, LOG_PROBS[:2])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_is_rejected(value: float) -> None:
    reply = StreamedReply(StreamKind.INCREMENTS, "http://engine")
    reply.add([31], [value])
    with pytest.raises(EngineFault, match="no number"):
        reply.finish(completion_tokens=1)


@pytest.mark.parametrize("kind", list(StreamKind))
def test_a_reply_of_nothing_is_two_empty_arrays(kind: StreamKind) -> None:
    ids, log_probs = StreamedReply(kind, "http://engine").finish(completion_tokens=0)
    assert (ids.shape, log_probs.shape) == ((0,), (0,))


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8))
def test_new_ids_are_told_chunk_by_chunk_for_both_kinds(pieces: list[list[int]]) -> None:
    grown = StreamedReply(StreamKind.INCREMENTS, "e")
    repeated = StreamedReply(StreamKind.CUMULATIVE, "e")
    so_far: list[int] = []
    for piece in pieces:
        so_far = so_far + piece
        assert grown.add(piece, [-0.5] * len(piece)) == piece
        assert repeated.add(so_far, [-0.5] * len(so_far)) == piece
    assert grown.finish(completion_tokens=len(so_far))[0].tolist() == so_far
    assert repeated.finish(completion_tokens=len(so_far))[0].tolist() == so_far


class Counted(list[int]):
    """Ids that count how many of them are read."""

    reads = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        found = super().__getitem__(place)
        Counted.reads += len(found) if isinstance(place, slice) else 1
        return found


def test_case_65_a_chunk_costs_what_it_adds() -> None:
    reply = StreamedReply(StreamKind.CUMULATIVE, "http://engine")
    for length in range(1, 2001):
        reply.add(Counted(range(length)), [-0.5] * length)
    assert Counted.reads == 2000 + 1999  # what is new, and one id at every seam
    assert reply.finish(completion_tokens=2000)[0].tolist() == list(range(2000))
