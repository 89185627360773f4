"""docs/tools.md: every row of its table of failures is what the code does, and no ending lacks one.

Each row has a scenario here, by its first words; a row without one, a scenario without a row, or
another text, label or ending is a failure.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import Report, StopReason, ToolFault, report_of
from tests.unit.worker.works import a_book, a_rollout, a_work, an_env
from worker.isolation.client import IsolatedFault
from worker.tito.calls import judge_call, limit_calls
from worker.tools import BoundTool, FunctionTool, Observation, ToolError, ToolLoader, ToolTrouble
from worker.tools import run as running
from worker.tools.run import run_calls
from worker.types import GenerateInput, GenerateOutput, ToolCall

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "tools.md").read_text()
TABLE = TEXT.partition("| failure | the model reads |")[2].partition("\n\n")[0]


@dataclass(frozen=True)
class Row:
    failure: str
    reads: str
    sample: str
    label: str


ROWS = [
    Row(*(cell.strip() for cell in line.strip("|").split("|")))
    for line in TABLE.splitlines()[2:]
    if line.startswith("|")
]


def pattern(reads: str) -> re.Pattern[str]:
    """Return what a text has to match: the row's words, with anything in place of its gaps."""
    text = re.escape(reads.strip("`"))
    for gap, fits in (("…", ".*"), (r"\ ", r"\s+"), ("NAME", r"\w+")):
        text = text.replace(gap, fits)
    return re.compile(re.sub(r"\b[NM]\b", r"[\\d.]+", text), re.DOTALL)


# --- what the model or a tool does ---------------------------------------------------------------
async def ran(
    function: Callable[..., Any], *calls: ToolCall, timeout_s: float = 5.0, **arguments: Any
) -> Observation:
    """Return the last observation of a turn."""
    tool = BoundTool(FunctionTool(function), concurrency=8)
    asked = calls or (ToolCall("c", tool.name, arguments),)
    found = await run_calls(asked, {tool.name: tool}, timeout_s=timeout_s, max_chars=200)
    assert tool.slots.num_taken == 0
    return found[-1]


async def fine(n: int = 0) -> str:
    """Answer."""
    return "fine"


def raises(error: BaseException) -> Callable[[], Awaitable[Observation]]:
    async def broken() -> None:
        """Raise it."""
        raise error

    return lambda: ran(broken)


def returns(result: Any, **options: Any) -> Callable[[], Awaitable[Observation]]:
    async def odd() -> Any:
        """Return it."""
        return result

    return lambda: ran(odd, **options)


def nested(depth: int) -> Any:
    found: Any = None
    for _ in range(depth):
        found = [found]
    return found


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def malformed() -> Observation:
    return await ran(fine, judge_call('{"name":"fine","arguments":{"n": 1,}', closed=True))


async def too_many() -> Observation:
    calls = [ToolCall(f"c{i}", "fine", {}) for i in range(3)]
    limit_calls(calls, 2)
    return await ran(fine, *calls)


async def unknown() -> Observation:
    return await ran(fine, ToolCall("c", "nope", {}))


async def check_that_hangs() -> Observation:
    tool = BoundTool(FunctionTool(fine), concurrency=1)
    release = threading.Event()

    def for_ever(arguments: dict[str, Any]) -> str | None:
        release.wait(10)
        return None

    tool.check.complaint = for_ever  # type: ignore[method-assign]  # as `uniqueItems` of many lists
    try:
        call = ToolCall("c", "fine", {}, raw="x" * (running.LONG_ARGUMENTS_CHARS + 1))
        return (await run_calls([call], {"fine": tool}, timeout_s=0.02, max_chars=200))[0]
    finally:
        release.set()


async def hangs() -> Observation:
    async def stuck() -> None:
        """Swallow what tells it to stop, once."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    return await ran(stuck, timeout_s=0.02)


async def no_slot() -> Observation:
    tool = BoundTool(FunctionTool(fine), concurrency=1)
    await tool.slots.take(1)  # as another sample's call does
    call = ToolCall("c", "fine", {})
    return (await run_calls([call], {"fine": tool}, timeout_s=0.02, max_chars=200))[0]


class Jobs:
    """A verifier that gives one answer."""

    def __init__(self, answer: dict[str, Any] | IsolatedFault) -> None:
        self._answer = answer

    async def call(self, job: str, payload: dict[str, Any], *, timeout_s: float) -> Any:
        if isinstance(self._answer, IsolatedFault):
            raise self._answer
        return self._answer


async def program(answer: dict[str, Any] | IsolatedFault) -> Observation:
    tools = ToolLoader(jobs=Jobs(answer)).load(["python"])
    call = ToolCall("c", "python", {"code": "print(1)"})
    return (await run_calls([call], tools, timeout_s=3, max_chars=200))[0]


class Hanging:
    """Its text is never there."""

    release = threading.Event()

    def tolist(self) -> None:
        self.release.wait(10)


async def shown_never() -> Observation:
    try:
        return await returns(Hanging(), timeout_s=0.02)()
    finally:
        Hanging.release.set()


LATE = {"stdout": "1\n", "stderr": "", "exit_code": -9, "timed_out": True}
FAILED = {"stdout": "1\n", "stderr": "NameError: x\n", "exit_code": 1, "timed_out": False}
OBSERVED: dict[str, Callable[[], Awaitable[Observation]]] = {
    "the call cannot be read": malformed,
    "more calls in one turn": too_many,
    "no such tool": unknown,
    "arguments that the schema": lambda: ran(fine, n="1"),
    "long arguments": check_that_hangs,
    "an exception": raises(ValueError("boom")),
    "an exception whose own text": raises(Unspeakable()),
    "SystemExit": raises(SystemExit(3)),
    "`ToolTrouble`": raises(ToolTrouble("no such city")),
    "no result in time": hangs,
    "no slot in time": no_slot,
    "a program of `python` that does not end": lambda: program(LATE),
    "a CancelledError": raises(asyncio.CancelledError()),
    "a result without a text": returns(nested(33)),
    "a result whose methods hang": shown_never,
    "a result that is too long": returns("x" * 500),
    "a program of `python` that ends with another code": lambda: program(FAILED),
}


# --- what neither did ----------------------------------------------------------------------------
async def ended(call: Callable[[], Awaitable[Any]]) -> tuple[Report | None, StopReason]:
    """Return how the sample of an attempt ends whose tool call is this one."""

    async def generate(given: GenerateInput) -> GenerateOutput:
        await call()
        raise AssertionError

    book = a_book(an_env(generate))
    ending = await a_rollout(book).run(a_work(book))
    assert ending.trajectory is not None
    assert not isinstance(ending.trajectory, list)
    assert ending.trajectory.reward is None
    return ending.report, ending.stop_reason


async def cancelled() -> None:
    """A sample is stopped while its tool runs: the tool is told."""
    begun, told = asyncio.Event(), asyncio.Event()

    async def stuck() -> None:
        """Hang."""
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.set()

    task = asyncio.create_task(ran(stuck))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await told.wait()


def fault_of(fault: BaseException) -> Callable[[], Awaitable[Any]]:
    return lambda: ended(raises(fault))


ENDED: dict[str, tuple[Callable[[], Awaitable[Any]], Any]] = {
    "a fault of `rollstream.errors`": (
        fault_of(ToolFault("gone", retryable=True)), (Report.RETRY, StopReason.TOOL_ERROR),
    ),
    "what runs it is gone": (
        lambda: ended(lambda: program(IsolatedFault("no result", "lost"))),
        (Report.RETRY, StopReason.TOOL_ERROR),
    ),
    "MemoryError": (fault_of(MemoryError()), (Report.RETRY, StopReason.ENV_ERROR)),
    "the sample's deadline": (cancelled, None),
}  # fmt: skip


def scenario_of(row: Row) -> str:
    """Return the longest beginning of the row that a scenario has."""
    fits = [words for words in (*OBSERVED, *ENDED) if row.failure.startswith(words)]
    assert fits, f"no scenario for the row {row.failure!r}"
    return max(fits, key=len)


def test_every_row_has_a_scenario_and_every_scenario_a_row() -> None:
    assert sorted(map(scenario_of, ROWS)) == sorted([*OBSERVED, *ENDED])


def test_every_label_has_a_row_and_no_other_word_is_one() -> None:
    labels = {row.label.strip("`") for row in ROWS} - {""}
    assert labels == {*map(str, ToolError), "ok"}


@pytest.mark.parametrize("row", [r for r in ROWS if scenario_of(r) in OBSERVED],
                         ids=lambda row: row.failure[:40])  # fmt: skip
async def test_the_model_reads_what_the_row_says_and_it_is_counted_so(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SHOWING_S", 0.02)
    found = await OBSERVED[scenario_of(row)]()
    assert pattern(row.reads).fullmatch(found.text), (row.reads, found.text)
    assert row.label == f"`{found.error or 'ok'}`"
    assert row.sample == "goes on"


@pytest.mark.parametrize("row", [r for r in ROWS if scenario_of(r) in ENDED],
                         ids=lambda row: row.failure[:40])  # fmt: skip
async def test_what_the_policy_did_not_bring_about_ends_the_sample_as_the_row_says(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.members.rollout.MEMORY.ran_out", lambda: None)
    scenario, expected = ENDED[scenario_of(row)]
    found = await scenario()
    assert found == expected
    assert (row.reads, row.label) == ("", "")
    assert row.sample.startswith("ends")
    if expected is not None:
        report, reason = expected
        assert f"`{reason}`" in row.sample
        assert "tried again" in row.sample
        assert report is Report.RETRY is report_of(reason, retryable=True)
