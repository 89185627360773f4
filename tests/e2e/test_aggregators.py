"""Aggregators as processes: killed, frozen, blocked and many, over filters that are the cause."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.parts import Run
from worker.process.watchdog import EXIT_STALLED

from .fleet import a_fleet, all_ended, until
from .scene import N, run

__all__ = ["run"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
POISON, GROUPS = 2, 6


def aggregators(run: Run, **changes: str) -> dict[str, str]:
    """Return the options of a process that only judges."""
    known = {
        "redis.url": run.url,
        "run.name": run.queue.run,
        "worker.role": "aggregator",
        "worker.stall_limit_s": "1.5",
        "aggregator.filters": "tests.e2e.poisons:evil_filter",
        "aggregator.filter_timeout_s": "1.5",
    }
    return known | {key.replace("__", "."): value for key, value in changes.items()}


async def make_full(run: Run, journal: Path, **deed: Any) -> None:
    """Make six groups full; the third one's row says what its filter does."""
    for g in range(GROUPS):
        metadata = {"journal": str(journal)} | (deed if g == POISON else {})
        await run.enqueue(g, N, metadata=metadata)
    rollouts = run.worker(slots=64)
    rollouts.start(aggregate=False)
    while (await run.queue.depths())["full"] < GROUPS:
        await asyncio.sleep(0.01)


def judged(journal: Path) -> Counter[int]:
    """Return how often each group's filter was begun."""
    lines = journal.read_text().split("\n") if journal.exists() else []
    return Counter(int(line.split()[1]) for line in lines if line.startswith("judge "))


OTHERS_ONCE = {g: 1 for g in range(GROUPS) if g != POISON}


@pytest.mark.parametrize(
    ("deed", "filters", "code", "times", "detail"),
    [
        ("kill", "evil_filter", -9, 3, "3 aggregators had it and died or stood still"),
        ("burn", "evil_async_filter", EXIT_STALLED, 3, "3 aggregators had it and died"),
        ("raise", "evil_filter", None, 3, "KeyError: 'nope'"),
        ("hang", "evil_filter", None, 1, "no answer within 1.5 s"),
        ("burn", "evil_filter", None, 1, "no answer within 1.5 s"),
    ],
)
async def test_a_group_whose_filter_misbehaves_ends_alone_as_filter_error(
    run: Run, tmp_path: Path, deed: str, filters: str, code: int | None, times: int, detail: str
) -> None:
    journal = tmp_path / "journal"
    await make_full(run, journal, filter=deed)
    options = aggregators(run, aggregator__filters=f"tests.e2e.poisons:{filters}")
    async with a_fleet(tmp_path, 2, options) as fleet:
        await all_ended(run, GROUPS - 1, 1, fleet, timeout_s=90)
        assert set(fleet.ends) == (set() if code is None else {code})
    assert await run.drops() == {"filter_error": 1}
    (drop,) = await run.queue.past()
    assert drop["group_index"] == str(POISON)
    assert detail in drop["detail"]
    counts = judged(journal)
    assert counts.pop(POISON) == times
    # A group that was in hand when its aggregator died may have been begun once before.
    assert set(counts) == set(OTHERS_ONCE)
    assert max(counts.values()) <= (1 if code is None else 2)


async def test_a_filter_error_ends_the_run_where_that_is_configured(
    run: Run, tmp_path: Path
) -> None:
    await make_full(run, tmp_path / "journal", filter="raise")
    options = aggregators(run, aggregator__on_filter_error="stop")
    async with a_fleet(tmp_path, 1, options) as fleet:

        async def failed() -> bool:
            info = await run.queue.info()
            return info is not None and info.state == "failed"

        await until(failed, fleet, timeout_s=60, what="a failed run")
    info = await run.queue.info()
    assert info is not None
    assert "filter_error" in info.error


async def test_a_killed_aggregators_groups_are_taken_over_within_two_leases_and_judged_once(
    run: Run, tmp_path: Path
) -> None:
    journal, release = tmp_path / "journal", tmp_path / "release"
    await make_full(run, journal, filter="wait_for", file=str(release))
    async with a_fleet(tmp_path, 1, aggregators(run, aggregator__filter_timeout_s="60")) as fleet:
        await until(lambda: judged(journal)[POISON] == 1, fleet, what="a judgement under way")
        fleet.running[0].process.kill()
        release.touch()
        await all_ended(run, GROUPS, 0, fleet, timeout_s=60)
        assert fleet.ends == [-9]
    assert judged(journal)[POISON] == 2
    assert (await run.queue.depths())["full"] == 0


async def test_a_frozen_aggregator_that_wakes_up_late_changes_nothing_and_goes_on(
    run: Run, tmp_path: Path
) -> None:
    journal, release = tmp_path / "journal", tmp_path / "release"
    await make_full(run, journal, filter="wait_for", file=str(release))
    options = aggregators(run, aggregator__filter_timeout_s="60")
    async with a_fleet(tmp_path, 1, options) as fleet:
        frozen = fleet.running[0]
        await until(lambda: judged(journal)[POISON] == 1, fleet, what="a judgement under way")
        frozen.process.send_signal(signal.SIGSTOP)
        release.touch()
        async with a_fleet(tmp_path / "second", 1, options) as second:
            # Longer than the idle time, the watchdog's limit and a lease.
            await all_ended(run, GROUPS, 0, second, timeout_s=60)
            assert judged(journal)[POISON] == 2
            entries = await run.queue.client.xrange(f"{run.queue.prefix}ready")
        frozen.process.send_signal(signal.SIGCONT)

        await run.enqueue(100, N, metadata={"journal": str(journal)})
        await all_ended(run, GROUPS + 1, 0, fleet, timeout_s=60)
        assert fleet.ends == []
        again = await run.queue.client.xrange(f"{run.queue.prefix}ready")
    assert again[: len(entries)] == entries
    assert len(again) == len(entries) + 1
    assert await run.drops() == {}


async def test_three_aggregators_judge_every_group_once(run: Run, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with a_fleet(tmp_path, 3, aggregators(run)) as fleet:
        rollouts = run.worker(slots=64)
        for g in range(60):
            await run.enqueue(g, N, metadata={"journal": str(journal)})
        rollouts.start(aggregate=False)
        await all_ended(run, 60, 0, fleet, timeout_s=60)
    assert judged(journal) == dict.fromkeys(range(60), 1)
    assert await run.counter("completed") == 60 * N
