"""Calls in streams: ours cut into deltas, an upstream's gathered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toy import toy_renderer
from worker.gateway.growing import GrowingReply
from worker.gateway.reply import reply_message
from worker.tito.calls import judge_call
from worker.tito.deltas import CallGatherer, GatheredCall, arguments_text, call_deltas
from worker.tito.ids import as_ids
from worker.types import AssistantMessage, ToolCall

TOY = toy_renderer()


def streamed(
    parts: Iterable[Sequence[int]],
) -> tuple[list[dict[str, Any]], AssistantMessage]:
    """Feed a reply part by part; return every delta, and the parsed whole."""
    window, ids = as_ids([]), [as_ids(part) for part in parts]
    growing = GrowingReply(TOY, window)
    deltas = [delta for part in ids for delta in growing.feed(part)]
    parsed = TOY.parse(np.concatenate([window, *ids]), window)
    return deltas + growing.finish(reply_message(parsed)), parsed


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOY.encode_raw(text).tolist()
    return ids


def content_of(deltas: Sequence[dict[str, Any]]) -> str:
    return "".join(delta.get("content", "") for delta in deltas)


def gathered(deltas: Sequence[dict[str, Any]]) -> list[GatheredCall]:
    """Read our own deltas back as a client does."""
    gatherer = CallGatherer()
    for delta in deltas:
        gatherer.add(delta.get("tool_calls"))
    return gatherer.calls()


def test_case_44_the_last_brace_arrives_with_the_closing_tag() -> None:
    chunks = ['<tool_call>{"name":"a",', '"arguments":{"x":1}', "}</tool_call>"]
    deltas, parsed = streamed(map(ids_of, chunks))
    [call] = gathered(deltas)
    assert (call.name, call.arguments) == ("a", '{"x":1}')
    assert call.arguments == arguments_text(parsed.tool_calls[0])
    assert content_of(deltas) == ""


def test_case_25_a_closing_tag_inside_a_string_closes_nothing_in_a_stream() -> None:
    text = (
        '<tool_call>\n{"name":"write","arguments":{"text":"use </tool_call> here }"}}\n</tool_call>'
    )
    ids = ids_of(text)
    for size in (1, 7, len(ids)):
        deltas, _ = streamed(ids[at : at + size] for at in range(0, len(ids), size))
        [call] = gathered(deltas)
        assert json.loads(call.arguments) == {"text": "use </tool_call> here }"}
        assert content_of(deltas) == ""


@pytest.mark.parametrize("size", [1, 5, 64])
def test_case_45_id_type_and_name_come_once_and_the_index_always(size: int) -> None:
    arguments = arguments_text(ToolCall("c1", "f", {"text": "ü" * 8 + "\n", "n": 1.5}))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    first, *rest = call_deltas(call, 2, piece_chars=size)
    [head] = first["tool_calls"]
    assert head == {
        "index": 2, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""},
    }  # fmt: skip
    for delta in rest:
        [entry] = delta["tool_calls"]
        assert entry.keys() == {"index", "function"}
        assert (entry["index"], entry["function"].keys()) == (2, {"arguments"})
        assert 1 <= len(entry["function"]["arguments"]) <= size
    assert gathered([first, *rest]) == [GatheredCall("c1", "f", arguments)]


def test_case_28_arguments_are_encoded_exactly_once_whatever_the_model_wrote() -> None:
    raw = '{"name":"open","arguments":"\\"{\\\\\\"url\\\\\\":\\\\\\"http://x.test\\\\\\"}\\""}'
    assert arguments_text(judge_call(raw, closed=True)) == '{"url":"http://x.test"}'


def test_case_45_an_upstream_without_ids_gets_one_for_every_call_that_stays() -> None:
    gatherer = CallGatherer()
    gatherer.add([{"index": 0, "function": {"name": "a", "arguments": ""}}])
    [before] = gatherer.calls()
    for piece in ('{"x"', ":", "1}"):
        gatherer.add([{"index": 0, "function": {"arguments": piece}}])
    gatherer.add([{"index": 1, "function": {"name": "b", "arguments": "{}"}}])
    a, b = gatherer.calls()
    assert (a.name, a.arguments, b.name, b.arguments) == ("a", '{"x":1}', "b", "{}")
    assert a.id == before.id != b.id
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", one.id) for one in (a, b))


def test_case_46_two_entries_of_one_index_in_one_chunk_are_one_call() -> None:
    gatherer = CallGatherer()
    gatherer.add(
        [
            {"index": 0, "id": "c1", "function": {"name": "a", "arguments": '{"x":'}},
            {"index": 0, "function": {"arguments": "1}"}},
        ]
    )
    assert gatherer.calls() == [GatheredCall("c1", "a", '{"x":1}')]


def test_case_47_a_new_id_under_a_known_index_opens_a_call() -> None:
    gatherer = CallGatherer()
    for call_id, name in (("c1", "a"), ("c2", "b")):
        gatherer.add([{"index": 0, "id": call_id, "function": {"name": name, "arguments": "{"}}])
        gatherer.add([{"index": 0, "function": {"arguments": "}"}}])
    assert gatherer.calls() == [GatheredCall("c1", "a", "{}"), GatheredCall("c2", "b", "{}")]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        # The id repeated in every delta.
        ([(0, "c1", "a", "{"), (0, "c1", None, "}")], [("c1", "a", "{}")]),
        # The name repeated, too.
        ([(0, "c1", "a", "{"), (0, "c1", "a", "}")], [("c1", "a", "{}")]),
        # A new id opens a call, whatever its name.
        ([(0, "c1", "a", "{}"), (0, "c2", "a", "{}")], [("c1", "a", "{}"), ("c2", "a", "{}")]),
        ([(0, "c1", "a", "{}"), (0, "c2", None, "{}")], [("c1", "a", "{}"), ("c2", "", "{}")]),
        # Interleaved.
        (
            [(0, "c1", "a", "{"), (1, "c2", "b", "["), (0, None, None, "}"), (1, None, None, "]")],
            [("c1", "a", "{}"), ("c2", "b", "[]")],
        ),
        # No index at all: an id opens, what has none goes on.
        (
            [(None, "c1", "a", "{"), (None, None, None, "}"), (None, "c2", "b", "{}")],
            [("c1", "a", "{}"), ("c2", "b", "{}")],
        ),
        ([(None, "c1", "a", "{"), (None, "c2", "b", "["), (None, "c1", None, "}")],
         [("c1", "a", "{}"), ("c2", "b", "[")]),
        # All of index 0, empty strings for what is absent.
        ([(0, "c1", "a", ""), (0, "", "", "{}")], [("c1", "a", "{}")]),
    ],
)  # fmt: skip
def test_entries_go_to_the_call_they_belong_to(
    entries: list[tuple[Any, Any, Any, Any]], expected: list[tuple[str, str, str]]
) -> None:
    gatherer = CallGatherer()
    for index, call_id, name, piece in entries:
        entry: dict[str, Any] = {"function": {"name": name, "arguments": piece}}
        if index is not None:
            entry["index"] = index
        if call_id is not None:
            entry["id"] = call_id
        gatherer.add([entry])
    assert [(call.id, call.name, call.arguments) for call in gatherer.calls()] == expected


def test_case_47_another_name_opens_a_call_where_there_are_no_ids() -> None:
    gatherer = CallGatherer()
    for name in ("a", "b"):
        gatherer.add([{"index": 0, "function": {"name": name, "arguments": "{}"}}])
    assert [(call.name, call.arguments) for call in gatherer.calls()] == [("a", "{}"), ("b", "{}")]


def test_garbage_of_an_upstream_is_a_value_error_or_nothing() -> None:
    gatherer = CallGatherer()
    gatherer.add(None)
    gatherer.add([])
    gatherer.add([{"index": 0, "id": 5, "function": {"name": 7, "arguments": {"x": 1}}}])
    gatherer.add([{"index": 0, "function": None}])
    [call] = gatherer.calls()
    assert (call.name, call.arguments) == ("", "")
    with pytest.raises(ValueError, match="a tool call delta is str"):
        gatherer.add(["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="more than 1024 tool calls"):
        gatherer.add({"index": n, "id": f"c{n}"} for n in range(1, 2000))


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name":"f","arguments":{"x":"</tool_call>"}}', "{}", "<tool",
     '{"name":"g"}', "text ", "\n", "<", '{"name":"f","arguments":"', '"}']
)  # fmt: skip


REPLIES = st.lists(PIECES, max_size=12).map("".join).map(ids_of)


@given(REPLIES, st.integers(1, 9))
def test_a_stream_gives_the_same_however_it_is_cut(ids: list[int], size: int) -> None:
    whole, _ = streamed([ids])
    cut, _ = streamed(ids[at : at + size] for at in range(0, len(ids), size))
    assert content_of(cut) == content_of(whole)
    assert [(c.name, c.arguments) for c in gathered(cut)] == [
        (c.name, c.arguments) for c in gathered(whole)
    ]


@given(REPLIES)
def test_a_stream_and_the_ids_of_the_same_text_give_the_same_calls(ids: list[int]) -> None:
    deltas, parsed = streamed([number] for number in ids)
    good = [call for call in parsed.tool_calls if call.problem is None]
    assert gathered(deltas) == [GatheredCall(c.id, c.name, arguments_text(c)) for c in good]
    broken = [call.as_written for call in parsed.tool_calls if call.problem is not None]
    assert content_of(deltas) == "\n".join([*([parsed.content] if parsed.content else []), *broken])
