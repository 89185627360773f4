"""`python -m producer` as a process: killed, stopped, refused, and watched by a person."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from structlog.testing import capture_logs

from examples.devserver import DevServer, die_with_parent
from producer import app, progress
from producer.app import first_contact, make_supply
from producer.gate import Gate
from producer.identity import fingerprint_of, opening
from producer.sources import open_source
from rollstream.errors import RunMismatch
from rollstream.queue.queue import Queue
from rollstream.settings import Settings

from .scene import Trainer, producing, rows_file, settings_of, until

ROOT = Path(__file__).resolve().parents[3]


def command(url: str, run: str, path: Path, *argv: str) -> list[str]:
    return [
        sys.executable, "-m", "producer", f"--redis.url={url}", f"--run.name={run}",
        f"--producer.source=jsonl:{path}", "--producer.n_samples_per_prompt=2", *argv,
    ]  # fmt: skip


@contextmanager
def started(*arguments: str | Path, **pipes: int) -> Iterator[subprocess.Popen[str]]:
    url, run, path, *argv = map(str, arguments)
    process = subprocess.Popen(
        command(url, run, Path(path), *argv),
        cwd=ROOT, text=True, preexec_fn=die_with_parent, **{"stderr": subprocess.PIPE, **pipes},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.slow
async def test_producer_killed_at_any_moment_loses_nothing_and_doubles_nothing(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    rows = 4000
    path = rows_file(tmp_path, rows)
    async with Trainer(valkey_url, run_name) as trainer:
        killed_at: list[int] = []
        for least in (1, 1500):
            with started(
                valkey_url, run_name, path, f"--producer.capacity_groups={rows}"
            ) as process:
                await until(lambda: trainer.count("enqueued"), lambda k, least=least: k >= least)
                process.kill()
            killed_at.append(await trainer.count("enqueued"))
        assert killed_at[0] < rows, "the kill came too late to show anything"
        with started(valkey_url, run_name, path, f"--producer.capacity_groups={rows}"):
            await trainer.until_done()
        assert await trainer.live() == set(range(rows))
        assert await trainer.count("enqueued") == rows
        await trainer.check_accounts()


async def test_producer_says_goodbye_on_sigterm(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 5)
    async with Trainer(valkey_url, run_name) as trainer:
        with started(valkey_url, run_name, path) as process:
            await trainer.until_done()
            await until(trainer.queue.presence, lambda seen: seen["producers"] == 1)
            process.send_signal(signal.SIGTERM)
            _, logged = await asyncio.to_thread(process.communicate)
            assert process.returncode == 0
        assert (await trainer.queue.presence())["producers"] == 0
        events = [json.loads(line)["event"] for line in logged.splitlines()]
        assert events == ["redis_unfit", "run_open", "scan_begins", "end_of_data", "stopping"]


async def test_producer_says_once_how_many_groups_may_live_and_why(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path, one = rows_file(tmp_path, 5), "--weights.max_staleness=1"
    with capture_logs() as lines:
        for argv in ((one, "--weights.groups_per_step=8"), (one,), ()):
            app.say_pace(settings_of(valkey_url, run_name, path, *argv), groups=5)
    said = [(line["event"], line["capacity"], line.get("capacity_by")) for line in lines]
    assert said == [
        ("run_open", 16, "weights.groups_per_step * (1 + weights.max_staleness)"),
        ("run_open", 512, "producer.capacity_groups"),
        ("staleness_unpaced", 512, None),
        ("run_open", 512, "producer.capacity_groups"),
    ]


async def test_producer_that_lacks_the_size_of_a_step_leaves_the_old_run_where_it_is(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 5)
    await open_run(settings_of(valkey_url, run_name, path))
    done = subprocess.run(
        command(valkey_url, run_name, path, "--fresh", "--weights.mode=on_policy"),
        cwd=ROOT, capture_output=True, text=True, timeout=80,
    )  # fmt: skip
    assert done.returncode == 2
    assert "weights.mode = 'on_policy' needs weights.groups_per_step" in done.stderr
    async with Trainer(valkey_url, run_name) as trainer:
        assert await trainer.queue.info() is not None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--producer.n_samples_per_prompt=3", 'n is {"default": 2} there and {"default": 3} here'),
        ("--producer.shuffle_seed=1", "shuffle_seed is null there and 1 here"),
        ("--producer.epochs=2", "epochs is 1 there and 2 here"),
        ("--run.seed=5", "seed is 0 there and 5 here"),
        ("--producer.keys=label=answer", "keys is null there"),
    ],
)
async def test_opening_a_run_names_what_differs(
    valkey_url: str, run_name: str, tmp_path: Path, change: str, named: str
) -> None:
    path = rows_file(tmp_path, 5)
    await open_run(settings_of(valkey_url, run_name, path))
    await open_run(settings_of(valkey_url, run_name, path, "--producer.capacity_groups=7"))
    with pytest.raises(RunMismatch) as caught:
        await open_run(settings_of(valkey_url, run_name, path, change))
    assert named in str(caught.value)
    assert str(caught.value).count(" there and ") == 1


async def test_producer_of_other_data_is_refused_and_the_run_stays_as_it_was(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 5)
    await open_run(settings_of(valkey_url, run_name, path))
    async with Trainer(valkey_url, run_name) as trainer:
        key = f"{trainer.queue.prefix}m"
        before = await trainer.queue.client.hgetall(key)
        done = subprocess.run(
            command(valkey_url, run_name, rows_file(tmp_path, 6)),
            cwd=ROOT, capture_output=True, text=True, timeout=80,
        )  # fmt: skip
        assert done.returncode == 4
        (line,) = [line for line in done.stderr.splitlines() if ": error: " in line]
        assert f"run '{run_name}' exists already with other data" in line
        assert f"rollstream runs --remove {run_name}" in line
        for named in ("source is", "rows is 5 there and 6 here", "run.name"):
            assert named in line
        assert await trainer.queue.client.hgetall(key) == before


async def open_run(settings: Settings) -> None:
    """Open a run as a producer of these settings would, and enqueue nothing."""
    source = open_source(settings.producer.source)
    queue = Queue.connect(settings.redis_url(), settings.run.name)
    try:
        fingerprint = fingerprint_of(settings, source)
        supply = make_supply(settings, source)
        opened = opening(settings, fingerprint, supply.order.total)
        gate = Gate(queue, opened, fingerprint, supply, name="p", lease_s=15)
        assert await first_contact(gate) == "running"
    finally:
        source.close()
        await queue.aclose()


async def test_producer_gives_up_on_a_server_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FIRST_CONTACT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=r"did not answer within .*check redis\.url"):
            await open_run(settings_of(url, "r", rows_file(tmp_path, 1)))


@pytest.mark.parametrize("password", ["", "right"])
def test_producer_says_that_the_password_is_wrong(tmp_path: Path, password: str) -> None:
    path = rows_file(tmp_path, 1)
    with DevServer() as server:
        with redis.Redis(port=server.port) as client:
            client.config_set("requirepass", password)
        userinfo = "" if password else ":wrong@"
        done = subprocess.run(
            command(f"redis://{userinfo}127.0.0.1:{server.port}", "r", path),
            cwd=ROOT, capture_output=True, text=True, timeout=80,
        )  # fmt: skip
    assert done.returncode == 2
    assert "Redis refused the user or password of redis.url" in done.stderr
    assert done.stderr.count("\n") == 1


def test_producer_draws_a_bar_on_a_terminal(valkey_url: str, run_name: str, tmp_path: Path) -> None:
    path = rows_file(tmp_path, 40)
    ours, theirs = pty.openpty()
    with started(
        valkey_url, run_name, path, "--producer.stay=false", "--telemetry.log_format=console",
        stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        drawn = read_until_closed(ours, timeout_s=45)
        assert process.wait(45) == 0
    assert "40/40" in drawn
    assert "end_of_data" in drawn


def test_producer_is_silent_about_progress_where_it_is_told_so(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 40)
    ours, theirs = pty.openpty()
    with started(
        valkey_url, run_name, path, "--producer.stay=false", "--producer.progress=false",
        "--telemetry.log_level=error", stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        drawn = read_until_closed(ours, timeout_s=45)
        assert process.wait(45) == 0
    assert drawn == ""


def read_until_closed(descriptor: int, timeout_s: float) -> str:
    chunks: list[bytes] = []
    limit = time.monotonic() + timeout_s
    while select.select([descriptor], [], [], max(0.0, limit - time.monotonic()))[0]:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # the other side of a terminal closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(descriptor)
    return b"".join(chunks).decode()


async def test_progress_without_a_terminal_is_a_line_now_and_then(
    valkey_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 9), "--producer.capacity_groups=4"
    )
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live(range(4))
        await trainer.ack(0, 1)
        await trainer.until_live(range(2, 6))
        await until(lambda: asyncio.sleep(0, it.gate.standing.position), (6).__eq__)
        with capture_logs() as lines:
            following = asyncio.create_task(progress.follow(it.gate, it.queue, 4, None))
            await until(lambda: asyncio.sleep(0.01, len(lines)), bool)
            following.cancel()
        line = next(line for line in lines if line["event"] == "producing")
        shown = {k: line[k] for k in ("position", "total", "live", "capacity", "acked", "dropped")}
        assert shown == {
            "position": 6, "total": 9, "live": 4, "capacity": 4, "acked": 2, "dropped": 0,
        }  # fmt: skip
