"""What long-lived producers, workers, aggregators and trainers remember has a bound."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from rollstream.async_stream import AsyncGroupStream
from rollstream.queue.queue import Queue
from tests.integration.bounds.weigh import num_items
from tests.integration.producer.scene import producing, rows_file, settings_of
from tests.integration.worker.parts import Parts, wait_until


async def test_no_process_remembers_ended_groups(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 420)
    settings = settings_of(
        valkey_url, run_name, path, "--producer.capacity_groups=16", "--reward.kind=none"
    )
    queue = Queue.connect(valkey_url, run_name)
    async with producing(settings) as producer:
        parts = Parts(queue, filters=["reward_range(0, 1)"])
        parts.start()
        async with await AsyncGroupStream.connect(valkey_url, run=run_name) as stream:
            weights: list[dict[str, int]] = []
            async for batch in stream.batches(groups=4, timeout_s=45):
                await stream.ack(batch)
                if batch.number in (5, 100):
                    await wait_until(lambda: parts.shift.num_busy == 0)
                    producer.queue.trips.clear()  # of the test
                    parts.metrics.flush()  # once a second in service
                    weights.append(
                        {
                            "trainer": num_items(stream),
                            "worker": num_items(parts.shift),
                            "aggregator": num_items(parts.aggregator),
                            "heart": num_items(parts.heart),
                            "producer": num_items(producer.gate),
                        }
                    )
        await parts.stop()
    await queue.aclose()
    early, late = weights
    for name, count in late.items():
        assert count <= early[name] + 40, (name, early, late)


def test_weighing_finds_what_is_remembered_wherever_it_lies() -> None:
    class Keeper:
        def __init__(self) -> None:
            self.deep: dict[str, Any] = {"a": [deque(range(100))]}

    Keeper.__module__ = "rollstream.tests"
    keeper = Keeper()
    before = num_items(keeper)
    assert before >= 102
    keeper.deep["b"] = set(range(50))
    assert num_items(keeper) == before + 51


def test_weighing_ends_on_objects_that_refer_to_each_other() -> None:
    first: list[Any] = []
    first.append(first)
    assert num_items(first) == 1
