"""The built-in `python` over a real server and a real verifier, and without a verifier."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from rollstream.errors import ToolFault
from rollstream.settings import ToolTable
from tests.integration.isolation.parts import asking, below, end, start_verifier, until
from worker.isolation import Isolated
from worker.tools import BoundTool, Observation, ToolError, ToolLoader, run_calls
from worker.tools import python as tool
from worker.types import ToolCall

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("verifier")]


@pytest.fixture(scope="module")
def verifier(valkey_url: str) -> Iterator[subprocess.Popen[str]]:
    process = start_verifier(valkey_url, processes=2)
    yield process
    end(process)


async def run(isolated: Isolated, *programs: str, timeout_s: float = 20.0) -> list[Observation]:
    """Run programs as the calls of one turn; check that no slot stays taken."""
    tools = ToolLoader({"python": ToolTable(concurrency=2)}, jobs=isolated).load(["python"])
    calls = [ToolCall(f"c{i}", "python", {"code": code}) for i, code in enumerate(programs)]
    try:
        return await run_calls(calls, tools, timeout_s=timeout_s, max_chars=4096)
    finally:
        python = tools["python"]
        assert isinstance(python, BoundTool)
        assert python.slots.num_taken == 0


async def test_programs_of_one_turn_answer_in_order_with_what_they_printed_and_how_they_ended(
    verifier: Any, valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name) as isolated:
        found = await run(
            isolated,
            "print(sum(range(10)))",
            "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
            "x = 1",
            "print(undefined)",
            "print('\\x00\\ud800'.encode('utf-8', 'surrogatepass'))\nprint('\\x00')",
            "print('x' * 10_000_000)",
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        )
    texts = [observation.text for observation in found]
    assert [observation.error for observation in found] == [None] * 7
    assert texts[0] == "45\n"
    assert texts[1] == "out\n[stderr]\nerr\n[exit code 3]"
    assert texts[2] == ""
    assert "NameError: name 'undefined' is not defined" in texts[3]
    assert texts[3].endswith("[exit code 1]")
    assert texts[4] == "b'\\x00\\xed\\xa0\\x80'\n\ufffd\n"
    assert texts[5].startswith("xxxx")
    assert len(texts[5]) <= 4096
    assert "SIGSEGV" in texts[6]


async def test_a_program_that_does_not_end_is_stopped_with_all_it_started_and_its_slot_is_free(
    verifier: subprocess.Popen[str], valkey_url: str, run_name: str
) -> None:
    forks = "import os, time\nprint('begun', flush=True)\nos.fork() or os.setsid()\ntime.sleep(600)"
    async with asking(valkey_url, run_name) as isolated:
        found = await run(isolated, forks, "while True: pass", timeout_s=1.5)
        [again] = await run(isolated, "print('free')")
    assert [observation.error for observation in found] == [ToolError.TIMEOUT] * 2
    assert found[0].text.startswith("Error: the program did not end within ")
    assert again.text == "free\n"
    programs = {pid for pid in below(verifier.pid) if _is_program(pid)}
    await until(lambda: not any(map(_is_program, programs)))


def _is_program(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"-I" in file.read().split(b"\x00")
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_sample_that_is_stopped_forgets_its_program(
    verifier: subprocess.Popen[str], valkey_url: str, run_name: str
) -> None:
    async with asking(valkey_url, run_name) as isolated:
        turn = asyncio.create_task(run(isolated, "import time; time.sleep(6)"))
        await until(lambda: any(map(_is_program, below(verifier.pid))))
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        [found] = await run(isolated, "print('next')")
    assert found.text == "next\n"


async def test_without_a_verifier_the_sample_ends_to_be_tried_again(
    valkey_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "GRACE_S", 0.2)
    monkeypatch.setattr("worker.isolation.client.QUEUE", f"nobody-{run_name}")
    async with asking(valkey_url, run_name) as isolated:
        with pytest.raises(ToolFault, match="is a verifier running") as caught:
            await run(isolated, "print(1)", timeout_s=0.3)
    assert (caught.value.retryable, caught.value.detail) == (True, "lost")
