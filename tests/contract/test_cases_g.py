"""Cases 92 to 94, and the tools' part of 26 to 43, through whole rollouts with plain functions.

What single functions do wrong is in `tests/unit/tools/test_case_g.py`; here the observation is of
mask 0, the trajectory goes on, and the engine sees the same text as the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollstream.errors import Report, Status, StopReason, ToolFault
from rollstream.sample import Sample
from rollstream.settings import ToolTable
from tests.contract.rolls import END, Rolled, block, call_of, rolled, says
from tests.generate_stage import InProcess, given
from tests.unit.worker.works import a_book, a_rollout, a_work, an_env
from worker.generate import multi_turn
from worker.sampling import Sampling
from worker.tools import BoundTool, FunctionTool
from worker.types import GenerateInput, GenerateOutput

DONE = f"Done.{END}"
LONG = Sampling(max_new_tokens=4000)


def bound(function: Callable[..., Any], **rules: Any) -> BoundTool:
    return BoundTool(FunctionTool(function), ToolTable(**rules), concurrency=8)


async def went_on(
    renderer: Any, first: str, *functions: Callable[..., Any], **limits: Any
) -> Rolled:
    """Run a turn with calls and an answer; check that the trajectory went on, with mask 0."""
    run = await rolled(
        renderer, first, DONE, tools=[bound(f) for f in functions], limits=limits, sampling=LONG,
        debug_messages=True,
    )  # fmt: skip
    sample = run.sample
    start, end = sample.calls[0].end, sample.calls[1].start
    offset = sample.prompt_length
    assert sample.loss_mask is not None
    assert not sample.loss_mask[start - offset : end - offset].any()
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    for message in sample.metadata["messages"]:
        if message["role"] == "tool":  # what people read is what the engine was sent
            assert message["content"] in run.observed()
    return run


async def test_case_92_a_tool_that_hangs_is_an_observation_and_its_sample_goes_on(
    renderer: Any,
) -> None:
    told = asyncio.Event()

    async def f() -> str:
        """Hang, and not want to stop."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.set()
        return "late"

    run = await went_on(renderer, call_of("f"), f, tool_timeout_s=0.2)
    assert "f did not answer within 0.2 s" in run.observed()
    assert "late" not in run.observed()
    assert run.sample.metadata["tool_errors"] == {"timeout": 1}
    assert "tool_calls_ok" not in run.sample.metadata
    assert told.is_set()


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (RuntimeError("x" * 10**6), "RuntimeError: xxxx"),
        (Unspeakable(), "Unspeakable: (its message cannot be shown)"),
    ],
    ids=["plain", "megabyte", "its-str-raises"],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_case_93_a_tool_that_raises_is_an_observation_and_its_sample_goes_on(
    error: Exception, told: str, is_async: bool, renderer: Any
) -> None:
    async def f() -> str:
        """Break."""
        raise error

    def g() -> str:
        """Break."""
        raise error

    function = f if is_async else g
    run = await went_on(renderer, call_of(function.__name__), function)
    assert told in run.observed()
    assert "Traceback" not in run.observed()
    assert len(run.observed()) < 700
    assert run.sample.metadata["tool_errors"] == {"raised": 1}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"k": 1}, '{"k": 1}'),
        (None, ""),
        (b"\xff", "\ufffd"),
        ("a\x00b", "a\ufffdb"),
        (float("nan"), "NaN"),
        ([[["deep"]]], '[[["deep"]]]'),
        (f"<{'|im_end|'}>", "<|im_end|>"),
    ],
    ids=["dict", "none", "bytes", "nul", "nan", "nested", "control"],
)
async def test_case_94_a_result_that_is_no_text_has_one_text_in_messages_and_ids(
    result: Any, text: str, renderer: Any
) -> None:
    def f() -> Any:
        """Return it."""
        return result

    run = await went_on(renderer, call_of("f"), f)
    [message] = [m for m in run.sample.metadata["messages"] if m["role"] == "tool"]
    assert message["content"] == text
    assert text in run.observed()
    assert run.sample.metadata["tool_calls_ok"] == 1
    assert "tool_errors" not in run.sample.metadata


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def shell(cmd: str) -> str:
    """Run a command.

    Args:
        cmd: what.
    """
    return f"ran {cmd}"


@pytest.mark.parametrize(
    ("call", "told", "reason"),
    [
        (call_of("shell", '{"cmd":"mkdir -p t/{a,b"}'), "ran mkdir -p t/{a,b", ""),
        (call_of("shell", '"\\"{\\\\\\"cmd\\\\\\":\\\\\\"ls\\\\\\"}\\""'), "ran ls", ""),
        (call_of("shell", '"ls -l"'), "arguments must be a JSON object, not str", "malformed"),
        (call_of("shell", "[1,2]"), "arguments must be a JSON object, not list", "malformed"),
        (call_of("nope"), "unknown tool 'nope'; available tools: add, shell", "unknown_tool"),
        (call_of("add", '{"a":"1"}'), 'for add: a must be integer, got "1"', "bad_arguments"),
        (call_of("add", '{"a":1,"c":2}'), '"c" (arguments: a, b)', "bad_arguments"),
        (call_of("add", "{}"), "for add: the argument a is missing", "bad_arguments"),
        (call_of("add", '{"a":2.0,"b":3}'), "5", ""),
        (call_of("add", f'{{"a":1{"0" * 400}}}'), "a must be integer, got 1000", "bad_arguments"),
        (block('{"name":"add","arguments":{"a": 1,}'), "not valid JSON", "malformed"),
        (call_of("shell", '{"cmd":"a\nb"}'), "Invalid control character", "malformed"),
    ],
    ids=["26", "28", "28-text", "31", "35", "type", "unknown", "missing", "whole", "huge", "43",
         "38"],
)  # fmt: skip
async def test_case_26_28_31_35_38_43_plain_functions_get_what_was_meant_or_the_model_is_told(
    call: str, told: str, reason: str, renderer: Any
) -> None:
    run = await went_on(renderer, call, add, shell)
    assert told in run.observed()
    assert run.sample.metadata.get("tool_errors", {}) == ({reason: 1} if reason else {})
    assert run.sample.metadata.get("tool_calls_ok", 0) == (0 if reason else 1)


async def test_case_39_plain_functions_of_one_turn_run_side_by_side_and_answer_in_order(
    renderer: Any,
) -> None:
    meeting = asyncio.Barrier(3)

    async def meet(n: int) -> str:
        """Wait for the others.

        Args:
            n: which.
        """
        await meeting.wait()
        if n == 1:
            raise ValueError("one of them")
        return f"number {n}"

    calls = "\n".join(call_of("meet", f'{{"n":{n}}}') for n in range(3))
    run = await went_on(renderer, calls, meet)
    seen = [run.observed().index(text) for text in ("number 0", "one of them", "number 2")]
    assert seen == sorted(seen)
    assert run.sample.metadata["tool_errors"] == {"raised": 1}
    assert run.sample.metadata["tool_calls_ok"] == 2


async def test_case_48_a_later_turn_reads_the_result_of_its_own_call(renderer: Any) -> None:
    results = iter(["one", "two"])

    def f(n: int) -> str:
        """Answer."""
        return next(results)

    first, second = call_of("f", '{"n":1}'), call_of("f", '{"n":2}')
    run = await rolled(renderer, first, second, DONE, tools=[bound(f)])
    assert "one" in run.observed(0)
    assert "two" in run.observed(1)
    assert "one" not in run.observed(1)
    assert run.sample.metadata["tool_calls_ok"] == 2


async def test_case_85_a_cap_in_tokens_holds_for_what_the_engine_is_sent(renderer: Any) -> None:
    def f() -> str:
        """Say much."""
        return "café \U0001f642 of many words, " * 300

    def g() -> str:
        """Say nothing."""
        return ""

    empty = await went_on(renderer, call_of("g"), g)
    run = await went_on(renderer, call_of("f"), f, tool_output_tokens=100, max_context=20_000)
    around = empty.sample.calls[1].start - empty.sample.calls[0].end
    held = run.sample.calls[1].start - run.sample.calls[0].end
    assert 90 <= held - around <= 102, "the chat format may join its edges with the text's"
    assert "characters cut ...]" in run.observed()
    assert "\ufffd" not in run.observed()


# --- what is not the policy's doing --------------------------------------------------------------
async def _ran_as_a_member(fault: BaseException, renderer: Any) -> Any:
    async def f() -> str:
        """Find its host gone."""
        raise fault

    async def generate(_: GenerateInput) -> GenerateOutput:
        engine = InProcess([says(renderer, call_of("f") + END)])
        return await multi_turn(given(engine, renderer, tools={"f": bound(f)}))

    book = a_book(an_env(generate))
    return await a_rollout(book).run(a_work(book))


@pytest.mark.parametrize(
    ("fault", "report", "reason"),
    [
        (ToolFault("gone", retryable=True, detail="lost"), Report.RETRY, StopReason.TOOL_ERROR),
        (ToolFault("wrong key"), Report.FINAL, StopReason.TOOL_ERROR),
        (MemoryError(), Report.RETRY, StopReason.ENV_ERROR),
    ],
    ids=["passes", "stays", "memory"],
)
async def test_a_fault_of_infrastructure_ends_the_sample_and_is_no_reward(
    fault: BaseException, report: Report, reason: StopReason, renderer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("worker.members.rollout.MEMORY.ran_out", lambda: None)
    ending = await _ran_as_a_member(fault, renderer)
    assert (ending.report, ending.stop_reason) == (report, reason)
    sample = ending.trajectory
    assert isinstance(sample, Sample)
    assert (sample.status, sample.reward) == (Status.FAILED, None)


async def test_case_43_a_tool_that_fails_one_member_leaves_its_siblings_alone(
    renderer: Any,
) -> None:
    calls = [0]

    async def f() -> str:
        """Break once."""
        calls[0] += 1
        if calls[0] == 3:
            raise ValueError("boom")
        return "ok"

    async def member(number: int) -> Sample:
        engine = InProcess([says(renderer, call_of("f") + END), says(renderer, DONE)])
        stage = given(engine, renderer, tools={"f": bound(f)}, member=number)
        sample = (await multi_turn(stage)).samples
        assert isinstance(sample, Sample)
        return sample

    samples: Sequence[Sample] = await asyncio.gather(*map(member, range(8)))
    assert [sample.status for sample in samples] == [Status.COMPLETED] * 8
    assert sum("tool_errors" in sample.metadata for sample in samples) == 1
