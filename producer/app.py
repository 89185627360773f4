"""The producer as a process: what it is made of, how it starts and how it stops.

Owns the wiring and the signals. Never touches a prompt. Invariant: everything that can be wrong
with configuration and rows is found before the run is opened, and Redis is asked for ten seconds
at most before the process says that it is not there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import structlog

from rollstream.config import Loaded
from rollstream.errors import RunMismatch
from rollstream.heartbeat import Heartbeat
from rollstream.logs import bind_process, configure
from rollstream.queue.queue import Queue
from rollstream.runs import problems_of
from rollstream.settings import Settings

from .budgets import Pace, pace_of
from .fresh import begin_fresh
from .gate import Gate
from .identity import fingerprint_of, opening
from .mixture import AnyRows, Mixture, checked_of, open_rows, order_of
from .progress import bar, follow
from .rows import RowRules
from .supply import Supply, TokenLimit

FIRST_CONTACT_S = 8.0
log = structlog.get_logger("producer")


def run(loaded: Loaded, *, fresh: bool = False, force: bool = False) -> int:
    """Run the producer until it is done or told to stop.

    Args:
        loaded: the configuration.
        fresh: remove the run of this name first.
        force: also where somebody works on it.

    Raises:
        ConfigError: the configuration or a row is wrong.
        RunMismatch: the run's name is taken.
        ConnectionError: Redis cannot be reached.
    """
    settings = loaded.settings
    pace_of(settings)  # before `--fresh` removes anything
    with ExitStack() as stack:
        source = open_rows(settings)
        stack.callback(source.close)
        supply = make_supply(settings, source)
        drawn = None
        if settings.producer.progress and sys.stderr.isatty():
            drawn = stack.enter_context(bar(supply.order.total))
        configure(settings.telemetry.log_format, settings.telemetry.log_level)
        bind_process(run=settings.run.name)
        supply.check()
        if fresh:
            begin_fresh(settings, force=force)
        asyncio.run(produce(settings, source, supply, drawn))
    return 0


def make_supply(settings: Settings, source: AnyRows) -> Supply:
    """Return what says which prompt belongs to which group index."""
    producer = settings.producer
    rules = RowRules(
        {name: env.n_samples_per_prompt for name, env in settings.envs().items()},
        producer.keys,
        allow_off_distribution=settings.sampling.allow_off_distribution,
        timeout_s=settings.aggregator.group_timeout_s,
        max_record_bytes=settings.worker.max_body_bytes,
    )
    order = order_of(settings, source)
    limit = None
    if producer.max_prompt_tokens is not None:
        limit = TokenLimit(settings.model.tokenizer, producer.max_prompt_tokens)
    skips = producer.on_bad_row == "skip"
    return Supply(
        source,
        order,
        rules,
        checked=checked_of(source),
        skip_bad_rows=skips,
        token_limit=limit,
    )


async def produce(settings: Settings, source: AnyRows, supply: Supply, drawn: Any) -> None:
    """Open the run and produce, until done or SIGTERM."""
    redis = settings.redis
    fingerprint = fingerprint_of(settings, source)
    async with AsyncExitStack() as stack:
        queue = Queue.connect(
            settings.redis_url(),
            settings.run.name,
            ca=None if redis.ca is None else str(redis.ca),
            connect_timeout_s=redis.connect_timeout_s,
        )
        stack.push_async_callback(queue.aclose)
        gate = Gate(
            queue,
            opening(settings, fingerprint, supply.order.total),
            fingerprint,
            supply,
            name=f"{socket.gethostname()}:{os.getpid()}",
            lease_s=settings.worker.lease_s,
            stay=settings.producer.stay,
        )
        check_startable(await first_contact(gate), settings.run.name)
        stack.push_async_callback(gate.leave)
        await say_problems(queue)
        if isinstance(source, Mixture):
            log.info("mixture", shares={env: round(x, 6) for env, x in source.shares.items()})
        pace = say_pace(settings, groups=supply.order.total, rows=len(source))
        beside = [asyncio.create_task(Heartbeat(settings.telemetry.heartbeat_file).run())]
        if settings.producer.progress:
            beside.append(asyncio.create_task(follow(gate, queue, pace.capacity, drawn)))
        await until_stopped(asyncio.create_task(gate.run()), beside)


def say_pace(settings: Settings, **about: int) -> Pace:
    """Log once how many groups may be live and why, and return it."""
    pace = pace_of(settings)
    log.info(
        "run_open",
        **about,
        capacity=pace.capacity,
        capacity_by=pace.bound_by,
        max_staleness=pace.max_staleness,
        on_stale=pace.on_stale,
        weights_mode=settings.weights.mode,
    )
    if pace.is_unpaced:
        log.warning(
            "staleness_unpaced",
            capacity=pace.capacity,
            max_staleness=pace.max_staleness,
            why="groups that wait for the trainer get older with every step, and are evicted when "
            "they are too old: work for nothing",
            action="set weights.groups_per_step to the size of a batch",
        )
    return pace


async def say_problems(queue: Queue) -> None:
    """Log what about the server is to be mended, a line each."""
    for found in await problems_of(queue):
        log.warning(
            "redis_unfit", check=found.check, what=found.what, why=found.why, action=found.do
        )


async def first_contact(gate: Gate) -> str:
    """Open the run, or say within ten seconds that Redis is not there."""
    try:
        async with asyncio.timeout(FIRST_CONTACT_S):
            return await gate.open()
    except TimeoutError:
        raise ConnectionError(
            f"Redis did not answer within {FIRST_CONTACT_S:.0f} s; check redis.url"
        ) from None


def check_startable(state: str, run: str) -> None:
    """Refuse a run that is over: whoever starts a producer wants groups.

    Raises:
        RunMismatch: it ended.
    """
    if state == "ended":
        raise RunMismatch(
            f"run {run!r} has ended; its counters were left as they are: take another run.name, "
            f"or begin anew: python -m producer --fresh (or: rollstream runs --remove {run})"
        )


async def until_stopped(work: asyncio.Task[None], beside: list[asyncio.Task[None]]) -> None:
    """Wait for `work` or for SIGTERM, whichever comes first; nothing is lost by either."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    tasks: list[asyncio.Task[Any]] = [work, stopped, *beside]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if work.done() and not work.cancelled():
        work.result()
    for task in done:
        if task is stopped:
            log.info("stopping", why="signal")
        elif not task.cancelled():
            task.result()
