"""The loop of a worker outlives what user code does to it, and the process ends when it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest

from worker.process import mainloop


async def _in_a_task_of_its_own(error: BaseException) -> None:
    async def child() -> None:
        raise error

    await asyncio.gather(child(), asyncio.sleep(0))


async def exits() -> None:
    await _in_a_task_of_its_own(SystemExit(3))


async def interrupts() -> None:
    await _in_a_task_of_its_own(KeyboardInterrupt())


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


@pytest.mark.parametrize("bad", [exits, interrupts, stops_the_loop])
def test_the_loop_goes_on_when_user_code_stops_it(bad: Callable[[], Awaitable[None]]) -> None:
    done = []

    async def main() -> None:
        sibling = asyncio.create_task(asyncio.sleep(0.01))
        try:
            await bad()
        except BaseException as error:  # noqa: BLE001 - what ended it is not the point
            done.append(type(error).__name__)
        await sibling
        done.append("sibling")

    mainloop.run(main())

    assert done[-1] == "sibling"


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), SystemExit(3)])
def test_what_the_worker_itself_raises_ends_it(error: BaseException) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(type(error)):
        mainloop.run(main())


LEFT_OVER = """
import asyncio, time
from worker.process import mainloop
mainloop.CLOSE_S = 0.1

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main():
    asyncio.create_task(stubborn())
    asyncio.create_task(asyncio.to_thread(time.sleep, 60))
    await asyncio.sleep(0.01)

mainloop.run(main())
print("said")
mainloop.leave(5)
"""


def test_the_process_ends_although_a_task_and_a_thread_of_a_user_do_not() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OVER], timeout=15, capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stdout) == (5, "said\n"), ended.stderr


LATE_SIGNAL = """
import asyncio, os, signal
from worker.process import mainloop

async def main():
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)

mainloop.run(main())
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
mainloop.leave(0)
"""


def test_a_signal_that_comes_after_the_end_leaves_the_exit_code_alone() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE_SIGNAL], timeout=15, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stderr
