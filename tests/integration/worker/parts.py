"""A worker's parts in this process, over a real server: what a process has, without engines.

Owns the putting together. Generate functions are the tests' own, so that a test decides when and
how each member ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from rollstream.group import EnvRule
from rollstream.link import Link
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.queue.reads import StoredGroup
from rollstream.wire import encode_prompt
from tests.builders import a_prompt, budgets
from tests.unit.worker.works import a_book, a_rollout, an_env, answer, plain
from worker.aggregate.aggregator import Aggregator, AggregatorLimits
from worker.aggregate.group_reward import GroupReward
from worker.aggregate.judge import EnvJudge
from worker.aggregate.loader import LoadedFilter, load_filters
from worker.members.shift import Shift, ShiftLimits, new_incarnation
from worker.members.view import RunView
from worker.members.work import Cause
from worker.process.heart import Heart, Role
from worker.telemetry.metrics import Metrics
from worker.types import GenerateInput, GenerateOutput

POLL_S = 0.005


async def wait_until(
    condition: Callable[[], Any],
    *,
    timeout_s: float = 45.0,
    what: str = "it",
    tell: Callable[[], str] = str,
) -> Any:
    """Return what `condition` (sync or async) answers once that is true; `tell` helps where not.

    Raises:
        AssertionError: it never was.
    """
    limit = time.monotonic() + timeout_s
    while True:
        answered = condition()
        if asyncio.iscoroutine(answered):
            answered = await answered
        if answered:
            return answered
        assert time.monotonic() < limit, f"{what}: not within {timeout_s} s\n{tell()}"
        await asyncio.sleep(POLL_S)


class Gate:
    """A generate function whose members wait until the test lets them end."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self._ends: dict[tuple[int, int], asyncio.Future[Any]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )

    async def __call__(self, given: GenerateInput) -> GenerateOutput:
        sample = given.sample
        assert sample.group_index is not None
        key = (sample.group_index, sample.member)
        self.started.append(key)
        error = await self._ends[key]
        if error is not None:
            self._ends.pop(key)
            raise error
        return GenerateOutput(answer(given, reward=float(sample.member % 2)))

    def end(self, group_index: int, *members: int, error: Exception | None = None) -> None:
        """Let members end, by an answer or by an error."""
        for member in members:
            self._ends[group_index, member].set_result(error)


class Engines:
    """Says whether engines are up."""

    up = True

    def healthy(self) -> bool:
        """Return what the test set."""
        return self.up


class Parts:
    """One worker's parts; `start` runs them until the context ends."""

    def __init__(
        self,
        queue: Queue,
        *,
        generate: Any = plain,
        filters: Sequence[str | LoadedFilter] = ("no_aborted",),
        slots: int = 8,
        min_samples: int | None = None,
        claim_idle_s: float | None = 30.0,
        filter_timeout_s: float = 10.0,
        stop_on_filter_error: bool = False,
        fail_after_groups: int = 20,
        sample_timeout_s: float = 60.0,
        retry_delay_s: float = 0.0,
        whole_groups: bool = False,
        scorer: Any = None,
        render: Any = None,
        rule: EnvRule = EnvRule(),  # noqa: B008 - frozen
        group_reward: GroupReward | None = None,
        engine: Any = None,
        renderer: Any = None,
        tools: Any = None,
    ) -> None:
        self.queue, self.link, self.view, self.engines = queue, Link(), RunView(), Engines()
        self.metrics = Metrics(version="0", wire=1, envs=["default"])
        self.name = new_incarnation()
        env = an_env(generate, scorer=scorer, tools=tools or {})
        book = a_book(env) if render is None else a_book(env, render)
        self.shift = Shift(
            queue,
            self.link,
            self.view,
            name=self.name,
            rollout=a_rollout(
                book, version=lambda: self.view.version, engine=engine, renderer=renderer
            ),
            book=book,
            health=self.engines,
            limits=ShiftLimits(
                slots, sample_timeout_s, retry_delay_s, fail_after_groups, whole_groups
            ),
            metrics=self.metrics,
        )
        loaded = [f if isinstance(f, LoadedFilter) else load_filters([f])[0] for f in filters]
        self.aggregator = Aggregator(
            queue,
            self.link,
            {
                "default": EnvJudge(
                    "default", rule, loaded, min_samples, filter_timeout_s, group_reward
                )
            },
            metrics=self.metrics,
            limits=AggregatorLimits(claim_idle_s, stop_on_filter_error),
            lease_s=lambda: self.view.lease_s,
        )
        self.heart = Heart(
            queue,
            self.link,
            self.view,
            name=self.name,
            role=Role.ALL,
            held=self.shift.held,
            lost=self.shift.lost,
            metrics=self.metrics,
        )
        self.working: asyncio.Task[str] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, *, aggregate: bool = True, beat: bool = True) -> None:
        """Run the parts."""
        parts = [self.shift.submitter.run(), self.shift.watch()]
        if beat:
            parts.append(self.heart.run())
        if aggregate:
            parts.append(self.aggregator.run())
        self._tasks = [asyncio.create_task(part) for part in parts]
        self.working = asyncio.create_task(self.shift.run())
        self._tasks.append(self.working)

    async def stop(self) -> None:
        """End all parts as a crash would: nothing is given back."""
        for task in self._tasks:
            task.cancel()
        self.shift.cancel_all(Cause.LOST)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in self._tasks:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # it has one


class Run:
    """One run on a real server, with the producer's and trainer's sides by hand."""

    def __init__(self, queue: Queue, url: str) -> None:
        self.queue, self.url = queue, url
        self._parts: list[Parts] = []

    async def open(self, **changes: Any) -> None:
        """Open the run as a producer does."""
        await self.queue.call(calls.open_run(1, "f", budgets(**changes)))

    async def enqueue(
        self, group_index: int, n: int, *, timeout_ms: int = 0, **fields: Any
    ) -> None:
        """Enqueue one group."""
        record = encode_prompt(a_prompt(group_index, n, **fields))
        answered = await self.queue.call(
            calls.enqueue(group_index, n, record, timeout_ms=timeout_ms)
        )
        assert answered == "new"

    def worker(self, **options: Any) -> Parts:
        """Return a worker's parts, stopped at the end of the test."""
        parts = Parts(self.queue, **options)
        self._parts.append(parts)
        return parts

    async def group(self, group_index: int, n: int) -> StoredGroup:
        """Return a group as it stands."""
        (stored,) = await self.queue.groups([(str(group_index), n)])
        return stored

    async def state_of(self, group_index: int, n: int) -> str:
        """Return a group's state, empty where it is gone."""
        return (await self.group(group_index, n)).state

    async def drops(self) -> dict[str, int]:
        """Return the counts of dropped groups by reason."""
        counters = await self.queue.counters()
        return {
            name.partition(":")[2]: count
            for name, count in counters.items()
            if name.startswith("dropped:")
        }

    async def counter(self, name: str) -> int:
        """Return one of the run's counters."""
        return (await self.queue.counters()).get(name, 0)

    async def ready(self, count: int) -> None:
        """Wait until `count` groups are ready."""

        async def enough() -> bool:
            return (await self.queue.depths())["ready"] >= count

        await wait_until(enough, what=f"{count} ready groups")

    async def audit(self) -> None:
        """Fail unless the accounting identity holds and every member is in one place."""
        answer = await self.queue.call(calls.audit(deep=True))
        assert answer.problems == []

    async def aclose(self) -> None:
        """Stop every worker and close."""
        for parts in self._parts:
            await parts.stop()
        await self.queue.aclose()


@contextlib.asynccontextmanager
async def a_run(url: str, name: str, **changes: Any) -> AsyncIterator[Run]:
    """Yield an opened run."""
    run = Run(Queue.connect(url, name), url)
    try:
        await run.open(**changes)
        yield run
    finally:
        await run.aclose()
