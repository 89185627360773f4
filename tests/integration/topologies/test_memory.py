"""Full memory under `noeviction`: said once, nothing is corrupted, and it goes on by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import DevServer
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.integration.producer.scene import rows_file
from tests.integration.worker.parts import Parts
from tests.integration.worker.processes import start

from .servers import told

ROWS = 40
FILLER = 8 << 20


@pytest.fixture
def server() -> Iterator[DevServer]:
    with DevServer(aof=True) as server:
        yield server


def events_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]


@pytest.mark.slow
async def test_a_full_server_is_one_alarm_and_what_runs_ends_control_works_and_it_goes_on(
    server: DevServer, run_name: str, tmp_path: Path
) -> None:
    """A real producer process, a worker's parts and a trainer, on a server that fills up."""
    log = tmp_path / "producer.log"
    with Backstage(server.url, run_name) as backstage, told(server.port) as admin:
        queue = backstage.queue
        producer = start(
            "producer", "--redis.url", server.url, "--run.name", run_name,
            "--producer.source", f"jsonl:{rows_file(tmp_path, ROWS)}",
            "--producer.n_samples_per_prompt", "2", "--producer.capacity_groups", "8",
            log=log,
        )  # fmt: skip
        try:
            wait_until(lambda: queue.depths()["live"] == 8, 15)
            # Somebody else's data fills the server: now nothing new fits.
            admin.set("filler", b"x" * FILLER)
            admin.config_set("maxmemory", FILLER)

            parts = Parts(Queue.connect(server.url, run_name))
            parts.start()
            with GroupStream.connect(server.url, run=run_name, connect_timeout_s=5) as stream:
                trained = await asyncio.to_thread(self_trained, stream, 8)
                assert sorted(trained) == list(range(8))
                await asyncio.to_thread(wait_until, lambda: named(log, "redis_memory_full"), 10)
                assert queue.depths()["live"] == 0

                # Control is not refused, and every word of it is heard.
                assert queue.call(calls.pause()).state == "paused"
                assert queue.call(calls.resume()).state == "running"
                assert queue.call(calls.set_budget("cap", 6)).state == "running"
                stream.set_weight_version(1)
                assert queue.call(calls.sweep()).lost is False
                assert queue.presence()["producers"] == 1
                assert queue.call(calls.audit(deep=True)).problems == []
                offers = queue.client.info("commandstats")["cmdstat_evalsha"]["calls"]
                wait_until(  # it goes on trying, and says nothing more
                    lambda: (
                        queue.client.info("commandstats")["cmdstat_evalsha"]["calls"] > offers + 20
                    ),
                    15,
                )
                assert len(named(log, "redis_memory_full")) == 1

                admin.delete("filler")
                trained += await asyncio.to_thread(self_trained, stream, ROWS - 8)
                assert sorted(trained) == list(range(ROWS))
            (alarm,) = named(log, "redis_memory_full")
            assert alarm["level"] == "error"
            assert alarm["used_bytes"] > alarm["max_bytes"] == FILLER
            assert "maxmemory" in alarm["action"]
            (back,) = named(log, "redis_memory_back")
            assert back["full_s"] > 0
            counters = queue.counters()
            assert (counters["enqueued"], counters["acked"]) == (ROWS, ROWS)
            assert counters.get("attempts", 0) == counters.get("crashes", 0) == 0
            assert queue.call(calls.audit(deep=True)).problems == []
            await parts.stop()
            await parts.queue.aclose()
        finally:
            producer.kill()
            producer.wait()


def named(log: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in events_of(log) if line["event"] == event]


def self_trained(stream: GroupStream, groups: int) -> list[int]:
    """Train so many groups, one a batch."""
    trained: list[int] = []
    while len(trained) < groups:
        batch = stream.next_batch(1, 15)
        assert batch is not None
        trained += batch.group_indexes
        batch.ack()
    return trained


def test_a_full_server_can_be_aborted_and_every_key_of_its_groups_goes(
    server: DevServer, run_name: str
) -> None:
    with Backstage(server.url, run_name) as backstage, told(server.port) as admin:
        backstage.open().finish(0, 1)
        backstage.enqueue(2, 3)
        leases = backstage.lease(2)
        admin.config_set("maxmemory", 1)
        assert backstage.queue.call(calls.abort_run("full")) == "aborting"
        while backstage.queue.call(calls.sweep()).more:
            pass
        info = backstage.queue.info()
        assert info is not None
        assert info.state == "ended"
        lost = backstage.queue.call(calls.beat(backstage.worker, [lease.id for lease in leases]))
        assert sorted(lost.lost) == sorted(lease.id for lease in leases)
        assert backstage.queue.counters()["dropped:run_aborted"] == 4
        assert backstage.queue.call(calls.audit(deep=True)).problems == []
        left = {name.decode().rsplit(":", 1)[1] for name in dict(backstage.keys())}
        assert not [name for name in left if name.isdigit()]
