"""Several engines behind one face: which one takes a call, and what happens when it fails.

Owns the tries of a call, what a fault means for the next one, and the abort of all. Which engine
takes a call is the entrance's, how each engine is the fleet's. Never reads a token, and never
retries what the table in `faults` does not allow. Invariant: a call gives one completion of one
try, or one fault; tokens of a try that failed are in neither.

One retry has one owner: this module repeats a call, the queue repeats a trajectory, nothing else
repeats anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rollstream.errors import ConfigError, EngineFault, Withheld
from rollstream.sample import UNKNOWN_VERSION

from ...sampling import Sampling
from ...types import Completion, RequestIds
from ..client import EngineClient
from ..faults import Detail, fault, rule_of
from ..protocol.connections import LINE, Line
from ..protocol.factory import new_client
from ..protocol.http_base import ClientOptions, new_transport
from ..protocol.replay import ReplayShape
from ..protocol.request import new_rid
from ..protocol.versions import VersionMap, recorded
from ..protocol.wire_log import WireLog
from .affinity import hash_of, mix
from .discovery import http_get
from .entrance import NEVER, Entrance, PoolCall
from .looks import FirstQuestions, Passage
from .pooled import OUTCOMES, EngineCounters, PoolCounters, PoolEngine, RetryPolicy
from .relay import Relay
from .retry_budget import RetryBudget
from .roster import Fleet
from .states import EngineState

__all__ = ["OUTCOMES", "EngineCounters", "EnginePool", "PoolCounters", "RetryPolicy"]

JITTER = 0.5
"""A wait is its nominal length times 1 to 1.5, so that many callers do not come back at once."""
ABORTS_AT_ONCE = 16
"""At one engine, where all calls are aborted: their connections are idle ones of before."""
_OVERLOAD = frozenset({Detail.UNAVAILABLE, Detail.ABORT_ERROR, Detail.TIMEOUT})
"""What an engine that has too much to do answers."""


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
        kind: str = "sglang",
        policy: RetryPolicy | None = None,
        wire_dir: Path | None = None,
        replay: ReplayShape | None = None,
        lora_path: str = "",
        model: str = "",
        vllm_route: str = "generate",
        check_logprobs: bool = False,
        scaled: bool = False,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """Know the engines; inside a running loop, without any I/O yet.

        Args:
            urls: of engines, names (`dns+`) and routers (`router+`).
            max_token_id: the highest id of the vocabulary.
            kind: the protocol of all of them.
            policy: the bounds.
            wire_dir: where every request and reply is kept; None keeps none.
            replay: the shape of replay rows; None where they are not served.
            lora_path: see `ClientOptions`.
            model: see `ClientOptions`.
            vllm_route: see `ClientOptions`.
            check_logprobs: an engine takes calls only after it was asked what its log-probs are.
            scaled: this worker samples at temperatures other than 1.
            uniform: draws the jitter.

        Raises:
            ConfigError: no URL, one that is none, or the same twice.
        """
        if not urls:
            raise ConfigError(
                "engine.urls is empty: give at least one, e.g. --engine.urls http://127.0.0.1:30000"
            )
        if len(set(urls)) != len(urls):
            raise ConfigError(f"engine.urls names one engine twice: {', '.join(urls)}")
        self._kind, self._policy, self._uniform = kind, policy or RetryPolicy(), uniform
        self._clock = asyncio.get_running_loop().time
        self._budget = RetryBudget(self._policy.retry_budget, self._clock)
        self._transport = new_transport()
        self._wire_log = None if wire_dir is None else WireLog(wire_dir)
        versions = VersionMap()
        options = ClientOptions(
            max_token_id=max_token_id,
            connect_timeout_s=self._policy.connect_timeout_s,
            abort_wait_s=self._policy.abort_wait_s,
            versions=versions,
            wire_log=self._wire_log,
            replay=replay,
            lora_path=lora_path,
            model=model,
            vllm_route=vllm_route,
        )
        self._entrance = Entrance(
            max_retries=self._policy.max_retries, backoff_s=self._backoff_s, clock=self._clock
        )
        self._resting: set[asyncio.Future[None]] = set()
        self._aborting: set[asyncio.Task[None]] = set()
        questions = FirstQuestions(
            max_token_id, scaled, scaled_name="processed" if kind == "vllm" else "temperature"
        )
        self._fleet = Fleet(
            urls,
            new_client=lambda url: self._client_of(url, options),
            ask=lambda url: http_get(self._transport, url, limit_s=self._policy.connect_timeout_s),
            policy=self._policy,
            versions=versions,
            questions=questions if check_logprobs else None,
            changed=self._entrance.serve,
        )
        self._entrance.fleet = self._fleet
        self.counters = self._fleet.counters

    def _client_of(self, url: str, options: ClientOptions) -> EngineClient:
        return new_client(self._kind, url, self._transport, options)

    # --- how the engines are ---------------------------------------------------------------------
    def healthy(self) -> bool:
        """Return whether any engine takes calls now; a worker leases nothing while none does."""
        return bool(self._fleet.open)

    def alive(self) -> bool:
        """Return whether any engine takes calls, or will again by itself (behind, paused)."""
        return self._fleet.alive()

    def states(self) -> list[EngineState]:
        """Return every engine as it is now, in the order of their addresses."""
        return [
            EngineState(
                url=member.client.url,
                kind=self._kind,
                state=member.state,
                version=max(member.version, UNKNOWN_VERSION),
                in_flight=member.counters.in_flight,
                limit=member.limiter.shown,
                problem=member.problem,
            )
            for member in self._fleet.members
        ]

    def said(self) -> str:
        """Return how every engine is, and why one is down, for people."""
        return self._fleet.said()

    def hold(self, is_held: bool) -> None:
        """Have engines sample nothing of our own accord while the run is paused. Cheap.

        One that is new, or was away, is asked what its log-probs are when that is over; the next
        `set_version` has it asked at once.
        """
        self._fleet.looks.is_held = is_held

    def ask_within(self, passage: Passage) -> None:
        """Have whatever is sampled of our own accord counted as calls, and refused where they are.

        Args:
            passage: entered for the questions of one engine; raises Withheld where the gate is
                shut.
        """
        self._fleet.looks.passage = passage

    def set_version(self, version: int, labels: Mapping[str, int]) -> None:
        """Take over the run's weight version and the labels that the trainer gave. Cheap.

        A change makes every engine be asked at once for what it serves; without one only those are
        that take no calls.
        """
        self._fleet.set_version(version, labels)

    def set_members(self, urls: Sequence[str] | None) -> None:
        """Take over which engines the trainer named; None is the configuration's. Cheap.

        An engine that leaves takes nothing new, and its calls end; one that joins takes calls once
        it has answered. A URL that is none is logged and left out.
        """
        self._fleet.set_members(urls)

    async def probe(self) -> bool:
        """Ask every engine at once; those that do not answer are put aside until they do.

        Raises:
            ConfigError: an engine's log-probs are raw, and this worker's temperatures are not 1.
        """
        return await self._fleet.look_at_all()

    # --- one call --------------------------------------------------------------------------------
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
            prompt: all ids held so far. Where its sink was passed something, or refuses another
                try, none is made: the fault is raised.
            sampling: the effective parameters.
            routing_key: calls with the same key go to the same engine while it takes calls.
            version: the weight version that the caller knows; a try is sent under the pool's own
                where that is newer.
            deadline_s: seconds that all tries and waits together may take. None leaves that to the
                caller, who cancels: a call waits as long as its engines are paused or full.
            salt: weight version at the trajectory's first call, which salts the engine's prefix
                cache; None is the version of the try.

        Raises:
            EngineFault: the last try's fault, or `no_engine`.
            Withheld: all calls were aborted, and this one brought no reply.
        """
        if not self._fleet.started:
            self._fleet.start()
        limit = NEVER if deadline_s is None else self._clock() + deadline_s
        call = PoolCall(routing_key, sampling, limit, self._entrance.epoch)
        if prompt.sink is not None:
            prompt = replace(prompt, sink=Relay(prompt.sink, call))
        self._budget.called()
        broken: EngineFault | None = None
        while True:
            member = await self._entrance.enter(call)
            call.rid = new_rid()
            if prompt.sink is not None and not prompt.sink.begin(call.rid):
                self._entrance.leave(member)
                raise broken or fault(Detail.REFUSED, "whoever reads along takes no reply")
            sent = max(version, self._fleet.version)
            try:
                completion = await self._send(
                    member,
                    call,
                    prompt,
                    sampling,
                    routing_key=routing_key,
                    version=sent,
                    salt=sent if salt is None else salt,
                )
                self._fleet.looks.check_named(member, completion.versions, sent)
            except EngineFault as error:
                broken = error
                await self._after(error, member, call)
            else:
                self._answered(member, completion, sent)
                completion.versions = recorded(completion.versions, sent)
                return completion

    async def _send(
        self,
        member: PoolEngine,
        call: PoolCall,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        routing_key: str,
        version: int,
        salt: int,
    ) -> Completion:
        """Return what one engine made of the call, whose place there was taken before.

        Raises:
            EngineFault: of this try.
            Withheld: it was told to stop, and brought no reply.
        """
        rid, now = call.rid, self._clock()
        call.sent_at = now
        call.line = Line(fresh=call.fresh)
        LINE.set(call.line)
        limit_s = call.limit - now
        try:
            async with asyncio.timeout(None) as flight:
                member.flights[rid] = flight
                return await member.client.generate(
                    prompt,
                    sampling,
                    rid=rid,
                    routing_key=routing_key,
                    version=version,
                    timeout_s=min(self._policy.request_timeout_s, limit_s),
                    limit_s=limit_s,
                    salt=salt,
                    extend=member.extend,
                )
        except TimeoutError:  # only `abort_all` gives a flight a time
            raise Withheld(f"{member.client.url} did not answer an abort in time") from None
        except EngineFault:
            call.held = member.counters.in_flight
            if flight.when() is not None:
                raise Withheld("all calls were aborted") from None
            raise
        finally:
            del member.flights[rid]
            self._entrance.leave(member)

    def _answered(self, member: PoolEngine, completion: Completion, sent: int) -> None:
        counters, limiter = member.counters, member.limiter
        counters.requests[completion.finish.value] += 1
        member.failures_in_row = 0
        limiter.answered(counters.in_flight + 1)
        if limiter.limit != NEVER:
            counters.limit = limiter.shown
            self._entrance.serve()
        if member.mode_name:
            completion.logprob_mode = member.mode_name
        if completion.versions and completion.versions[-1][0] != counters.version:
            self._fleet.looks.saw_version(member, completion.versions[-1][0], sent)

    async def _after(self, error: EngineFault, member: PoolEngine, call: PoolCall) -> None:
        """Return when the call may be tried again: after a fault that says nothing, or after all.

        Raises:
            EngineFault: it may not.
            Withheld: all calls were aborted meanwhile.
        """
        if error.detail == Detail.RESET and call.line.stale:
            await self._reconnect(member, call)
            return
        is_busy = error.detail == Detail.UNAVAILABLE and not call.passed
        if is_busy and await self._is_paused(member, call):
            member.client.abort_soon(call.rid)  # a router may have left it there
            return  # it waits in line until the pause is over
        counters = member.counters
        counters.requests[error.detail] += 1
        allowed_s = call.limit - call.sent_at
        if error.detail != Detail.TIMEOUT or allowed_s > self._policy.request_timeout_s:
            # The caller's own deadline says nothing about the engine.
            if error.detail in _OVERLOAD:
                member.limiter.overloaded(call.held, call.sent_at, self._clock())
                counters.limit = member.limiter.shown
            self._fleet.looks.failed(member, error)
        await self._again(error, member, call)

    async def _is_paused(self, member: PoolEngine, call: PoolCall) -> bool:
        """Ask an engine that is unavailable why: vLLM refuses calls during a pause."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, call.limit - self._clock())):
                await self._fleet.looks.look(member)
        return member.paused

    async def _reconnect(self, member: PoolEngine, call: PoolCall) -> None:
        """Let a call be sent again at once: its connection was closed before it was answered.

        The engine closed what had been idle, did nothing wrong, and in all likelihood never saw the
        request; it is aborted first all the same, and what it may have sampled goes nowhere.
        """
        self.counters.stale_connections += 1
        call.fresh = True
        LINE.set(Line(fresh=True))
        await self._stop(member, call)

    async def _again(self, error: EngineFault, member: PoolEngine, call: PoolCall) -> None:
        """Return when a call may be tried again: it is worth it, paid for, stopped, and rested.

        Raises:
            EngineFault: it may not.
            Withheld: all calls were aborted meanwhile.
        """
        rule, wait_s = rule_of(error), self._backoff_s(call.attempt)
        again = rule.again and call.attempt < self._policy.max_retries and not call.passed
        again = again and self._clock() + wait_s < call.limit
        if again and not self._budget.take():
            self.counters.retries_denied += 1
            again = False
        # After a timeout the client has aborted it already and waited for the reply.
        if rule.stop_first and error.detail != Detail.TIMEOUT:
            if again and error.detail == Detail.RESET:
                await self._stop(member, call)
            else:  # who answered has let go of the call itself; a router's engine may not have
                member.client.abort_soon(call.rid)
        if not again:
            raise error
        self.counters.retries += 1
        call.attempt, call.failed = call.attempt + 1, member
        self._entrance.check(call)
        await self._rest(wait_s)

    async def _stop(self, member: PoolEngine, call: PoolCall) -> None:
        """Make sure that nobody samples for a call that is about to be tried again."""
        if self._clock() + self._policy.abort_wait_s > call.limit:
            member.client.abort_soon(call.rid)  # there is no time to wait for it
            return
        try:
            async with asyncio.timeout(self._policy.abort_wait_s):
                await member.client.abort(call.rid)
        except TimeoutError:
            member.client.failed_aborts += 1

    async def _rest(self, wait_s: float) -> None:
        """Sleep, but no longer than until all calls are aborted."""
        resting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resting.add(resting)
        try:
            await asyncio.wait((resting,), timeout=wait_s)
        finally:
            self._resting.discard(resting)

    def _backoff_s(self, attempt: int) -> float:
        nominal = min(self._policy.backoff_s * 2.0**attempt, self._policy.backoff_max_s)
        return nominal * (1.0 + JITTER * self._uniform())

    # --- everything else -------------------------------------------------------------------------
    def abort_all(self) -> int:
        """Abort every call (and question) at its engine, and return how many there were.

        Their replies come back as `Finish.ABORT` with the tokens sampled so far. Nothing is tried
        again: a call that was waiting in the pool, whose try broke, or whose engine does not answer
        the abort within `abort_wait_s`, raises `Withheld`.
        """
        num = self._entrance.send_away()
        for resting in self._resting:
            if not resting.done():
                resting.set_result(None)
                num += 1
        end = self._clock() + self._policy.abort_wait_s
        for member in (*self._fleet.members, *self._fleet.leaving):
            if not member.flights:
                continue
            num += len(member.flights)
            for flight in member.flights.values():
                if flight.when() is None:
                    self.counters.aborted += 1
                    flight.reschedule(end)
            task = asyncio.get_running_loop().create_task(_abort_flights(member))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
        return num

    async def score(self, body: bytes, *, routing_key: str) -> bytes:
        """Return the answer to a request that samples nothing, of the engine of this key.

        One try, and no engine is put aside for it: it is a look, not work.

        Raises:
            EngineFault: no engine takes calls, or it did not answer with 200 in time.
        """
        up = self._fleet.open
        if not up:
            raise fault(Detail.NO_ENGINE, "no engine takes calls now")
        key = hash_of(routing_key)
        member = max(up, key=lambda member: mix(key ^ member.salt))
        return await member.client.score(body, timeout_s=self._policy.request_timeout_s)

    async def aclose(self) -> None:
        """Stop looking at engines, let aborts go out, close every connection."""
        if self._aborting:
            await asyncio.wait(set(self._aborting), timeout=self._policy.abort_wait_s)
        for task in self._aborting:
            task.cancel()
        await self._fleet.aclose()
        await self._transport.aclose()
        if self._wire_log is not None:
            self._wire_log.close()


async def _abort_flights(member: PoolEngine) -> None:
    """Abort every call that an engine has now; those that end meanwhile are left alone."""
    rids = iter(list(member.flights))

    async def some() -> None:
        for rid in rids:
            if rid in member.flights:
                await member.client.abort(rid)

    await asyncio.gather(*(some() for _ in range(min(ABORTS_AT_ONCE, len(member.flights)))))
