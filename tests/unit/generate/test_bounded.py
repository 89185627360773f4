"""A user's function runs in bounds: nothing it does outlives its timeout or ends the process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from worker.bounded import Exited, LeakedCancel, Overdue, Threads, in_thread, run_bounded


async def an_async(value: Any) -> Any:
    return value


def a_sync(value: Any) -> Any:
    return value


def hands_back_a_coroutine(value: Any) -> Any:
    return an_async(value)


@pytest.mark.parametrize("function", [an_async, a_sync, hands_back_a_coroutine])
async def test_every_kind_of_function_is_called_with_its_arguments(function: Any) -> None:
    assert await run_bounded(function, 3, timeout_s=5) == 3


async def test_a_sync_function_never_runs_on_the_loops_thread() -> None:
    assert await run_bounded(threading.current_thread, timeout_s=5) is not threading.main_thread()


async def _hang() -> None:
    await asyncio.Event().wait()


async def _swallow_every_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(0.2)
            return
        except asyncio.CancelledError:
            continue


def _hang_in_a_thread() -> None:
    threading.Event().wait(0.5)


@pytest.mark.parametrize("function", [_hang, _swallow_every_cancellation, _hang_in_a_thread])
async def test_a_function_that_does_not_return_is_overdue(function: Any) -> None:
    with pytest.raises(Overdue):
        await run_bounded(function, timeout_s=0.05)


async def _leak() -> None:
    raise asyncio.CancelledError


def _leak_in_a_thread() -> None:
    raise asyncio.CancelledError


async def _exit() -> None:
    raise SystemExit(3)


def _exit_in_a_thread() -> None:
    raise SystemExit(3)


def _interrupt() -> None:
    raise KeyboardInterrupt


class Odd(BaseException):
    """What no `except Exception` sees."""


async def _be_odd() -> None:
    raise Odd


async def _be_odd_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_be_odd())


async def _close() -> None:
    raise GeneratorExit


def _be_odd_in_a_thread() -> None:
    raise Odd


def _stop() -> None:
    raise StopIteration


async def _time_out_by_itself() -> None:
    raise TimeoutError("mine")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (_leak, LeakedCancel),
        (_leak_in_a_thread, LeakedCancel),
        (_exit, Exited),
        (_exit_in_a_thread, Exited),
        (_interrupt, Exited),
        (_be_odd, Exited),
        (_close, Exited),
        (_be_odd_in_a_group, Exited),
        (_be_odd_in_a_thread, Exited),
        (_stop, RuntimeError),
        (_time_out_by_itself, TimeoutError),
    ],
)
async def test_whatever_it_raises_is_an_ordinary_exception(
    function: Callable[[], Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await run_bounded(function, timeout_s=5)


@pytest.mark.parametrize("function", [_hang, _hang_in_a_thread])
async def test_our_own_cancellation_goes_through(function: Callable[[], Any]) -> None:
    task = asyncio.create_task(run_bounded(function, timeout_s=5))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_hung_threads_leave_room_up_to_the_limit_and_are_reused_after() -> None:
    threads, release = Threads(limit=2), threading.Event()
    stuck = [threads.submit(release.wait) for _ in range(2)]
    waiting = threads.submit(lambda: "third")
    gave_up = threads.submit(lambda: "never")
    gave_up.cancel()
    await asyncio.sleep(0.02)
    assert not waiting.done()
    release.set()
    assert await asyncio.wait_for(waiting, 5) == "third"
    assert await asyncio.gather(*stuck) == [True, True]


async def test_a_thread_that_nobody_waits_for_counts_as_hung_until_it_returns() -> None:
    threads, release = Threads(limit=3), threading.Event()
    entered: list[int] = []

    def stuck() -> None:
        entered.append(1)
        release.wait()

    given_up, waited_for = threads.submit(stuck), threads.submit(stuck)
    while len(entered) < 2:
        await asyncio.sleep(0.001)
    given_up.cancel()
    await asyncio.sleep(0)
    assert (threads.num_hung, len(threads.hung_functions())) == (1, 1)
    assert "stuck" in threads.hung_functions()[0]
    release.set()
    await waited_for
    while threads.num_hung:
        await asyncio.sleep(0.001)
    assert threads.hung_functions() == []


async def test_own_work_goes_on_although_user_code_holds_every_thread_of_the_loop() -> None:
    release = threading.Event()
    executor_threads = min(32, (os.cpu_count() or 1) + 4)
    held = [asyncio.create_task(asyncio.to_thread(release.wait)) for _ in range(executor_threads)]
    try:
        assert await asyncio.wait_for(in_thread(lambda: "done"), 5) == "done"
    finally:
        release.set()
        await asyncio.gather(*held)


async def test_threads_are_daemons_so_that_a_hung_one_cannot_hold_the_process() -> None:
    assert await run_bounded(lambda: threading.current_thread().daemon, timeout_s=5)
