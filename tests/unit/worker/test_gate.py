"""The gate in front of the engines: who passes, who waits, who is refused, whose time goes on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from rollstream.errors import EngineFault, Withheld
from tests.toy import A1, a_completion
from worker.engines.faults import Detail
from worker.members.gate import Gate, GatedEngine, GatedScores, Position
from worker.sampling import Sampling
from worker.types import Completion, RequestIds

SHUT = [Position.KEEP, Position.ABORT]


class Held:
    """An engine whose calls are answered when the test says so."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[Any]] = []
        self.deadlines: list[float | None] = []

    async def generate(
        self, prompt: RequestIds, sampling: Sampling, *, deadline_s: float | None = None, **_: Any
    ) -> Completion:
        self.deadlines.append(deadline_s)
        return await self._held()  # type: ignore[no-any-return]

    async def score(self, body: bytes, *, routing_key: str) -> bytes:
        return await self._held()  # type: ignore[no-any-return]

    async def _held(self) -> Any:
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]

    async def probe(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is open."""


class Scene:
    """A gate, an engine behind it, and calls that a test began."""

    def __init__(self) -> None:
        self.idle = 0
        self.engine, self.gate = Held(), Gate(self._became_idle)
        self.gated = GatedEngine(self.engine, self.gate)

    def _became_idle(self) -> None:
        self.idle += 1

    async def call(self, deadline_s: float | None = 60.0) -> asyncio.Task[Completion]:
        task = asyncio.create_task(
            self.gated.generate(
                RequestIds((b"1",), 1), Sampling(), routing_key="k", version=0,
                deadline_s=deadline_s,
            )
        )  # fmt: skip
        await turns()
        return task

    def answer(self, place: int = -1) -> None:
        self.engine.calls[place].set_result(a_completion(A1))


async def turns() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_keep_holds_new_calls_until_it_opens_and_lets_the_others_go_on() -> None:
    scene = Scene()
    first = await scene.call()
    scene.gate.move(Position.KEEP)
    second = await scene.call()
    assert (len(scene.engine.calls), scene.gate.in_flight) == (1, 1)
    scene.answer()
    assert (await first).ids.tolist() == A1
    assert (scene.gate.in_flight, scene.idle) == (0, 1)
    assert not second.done()
    scene.gate.move(Position.OPEN)
    await turns()
    assert scene.gate.in_flight == 1
    scene.answer()
    assert (await second).ids.tolist() == A1


async def test_abort_refuses_new_calls_and_those_that_waited() -> None:
    scene = Scene()
    scene.gate.move(Position.KEEP)
    waiting = await scene.call()
    scene.gate.move(Position.ABORT)
    for task in (waiting, await scene.call()):
        with pytest.raises(Withheld):
            await task
    assert scene.engine.calls == []


async def test_a_function_that_calls_again_and_again_cannot_hold_the_loop() -> None:
    scene = Scene()
    scene.gate.move(Position.ABORT)
    refused = 0

    async def stubborn() -> None:
        nonlocal refused
        while refused < 10_000:
            with contextlib.suppress(Withheld):
                await scene.gated.generate(
                    RequestIds((b"1",), 1), Sampling(), routing_key="k", version=0
                )
            refused += 1

    task = asyncio.create_task(stubborn())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < refused < 10


async def test_a_gate_that_was_stopped_stays_shut() -> None:
    scene = Scene()
    scene.gate.stop()
    scene.gate.move(Position.OPEN)
    with pytest.raises(Withheld, match="about to end"):
        await (await scene.call())
    assert scene.gate.stopped


async def test_a_call_whose_time_is_over_is_a_timeout_and_its_engine_is_left() -> None:
    scene = Scene()
    with pytest.raises(EngineFault) as raised:
        await (await scene.call(deadline_s=0.01))
    assert raised.value.detail == Detail.TIMEOUT
    assert scene.engine.calls[0].cancelled()
    assert scene.engine.deadlines == [None], "the gate keeps the time, not the engine"
    assert (scene.gate.in_flight, scene.idle) == (0, 1)


@pytest.mark.parametrize("position", SHUT)
async def test_time_stands_still_while_the_gate_is_shut(position: Position) -> None:
    scene = Scene()
    call = await scene.call(deadline_s=0.05)
    scene.gate.move(position)
    await asyncio.sleep(0.15)
    assert not call.done()
    scene.gate.move(Position.OPEN)
    with pytest.raises(EngineFault) as raised:
        await call
    assert raised.value.detail == Detail.TIMEOUT


async def test_a_pause_that_changes_its_mode_gives_no_call_more_time() -> None:
    scene = Scene()
    call = await scene.call(deadline_s=0.05)
    for position in (Position.KEEP, Position.ABORT, Position.KEEP, Position.OPEN):
        scene.gate.move(position)
    with pytest.raises(EngineFault):
        await call


async def test_calls_that_are_let_go_are_withheld_and_cancelled_at_their_engine() -> None:
    scene = Scene()
    calls = [await scene.call(deadline) for deadline in (None, 60.0)]
    scene.gate.move(Position.ABORT)
    scene.gate.let_go()
    for call in calls:
        with pytest.raises(Withheld):
            await call
    assert all(future.cancelled() for future in scene.engine.calls)
    assert (scene.gate.in_flight, scene.idle) == (0, 1)


async def test_a_call_that_breaks_or_is_cancelled_is_counted_out() -> None:
    scene = Scene()
    broken, cancelled = await scene.call(), await scene.call()
    assert scene.gate.in_flight == 2
    assert not scene.gate.idle.is_set()
    scene.engine.calls[0].set_exception(EngineFault("no"))
    cancelled.cancel()
    with pytest.raises(EngineFault):
        await broken
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (scene.gate.in_flight, scene.idle) == (0, 1)
    assert scene.gate.idle.is_set()


async def test_an_engines_own_timeout_error_is_not_taken_for_the_gates() -> None:
    scene = Scene()
    call = await scene.call()
    scene.engine.calls[0].set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        await call


@pytest.mark.parametrize("position", SHUT)
async def test_scores_wait_through_every_pause_and_count_as_calls(position: Position) -> None:
    scene = Scene()
    scores = GatedScores(scene.engine, scene.gate)
    scene.gate.move(position)
    task = asyncio.create_task(scores.score(b"body", routing_key="k"))
    await turns()
    assert scene.engine.calls == []
    scene.gate.move(Position.OPEN)
    await turns()
    assert scene.gate.in_flight == 1
    scene.engine.calls[0].set_result(b"answer")
    assert await task == b"answer"


async def test_whoever_waits_for_a_pause_to_pass_hears_its_end() -> None:
    scene = Scene()
    turned = asyncio.create_task(scene.gate.turned())
    await turns()
    scene.gate.move(Position.KEEP)
    await turns()
    assert not turned.done()
    scene.gate.move(Position.OPEN)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(turned, 5)
    assert turned.done()


async def test_a_call_that_is_to_go_on_waits_for_the_gate_to_open_and_for_no_end() -> None:
    gate = Gate()
    gate.move(Position.ABORT)
    first = asyncio.create_task(gate.reopened())
    await asyncio.sleep(0)
    assert not first.done()
    gate.move(Position.OPEN)
    await first
    await gate.reopened()

    for position in (Position.OPEN, *SHUT):
        gate = Gate()
        gate.move(position)
        waits = position is not Position.OPEN
        waiting = asyncio.create_task(gate.reopened())
        others = asyncio.create_task(gate.opened())
        await asyncio.sleep(0)
        gate.stop()
        if waits:
            with pytest.raises(Withheld, match="about to end"):
                await waiting
            await asyncio.sleep(0)
            assert not others.done()
        with pytest.raises(Withheld, match="about to end"):
            await gate.reopened()
        for task in (waiting, others):
            task.cancel()
        await asyncio.gather(waiting, others, return_exceptions=True)
