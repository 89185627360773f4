"""A sample that kills its worker ends alone: real workers, started again as compose does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.parts import Run
from tests.integration.worker.processes import ENVIRONMENT, ROOT
from worker.process.watchdog import EXIT_STALLED

from .fleet import a_fleet, all_ended
from .scene import N, enqueue, options, run, sim

__all__ = ["options", "run", "sim"]
POISON, MEMBER, GROUPS = 2, 1, 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def enqueue_all(run: Run, **deed: Any) -> None:
    """Enqueue six groups; one member of the third does the deed."""
    for g in range(GROUPS):
        await enqueue(run, g, **({"members": [MEMBER], **deed} if g == POISON else {}))


async def the_poison_ended_alone(run: Run, reason: str) -> dict[str, Any]:
    """Prove that only that member failed, and return its group's record in `past`."""
    failed = {
        name: count
        for name, count in (await run.queue.counters()).items()
        if name.startswith("member_failed:")
    }
    assert failed == {f"member_failed:{reason}": 1}
    assert await run.drops() == {"short_group": 1}
    (drop,) = await run.queue.past()
    assert drop["group_index"] == str(POISON)
    assert [error is None for error in drop["errors"]] == [i != MEMBER for i in range(N)]
    assert [header is None for header in drop["headers"]] == [i == MEMBER for i in range(N)]
    assert drop["why"] == reason
    found: dict[str, Any] = drop
    return found


def shown(run: Run, *argv: str) -> str:
    """Return what `rollstream show` prints."""
    command = [sys.executable, "-m", "rollstream.cli", "show", *argv]
    command += ["--redis", run.url, "--run", run.queue.run]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("deed", "code"),
    [("sigkill", -9), ("loop", EXIT_STALLED), ("c_loop", -27), ("eat", -9)],
)
async def test_a_sample_that_ends_its_worker_ends_alone_by_its_crash_budget(
    run: Run, options: dict[str, str], tmp_path: Path, deed: str, code: int
) -> None:
    limit = 0 if deed != "eat" else rss_bytes_of_a_worker() + (400 << 20)
    async with a_fleet(tmp_path, 2, options, rss_limit_bytes=limit) as fleet:
        await enqueue_all(run, deed=deed)
        await all_ended(run, GROUPS - 1, 1, fleet, timeout_s=75)

        # A worker that is only blocked may still be on its way to its end.
        assert set(fleet.ends) == {code}, fleet.logs()
    drop = await the_poison_ended_alone(run, "crashed")
    reason, text = drop["errors"][MEMBER]
    assert reason == "crashed"
    assert text.startswith("its worker died 4 times, the last one was ")
    incarnations = {e["incarnation"] for e in fleet.events("worker_ready")}
    assert text.split("the last one was ")[1].partition(" ")[0] in incarnations
    assert " pid " in text
    assert await run.counter("attempts") == 0
    for out in (shown(run), shown(run, str(POISON))):
        assert f"member {MEMBER}: failed, crashed: {text}" in out
    record = json.loads(shown(run, str(POISON), "--json"))["drops"][0]
    assert record["members"][MEMBER]["error"] == text
    if deed == "loop":
        said = fleet.events("event_loop_stalled")
        assert {e["task"].rpartition(":")[0] for e in said} == {f"{POISON}:{MEMBER}"}
        assert "poisons.py" in said[0]["at"][-1]
    if deed == "c_loop":
        assert "poisons.py" in fleet.logs()


def rss_bytes_of_a_worker() -> int:
    """Return an upper bound of what a worker needs when nothing is wrong."""
    return 500 << 20
