"""Requests that an SDK sends again, clients that leave, streams, and calls that are stopped."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from rollstream.errors import EngineFault
from tests.generate_stage import Says
from tests.toy import A1, A2, HI, NO, O1, OK, P0
from tests.unit.gateway.play import (
    Held,
    Play,
    echo,
    joined,
    refused,
    take,
    user,
    wait_until,
    whole,
)
from worker.gateway.types import ErrorKind
from worker.tito.ids import as_ids

DOWN = EngineFault("connection lost", retryable=True, detail="reset")


# --- retries -------------------------------------------------------------------------------------
async def test_a_retry_joins_the_request_that_is_under_way() -> None:
    step = Held(Says(A1))
    play = Play(step)
    first = asyncio.create_task(play.ask(HI))
    await wait_until(lambda: play.engine.in_flight == 1)
    second = asyncio.create_task(play.ask(HI, retry=1))
    await wait_until(lambda: play.session.stats["joined"] == 1)
    assert play.session.num_in_flight == 2
    step.go.set()
    one, other = await asyncio.gather(first, second)
    assert one is other
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A1
    assert (len(play.engine.asked), play.session.stats["committed"]) == (1, 1)


async def test_a_retry_joins_a_request_that_is_still_rendered() -> None:
    play = Play(Says(A1))
    first = asyncio.create_task(play.ask(HI))
    second = asyncio.create_task(play.ask(HI, retry=1))
    one, other = await asyncio.gather(first, second)
    assert one is other
    await play.end()


async def test_a_retry_of_what_was_answered_hears_the_same_answer() -> None:
    play = Play(Says(A1), Says(A2))
    one = await play.ask(HI)
    again = await play.ask(HI, retry=2)
    streamed = await play.ask(HI, retry=1, stream=True)
    assert one.id == again.id == streamed.id
    assert again.ids.tolist() == A1
    exchange = await play.begin(HI, retry=1)
    assert exchange.reply_id == one.id
    exchange.leave()
    await play.ask(HI)  # without the header: another try of the turn
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A2
    assert sample.metadata["agent"]["replayed"] == 3


async def test_a_replayed_reply_has_its_log_probs_again() -> None:
    play = Play(Says(A1))
    one = await play.ask(HI, log_probs=True)
    again = await play.ask(HI, log_probs=True, retry=1)
    assert list(again.pieces) == list(one.pieces) == ["he", "llo", "<|im_end|>"]
    assert all(not node.reply.pieces for node in play.session._tree.nodes)
    await play.end()


@pytest.mark.parametrize(
    "other",
    [
        {"messages": NO}, {"max_tokens": 7}, {"max_calls": 1}, {"log_probs": True},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
async def test_a_retry_of_another_request_is_a_request(other: dict[str, Any]) -> None:
    play = Play(Says(A1), Says(A2))
    await play.ask(HI)
    fields = {"messages": HI, "retry": 1} | other
    reply = await play.ask(**fields)
    assert reply.ids.tolist() == A2
    await play.end()


async def test_a_retry_of_a_request_that_broke_is_sampled() -> None:
    play = Play(Says(A1), DOWN, Says(A2))
    await play.ask(HI)
    assert (await refused(play.ask(HI))).kind is ErrorKind.ENGINE
    assert play.session.fault is not None
    reply = await play.ask(HI, retry=1)  # of the second request, not of the first
    assert reply.ids.tolist() == A2
    assert play.session.fault is None
    await play.end()


async def test_requests_of_one_idempotency_key_are_one() -> None:
    play = Play(Says(A1), Says(A2))
    one = await play.ask(HI, retry_key="a")
    other = await play.ask(HI, retry_key="b")
    assert one.id != other.id
    again = [await play.ask(HI, retry_key=key, retry=1) for key in "ab"]
    assert [reply.id for reply in again] == [one.id, other.id]
    assert (await play.ask(HI, retry_key="a")).id == one.id
    await play.end()


async def test_of_twins_under_way_a_retry_joins_the_one_whose_client_is_gone() -> None:
    steps = [Held(Says(A1)), Held(Says(A2))]
    play = Play(*steps)
    gone = await play.begin(HI)
    await wait_until(lambda: play.engine.in_flight == 1)
    there = await play.begin(HI)
    await wait_until(lambda: play.engine.in_flight == 2)
    gone.leave()
    again = await play.begin(HI, retry=1)
    assert again.reply_id == gone.reply_id
    assert again.reply_id != there.reply_id
    for step in steps:
        step.go.set()
    await take(again)
    await take(there)
    await play.end()


async def test_a_full_session_still_takes_the_retry_of_a_client_that_is_gone() -> None:
    step = Held(Says(A1))
    play = Play(step, rules={"max_in_flight": 1})
    gone = await play.begin(HI)
    assert (await refused(play.begin(HI, retry=1))).kind is ErrorKind.BUSY
    gone.leave()
    assert play.session.num_in_flight == 1
    assert (await refused(play.begin(NO))).kind is ErrorKind.BUSY
    again = await play.begin(HI, retry=1)
    step.go.set()
    await take(again)
    await play.end()


# --- clients that leave --------------------------------------------------------------------------
async def test_case_120_a_stream_whose_reader_leaves_is_stopped_and_not_committed() -> None:
    play = Play(Held(Says(A1), streamed=[31, 32]))
    exchange = await play.begin(HI, stream=True)
    deltas = exchange.deltas()
    assert await anext(deltas) == {"content": "hello"}
    exchange.leave()
    assert play.session.num_in_flight == 0  # at once: nobody comes back to a stream
    await wait_until(lambda: play.engine.cancelled == 1)
    assert (await refused(anext(deltas))).kind is ErrorKind.GONE
    sample = await play.the_sample()
    assert len(sample.tokens) == 0
    assert sample.metadata["agent"]["left"] == 1


async def test_a_request_whose_client_leaves_waits_for_its_retry() -> None:
    step = Held(Says(A1))
    play = Play(step)
    exchange = await play.begin(HI)
    exchange.leave()
    exchange.leave()
    step.go.set()
    await wait_until(lambda: play.engine.in_flight == 0)
    reply = await play.ask(HI, retry=1)
    assert reply.ids.tolist() == A1
    assert len(play.engine.asked) == 1
    await play.end()


async def test_a_request_that_nobody_asks_again_is_stopped() -> None:
    play = Play(Held(Says(A1)), rules={"rejoin_s": 0.01})
    (await play.begin(HI)).leave()
    await wait_until(lambda: play.engine.cancelled == 1)
    sample = await play.the_sample()
    assert len(sample.tokens) == 0


async def test_a_reply_that_nobody_fetched_is_dropped_and_counted() -> None:
    play = Play(Says(A1), rules={"rejoin_s": 0.01})
    exchange = await play.begin(HI)
    await exchange.reply()
    exchange.leave()
    await wait_until(lambda: play.session.num_in_flight == 0)
    sample = await play.the_sample()
    agent = sample.metadata["agent"]
    assert (agent["left"], agent["dropped_tokens"], agent["committed"]) == (1, len(A1), 0)


async def test_a_client_that_leaves_does_not_take_the_reply_from_its_retry() -> None:
    step = Held(Says(A1), streamed=[31, 32])
    play = Play(step)
    first = await play.begin(HI, stream=True)
    assert await anext(first.deltas()) == {"content": "hello"}
    second = await play.begin(HI, stream=True, retry=1)
    first.leave()
    step.go.set()
    reply = await take(second, stream=True)
    assert reply.ids.tolist() == A1
    await play.end()


async def test_a_client_that_leaves_while_its_prompt_is_rendered_leaves_nothing() -> None:
    play = Play(rules={"rejoin_s": 0})
    rendering = asyncio.Event()

    async def slow(*args: Any) -> Any:
        rendering.set()
        await asyncio.Event().wait()

    play.rules.prompter.first = slow  # type: ignore[method-assign]
    coming = asyncio.create_task(play.begin(HI))
    await rendering.wait()
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    assert play.session.num_in_flight == 0
    await play.end()
    assert play.engine.asked == []


async def test_a_commit_behind_a_leave_and_a_leave_behind_a_commit_are_nothing() -> None:
    play = Play(Says(A1), Says(A2), rules={"rejoin_s": 0})
    exchange = await play.begin(HI)
    await exchange.reply()
    exchange.leave()
    exchange.commit()
    other = await play.begin(HI)
    await take(other)
    other.leave()
    other.commit()
    assert (await play.the_sample()).tokens.tolist() == P0 + A2


# --- streams -------------------------------------------------------------------------------------
async def test_case_120_a_streamed_reply_is_recorded_as_any_other() -> None:
    samples = []
    for stream in (False, True):
        play = Play(Says([4, 31, 5, 30, 30, 2]), Says(A2))
        history: list[Any] = []
        await play.go_on(history, *HI, stream=stream)
        await play.go_on(history, *OK, stream=stream)
        samples.append(await play.the_sample())
    assert samples[0].tokens.tolist() == samples[1].tokens.tolist()
    assert samples[0].calls == samples[1].calls


async def test_two_readers_of_one_stream_hear_all_of_it() -> None:
    step = Held(Says([30, 31, 32, 30, 2]), streamed=[30])
    play = Play(step)
    first = await play.begin(HI, stream=True)
    early = first.deltas()
    assert await anext(early) == {"content": "hello"}
    second = await play.begin(HI, stream=True, retry=1)
    step.go.set()
    heard = [delta async for delta in second.deltas()]
    rest = [delta async for delta in early]
    reply = await first.reply()
    assert joined(heard) == joined([{"content": "hello"}, *rest]) == whole(reply.message)
    second.commit()
    first.commit()
    await play.end()


async def test_a_reader_that_joins_a_call_without_a_stream_hears_it_at_the_end() -> None:
    step = Held(Says(A1))
    play = Play(step)
    first = await play.begin(HI)
    second = await play.begin(HI, stream=True, retry=1)
    step.go.set()
    await take(second, stream=True)
    await take(first)
    await play.end()


async def test_tool_calls_are_told_whole_with_the_ids_that_are_stored() -> None:
    call = Play().renderer.encode('{"name": "f", "arguments": {"x": 1}}').tolist()
    play = Play(Says([30, 6, *call, 7, 2]), Says(A2))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    reply = await play.ask(HI, tools=tools, stream=True)
    assert reply.finish == "tool_calls"
    assert len(reply.message["tool_calls"]) == 1
    result = {"role": "tool", "content": "ok", "tool_call_id": reply.message["tool_calls"][0]["id"]}
    await play.ask([*HI, echo(reply), result], tools=tools)
    assert len((await play.the_sample()).calls) == 2


async def test_case_117_a_stream_whose_engine_breaks_ends_broken_and_is_not_committed() -> None:
    breaks = Held(DOWN, streamed=[30, 30])
    play = Play(Says(A1), breaks, Says(A2))
    history: list[Any] = []
    await play.go_on(history, *HI)
    exchange = await play.begin([*history, *OK], stream=True)
    deltas = exchange.deltas()
    assert await anext(deltas) == {"content": "hellohello"}
    breaks.go.set()
    assert (await refused(anext(deltas))).kind is ErrorKind.ENGINE
    assert (await refused(exchange.reply())).kind is ErrorKind.ENGINE
    assert play.session.fault is not None
    exchange.leave()
    await play.go_on(history, *OK)
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2  # BASE, and one A2
    assert play.session.fault is None


class _Pool:
    """An engine step that tries twice, and waits for a reader in between where it is told to."""

    def __init__(self, *, read: bool) -> None:
        self.read = asyncio.Event()
        self.told = asyncio.Event()
        if not read:
            self.read.set()

    async def __call__(self, prompt: Any) -> Says:
        assert prompt.sink.begin("0" * 32)
        prompt.sink.add(as_ids([30, 30, 30]))
        self.told.set()
        await self.read.wait()
        if not prompt.sink.begin("1" * 32):
            raise DOWN
        return Says(A1)


async def test_a_try_that_broke_before_anybody_read_of_it_is_made_again() -> None:
    play = Play(_Pool(read=False))
    exchange = await play.begin(HI, stream=True)
    reply = await take(exchange, stream=True)
    assert reply.message["content"] == "hello"
    await play.end()


async def test_case_117_a_try_that_broke_behind_what_was_read_is_not_made_again() -> None:
    pool = _Pool(read=True)
    play = Play(pool)
    exchange = await play.begin(HI, stream=True)
    deltas = exchange.deltas()
    assert await anext(deltas) == {"content": "hellohellohello"}
    pool.read.set()
    assert (await refused(anext(deltas))).kind is ErrorKind.ENGINE
    exchange.leave()
    assert len((await play.the_sample()).tokens) == 0


async def test_a_reply_that_is_not_what_was_streamed_breaks_where_it_was_read() -> None:
    async def lies(prompt: Any) -> Says:
        prompt.sink.begin("0" * 32)
        prompt.sink.add(as_ids([30, 30]))
        await told.wait()
        return Says(A1)

    for is_read in (True, False):
        told = asyncio.Event()
        if not is_read:
            told.set()
        play = Play(lies)
        exchange = await play.begin(HI, stream=True)
        if is_read:
            deltas = exchange.deltas()
            await anext(deltas)
            told.set()
            assert (await refused(anext(deltas))).kind is ErrorKind.ENGINE
            exchange.leave()
        else:
            assert (await take(exchange, stream=True)).message["content"] == "hello"
        await play.end()


async def test_an_engine_that_does_not_stream_is_told_at_the_end() -> None:
    play = Play()

    class Silent(type(play.engine)):  # type: ignore[misc]
        async def _says(self, prompt: Any, rid: str, asked: Any) -> Says:
            prompt.sink = None
            return await super()._says(prompt, rid, asked)

    silent = Play(engine=Silent([Says(A1)], None))
    await silent.ask(HI, stream=True)
    await silent.end()


# --- what is left behind -------------------------------------------------------------------------
async def test_an_ended_session_leaves_no_cycle_behind() -> None:
    """Whatever ended its requests: what only the collector finds costs a worker its pauses."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await _all_endings()
        await asyncio.sleep(0)
        gc.collect()
        found = {type(one).__name__ for one in gc.garbage if "gateway" in type(one).__module__}
        assert not found
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def _all_endings() -> None:
    play = Play(
        Says(A1), DOWN, Held(Says(A1), streamed=[30]), default=lambda asked: Says(A2),
        limits={"max_context": 200},
    )  # fmt: skip
    history: list[Any] = []
    await play.go_on(history, *HI, stream=True)
    await refused(play.ask([*history, *NO]))
    left = await play.begin([*history, *NO], stream=True)
    await anext(left.deltas())
    left.leave()
    await refused(play.ask([*history, user("x" * 300)]))
    await refused(play.ask([*history, {"role": "nobody", "content": "x"}]))
    for number in range(3):
        await play.go_on(history, user(f"n{number}"), stream=True)
    await play.ask(history[:-1], retry=1)
    gone = weakref.ref(play.session)
    await play.end()
    del play, left
    await asyncio.sleep(0)
    assert gone() is None
