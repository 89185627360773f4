"""The processes of a verifier: hostile jobs end, and nothing of them is left running."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from examples.devserver import DevServer
from worker.isolation import IsolatedFault
from worker.isolation.messages import MAX_PAYLOAD_BYTES, QUEUE

from . import functions
from .parts import asking, below, end, pens, servers, start_line, start_verifier, until

pytestmark = [pytest.mark.xdist_group("verifier"), pytest.mark.slow]

HERE = str(Path(functions.__file__))
ALL = [
    f"{HERE}:{name}"
    for name, found in vars(functions).items()
    if callable(found) and getattr(found, "__module__", "") == functions.__name__ and name[0] != "_"
]
MEMORY_MB = 256
FILE_MB = 8


def named(name: str) -> str:
    """Return the job that a function of the operator's is."""
    return f"{HERE}:{name}"


def start(url: str, *more: str, processes: int = 1) -> subprocess.Popen[str]:
    own = ["--reward.isolated", ",".join(["math_verify", *ALL])]
    limits = [f"--verifier.memory_mb={MEMORY_MB}", f"--verifier.file_mb={FILE_MB}"]
    return start_verifier(url, *own, *limits, *more, processes=processes)


@contextlib.contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """End a verifier with the block, also where the test fails in its middle."""
    try:
        yield process
    finally:
        end(process)


@pytest.fixture(scope="module")
def verifier(valkey_url: str) -> Iterator[subprocess.Popen[str]]:
    process = start(f"{valkey_url}/3")
    yield process
    assert end(process) == 0


@pytest.fixture
def url(valkey_url: str) -> str:
    return f"{valkey_url}/3"


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def says(process: subprocess.Popen[str], event: str) -> None:
    """Wait for a line in the log."""
    assert process.stderr is not None
    assert any(event in line for line in process.stderr)


async def number_in(path: Path) -> int:
    return int(await until(lambda: path.exists() and path.read_text()))


# --- results -------------------------------------------------------------------------------------
async def test_a_function_of_the_operators_gets_an_object_and_gives_any_json(
    verifier: Any, url: str, run_name: str
) -> None:
    payload = {"a": [1, 2.5, None, True], "b": {"c": "ü \ud800 \x00"}}
    async with asking(url, run_name) as isolated:
        assert await isolated.call(named("echo"), payload, timeout_s=10) == payload


async def test_a_job_that_is_not_in_the_verifiers_own_table_is_told_at_once(
    verifier: Any, url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        for job in ("os.system", f"{HERE}:_escape", "os:getcwd", "code.py:x", ""):
            with pytest.raises(IsolatedFault, match="no job is called") as caught:
                await isolated.call(job, {}, timeout_s=60)
            assert "reward.isolated of the verifier's own configuration" in caught.value.message
            assert (caught.value.detail, caught.value.retryable) == ("invalid", False)


@pytest.mark.parametrize(
    "payload",
    [
        {"x": "x" * MAX_PAYLOAD_BYTES},
        {"x": float("nan")},
        {"x": {1, 2}},
        {"x": b"bytes"},
    ],
    ids=["large", "nan", "set", "bytes"],
)
async def test_a_payload_that_cannot_be_sent_is_a_value_error(
    payload: dict[str, Any], url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        with pytest.raises(ValueError, match="payload"):
            await isolated.call("math_verify", payload, timeout_s=10)
        assert not isolated._waiting


async def test_a_result_that_is_too_large_is_no_result(
    verifier: Any, url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        with pytest.raises(IsolatedFault, match="above the limit") as caught:
            await isolated.call(named("echo"), {"x": "x" * 70_000}, timeout_s=10)
        assert (caught.value.detail, caught.value.retryable) == ("too_large", False)


async def test_built_in_jobs_share_a_process_and_functions_of_the_operators_do_not(
    verifier: Any, url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        assert await isolated.judge("1", "1") == 1.0
        before = pens(verifier)
        for number in range(5):
            assert await isolated.judge(str(number), str(number)) == 1.0
        assert pens(verifier) == before
        used = [await isolated.call(named("pid"), {}, timeout_s=10) for _ in range(3)]
        assert len(set(used)) == 3
        assert not any(map(is_there, used))


# --- hostile jobs --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "payload", "detail", "said"),
    [
        ("swallow", {}, "timeout", "killed after 1 s"),
        ("shut_the_pipe", {}, "crashed", "SIGKILL"),
        ("segfault", {}, "crashed", "SIGSEGV"),
        ("leave_and_die", {}, "crashed", "SIGKILL"),
        ("lie", {}, "crashed", "no message"),
        ("eat", {}, "raised", "MemoryError"),
        ("leave_the_process", {}, "raised", "SystemExit"),
        ("leave_and_hang", {}, "timeout", "killed after 1 s"),
    ],
)
async def test_a_hostile_job_has_its_reason_and_the_next_one_runs(
    name: str,
    payload: dict[str, Any],
    detail: str,
    said: str,
    verifier: subprocess.Popen[str],
    url: str,
    run_name: str,
) -> None:
    # A server that keeps `crashed` jobs within their time needs some for the second try.
    async with asking(url, run_name, timeout_s=10.0) as isolated:
        [server] = servers(verifier)
        timeout_s = 1.0 if detail == "timeout" else 10.0
        with pytest.raises(IsolatedFault, match=said) as caught:
            await isolated.call(named(name), payload, timeout_s=timeout_s)
        assert caught.value.detail == detail
        assert caught.value.retryable is (detail == "crashed")
        assert not isolated._waiting
        assert await isolated.judge("8", "8") == 1.0
        assert servers(verifier) == [server]
        assert len(pens(verifier)) == len(below(server)) == 1


async def test_a_file_that_is_too_large_is_not_written(
    verifier: Any, url: str, run_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "large"
    async with asking(url, run_name) as isolated:
        payload = {"path": str(path), "mb": 2 * FILE_MB}
        with pytest.raises(IsolatedFault, match="File too large"):
            await isolated.call(named("write"), payload, timeout_s=10)
    assert path.stat().st_size <= FILE_MB << 20


async def test_a_process_that_left_its_parent_and_its_group_is_gone_before_the_result(
    verifier: subprocess.Popen[str], url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        escaped = await isolated.call(named("leave"), {}, timeout_s=10)
        assert not is_there(escaped)


@pytest.mark.parametrize("name", ["leave_and_hang", "leave_and_die"])
async def test_a_process_that_left_a_job_which_was_killed_is_gone_before_the_fault(
    name: str, verifier: subprocess.Popen[str], url: str, run_name: str, tmp_path: Path
) -> None:
    path = tmp_path / "escaped"
    async with asking(url, run_name) as isolated:
        with pytest.raises(IsolatedFault):
            await isolated.call(named(name), {"path": str(path)}, timeout_s=2)
        assert not is_there(int(path.read_text()))


async def test_every_process_of_a_job_that_forks_and_forks_is_gone_before_the_result(
    verifier: subprocess.Popen[str], url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        assert await isolated.call(named("fork_five_times"), {}, timeout_s=20) == 5
        assert await isolated.judge("8", "8") == 1.0
        assert len(below(verifier.pid)) == 2  # the server, and one process for the next job


async def test_a_job_that_returns_in_two_processes_gives_one_result(
    verifier: Any, url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        said = [await isolated.call(named("return_twice"), {}, timeout_s=10) for _ in range(4)]
        assert said == ["parent"] * 4
        assert isolated.num_strays == 0


async def test_a_process_with_a_thread_of_a_job_is_not_used_again(
    verifier: Any, url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        used = await isolated.call(named("leave_a_thread"), {}, timeout_s=10)
        assert not is_there(used)


async def test_a_job_has_a_group_of_its_own_and_no_connection_of_the_verifiers(
    verifier: Any, url: str, run_name: str
) -> None:
    async with asking(url, run_name) as isolated:
        found = await isolated.call(named("surroundings"), {}, timeout_s=10)
    assert found == {
        "sockets": 1,  # the way back
        "core": [0, 0],
        "file": [FILE_MB << 20, FILE_MB << 20],
        "group": True,
    }


# --- cancelled -----------------------------------------------------------------------------------
async def test_a_cancelled_call_that_had_not_begun_is_not_run(
    verifier: Any, url: str, run_name: str, tmp_path: Path
) -> None:
    began, go, mark = (tmp_path / name for name in ("began", "go", "mark"))
    async with asking(url, run_name) as isolated:
        payload = {"began": str(began), "go": str(go)}
        first = asyncio.create_task(isolated.call(named("wait"), payload, timeout_s=20))
        await until(began.exists)
        second = asyncio.create_task(
            isolated.call(named("mark"), {"path": str(mark)}, timeout_s=20)
        )
        with redis.Redis.from_url(url) as client:
            await until(lambda: client.llen(f"rq:queue:{QUEUE}"))
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            await until(lambda: not client.llen(f"rq:queue:{QUEUE}"))
        go.touch()
        assert await first == "done"
        assert await isolated.judge("8", "8") == 1.0
        assert not isolated._waiting
    assert not mark.exists()


async def test_a_cancelled_call_that_runs_is_forgotten_and_its_result_dropped(
    verifier: Any, url: str, run_name: str, tmp_path: Path
) -> None:
    began, go = tmp_path / "began", tmp_path / "go"
    async with asking(url, run_name) as isolated:
        payload = {"began": str(began), "go": str(go)}
        asked = asyncio.create_task(isolated.call(named("wait"), payload, timeout_s=20))
        await until(began.exists)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert asked.cancelled()
        go.touch()
        assert await isolated.judge("8", "8") == 1.0
        assert isolated.num_strays == 1


# --- the verifier's own processes ----------------------------------------------------------------
async def test_a_verifier_grows_while_jobs_wait_and_shrinks_when_there_is_nothing_to_do(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    url = f"{valkey_url}/4"
    process = start(url, "--verifier.max_processes", "3", "--verifier.idle_s", "0.5")
    try:
        async with asking(url, run_name) as isolated:
            go = tmp_path / "go"
            asked = [
                asyncio.create_task(
                    isolated.call(
                        named("wait"),
                        {"began": str(tmp_path / f"began{number}"), "go": str(go)},
                        timeout_s=40,
                    )
                )
                for number in range(5)
            ]
            await until(lambda: len(list(tmp_path.glob("began*"))) == 3)
            assert len(servers(process)) == 3
            go.touch()
            assert await asyncio.gather(*asked) == ["done"] * 5
            await until(lambda: len(servers(process)) == 1)
            assert await isolated.judge("8", "8") == 1.0
    finally:
        assert end(process) == 0


async def test_a_server_that_is_killed_is_told_and_replaced_and_leaves_nothing(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    url = f"{valkey_url}/4"
    process = start(url)
    try:
        async with asking(url, run_name) as isolated:
            path = tmp_path / "escaped"
            asked = asyncio.create_task(
                isolated.call(named("leave_and_hang"), {"path": str(path)}, timeout_s=60)
            )
            escaped = await number_in(path)
            [server] = servers(process)
            os.kill(server, signal.SIGKILL)
            with pytest.raises(IsolatedFault, match=r"died \(SIGKILL\)") as caught:
                await asked
            assert (caught.value.detail, caught.value.retryable) == ("crashed", True)
            await until(lambda: not is_there(escaped))
            assert await isolated.judge("8", "8") == 1.0
    finally:
        assert end(process) == 0


async def test_nothing_is_left_of_a_verifier_that_is_killed(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    url = f"{valkey_url}/4"
    with ended(start(url, processes=2)) as process:
        async with asking(url, run_name) as isolated:
            path = tmp_path / "escaped"
            asked = asyncio.create_task(
                isolated.call(named("leave_and_hang"), {"path": str(path)}, timeout_s=60)
            )
            escaped = await number_in(path)
            everything = [*below(process.pid), escaped]
            assert len(everything) >= 5  # two servers, two processes for jobs, and the escaped one
            end(process, signal.SIGKILL)
            await until(lambda: not any(map(is_there, everything)))
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


async def test_sigterm_lets_a_job_end_and_takes_no_other(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    url = f"{valkey_url}/4"
    with ended(start(url)) as process:
        began, go, mark = (tmp_path / name for name in ("began", "go", "mark"))
        async with asking(url, run_name) as isolated:
            payload = {"began": str(began), "go": str(go)}
            asked = asyncio.create_task(isolated.call(named("wait"), payload, timeout_s=60))
            await until(began.exists)
            [server] = servers(process)
            process.terminate()
            await until(lambda: not is_pending(process.pid, signal.SIGTERM))
            # The server has it passed on: the signal is caught, and not ended by.
            other = asyncio.create_task(
                isolated.call(named("mark"), {"path": str(mark)}, timeout_s=60)
            )
            with redis.Redis.from_url(url) as client:
                await until(lambda: client.llen(f"rq:queue:{QUEUE}"))
                go.touch()
                assert await asked == "done"
                assert await asyncio.to_thread(process.wait, 30) == 0
                assert not is_there(server)
                assert client.llen(f"rq:queue:{QUEUE}") == 1
            assert not mark.exists()
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)


async def test_a_second_sigterm_ends_the_jobs_too_and_says_so(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    url = f"{valkey_url}/4"
    with ended(start(url)) as process:
        async with asking(url, run_name) as isolated:
            path = tmp_path / "escaped"
            asked = asyncio.create_task(
                isolated.call(named("leave_and_hang"), {"path": str(path)}, timeout_s=60)
            )
            escaped = await number_in(path)
            everything = [*below(process.pid), escaped]
            process.terminate()
            await until(lambda: not is_pending(process.pid, signal.SIGTERM))
            process.terminate()
            with pytest.raises(IsolatedFault, match="died") as caught:
                await asked
            assert caught.value.retryable
            assert await asyncio.to_thread(process.wait, 30) == 0
            assert not any(map(is_there, everything))


def is_pending(pid: int, number: int) -> bool:
    """Return whether a signal was sent and not taken yet."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("ShdPnd", "SigPnd")) and int(line.split()[1], 16) >> (number - 1) & 1:
            return True
    return False


def test_fewer_processes_at_most_than_at_least_is_one_clear_line(valkey_url: str) -> None:
    found = subprocess.run(
        [*start_line(valkey_url), "--verifier.processes", "4", "--verifier.max_processes", "2"],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert found.returncode == 2
    assert "verifier.max_processes is 2, below verifier.processes (4)" in found.stderr


# --- an outage -----------------------------------------------------------------------------------
async def test_the_result_of_a_job_that_ends_in_an_outage_comes_behind_it(
    run_name: str, tmp_path: Path
) -> None:
    with DevServer(aof=True) as server:  # it knows the job afterwards, so none is asked for anew
        process = start(server.url)
        try:
            async with asking(server.url, run_name) as isolated:
                began, go = tmp_path / "began", tmp_path / "go"
                payload = {"began": str(began), "go": str(go)}
                asked = asyncio.create_task(isolated.call(named("wait"), payload, timeout_s=60))
                await until(began.exists)
                server.kill()
                await until(lambda: isolated._outages)
                go.touch()
                await asyncio.to_thread(says, process, "result_waits_for_redis")
                server.start()
                assert await asked == "done"
                assert len(began.read_text().split()) == 1
        finally:
            assert end(process) == 0


async def test_a_job_that_goes_with_the_server_is_asked_for_again_and_not_at_its_timeout(
    run_name: str, tmp_path: Path
) -> None:
    with DevServer() as server:
        process = start(server.url)
        try:
            async with asking(server.url, run_name) as isolated:
                began, go = tmp_path / "began", tmp_path / "go"
                payload = {"began": str(began), "go": str(go)}
                first = asyncio.create_task(isolated.call(named("wait"), payload, timeout_s=600))
                await until(began.exists)
                second = asyncio.create_task(
                    isolated.call(named("echo"), {"second": True}, timeout_s=600)
                )
                with redis.Redis.from_url(server.url) as client:
                    await until(lambda: client.llen(f"rq:queue:{QUEUE}"))
                server.kill()  # it keeps nothing
                await until(lambda: isolated._outages)
                server.start()
                go.touch()
                assert await second == {"second": True}
                assert await first == "done"
        finally:
            assert end(process) == 0
