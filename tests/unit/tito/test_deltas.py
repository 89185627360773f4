"""Calls in streams: ours cut into deltas, an upstream's gathered, text that grows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toy import toy_renderer
from worker.tito.calls import judge_call
from worker.tito.deltas import (
    CallGatherer,
    CallText,
    GatheredCall,
    arguments_text,
    call_deltas,
    message_deltas,
)
from worker.types import AssistantMessage, ProblemKind, ToolCall

TOY = toy_renderer()


def streamed(chunks: Iterable[str], **options: Any) -> tuple[list[dict[str, Any]], CallText]:
    """Feed chunks and return every delta."""
    stream = CallText(**options)
    deltas = [delta for chunk in chunks for delta in stream.feed(chunk)]
    return deltas + stream.finish(), stream


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
    deltas, stream = streamed(chunks)
    [call] = gathered(deltas)
    assert (call.name, call.arguments) == ("a", '{"x":1}')
    assert call.arguments == arguments_text(stream.calls[0])
    assert content_of(deltas) == ""


def test_case_25_a_closing_tag_inside_a_string_closes_nothing_in_a_stream() -> None:
    text = (
        '<tool_call>\n{"name":"write","arguments":{"text":"use </tool_call> here }"}}\n</tool_call>'
    )
    for size in (1, 7, len(text)):
        deltas, _ = streamed(text[at : at + size] for at in range(0, len(text), size))
        [call] = gathered(deltas)
        assert json.loads(call.arguments) == {"text": "use </tool_call> here }"}
        assert content_of(deltas) == ""


@pytest.mark.parametrize("size", [1, 5, 64])
def test_case_45_id_type_and_name_come_once_and_the_index_always(size: int) -> None:
    call = ToolCall("c1", "f", {"text": "ü" * 8 + "\n", "n": 1.5})
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
    assert gathered([first, *rest]) == [GatheredCall("c1", "f", arguments_text(call))]


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


def test_a_finished_reply_is_reasoning_then_content_then_its_calls_in_order() -> None:
    broken = judge_call('{"name":"x"', closed=True)
    message = AssistantMessage(
        "I look.", "hm", [ToolCall("c1", "a", {}), broken, ToolCall("c2", "b", {"x": 1})]
    )
    deltas = list(message_deltas(message))
    assert deltas[:2] == [{"reasoning_content": "hm"}, {"content": "I look."}]
    assert gathered(deltas) == [GatheredCall("c1", "a", "{}"), GatheredCall("c2", "b", '{"x":1}')]
    assert content_of(deltas) == 'I look.{"name":"x"'
    indexes = [entry["index"] for delta in deltas for entry in delta.get("tool_calls", ())]
    assert indexes == [0, 0, 1, 1]


def test_a_call_that_is_malformed_or_open_is_text_as_it_was_written() -> None:
    for text, kind in (
        ('a<tool_call>{"name":</tool_call>b', ProblemKind.INVALID_JSON),
        ('a<tool_call>{"name":"f","arguments":{}}', ProblemKind.UNCLOSED),
        ("a<tool_call>{}</tool_call>b", ProblemKind.NO_NAME),
    ):
        deltas, stream = streamed(text)
        assert content_of(deltas) == text
        assert gathered(deltas) == []
        assert [call.problem for call in stream.calls] == [kind]


def test_content_is_sent_as_it_comes_but_for_what_may_be_a_marker() -> None:
    stream = CallText()
    assert stream.feed("Hello <b> <") == [{"content": "Hello <b> "}]
    assert stream.feed("tool_") == []
    assert stream.feed("box>") == [{"content": "<tool_box>"}]
    assert stream.feed("<tool_call>") == []
    assert stream.feed('{"name":"f"}') == []
    assert [list(delta) for delta in stream.feed("</tool_call> and")] == [
        ["tool_calls"], ["tool_calls"], ["content"]
    ]  # fmt: skip
    assert stream.finish() == []


def test_a_call_is_sent_with_the_last_character_of_its_marker() -> None:
    stream = CallText()
    *before, last = [stream.feed(one) for one in '<tool_call>{"name":"f"}</tool_call>']
    assert before == [[]] * len(before)
    assert [list(delta) for delta in last] == [["tool_calls"], ["tool_calls"]]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name":"f","arguments":{"x":"</tool_call>"}}', "{}", "<tool",
     '{"name":"g"}', "text ", "\n", "<", '{"name":"f","arguments":"', '"}']
)  # fmt: skip


@given(st.lists(PIECES, max_size=14).map("".join), st.data())
def test_a_stream_gives_the_same_however_it_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    whole, stream = streamed([text])
    chunked, other = streamed(text[a:b] for a, b in itertools.pairwise(edges))
    assert content_of(chunked) == content_of(whole)
    assert [(c.name, c.arguments) for c in gathered(chunked)] == [
        (c.name, c.arguments) for c in gathered(whole)
    ]
    assert [(c.raw, c.problem) for c in other.calls] == [(c.raw, c.problem) for c in stream.calls]


@given(st.lists(PIECES, max_size=10).map("".join))
def test_a_stream_and_the_ids_of_the_same_text_give_the_same_calls(text: str) -> None:
    parsed = TOY.parse(TOY.encode_raw(text), TOY.encode_raw(""))
    _, stream = streamed([text])
    assert [(c.name, c.arguments, c.problem) for c in parsed.tool_calls] == [
        (c.name, c.arguments, c.problem) for c in stream.calls
    ]


def test_a_long_call_is_joined_and_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.tito import deltas

    judged: list[int] = []
    joined: list[bool] = []
    settle = CallText._settle

    def settling(stream: CallText, *, ended: bool) -> Any:
        joined.append(ended)
        return settle(stream, ended=ended)

    monkeypatch.setattr(CallText, "_settle", settling)

    def counting(raw: str, *, closed: bool) -> ToolCall:
        judged.append(len(raw))
        return judge_call(raw, closed=closed)

    monkeypatch.setattr(deltas, "judge_call", counting)
    stream = CallText()
    stream.feed('<tool_call>{"name":"w","arguments":{"t":"')
    for _ in range(10_000):
        assert stream.feed("x" * 8) == []
    assert gathered(stream.feed('"}}</tool_call>'))[0].name == "w"
    assert (len(judged), len(joined)) == (1, 2)
