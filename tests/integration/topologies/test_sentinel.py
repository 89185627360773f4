"""A master that dies, freezes and comes back behind three sentinels: everybody goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from examples.devserver import DevServer, free_port
from rollstream.config import load_settings
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.integration.producer.scene import producing, rows_file, settings_of
from tests.integration.worker.parts import Parts
from tests.integration.worker.processes import start

from .cancelled import cancel_calls
from .servers import MASTER, Watched, freeze, is_linked, role_of, thaw, told


@pytest.fixture(scope="module")
def topology() -> Iterator[Watched]:
    with Watched() as watched:
        yield watched


@pytest.fixture
def watched(topology: Watched) -> Watched:
    topology.heal()
    return topology


class Trainer(threading.Thread):
    """A trainer that acks every batch, and remembers what it was given, in order.

    Attributes:
        allowed: it takes no batch beyond so many groups, until more are allowed.
        trained: group indexes.
        error: what ended it, where that was an error.
    """

    def __init__(self, url: str, run: str) -> None:
        super().__init__(daemon=True)
        self.allowed = 0
        self.trained: list[int] = []
        self.error: Exception | None = None
        self.rollbacks = 0
        self._url, self._run_name = url, run

    def run(self) -> None:
        try:
            with GroupStream.connect(self._url, run=self._run_name) as stream:
                for batch in stream.batches(groups=2, timeout_s=30):
                    batch.ack()
                    self.trained += batch.group_indexes
                    wait_until(lambda: len(self.trained) < self.allowed, 60)
                self.rollbacks = int(stream.metrics()["stream/rollbacks"])
        except Exception as error:  # noqa: BLE001 - for the test's own thread
            self.error = error


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops",
    [(10,), pytest.param((10, 30), marks=pytest.mark.timeout(90))],
    ids=["once", "twice"],
)
async def test_producer_worker_and_trainer_go_on_after_the_master_was_killed(
    watched: Watched, run_name: str, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    settings = settings_of(watched.url, run_name, rows_file(tmp_path, 60),
                           "--producer.capacity_groups=6")  # fmt: skip
    trainer = Trainer(watched.url, run_name)
    queue = Queue.connect(watched.url, run_name)
    async with producing(settings) as producer:
        parts = Parts(queue)
        parts.start()
        trainer.start()
        for groups in stops:
            trainer.allowed = groups
            await asyncio.to_thread(wait_until, lambda g=groups: len(trainer.trained) >= g, 15)
            old, trainer.allowed = watched.master, groups + 10
            old.kill()
            await asyncio.to_thread(watched.wait_failed_over, old)
            old.start()  # it comes back, and is made a replica of the new master
            await asyncio.to_thread(wait_until, lambda s=old: role_of(s) == "slave", 15)
            await asyncio.to_thread(wait_until, lambda s=old: is_linked(s), 15)
        trainer.allowed = 100
        await asyncio.to_thread(trainer.join, 15)
        assert trainer.error is None
        assert sorted(trainer.trained) == list(range(60))
        assert len(trainer.trained) == 60
        assert trainer.rollbacks >= len(stops)  # another server each time: it was told again
        assert (await queue.call(calls.audit(deep=True))).problems == []
        assert producer.gate.standing.position == 60
        await parts.stop()
    await queue.aclose()


def test_acks_that_were_not_replicated_are_told_again_and_nothing_is_trained_twice(
    watched: Watched, run_name: str
) -> None:
    old = watched.master
    (replica,) = (server for server in watched.servers if server is not old)
    with Backstage(watched.url, run_name, cap=16) as backstage:
        backstage.open().finish(*range(8))
        with GroupStream.connect(watched.url, run=run_name) as stream:
            batches = stream.batches(groups=2, timeout_s=45)
            next(batches).ack()
            with told(old.port) as client:
                assert client.wait(1, 5000) == 1
                freeze(replica)
                # What is sent from now on would wait in its socket, and be read when it wakes.
                client.execute_command("CLIENT KILL TYPE replica")
            second = next(batches)
            second.ack()  # the master says so, and dies with it
            old.kill()
            thaw(replica)
            watched.wait_failed_over(old)
            backstage.queue.within(15)
            counters = wait_until(lambda: counters_of(backstage))
            assert counters["acked"] == 2, "the ack was replicated after all"
            trained = [*range(4)]
            for _ in range(2):
                batch = next(batches)
                trained += batch.group_indexes
                batch.ack()
            assert sorted(trained) == list(range(8))
            assert second.group_indexes == [2, 3]
            assert stream.metrics()["stream/rollbacks"] == 1
        state = backstage.queue.call(calls.state())
        assert state.frontier == 8
        assert backstage.queue.call(calls.audit(deep=True)).problems == []


def counters_of(backstage: Backstage) -> dict[str, int]:
    try:
        return backstage.queue.counters()
    except redis.RedisError:
        return {}


@pytest.mark.slow
def test_connections_leave_a_frozen_master_and_do_not_return_when_it_wakes(
    watched: Watched, run_name: str
) -> None:
    old = watched.master
    with Backstage(watched.url, run_name) as backstage:
        backstage.open()
        queue = backstage.queue
        # Several idle connections to the master of now, in both pools.
        connections = [queue.client.connection_pool.get_connection() for _ in range(4)]
        for connection in connections:
            queue.client.connection_pool.release(connection)
        assert not queue.wait_bell(0.01)
        freeze(old)
        try:
            new = watched.wait_failed_over(old)
            with queue.within(1.0), pytest.raises(redis.TimeoutError):
                queue.counters()
            assert queue.counters() is not None
            thaw(old)
            answers = [backstage.enqueue(number)[0] for number in range(8)]
            for _ in connections:  # all of them are used once
                queue.client.connection_pool.get_connection()
            waited = queue.wait_bell(0.01)
        finally:
            thaw(old)
        assert (answers, waited) == (["new"] * 8, True)
        assert {c.port for c in connections if c.is_connected} == {new.port}
        wait_until(lambda: role_of(old) == "slave", 15)
        assert queue.counters()["enqueued"] == 8
        assert queue.call(calls.audit(deep=True)).problems == []


@pytest.mark.slow
def test_a_planned_failover_is_an_outage_also_to_a_wait_and_the_old_master_gets_nothing(
    watched: Watched, run_name: str
) -> None:
    old = watched.master
    with Backstage(watched.url, run_name) as backstage, told(watched.sentinels[0].port) as sentinel:
        backstage.open()
        queue = backstage.queue
        heard: list[str] = []

        def wait() -> None:
            try:
                heard.append(str(queue.read_full("a", count=1, block_s=5.0)))
            except redis.ConnectionError as error:
                heard.append(str(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        sentinel.execute_command("SENTINEL FAILOVER", MASTER)
        answers: list[str] = []

        def enqueued() -> bool:
            try:
                answers.extend(backstage.enqueue(len(answers)))
            except redis.ConnectionError:
                return False
            # A slow failover fills the run first; either word is the new master's.
            return role_of(old) == "slave" and answers[-1] in ("new", "full")

        wait_until(enqueued)
        waiting.join(10)
        assert not waiting.is_alive()
        assert len(heard) == 1
        route = queue.route
        assert route is not None
        assert route.address == ("127.0.0.1", watched.master.port)
        assert watched.master is not old
        assert queue.call(calls.audit(deep=True)).problems == []


def test_a_demoted_server_without_sentinels_is_an_outage_and_left_for_who_has_its_name(
    run_name: str,
) -> None:
    with (
        DevServer() as server,
        DevServer() as other,
        told(server.port) as admin,
        Backstage(server.url, run_name) as backstage,
    ):
        backstage.open()
        admin.replicaof("127.0.0.1", other.port)
        wait_until(lambda: role_of(server) == "slave")
        with pytest.raises(redis.ConnectionError, match="READONLY"):
            backstage.enqueue(0)
        admin.replicaof("NO", "ONE")
        assert backstage.open().enqueue(0) == ["new"]


async def test_a_cancelled_call_leaves_no_reply_behind_sentinels(
    watched: Watched, run_name: str
) -> None:
    await cancel_calls(watched.url, run_name)


@pytest.mark.slow
def test_a_process_of_each_kind_takes_the_setting_with_sentinels(
    watched: Watched, run_name: str, tmp_path: Path
) -> None:
    hosts = watched.url.removeprefix("redis+sentinel://")
    flags = ["--redis.url", "redis://ignored:1/0", "--redis.sentinel", hosts]
    settings = load_settings(flags, prog="x", environ={}, folder=tmp_path).settings
    assert settings.redis_url() == f"redis+sentinel://{hosts}/0"
    log = tmp_path / "producer.log"
    rows = rows_file(tmp_path, 3)
    process = start(
        "producer", *flags, "--run.name", run_name, "--producer.source", f"jsonl:{rows}",
        "--producer.stay", "false", "--producer.progress", "false", log=log,
    )  # fmt: skip
    try:
        assert process.wait(45) == 0, log.read_text()
    finally:
        process.kill()
    shown = subprocess.run(
        [sys.executable, "-m", "rollstream.cli", "stats", "--redis", watched.url, "--run", run_name,
         "--json"],
        capture_output=True, text=True, check=False, timeout=80,
    )  # fmt: skip
    assert '"live": 3' in shown.stdout, shown.stderr


def test_sentinels_that_know_no_such_master_are_named(watched: Watched, run_name: str) -> None:
    url = watched.url.replace(f"/{MASTER}", "/another")
    with Backstage(url, run_name) as backstage, pytest.raises(redis.ConnectionError) as caught:
        backstage.open()
    assert "no sentinel says where master 'another' is" in str(caught.value)
    assert "knows no such master" in str(caught.value)


def test_a_dead_and_a_frozen_sentinel_are_passed(watched: Watched, run_name: str) -> None:
    dead, frozen = free_port(), watched.sentinels[0].process.pid
    url = watched.url.replace("sentinel://", f"sentinel://127.0.0.1:{dead},")
    os.kill(frozen, signal.SIGSTOP)
    try:
        with Backstage(url, run_name) as backstage:
            assert backstage.open().enqueue(0) == ["new"]
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_a_server_on_its_own_is_no_sentinel(run_name: str) -> None:
    with DevServer() as server:
        url = f"redis+sentinel://127.0.0.1:{server.port}/{MASTER}"
        with Backstage(url, run_name) as backstage, pytest.raises(redis.ConnectionError) as caught:
            backstage.open()
    assert f"127.0.0.1:{server.port}: unknown command" in str(caught.value)
