"""Running a user's function so that nothing it does can hurt anyone else.

Owns the threads that synchronous functions run in, and the wait for both kinds. Never judges what
came back. Invariant: `run_bounded` returns or raises within its timeout whatever the function does
(hangs, swallows its cancellation, exits the interpreter), and a late result is discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .functions import UserFunction, describe, is_async

T = TypeVar("T")


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

    def __init__(
        self, limit: int = 128, name: str = "user-function", *, most_hung: int | None = None
    ) -> None:
        self.limit, self._name = limit, name
        self.most_hung = limit if most_hung is None else most_hung
        """So many that hang are more than a process should go on with."""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = self._pending = self._num_threads = 0
        self._hung: set[_Job] = set()

    @property
    def num_hung(self) -> int:
        """Threads that still run what nobody waits for any more."""
        return len(self._hung)

    @property
    def num_running(self) -> int:
        """Threads that run something, hung or not."""
        return self._num_threads - self._idle

    def hung_functions(self) -> list[str]:
        """Return the names of functions that do not return."""
        with self._lock:
            return sorted({job.name for job in self._hung})

    def submit(self, function: Callable[[], Any], name: str = "") -> asyncio.Future[Any]:
        """Run `function` in a thread; the future belongs to the running loop."""
        loop = asyncio.get_running_loop()
        job = _Job(function, name or name_of(function), loop.create_future(), loop)
        job.future.add_done_callback(functools.partial(self._given_up, job))
        with self._lock:
            self._pending += 1
            if self._pending > self._idle and self._num_threads < self.limit:
                self._num_threads += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._jobs.put(job)
        return job.future

    def _given_up(self, job: _Job, future: asyncio.Future[Any]) -> None:
        """Count a job that still runs although its caller stopped waiting."""
        if future.cancelled():
            with self._lock:
                if job.running:
                    self._hung.add(job)

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._jobs.get()
            with self._lock:
                self._idle -= 1
                self._pending -= 1
                # Where its caller gave up while it waited for a thread, nothing is run.
                job.running = not job.future.cancelled()
            if job.running:
                job.run()
                with self._lock:
                    job.running = False
                    self._hung.discard(job)
            del job


class _Job:
    """One call in a thread."""

    __slots__ = ("_function", "_loop", "future", "name", "running")

    def __init__(
        self,
        function: Callable[[], Any],
        name: str,
        future: asyncio.Future[Any],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._function, self.name, self.future, self._loop = function, name, future, loop
        self.running = False

    def run(self) -> None:
        try:
            outcome, failed = self._function(), False
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            outcome, failed = error, True
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(_settle, self.future, outcome, failed)


def name_of(function: Any) -> str:
    """Return how a function is called, for people."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


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
"""Of user functions."""
AGENT_THREADS = Threads(8192, "agent", most_hung=1024)
"""Of agents that are no coroutines: each holds its thread for as long as its sample runs, and is
told to stop by its next call. Rewards and tools never wait for one of them."""
ENV_THREADS = Threads(1024, "environment", most_hung=512)
"""Of environments that are no coroutines: one that hangs takes no thread from rewards and tools."""
_OWN_THREADS = Threads(8, "own-work")
_LEFT_BEHIND: set[asyncio.Future[Any]] = set()
"""Tasks that were told to stop and have not yet; held, so that none is lost half way."""


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a function of our own in a thread that user code cannot take away.

    The loop's default executor has a handful of threads; user code that hangs there, by
    `asyncio.to_thread`, would stop whatever of ours waits for one.
    """
    result: T = await _OWN_THREADS.submit(functools.partial(function, *args))
    return result


async def run_bounded(
    function: UserFunction, *args: Any, timeout_s: float, threads: Threads | None = None
) -> Any:
    """Call a user's function, async on the loop or sync in a thread, for at most `timeout_s`.

    Args:
        function: the user's.
        args: it is called with.
        timeout_s: infinite only for a caller that cancels this itself, when a time is over that
            may still move.
        threads: where it runs if it is no coroutine; None is `THREADS`.

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
        future = (threads or THREADS).submit(functools.partial(function, *args))
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
