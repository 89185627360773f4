"""Clients that mean harm, or are broken: nothing grows, nothing ends, health is answered meanwhile.

Counts alone: tasks, connections, sessions, objects, bytes held. The double sessions answer at once,
so it is the server that is attacked; `test_floods_*` at the end do the same to real sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import resource
import secrets
import socket
import weakref
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.integration.gateway.doubles import Acts, DoubleSession, forever
from tests.integration.gateway.raw import (
    BODY,
    STREAM,
    RawClient,
    chunked,
    connected,
    double_stage,
    health_asked,
    request,
)
from tests.integration.gateway.stage import HELLO, Stage, gateway_stage, text, wait_until
from tests.series import num_series
from worker.gateway.limits import Connection, HttpLimits
from worker.telemetry.metrics import Metrics

CHAT = "v1/chat/completions"
NO_LINGER = b"\x01\x00\x00\x00\x00\x00\x00\x00"
"""Of a socket that is reset where it is closed."""


def alive() -> int:
    """Return how many objects the collector knows."""
    gc.collect()
    return len(gc.get_objects())


def connections() -> list[Connection]:
    """Return the connections that the collector knows.

    By their type: `isinstance` asks an object, and some of other packages warn when they are asked.
    """
    return [o for o in gc.get_objects() if issubclass(type(o), Connection)]


def at_rest(stage: Stage) -> bool:
    """Nothing is under way, and nothing is held."""
    gateway = stage.gateway
    return gateway.num_requests == 0 and gateway.bodies.held_bytes == 0


async def grows(stage: Stage, attack: Any, times: int = 2) -> list[int]:
    """Run an attack again and again; return the growth of what is alive, each time."""
    await attack()  # caches fill once
    growth = []
    for _ in range(times):
        await wait_until(lambda: at_rest(stage))
        before = alive()
        await attack()
        await wait_until(lambda: at_rest(stage))
        growth.append(alive() - before)
    return growth


# --- many requests to nowhere ---------------------------------------------------------------------
async def to_random_sessions(stage: Stage, count: int, connections: int = 4) -> Counter[int]:
    """Ask `count` times for sessions that are not there, over connections that are kept."""
    found: Counter[int] = Counter()

    async def ask(number: int) -> None:
        async with connected(stage) as client:
            for n in range(number):
                tail = ("chat/completions", "v1/messages", "responses", "models")[n % 4]
                method = "GET" if tail == "models" else "POST"
                head = f"{method} /sessions/{secrets.token_hex(16)}/{tail} HTTP/1.1\r\nhost: x\r\n"
                client.send(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
                status, _, said = await client.answer()
                assert "not found" in json.dumps(said)
                found[status] += 1

    await asyncio.gather(*(ask(count // connections) for _ in range(connections)))
    return found


@pytest.mark.parametrize("count", [800, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_case_140_requests_to_random_sessions_leave_nothing_behind(count: int) -> None:
    metrics = Metrics(version="1", wire=1, envs=["default"])
    async with double_stage() as (stage, _):
        series = num_series(metrics)
        growth = await grows(stage, lambda: to_random_sessions(stage, 160))
        tasks = len(asyncio.all_tasks())
        async with health_asked(stage):
            found = await to_random_sessions(stage, count)
        metrics.gateway(stage.gateway.counters, stage.book.num_open)
        metrics.flush()

        assert found == {404: count}
        assert min(growth) < 50, growth
        assert len(asyncio.all_tasks()) <= tasks
        assert stage.book.num_open == 1
        assert num_series(metrics) == series
        assert (await stage.chat()).status_code == 200
    # Those that list models are no calls of agents.
    assert stage.gateway.counters["refused"] == (count + 480) * 3 // 4


async def test_a_client_that_sends_ahead_is_answered_in_order() -> None:
    async with double_stage() as (stage, session), connected(stage) as client:
        paths = ["healthz", f"sessions/{session.key}/models/a", "nowhere", "healthz"] * 25
        client.send("".join(f"GET /{p} HTTP/1.1\r\nhost: x\r\n\r\n" for p in paths).encode())
        client.send(request(session) * 3)
        statuses = [(await client.answer())[0] for _ in range(103)]

        assert statuses == [200, 200, 404, 200] * 25 + [200] * 3
        assert session.ends == [["commit"]] * 3


async def test_garbage_bodies_are_refused_and_leave_nothing_behind() -> None:
    rng = random.Random(7)
    kinds = (
        lambda: rng.randbytes(rng.randrange(300)),
        lambda: BODY[: rng.randrange(len(BODY))],
        lambda: bytes(b ^ (rng.random() < 0.1) for b in BODY),
        lambda: b"[" * rng.randrange(1, 5000),
        lambda: json.dumps({"messages": rng.choice([None, 7, {}, [[]], [None], [{}]])}).encode(),
        lambda: json.dumps({"messages": [{"role": rng.choice(["", "x", 7, None])}]}).encode(),
        lambda: json.dumps({"model": {}, "messages": HELLO, "stream": "yes"}).encode(),
    )
    async with double_stage() as (stage, session):

        async def attack() -> None:
            async with connected(stage) as client:
                for n in range(105):
                    path = ("v1/chat/completions", "v1/messages", "v1/responses")[n % 3]
                    client.send(request(session, kinds[n % 7](), path=path))
                    status, _, said = await client.answer()
                    assert status in (200, 400), said
                session.records.clear()

        async with health_asked(stage):
            growth = await grows(stage, attack)

        assert min(growth) < 50, growth
        assert stage.gateway.counters["failed"] == 0, stage.gateway.counters
        assert (await stage.chat()).status_code == 200


# --- connections ----------------------------------------------------------------------------------
async def test_half_open_connections_are_closed_and_keep_nobody_out() -> None:
    limits = HttpLimits(idle_s=0.3, max_connections=20)
    async with double_stage(limits=limits) as (stage, session), contextlib.AsyncExitStack() as ends:
        begun = request(session)
        starts = (b"", b"POST", begun[:40], begun[: -len(BODY) - 2])
        clients = []
        async with health_asked(stage):
            for n in range(200):
                clients.append(await ends.enter_async_context(connected(stage)))
                clients[-1].send(starts[n % 4])
            # On a connection of its own: one that waits in a client's pool makes room for others.
            async with connected(stage) as own:
                own.send(begun)
                status, _, _ = await own.answer()
            await wait_until(lambda: stage.gateway.num_connections <= 20)
        # Also those that were let in go, though they send on, byte by byte.
        for client in clients[-4:]:
            client.send(b"x")
        await stage.client.aclose()
        await wait_until(lambda: stage.gateway.num_connections == 0)
        for client in clients:
            assert await client.rest() == b""

    assert status == 200
    assert stage.gateway.counters["left"] == 0


async def test_a_connection_that_was_reset_is_not_kept_by_a_timer() -> None:
    async with double_stage() as (stage, _):
        for _ in range(10):
            with socket.create_connection(("127.0.0.1", stage.gateway.port)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                client.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
                await asyncio.to_thread(client.recv, 4096)
        await wait_until(lambda: stage.gateway.num_connections == 0)
        gc.collect()

        assert connections() == []


async def test_at_the_limit_the_connection_that_idled_longest_makes_room() -> None:
    limits = HttpLimits(max_connections=3)
    health = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    async with (
        double_stage(Acts(waits=forever), limits=limits) as (stage, session),
        connected(stage) as busy,
        connected(stage) as idle,
        connected(stage) as idler,
    ):
        busy.send(request(session))
        await wait_until(lambda: len(session.records) == 1)
        idle.send(health)
        assert (await idle.answer())[0] == 200
        async with connected(stage) as new:
            new.send(health)
            assert (await new.answer())[0] == 200
            assert await idler.rest() == b""
            assert session.ends == [[]]
            for client in (idle, new):
                client.send(request(session))
            await wait_until(lambda: len(session.records) == 3)
            async with connected(stage) as refused:
                status, headers, said = await refused.answer()

    assert (status, headers["connection"]) == (503, "close")
    assert "too many connections" in said["error"]["message"]


async def test_connections_that_come_at_once_do_not_get_beyond_the_limit() -> None:
    """All are made in one turn of the loop, before one that made room is gone."""
    limits = HttpLimits(max_connections=3)
    async with double_stage(limits=limits) as (stage, _):
        clients = [socket.create_connection(("127.0.0.1", stage.gateway.port)) for _ in range(12)]
        answer = await stage.chat()
        await wait_until(lambda: stage.gateway.num_connections <= 3)
        for client in clients:
            client.close()

    assert answer.status_code == 200


def test_a_process_takes_no_more_connections_than_half_of_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert HttpLimits().connections() == 128
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
    assert HttpLimits().connections() == HttpLimits().max_connections


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",  # no host
        b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"9" * 30 + b"\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_json_or_closed_and_the_server_goes_on(
    sent: bytes, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with double_stage() as (stage, _), connected(stage) as client:
        client.send(sent)
        client.writer.write_eof()
        got = await client.rest()
        for _ in range(2):
            assert (await stage.chat()).status_code == 200

    while got:  # behind a request that is fine, what follows may be none
        head, _, got = got.partition(b"\r\n\r\n")
        assert head.split(b" ")[1] in (b"200", b"400", b"404", b"431", b"501"), head
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        json.loads(got[:length])
        got = got[length:]
    assert caplog.records == []  # nobody fills a worker's log from outside
    assert capsys.readouterr().out == ""


async def test_a_head_that_is_too_large_says_so() -> None:
    async with double_stage() as (stage, _), connected(stage) as client:
        client.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\na: " + b"b" * 100_000)
        status, headers, said = await client.answer()

        assert (status, headers["connection"]) == (431, "close")
        assert said["error"]["code"] == 431
        assert headers["server"] == "rollstream"


@pytest.mark.parametrize("kind", ["reply", "stream", "refused"])
async def test_a_request_leaves_no_cycle_to_the_collector(kind: str) -> None:
    """What a request held, its body among it, is freed with its last byte."""
    body = {"reply": BODY, "stream": STREAM, "refused": b"{"}[kind]
    async with double_stage() as (stage, session), connected(stage) as client:

        async def ask(count: int) -> None:
            for _ in range(count):
                client.send(request(session, body))
                if kind == "stream":
                    await client.reader.readuntil(b"\r\n0\r\n\r\n")
                else:
                    await client.answer()
            session.records.clear()

        await ask(5)
        gc.collect()
        gc.disable()
        try:
            await ask(50)
            assert gc.collect() < 50
        finally:
            gc.enable()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_connection_leaves_no_cycle_to_the_collector(leaves: bool) -> None:
    """Nor does its last request, whether its client read the answer or left before."""
    acts = Acts(waits=forever) if leaves else Acts()
    async with double_stage(acts) as (stage, session):
        gc.collect()
        gc.disable()
        try:
            async with connected(stage) as client:
                client.send(request(session, BODY))
                if leaves:
                    await wait_until(lambda: len(session.records) > 0)
                else:
                    await client.answer()
                kept = [weakref.ref(o) for o in connections()]
            assert len(kept) == 1
            await wait_until(lambda: kept[0]() is None)
        finally:
            gc.enable()


# --- large bodies ---------------------------------------------------------------------------------
async def send_slowly(client: RawClient, piece: bytes, count: int) -> None:
    """Send a body piece by piece, for as long as it is taken."""
    for _ in range(count):
        client.send(piece)
        try:
            await client.writer.drain()
        except ConnectionError:
            return


async def test_100_mb_without_a_length_are_refused_where_the_limit_is() -> None:
    piece = chunked(b"x" * 100_000).removesuffix(b"0\r\n\r\n")
    async with double_stage() as (stage, session), health_asked(stage):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with contextlib.AsyncExitStack() as ends:
            clients = [await ends.enter_async_context(connected(stage)) for _ in range(4)]
            for client in clients:
                client.send(request(session, b"", "transfer-encoding: chunked"))
            sending = [asyncio.ensure_future(send_slowly(c, piece, 1000)) for c in clients]
            for client in clients:
                status, headers, _ = await client.answer()
                assert (status, headers["connection"]) == (413, "close")
            await asyncio.gather(*sending)
        await wait_until(lambda: at_rest(stage))

        assert session.records == []
        grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kb < 150_000  # 400 MB were sent; 4 * 8 may be held, twice where they grow


async def test_a_body_in_tiny_chunks_is_refused_before_it_costs_the_loop_much() -> None:
    tiny = chunked(*[b"x"] * 100_000)
    async with double_stage() as (stage, session), health_asked(stage), connected(stage) as client:
        client.send(request(session, b"", "transfer-encoding: chunked") + tiny)
        status, headers, said = await client.answer()

        assert (status, headers["connection"]) == (400, "close")
        assert "chunks are too small" in said["error"]["message"]
        assert session.records == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' + b"[" * 7_000_000,
        b'{"messages":[' + b"[]," * 300_000 + b"[]]}",
        b'{"messages":"' + b"\\ud800" * 300_000 + b'"}',
        b'{"messages":"' + b"\\" * 1_000_001 + b'"}',
        b'{"messages":' + b"9" * 200_000 + b"}",
        b"{" + b'"a":{},' * 200_000 + b'"b":1}',
    ],
    ids=["deep", "lists", "surrogates", "backslashes", "digits", "names"],
)
async def test_bodies_that_are_bombs_are_refused_and_the_loop_goes_on(body: bytes) -> None:
    async with double_stage() as (stage, session), health_asked(stage):
        answer = await stage.client.post(f"{stage.url}/{CHAT}", content=body)

        assert answer.status_code == 400, answer.text
        assert len(answer.content) < 2000
        assert session.records == []
        await wait_until(lambda: at_rest(stage))


async def test_large_bodies_at_once_are_all_answered() -> None:
    messages = [{"role": "user", "content": "x" * 400_000}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    async with double_stage() as (stage, session), health_asked(stage):
        answers = await asyncio.gather(
            *(stage.client.post(f"{stage.url}/{CHAT}", content=body) for _ in range(24))
        )

        assert {answer.status_code for answer in answers} == {200}
        assert len(session.records) == 24
        await wait_until(lambda: at_rest(stage))


# --- streams --------------------------------------------------------------------------------------
async def flood_of_streams(stage: Stage, session: DoubleSession, count: int) -> None:
    """Open streams that are left after their first byte."""

    async def one() -> None:
        async with connected(stage) as client:
            client.send(request(session, STREAM))
            async with asyncio.timeout(20):
                assert await client.reader.read(1)

    for _ in range(count // 25):
        await asyncio.gather(*(one() for _ in range(25)))


async def test_streams_that_are_left_after_one_byte_leave_nothing_behind() -> None:
    async def waits(number: int) -> None:
        if number:
            await forever()

    async with double_stage(Acts(texts=("a", "b"), waits=waits)) as (stage, session):

        async def attack() -> None:
            session.records.clear()
            await flood_of_streams(stage, session, 100)
            await wait_until(lambda: at_rest(stage))
            assert session.ends == [["leave"]] * 100
            session.records.clear()

        async with health_asked(stage):
            growth = await grows(stage, attack)
        await stage.client.aclose()
        await wait_until(lambda: stage.gateway.num_connections == 0)

        assert min(growth) < 100, growth
        assert stage.gateway.counters == {"left": 300, "ok": 0, "refused": 0, "failed": 0}


async def test_slow_readers_of_streams_hold_one_connection_each_and_are_left() -> None:
    limits = HttpLimits(stall_s=0.3)
    acts = Acts(texts=["x" * 50_000] * 400)
    async with double_stage(acts, limits=limits) as (stage, session), health_asked(stage):
        async with contextlib.AsyncExitStack() as ends:
            for _ in range(20):
                client = await ends.enter_async_context(connected(stage))
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                client.send(request(session, STREAM))
            await wait_until(lambda: session.ends == [["leave"]] * 20)
            await wait_until(lambda: at_rest(stage))

        assert stage.gateway.counters["left"] == 20


async def test_a_reader_that_never_takes_a_finished_answer_is_dropped() -> None:
    """Its response is complete, its bytes are not taken: the connection idles, and goes."""
    limits = HttpLimits(idle_s=0.2)
    acts = Acts(texts=("x" * 20_000_000,))
    async with double_stage(acts, limits=limits) as (stage, session), connected(stage) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(request(session, BODY, "connection: close"))
        await wait_until(lambda: session.ends == [["commit"]])
        await wait_until(lambda: stage.gateway.num_connections == 0)


# --- real sessions --------------------------------------------------------------------------------
async def test_floods_of_one_session_change_no_other_and_end_with_it(qwen3: Any) -> None:
    """Garbage, requests beyond the limit, streams that are left: then one good turn."""
    good = text(qwen3, "8")[0]
    async with gateway_stage(qwen3) as stage:
        stage.engine.default = lambda _: good
        other = stage.open(group_index=4)
        rng = random.Random(3)

        async def odd() -> None:
            for n in range(60):
                message = {"role": "user", "content": f"{n} {rng.random()}"}
                kind = n % 4
                if kind == 0:
                    async with connected(stage) as client:
                        body = json.dumps({"model": "m", "messages": [message], "stream": True})
                        client.send(request(stage.session, body.encode()))
                        async with asyncio.timeout(20):
                            await client.reader.read(1)
                elif kind == 1:
                    await stage.chat([{"role": "wizard", "content": []}])
                elif kind == 2:
                    await stage.client.post(f"{stage.url}/{CHAT}", content=rng.randbytes(99))
                else:
                    await stage.chat([message], n=2)

        async with health_asked(stage):
            await asyncio.gather(odd(), odd())
            await wait_until(lambda: at_rest(stage) and stage.engine.in_flight == 0)
            mine = await stage.chat(session=stage.session)
            theirs = await stage.chat(session=other)
        assert mine.status_code == theirs.status_code == 200
        assert stage.gateway.counters["failed"] == 0
        for session in (stage.session, other):
            await session.close()
        clean = await other.collect()
        after = await stage.chat()

        assert after.status_code == 410
        assert stage.book.num_open == stage.book.num_in_flight == 0
        assert len(clean.calls) == 1
        (await stage.session.collect()).validate()


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
async def test_floods_of_sessions_that_come_and_go_leave_only_bounded_keys(
    qwen3: Any, count: int
) -> None:
    good = text(qwen3, "8")[0]
    async with gateway_stage(qwen3) as stage:
        stage.engine.default = lambda _: good

        async def live(number: int) -> None:
            session = stage.open(group_index=number)
            stage.opened.remove(session)
            for stream in (False, True):
                answer = await stage.chat(session=session, stream=stream)
                assert answer.status_code == 200, answer.text
            await session.close()
            await session.collect()
            assert (await stage.chat(session=session)).status_code == 410

        async def attack() -> None:
            stage.engine.asked.clear()
            for start in range(0, count // 3, 10):
                await asyncio.gather(*(live(start + n) for n in range(10)))

        async with health_asked(stage):
            growth = await grows(stage, attack)

        assert stage.book.num_open == 1
        # A key of 32 hex a session, and what a book of them costs.
        assert min(growth) < count, growth


async def test_a_socket_that_is_reset_in_every_phase_of_a_request_ends_nothing() -> None:
    """Reset (not closed): behind every prefix of a request, and of its answer."""
    async with double_stage() as (stage, session):
        whole = request(session, STREAM)
        async with health_asked(stage):
            for cut in range(0, len(whole) + 1, 7):
                with socket.create_connection(("127.0.0.1", stage.gateway.port)) as client:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                    client.sendall(whole[:cut])
                    await asyncio.sleep(0)
            await wait_until(lambda: at_rest(stage))
        await stage.client.aclose()
        await wait_until(lambda: stage.gateway.num_connections == 0)
        async with httpx.AsyncClient(verify=False) as client:
            answer = await client.post(f"{stage.url}/{CHAT}", content=BODY)

        assert answer.status_code == 200
        assert all(len(ends) == 1 for ends in session.ends)
