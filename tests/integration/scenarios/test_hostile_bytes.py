"""Whatever lies in Redis is data (rq/rq#2389: pickle in Redis is code execution).

Every reader gets random bytes, a pickle, a record that is nested or claims to be long, a text that
inflates, and names of functions that nobody configured: it refuses them, and the others go on.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from examples.devserver import DevServer, die_with_parent
from rollstream.cli.__main__ import main
from rollstream.errors import DropReason
from rollstream.group import GroupView, Keep
from rollstream.queue import calls
from rollstream.wire import encode_prompt
from tests.backstage import Backstage, Connect, wait_until
from tests.builders import a_prompt
from tests.integration.isolation.parts import children
from tests.integration.worker.parts import Run, a_run
from tests.integration.worker.parts import wait_until as wait_in_loop
from worker.aggregate.loader import LoadedFilter
from worker.isolation.messages import QUEUE

INFLATED = 300 << 20
"""More than a text may be."""


class Proof:
    """Unpickled anywhere, it leaves a file where the test looks."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (Proof.path,)


def inflating() -> bytes:
    packer, block = zlib.compressobj(1), bytes(1 << 20)
    return b"".join([packer.compress(block) for _ in range(INFLATED >> 20)] + [packer.flush()])


@pytest.fixture(scope="module")
def payloads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    Proof.path = str(tmp_path_factory.mktemp("proof") / "executed")
    yield {
        "random": random.Random(7).randbytes(700),
        "pickle": pickle.dumps(Proof()),
        "nested": b"\x91" * 100_000,
        "nested maps": b"\x81\xa1v" * 100_000,
        "claims to be long": b"\xdd\xff\xff\xff\xff",
        "claims long bytes": b"\x82\xa1v\x01\xa6prompt\xc6\xff\xff\xff\xff",
        "inflates": inflating(),
        "empty": b"",
    }
    assert not Path(Proof.path).exists()


# --- the trainer ---------------------------------------------------------------------------------
def test_trainer_refuses_hostile_records_and_trains_the_others(
    run: Backstage, connect: Connect, payloads: dict[str, bytes]
) -> None:
    places = [
        (key, field, payload)
        for key, field in (("g", "prompt"), ("g", "h0"), ("b", "0"), ("b", "x0"))
        for payload in payloads.values()
    ]
    bad = range(len(places))
    run.finish(*bad, 100, 101)
    for gid, (key, field, payload) in enumerate(places):
        run.queue.client.hset(f"{run.queue.prefix}{key}:{gid}", field, payload)
    run.end_of_data()

    trained: list[int] = []
    for batch in connect(text=True).batches(groups=4, timeout_s=45):
        trained += batch.group_indexes
        batch.ack()

    # An empty text is no text, which is no damage.
    harmless = {g for g, (_, field, payload) in enumerate(places) if field == "x0" and not payload}
    assert set(trained) == {100, 101} | harmless
    dropped = run.queue.counters()["dropped:custom"]
    assert dropped == len(places) - len(harmless)
    assert run.queue.call(calls.audit(deep=True)).problems == []


# --- the worker ----------------------------------------------------------------------------------
UNKNOWN: list[dict[str, Any]] = [
    {"env": "os:system"},
    {"tools": [{"type": "function", "function": {"name": "os.system", "parameters": {}}}]},
    {"metadata": {"generate_function_path": "os:system", "generate": "os.system"}},
    {"metadata": {"reward": "builtins:exec", "filters": ["os:system"]}},
]
"""Rows that ask for functions: the first two are refused, the others are words in metadata."""


async def put_prompt(run: Run, gid: int, prompt: bytes) -> None:
    assert await run.queue.call(calls.enqueue(gid, 1, prompt)) == "new"


async def test_worker_refuses_hostile_prompts_and_runs_the_others(
    valkey_url: str, run_name: str, payloads: dict[str, bytes]
) -> None:
    async with a_run(valkey_url, run_name) as run:
        asked = [encode_prompt(a_prompt(0, 1, **fields)) for fields in UNKNOWN]
        hostile = [*payloads.values(), *asked]
        for gid, prompt in enumerate(hostile):
            await put_prompt(run, gid, prompt)
        await put_prompt(run, 100, encode_prompt(a_prompt(100, 1)))
        parts = run.worker(slots=64)
        parts.start()

        async def all_ended() -> bool:
            depths = await run.queue.depths()
            return depths["live"] == depths["ready"]

        await wait_in_loop(all_ended, timeout_s=45)
        # What only stands in metadata is not asked for: those two and the good one are ready.
        assert (await run.queue.depths())["ready"] == 3
        assert await run.state_of(100, 1) == "ready"
        assert sum((await run.drops()).values()) == len(hostile) - 2
        assert parts.working is not None
        assert not parts.working.done()
        await run.audit()


# --- the aggregator ------------------------------------------------------------------------------
async def test_aggregator_refuses_hostile_records_and_judges_the_others(
    valkey_url: str, run_name: str, payloads: dict[str, bytes]
) -> None:
    def needs_bodies(group: GroupView) -> Keep:
        assert all(member.trajectory is not None for member in group.members)
        return Keep()

    reads_all = LoadedFilter("mine.py:f", needs_bodies, built_in=False, needs="bodies")
    fields = (("g", "prompt"), ("g", "h0"), ("b", "0"), ("b", "x0"))
    places = [(*field, payload) for field in fields for payload in payloads.values() if payload]
    async with a_run(valkey_url, run_name, cap=100) as run:
        for gid in [*range(len(places)), 100]:
            await run.enqueue(gid, 1)
        parts = run.worker(slots=64, filters=(reads_all,))
        parts.start(aggregate=False)

        async def all_full() -> bool:
            return (await run.queue.depths())["full"] == len(places) + 1

        await wait_in_loop(all_full)
        for gid, (key, field, payload) in enumerate(places):
            await run.queue.client.hset(f"{run.queue.prefix}{key}:{gid}", field, payload)
        await parts.stop()
        parts.start()

        await run.ready(1)
        assert await run.state_of(100, 1) == "ready"
        await wait_in_loop(lambda: all_dropped(run, len(places)), timeout_s=45)
        assert await run.drops() == {DropReason.FILTER_ERROR: len(places)}
        await run.audit()


async def all_dropped(run: Run, count: int) -> bool:
    return sum((await run.drops()).values()) == count


# --- the command line ----------------------------------------------------------------------------
LOOKS: tuple[Sequence[str], ...] = (
    ("stats",), ("audit", "--deep"), ("runs",), ("show",), ("show", "0"), ("show", "1"),
)  # fmt: skip


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
def test_command_line_shows_a_run_whose_records_are_hostile(
    run: Backstage,
    payloads: dict[str, bytes],
    command: Sequence[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run.finish(*range(len(payloads)))
    for gid, payload in enumerate(payloads.values()):
        for field in ("prompt", "h0", "e0", "r0"):
            run.queue.client.hset(f"{run.queue.prefix}g:{gid}", field, payload)
        if gid % 2:
            run.queue.call(calls.withdraw(str(gid)))  # they go into the record of drops
    where = ["--redis", f"redis://127.0.0.1:{port_of(run)}"]
    if command[0] != "runs":
        where += ["--run", run.queue.run]
    assert main([*command, *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main([*command, *where]) == 0
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err


def port_of(run: Backstage) -> int:
    port: int = run.queue.client.connection_pool.connection_kwargs["port"]
    return port


# --- the verifier --------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_verifier_refuses_hostile_jobs_and_judges_the_others(
    payloads: dict[str, bytes], tmp_path: Path
) -> None:
    with DevServer() as server, redis.Redis.from_url(server.url) as client:
        log = tmp_path / "verifier.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "worker.isolation.verifier", "--redis.url", server.url,
                    "--verifier.max_processes", "1",
                ],
                stderr=out,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        try:
            wait_until(lambda: b"verifier_ready" in log.read_bytes(), 15)
            [server_pid] = wait_until(lambda: children(process.pid), 15)
            before = peak_bytes(server_pid)
            for number, payload in enumerate(payloads.values()):
                job = f"hostile-{number}"
                client.hset(
                    f"rq:job:{job}",
                    mapping={"data": payload, "status": "queued", "origin": QUEUE,
                             "created_at": "2024-01-01T00:00:00.000000Z", "timeout": 5},
                )  # fmt: skip
                client.rpush(f"rq:queue:{QUEUE}", job)
            wait_until(lambda: client.llen(f"rq:queue:{QUEUE}") == 0, 12)
            judged = json.dumps(["math_verify", None, [], {
                "run": "r", "inbox": "i", "token": "t", "timeout_s": 5.0,
                "payload": {"answer": "2", "label": "2"},
            }])  # fmt: skip
            client.hset(
                "rq:job:good",
                mapping={"data": zlib.compress(judged.encode()), "status": "queued",
                         "origin": QUEUE, "created_at": "2024-01-01T00:00:00.000000Z",
                         "timeout": 5},
            )  # fmt: skip
            client.rpush(f"rq:queue:{QUEUE}", "good")
            answer = client.blpop(["rs:{r}:r:i"], 8)
            assert answer is not None, log.read_text()[-2000:]
            assert process.poll() is None
            assert peak_bytes(server_pid) - before < INFLATED
            assert "quitting" not in log.read_text()  # RQ's word for a worker that gives up
        finally:
            process.kill()
            process.wait()


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
