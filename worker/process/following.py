"""Following the run's control words: new weights, pauses and engines reach the parts, confirmed.

Owns the way from a control word to what this worker does, and the confirmation of it. Never
decides what a word means for a sample: the gate refuses or holds calls, the pool has the engines.
Invariants: what is obeyed is the run's record as it is read behind the word, so a word that is
lost, repeated or out of order changes nothing; a word is confirmed once it is obeyed and not before
(in `abort`: once no call is in flight), and a worker that cannot obey confirms nothing.

The stream brings a word at once; every beat reads the record too where its answer differs from what
is known, so a stream that stands still costs a third of a lease.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import structlog

from rollstream.link import Link
from rollstream.queue import calls
from rollstream.queue.answers import BeatAnswer
from rollstream.queue.calls import ScriptCall
from rollstream.queue.keys import MAX_ENGINES_BYTES
from rollstream.queue.queue import Queue

from ..engines.fleet.states import EngineState
from ..members.gate import Gate, Position
from ..members.view import PAUSED, RunView

CONTROL_BLOCK_S = 0.5
AGAIN_S = 0.5
"""Calls that are still in flight so long after an abort are aborted again: one may just have been
on its way."""
LET_GO_S = 5.0
"""A call that an engine does not stop in that time is given up, with the tokens it has there; one
engine that hangs must not hold up the weights of all."""
ABORT_MODE = "abort"

log = structlog.get_logger("worker")


class Engines(Protocol):
    """What is told of a run's words: the pool of engines."""

    def hold(self, is_held: bool) -> None:
        """Have engines sample nothing of their own accord while the run is paused."""
        ...

    def set_version(self, version: int, labels: Mapping[str, int]) -> None:
        """Take over the current weight version, and what engines call which."""
        ...

    def set_members(self, urls: Sequence[str] | None) -> None:
        """Take over the engines; None are those of the configuration."""
        ...

    def abort_all(self) -> int:
        """Stop every call at its engine; how many there were."""
        ...

    def states(self) -> Sequence[EngineState]:
        """Return how every engine is."""
        ...


class Follower:
    """Does what the run's control words say, and confirms it."""

    def __init__(
        self,
        queue: Queue,
        link: Link,
        view: RunView,
        *,
        name: str,
        gate: Gate,
        fleet: Engines | None,
        let_go_s: float = LET_GO_S,
    ) -> None:
        """Begin with nothing heard.

        Args:
            queue: of the run.
            link: to Redis.
            view: is renewed.
            name: of this worker.
            gate: is moved.
            fleet: is told; None in a process without engines, which confirms nothing.
            let_go_s: see `LET_GO_S`.
        """
        self._queue, self._link, self._view, self._name = queue, link, view, name
        self._gate, self._fleet, self._let_go_s = gate, fleet, let_go_s
        self._reading = asyncio.Lock()
        self._heard = self._obeyed = -1
        self._urls: tuple[str, ...] | None = None
        self._tell = asyncio.Event()
        self._abort = asyncio.Event()
        gate.when_idle(self._became_idle)

    async def run(self) -> None:
        """Follow until cancelled.

        Raises:
            RunMismatch: another version opened the run anew.
        """
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._listen())
                if self._fleet is not None:
                    parts.create_task(self._keep_telling())
                    parts.create_task(self._keep_aborting())
        except BaseExceptionGroup as group:
            # What broke first, as it is: an exit code and a line for people hang on its kind.
            raise group.exceptions[0] from None

    async def _listen(self) -> None:
        # Where the stream ends comes first: a word behind it is heard, one before it is in the
        # record that is read next.
        last_id, _ = await self._link.answered(lambda: self._queue.read_control("$", block_s=0))
        await self.look()
        while True:
            last_id, words = await self._link.answered(
                functools.partial(self._queue.read_control, last_id, block_s=CONTROL_BLOCK_S)
            )
            if words:
                await self.look()

    async def look(self) -> None:
        """Read the run's record and obey it."""
        # One at a time: an older reading must not be obeyed behind a newer one.
        async with self._reading:
            info = await self._link.answered(self._queue.info)
            if info is not None:
                self._view.opened(info)
                self.obey()

    def obey(self) -> None:
        """Tell the parts what the view says now."""
        view = self._view
        if self._fleet is not None:
            tell(self._fleet, view, engines=view.engines != self._urls)
            self._urls = view.engines
        before = self._gate.position
        self._gate.move(position_of(view))
        if self._gate.position is not before:
            log.info(
                "gate_moved",
                position=self._gate.position.value,
                before=before.value,
                in_flight=self._gate.in_flight,
                version=view.version,
            )
        self._heard = view.control_seq
        if self._gate.position is Position.ABORT and self._gate.in_flight:
            self._abort.set()
        self._tell.set()

    # --- confirmations ---------------------------------------------------------------------------
    @property
    def obeyed(self) -> int:
        """Up to which control word this worker does what the run says; -1 for none yet."""
        gate = self._gate
        if not (gate.position is Position.ABORT and gate.in_flight):
            self._obeyed = self._heard
        return self._obeyed

    def confirmations(self) -> list[ScriptCall[Any]]:
        """Return the confirmation as of now; none where there is nothing to confirm."""
        if self._fleet is None or self.obeyed < 0:
            return []
        return [self._confirm(self._fleet)]

    def _confirm(self, fleet: Engines) -> ScriptCall[BeatAnswer]:
        told = engines_json(fleet.states())
        return calls.confirm(self._name, self.obeyed, self._gate.in_flight, told)

    def _became_idle(self) -> None:
        if self._gate.position is not Position.OPEN:
            self._tell.set()

    async def _keep_telling(self) -> None:
        while True:
            await self._tell.wait()
            self._tell.clear()
            if self.obeyed < 0:
                continue
            # Made anew for every try: what an outage held up says how it is when Redis is back.
            answer = await self._link.answered(lambda: self._queue.call_many(self.confirmations()))
            for seen in answer:
                self._view.saw(seen.state, seen.version, seen.control_seq)

    # --- aborts ----------------------------------------------------------------------------------
    async def _keep_aborting(self) -> None:
        while True:
            await self._abort.wait()
            self._abort.clear()
            await self.abort_calls()

    async def abort_calls(self) -> None:
        """Stop the calls in flight at their engines until there is none, or the gate moved on."""
        fleet, gate = self._fleet, self._gate
        if fleet is None:
            return
        clock = asyncio.get_running_loop().time
        limit = clock() + self._let_go_s
        while gate.position is Position.ABORT and gate.in_flight:
            fleet.abort_all()
            if clock() >= limit:
                log.warning("calls_let_go", calls=gate.in_flight, after_s=self._let_go_s)
                gate.let_go()
            try:
                async with asyncio.timeout(AGAIN_S):
                    await gate.idle.wait()
            except TimeoutError:
                continue


def tell(fleet: Engines, view: RunView, *, engines: bool = True) -> None:
    """Tell a fleet what the run's record says; which engines there are only where it is new."""
    fleet.hold(view.state == PAUSED)
    if engines:
        fleet.set_members(view.engines)
    fleet.set_version(view.version, view.labels)


def position_of(view: RunView) -> Position:
    """Return where the gate belongs; only a pause shuts it, a run that is over cancels instead."""
    if view.state != PAUSED:
        return Position.OPEN
    return Position.ABORT if view.pause_mode == ABORT_MODE else Position.KEEP


def engines_json(states: Sequence[EngineState]) -> bytes:
    """Return engines as JSON of at most `MAX_ENGINES_BYTES`; what is too many is left out."""
    rows = [dataclasses.asdict(state) for state in states]
    if len(msgspec.json.encode(rows)) > MAX_ENGINES_BYTES:
        rows = [row | {"problem": ""} for row in rows]  # an engine counts for more
    while len(text := msgspec.json.encode(rows)) > MAX_ENGINES_BYTES:
        rows = rows[: len(rows) // 2]
    return text
