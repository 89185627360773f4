"""The gate in front of the engines: whether a call may be made now, and which are under way.

Owns the gate's position, the calls that wait behind it and those in flight, and their time. Never
talks to an engine or to Redis, and never tries anything again. Invariants: behind a shut gate no
call is sent; a call is in flight exactly from where it passed until it was answered or broke; the
time that a caller gave its call stands still while the gate is shut.

`keep` lets the calls in flight go on and makes new ones wait. `abort` refuses new ones, and whoever
moves the gate there has those in flight stopped (`following.Follower`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Protocol

from rollstream.errors import RollstreamError, Withheld

from ..engines.faults import Detail, fault
from ..sampling import Sampling
from ..types import Completion, Engine, RequestIds


class Position(StrEnum):
    """What the gate does with a new call."""

    OPEN = "open"
    KEEP = "keep"
    """It waits until the gate moves."""
    ABORT = "abort"
    """It is refused (`Withheld`)."""


class Gate:
    """One for all calls of a worker.

    Attributes:
        position: what becomes of a new call.
        idle: set while no call is in flight.
    """

    __slots__ = (
        "_calls",
        "_moved",
        "_on_idle",
        "_opened_unix_s",
        "_shut_unix_s",
        "_stopped",
        "idle",
        "position",
    )

    def __init__(self, on_idle: Callable[[], None] = lambda: None) -> None:
        """Begin open, with nothing in flight.

        Args:
            on_idle: told when the last call in flight ended.
        """
        self.position = Position.OPEN
        self.idle = asyncio.Event()
        self.idle.set()
        self._calls: set[Passage] = set()
        self._moved = asyncio.Event()
        self._on_idle = on_idle
        self._stopped = False
        # Of the last time that it was shut.
        self._shut_unix_s = self._opened_unix_s = 0.0

    @property
    def in_flight(self) -> int:
        """Calls that passed and were not answered yet."""
        return len(self._calls)

    @property
    def stopped(self) -> bool:
        """Whether it was shut for good."""
        return self._stopped

    def was_shut_at(self, unix_s: float) -> bool:
        """Return whether it was shut at a moment; of earlier pauses than the last it knows none."""
        if unix_s < self._shut_unix_s:
            return False
        return self.position is not Position.OPEN or unix_s <= self._opened_unix_s

    def when_idle(self, told: Callable[[], None]) -> None:
        """Have `told` called when the last call in flight ended."""
        self._on_idle = told

    def move(self, position: Position) -> None:
        """Take a position; one that was stopped stays as it is."""
        if self._stopped or position is self.position:
            return
        was_open, self.position = self.position is Position.OPEN, position
        if position is Position.OPEN:
            self._opened_unix_s = time.time()
        elif was_open:
            self._shut_unix_s = time.time()
        self._tell()
        for call in self._calls:
            if position is Position.OPEN:
                call.go_on()
            elif was_open:
                call.stand_still()

    def stop(self) -> None:
        """Refuse every call from now on: the worker is about to end."""
        self.move(Position.ABORT)
        self._stopped = True
        self._tell()  # whoever waited for it to open again waits no more

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def let_go(self) -> None:
        """Give up on the calls in flight: whoever waits for one hears `Withheld`, at once."""
        for call in self._calls:
            call.let_go()

    async def passed(self) -> None:
        """Return once a call may be made; as long as a pause lasts, or the caller is cancelled.

        Raises:
            Withheld: none may be.
        """
        while self.position is Position.KEEP:
            await self._moved.wait()
        if self.position is Position.ABORT:
            raise Withheld(
                "no call is made: this worker is about to end"
                if self._stopped
                else "no call is made during this pause"
            )

    async def opened(self) -> None:
        """Return once the gate is open; for what need not be done now, through every pause."""
        while self.position is not Position.OPEN:
            await self._moved.wait()

    async def reopened(self) -> None:
        """Return once the gate is open: for a call that was stopped and is to go on.

        Raises:
            Withheld: it never opens again.
        """
        while self.position is not Position.OPEN:
            if self._stopped:
                raise Withheld("no call is made: this worker is about to end")
            await self._moved.wait()

    async def turned(self) -> None:
        """Return once the gate opened, after it shut where it is open now."""
        if self.position is Position.OPEN:
            await self._moved.wait()
        await self.opened()

    def enter(self, call: Passage) -> None:
        """Count a call in; `Passage` does."""
        if not self._calls:
            self.idle.clear()
        self._calls.add(call)

    def leave(self, call: Passage) -> None:
        """Count a call out; `Passage` does."""
        self._calls.discard(call)
        if not self._calls:
            self.idle.set()
            self._on_idle()


class Passage:
    """One call in flight, `async with Passage(gate, deadline_s): …`, under the gate's time.

    Raises:
        EngineFault: `timeout`, when its time is over.
        Withheld: it was let go.
    """

    __slots__ = ("_gate", "_left_s", "_let_go", "_timeout")

    def __init__(self, gate: Gate, deadline_s: float | None) -> None:
        self._gate, self._left_s, self._let_go = gate, deadline_s, False
        self._timeout = asyncio.timeout(deadline_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._gate.enter(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._gate.leave(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._let_go:
                raise Withheld("the engine did not stop the call in time") from None
            raise fault(Detail.TIMEOUT, "the call's deadline passed") from None

    def stand_still(self) -> None:
        """Stop its time."""
        when = self._timeout.when()
        if when is not None and not self._timeout.expired():
            self._left_s = when - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)

    def go_on(self) -> None:
        """Let its time go on from where it stood."""
        if self._left_s is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def let_go(self) -> None:
        """End it now."""
        if not self._timeout.expired():
            self._let_go = True
            self._timeout.reschedule(asyncio.get_running_loop().time())


class GatedEngine:
    """An engine (a pool of them) behind a gate; otherwise the engine itself."""

    __slots__ = ("_engine", "_gate")

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate

    async def generate(
        self,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        routing_key: str,
        version: int,
        deadline_s: float | None = None,
        salt: int | None = None,
    ) -> Completion:
        """Sample a continuation of `prompt` once the gate lets it pass (`types.Engine`).

        Raises:
            EngineFault: as the engine does; or its time was over.
            Withheld: the gate is shut, or was and the call could not be stopped in time.
        """
        gate = self._gate
        try:
            if gate.position is not Position.OPEN:
                await gate.passed()
            # The time is kept here, where a pause is known: for the engine it would go on.
            async with Passage(gate, deadline_s):
                return await self._engine.generate(
                    prompt,
                    sampling,
                    routing_key=routing_key,
                    version=version,
                    salt=salt,
                )
        except RollstreamError:
            # Some come at once. A function that catches them and calls again would hold the loop
            # for as long as they do: nobody could stop it, and no pause would ever end.
            await asyncio.sleep(0)
            raise

    async def probe(self) -> bool:
        """Return whether at least one server answers."""
        return await self._engine.probe()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._engine.aclose()


class Scores(Protocol):
    """What scores tokens that are there already."""

    async def score(self, body: bytes, *, routing_key: str) -> bytes:
        """Return the answer to a request that samples nothing."""
        ...


class GatedScores:
    """What scores, behind a gate: it waits through every pause, and counts as a call."""

    __slots__ = ("_gate", "_scores")

    def __init__(self, scores: Scores, gate: Gate) -> None:
        self._scores, self._gate = scores, gate

    async def score(self, body: bytes, *, routing_key: str) -> bytes:
        """Return the answer to a request that samples nothing, asked once the gate is open.

        Raises:
            EngineFault: no engine answered as it should.
            Withheld: a pause began meanwhile, and the engine did not answer in time.
        """
        await self._gate.opened()
        async with Passage(self._gate, None):
            return await self._scores.score(body, routing_key=routing_key)
