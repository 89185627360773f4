"""The lives of environments: made, reset, stepped and closed, each within its time.

Owns the slots, the threads and the ends of environments, and which fault each failure is. Never
judges what came back (`values` does), knows no tokens. Invariants: at most `most` environments are
open at once; whatever one does (raises, hangs, swallows its cancellation, leaks one), each call
returns or raises within its time, and its slot comes back; what was made is closed once, also where
it was made after nobody waited for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from rollstream.errors import EnvFault
from rollstream.sample import Message

from ..bounded import ENV_THREADS, LeakedCancel, Overdue, run_bounded
from ..functions import describe, is_async
from ..tools.text import is_small
from ..types import ToolCall
from .types import EnvSample, Factory
from .values import Step, info_of, messages_of, state_of, step_of, wrong

LEAVE_S = 5.0
"""How long the end of a worker waits for environments that are being closed."""
MAX_SAID, KIND_CHARS = 100, 80
"""Kinds of failures that are logged, and how much of an error tells a kind."""
SAY_FULL_S = 30.0
METHODS = ("reset", "step")
T = TypeVar("T")
log = structlog.get_logger("worker")


class Environments:
    """All environments of one worker process."""

    def __init__(self, *, most: int, timeout_s: float) -> None:
        """Begin with none open.

        Args:
            most: that may be open at once.
            timeout_s: of each call of one.
        """
        self.most, self.timeout_s = most, timeout_s
        self.num_open = 0
        self._slots = asyncio.Semaphore(most)
        self._closings: set[asyncio.Task[None]] = set()
        self._said: set[str] = set()
        self._said_full_mono_s = -SAY_FULL_S

    @contextlib.asynccontextmanager
    async def opened(self, name: str, make: Factory, sample: EnvSample) -> AsyncIterator[Running]:
        """Yield a new environment once there is a slot; behind it, it is being closed.

        Whoever leaves does not wait for that.

        Raises:
            EnvFault: it could not be made.
        """
        await self._slot()
        running = Running(name, self.timeout_s, self._close_late)
        self.num_open += 1
        try:
            await running.make(make, sample)
            yield running
        finally:
            env = running.leave()
            if env is None:
                self._free()
            else:
                self._spawn(self._close_and_free(name, env))

    async def aclose(self) -> None:
        """Wait for the environments that are being closed, up to `LEAVE_S`; safe to repeat."""
        if self._closings:
            _, late = await asyncio.wait(self._closings, timeout=LEAVE_S)
            for task in late:
                task.cancel()
            if late:
                log.warning("environments_not_closed", environments=len(late))
                await asyncio.wait(late, timeout=LEAVE_S)

    async def _slot(self) -> None:
        now = time.monotonic()
        if self._slots.locked() and now - self._said_full_mono_s >= SAY_FULL_S:
            self._said_full_mono_s = now
            log.warning(
                "environments_full",
                open=self.num_open,
                message="samples wait until another one's is closed (worker.max_environments)",
            )
        await self._slots.acquire()

    def _free(self) -> None:
        self.num_open -= 1
        self._slots.release()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _close_and_free(self, name: str, env: Any) -> None:
        try:
            await self._close(name, env)
        finally:
            self._free()

    def _close_late(self, name: str, env: Any) -> None:
        """Close what was made when its sample was gone; it has no slot any more."""
        self._spawn(self._close(name, env))

    async def _close(self, name: str, env: Any) -> None:
        try:
            close = getattr(env, "close", None)
            if close is None:
                return
            await run_bounded(close, timeout_s=self.timeout_s, threads=ENV_THREADS)
        except Overdue:
            self._say(name, f"close did not return within {self.timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - the user's; its sample ended already
            self._say(name, f"close raised {describe(error)}")

    def _say(self, name: str, error: str) -> None:
        """Log what went wrong behind a sample, each kind of it once: all may break alike."""
        kind = f"{name} {error[:KIND_CHARS]}"
        if kind not in self._said and len(self._said) < MAX_SAID:
            self._said.add(kind)
            log.warning("environment_close_failed", environment=name, error=error)


class Running:
    """The environment of one sample."""

    def __init__(self, name: str, timeout_s: float, late: Callable[[str, Any], None]) -> None:
        """Prepare.

        Args:
            name: as the configuration names it.
            timeout_s: of each call.
            late: is given what was made when nobody waited for it any more, on the loop.
        """
        self._name, self._timeout_s, self._late = name, timeout_s, late
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._env: Any = None
        self._is_left = False

    @property
    def takes_calls(self) -> bool:
        """Whether it answers tool calls itself."""
        return self._attribute("takes_calls") is True

    def _attribute(self, name: str) -> Any:
        """Return an attribute of the user's object, whose own look-up may raise anything."""
        try:
            return getattr(self._env, name, None)
        except Exception as error:
            raise self._fault(f"its {name} raised {describe(error)}", "raised") from error

    async def make(self, make: Factory, sample: EnvSample) -> None:
        """Have it made.

        Raises:
            EnvFault: its factory broke, or made something else.
        """
        env = await self._call("making it", self._caught_by(make), sample)
        if self._env is None:  # an ordinary function that handed back a coroutine
            self._catch(env)
        missing = [name for name in METHODS if not callable(self._attribute(name))]
        if missing:
            raise EnvFault(
                f"environment {self._name}: what was made is {type(env).__name__}, which has no "
                f"{missing[0]}; docs/environments.md says what an environment has",
                detail="invalid",
            )

    async def reset(self, sample: EnvSample) -> list[Message]:
        """Begin the episode; returns what is to be shown behind the prompt, if anything is.

        Raises:
            EnvFault: it broke, or returned no observation.
        """
        first = await self._call("reset", self._attribute("reset"), sample)
        return [] if first is None else await self._read(messages_of, first)

    async def step(self, message: dict[str, Any]) -> Step:
        """Give it a reply.

        Raises:
            EnvFault: it broke, or returned no step.
        """
        step = step_of(await self._call("step", self._attribute("step"), message))
        return replace(step, info=await self._read(info_of, step.info))

    async def shown(self, observation: Any, calls: Sequence[ToolCall] = ()) -> list[Message]:
        """Return the messages of an observation (`values.messages_of`).

        Raises:
            EnvFault: it is none.
        """
        return await self._read(messages_of, observation, calls)

    async def state(self) -> Any:
        """Return what a later environment goes on from.

        Raises:
            EnvFault: it broke.
        """
        state = self._attribute("state")
        if not callable(state):
            raise wrong("no state, though its factory says resumable")
        return await self._read(state_of, await self._call("state", state))

    def leave(self) -> Any:
        """Return what is to be closed; what is made later goes to `late`."""
        with self._lock:
            self._is_left = True
            return self._env

    def _caught_by(self, make: Factory) -> Callable[[EnvSample], Any]:
        """Return `make`, with its result in hand whether or not somebody still waits for it."""
        # Of a class it would be asked how its instances are called.
        if is_async(make) and not inspect.isclass(make):

            async def made_async(sample: EnvSample) -> Any:
                return self._catch(await make(sample))  # type: ignore[misc]  # a coroutine then

            return made_async

        def made(sample: EnvSample) -> Any:
            env = make(sample)
            return env if inspect.isawaitable(env) else self._catch(env)

        return made

    def _catch(self, env: Any) -> Any:
        with self._lock:
            is_late = self._is_left
            if not is_late:
                self._env = env
        if is_late:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._late, self._name, env)
        return env

    async def _read(self, read: Callable[..., T], value: Any, *args: Any) -> T:
        """Return `read(value, …)`: in a thread where it may take long, or call the user's code."""
        if is_small(value):
            return read(value, *args)
        result: T = await self._call("reading what it returned", read, value, *args)
        return result

    async def _call(self, what: str, function: Any, *args: Any) -> Any:
        """Call the user's; whatever goes wrong is a fault that may pass by itself."""
        try:
            return await run_bounded(
                function, *args, timeout_s=self._timeout_s, threads=ENV_THREADS
            )
        except (EnvFault, MemoryError):
            raise
        except Overdue:
            raise self._fault(
                f"{what} did not return within {self._timeout_s:g} s "
                "(worker.environment_timeout_s)",
                "timeout",
            ) from None
        except LeakedCancel:
            raise self._fault(f"{what} raised CancelledError", "cancelled") from None
        except Exception as error:
            raise self._fault(f"{what} raised {describe(error)}", "raised") from error

    def _fault(self, what: str, detail: str) -> EnvFault:
        return EnvFault(f"environment {self._name}: {what}", retryable=True, detail=detail)
