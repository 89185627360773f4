"""Running a user's function so that nothing it does can hurt anyone else.

Owns the threads that synchronous functions run in, and the wait for both kinds. Never judges what
came back. Invariant: `run_bounded` returns or raises within its timeout whatever the function does
(hangs, swallows its cancellation, exits the interpreter), and a late result is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

from .functions import UserFunction, describe, is_async


class Overdue(Exception):
    """The function did not return in time; it was cancelled, or its thread was left behind."""


class LeakedCancel(Exception):
    """The function raised CancelledError although nobody cancelled it."""


class Exited(Exception):
    """The function raised what is no `Exception` (SystemExit, KeyboardInterrupt, its own kind).

    Such an error passes every `except Exception`; a task hands the first two on to the loop.
    """


class Threads:
    """Daemon threads on demand, reused.

    An executor's threads are joined when the interpreter ends, so one hung function would keep the
    process from ending; these are not. A hung function costs its thread, up to `limit` of them.
    """

    def __init__(self, limit: int = 128) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = self._pending = self._num_threads = 0

    def submit(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run `function` in a thread; the future belongs to the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def job() -> None:
            if future.cancelled():  # its caller gave up while it waited for a thread
                return
            try:
                outcome, failed = function(), False
            except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
                outcome, failed = error, True
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_settle, future, outcome, failed)

        with self._lock:
            self._pending += 1
            if self._pending > self._idle and self._num_threads < self._limit:
                self._num_threads += 1
                threading.Thread(target=self._serve, name="user-function", daemon=True).start()
        self._jobs.put(job)
        return future

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
                self._pending -= 1
            job()
            del job


def _settle(future: asyncio.Future[Any], outcome: Any, failed: bool) -> None:
    if future.done():
        return
    if not failed:
        future.set_result(outcome)
    elif isinstance(outcome, asyncio.CancelledError):
        future.set_exception(LeakedCancel("CancelledError"))
    elif isinstance(outcome, StopIteration):  # which a future refuses
        future.set_exception(RuntimeError("StopIteration"))
    elif isinstance(outcome, SystemExit | KeyboardInterrupt):
        # Who awaits it in a task of its own would pass them on to the loop.
        future.set_exception(Exited(describe(outcome)))
    else:
        future.set_exception(outcome)


THREADS = Threads()
_LEFT_BEHIND: set[asyncio.Future[Any]] = set()
"""Tasks that were told to stop and have not yet; held, so that none is lost half way."""


async def run_bounded(function: UserFunction, *args: Any, timeout_s: float) -> Any:
    """Call a user's function, async on the loop or sync in a thread, for at most `timeout_s`.

    Raises:
        Overdue: it did not return in time.
        LeakedCancel: it raised CancelledError by itself.
        Exited: it raised SystemExit or another error that is no `Exception`.
        Exception: whatever else it raised.
        asyncio.CancelledError: the caller was cancelled; the function was told to stop too.
    """
    future: asyncio.Future[Any]
    if is_async(function):
        future = asyncio.ensure_future(_await(function, *args))
    else:
        future = THREADS.submit(lambda: function(*args))
    result = await _wait(future, timeout_s)
    if inspect.isawaitable(result):  # an ordinary function that handed back a coroutine
        result = await _wait(asyncio.ensure_future(_await(lambda: result)), timeout_s)
    return result


async def _await(function: UserFunction, *args: Any) -> Any:
    try:
        return await function(*args)
    except (SystemExit, KeyboardInterrupt) as error:  # a task would pass them on to the loop
        raise Exited(describe(error)) from None


async def _wait(future: asyncio.Future[Any], timeout_s: float) -> Any:
    try:
        # Not `asyncio.timeout`: a function that swallows its cancellation would not end that.
        done, _ = await asyncio.wait((future,), timeout=timeout_s)
    except asyncio.CancelledError:
        _leave_behind(future)
        raise
    if not done:
        _leave_behind(future)
        raise Overdue
    if future.cancelled():
        raise LeakedCancel("CancelledError")
    error = future.exception()
    if error is not None and not isinstance(error, Exception):
        raise Exited(describe(error)) from error
    return future.result()


def _leave_behind(future: asyncio.Future[Any]) -> None:
    future.cancel()
    _LEFT_BEHIND.add(future)
    future.add_done_callback(_forget)


def _forget(future: asyncio.Future[Any]) -> None:
    _LEFT_BEHIND.discard(future)
    if not future.cancelled():
        future.exception()  # a late failure is nobody's business any more
