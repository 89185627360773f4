"""Calls that an update of weights stops half-way, and sessions that go on or end with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollstream.errors import Status, StopReason, Withheld
from tests.generate_stage import Says
from tests.toy import A1, A2, HI, NO, P0, U1
from tests.unit.gateway.play import (
    Held,
    Play,
    echo,
    joined,
    later,
    refused,
    wait_until,
    whole,
)
from worker.gateway.types import ErrorKind
from worker.sampling import call_seed


class Gate:
    """Stands for the worker's gate: shut until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waits = 0

    async def opened(self) -> None:
        self.waits += 1
        await self.open.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_stopped_goes_on_once_the_gate_opens(stream: bool) -> None:
    gate = Gate()
    play = Play(
        Says([30, 31], "abort", version=1), Withheld(), Says([32, 2], version=2), Says(A2),
        opened=gate.opened, version=lambda: 1,
    )  # fmt: skip
    coming = asyncio.create_task(play.ask(HI, max_tokens=10, stream=stream))
    await wait_until(lambda: gate.waits == 1)
    assert not coming.done()
    gate.open.set()
    reply = await coming
    assert reply.message["content"] == "hellohello"
    assert reply.ids.tolist() == [30, 31, 32, 2]
    assert reply.log_probs.tolist() == [-1 / 128, -2 / 128, -1 / 128, -2 / 128]
    assert (reply.num_prompt, reply.finish) == (10, "stop")
    assert play.engine.asked[1].ids == play.engine.asked[2].ids == [*P0, 30, 31]
    assert [asked.max_new_tokens for asked in play.engine.asked] == [10, 8, 8]
    # One seed for a reply; the next reply has the next one.
    assert {asked.seed for asked in play.engine.asked} == {call_seed(7, 3, 0, 0)}
    await play.ask([*HI, echo(reply), *NO])
    assert play.engine.asked[3].ids == [*P0, 30, 31, 32, 2, *U1]
    assert play.engine.asked[3].seed == call_seed(7, 3, 0, 1)
    sample = await play.the_sample()
    assert [(c.start, c.end, c.finish) for c in sample.calls][:2] == [
        (10, 12, "abort"), (12, 14, "stop"),
    ]  # fmt: skip
    assert sample.weight_versions == [1, 2, 0]
    assert sample.metadata["agent"]["committed"] == 2
    assert sample.metadata["agent"]["calls"] == 3


async def test_a_call_that_is_stopped_before_its_first_token_is_made_again() -> None:
    gate = Gate()
    gate.open.set()
    play = Play(Says([], "abort"), Says([], "abort"), Says(A1), opened=gate.opened)
    reply = await play.ask(HI)
    assert reply.ids.tolist() == A1
    assert len({asked.seed for asked in play.engine.asked}) == 1
    sample = await play.the_sample()
    assert (len(sample.calls), gate.waits) == (1, 2)


async def test_a_call_that_is_stopped_behind_its_end_is_whole() -> None:
    gate = Gate()
    play = Play(Says(A1, "abort"), opened=gate.opened)
    assert (await play.ask(HI)).finish == "stop"
    assert gate.waits == 0
    assert (await play.the_sample()).stop_reason is StopReason.STOP


async def test_a_call_that_is_stopped_at_its_cap_is_cut() -> None:
    gate = Gate()
    gate.open.set()
    play = Play(Says([30, 30], "abort"), opened=gate.opened)
    assert (await play.ask(HI, max_tokens=2)).finish == "length"
    assert (await play.the_sample()).stop_reason is StopReason.TURN_LENGTH


async def test_a_session_whose_calls_begin_anew_is_over_with_the_first_that_is_stopped() -> None:
    for stopped in (Withheld(), Says([30], "abort"), Says([], "abort")):
        play = Play(Says(A1), stopped)
        history: list[Any] = []
        await play.go_on(history, *HI)
        assert (await refused(play.ask([*history, *NO]))).kind is ErrorKind.ENGINE
        assert (await refused(play.ask([*history, *NO], retry=1))).kind is ErrorKind.GONE
        assert play.session.ended_by is StopReason.ABORT_WEIGHTS
        assert play.session.fault is None
        sample = await play.the_sample()
        assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.ABORT_WEIGHTS)
        assert len(play.engine.asked) == 2


async def test_a_stream_that_is_withheld_is_no_fault_of_an_engine() -> None:
    step = Held(Withheld(), streamed=[30])
    play = Play(step)
    exchange = await play.begin(HI, stream=True)
    deltas = exchange.deltas()
    await anext(deltas)
    step.go.set()
    assert (await refused(anext(deltas))).kind is ErrorKind.ENGINE
    exchange.leave()
    assert play.session.fault is None
    assert (await play.the_sample()).stop_reason is StopReason.ABORT_WEIGHTS


async def test_a_gate_that_never_opens_again_ends_the_session() -> None:
    async def never() -> None:
        raise Withheld("this worker is about to end")

    play = Play(Says([30], "abort"), opened=never)
    assert (await refused(play.ask(HI))).kind is ErrorKind.ENGINE
    sample = await play.the_sample()
    assert sample.stop_reason is StopReason.ABORT_WEIGHTS
    assert sample.metadata["agent"]["dropped_tokens"] == 1


async def test_an_engine_that_stops_everything_is_left_when_the_time_is_over() -> None:
    gate = Gate()
    gate.open.set()
    play = Play(default=lambda asked: Says([], "abort"), opened=gate.opened)
    later(play, 0.2)
    assert (await refused(play.ask(HI))).kind is ErrorKind.ENGINE
    fault = play.session.fault
    assert fault is not None
    assert fault.detail == "timeout"
    assert len(play.engine.asked) < 10  # it waits ever longer
    await play.end()


async def test_a_session_that_is_closed_while_a_call_waits_for_the_gate_ends_at_once() -> None:
    gate = Gate()
    play = Play(Says([30], "abort"), opened=gate.opened)
    coming = asyncio.create_task(refused(play.ask(HI)))
    await wait_until(lambda: gate.waits == 1)
    await play.session.close()
    assert (await coming).kind is ErrorKind.GONE
    sample = await play.the_sample()
    assert sample.metadata["agent"]["dropped_tokens"] == 1


async def test_streamed_text_of_a_stopped_call_stays_said() -> None:
    gate = Gate()
    play = Play(Says([30, 31], "abort"), Says([32, 30, 2]), opened=gate.opened)
    exchange = await play.begin(HI, stream=True)
    deltas = exchange.deltas()
    heard = [await anext(deltas)]
    gate.open.set()
    heard += [delta async for delta in deltas]
    reply = await exchange.reply()
    assert joined(heard) == whole(reply.message)
    assert reply.message["content"] == "hellohellohello"
    exchange.commit()
    await play.end()
