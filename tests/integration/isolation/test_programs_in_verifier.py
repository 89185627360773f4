"""Every kind of program of `benchmarks.verify`, once, over a real server and a real verifier."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.verify import Run, Seen, ask, honest, hostile, is_right
from worker.isolation import leftovers

from .parts import asking, end, start_verifier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("verifier"),
    pytest.mark.timeout(240),
]


def programs(pid: int) -> list[bytes]:
    """Return the command lines of programs below a process."""
    commands = []
    for child in leftovers.descendants(pid):
        try:
            commands.append(Path(f"/proc/{child}/cmdline").read_bytes())
        except OSError:
            continue
    return [command for command in commands if b"\0-I\0" in command]


async def test_case_92_every_program_has_its_end_and_none_outlives_it(
    valkey_url: str, run_name: str
) -> None:
    port = urlsplit(valkey_url).port
    assert port is not None
    verifier = start_verifier(valkey_url)
    wrong, seen = [], Seen()
    try:
        async with asking(valkey_url, run_name) as isolated:

            async def one(run: Run) -> None:
                told = await ask(isolated, run, seen)
                if not is_right(run, told):
                    wrong.append((run.kind, told))

            runs = honest() + hostile(port)
            for at in range(0, len(runs), 2):
                await asyncio.gather(*map(one, runs[at : at + 2]))
        assert wrong == []
        for _ in range(500):  # the last ones were answered before their processes were reaped
            if not programs(verifier.pid):
                break
            await asyncio.sleep(0.01)
        assert programs(verifier.pid) == []
    finally:
        assert end(verifier) == 0
