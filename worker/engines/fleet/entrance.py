"""The line in front of the engines: which engine takes a call, and who waits for a place.

Owns the places at every engine (`in_flight`) and the order of those who wait. Never sends a call,
and never tries one again. Invariants: first come, first served, among calls that the same engines
may take; an engine has at most as many calls as its limit was when the last of them was let in; who
stops waiting holds no place.

Nobody waits longer than until the call's own deadline; where no engine is up, no longer than one
back-off, which counts as a try.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from rollstream.errors import EngineFault, Withheld

from ...sampling import Sampling
from ..faults import Detail, fault
from ..protocol.connections import Line
from .affinity import hash_of, mix
from .logprob_mode import Mode
from .pooled import PoolEngine
from .roster import Fleet
from .states import State

NEVER = float("inf")
MAX_HOMES = 1 << 14
"""Routing keys whose engine is kept; more than a worker has groups in flight."""


class PoolCall:
    """One call on its way through the pool."""

    __slots__ = (
        "attempt",
        "epoch",
        "failed",
        "fresh",
        "held",
        "key",
        "limit",
        "line",
        "passed",
        "rid",
        "scaled",
        "sent_at",
    )

    def __init__(self, routing_key: str, sampling: Sampling, limit: float, epoch: int) -> None:
        self.key, self.limit, self.epoch = hash_of(routing_key), limit, epoch
        self.scaled = sampling.temperature not in (0.0, 1.0)
        """Raw log-probs would not be those of what is sampled."""
        self.attempt = 0
        self.passed = False
        """Something of it was passed on to whoever reads along: it is not tried again."""
        self.failed: PoolEngine | None = None
        """Where it was tried last."""
        self.fresh = False
        """A try met a connection that the engine had closed."""
        # Of the last try: its id, its connection, when it was sent, and how many calls its engine
        # had when it broke.
        self.rid, self.line, self.sent_at, self.held = "", Line(), 0.0, 0


class _Place:
    """The place of a call in line."""

    __slots__ = ("call", "granted")

    def __init__(self, call: PoolCall) -> None:
        self.call = call
        self.granted: asyncio.Future[PoolEngine | None] = asyncio.get_running_loop().create_future()
        """None: things changed, look again."""


class Entrance:
    """The line in front of one fleet.

    Attributes:
        epoch: how often all calls were sent away; a call of an earlier one is not let in.
        waits: how often a call found no engine up.
    """

    def __init__(
        self,
        *,
        max_retries: int,
        backoff_s: Callable[[int], float],
        clock: Callable[[], float],
    ) -> None:
        """Stand in front of no engines yet (`fleet` is set once there is one).

        Args:
            max_retries: of a call; waits for an engine to return count.
            backoff_s: how long the wait behind a try is.
            clock: of the loop.
        """
        self.fleet: Fleet
        self.epoch = 0
        self._max_retries, self._backoff_s, self._clock = max_retries, backoff_s, clock
        self._homes: dict[int, PoolEngine] = {}
        self._generation = -1
        self._line: deque[_Place] = deque()

    def check(self, call: PoolCall) -> None:
        """Raise `Withheld` where all calls were sent away since this one began."""
        if call.epoch != self.epoch:
            raise Withheld("all calls were aborted")

    async def enter(self, call: PoolCall) -> PoolEngine:
        """Return an engine with a place taken for the call, which `leave` gives back.

        Raises:
            EngineFault: none in time, or none whose log-probs would be those of this call.
            Withheld: all calls were aborted.
        """
        while True:
            self.check(call)
            if call.limit != NEVER and self._clock() >= call.limit:
                raise self._too_late()
            member = None if self._line else self.choose(call)
            if member is not None:
                member.counters.in_flight += 1
                return member
            if call.scaled and self.fleet.has_raw:
                self._refuse()
            until = call.limit if self.fleet.alive() else self._until_return(call)
            member = await self._wait(call, until)
            if member is not None:
                return member

    def leave(self, member: PoolEngine) -> None:
        """Give a place back, to the first who waits for it."""
        member.counters.in_flight -= 1
        if self._line:
            self.serve()
        if member.leaving and member.counters.in_flight == 0:
            self.fleet.ended(member)

    def choose(self, call: PoolCall) -> PoolEngine | None:
        """Return the engine of the call's key, else the least loaded one; not where it just failed.

        Rendezvous hashing: no state, and when an engine leaves, only its own keys move. None where
        no engine has a place.
        """
        fleet = self.fleet
        up = fleet.open
        if call.scaled and fleet.has_raw:
            up = [member for member in up if member.mode is not Mode.RAW]
        if len(up) <= 1:
            return up[0] if up and up[0].has_room() else None
        key, failed = call.key, call.failed
        home = self._home(key)
        if home is not failed and home.state is State.UP and home.has_room() and home in up:
            return home
        room = [member for member in up if member.has_room()]
        others = [member for member in room if member is not failed]
        return min(
            others or room, key=lambda m: (m.counters.in_flight, mix(key ^ m.salt)), default=None
        )

    def _home(self, key: int) -> PoolEngine:
        """Return where a key lives, of all members: kept, as every call of a group asks for it."""
        if self._generation != self.fleet.generation or len(self._homes) >= MAX_HOMES:
            self._homes.clear()
            self._generation = self.fleet.generation
        home = self._homes.get(key)
        if home is None:
            home = max(self.fleet.members, key=lambda member: mix(key ^ member.salt))
            self._homes[key] = home
        return home

    def serve(self) -> None:
        """Let those in line in, as far as there are places; called at every change."""
        stay: list[_Place] = []
        while self._line:
            place = self._line[0]
            if not place.granted.done():
                picky = place.call.scaled and self.fleet.has_raw
                member = None if picky and stay else self.choose(place.call)
                if member is not None:
                    member.counters.in_flight += 1
                    place.granted.set_result(member)
                elif picky:
                    stay.append(place)  # raw engines may have places for those behind it
                else:
                    break
            self._line.popleft()
        if stay and self._only_raw():
            self._wake(stay)  # each hears that it is refused
            stay.clear()
        self._line.extendleft(reversed(stay))
        if self._line and not self.fleet.alive():
            # Nobody will be served soon: each has its own bounded wait for that.
            self._wake(self._line)
            self._line.clear()

    def _wake(self, places: Iterable[_Place]) -> None:
        for place in places:
            if not place.granted.done():
                place.granted.set_result(None)

    def send_away(self) -> int:
        """Let nobody in that is on its way now; return how many were in line."""
        self.epoch += 1
        num = 0
        for place in self._line:
            if not place.granted.done():
                place.granted.set_exception(Withheld("all calls were aborted"))
                num += 1
        self._line.clear()
        return num

    async def _wait(self, call: PoolCall, until: float) -> PoolEngine | None:
        """Wait in line for a place; None where time is over or things changed."""
        place = _Place(call)
        self._line.append(place)
        if self.fleet.has_raw:
            self.serve()  # those in front of it may wait for other engines
        try:
            async with asyncio.timeout_at(None if until == NEVER else until):
                return await place.granted
        except TimeoutError:
            return self._step_out(place)
        except asyncio.CancelledError:
            member = self._step_out(place)
            if member is not None:
                self.leave(member)
            raise

    def _step_out(self, place: _Place) -> PoolEngine | None:
        """Leave the line; return what was granted in the same moment."""
        if place in self._line:
            self._line.remove(place)
            self.serve()  # who stood behind may be served elsewhere
        granted = place.granted
        if granted.cancelled() or not granted.done() or granted.exception() is not None:
            return None
        return granted.result()

    def _until_return(self, call: PoolCall) -> float:
        """Return until when a call waits where no engine is up: for one try's back-off."""
        self.fleet.counters.waits += 1
        until = self._clock() + self._backoff_s(call.attempt)
        if call.attempt >= self._max_retries or until >= call.limit:
            raise fault(
                Detail.NO_ENGINE, f"no engine is up: {self.fleet.said()}; each is asked until it is"
            )
        call.attempt += 1
        return until

    def _too_late(self) -> EngineFault:
        if self.fleet.open:
            return fault(Detail.TIMEOUT, "the call's deadline passed before it could be sent")
        return fault(
            Detail.NO_ENGINE, f"no engine took the call before its deadline: {self.fleet.said()}"
        )

    def _refuse(self) -> None:
        """Raise where there is no engine, not even one that is away, with other log-probs."""
        if self._only_raw():
            raise fault(
                Detail.REFUSED,
                "the engines report raw log-probs, and this call samples at a temperature other "
                "than 1: start them with --logprobs-mode processed_logprobs (vLLM)",
            )

    def _only_raw(self) -> bool:
        return all(member.mode is Mode.RAW for member in self.fleet.members)
