"""Theme G: whatever a tool does is a text for the model, or a fault that ends the sample."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from rollstream.errors import ConfigError, EngineFault, RolloutFault, ToolFault, Withheld
from rollstream.settings import ToolTable
from worker.tools import (
    BoundTool,
    FunctionTool,
    Observation,
    ToolError,
    ToolTrouble,
    run_calls,
)
from worker.tools import run as running
from worker.types import ToolCall


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a task or a thread does; the test's own time is the bound."""
    while not condition():
        await asyncio.sleep(0.001)


def bound(function: Callable[..., Any], *, concurrency: int = 8, **rules: Any) -> BoundTool:
    return BoundTool(FunctionTool(function), ToolTable(**rules), concurrency=concurrency)


async def run(
    *tools: BoundTool, calls: int = 1, timeout_s: float = 5.0, raw: str = "", **arguments: Any
) -> list[Observation]:
    """Call each tool so many times, in one turn."""
    made = [ToolCall(f"c{i}", t.name, arguments, raw=raw) for t in tools for i in range(calls)]
    return await run_calls(made, {t.name: t for t in tools}, timeout_s=timeout_s, max_chars=2048)


async def ended(*tools: BoundTool, **options: Any) -> tuple[str, ToolError | None]:
    """Return text and reason of one call, and check that it left no slot taken."""
    [found] = await run(*tools, **options)
    assert [tool.slots.num_taken for tool in tools] == [0] * len(tools)
    assert type(found.text) is str
    return found.text, found.error


# --- 92: a tool that does not return -------------------------------------------------------------
async def test_case_92_an_async_tool_that_hangs_is_cancelled_and_is_an_observation() -> None:
    told = asyncio.Event()

    async def f() -> str:
        """Hang."""
        try:
            await asyncio.Event().wait()
        finally:
            told.set()
        return "late"

    text, error = await ended(bound(f), timeout_s=0.05)
    assert (text, error) == ("Error: f did not answer within 0.05 s", ToolError.TIMEOUT)
    await told.wait()


async def test_case_92_a_tool_that_swallows_its_cancellation_is_left_behind() -> None:
    release, answered = asyncio.Event(), []

    async def f() -> str:
        """Go on whatever happens."""
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                answered.append("swallowed")
        answered.append("late")
        return "late"

    text, error = await ended(bound(f, concurrency=1), timeout_s=0.05)
    assert error is ToolError.TIMEOUT
    assert "late" not in text
    release.set()
    await until(lambda: answered[-1:] == ["late"])
    assert answered[0] == "swallowed"


async def test_case_92_a_sync_tool_that_hangs_frees_its_slot_and_its_late_result_is_nobodys() -> (
    None
):
    release = threading.Event()
    late: list[str] = []

    def f() -> str:
        """Hang in a thread."""
        release.wait(10)
        late.append("late")
        return "late"

    tool = bound(f, concurrency=1)
    try:
        for _ in range(2):  # the second one has the slot that the first one had
            text, error = await ended(tool, timeout_s=0.05)
            assert (text, error) == ("Error: f did not answer within 0.05 s", ToolError.TIMEOUT)
        assert late == []
    finally:
        release.set()
    assert await ended(tool) == ("late", None)


async def test_case_92_a_call_that_is_cancelled_from_outside_tells_its_tools_and_frees_slots() -> (
    None
):
    stopped: list[str] = []

    async def f() -> str:
        """Hang."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("f")
        return ""

    tool = bound(f, concurrency=2)
    turn = asyncio.create_task(run(tool, calls=3))
    await until(lambda: tool.slots.num_taken == 2)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert tool.slots.num_taken == 0
    await until(lambda: stopped == ["f", "f"])
    [again] = await run(bound(_quick))
    assert again.text == "quick"


async def _quick() -> str:
    """Answer."""
    return "quick"


# --- 93: a tool that raises ----------------------------------------------------------------------
class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class OwnKind(BaseException):
    """No `Exception` at all."""


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "Error: ValueError: boom"),
        (Unspeakable(), "Error: Unspeakable: (its message cannot be shown)"),
        (Exits(), "Error: Exits: (its message cannot be shown)"),
        (SystemExit(3), "Error: Exited: SystemExit: 3"),
        (KeyboardInterrupt(), "Error: Exited: KeyboardInterrupt"),
        (OwnKind("x"), "Error: Exited: OwnKind: x"),
        (TimeoutError(), "Error: TimeoutError"),
        (ExceptionGroup("two", [ValueError("a")]), "Error: ExceptionGroup: two (1 sub-exception)"),
        (ValueError("a\x00b\ud800"), "Error: ValueError: a\ufffdb\ufffd"),
    ],
)
async def test_case_93_whatever_a_tool_raises_is_its_type_and_message(
    error: BaseException, text: str, is_async: bool
) -> None:
    async def async_f() -> None:
        """Break."""
        raise error

    def sync_f() -> None:
        """Break."""
        raise error

    found = await ended(bound(async_f if is_async else sync_f))
    assert found == (text, ToolError.RAISED)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_case_93_a_message_of_a_megabyte_is_cut_and_has_no_trace(is_async: bool) -> None:
    async def async_f() -> None:
        """Break loudly."""
        raise RuntimeError("x" * 10**6)

    def sync_f() -> None:
        """Break loudly."""
        raise RuntimeError("x" * 10**6)

    text, error = await ended(bound(async_f if is_async else sync_f))
    assert error is ToolError.RAISED
    assert text.startswith("Error: RuntimeError: xxx")
    assert len(text) <= running.MAX_ERROR_CHARS
    assert "Traceback" not in text
    assert __file__ not in text


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_case_93_a_cancellation_that_leaks_out_is_an_observation(is_async: bool) -> None:
    async def async_f() -> None:
        """Await what somebody cancelled."""
        raise asyncio.CancelledError

    def sync_f() -> None:
        """Raise what no thread should."""
        raise asyncio.CancelledError

    tool = bound(async_f if is_async else sync_f)
    assert await ended(tool) == (f"Error: {tool.name} was cancelled", ToolError.CANCELLED)


async def test_case_93_one_that_raises_leaves_the_others_of_its_turn() -> None:
    async def broken() -> None:
        """Break."""
        raise ValueError("boom")

    found = await run(bound(broken), bound(_quick))
    assert [o.text for o in found] == ["Error: ValueError: boom", "quick"]


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize(
    "fault",
    [ToolFault("gone", retryable=True), EngineFault("503"), Withheld(), MemoryError("no more")],
)
async def test_a_fault_of_infrastructure_is_raised_as_it_is_and_stops_the_others(
    fault: BaseException, calls: int
) -> None:
    stopped: list[str] = []

    async def broken() -> None:
        """Find its host gone."""
        raise fault

    async def slow() -> None:
        """Wait to be told."""
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append("slow")

    tools = [bound(slow), bound(broken)] if calls > 1 else [bound(broken)]
    with pytest.raises((RolloutFault, MemoryError)) as caught:
        await run(*tools)
    assert caught.value is fault
    assert [tool.slots.num_taken for tool in tools] == [0] * len(tools)
    await until(lambda: stopped == ["slow"] * (len(tools) - 1))


async def test_a_tools_own_words_are_shown_as_they_are_and_cut_like_a_result() -> None:
    async def f() -> str:
        """Say why not."""
        raise ToolTrouble("no such city; " + "x" * 5000, ToolError.TIMEOUT)

    text, error = await ended(bound(f, output_chars=1000))
    assert error is ToolError.TIMEOUT
    assert text.startswith("Error: no such city; xxx")
    assert running.MAX_ERROR_CHARS < len(text) <= 1000


# --- 94: a result that is no text ----------------------------------------------------------------
class Word(str):
    """A str whose methods are its own."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> str:
        raise AssertionError

    def __str__(self) -> str:
        raise AssertionError


class Color(enum.StrEnum):
    RED = "red"


class Hanging:
    """What asks its own method for its text."""

    release = threading.Event()

    def tolist(self) -> list[int]:
        self.release.wait(10)
        return [1]


IMAGE = {"type": "image"}


class Exiting:
    def tolist(self) -> list[int]:
        raise SystemExit


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"k": 1}, '{"k": 1}'),
        (None, ""),
        (b"\xff", "\ufffd"),
        (bytearray(b"ok"), "ok"),
        ("a\x00b", "a\ufffdb"),
        (float("nan"), "NaN"),
        ([1, [2, [3, None]], float("-inf")], "[1, [2, [3, null]], -Infinity]"),
        (Word("own"), "own"),
        (Color.RED, "red"),
        ({"c": Color.RED}, '{"c": "red"}'),
        ([{"type": "text", "text": "see "}, IMAGE | {"data": "aGk=", "mimeType": "image/png"}],
         "see [image/png, 2 bytes]"),
        ([{"type": "image_url", "image_url": {"url": "data:image/gif;base64,aGk="}}],
         "[image/gif, 2 bytes]"),
        ([{"type": "image_url", "image_url": {"url": "http://x.test/a.png"}}],
         "[image at http://x.test/a.png]"),
        ([IMAGE | {"source": {"type": "base64", "media_type": "image/webp", "data": "aGk="}}],
         "[image/webp, 2 bytes]"),
        ([{"type": "text", "text": 5}], '[{"type": "text", "text": 5}]'),
        ("x" * 3000, "x" * 673 + "[... 981 characters cut ...]" + "x" * 1346),
    ],
)  # fmt: skip
async def test_case_94_every_result_has_one_text(result: Any, text: str, is_async: bool) -> None:
    async def async_f() -> Any:
        """Return it."""
        return result

    def sync_f() -> Any:
        """Return it."""
        return result

    assert await ended(bound(async_f if is_async else sync_f)) == (text, None)


@pytest.mark.parametrize("depth", [3, 33, 5000])
async def test_case_94_lists_in_lists_are_json_or_one_error(depth: int) -> None:
    def f() -> Any:
        """Nest."""
        nested: Any = "end"
        for _ in range(depth):
            nested = [nested]
        return nested

    text, error = await ended(bound(f))
    if depth == 3:
        assert (text, error) == ('[[["end"]]]', None)
    else:
        assert error is ToolError.BAD_RESULT
        assert text.startswith("Error: the result of f cannot be shown: ValueError: nested deeper")


async def test_case_94_a_result_that_hangs_or_exits_while_it_is_shown_is_an_observation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "SHOWING_S", 0.05)

    def hangs() -> Any:
        """Return it."""
        return Hanging()

    def exits() -> Any:
        """Return it."""
        return [Exiting()]

    try:
        text, error = await ended(bound(hangs), timeout_s=0.2)
        assert error is ToolError.BAD_RESULT
        assert text == "Error: the result of hangs cannot be shown: it does not become text in time"
    finally:
        Hanging.release.set()
    text, error = await ended(bound(exits))
    assert error is ToolError.BAD_RESULT
    assert text == "Error: the result of exits cannot be shown: Exited: SystemExit"


async def test_case_94_an_ordinary_function_that_hands_back_a_coroutine_is_awaited() -> None:
    def f() -> Any:
        """Delegate."""
        return _quick()

    assert await ended(bound(f)) == ("quick", None)


def test_a_function_that_yields_is_refused_at_the_start() -> None:
    def one() -> Iterator[int]:
        """Yield."""
        yield 1

    async def two() -> AsyncIterator[int]:
        """Yield."""
        yield 1

    for function in (one, two):
        with pytest.raises(ConfigError, match="yields; a tool returns its whole result"):
            FunctionTool(function)


# --- arguments -----------------------------------------------------------------------------------
async def test_a_whole_number_reaches_a_function_as_an_int() -> None:
    def f(n: int, x: float, m: int | None = None) -> str:
        """Repeat."""
        return f"{n!r} {x!r} {m!r}"

    assert await ended(bound(f), n=3.0, x=2.0, m=1.0) == ("3 2.0 1", None)


async def test_arguments_that_take_for_ever_to_check_cost_their_call_alone() -> None:
    def f(items: list[list[int]]) -> str:
        """Count."""
        return str(len(items))

    tool = bound(f)
    release = threading.Event()

    def slow(arguments: dict[str, Any]) -> str | None:
        release.wait(10)
        return None

    tool.check.complaint = slow  # type: ignore[method-assign]  # as `uniqueItems` of 50,000 lists
    try:
        text, error = await ended(tool, timeout_s=0.05, raw="x" * 10_000, items=[[1]])
    finally:
        release.set()
    assert error is ToolError.BAD_ARGUMENTS
    assert text == "Error: wrong arguments for f: they could not be checked within 0.05 s"


# --- settings of one tool ------------------------------------------------------------------------
async def test_no_more_calls_of_one_tool_run_at_once_than_its_limit() -> None:
    running_now, most = [0], [0]

    async def f(n: int = 0) -> str:
        """Count itself."""
        running_now[0] += 1
        most[0] = max(most[0], running_now[0])
        await asyncio.sleep(0)
        running_now[0] -= 1
        return "ok"

    tool = BoundTool(FunctionTool(f), ToolTable(concurrency=2), concurrency=8)
    found = await run(tool, calls=20)
    assert [o.text for o in found] == ["ok"] * 20
    assert most == [2]


async def test_waiting_for_a_slot_counts_against_the_time_of_a_call() -> None:
    release = asyncio.Event()

    async def f() -> str:
        """Hold the slot."""
        await release.wait()
        return "held"

    tool = bound(f, concurrency=1)
    holding = asyncio.create_task(run(tool, timeout_s=5))
    await until(lambda: tool.slots.num_taken == 1)
    [found] = await run(tool, timeout_s=0.05)
    assert found.error is ToolError.TIMEOUT
    assert found.text == (
        "Error: f did not answer within 0.05 s: as many of its calls as may run at once (1) ran "
        "before this one"
    )
    release.set()
    assert [o.text for o in await holding] == ["held"]
    assert await ended(tool) == ("held", None)


async def test_settings_of_a_tool_go_before_those_of_its_environment() -> None:
    async def slow() -> str:
        """Hang."""
        await asyncio.Event().wait()
        return ""

    def long() -> str:
        """Say much."""
        return "x" * 5000

    text, error = await ended(bound(slow, timeout_s=0.05), timeout_s=60)
    assert (error, text) == (ToolError.TIMEOUT, "Error: slow did not answer within 0.05 s")
    assert len((await ended(bound(long, output_chars=100)))[0]) == 100
    assert len((await ended(bound(long)))[0]) == 2048


class Keeper:
    """A tool that keeps its own time."""

    name = "keeper"

    def __init__(self) -> None:
        self.spec = {"type": "function", "function": {"name": "keeper"}}
        self.given: list[float] = []

    async def __call__(self, arguments: dict[str, Any]) -> str:
        raise AssertionError

    async def call_within(self, arguments: dict[str, Any], timeout_s: float) -> str:
        self.given.append(timeout_s)
        start = time.monotonic()
        while time.monotonic() - start < timeout_s:
            await asyncio.sleep(0.01)
        raise ToolFault("nobody serves the queue", retryable=True, detail="lost")


async def test_a_tool_that_keeps_its_own_time_says_itself_whose_fault_it_was() -> None:
    keeper = Keeper()
    tool = BoundTool(keeper, concurrency=1)
    with pytest.raises(ToolFault, match="nobody serves"):
        await run(tool, timeout_s=0.05)
    assert tool.slots.num_taken == 0
    assert keeper.given[0] <= 0.05
