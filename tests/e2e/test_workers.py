"""Worker processes that are killed, frozen, stopped and replaced while they work."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollstream.queue import calls
from tests.integration.worker.parts import Run
from worker.bounded import THREADS
from worker.process.watchdog import EXIT_STALLED

from .fleet import a_fleet, all_ended, until
from .scene import LEASE_S, N, enqueue, options, run, sim

__all__ = ["options", "run", "sim"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def starts(journal: Path) -> Counter[str]:
    """Return how often each member was begun."""
    lines = journal.read_text().split("\n") if journal.exists() else []
    return Counter(line.split()[1] for line in lines if line.startswith("start "))


async def clock_ms(run: Run) -> int:
    info = await run.queue.info()
    assert info is not None
    return info.clock_ms


async def leases(run: Run) -> list[str]:
    """Return the ids of all leases."""
    found = await run.queue.client.zrange(f"{run.queue.prefix}l", 0, -1)
    return [name.decode() for name in found]


def holders(lease_ids: list[str]) -> set[str]:
    """Return the incarnations that hold leases."""
    return {lease.split(":")[2].partition("-")[0] for lease in lease_ids}


async def charged(run: Run) -> dict[str, int]:
    """Return what was charged to members, and what failed."""
    counters = await run.queue.counters()
    names = ("attempts", "crashes", "member_failed")
    return {name: count for name, count in counters.items() if name.startswith(names)}


async def test_groups_complete_within_two_leases_of_a_sigkill_at_any_moment(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    dice, rounds = random.Random(5), 6
    async with a_fleet(tmp_path, 2, options) as fleet:
        for number in range(rounds):
            for g in range(4):
                await enqueue(run, 4 * number + g)
            await asyncio.sleep(dice.uniform(0.0, 0.3))
            killed = await clock_ms(run)
            fleet.running[0].process.kill()
            await all_ended(run, 4 * (number + 1), 0, fleet, timeout_s=40)
            # What the survivor holds takes one rollout, what the dead one held one lease more.
            assert await clock_ms(run) - killed <= 2000 * LEASE_S
            await until(lambda number=number: len(fleet.ends) > number, fleet, what="a restart")
            await fleet.ready()
    assert await run.counter("completed") == rounds * 4 * N
    assert "attempts" not in await charged(run)


async def test_a_rolling_restart_of_all_workers_loses_nothing_and_charges_nobody(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    enqueued = 0
    stopping = asyncio.Event()

    async def feed() -> None:
        """Keep both workers busy, however long their restarts take."""
        nonlocal enqueued
        while not stopping.is_set():
            while (await run.queue.depths())["q"] < 8 * N:
                await enqueue(run, enqueued, takes_s=0.3, journal=str(journal))
                enqueued += 1
            await asyncio.sleep(0.1)

    async with a_fleet(tmp_path, 2, options) as fleet:
        feeding = asyncio.create_task(feed())
        for place in (0, 1):
            await until(lambda: leases(run), fleet, what="leases")
            fleet.running[place].process.send_signal(signal.SIGTERM)
            await until(lambda p=place: len(fleet.ends) > p, fleet, what="an end")
            await fleet.ready()
        stopping.set()
        await feeding
        await all_ended(run, enqueued, 0, fleet, timeout_s=60)
        assert fleet.ends == [0, 0]
    assert await charged(run) == {}
    counters = await run.queue.counters()
    assert counters["completed"] == enqueued * N
    # Every member ran once, and once more where it was given back.
    assert sum(starts(journal).values()) <= enqueued * N + counters["given_back"]


async def test_a_long_rollout_whose_worker_dies_early_is_leased_again_within_a_lease(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    async with a_fleet(tmp_path, 2, options) as fleet:
        await enqueue(run, 0, takes_s=1800)
        await until(lambda: _all_leased(run), fleet, what="leases")
        (dead,) = holders(await leases(run))
        ready = {e["incarnation"]: one for one in fleet.all for e in one.events()
                 if e["event"] == "worker_ready"}  # fmt: skip
        died = await clock_ms(run)
        ready[dead].process.kill()

        async def taken_over() -> bool:
            return await _all_leased(run) and dead not in holders(await leases(run))

        await until(taken_over, fleet, timeout_s=30, what="a takeover")
        # A lease from the last beat on, seen by the next sweep.
        assert await clock_ms(run) - died <= 1000 * LEASE_S * 5 / 3
        assert (await charged(run)) == {"crashes": N}
        await run.audit()


async def _all_leased(run: Run) -> bool:
    return len(await leases(run)) == N


async def test_a_rollout_of_twenty_leases_is_one_attempt_while_its_worker_beats(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    async with a_fleet(tmp_path, 2, options) as fleet:
        await enqueue(run, 0, takes_s=20 * LEASE_S, journal=str(journal))
        await all_ended(run, 1, 0, fleet, timeout_s=60)
    assert starts(journal) == {f"0:{i}": 1 for i in range(N)}
    assert await charged(run) == {}


async def test_late_results_of_a_worker_that_was_frozen_are_fenced_and_the_group_lands_once(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    journal, release = tmp_path / "journal", tmp_path / "release"
    async with a_fleet(tmp_path, 1, options) as fleet:
        deed = {"deed": "wait_for", "members": list(range(N)), "file": str(release)}
        await enqueue(run, 0, journal=str(journal), **deed)
        await until(lambda: _all_leased(run), fleet, what="leases")
        frozen = fleet.running[0].process
        os.kill(frozen.pid, signal.SIGSTOP)
        release.touch()
        async with a_fleet(tmp_path / "second", 1, options) as second:
            await all_ended(run, 1, 0, second, timeout_s=40)
        bodies = (await run.group(0, N)).bodies
        os.kill(frozen.pid, signal.SIGCONT)

        # It goes on: frozen for longer than the watchdog's limit, and works again.
        await enqueue(run, 1)
        await all_ended(run, 2, 0, fleet, timeout_s=40)
        assert fleet.ends == []
    assert (await run.group(0, N)).bodies == bodies
    assert await run.counter("completed") == 2 * N
    assert await charged(run) == {"crashes": N}


@pytest.mark.parametrize("min_samples", [N - 1, N])
async def test_a_group_with_a_hanging_member_ends_at_its_deadline(
    run: Run, options: dict[str, str], tmp_path: Path, min_samples: int
) -> None:
    delivered = min_samples < N
    given = options | {"aggregator.min_samples": str(min_samples)}
    async with a_fleet(tmp_path, 1, given) as fleet:
        await run.enqueue(0, N, timeout_ms=2000, metadata={"deed": "hang", "members": [1]})
        await enqueue(run, 1)
        await all_ended(run, 2 if delivered else 1, 0 if delivered else 1, fleet, timeout_s=40)
        assert fleet.ends == []
    if delivered:
        errors = (await run.group(0, N)).errors
    else:
        assert await run.drops() == {"deadline": 1}
        errors = (await run.queue.past())[0]["errors"]
    assert errors == [None, ("deadline", "the deadline of the group passed"), None, None]
    assert await charged(run) == {"member_failed:deadline": 1}


async def test_a_pause_longer_than_the_deadline_and_the_lease_ends_nothing(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    journal, release = tmp_path / "journal", tmp_path / "release"
    async with a_fleet(tmp_path, 1, options) as fleet:
        deed = {"deed": "wait_for", "members": [1], "file": str(release)}
        metadata: dict[str, Any] = deed | {"journal": str(journal)}
        await run.enqueue(0, N, timeout_ms=3000, metadata=metadata)
        await until(lambda: journal.exists() and sum(starts(journal).values()) == N, fleet,
                    what="members at work")  # fmt: skip
        await run.queue.call(calls.pause())
        paused = await clock_ms(run)

        async def long_enough() -> bool:
            return await clock_ms(run) - paused >= 3000 + 2000 * LEASE_S

        await until(long_enough, fleet, timeout_s=40, what="a long pause")
        await run.queue.call(calls.resume())
        release.touch()
        await all_ended(run, 1, 0, fleet, timeout_s=40)
    assert starts(journal) == {f"0:{i}": 1 for i in range(N)}
    assert await charged(run) == {}


async def test_a_worker_whose_memory_is_used_up_gives_back_and_ends_to_be_started_again(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    async with a_fleet(tmp_path, 1, options) as fleet:
        await enqueue(run, 0, deed="eat_to_limit", members=[1])
        await enqueue(run, 1, takes_s=3)
        await all_ended(run, 1, 1, fleet, timeout_s=100)
        # How many of the attempts fell into one process depends on who was faster.
        assert set(fleet.ends) == {EXIT_STALLED}, fleet.logs()
    (drop,) = await run.queue.past()
    reason, text = drop["errors"][1]
    assert drop["group_index"] == "0"
    assert (reason, "MemoryError" in text) == ("env_error", True), drop["errors"]
    # Its neighbours in the process were given back by what was kept for that.
    assert set(await charged(run)) == {"attempts", "member_failed:env_error"}


async def test_a_worker_whose_threads_all_hang_says_so_and_ends_to_be_started_again(
    run: Run, options: dict[str, str], tmp_path: Path
) -> None:
    given = options | {
        "worker.concurrency": str(2 * THREADS.limit),
        "reward.kind": "tests.e2e.poisons:hanging_reward",
        "reward.timeout_s": "0.2",
    }
    async with a_fleet(tmp_path, 1, given) as fleet:
        for g in range(THREADS.limit // N + 1):
            await enqueue(run, g, hang=True)
        await until(lambda: fleet.ends, fleet, timeout_s=60, what="an end")
        assert fleet.ends == [EXIT_STALLED]
        said = fleet.events("user_functions_hang")
        assert said[-1]["limit"] == THREADS.limit
        assert said[-1]["functions"] == ["hanging_reward"]
        assert "threads are held by functions" in fleet.events("worker_used_up")[0]["reason"]
        counters = await run.queue.counters()
        assert "crashes" not in counters
