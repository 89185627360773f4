"""Both executors on a real server: lost replies, cancellations, restarts, TLS, unknown scripts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from examples.devserver import DevServer, free_port
from rollstream.queue import calls
from rollstream.queue.answers import BeatAnswer
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.keys import SCHEMA
from rollstream.queue.queue import Queue
from rollstream.queue.scripts import load_scripts
from rollstream.queue.sending import PlainSends
from tests.builders import budgets
from tests.proxy import Proxy

TLS = Path(__file__).resolve().parents[2] / "data" / "tls"
OPEN = calls.open_run(SCHEMA, "source", budgets())


@pytest.fixture
async def queue(valkey_url: str, run_name: str) -> AsyncIterator[Queue]:
    queue = Queue.connect(valkey_url, run_name)
    await queue.call(OPEN)
    yield queue
    await queue.aclose()


@pytest.fixture
def proxy(valkey_url: str) -> Iterator[Proxy]:
    with Proxy(int(valkey_url.rsplit(":", 1)[1])) as proxy:
        yield proxy


async def test_a_cancelled_call_leaves_no_reply_for_another(queue: Queue) -> None:
    """redis/redis-py#2624, #2665: answers were off by one after a cancel."""
    await queue.call_many([calls.enqueue(gid, 1, b"%d" % gid) for gid in range(50)])
    expected = [[row.prompt for row in await queue.groups([(str(gid), 1)])] for gid in range(50)]

    async def ask(gid: int) -> None:
        (group,) = await queue.groups([(str(gid), 1)])
        assert group.prompt == expected[gid][0]

    for round_no in range(20):
        tasks = [asyncio.create_task(ask(j % 50)) for j in range(50)]
        for _ in range(round_no % 7):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        wrong = [r for r in results if isinstance(r, AssertionError | RedisError)]
        assert wrong == []
    for gid in range(50):
        await ask(gid)


async def test_a_thousand_calls_cancelled_between_command_and_reply_leave_no_reply(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis/redis-py#2624: each is cancelled when its command was written, before its answer."""
    send, is_sent, num_cancelled = PlainSends.send_packed_command, asyncio.Event(), 0

    async def telling(self: PlainSends, command: Any, check_health: bool = True) -> None:
        await send(self, command, check_health)
        if b"EVALSHA" in b"".join([command] if isinstance(command, bytes) else command):
            is_sent.set()

    monkeypatch.setattr(PlainSends, "send_packed_command", telling)
    for number in range(1, 1001):
        is_sent.clear()
        task = asyncio.create_task(queue.call(calls.set_budget("cap", number)))
        await is_sent.wait()
        task.cancel()
        await asyncio.wait([task])
        num_cancelled += task.cancelled()
        if number % 8 == 0:  # seven calls in a row have nobody who reads; then one has
            assert (await queue.call(calls.beat("w", [f"x{number}"]))).lost == [f"x{number}"]
    assert num_cancelled > 900


async def test_a_cancelled_single_call_leaves_no_reply_for_another(queue: Queue) -> None:
    for number in range(110):
        task = asyncio.create_task(queue.call(calls.set_budget("cap", number)))
        for _ in range(number % 11):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await queue.call(calls.beat("w", [f"x{number}"])) == BeatAnswer(
            "running", 0, (await queue.call(calls.present("worker", "w"))).control_seq,
            [f"x{number}"],
        )  # fmt: skip


async def test_a_wait_does_not_hold_up_calls(queue: Queue) -> None:
    waiting = asyncio.create_task(queue.read_full("a", count=1, block_s=4.0))
    await asyncio.sleep(0.05)
    assert await queue.call(calls.enqueue(0, 1, b"p")) == "new"
    answer = await queue.call(calls.lease("w", 1, 1))
    assert not waiting.done()
    lease = answer.groups[0].members[0].lease
    await queue.call(calls.complete([calls.Completion(lease, b"h", b"b")]))
    (entry,) = await asyncio.wait_for(waiting, 3)
    assert entry.group_index == "0"


async def test_waits_end_when_somebody_rings_and_after_half_a_second_else(queue: Queue) -> None:
    waiting = asyncio.create_task(queue.wait_bell(30.0))
    await asyncio.sleep(0.05)
    await queue.call(calls.enqueue(0, 1, b"p"))
    assert await asyncio.wait_for(waiting, 3)
    assert not await asyncio.wait_for(queue.wait_bell(30.0), 3)
    assert not await queue.wait_room(0.01)


async def test_call_many_is_one_round_trip_and_loads_unknown_scripts_once(
    queue: Queue, proxy: Proxy
) -> None:
    other = Queue.connect(f"redis://127.0.0.1:{proxy.port}", queue.run)
    await queue.client.script_flush()
    await queue.call(calls.enqueue(0, 1, b"p"))
    answers = await other.call_many([
        calls.enqueue(0, 1, b"p"), calls.enqueue(1, 1, b"p"), calls.enqueue(1, 1, b"p"),
        calls.skip(2), calls.enqueue(2, 1, b"p"),
    ])  # fmt: skip
    assert answers[:3] == ["dup", "new", "dup"]
    # The skip was unknown to the server and ran after what followed it: both orders are right.
    assert answers[3:] in (["skipped", "done"], ["dropped", "new"])
    assert proxy.num_connections == 1
    await other.aclose()


def test_blocking_loads_unknown_scripts_too(valkey_url: str, run_name: str) -> None:
    queue = BlockingQueue.connect(valkey_url, run_name)
    queue.call(OPEN)
    queue.call(calls.enqueue(0, 1, b"p"))
    lease = queue.call(calls.lease("w", 1, 1)).groups[0].members[0].lease
    queue.call(calls.complete([calls.Completion(lease, b"h", b"b", b"t")]))
    (entry,) = queue.read_full("a", count=1, block_s=0)
    queue.call_many([calls.verdict("0", entry.message_id)])
    queue.call(calls.connect("t", 1))
    entries = queue.read_ready(count=1, block_s=0)
    queue.client.script_flush()
    found = queue.deliver_and_fetch("t", entries, text=True)
    assert found.answers == ["ok"]
    assert found.groups[0] is not None
    assert (found.groups[0].bodies, found.groups[0].texts) == ([b"b"], [b"t"])
    queue.client.script_flush()
    assert queue.call_many([calls.ack("t", ["0"]), calls.ack("t", ["0"])]) == [["acked"], ["done"]]
    queue.close()


async def test_call_many_raises_the_first_error_after_all_were_answered(queue: Queue) -> None:
    broken = calls.ScriptCall("enqueue", ("0",), str)
    with pytest.raises(redis.ResponseError):
        await queue.call_many([broken, calls.enqueue(1, 1, b"p")])
    assert await queue.call(calls.enqueue(1, 1, b"p")) == "dup"


async def test_a_lost_reply_is_asked_for_again_and_nothing_is_leased_to_nobody(
    queue: Queue, proxy: Proxy
) -> None:
    await queue.call_many([calls.enqueue(gid, 8, b"p") for gid in range(8)])
    other = Queue.connect(f"redis://127.0.0.1:{proxy.port}", queue.run)
    for script in load_scripts().values():
        await other.client.script_load(script.source)
    proxy.lose_replies = 1
    answer = await other.call(calls.lease("w", 1, 64))
    assert proxy.lost == 1
    leases = [member.lease for group in answer.groups for member in group.members]
    assert len(leases) == 64
    assert (await queue.depths())["l"] == 64
    proxy.lose_replies = 1
    results = [calls.Completion(lease, b"h", b"b") for lease in leases]
    outcomes = {a.outcome for a in await other.call(calls.complete(results))}
    assert outcomes == {"dup"}
    assert (await queue.counters())["completed"] == 64
    proxy.lose_replies = 1
    batch = [calls.enqueue(8, 1, b"p"), calls.enqueue(9, 1, b"p")]
    assert await other.call_many(batch) == ["dup", "dup"]
    assert (await queue.call(calls.audit(deep=True))).problems == []
    await other.aclose()


def test_blocking_asks_again_for_a_lost_reply(valkey_url: str, run_name: str, proxy: Proxy) -> None:
    queue = BlockingQueue.connect(f"redis://127.0.0.1:{proxy.port}", run_name)
    queue.call(OPEN)
    for script in load_scripts().values():
        queue.client.script_load(script.source)
    proxy.lose_replies = 1
    assert queue.call(calls.connect("t", 1)).consumer == "t"
    proxy.lose_replies = 1
    assert queue.call_many([calls.enqueue(0, 1, b"p")]) == ["dup"]
    assert proxy.lost == 2
    queue.close()


async def test_an_unreachable_server_is_an_error_of_redis_within_the_bound() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    queue, blocking = Queue.connect(url, "r"), BlockingQueue.connect(url, "r")
    with pytest.raises(redis.ConnectionError, match=r"127\.0\.0\.1"):
        await asyncio.wait_for(queue.info(), 8)
    with pytest.raises(redis.ConnectionError, match=r"127\.0\.0\.1"):
        blocking.call(calls.state())
    await queue.aclose()
    blocking.close()


async def test_a_restarted_server_is_used_again_with_what_it_kept() -> None:
    with DevServer(aof=True) as server:
        server_client = redis.Redis.from_url(server.url)
        server_client.config_set("appendfsync", "always")
        server_client.close()
        queue, blocking = Queue.connect(server.url, "r"), BlockingQueue.connect(server.url, "r")
        await queue.call(OPEN)
        await queue.call_many([calls.enqueue(gid, 2, b"p") for gid in range(3)])
        answer = await queue.call(calls.lease("w", 1, 4))
        blocking.call(calls.connect("t", 1))
        server.kill()
        with pytest.raises(RedisError):
            await queue.call(calls.sweep())
        server.start()
        leases = [member.lease for group in answer.groups for member in group.members]
        results = [calls.Completion(lease, b"h", b"b") for lease in leases]
        outcomes = [a.outcome for a in await queue.call(calls.complete(results))]
        assert outcomes == ["ok"] * 4
        assert (await queue.call(calls.lease("w", 1, 4))).groups == []
        assert blocking.call(calls.connect("t", 1)).consumer == "t"
        assert blocking.call(calls.audit(deep=True)).problems == []
        await queue.aclose()
        blocking.close()


async def test_rediss_checks_the_certificate_against_the_ca(valkey_url: str, run_name: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    with Proxy(int(valkey_url.rsplit(":", 1)[1]), tls=context) as proxy:
        url = f"rediss://127.0.0.1:{proxy.port}"
        ca = str(TLS / "ca.pem")
        queue, blocking = (
            Queue.connect(url, run_name, ca=ca), BlockingQueue.connect(url, run_name, ca=ca)
        )  # fmt: skip
        assert await queue.call(OPEN) == ["created", "running"]
        assert blocking.call(OPEN) == ["same", "running"]
        assert not await queue.wait_bell(0.01)
        await queue.aclose()
        blocking.close()
        stranger = Queue.connect(url, run_name)
        with pytest.raises(redis.ConnectionError, match="certificate"):
            await stranger.info()
        await stranger.aclose()


async def test_streams_skip_entries_that_are_none_of_ours(queue: Queue) -> None:
    foreign = [
        {"x": "1"},
        {"g": b"\xff", "n": "1"},
        {"g": "7", "n": "x"},
        {"g": "7", "n": "1000000000"},
        {"g": "seven", "n": "1"},
    ]
    for row in [*foreign, {"g": "7", "n": "2"}, {"g": "e:math:1", "n": "3"}]:
        await queue.client.xadd(f"{queue.prefix}full", row)

    found = await queue.read_full("judge", count=64, block_s=0.0)

    assert [(entry.group_index, entry.n) for entry in found] == [("7", 2), ("e:math:1", 3)]


def test_a_unix_socket_is_reached_by_both_executors(run_name: str, tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with DevServer("--unixsocket", str(socket)):
        url = f"unix://{socket}"
        blocking = BlockingQueue.connect(url, run_name)
        opened = blocking.call(OPEN)
        blocking.close()
        assert opened[0] == "created"

        async def state_of() -> str | None:
            queue = Queue.connect(url, run_name)
            info = await queue.info()
            await queue.aclose()
            return None if info is None else info.state

        assert asyncio.run(state_of()) == "running"


# --- a server that refuses for a reason of its own ------------------------------------------------
async def test_a_refusal_that_passes_by_itself_is_an_outage_to_both_executors(
    run_name: str,
) -> None:
    with DevServer() as server, redis.Redis(port=server.port) as admin:
        queue = Queue.connect(server.url, run_name)
        blocking = BlockingQueue.connect(server.url, run_name)
        admin.config_set("min-replicas-to-write", 1)
        with pytest.raises(redis.ConnectionError, match="NOREPLICAS"):
            await queue.call(OPEN)
        with pytest.raises(redis.ConnectionError, match="NOREPLICAS"):
            blocking.call(OPEN)
        with pytest.raises(redis.ConnectionError, match="NOREPLICAS"):
            blocking.call_many([OPEN])
        admin.config_set("min-replicas-to-write", 0)
        assert (await queue.call(OPEN))[0] == "created"
        await queue.aclose()
        blocking.close()


async def test_confirmations_evaluations_and_parked_bodies_are_the_same_to_both_executors(
    queue: Queue, valkey_url: str
) -> None:
    blocking = BlockingQueue.connect(valkey_url, queue.run)
    await queue.call(calls.enqueue("e:math:0", 2, b"p"))
    answer = await queue.call(calls.lease("w", 1, 2))
    first, second = (member.lease for member in answer.groups[0].members)
    await queue.call(calls.confirm("w", 3, 2, b'[{"url": "http://e:1"}]'))
    for said in (await queue.confirmations(), blocking.confirmations()):
        (one,) = said
        assert (one.worker, one.control_seq, one.in_flight) == ("w", 3, 2)
        assert one.engine_states() == [{"url": "http://e:1"}]
        assert 0 <= one.age_s < 15, "on the queue clock, by the time of the server"
    await queue.call(calls.park(first, b"half"))
    assert await queue.parked(first) == blocking.parked(first) == b"half"
    assert await queue.parked(second) is None

    waiting = asyncio.create_task(queue.read_eval(block_s=5))
    answer = await queue.call(calls.lease("w", 2, 2))
    leases = [answer.groups[0].members[0].lease, second]
    await queue.call(calls.complete([calls.Completion(x, b"h", b"b") for x in leases]))
    (entry,) = await waiting
    assert entry.group_index == "e:math:0"
    assert blocking.read_eval(block_s=0) == [entry]
    assert blocking.read_eval(entry.message_id, block_s=0) == []
    blocking.close()
