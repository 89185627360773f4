"""Isolated rewards over a real server and a real verifier process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Callback, Queue

from examples.devserver import DevServer, die_with_parent, free_port
from rollstream.errors import RewardFault
from rollstream.sample import Sample
from rollstream.settings import RewardTable
from tests.builders import a_prompt, a_sample
from worker.rewards import build_scorer
from worker.rewards.isolated import Isolated
from worker.rewards.judges import QUEUE, judgement

HANGS = "9^{9^{9^{9}}}"
"""Its evaluation never leaves C code: no signal, no exception, no timeout inside can end it."""

pytestmark = pytest.mark.xdist_group("verifier")


def start_verifier(url: str) -> subprocess.Popen[str]:
    """Start a verifier and wait until it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "worker.rewards.verifier", "--redis.url", url],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "verifier_ready" in line:
            return process
    raise AssertionError(f"the verifier ended with {process.wait()}")


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    """Ask for the end and return the exit code."""
    process.send_signal(number)
    try:
        return process.wait(45)
    finally:
        if process.poll() is None:
            process.kill()
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture(scope="module")
def verifier(valkey_url: str) -> Iterator[subprocess.Popen[str]]:
    process = start_verifier(valkey_url)
    yield process
    end(process)


@asynccontextmanager
async def asking(url: str, run: str, timeout_s: float = 5.0, **how: Any) -> AsyncIterator[Isolated]:
    isolated = Isolated(
        redis_url=url, rq_url=None, run=run, incarnation="0123456789ab", timeout_s=timeout_s, **how
    )
    try:
        yield isolated
    finally:
        await isolated.aclose()


def children(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that the verifier forked and that live."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


async def until(condition: Callable[[], Any], limit_s: float = 45.0) -> Any:
    """Return the first true answer of `condition`."""
    async with asyncio.timeout(limit_s):
        while not (found := condition()):
            await asyncio.sleep(0.01)
        return found


async def test_right_and_wrong_answers_are_judged_and_no_key_is_left(
    verifier: Any, valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name) as isolated:
        verdicts = await asyncio.gather(
            isolated.judge("math_verify", "0.5", r"\frac{1}{2}"),
            isolated.judge("math_verify", "1+x", "x+1"),
            isolated.judge("math_verify", "9", "8"),
            isolated.judge("math_verify", "not mathematics {", "8"),
            isolated.judge("math_verify", "9" * 100_000, "8"),
        )
    assert verdicts == [1.0, 1.0, 0.0, 0.0, 0.0]
    with redis.Redis.from_url(valkey_url) as client:
        assert client.keys(f"rs:{{{run_name}}}*") == []
        await until(lambda: not client.keys("rq:job:0123456789ab*"))


async def test_a_judge_that_hangs_is_killed_at_its_timeout_and_the_next_one_runs(
    verifier: subprocess.Popen[str], valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name, timeout_s=1.0) as isolated:
        asked = asyncio.create_task(isolated.judge("math_verify", HANGS, "8"))
        [pid] = await until(lambda: children(verifier))
        await until(lambda: os.getpgid(pid) == pid)  # its first act, behind the fork
        assert pid != os.getpgid(verifier.pid)
        with pytest.raises(RewardFault, match="killed after 1 s") as caught:
            await asked
        # The same seed would give the same answer again: another attempt cannot help.
        assert (caught.value.detail, caught.value.retryable) == ("timeout", False)
        assert pid not in children(verifier)
        assert await isolated.judge("math_verify", "8", "8") == 1.0


async def test_a_judge_that_is_killed_is_tried_once_more_and_then_no_verdict_is_told(
    verifier: subprocess.Popen[str], valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name, timeout_s=10.0) as isolated:
        await until(lambda: not children(verifier))  # the process of an earlier judge may linger
        asked = asyncio.create_task(isolated.judge("math_verify", HANGS, "8"))
        killed: list[int] = []
        for _ in range(2):
            [pid] = await until(lambda: [p for p in children(verifier) if p not in killed])
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        with pytest.raises(RewardFault, match="its process ended with wait status 9") as caught:
            await asked
    assert (caught.value.detail, caught.value.retryable) == ("crashed", True)


async def test_a_job_that_nobody_runs_cannot_hang_the_worker(
    valkey_url: str, run_name: str
) -> None:
    async with asking(f"{valkey_url}/1", run_name, timeout_s=0.1) as isolated:
        with pytest.raises(RewardFault, match="is a verifier running") as caught:
            await isolated.judge("math_verify", "8", "8")
        assert (caught.value.detail, caught.value.retryable) == ("lost", True)
        with redis.Redis.from_url(f"{valkey_url}/1") as client:
            [job] = client.keys("rq:job:*")
            assert 0 < client.ttl(job) <= 1


async def test_a_queue_that_stays_away_is_a_retryable_fault(run_name: str) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    async with asking(url, run_name, patience_s=0.5) as isolated:
        with pytest.raises(RewardFault, match="cannot be used") as caught:
            await isolated.judge("math_verify", "8", "8")
    assert (caught.value.detail, caught.value.retryable) == ("unreachable", True)


async def test_a_judgement_waits_for_a_server_that_is_away_or_full_and_is_asked_for_again(
    run_name: str,
) -> None:
    with DevServer() as server:
        process = start_verifier(server.url)
        try:
            async with asking(server.url, run_name, timeout_s=1.0) as isolated:
                with redis.Redis.from_url(server.url) as client:
                    client.config_set("maxmemory", 1)
                    asked = asyncio.create_task(isolated.judge("math_verify", "8", "8"))
                    await until(lambda: isolated._outages > 1)
                    client.config_set("maxmemory", 0)
                    assert await asyncio.wait_for(asked, 10) == 1.0
                # Away while the judge works: job and judgement are lost with the server.
                asked = asyncio.create_task(isolated.judge("math_verify", HANGS, "8"))
                await until(lambda: children(process))
                server.kill()
                await until(lambda: isolated._outages > 2)
                server.start()
                with pytest.raises(RewardFault, match="killed after 1 s"):
                    await asyncio.wait_for(asked, 15)
        finally:
            end(process)


async def test_what_nobody_waits_for_is_dropped(valkey_url: str, run_name: str) -> None:
    url = f"{valkey_url}/1"
    async with asking(url, run_name) as isolated:
        asked = asyncio.create_task(isolated.judge("math_verify", "8", "8"))
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
            client.rpush(isolated._key, *strays, judgement(token, 0.25), judgement(token, 1.0))
            assert await asked == 0.25
            await until(lambda: client.llen(isolated._key) == 0 or isolated._wanted.is_set())
        assert isolated.num_strays >= len(strays)


@pytest.mark.parametrize(
    "message", [{"reward": "1"}, {"reward": True}, {"reward": float("nan")}, {}, {"detail": "x"}]
)
async def test_a_judgement_without_a_number_is_no_verdict(
    message: dict[str, Any], valkey_url: str, run_name: str
) -> None:
    url = f"{valkey_url}/1"
    async with asking(url, run_name) as isolated:
        asked = asyncio.create_task(isolated.judge("math_verify", "8", "8"))
        await until(lambda: isolated._waiting)
        [token] = isolated._waiting
        with redis.Redis.from_url(url) as client:
            client.rpush(isolated._key, json.dumps({"token": token} | message))
        with pytest.raises(RewardFault, match="gave no verdict"):
            await asked


async def test_two_scorers_of_one_process_never_take_each_others_judgements(
    verifier: Any, valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name) as first, asking(valkey_url, run_name) as second:
        asked = [
            (first if i % 2 else second).judge("math_verify", str(i), str(i - i % 2))
            for i in range(8)
        ]
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
    assert "no judge is called 'os.system'" in texts[0]
    assert not proof.exists()
    assert verifier.poll() is None


async def test_the_isolated_share_is_the_same_samples_every_time(
    verifier: Any, valkey_url: str, run_name: str, qwen3: Any
) -> None:
    scorer = build_scorer(
        RewardTable(kind="math", isolated_share=0.5),
        renderer=qwen3,
        redis_url=valkey_url,
        run=run_name,
        incarnation="0123456789ab",
        run_seed=0,
    )
    ids = qwen3.encode_raw(r"\boxed{1+x}").tolist()

    async def reward(member: int) -> Any:
        # Equal as mathematics, different as strings: 1.0 says that math-verify judged.
        sample: Sample = a_sample(0, member, turns=[(ids, ())], label="x+1", reward=None)
        await scorer.score(sample, a_prompt())
        return sample.reward

    first = await asyncio.gather(*map(reward, range(16)))
    assert {0.0, 1.0} == set(first)
    assert 3 <= sum(first) <= 13
    assert await asyncio.gather(*map(reward, range(16))) == first
    await scorer.aclose()


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
                    return await isolated.judge("math_verify", "8", "8")

            assert asyncio.run(judged()) == 1.0
        finally:
            code = end(process)
        assert code == 0


def test_an_unreachable_server_is_one_clear_line_and_an_exit_code() -> None:
    url = f"redis://user:hidden@127.0.0.1:{free_port()}"
    found = subprocess.run(
        [sys.executable, "-m", "worker.rewards.verifier", "--redis.url", url],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert found.returncode == 3
    [line] = [text for text in found.stderr.splitlines() if text.strip()]
    assert "python -m worker.rewards.verifier: error: Redis cannot be reached" in line
    assert "hidden" not in found.stderr


def test_an_unknown_key_is_one_clear_line() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "worker.rewards.verifier", "--redis.urll", "x"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert found.returncode == 2
    assert "redis.url" in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
