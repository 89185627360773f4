"""Environments that do harm: slots come back, faults are named, what was made is closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rollstream.errors import EnvFault
from tests.unit.environments.stage import (
    HOSTILE,
    LONG_S,
    SHORT_S,
    Blocked,
    a_sample,
    environments,
    hangs,
    scripted,
    settled,
)
from worker.environments import Environments, EnvSample, StepResult


def time_for(detail: str) -> float:
    """Return the time of a call: short only for what never ends."""
    return SHORT_S if detail == "timeout" else LONG_S


async def lived(held: Environments, make: Any, *, steps: int = 1) -> None:
    """Open, reset, step and leave."""
    async with held.opened("test:make", make, a_sample()) as env:
        await env.reset(a_sample())
        for _ in range(steps):
            await env.step({"role": "assistant", "content": "7"})


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_a_hostile_method_is_a_retryable_env_fault_and_its_slot_comes_back(
    how: str, where: str
) -> None:
    harm, detail = HOSTILE[how]
    first, steps = (harm, [StepResult()]) if where == "reset" else (None, [harm])
    environment, told = scripted(*steps, first=first)
    async with environments(most=1, timeout_s=time_for(detail)) as held:
        for _ in range(2):  # the second one would wait for ever for a slot that leaked
            with pytest.raises(EnvFault, match=f"environment test:make: {where} ") as caught:
                await lived(held, environment.make)
            assert (caught.value.retryable, caught.value.detail) == (True, detail)
    assert (told.closes, len(told.made)) == (2, 2)


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("as_async", [True, False], ids=["async", "handed-back"])
async def test_a_hostile_factory_is_a_retryable_env_fault_and_its_slot_comes_back(
    how: str, as_async: bool
) -> None:
    harm, detail = HOSTILE[how]

    async def make(sample: EnvSample) -> Any:
        await harm()

    factory: Any = make if as_async else lambda sample: make(sample)
    async with environments(most=1, timeout_s=time_for(detail)) as held:
        for _ in range(2):
            with pytest.raises(EnvFault, match="making it") as caught:
                await lived(held, factory)
            assert (caught.value.retryable, caught.value.detail) == (True, detail)


@pytest.mark.parametrize("how", HOSTILE)
async def test_a_hostile_close_costs_its_sample_nothing_and_its_slot_comes_back(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    harm, _ = HOSTILE[how]

    class Env:
        async def reset(self, sample: EnvSample) -> None:
            return None

        async def step(self, message: Any) -> StepResult:
            return StepResult("ok", 1.0, True)

        async def close(self) -> None:
            await harm()

    async with environments(most=1, timeout_s=SHORT_S) as held:
        for _ in range(3):
            await lived(held, lambda sample: Env())


async def test_a_thread_that_hangs_gives_its_slot_back_and_is_closed_meanwhile() -> None:
    blocked, closed = Blocked(), threading.Event()

    class Env:
        def reset(self, sample: EnvSample) -> None:
            blocked()

        def step(self, message: Any) -> StepResult:
            raise AssertionError("a step behind a reset that hangs")

        def close(self) -> None:
            closed.set()

    try:
        async with environments(most=1, timeout_s=SHORT_S) as held:
            for _ in range(2):
                with pytest.raises(EnvFault) as caught:
                    await lived(held, lambda sample: Env())
                assert caught.value.detail == "timeout"
            await settled(closed.is_set, what="close of an environment whose reset hangs")
    finally:
        blocked.let_go.set()


@pytest.mark.parametrize("in_thread", [True, False])
async def test_what_is_made_after_its_sample_was_gone_is_closed(in_thread: bool) -> None:
    environment, told = scripted()
    make_late: Any
    let_go = threading.Event()
    if in_thread:

        def in_a_thread(sample: EnvSample) -> Any:
            let_go.wait(LONG_S)
            return environment.make(sample)

        make_late = in_a_thread
    else:

        async def in_a_task(sample: EnvSample) -> Any:
            while not let_go.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    continue
            return environment.make(sample)

        make_late = in_a_task
    async with environments(most=1, timeout_s=SHORT_S) as held:
        with pytest.raises(EnvFault) as caught:
            await lived(held, make_late)
        assert caught.value.detail == "timeout"
        assert held.num_open == 0
        let_go.set()
        await settled(lambda: told.closes, what="close of what was made late")
    assert (len(told.made), told.closes) == (1, 1)


async def test_a_cancelled_sample_gives_its_slot_back_and_closes_wherever_it_was() -> None:
    for first, steps in ((hangs, []), (None, [hangs])):
        environment, told = scripted(*steps, first=first)
        async with environments(most=1) as held:
            task = asyncio.create_task(lived(held, environment.make))
            await settled(lambda t=told: t.messages or t.resets, what="it began")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert told.closes == 1


async def test_a_sample_that_waits_for_a_slot_can_be_cancelled_and_takes_none() -> None:
    environment, told = scripted(hangs, hangs)
    async with environments(most=1) as held:
        first = asyncio.create_task(lived(held, environment.make))
        await settled(lambda: told.messages, what="the first one steps")
        waiting = asyncio.create_task(lived(held, environment.make))
        await asyncio.sleep(0)
        waiting.cancel()
        first.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
    assert (len(told.made), told.closes) == (1, 1)


async def test_no_more_are_open_at_once_than_there_are_slots_and_all_have_their_turn() -> None:
    environment, told = scripted(StepResult("ok"), StepResult("ok", 1.0, True))
    async with environments(most=3) as held:
        await asyncio.gather(*(lived(held, environment.make, steps=2) for _ in range(20)))
    assert (told.most_open, told.closes, len(told.made)) == (3, 20, 20)


async def test_a_slot_is_held_until_its_environment_is_closed() -> None:
    closing = asyncio.Event()

    class Env:
        async def reset(self, sample: EnvSample) -> None:
            return None

        async def step(self, message: Any) -> StepResult:
            return StepResult(done=True)

        async def close(self) -> None:
            await closing.wait()

    async with environments(most=1) as held:
        await lived(held, lambda sample: Env())  # does not wait for its close
        second = asyncio.create_task(lived(held, lambda sample: Env()))
        for _ in range(5):
            await asyncio.sleep(0)
        assert (second.done(), held.num_open) == (False, 1)
        closing.set()
        await second


async def test_the_end_of_a_worker_waits_for_closes_and_stops_those_that_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.environments.life.LEAVE_S", SHORT_S)

    class Env:
        async def reset(self, sample: EnvSample) -> None:
            return None

        async def step(self, message: Any) -> StepResult:
            return StepResult(done=True)

        async def close(self) -> None:
            await hangs()

    held = Environments(most=2, timeout_s=LONG_S)
    await lived(held, lambda sample: Env())
    await held.aclose()
    assert held.num_open == 0


@pytest.mark.parametrize("made", [None, 7, "text", object()])
async def test_what_is_no_environment_is_said(made: Any) -> None:
    async with environments(most=1) as held:
        for _ in range(2):
            with pytest.raises(EnvFault, match=f"{type(made).__name__}, which has no reset") as no:
                await lived(held, lambda sample: made)
            assert (no.value.retryable, no.value.detail) == (False, "invalid")


async def test_a_function_that_hands_back_a_coroutine_makes_an_environment_that_is_closed() -> None:
    environment, told = scripted(StepResult(done=True))

    async def later(sample: EnvSample) -> Any:
        return environment.make(sample)

    async with environments(most=1) as held:
        await lived(held, lambda sample: later(sample))
    assert (len(told.messages), told.closes) == (1, 1)


async def test_a_class_is_made_by_its_constructor_whatever_its_instances_are() -> None:
    class Env:
        def __init__(self, sample: EnvSample) -> None:
            self.sample = sample

        async def __call__(self) -> None:
            raise AssertionError("nobody calls an environment")

        async def reset(self, sample: EnvSample) -> None:
            assert sample == self.sample

        async def step(self, message: Any) -> StepResult:
            return StepResult(done=True)

    async with environments(most=1) as held:
        await lived(held, Env)


async def test_attributes_that_raise_are_faults() -> None:
    class Env:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no attributes today")

    async with environments(most=1) as held:
        for _ in range(2):
            with pytest.raises(EnvFault, match="no attributes today"):
                await lived(held, lambda sample: Env())


async def test_an_env_fault_of_its_own_keeps_what_it_says() -> None:
    environment, told = scripted(EnvFault("the map is broken", retryable=False, detail="map"))
    async with environments() as held:
        with pytest.raises(EnvFault, match="the map is broken") as caught:
            await lived(held, environment.make)
    assert (caught.value.retryable, caught.value.detail) == (False, "map")
    assert told.closes == 1


async def test_memory_that_is_used_up_is_the_processes_matter() -> None:
    environment, told = scripted(MemoryError())
    async with environments() as held:
        with pytest.raises(MemoryError):
            await lived(held, environment.make)
    assert told.closes == 1
