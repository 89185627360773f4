"""An exporter whose run or Redis is not there, is another one, or forgets: it stays and says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from examples.devserver import DevServer
from rollstream.queue import calls
from tests.backstage import Backstage
from tests.integration.producer.scene import until
from tests.proxy import Proxy

from .scene import Watching, serving, watching


@pytest.fixture
def server() -> Iterator[DevServer]:
    with DevServer() as server:
        yield server


def acked(it: Watching) -> float:
    return it.value("groups_total", env="other", outcome="acked", reason="")


def end(run: Backstage, *group_indexes: int) -> None:
    run.finish(*group_indexes)
    run.queue.call(calls.connect("trainer", 1))
    run.queue.call(calls.ack("trainer", [str(j) for j in group_indexes]))


async def get(it: Watching, path: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{it.exporter.server.port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        body = await response.text()
        return response.status, body


async def test_a_run_that_is_not_there_yet_is_waited_for(valkey_url: str, run_name: str) -> None:
    async with serving(valkey_url, run_name) as it:
        await until(lambda: get(it, "/readyz"), lambda got: '"redis": true' in got[1])
        assert await get(it, "/readyz") == (503, '{"redis": true, "run": false}')
        assert (await get(it, "/healthz"))[0] == 200
        assert it.nonzero("run_state") == {}
        with Backstage(valkey_url, run_name).open():
            await until(lambda: get(it, "/readyz"), lambda got: got[0] == 200)
            text = (await get(it, "/metrics"))[1]
            assert 'rollout_run_state{state="running"} 1.0' in text


async def test_an_outage_is_shown_and_outlived(run: Backstage, valkey_url: str) -> None:
    run.finish(0, 1)
    port = int(valkey_url.rsplit(":", 1)[1])
    with Proxy(port) as proxy:
        async with serving(f"redis://127.0.0.1:{proxy.port}", run.queue.run) as it:
            await until(lambda: get(it, "/readyz"), lambda got: got[0] == 200)
            proxy.cut()
            await until(lambda: get(it, "/readyz"), lambda got: got[0] == 503)
            assert (await get(it, "/healthz"))[0] == 200
            assert it.value("redis_up") == 0
            assert it.value("queue_depth", queue="ready") == 2  # as it was last
            run.finish(2)
            proxy.mend()
            await until(lambda: get(it, "/readyz"), lambda got: got[0] == 200)
            await until(
                lambda: get(it, "/metrics"),
                lambda got: 'rollout_queue_depth{queue="ready"} 3.0' in got[1],
            )
            assert it.value("redis_up") == 1


@pytest.mark.parametrize("is_older", [False, True])
async def test_a_run_that_was_removed_and_opened_anew_begins_at_0(
    valkey_url: str, run: Backstage, is_older: bool
) -> None:
    """A producer of an older version does not write down when it opened the run."""

    def age() -> None:
        if is_older:
            run.queue.client.hdel(f"{run.queue.prefix}m", "opened")

    async with watching(valkey_url, run.queue.run) as it:
        age()
        end(run, 0, 1, 2)
        await it.look()
        assert acked(it) == 3
        run.roll_back({})
        await it.look()
        assert acked(it) == 3  # counters stand still
        assert it.nonzero("run_state") == it.nonzero("queue_depth") == {}
        assert it.value("redis_up") == 1
        run.open()
        age()
        end(run, 0)
        await it.look()
        assert acked(it) == 1


async def test_a_run_that_was_opened_anew_between_two_looks_begins_at_0(
    valkey_url: str, run: Backstage
) -> None:
    async with watching(valkey_url, run.queue.run) as it:
        end(run, 0, 1, 2)
        await it.look()
        run.roll_back({})
        run.open()
        end(run, 0)
        await it.look()
        assert acked(it) == 1


async def test_counters_never_go_down_where_redis_lost_what_it_knew(
    valkey_url: str, run: Backstage
) -> None:
    async with watching(valkey_url, run.queue.run) as it:
        end(run, 0)
        before = run.keys()
        end(run, 1, 2)
        await it.look()
        run.roll_back(before)
        await it.look()
        assert (acked(it), it.value("groups_enqueued_total")) == (3, 3)
        assert it.value("accounting_difference") == 0
        end(run, 1, 2, 3)  # what was forgotten comes again
        await it.look()
        assert (acked(it), it.value("groups_enqueued_total")) == (4, 4)


async def test_a_run_of_another_version_is_none_that_is_read(
    valkey_url: str, run: Backstage
) -> None:
    client, key = run.queue.client, f"{run.queue.prefix}m"
    async with watching(valkey_url, run.queue.run) as it:
        end(run, 0)
        await it.look()
        schema: Any = client.hget(key, "schema")
        client.hset(key, "schema", 99)
        await it.look()
        assert it.nonzero("run_state") == {("unreadable",): 1}
        assert await it.exporter._ready() == {"redis": True, "run": False}
        assert acked(it) == 1
        client.hset(key, "schema", schema)
        await it.look()
        assert await it.exporter._ready() == {"redis": True, "run": True}
        assert acked(it) == 1


@pytest.mark.parametrize("key", ["c", "q", "ready", "gs", "m"])
async def test_a_key_that_is_another_programs_ends_nothing(
    valkey_url: str, run: Backstage, key: str
) -> None:
    client, name = run.queue.client, run.queue.prefix + key
    async with watching(valkey_url, run.queue.run) as it:
        end(run, 0)
        run.finish(1)
        run.enqueue(2)
        await it.look()
        kept: Any = client.dump(name)
        client.delete(name)
        client.lpush(name, "theirs")
        await it.look()
        assert it.nonzero("run_state") == {("unreadable",): 1}
        assert await it.exporter._ready() == {"redis": True, "run": False}
        assert acked(it) == 1
        client.restore(name, 0, kept, replace=True)
        await it.look()
        assert it.nonzero("run_state") == {("running",): 1}
        assert acked(it) == 1


async def test_an_aborted_run_is_shown_to_its_end(valkey_url: str, run: Backstage) -> None:
    run.enqueue(0, 1, env="default")
    async with watching(valkey_url, run.queue.run) as it:
        run.queue.call(calls.abort_run("enough"))
        await it.look()
        assert it.nonzero("run_state") == {("aborting",): 1}
        while run.queue.call(calls.sweep()).more:
            pass
        await it.look()
        assert it.nonzero("run_state") == {("ended",): 1}
        assert sum(it.nonzero("groups_total").values()) == 2
        assert it.value("accounting_difference") == 0


async def test_a_server_that_was_demoted_is_not_read_any_further(
    server: DevServer, valkey_url: str, run_name: str
) -> None:
    """A replica answers reads; of what happens behind a failover elsewhere it may know nothing."""
    with Backstage(server.url, run_name).open() as run:
        async with watching(server.url, run_name) as it:
            await it.look()
            assert it.value("redis_up") == 1
            run.queue.client.replicaof("127.0.0.1", "1")
            await it.look()
            assert it.value("redis_up") == 0
            run.queue.client.replicaof("NO", "ONE")
            await it.look()
            assert it.value("redis_up") == 1


async def test_a_user_that_may_not_list_connections_believes_what_the_trainer_said(
    server: DevServer, run_name: str
) -> None:
    from rollstream.stream import GroupStream

    with Backstage(server.url, run_name).open() as run:
        client: Any = run.queue.client
        client.execute_command("ACL SETUSER", "watcher", "on", ">pw", "~*", "+@all", "-client|list")
        url = f"redis://watcher:pw@127.0.0.1:{server.port}"
        async with watching(url, run_name) as it:
            with GroupStream.connect(server.url, run=run_name):
                await it.look()
                assert it.value("trainer_connected") == 1
            await it.look()
            assert it.value("trainer_connected") == 0
