"""The event loop of a worker: it ends when the worker has ended, and then at once.

Owns the loop and the exit of the process. Never decides when the worker ends. Invariant: user code
that runs on the loop can neither end it (SystemExit and KeyboardInterrupt of a task of its own
leave `run_forever`, and so does `loop.stop()`) nor keep the process from ending (a task that
swallows its cancellation, a thread that hangs); `asyncio.run` would wait for both without bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn

from rollstream.config import EXIT_STALLED

CLOSE_S = 1.0
"""How long tasks and threads that are left over have to end."""
_STOPS = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
log = logging.getLogger("worker")


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, whatever else happens on the loop; raise what it raised."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(main)
    try:
        while not task.done():
            _run_on(loop, task)
        task.result()
    finally:
        _close(loop)


def _run_on(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    try:
        loop.run_until_complete(task)
    except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
        # The last is what a stopped loop raises. Signals are handled by the worker itself.
        if task.done():
            raise
        log.error("user_code_stopped_the_loop", extra={"error": f"{type(error).__name__}: {error}"})


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left and close; not the default executor, whose threads may hang."""
    winding_up = loop.create_task(_wind_up(asyncio.all_tasks(loop)))
    while not winding_up.done():
        with contextlib.suppress(SystemExit, KeyboardInterrupt, RuntimeError):
            loop.run_until_complete(winding_up)
    asyncio.set_event_loop(None)
    _close_and_stay_deaf(loop)


def _close_and_stay_deaf(loop: asyncio.AbstractEventLoop) -> None:
    """Close; signals that the worker listened to are ignored from now on, as it has stopped.

    Closing restores their defaults: one that comes late would turn a clean end into a death.
    """
    heard = [number for number in _STOPS if signal.getsignal(number) not in _DEFAULTS]
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    loop.close()
    for number in heard:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)


async def _wind_up(left: set[asyncio.Task[Any]]) -> None:
    for task in left:
        task.cancel()
    generators = asyncio.create_task(asyncio.get_running_loop().shutdown_asyncgens())
    await asyncio.wait((*left, generators), timeout=CLOSE_S)


def leave(code: int) -> NoReturn:
    """End the process; at once where threads would be waited for without end.

    One that is used up is not taken apart either: without memory that fails, and hides the code.
    """
    if code == EXIT_STALLED:
        _leave_at_once(code)
    main = threading.main_thread()
    for thread in threading.enumerate():
        if thread is not main and not thread.daemon:
            thread.join(CLOSE_S)
            if thread.is_alive():
                _leave_at_once(code)
    sys.exit(code)


def _leave_at_once(code: int) -> NoReturn:
    with contextlib.suppress(MemoryError):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
