"""The worker process: its parts, the order they start in, and the order they stop in.

Owns start-up checks, signals, supervision and shutdown. Never does a part's work. Invariants:
nothing is leased before everything was checked; a part that breaks ends the process (its leases
expire and others take over), it never limps on; shutdown is the sequence of `_shut_down`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

import rollstream
from rollstream.errors import RunFailed, Withheld
from rollstream.link import OUTAGE, Link
from rollstream.logs import bind_process
from rollstream.queue.queue import Queue
from rollstream.runs import problems_of
from rollstream.settings import Settings
from rollstream.wire import WIRE_VERSION

from ..aggregate.aggregator import Aggregator, AggregatorLimits
from ..engines import create_engine
from ..engines.fleet.pool import EnginePool
from ..generate.finish import finish
from ..members.fidelity import Fidelity, Kind
from ..members.gate import Gate, GatedEngine, GatedScores, Passage, Position
from ..members.groups import GroupBook
from ..members.parked import Parking
from ..members.rescorer import Rescorer
from ..members.rollout import Rollout
from ..members.shift import Shift, ShiftLimits, new_incarnation
from ..members.view import LOST, OVER, RunView
from ..memory import MEMORY
from ..telemetry.gc_policy import GcPolicy
from ..telemetry.metrics import Metrics
from ..telemetry.pulse import Pulse
from ..telemetry.server import TelemetryServer
from ..tito.load import LoadedRenderer, render_prompt
from .agents import Serving, agents_of, serving
from .environments import Surroundings, surroundings
from .following import Follower, tell
from .heart import Heart, Role
from .startup import (
    asks_verifiers,
    build_isolated,
    build_scorers,
    env_judges,
    env_runtimes,
    mcp_servers,
    tool_loader,
    warn_of_unseen_tools,
)
from .threads import publish_threads, watch_threads
from .watchdog import Stalled, Watchdog

REACH_S = 5.0
"""How long start-up tries to reach Redis, and then an engine."""
REPORT_S = 5.0
"""How long shutdown waits for the queue's answers to what was given back."""
SAY_WAITING_S = 30.0
READY_TIMEOUT_S = 1.0

T = TypeVar("T")
log = structlog.get_logger("worker")


class _StoppedEarly(Exception):
    """A signal came while the worker was starting: it ends as if it had done its work."""


class Worker:
    """One worker process."""

    def __init__(self, settings: Settings, renderer: Future[LoadedRenderer] | None) -> None:
        """Prepare; `renderer` is being loaded in a thread (None for a pure aggregator)."""
        self._settings, self._loading = settings, renderer
        self.role = Role(settings.worker.role)
        self.incarnation = new_incarnation()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._link, self._view = Link("worker"), RunView()
        self._metrics = Metrics(
            version=rollstream.__version__,
            wire=WIRE_VERSION,
            envs=settings.envs(),
        )
        self._pulse = Pulse(self._metrics, self._publish_engines)
        self._server = TelemetryServer(
            self._metrics, lag_s=lambda: self._pulse.lag_s, ready=self._checks
        )
        self._gc = GcPolicy()
        self._fidelity = Fidelity()
        self._gate = Gate()
        self._rescorer: Rescorer | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._closing = contextlib.AsyncExitStack()
        self._pool: EnginePool | None = None
        self._shift: Shift | None = None
        self._serving: Serving | None = None
        self._surroundings: Surroundings | None = None
        self._judging: asyncio.Task[Any] | None = None
        self._stalled: Stalled | None = None

    async def run(self) -> None:
        """Start, work until stopped or until the run is over, and stop.

        Raises:
            ConfigError: something in the configuration is wrong.
            ConnectionError: Redis or every engine is unreachable.
            RunFailed: the run was ended as failed.
            Stalled: user functions used up this process; another one in its place can go on.
        """
        bind_process(incarnation=self.incarnation)
        async with self._closing:
            self._watch_signals()
            try:
                await self._start()
            except (_StoppedEarly, ConnectionError):
                if not self._stop.is_set():
                    raise
                log.info("stopped", run_state="unknown")
                return
            state = await self._work()
            if self._stalled is not None:
                raise self._stalled
            if state == "failed":
                info = await self._link.answered(self._queue.info)
                raise RunFailed(info.error if info is not None else "no reason is known")

    # --- start -----------------------------------------------------------------------------------
    async def _start(self) -> None:
        settings = self._settings
        judges = env_judges(settings) if self.role is not Role.ROLLOUT else {}
        self._queue = Queue.connect(
            settings.redis_url(),
            settings.run.name,
            ca=None if settings.redis.ca is None else str(settings.redis.ca),
            connect_timeout_s=settings.redis.connect_timeout_s,
        )
        self._closing.push_async_callback(self._queue.aclose)
        await self._reach_redis()
        for found in await problems_of(self._queue):
            log.warning(
                "redis_unfit", check=found.check, what=found.what, why=found.why, action=found.do
            )
        if self.role is not Role.AGGREGATOR:
            await self._start_rollouts()
        if self.role is not Role.ROLLOUT:
            self._aggregator = Aggregator(
                self._queue,
                self._link,
                judges,
                metrics=self._metrics,
                limits=AggregatorLimits(
                    stop_on_filter_error=settings.aggregator.on_filter_error == "stop"
                ),
                lease_s=lambda: self._view.lease_s,
                version=lambda: self._view.version,
            )
        self._follower = Follower(
            self._queue,
            self._link,
            self._view,
            name=self.incarnation,
            gate=self._gate,
            fleet=self._pool,
        )
        self._heart = Heart(
            self._queue,
            self._link,
            self._view,
            name=self.incarnation,
            role=self.role,
            held=self._shift.held if self._shift is not None else list,
            lost=self._shift.lost if self._shift is not None else lambda _: None,
            metrics=self._metrics,
            also=self._follower.confirmations,
            look=self._follower.look,
        )
        await self._listen()

    async def _reach_redis(self) -> None:
        try:
            async with asyncio.timeout(REACH_S):
                await self._queue.client.ping()
        except TimeoutError:
            raise ConnectionError(
                f"Redis cannot be reached within {REACH_S:g} s; check redis.url"
            ) from None

    async def _start_rollouts(self) -> None:
        settings = self._settings
        assert self._loading is not None
        renderer = await asyncio.wrap_future(self._loading)
        isolated = build_isolated(settings, self.incarnation)
        scorers = build_scorers(settings, renderer, isolated)
        self._serving = serving(settings, renderer, agents_of(settings))
        self._surroundings = surroundings(settings)
        agents = {} if self._serving is None else dict(self._serving.generates)
        if self._surroundings is not None:
            agents |= self._surroundings.generates
        servers = mcp_servers(settings)
        if servers:
            self._closing.push_async_callback(servers.aclose)
            await self._unless_stopped(servers.start())
        tools = tool_loader(settings, isolated, servers.tools)
        envs = env_runtimes(settings, renderer, scorers, agents, tools)
        warn_of_unseen_tools(envs, renderer)
        self._pool = create_engine(settings, max_token_id=renderer.max_token_id)
        self._closing.push_async_callback(self._pool.aclose)
        self._pool.ask_within(self._as_a_call)
        info = await self._unless_stopped(self._link.answered(self._queue.info))
        if info is not None:
            # The trainer may have named other engines, or use them now for what is no sampling.
            self._view.opened(info)
            tell(self._pool, self._view)
        await self._reach_engine(self._pool)
        if self._surroundings is not None:
            self._closing.push_async_callback(self._surroundings.aclose)
            await self._unless_stopped(self._surroundings.start())
        if isolated is not None:
            self._closing.push_async_callback(isolated.aclose)
            if asks_verifiers(settings):
                await isolated.check()
        for scorer in scorers.values():
            if scorer is not None:
                await scorer.start()
                self._closing.push_async_callback(scorer.aclose)
        if settings.telemetry.rescore_fraction > 0:
            self._rescorer = Rescorer(
                GatedScores(self._pool, self._gate),
                settings.telemetry.rescore_fraction,
                version=lambda: self._view.version,
                run_seed=settings.run.seed,
                differences=self._metrics.differences,
                mismatch=lambda: self._fidelity.count(Kind.LOG_PROB),
            )
        book = GroupBook(
            run=settings.run.name,
            envs=envs,
            render=functools.partial(render_prompt, renderer),
            allow_off_distribution=settings.sampling.allow_off_distribution,
        )
        rollout = Rollout(
            engine=GatedEngine(self._pool, self._gate),
            renderer=renderer,
            book=book,
            finish=functools.partial(
                finish, decode=renderer.decode, max_token_id=renderer.max_token_id
            ),
            version=lambda: self._view.version,
            run_seed=settings.run.seed,
            debug_messages=settings.debug.messages,
            replay=settings.engine.routed_experts or settings.engine.indexer_topk,
            fidelity=self._fidelity,
            delivered=None if self._rescorer is None else self._rescorer.offer,
            parking=self._parking(renderer.max_token_id) if settings.weights.partial else None,
            mask_offpolicy=settings.weights.mask_offpolicy,
            opened=self._gate.reopened if settings.weights.partial else None,
        )
        self._shift = Shift(
            self._queue,
            self._link,
            self._view,
            name=self.incarnation,
            rollout=rollout,
            book=book,
            health=self._pool,
            limits=ShiftLimits(
                slots=settings.worker.concurrency,
                sample_timeout_s=settings.worker.sample_timeout_s,
                retry_delay_s=settings.worker.retry_delay_s,
                fail_after_groups=settings.worker.fail_after_groups,
                whole_groups=settings.worker.submission == "group",
                envs=tuple(settings.mixed_envs() or settings.envs()),
                all_envs_come=bool(settings.mixed_envs()),
            ),
            metrics=self._metrics,
            gate=self._gate,
        )

    @contextlib.asynccontextmanager
    async def _as_a_call(self) -> AsyncIterator[None]:
        """Count what engines are asked of our own accord as calls: a pause waits for them too."""
        if self._gate.position is not Position.OPEN:
            raise Withheld("no engine is asked for a token while the gate is shut")
        async with Passage(self._gate, None):
            yield

    def _parking(self, max_token_id: int) -> Parking:
        return Parking(
            lambda lease: self._link.answered(lambda: self._queue.parked(lease)),
            max_token_id=max_token_id,
            max_resumes=self._settings.weights.max_resumes,
        )

    async def _reach_engine(self, pool: EnginePool) -> None:
        limit = time.monotonic() + REACH_S
        while not await self._unless_stopped(pool.probe()):
            if time.monotonic() >= limit:
                raise ConnectionError(
                    f"no engine answers as it should (asked for {REACH_S:g} s): {pool.said()}; "
                    "start one, or check engine.urls"
                )
            await asyncio.sleep(0.2)

    async def _unless_stopped(self, asking: Coroutine[Any, Any, T]) -> T:
        """Return what is asked for.

        Raises:
            _StoppedEarly: a signal came before it was known.
        """
        asked = asyncio.create_task(asking)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((asked, stop), return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                raise _StoppedEarly
            return asked.result()
        finally:
            asked.cancel()
            stop.cancel()

    async def _listen(self) -> None:
        if self._serving is not None:
            await self._serving.start()
            self._closing.push_async_callback(self._serving.aclose)
        table = self._settings.telemetry
        port = await self._server.start(table.metrics_host, table.metrics_port)
        self._closing.push_async_callback(self._server.aclose)
        if table.metrics_port not in (0, port):
            log.info("metrics_port_taken", asked=table.metrics_port, port=port)
        log.info(
            "worker_ready",
            role=self.role.value,
            metrics_port=port,
            slots=self._settings.worker.concurrency,
        )

    # --- work ------------------------------------------------------------------------------------
    async def _work(self) -> str:
        """Work until stopped or until the run is over; return its state then, "" if stopped."""
        self._gc.install()
        self._closing.callback(self._gc.uninstall)
        watchdog = Watchdog(
            self._settings.worker.stall_limit_s,
            lease_s=lambda: self._view.lease_s,
            held=self._shift.held if self._shift is not None else list,
        )
        watchdog.start()
        self._closing.callback(watchdog.stop)
        MEMORY.keep(lambda: self._give_up("memory is used up: a function raised MemoryError"))
        self._closing.callback(MEMORY.release)
        self._spawn(self._pulse.run())
        self._spawn(watch_threads(self._give_up))
        self._spawn(self._gc.run(self._is_idle))
        if not await self._wait_for_run():
            return ""
        try:
            self._spawn(self._heart.run())
            self._spawn(self._follower.run())
            if self.role is not Role.ROLLOUT:
                self._judging = self._spawn(self._aggregator.run())
            if self._shift is None:
                return await self._until(self._until_over())
            self._spawn(self._shift.submitter.run())
            if self._rescorer is not None:
                self._spawn(self._rescorer.run())
            self._spawn(self._shift.watch())
            return await self._until(self._shift.run())
        finally:
            await self._shut_down()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(work))
        return self._tasks[-1]

    async def _until(self, main: Coroutine[Any, Any, str]) -> str:
        """Run `main` until it ends or a signal comes; raise what broke any part.

        `main` is not cancelled for a signal: a lease that is under way is to be taken in hand.
        """
        working = asyncio.create_task(main)
        stopping = asyncio.create_task(self._stop.wait())
        self._tasks += [working, stopping]
        while True:
            done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {working, stopping}:
                task.result()
                raise AssertionError("a part of the worker ended by itself")
            if working in done:
                return working.result()
            if stopping in done:
                break
        if self._shift is not None:
            self._shift.stop()
            await asyncio.wait((working,), timeout=self._settings.worker.drain_s or REPORT_S)
        return ""

    async def _wait_for_run(self) -> bool:
        """Wait until the producer opened the run; False where we were stopped before."""
        said = 0.0
        while not self._stop.is_set():
            try:
                info = await self._unless_stopped(self._link.answered(self._queue.info))
            except _StoppedEarly:  # also while Redis is away, however long
                return False
            if info is not None:
                self._view.opened(info)
                self._follower.obey()
                return True
            if time.monotonic() >= said:
                said = time.monotonic() + SAY_WAITING_S
                name = self._settings.run.name
                log.info("waiting_for_run", run=name, message="no producer has opened it yet")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._stop.wait()
        return False

    async def _until_over(self) -> str:
        """Wait for the end of the run in a process that leases nothing."""
        await self._view.over.wait()
        return self._view.state

    def _give_up(self, reason: str) -> None:
        """Stop as for a second signal: what runs is given back at once, uncharged."""
        if self._stalled is None:
            log.error("worker_used_up", reason=reason)
            self._stalled = Stalled(f"this process cannot go on: {reason}; start it again")
            self._stop.set()
            self._stop_now.set()

    def _is_idle(self) -> bool:
        return self._shift is None or self._shift.num_busy == 0

    # --- telemetry -------------------------------------------------------------------------------
    def _publish_engines(self) -> None:
        self._metrics.gc_pause_seconds.set(self._gc.take().longest_s)
        publish_threads(self._metrics)
        if self._serving is not None:
            self._serving.publish(self._metrics)
        if self._pool is not None:
            self._metrics.engines(self._pool.counters.engines, self._pool.counters)
        found = self._fidelity.counters
        self._metrics.fidelity(found.mismatches, checked=found.checked, unknown=found.unknown)
        if self._rescorer is not None:
            self._metrics.rescored(self._rescorer.outcomes)

    async def _checks(self) -> dict[str, bool]:
        checks = {"redis": await self._redis_answers()}
        if self._pool is not None:
            checks["engine"] = self._pool.alive()
        return checks

    async def _redis_answers(self) -> bool:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._queue.client.ping()
        except OUTAGE:
            return False
        return True

    # --- stop ------------------------------------------------------------------------------------
    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """Stop: the first signal lets samples finish, a second one gives them back at once."""
        log.info("signal", signal=signal.Signals(number).name, again=self._stop.is_set())
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def _shut_down(self) -> None:
        """Finish, give back, report, say goodbye, close; the heart beats until the goodbye."""
        shift = self._shift
        if shift is not None:
            over = self._view.state in (*OVER, LOST)
            finish_s = 0.0 if over else self._settings.worker.drain_s
            log.info("draining", samples=shift.num_busy, finish_s=finish_s)
            parks = self._settings.weights.partial and not over
            unreported = await shift.drain(
                finish_s,
                REPORT_S,
                now=self._stop_now,
                park=self._follower.abort_calls if parks else None,
            )
            if unreported:
                log.warning("unreported", samples=unreported, message="their leases will expire")
        if self._serving is not None:
            await self._serving.aclose()
        if self._surroundings is not None:
            await self._surroundings.aclose()
        if self._judging is not None:
            # The results just reported made groups full: this aggregator may have them in hand.
            self._aggregator.stop()
            await asyncio.wait((self._judging,), timeout=REPORT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(*OUTAGE):
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._heart.leave()
        self._pulse.flush()
        log.info("stopped", run_state=self._view.state)
