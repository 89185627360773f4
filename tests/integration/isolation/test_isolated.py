"""Isolated jobs over a real server and a real verifier process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Callback, Queue
from structlog.testing import capture_logs

from benchmarks.verify import FORK_BOMB, SWALLOWS
from examples.devserver import DevServer, free_port
from worker.isolation import IsolatedFault
from worker.isolation.messages import QUEUE, result
from worker.isolation.supervisor import TICK_S

from .parts import HANGS, asking, at_work, below, end, pens, servers, start_verifier, until

pytestmark = pytest.mark.xdist_group("verifier")


@pytest.fixture(scope="module")
def verifier(valkey_url: str) -> Iterator[subprocess.Popen[str]]:
    process = start_verifier(valkey_url)
    yield process
    end(process)


async def test_right_and_wrong_answers_are_judged_and_no_key_is_left(
    verifier: Any, valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name) as isolated:
        verdicts = await asyncio.gather(
            isolated.judge("0.5", r"\frac{1}{2}"),
            isolated.judge("1+x", "x+1"),
            isolated.judge("9", "8"),
            isolated.judge("not mathematics {", "8"),
            isolated.judge("9" * 100_000, "8"),
        )
    assert list(verdicts) == [1.0, 1.0, 0.0, 0.0, 0.0]
    with redis.Redis.from_url(valkey_url) as client:
        assert client.keys(f"rs:{{{run_name}}}*") == []
        await until(lambda: not client.keys("rq:job:0123456789ab*"))


async def test_hostile_programs_are_ended_by_a_real_verifier_and_nothing_of_them_is_left(
    verifier: subprocess.Popen[str], valkey_url: str, run_name: str
) -> None:
    ends = {
        FORK_BOMB: (0.4, ("timed out", "processes")),
        "while True: pass": (0.4, ("timed out",)),
        SWALLOWS: (0.4, ("timed out",)),
        "x = bytearray(10 << 30)": (10.0, ("MemoryError",)),
        "import ctypes; ctypes.string_at(0)": (10.0, ("SIGSEGV",)),
    }
    async with asking(valkey_url, run_name) as isolated:
        for program, (timeout_s, expected) in ends.items():
            payload = {"code": program, "timeout_s": timeout_s}
            told = await isolated.call("python", payload, timeout_s=20.0)
            assert any(how in told["ending"] + told["stderr"] for how in expected), (program, told)
        assert await isolated.judge("8", "8") == 1.0
    # One server and the process of its jobs.
    await until(lambda: len(servers(verifier)) == 1 and len(below(verifier.pid)) == 2)


async def test_a_judge_that_hangs_is_killed_at_its_timeout_and_the_next_one_runs(
    verifier: subprocess.Popen[str], valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name, timeout_s=1.0) as isolated:
        asked = asyncio.create_task(isolated.judge(HANGS, "8"))
        pid = await at_work(verifier)
        assert os.getpgid(pid) == pid != os.getpgid(verifier.pid)
        with pytest.raises(IsolatedFault, match="killed after 1 s") as caught:
            await asked
        # The same seed would give the same answer again: another attempt cannot help.
        assert (caught.value.detail, caught.value.retryable) == ("timeout", False)
        assert pid not in pens(verifier)
        assert await isolated.judge("8", "8") == 1.0


async def test_a_judge_that_is_killed_is_tried_once_more_and_then_no_verdict_is_told(
    verifier: subprocess.Popen[str], valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name, timeout_s=10.0) as isolated:
        asked = asyncio.create_task(isolated.judge(HANGS, "8"))
        killed: list[int] = []
        for _ in range(2):
            pid = await at_work(verifier, but=killed)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        with pytest.raises(IsolatedFault, match="its process was ended by SIGKILL") as caught:
            await asked
    assert (caught.value.detail, caught.value.retryable) == ("crashed", True)


async def test_a_job_that_nobody_runs_cannot_hang_the_worker(
    valkey_url: str, run_name: str
) -> None:
    async with asking(f"{valkey_url}/1", run_name, timeout_s=0.1) as isolated:
        with pytest.raises(IsolatedFault, match="is a verifier running") as caught:
            await isolated.judge("8", "8")
        assert (caught.value.detail, caught.value.retryable) == ("lost", True)
        with redis.Redis.from_url(f"{valkey_url}/1") as client:  # taken back: no list grows
            await until(lambda: client.keys("rq:job:*") == [])
            assert client.llen(f"rq:queue:{QUEUE}") == 0


async def test_a_worker_says_once_that_no_verifier_runs_long_before_its_jobs_are_lost(
    valkey_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.isolation.client._QUIET_READS", 1)
    url = f"{valkey_url}/2"
    with redis.Redis.from_url(url) as client:  # one that was killed is still in RQ's set
        client.sadd(f"rq:workers:{QUEUE}", "rq:worker:gone")
    async with asking(url, run_name, timeout_s=60.0) as isolated:
        with capture_logs() as logs:
            asked = asyncio.create_task(isolated.judge("8", "8"))
            await until(lambda: logs)
            await isolated.check()
            asked.cancel()
    [said] = logs
    assert (said["event"], said["log_level"]) == ("no_verifier", "warning")
    assert "python -m worker.isolation.verifier" in said["message"]


async def test_the_start_of_a_worker_says_nothing_of_verifiers_where_one_runs(
    verifier: Any, valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name) as isolated:
        assert await isolated.judge("8", "8") == 1.0
        with capture_logs() as logs:
            await isolated.check()
    assert logs == []


async def test_a_queue_that_stays_away_is_a_retryable_fault(run_name: str) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    async with asking(url, run_name, patience_s=0.5) as isolated:
        with pytest.raises(IsolatedFault, match="cannot be used") as caught:
            await isolated.judge("8", "8")
    assert (caught.value.detail, caught.value.retryable) == ("unreachable", True)


@pytest.mark.slow
async def test_a_judgement_waits_for_a_server_that_is_away_or_full_and_is_asked_for_again(
    run_name: str,
) -> None:
    with DevServer() as server:
        process = start_verifier(server.url)
        try:
            async with asking(server.url, run_name, timeout_s=1.0) as isolated:
                with redis.Redis.from_url(server.url) as client:
                    client.config_set("maxmemory", 1)
                    asked = asyncio.create_task(isolated.judge("8", "8"))
                    await until(lambda: isolated._outages > 1)
                    client.config_set("maxmemory", 0)
                    assert await asyncio.wait_for(asked, 10) == 1.0
                # Away while the judge works: job and judgement are lost with the server.
                asked = asyncio.create_task(isolated.judge(HANGS, "8"))
                await at_work(process)
                server.kill()
                await until(lambda: isolated._outages > 2)
                server.start()
                with pytest.raises(IsolatedFault, match="killed after 1 s"):
                    await asyncio.wait_for(asked, 15)
        finally:
            end(process)


async def test_what_nobody_waits_for_is_dropped(valkey_url: str, run_name: str) -> None:
    url = f"{valkey_url}/1"
    async with asking(url, run_name) as isolated:
        asked = asyncio.create_task(isolated.judge("8", "8"))
        await until(lambda: isolated._waiting)
        [token] = isolated._waiting
        strays = [
            b"garbage",
            b"[1]",
            b'{"token": "another"}',
            b"\xff",
            b'{"token": "' + token.encode() + b'", "x": "' + b"x" * 70_000 + b'"}',
            b"[" * 5000,
        ]
        with redis.Redis.from_url(url) as client:
            client.rpush(isolated._key, *strays, result(token, 0.25), result(token, 1.0))
            assert await asked == 0.25
            await until(lambda: client.llen(isolated._key) == 0 or isolated._wanted.is_set())
        assert isolated.num_strays >= len(strays)


@pytest.mark.parametrize("message", [{}, {"detail": "x"}, {"error": 5, "detail": None}])
async def test_a_message_without_a_value_is_no_result(
    message: dict[str, Any], valkey_url: str, run_name: str
) -> None:
    url = f"{valkey_url}/1"
    async with asking(url, run_name) as isolated:
        asked = asyncio.create_task(isolated.judge("8", "8"))
        await until(lambda: isolated._waiting)
        [token] = isolated._waiting
        with redis.Redis.from_url(url) as client:
            client.rpush(isolated._key, json.dumps({"token": token} | message))
        with pytest.raises(IsolatedFault, match="gave no result") as caught:
            await asked
    assert (caught.value.detail, caught.value.retryable) == ("invalid", False)


async def test_two_scorers_of_one_process_never_take_each_others_judgements(
    verifier: Any, valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name) as first, asking(valkey_url, run_name) as second:
        asked = [(first if i % 2 else second).judge(str(i), str(i - i % 2)) for i in range(8)]
        assert await asyncio.gather(*asked) == [1.0, 0.0] * 4
        assert (first.num_strays, second.num_strays) == (0, 0)


def test_a_job_can_name_nothing_outside_the_closed_table(
    verifier: subprocess.Popen[str], valkey_url: str, tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    with redis.Redis.from_url(valkey_url) as client:
        queue = Queue(QUEUE, connection=client, serializer="json")
        done = Callback("os.system")
        options: dict[str, Any] = {"failure_ttl": 60, "timeout": 5}
        jobs = [
            queue.enqueue_call("os.system", args=(f"touch {proof}",), **options),
            queue.enqueue_call("math_verify", args=(f"touch {proof}",), on_failure=done, **options),
            queue.enqueue_call("builtins.exec", args=("1",), on_success=done, **options),
        ]
        limit = time.monotonic() + 10
        while not all(job.get_status() == "failed" for job in jobs):
            assert time.monotonic() < limit, [job.get_status() for job in jobs]
            time.sleep(0.02)
        texts = [str(job.latest_result().exc_string) for job in jobs]
    assert "no job is called 'os.system'" in texts[0]
    assert not proof.exists()
    assert verifier.poll() is None


def test_sigterm_ends_an_idle_verifier_with_success_and_an_outage_does_not() -> None:
    with DevServer() as server:
        process = start_verifier(server.url)
        try:
            server.kill()
            time.sleep(0.2)
            assert process.poll() is None
            server.start()

            async def judged() -> float:
                async with asking(server.url, "after", timeout_s=5.0) as isolated:
                    return await isolated.judge("8", "8")

            assert asyncio.run(judged()) == 1.0
        finally:
            code = end(process)
        assert code == 0


@pytest.mark.slow
def test_a_verifier_that_was_stopped_for_longer_than_it_waits_goes_on(
    valkey_url: str, run_name: str
) -> None:
    process = start_verifier(valkey_url)

    async def judged() -> float:
        async with asking(valkey_url, run_name, timeout_s=10.0) as isolated:
            return await isolated.judge("8", "8")

    try:
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            time.sleep(2 * TICK_S)  # its wait is over while it stands still
            process.send_signal(signal.SIGCONT)
            assert asyncio.run(judged()) == 1.0
            assert process.poll() is None
    finally:
        assert end(process) == 0


def test_an_unreachable_server_is_one_clear_line_and_an_exit_code() -> None:
    url = f"redis://user:hidden@127.0.0.1:{free_port()}"
    found = subprocess.run(
        [sys.executable, "-m", "worker.isolation.verifier", "--redis.url", url],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert found.returncode == 3
    [line] = [text for text in found.stderr.splitlines() if text.strip()]
    assert "python -m worker.isolation.verifier: error: Redis cannot be reached" in line
    assert "hidden" not in found.stderr


def test_an_unknown_key_is_one_clear_line() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "worker.isolation.verifier", "--redis.urll", "x"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert found.returncode == 2
    assert "redis.url" in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_records_that_cannot_be_read_are_thrown_away_and_hold_nobody_up(
    valkey_url: str, run_name: str
) -> None:
    client = redis.Redis.from_url(valkey_url)
    record = {"created_at": "2026-01-01T00:00:00.000000Z", "origin": "verify", "timeout": "15"}
    forged: dict[str, dict[str, Any]] = {
        "created": {**record, "created_at": "yesterday"},
        "timeout": {**record, "timeout": "long"},
        "meta": {**record, "meta": b"\xff\xfe"},
        "pickle": {**record, "data": b"\x80\x04\x95"},
        "retries": {**record, "retries_left": "many"},
        "times": {**record, "enqueued_at": "x", "started_at": "y"},
    }
    for name, fields in forged.items():
        client.hset(f"rq:job:{name}", mapping=fields)
    client.set("rq:job:text", "no hash")
    names: list[str | bytes] = [*forged, "text", b"\xff\xfe", b"", "x" * 100_000]
    client.rpush("rq:queue:verify:intermediate", *names)
    client.rpush("rq:queue:verify", *names * 4)
    verifier = start_verifier(valkey_url)
    server = servers(verifier)

    async def scenario() -> float:
        async with asking(valkey_url, run_name) as isolated:
            return await isolated.judge("1", "1")

    try:
        assert asyncio.run(scenario()) == 1.0
        assert servers(verifier) == server
    finally:
        end(verifier)
