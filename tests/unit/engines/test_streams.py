"""A reply in events, cut anywhere: it is the reply without a stream, each id passed on once."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import EngineFault
from tests.scripted_engine import a_reply, a_vllm_completion, a_vllm_reply
from tests.streams import DONE, Sink, events_of, sse
from worker.engines.faults import Detail
from worker.engines.protocol.http_base import MAX_REPLY_BYTES, Sent
from worker.engines.protocol.replay import Asked, ReplayShape, RowShape
from worker.engines.protocol.reply import read_reply
from worker.engines.protocol.stream import SglangJoiner, interval_of
from worker.engines.protocol.streams import STREAM_FACTOR, Events, StreamedReply
from worker.engines.protocol.versions import VersionMap
from worker.engines.protocol.vllm_reply import read_vllm_reply
from worker.engines.protocol.vllm_request import Route
from worker.engines.protocol.vllm_stream import VllmJoiner
from worker.types import Completion, Finish, Replay

RID = "0123456789abcdef" * 2
ENGINE = "http://engine"
TOP = 151668
IDS = list(range(300, 350))
FORMS = ("cumulative", "incremental", "generate", "completions")
DELTAS = FORMS[1:]
forms = pytest.mark.parametrize("form", FORMS)


def a_sent(num_new: int = 64, replay: Asked | None = None) -> Sent:
    return Sent(RID, ENGINE, 7, 3, num_new, replay)


def whole_of(form: str, ids: Sequence[int] = IDS, **fields: Any) -> bytes:
    """Return a reply without a stream."""
    if form == "generate":
        return a_vllm_reply(ids, prompt_tokens=7, **fields)
    if form == "completions":
        return a_vllm_completion(ids, **fields)
    spans = [{"version": "3", "start": 0, "end": len(ids)}] if ids else []
    return a_reply(ids, **{"prompt_tokens": 7, "id": RID, "weight_versions": spans} | fields)


def events(form: str, cuts: Iterable[int], raw: bytes | None = None) -> list[dict[str, Any]]:
    reply = whole_of(form) if raw is None else raw
    if form in ("cumulative", "incremental"):
        return events_of("sglang", reply, [*cuts], incremental=form == "incremental")
    return events_of("vllm", reply, [*cuts])


def plain(form: str, raw: bytes, sent: Sent) -> Completion:
    """Return what the bytes of a whole reply are read as."""
    if form in ("generate", "completions"):
        return read_vllm_reply(
            200, raw, sent, route=Route(form), max_token_id=TOP, versions=VersionMap()
        )
    return read_reply(
        200, raw, rid=sent.rid, engine=ENGINE, num_prompt=sent.num_prompt, version=sent.version,
        max_token_id=TOP, max_new_tokens=sent.max_new_tokens, replay=sent.replay,
    )  # fmt: skip


def stream_of(form: str, sink: Sink, sent: Sent, max_bytes: int = MAX_REPLY_BYTES) -> StreamedReply:
    is_vllm = form in ("generate", "completions")
    joiner = VllmJoiner(sent, Route(form)) if is_vllm else SglangJoiner(sent)
    return StreamedReply(joiner, sink, sent, max_token_id=TOP, max_bytes=max_bytes)


async def pieces(raw: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


def read(
    form: str, raw: bytes, sink: Sink | None = None, *, size: int = 4096, sent: Sent | None = None
) -> Completion:
    """Read a stream, in chunks of so many bytes, as the client does."""
    sent, sink = sent or a_sent(), Sink() if sink is None else sink
    stream = stream_of(form, sink, sent)
    joined = asyncio.run(stream.read(pieces(raw, size)))
    completion = plain(form, joined, sent)
    stream.check(completion)
    return completion


def body(*parts: Any) -> bytes:
    return b"".join(part if isinstance(part, bytes) else sse(part) for part in parts)


def fault_of(form: str, raw: bytes, sink: Sink | None = None, sent: Sent | None = None) -> str:
    with pytest.raises(EngineFault) as caught:
        read(form, raw, sink, sent=sent)
    return caught.value.detail


def assert_same(got: Completion, want: Completion) -> None:
    for name in want.__slots__:
        ours, theirs = getattr(got, name), getattr(want, name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, name
            assert ours.tobytes() == theirs.tobytes(), name
            assert ours.flags.writeable == theirs.flags.writeable, name
        elif isinstance(theirs, Replay):
            assert (ours.start, ours.rows.tolist()) == (theirs.start, theirs.rows.tolist())
        else:
            assert ours == theirs, name


# --- events of a stream --------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_the_same_wherever_bytes_are_cut(size: int, end: bytes) -> None:
    raw = (
        b": keep-alive\n\nevent: x\ndata: one\nid: 7\nretry: 10\n\ndata:two\ndata:  three\n\n"
        b"\n\ndata:\n\ndata: [DONE]\n\ndata: half"
    ).replace(b"\n", end)
    reader, found = Events(ENGINE), []
    for start in range(0, len(raw), size):
        found += reader.feed(raw[start : start + size])
    assert found == [b"one", b"two\n three", b"", b"[DONE]"]
    assert reader.num_waiting == len(b"data: half")


@pytest.mark.parametrize("line", [b"<html>", b"{}", b'data {"a": 1}', b"\x00\xff", b"dat: x"])
def test_a_line_that_is_none_of_an_event_is_a_bad_reply(line: bytes) -> None:
    with pytest.raises(EngineFault) as caught:
        list(Events(ENGINE).feed(b"data: one\n" + line + b"\n"))
    assert caught.value.detail == Detail.BAD_REPLY


def test_feeding_a_long_event_in_small_pieces_looks_at_each_byte_once() -> None:
    class Counted(bytearray):
        looked = 0

        def find(self, what: bytes, start: int = 0) -> int:  # type: ignore[override]
            Counted.looked += len(self) - start
            return super().find(what, start)

    reader = Events(ENGINE)
    reader._buffer = Counted()
    for _ in range(1000):
        assert list(reader.feed(b"x" * 100)) == []
    assert Counted.looked == 100_000


# --- the same reply ------------------------------------------------------------------------------
@forms
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_reply_in_events_is_the_reply_without_a_stream_however_it_is_cut(
    form: str, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, TOP), max_size=40))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)))) if ids else [])
    size = data.draw(st.integers(1, 3000))
    finish: dict[str, Any] = {}
    if data.draw(st.booleans()):
        message = {"type": "abort", "message": "x", "status_code": None}
        finish = {"finish": message if form in ("cumulative", "incremental") else "abort"}
        if form == "completions":
            finish = {"finish_reason": "abort"}
    whole, sink = whole_of(form, ids, **finish), Sink()
    got = read(form, body(*events(form, cuts, whole), DONE), sink, size=size)
    assert_same(got, plain(form, whole, a_sent()))
    assert sink.ids == ids[: cuts[-1] if cuts else 0], "the last event's are passed on by nobody"
    assert [len(part) for part in sink.added] == np.diff([0, *cuts]).tolist()


@pytest.mark.parametrize("form", ["cumulative", "incremental"])
@pytest.mark.parametrize("cuts", [[], [1], [1, 17, 33]])
def test_what_sglang_says_once_is_in_the_joined_reply_field_by_field(
    form: str, cuts: list[int]
) -> None:
    rows = base64.b64encode(np.arange(56 * 4, dtype="<i4").tobytes()).decode()
    whole = whole_of(form, routed_experts=rows, cached_tokens=5, spec_verify_ct=9, e2e_latency=0.5)
    asked = Asked(ReplayShape(RowShape(2, 2)), 0)
    sent, sink = a_sent(replay=asked), Sink()
    joined = asyncio.run(
        stream_of(form, sink, sent).read(pieces(body(*events(form, cuts, whole), DONE), 99))
    )
    want, got = json.loads(whole), json.loads(joined)
    assert got.pop("text", "") == want.pop("text")
    assert got == want
    assert_same(plain(form, joined, sent), plain(form, whole, sent))


def test_events_after_a_comment_of_a_silent_connection_are_read_on() -> None:
    told = events("completions", [1, 9])
    got = read("completions", body(b": keep-alive\n\n", told[0], b":\n\n", *told[1:], DONE))
    assert got.ids.tolist() == IDS


def test_events_of_older_vllm_servers_are_read() -> None:
    whole = json.loads(whole_of("generate"))
    choice = whole["choices"][0]
    del choice["weight_versions"], whole["usage"]
    for entry in choice["logprobs"]["content"]:
        entry["token"] = f"token_id:{entry.pop('token_id')}"
    raw = json.dumps(whole).encode()
    got = read("generate", body(*events("generate", [1, 9, 30], raw), DONE))
    assert_same(got, plain("generate", raw, a_sent()))


def test_log_probs_that_an_abort_of_older_vllm_servers_says_again_are_left_out() -> None:
    told = events("generate", [1, 50], whole_of("generate", finish="abort"))
    end = told[-2]["choices"][0]
    assert (end["token_ids"], end["finish_reason"]) == ([], "abort")
    end["logprobs"] = json.loads(whole_of("generate"))["choices"][0]["logprobs"]
    got = read("generate", body(*told, DONE))
    assert (got.ids.tolist(), got.finish) == (IDS, Finish.ABORT)


@pytest.mark.parametrize("num", [1, 2, 50])
@pytest.mark.parametrize("passed", ["all", "all but the last"])
def test_an_incremental_abort_in_the_queue_says_one_id_and_all_log_probs(
    num: int, passed: str
) -> None:
    end = num if passed == "all" else num - 1
    whole = json.loads(whole_of("incremental", IDS[:num], drop=["prompt_tokens"]))
    cuts = sorted({1, max(1, end // 2), end} - {0}) if end else []
    told = events("incremental", cuts, json.dumps(whole).encode())[:-1]
    whole["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    last = whole | {"output_ids": IDS[num - 1 : num]}
    sink = Sink()
    got = read("incremental", body(*told, last, DONE), sink)
    assert (got.ids.tolist(), got.finish) == (IDS[:num], Finish.ABORT)
    assert got.log_probs.tolist() == [-i / 128 for i in range(num)]
    assert sink.ids == IDS[:end]


# --- what a stream can be wrong in ---------------------------------------------------------------
def no_done(told: list[Any]) -> list[Any]:
    return told


def half(told: list[Any]) -> list[Any]:
    return [*told[:2], sse(told[2])[:-30]]


def nothing(_: list[Any]) -> list[Any]:
    return []


@forms
@pytest.mark.parametrize("damage", [no_done, half, nothing])
def test_a_stream_that_ends_before_its_done_is_half_a_reply(
    form: str, damage: Callable[[list[Any]], list[Any]]
) -> None:
    assert fault_of(form, body(*damage(events(form, [1, 9, 30])))) == Detail.RESET


@forms
def test_a_stream_that_is_done_without_a_finish_reason_is_no_reply(form: str) -> None:
    sink = Sink()
    told = events(form, [1, 9, 30])[:3]
    assert fault_of(form, body(*told, DONE), sink) == Detail.UNKNOWN_FINISH
    assert sink.ids == IDS[:30]
    assert fault_of(form, DONE) == Detail.UNKNOWN_FINISH


@forms
@pytest.mark.parametrize(
    "garbage", [b"{", b"[1]", b"7", b"null", b'"x"', b"{}", b"\xff", b"{" * 9999]
)
def test_an_event_that_is_no_piece_of_a_reply_is_a_bad_reply(form: str, garbage: bytes) -> None:
    told = events(form, [1, 9, 30])
    sink = Sink()
    assert fault_of(form, body(*told[:2], sse(garbage), *told[2:], DONE), sink) == Detail.BAD_REPLY
    assert sink.ids == IDS[:9]


@forms
def test_an_event_behind_the_end_of_a_reply_is_a_bad_reply(form: str) -> None:
    told = events(form, [1, 9])
    assert fault_of(form, body(*told, told[1], DONE)) == Detail.BAD_REPLY
    assert fault_of(form, body(*told, told[2], DONE)) == Detail.BAD_REPLY


@forms
def test_events_of_another_request_are_passed_on_by_nobody(form: str) -> None:
    told, sink = events(form, [1, 9]), Sink()
    for event in told:
        if "meta_info" in event:
            event["meta_info"]["id"] = "f" * 32
        else:
            event["id" if form == "completions" else "request_id"] = "f" * 32
    assert fault_of(form, body(*told, DONE), sink) == Detail.BAD_REPLY
    assert sink.ids == []


@pytest.mark.parametrize("at", [0, 3])
def test_cumulative_ids_that_change_are_a_bad_reply(at: int) -> None:
    told, sink = events("cumulative", [4, 9, 30]), Sink()
    told[2]["output_ids"][at] += 1
    assert fault_of("cumulative", body(*told, DONE), sink) == Detail.BAD_REPLY
    assert sink.ids == IDS[:9]
    told = events("cumulative", [4, 9, 30])
    told[-1]["output_ids"][at] += 1
    told[-1]["meta_info"]["output_token_logprobs"][at][1] += 1
    assert fault_of("cumulative", body(*told, DONE)) == Detail.BAD_REPLY


def test_cumulative_ids_that_shrink_are_a_bad_reply() -> None:
    told, sink = events("cumulative", [4, 9, 6, 30]), Sink()
    assert fault_of("cumulative", body(*told, DONE), sink) == Detail.BAD_REPLY
    assert sink.ids == IDS[:9]
    shorter = json.loads(whole_of("cumulative", IDS[:5]))
    assert fault_of("cumulative", body(*told[:2], shorter, DONE)) == Detail.BAD_REPLY
    empty = {"type": "abort", "message": "Abort in waiting queue"}
    none = {"meta_info": {"id": RID, "finish_reason": empty}}
    assert fault_of("cumulative", body(*told[:2], none, DONE)) == Detail.BAD_REPLY


@pytest.mark.parametrize("form", ["cumulative", "incremental"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_counts_that_are_not_those_of_the_ids_are_met_where_they_come(form: str, at: int) -> None:
    told, sink = events(form, [4, 9, 30]), Sink()
    told[at]["meta_info"]["completion_tokens"] += 8
    assert fault_of(form, body(*told, DONE), sink) == Detail.LOGPROB_LENGTH_MISMATCH
    assert sink.ids == IDS[: [0, 4, 9, 30][at]]


@pytest.mark.parametrize("form", ["cumulative", "incremental"])
def test_a_stream_that_changes_its_way_of_counting_is_refused(form: str) -> None:
    other = "incremental" if form == "cumulative" else "cumulative"
    told = events(form, [4, 9, 20, 30])
    told[2:4] = events(other, [4, 9, 20, 30])[2:4]
    sink = Sink()
    assert fault_of(form, body(*told, DONE), sink) == Detail.LOGPROB_LENGTH_MISMATCH
    assert sink.ids == IDS[:9]


@pytest.mark.parametrize("form", ["cumulative", "incremental"])
def test_another_prompt_than_was_sent_is_refused_before_an_id_is_passed_on(form: str) -> None:
    told, sink = events(form, [1, 9]), Sink()
    told[0]["meta_info"]["prompt_tokens"] = 6
    assert fault_of(form, body(*told, DONE), sink) == Detail.PROMPT_MISMATCH
    assert sink.ids == []


@forms
@pytest.mark.parametrize(
    ("token", "detail"), [(TOP + 1, "bad_token"), (-1, "bad_token"), (2**40, "bad_token")]
)
def test_an_id_outside_the_vocabulary_is_passed_on_by_nobody(
    form: str, token: int, detail: str
) -> None:
    ids = [*IDS[:8], token, *IDS[9:]]
    told, sink = events(form, [4, 9, 30], whole_of(form, ids)), Sink()
    assert fault_of(form, body(*told, DONE), sink) == detail
    assert sink.ids == IDS[:4]


@forms
def test_more_tokens_than_were_asked_for_are_met_where_they_come(form: str) -> None:
    sink = Sink()
    told = events(form, [4, 9, 30])
    assert fault_of(form, body(*told, DONE), sink, a_sent(20)) == Detail.BAD_REPLY
    assert sink.ids == IDS[:9]


@pytest.mark.parametrize("form", DELTAS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_log_prob_that_is_missing_in_one_event_is_missed_in_the_whole(form: str, at: int) -> None:
    told = events(form, [4, 9, 30])
    if form == "incremental":
        told[at]["meta_info"]["output_token_logprobs"].pop()
    else:
        for values in told[at]["choices"][0]["logprobs"].values():
            values.pop()
    assert fault_of(form, body(*told, DONE)) == Detail.LOGPROB_LENGTH_MISMATCH


@pytest.mark.parametrize("form", ["generate", "completions"])
def test_a_list_that_is_none_cannot_become_one_by_being_joined(form: str) -> None:
    told = events(form, [4, 9, 30])
    name = "content" if form == "generate" else "token_logprobs"
    for odd in ('{"a": 1}', "17", '"[1]"'):
        told[1]["choices"][0]["logprobs"][name] = json.loads(odd)
        assert fault_of(form, body(*told, DONE)) == Detail.BAD_REPLY


@pytest.mark.parametrize("form", ["generate", "completions"])
@pytest.mark.parametrize("change", [{"index": 1}, None])
def test_another_choice_than_the_one_is_a_bad_reply(form: str, change: Any) -> None:
    told = events(form, [4, 9])
    if change is None:
        told[1]["choices"] *= 2
    else:
        told[1]["choices"][0] |= change
    assert fault_of(form, body(*told, DONE)) == Detail.BAD_REPLY


# --- errors as events ----------------------------------------------------------------------------
@forms
@pytest.mark.parametrize(
    ("error", "detail"),
    [
        ({"message": "Unexpected", "code": 400}, "refused"),
        ({"message": "Unexpected", "type": "NotFoundError", "code": 404}, "refused"),
        ({"message": "longer than the model's context length", "code": 400}, "context_overflow"),
        ({"message": "longer than the model's context length"}, "context_overflow"),
        ({"message": "Internal server error", "code": 500}, "server_error"),
        ({"message": "busy", "code": 503}, "unavailable"),
        ({"message": "busy", "code": 429}, "unavailable"),
        ({"message": "out of luck"}, "bad_reply"),
        ({"message": "out of luck", "code": "invalid"}, "bad_reply"),
        ({"message": "out of luck", "code": 200}, "bad_reply"),
        ({"message": "out of luck", "code": 99999}, "bad_reply"),
        ("out of luck", "bad_reply"),
        ([], "bad_reply"),
    ],
)
def test_an_error_event_is_the_http_status_that_its_code_says(
    form: str, error: Any, detail: str
) -> None:
    told, sink = events(form, [4, 9]), Sink()
    assert fault_of(form, body({"error": error}, DONE)) == detail
    assert fault_of(form, body(told[0], {"error": error}, DONE), sink) == detail
    assert sink.ids == IDS[:4]


# --- size ----------------------------------------------------------------------------------------
@forms
def test_a_stream_beyond_the_largest_that_there_can_be_is_cut_off(form: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            sent.append(1)
            yield b": keep-alive\n\n" * 100

    sent: list[int] = []
    with pytest.raises(EngineFault) as caught:
        asyncio.run(stream_of(form, Sink(), a_sent(), max_bytes=10_000).read(endless()))
    assert caught.value.detail == Detail.BAD_REPLY
    assert len(sent) * 1400 <= (10_000 + 1400) * STREAM_FACTOR


@forms
def test_an_event_beyond_the_largest_reply_is_held_no_longer(form: str) -> None:
    async def one_line() -> AsyncIterator[bytes]:
        yield b"data: "
        while True:
            sent.append(1)
            yield b"1" * 1000

    sent: list[int] = []
    with pytest.raises(EngineFault) as caught:
        asyncio.run(stream_of(form, Sink(), a_sent(), max_bytes=10_000).read(one_line()))
    assert caught.value.detail == Detail.BAD_REPLY
    assert len(sent) <= 11


@pytest.mark.parametrize("num", [128, 1024, 8192, 131072])
def test_the_pace_of_a_cumulative_stream_keeps_its_bytes_below_the_limit(num: int) -> None:
    """With a log-prob of 45 bytes a token, and events of SGLang's: the first token, then each."""
    interval, entry, frame = interval_of(num), 45, 400
    ends = [*range(1, num, interval), num]
    assert sum(frame + entry * end for end in ends) < STREAM_FACTOR * (frame + entry * num)
