"""Several engines behind one face: which one takes a call, and what happens when it fails.

Owns affinity, retries with back-off, ejection and return, and the counts of all of it. Never reads
a token, and never retries what the table in `faults` does not allow. Invariant: a call gives one
completion of one try, or one fault; tokens of a try that failed are in neither.

One retry has one owner: this module repeats a call, the queue repeats a trajectory, nothing else
repeats anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.errors import ConfigError, EngineFault
from rollstream.sample import UNKNOWN_VERSION

from ..sampling import Sampling
from ..types import Completion, Finish, RequestIds
from .client import EngineClient
from .factory import new_client
from .faults import Detail, fault, rule_of
from .http_base import ClientOptions, new_transport
from .replay import ReplayShape
from .request import new_rid
from .states import ALIVE, EngineState, State
from .versions import VersionMap
from .wire_log import WireLog

OUTCOMES: tuple[str, ...] = (*(f.value for f in Finish), *(d.value for d in Detail))
"""How a request can end, for metrics: a finish reason, or the detail of its fault."""
_MASK = (1 << 64) - 1
JITTER = 0.5
"""A wait is its nominal length times 1 to 1.5, so that many callers do not come back at once."""


@dataclass(slots=True)
class EngineCounters:
    """What one engine did, as plain ints; the telemetry reads them once a second."""

    url: str
    up: bool = True
    version: int = UNKNOWN_VERSION
    """As the last probe that answered said."""
    in_flight: int = 0
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    """Requests that ended, by outcome; every outcome exists from the start."""
    ejections: int = 0
    returns: int = 0


@dataclass(slots=True)
class PoolCounters:
    """What the pool did."""

    engines: list[EngineCounters]
    retries: int = 0
    """Calls that were tried again."""
    waits: int = 0
    """Tries that found no engine up."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The bounds of one call; `[engine]` in the configuration."""

    max_retries: int = 4
    backoff_s: float = 0.2
    backoff_max_s: float = 5.0
    request_timeout_s: float = 600.0
    connect_timeout_s: float = 5.0
    abort_wait_s: float = 2.0
    probe_interval_s: float = 2.0


class _Member:
    """One engine: its client, its counters, and how it has been doing."""

    __slots__ = ("client", "counters", "failures_in_row", "salt")

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.counters = EngineCounters(client.url)
        self.failures_in_row = 0
        self.salt = _hash(client.url)


class EnginePool:
    """An `Engine` over one or more servers.

    Attributes:
        counters: see `PoolCounters`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_token_id: int,
        policy: RetryPolicy | None = None,
        wire_dir: Path | None = None,
        replay: ReplayShape | None = None,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        if not urls:
            raise ConfigError(
                "engine.urls is empty: give at least one, e.g. --engine.urls http://127.0.0.1:30000"
            )
        if len(set(urls)) != len(urls):
            raise ConfigError(f"engine.urls names one engine twice: {', '.join(urls)}")
        self._policy = policy or RetryPolicy()
        self._uniform = uniform
        self._transport = new_transport()
        self._wire_log = None if wire_dir is None else WireLog(wire_dir)
        self._versions = VersionMap()
        options = ClientOptions(
            max_token_id=max_token_id,
            connect_timeout_s=self._policy.connect_timeout_s,
            abort_wait_s=self._policy.abort_wait_s,
            versions=self._versions,
            wire_log=self._wire_log,
            replay=replay,
        )
        self._members = [
            _Member(new_client("sglang", url, self._transport, options)) for url in urls
        ]
        self.counters = PoolCounters([member.counters for member in self._members])
        self._version = 0
        self._returned = asyncio.Event()
        self._probes: dict[str, asyncio.Task[None]] = {}

    def healthy(self) -> bool:
        """Return whether any engine takes calls now; a worker leases nothing while none does."""
        return any(counters.up for counters in self.counters.engines)

    def alive(self) -> bool:
        """Return whether any engine takes calls, or will again by itself (behind, paused)."""
        return any(engine.state in ALIVE for engine in self.states())

    def states(self) -> list[EngineState]:
        """Return every engine as it is now, in a stable order."""
        return [
            EngineState(
                url=engine.url,
                kind="sglang",
                state=State.UP if engine.up else State.DOWN,
                version=engine.version,
                in_flight=engine.in_flight,
                limit=0,
            )
            for engine in self.counters.engines
        ]

    def set_version(self, version: int, labels: Mapping[str, int]) -> None:
        """Take over the run's weight version and the labels that the trainer gave. Cheap.

        A change makes every engine be asked at once for what it serves.
        """
        self._version = version
        self._versions.set(labels)

    def set_members(self, urls: Sequence[str] | None) -> None:
        """Take over which engines the trainer named; None is the configuration's. Cheap.

        An engine that leaves takes nothing new, and its calls end; one that joins takes calls once
        it has answered. A URL that is none is logged and left out.
        """

    def abort_all(self) -> int:
        """Abort every call at its engine, and return how many there were.

        Their replies come back as `Finish.ABORT` with the tokens sampled so far. Nothing is tried
        again: a call that was waiting in the pool, or whose engine does not answer the abort in
        `abort_wait_s`, raises `Withheld`.
        """
        return 0

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
        """Sample a continuation, trying again as `faults.RULES` says; a new rid for every try.

        Args:
            prompt: all ids held so far.
            sampling: the effective parameters.
            routing_key: calls with the same key go to the same engine while it is up.
            version: the weight version current at dispatch.
            deadline_s: seconds that all tries and waits together may take.
            salt: weight version at the trajectory's first call, which salts the engine's prefix
                cache; None is `version`.

        Raises:
            EngineFault: the last try's fault, or `no_engine`.
        """
        clock = asyncio.get_running_loop().time
        limit = float("inf") if deadline_s is None else clock() + deadline_s
        failed: _Member | None = None
        for attempt in range(self._policy.max_retries + 1):
            member, rid = self._choose(routing_key, failed), new_rid()
            if member is None:
                self.counters.waits += 1
                outcome: Completion | EngineFault = self._no_engine()
            else:
                outcome = await self._try(
                    member,
                    prompt,
                    sampling,
                    rid=rid,
                    routing_key=routing_key,
                    version=version,
                    limit_s=limit - clock(),
                    salt=version if salt is None else salt,
                )
            if isinstance(outcome, Completion):
                return outcome
            rule, failed = rule_of(outcome), member
            wait_s = self._backoff_s(attempt)
            last = attempt == self._policy.max_retries or clock() + wait_s >= limit
            if member is not None and rule.stop_first:
                await self._stop(member, rid, outcome, wait=not last)
            if last or not rule.again:
                raise outcome
            self.counters.retries += 1
            await self._wait(wait_s, until_return=member is None)
        raise AssertionError("unreachable: the last attempt raises")

    async def _try(
        self,
        member: _Member,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        rid: str,
        routing_key: str,
        version: int,
        limit_s: float,
        salt: int,
    ) -> Completion | EngineFault:
        """Return what one engine made of the call; a fault is a value here, for the loop above."""
        if limit_s <= 0:
            return fault(Detail.TIMEOUT, "the call's deadline passed before it could be sent")
        counters, timeout_s = member.counters, self._policy.request_timeout_s
        counters.in_flight += 1
        try:
            completion = await member.client.generate(
                prompt,
                sampling,
                rid=rid,
                routing_key=routing_key,
                version=version,
                timeout_s=min(timeout_s, limit_s),
                limit_s=limit_s,
                salt=salt,
            )
        except EngineFault as error:
            counters.requests[error.detail] += 1
            if error.detail != Detail.TIMEOUT or limit_s > timeout_s:
                self._failed(member, error)  # the caller's own deadline says nothing about it
            return error
        finally:
            counters.in_flight -= 1
        counters.requests[completion.finish.value] += 1
        member.failures_in_row = 0
        return completion

    async def score(self, body: bytes, *, routing_key: str) -> bytes:
        """Return the answer to a request that samples nothing, of the engine of this key.

        One try, and no engine is put aside for it: it is a look, not work.

        Raises:
            EngineFault: no engine is up, or it did not answer with 200 in time.
        """
        member = self._choose(routing_key, None)
        if member is None:
            raise self._no_engine()
        return await member.client.score(body, timeout_s=self._policy.request_timeout_s)

    def _choose(self, routing_key: str, failed: _Member | None) -> _Member | None:
        """Return the engine of this key, else the least loaded one; not the one that just failed.

        Rendezvous hashing: no state, and when an engine leaves, only its own keys move.
        """
        up = [member for member in self._members if member.counters.up]
        if len(up) > 1 and failed is not None:
            up = [member for member in up if member is not failed]
        elif len(up) <= 1:
            return up[0] if up else None
        key = _hash(routing_key)
        home = max(self._members, key=lambda member: _mix(key ^ member.salt))
        if home in up:
            return home
        return min(up, key=lambda m: (m.counters.in_flight, _mix(key ^ m.salt)))

    def _backoff_s(self, attempt: int) -> float:
        nominal = min(self._policy.backoff_s * 2.0**attempt, self._policy.backoff_max_s)
        return nominal * (1.0 + JITTER * self._uniform())

    async def _wait(self, wait_s: float, *, until_return: bool) -> None:
        if not until_return:
            await asyncio.sleep(wait_s)
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._returned.wait()
        except TimeoutError:
            return

    async def _stop(self, member: _Member, rid: str, error: EngineFault, *, wait: bool) -> None:
        """Make sure that nobody samples for a call that is about to be tried again.

        After a timeout the client has aborted it already and waited for the reply.
        """
        if error.detail == Detail.TIMEOUT:
            return
        if not wait:
            member.client.abort_soon(rid)
            return
        try:
            async with asyncio.timeout(self._policy.abort_wait_s):
                await member.client.abort(rid)
        except TimeoutError:
            member.client.failed_aborts += 1

    def _no_engine(self) -> EngineFault:
        urls = ", ".join(member.client.url for member in self._members)
        return fault(Detail.NO_ENGINE, f"no engine is up of {urls}; each is probed until it is")

    def _failed(self, member: _Member, error: EngineFault) -> None:
        rule = rule_of(error)
        if rule.eject_after == 0:
            return
        member.failures_in_row += 1
        if member.failures_in_row >= rule.eject_after:
            self._eject(member)

    def _eject(self, member: _Member) -> None:
        if not member.counters.up:
            return
        member.counters.up = False
        member.counters.ejections += 1
        if not self.healthy():
            self._returned.clear()
        url = member.client.url
        if url not in self._probes:
            task = asyncio.get_running_loop().create_task(self._probe_until_back(member))
            self._probes[url] = task
            task.add_done_callback(lambda _: self._probes.pop(url, None))

    async def _probe_until_back(self, member: _Member) -> None:
        """Ask at once (a burst of 503 is not the end of an engine), then at intervals."""
        while True:
            if await self._probe(member):
                return
            await asyncio.sleep(self._policy.probe_interval_s)

    async def _probe(self, member: _Member) -> bool:
        try:
            look = await member.client.look()
        except EngineFault:
            return False
        counters, version = member.counters, self._versions.of(look.version, 0)
        counters.version, counters.returns = version, counters.returns + (not counters.up)
        counters.up, member.failures_in_row = True, 0
        self._returned.set()
        return True

    async def probe(self) -> bool:
        """Ask every engine at once; those that do not answer are put aside until they do."""
        answers = await asyncio.gather(*(self._probe(member) for member in self._members))
        for member, answered in zip(self._members, answers, strict=True):
            if not answered:
                self._eject(member)
        return any(answers)

    async def aclose(self) -> None:
        """Stop probing, let aborts go out, close every connection."""
        for task in list(self._probes.values()):
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        for member in self._members:
            await member.client.aclose()
        await self._transport.aclose()
        if self._wire_log is not None:
            self._wire_log.close()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(value: int) -> int:
    """Return a well-mixed 64-bit number (the finalizer of splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
