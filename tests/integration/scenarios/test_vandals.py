"""Somebody damages the run while producer, workers, aggregators and trainer are at work.

Every group is trained once all the same, or the damage has a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from examples.devserver import DevServer
from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.integration.producer.scene import producing, rows_file, settings_of
from tests.integration.worker.parts import Run, wait_until
from tests.unit.worker.works import plain
from worker.types import GenerateInput, GenerateOutput

ROWS = 80
RUN = "vandals"
KEY = f"rs:{{{RUN}}}:"
Vandal = Callable[[redis.Redis, random.Random], object]


def empty_the_server(client: redis.Redis, rng: random.Random) -> None:
    del rng
    client.flushall()


def delete_groups(client: redis.Redis, rng: random.Random) -> None:
    found = list(client.scan_iter(match=f"{KEY}g:*"))
    for name in rng.sample(found, min(3, len(found))):
        client.delete(name)


def delete_results(client: redis.Redis, rng: random.Random) -> None:
    found = list(client.scan_iter(match=f"{KEY}b:*"))
    for name in rng.sample(found, min(3, len(found))):
        client.delete(name)


def trim_streams(client: redis.Redis, rng: random.Random) -> None:
    client.xtrim(KEY + rng.choice(["full", "ready"]), maxlen=0)


def delete_entries(client: redis.Redis, rng: random.Random) -> None:
    stream = KEY + rng.choice(["full", "ready"])
    for name, _ in client.xrange(stream, count=2):
        client.xdel(stream, name)


def delete_streams(client: redis.Redis, rng: random.Random) -> None:
    client.delete(KEY + rng.choice(["full", "ready"]))


def destroy_consumer_groups(client: redis.Redis, rng: random.Random) -> None:
    stream, group = rng.choice([("full", "aggregators"), ("ready", "trainer")])
    with contextlib.suppress(redis.ResponseError):
        client.xgroup_destroy(KEY + stream, group)


def write_foreign_entries(client: redis.Redis, rng: random.Random) -> None:
    for stream in ("full", "ready"):
        client.xadd(KEY + stream, {"g": str(rng.randrange(ROWS)), "n": "1"})
        client.xadd(KEY + stream, {"nothing": "of ours"})


def write_foreign_members(client: redis.Redis, rng: random.Random) -> None:
    for members in ("q", "s", "d", "l"):
        client.zadd(KEY + members, {f"garbage {rng.random()}": -1, f"{10**6}:0": 0})


VANDALS: list[Vandal] = [
    empty_the_server, delete_groups, delete_results, trim_streams, delete_entries, delete_streams,
    destroy_consumer_groups, write_foreign_entries, write_foreign_members,
]  # fmt: skip


async def slowly(given: GenerateInput) -> GenerateOutput:
    await asyncio.sleep(random.uniform(0, 0.05))
    return await plain(given)


def train(url: str, trained: list[tuple[int, int]]) -> None:
    with GroupStream.connect(url, run=RUN, connect_timeout_s=10) as stream:
        for batch in stream.batches(groups=4, timeout_s=45):
            trained += [(group.group_index, len(group.samples)) for group in batch.groups]
            batch.ack()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("vandal", VANDALS)
async def test_every_group_is_trained_once_and_whole_although_somebody_may(
    vandal: Vandal, tmp_path: Path
) -> None:
    rng, trained = random.Random(3), list[tuple[int, int]]()
    with DevServer() as server, redis.Redis.from_url(server.url) as client:
        settings = settings_of(
            server.url, RUN, rows_file(tmp_path, ROWS), "--producer.capacity_groups=16",
            "--worker.lease_s=0.6",
        )  # fmt: skip
        run = Run(Queue.connect(server.url, RUN), server.url)
        async with contextlib.aclosing(run), producing(settings):
            for _ in range(2):
                run.worker(generate=slowly, slots=8, claim_idle_s=0.5).start()
            training = asyncio.create_task(asyncio.to_thread(train, server.url, trained))
            for _ in range(6):
                await asyncio.sleep(0.15)
                vandal(client, rng)
            await training
            assert {size for _, size in trained} == {2}
            lost = await unreadable(run) if vandal is delete_results else set()
            assert Counter(group for group, _ in trained) == Counter(set(range(ROWS)) - lost)
            # What is none of ours stays in a stream, and is told; elsewhere it goes when it is met.
            told = "groups account for 0" if vandal is write_foreign_entries else None
            await wait_until(lambda: is_in_order(run, told), what="a run in order")


async def is_in_order(run: Run, told: str | None) -> bool:
    answer = await run.queue.call(calls.audit(deep=True))
    return all(told is not None and told in problem for problem in answer.problems)


async def unreadable(run: Run) -> set[int]:
    """Groups that were dropped because a member's result is gone: its tokens exist nowhere else."""
    past = await run.queue.past()
    return {int(row["group_index"]) for row in past if row["reason"] == DropReason.CUSTOM}
