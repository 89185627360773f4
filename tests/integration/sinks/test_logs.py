"""Standard error that is full, closed, unread or left: the run ends with the same groups.

Real processes at level debug; what came is compared, token by token, with a run that nothing was
broken in.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.backstage import wait_until
from tests.integration.sinks.stage import (
    GROUPS,
    Stage,
    audited,
    figures,
    whole_run,
)

pytestmark = pytest.mark.slow


def full_disk(stage: Stage) -> dict[str, Any]:
    return {"stderr": os.open("/dev/full", os.O_WRONLY)}


def file_that_may_not_grow(stage: Stage) -> dict[str, Any]:
    log = os.open(stage.folder / "short.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return {"stderr": log, "file_bytes": 2000}


def closed(stage: Stage) -> dict[str, Any]:
    return {"stderr": subprocess.DEVNULL, "shell": 'exec "$@" 2>&-'}


def all_closed(stage: Stage) -> dict[str, Any]:
    return {"stderr": subprocess.DEVNULL, "shell": 'exec "$@" <&- >&- 2>&-'}


def nobody_reads(stage: Stage) -> dict[str, Any]:
    """A pipe that is full from the start."""
    reads, writes = os.pipe()
    os.set_inheritable(reads, False)
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, bytes(4096))
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"\n")
    os.set_blocking(writes, True)
    return {"stderr": writes}


@pytest.mark.parametrize(
    "break_sink",
    [full_disk, file_that_may_not_grow, all_closed, nobody_reads],
)
def test_a_run_whose_log_goes_nowhere_ends_as_any_other(
    stage: Stage, unbroken: dict[int, list[str]], break_sink: Callable[[Stage], dict[str, Any]]
) -> None:
    with whole_run(stage, break_sink) as (found, worker, _):
        assert found == unbroken
        assert len(found) == GROUPS
        assert audited(stage) == (GROUPS, GROUPS)
        assert stage.stop(worker) == 0, "and it ends in order"


def test_lines_that_nobody_took_are_counted_and_said_once_somebody_reads(
    stage: Stage, unbroken: dict[int, list[str]]
) -> None:
    handles: list[int] = []

    def break_sink(given: Stage) -> dict[str, Any]:
        handles.append(os.open("/dev/full", os.O_WRONLY))
        return {"stderr": handles[0]}

    @contextlib.contextmanager
    def looking(given: Stage) -> Iterator[Callable[[], dict[str, float]]]:
        def page() -> dict[str, float]:
            with urllib.request.urlopen(given.metrics_url, timeout=20) as answer:
                return figures(answer.read().decode())

        assert wait_until(lambda: page()["rollout_log_lines_dropped_total"] > 0)
        yield page

    with whole_run(stage, break_sink, beside=looking) as (found, *_):
        assert found == unbroken


def test_a_worker_that_cannot_start_has_its_exit_code_whatever_its_stderr(stage: Stage) -> None:
    started = {
        (break_sink.__name__, expected): stage.start("worker", *flags, **break_sink(stage))
        for break_sink in (full_disk, closed, nobody_reads)
        for flags, expected in (
            (("--redis.url", "redis://127.0.0.1:1"), 3),
            (("--no.such.key", "1"), 2),
        )
    }
    assert {key: process.wait(90) for key, process in started.items()} == {
        key: key[1] for key in started
    }


def test_what_a_worker_logs_at_info_has_no_prompt_and_no_completion(
    stage: Stage, unbroken: dict[int, list[str]]
) -> None:
    at_info = ("--telemetry.log_level", "info")
    with (
        (stage.folder / "log").open("wb") as log,
        whole_run(stage, lambda _: {"stderr": log}, at_info) as (_, worker, _),
    ):
        stage.stop(worker)
    text = (stage.folder / "log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"worker_ready", "stopped", "run_open"} <= {line["event"] for line in lines}
    assert all(list(line)[:4] == ["ts", "level", "logger", "event"] for line in lines)
    assert {line["run"] for line in lines} == {stage.run}
    assert "What is" not in text
