"""Three masters of a cluster: one run works through from any node, and through a moving slot."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from examples.devserver import DevServer, die_with_parent
from rollstream.cli.__main__ import main
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.keys import SCHEMA, prefix
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.builders import budgets
from tests.integration.producer.scene import producing, rows_file, settings_of
from tests.integration.worker.parts import Parts
from tests.integration.worker.processes import ENVIRONMENT, ROOT, start

from .cancelled import cancel_calls
from .servers import Cluster, told


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as topology:
        yield topology


@pytest.fixture
def elsewhere(cluster: Cluster, run_name: str) -> str:
    """URL of a node that does not own the run's slot."""
    return cluster.others(f"{prefix(run_name)}m")[0].url


def keys_of(server: DevServer, run: str) -> list[bytes]:
    """Return the keys of a run that a node has."""
    with told(server.port) as client:
        return list(client.scan_iter(match=f"{prefix(run)}*"))


async def test_a_run_works_through_from_a_node_that_does_not_own_it(
    cluster: Cluster, elsewhere: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(elsewhere, run_name, rows_file(tmp_path, 12))
    queue = Queue.connect(elsewhere, run_name)
    async with producing(settings):
        parts = Parts(queue)
        parts.start()

        def train() -> list[int]:
            with GroupStream.connect(elsewhere, run=run_name) as stream:
                trained = []
                for batch in stream.batches(groups=4, timeout_s=45):
                    batch.ack()
                    trained += batch.group_indexes
                assert stream.metrics()["stream/rollbacks"] == 0
                return trained

        assert sorted(await asyncio.to_thread(train)) == list(range(12))
        await parts.stop()
    assert (await queue.counters())["acked"] == 12
    assert (await queue.call(calls.audit(deep=True))).problems == []
    await queue.aclose()
    for server in cluster.others(f"{prefix(run_name)}m"):
        assert keys_of(server, run_name) == []


def test_confirmations_evaluations_and_parked_bodies_are_read_through_any_node(
    elsewhere: str, run_name: str
) -> None:
    queue = BlockingQueue.connect(elsewhere, run_name)
    queue.call(calls.open_run(SCHEMA, "source", budgets(on_stale="requeue")))
    queue.call(calls.enqueue("e:math:0", 1, b"p"))
    (group,) = queue.call(calls.lease("w", 1, 1)).groups
    lease = group.members[0].lease
    queue.call(calls.confirm("w", 0, 1, b"[]"))
    assert [(c.worker, c.control_seq, c.in_flight) for c in queue.confirmations()] == [("w", 0, 1)]
    queue.call(calls.park(lease, b"half"))
    assert queue.parked(lease) == b"half"
    (group,) = queue.call(calls.lease("w", 2, 1)).groups
    queue.call(calls.complete([calls.Completion(group.members[0].lease, b"h", b"b")]))
    assert [entry.group_index for entry in queue.read_eval(block_s=1)] == ["e:math:0"]
    queue.call(calls.set_label(1, "one"))
    info = queue.info()
    assert info is not None
    assert (info.labels, info.on_stale) == ({"one": 1}, "requeue")
    queue.close()


def test_a_slot_that_moves_is_followed_and_the_run_is_away_until_it_has_moved(
    cluster: Cluster, elsewhere: str, run_name: str
) -> None:
    key = f"{prefix(run_name)}m"
    with Backstage(elsewhere, run_name) as backstage:
        backstage.open().finish(0, 1)
        with GroupStream.connect(elsewhere, run=run_name) as stream:
            first = stream.next_batch(1, 10)
            assert first is not None
            source, target = cluster.owner(key), cluster.others(key)[1]
            cluster.begin_move(key, target)
            # The new node has none of the run's keys yet: a script would find no run there.
            with pytest.raises(redis.ConnectionError, match="ASK"):
                backstage.enqueue(2)
            with pytest.raises(redis.ConnectionError, match="ASK"):
                backstage.open()
            cluster.end_move(key, source, target)
            first.ack()
            assert backstage.enqueue(2) == ["new"]
            backstage.work()
            backstage.end_of_data()
            (rest,) = [b.group_indexes for b in stream.batches(groups=2, timeout_s=45)]
        assert first.group_indexes + rest == [0, 1, 2]
        assert backstage.queue.call(calls.audit(deep=True)).problems == []
    assert keys_of(source, run_name) == []


TRAINER = """
import sys
from rollstream import GroupStream

with GroupStream.connect(sys.argv[1], run=sys.argv[2]) as stream:
    print(stream.next_batch(1, 30).group_indexes, flush=True)
    sys.stdin.read()
"""


def killed_with_a_batch_in_hand(url: str, run: str) -> str:
    """Let a trainer's process take a batch, and kill it; what it had."""
    process = subprocess.Popen(
        (sys.executable, "-c", TRAINER, url, run), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=ENVIRONMENT, cwd=ROOT, preexec_fn=die_with_parent,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        try:
            return process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.timeout(40)
async def test_the_replay_arrives_when_a_consumer_is_killed_in_a_cluster(
    elsewhere: str, run_name: str
) -> None:
    """taskiq-python/taskiq-redis#130: the cluster variant never recovers what was not acked."""
    with Backstage(elsewhere, run_name, lease_ms=500) as backstage:
        backstage.open().enqueue(0)
        assert len(backstage.lease()) == 2  # by a worker that is never heard of again
        queue = Queue.connect(elsewhere, run_name)
        parts = Parts(queue)
        parts.start()
        backstage.end_of_data()

        def train() -> list[int]:
            assert killed_with_a_batch_in_hand(elsewhere, run_name) == "[0]"
            with GroupStream.connect(elsewhere, run=run_name) as stream:
                batches = []
                for batch in stream.batches(groups=1, timeout_s=45):
                    batch.ack()
                    batches += batch.group_indexes
                return batches

        assert await asyncio.to_thread(train) == [0]
        assert (await queue.counters())["crashes"] == 2
        await parts.stop()
        await queue.aclose()


async def test_a_cancelled_call_leaves_no_reply_in_a_cluster(elsewhere: str, run_name: str) -> None:
    await cancel_calls(elsewhere, run_name)


@pytest.mark.slow
def test_the_owner_is_found_through_another_node_when_the_first_one_is_gone(run_name: str) -> None:
    key = f"{prefix(run_name)}m"
    with Cluster() as cluster:
        seed, _ = cluster.others(key)
        with Backstage(seed.url, run_name) as backstage:
            backstage.open().enqueue(0)
            owner = cluster.owner(key)
            seed.kill()
            backstage.queue.client.connection_pool.disconnect()
            assert backstage.enqueue(1) == ["new"]
            # The owner dies and comes back: asked for at a node that knows, then found again.
            owner.kill()
            with pytest.raises(redis.RedisError):
                backstage.enqueue(2)
            owner.start()

            def enqueued() -> bool:
                try:
                    return backstage.enqueue(2) in (["new"], ["dup"])
                except redis.RedisError:
                    return False

            wait_until(enqueued)


def test_commands_of_people_reach_a_run_of_a_cluster(
    elsewhere: str, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Backstage(elsewhere, run_name) as backstage:
        backstage.open().enqueue(0)
        assert main(["runs", "--redis", elsewhere]) == 0
        assert f"{run_name}: running, 1 groups live" in capsys.readouterr().out
        assert main(["audit", "--redis", elsewhere, "--run", run_name]) == 0
        command = ["runs", "--redis", elsewhere, "--remove", run_name, "--yes", "--force"]
        assert main(command) == 0
        assert f"removed run {run_name}" in capsys.readouterr().out
        assert backstage.keys() == {}


@pytest.mark.slow
def test_the_verifier_says_that_rq_needs_a_server_of_its_own(
    elsewhere: str, valkey_url: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = start("worker.isolation.verifier", "--redis.url", elsewhere, log=log)
    try:
        assert process.wait(45) == 2
    finally:
        process.kill()
    assert "rq.url" in log.read_text()
    assert "cluster" in log.read_text()
