"""`debug.messages`: what every generate function leaves behind for people, within bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack

from rollstream.group import PromptGroup
from rollstream.sample import Call, Sample
from rollstream.wire import decode_body, encode_body
from tests.builders import a_sample
from tests.toy import A1, A2, HI, O1, P0, toy_renderer
from worker.generate.finish import finish
from worker.members.rollout import Rollout
from worker.members.snapshots import (
    MAX_BYTES,
    MAX_CHARS,
    MAX_MESSAGES,
    bounded,
    keep_messages,
    turns_of,
)
from worker.members.work import leaves_of
from worker.types import GenerateInput, GenerateOutput

from .works import a_book, a_work, an_env, answer


def size_of(messages: Any) -> int:
    return len(msgpack.packb(messages))


def toy_sample(**fields: Any) -> Sample:
    """Return "hi", a reply, what a tool said, a reply."""
    turns = [(A1, O1), (A2, ())]
    return a_sample(prompt_ids=P0, turns=turns, prompt=HI, **fields)


async def test_messages_are_made_of_the_calls_where_a_function_kept_none() -> None:
    sample = toy_sample()
    await keep_messages([sample], toy_renderer())
    messages = sample.metadata["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "context", "assistant"]
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["hello", "hello"]
    assert "tool\nok" in messages[2]["content"]


async def test_a_reply_that_was_stopped_and_gone_on_with_is_one_message() -> None:
    sample = toy_sample()
    first = sample.calls[0]
    middle = first.start + 1
    parts = [
        dataclasses.replace(first, end=middle, finish="abort"),
        dataclasses.replace(first, start=middle),
    ]
    sample.calls[:1] = parts
    await keep_messages([sample], toy_renderer())
    roles = [m["role"] for m in sample.metadata["messages"]]
    assert roles == ["user", "assistant", "context", "assistant"]


async def test_messages_that_a_function_kept_stay_and_the_groups_metadata_is_not_touched() -> None:
    said = [*HI, {"role": "assistant", "content": "<tool_call>{}</tool_call>"}]
    shared = {"messages": said, "id": 7}
    sample = toy_sample(metadata=shared)
    await keep_messages([sample], toy_renderer())
    assert sample.metadata == {"messages": said, "id": 7}
    assert sample.metadata is not shared


async def test_messages_survive_the_wire_whatever_a_client_wrote() -> None:
    said = [
        {"role": "user", "content": "\ud800 half, \x00 nothing", 7: 1 << 200},
        {"role": "tool", "content": [{"type": "text", "text": "ok"}], "raw": b"\xff", "set": {1}},
        "no message",
    ]
    sample = toy_sample(metadata={"messages": said})
    await keep_messages([sample], toy_renderer())
    read = decode_body(encode_body(sample), PromptGroup(0, 1, prompt=HI))
    assert isinstance(read, Sample)
    messages = read.metadata["messages"]
    assert messages == sample.metadata["messages"]
    assert messages[0]["content"] == "\ufffd half, \ufffd nothing"
    assert messages[2] == {"role": "context", "content": "no message"}


def test_long_texts_lose_their_middle_and_say_how_much() -> None:
    (short,) = bounded([{"role": "user", "content": "a" * MAX_CHARS}])
    assert short["content"] == "a" * MAX_CHARS
    (cut,) = bounded([{"role": "user", "content": "a" + "b" * MAX_CHARS + "c"}])
    assert cut["content"].startswith("ab")
    assert cut["content"].endswith("bc")
    assert "… 2 characters are not kept …" in cut["content"]


def test_a_conversation_fits_and_loses_no_message_where_texts_can_be_cut() -> None:
    messages = [{"role": "tool", "content": "é" * 100_000} for _ in range(300)]
    kept = bounded(messages)
    assert len(kept) == 300
    assert size_of(kept) <= MAX_BYTES
    assert size_of(kept) > MAX_BYTES // 4


def test_messages_beyond_the_bound_are_counted_at_the_end() -> None:
    kept = bounded([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 5))
    assert kept[-1] == {"role": "context", "content": "… 5 more messages are not kept"}
    many_values = bounded([{"role": "user", "content": list(range(200))}] * 10_000)
    assert size_of(many_values) <= MAX_BYTES
    assert "more messages are not kept" in many_values[-1]["content"]


def test_values_of_endless_depth_end() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    (kept,) = bounded([{"role": "user", "content": deep}])
    assert size_of(kept) < 1000


async def test_an_attempt_keeps_messages_of_any_function_only_where_they_are_wanted() -> None:
    async def of_my_own(given: GenerateInput) -> GenerateOutput:
        return GenerateOutput([answer(given), dataclasses.replace(answer(given))])

    book = a_book(an_env(of_my_own))
    for is_asked in (False, True):
        rollout = Rollout(
            engine=None, renderer=toy_renderer(), book=book, finish=finish, version=lambda: 0,
            run_seed=7, debug_messages=is_asked,
        )  # fmt: skip
        ending = await rollout.run(a_work(book))
        assert ending.trajectory is not None
        leaves = leaves_of(ending.trajectory)
        assert ["messages" in leaf.metadata for leaf in leaves] == [is_asked] * 2
    roles = [message["role"] for message in leaves[0].metadata["messages"]]
    assert roles == ["user", "assistant"]


def test_a_call_is_what_turns_are_made_of() -> None:
    assert turns_of([]) == []
    assert turns_of([Call("a", "e", 3, 5, "stop"), Call("b", "e", 5, 6, "stop")]) == [
        (3, 5),
        (5, 6),
    ]
