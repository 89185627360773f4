"""The built-in `python`: what the model reads of a program, and whose fault there is none."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import ToolFault
from worker.isolation.client import IsolatedFault
from worker.tools import Observation, ToolError, ToolLoader, run_calls
from worker.tools.python import GRACE_S, MAX_CODE_CHARS
from worker.types import ToolCall


class Jobs:
    """Answers jobs as a verifier would."""

    def __init__(self, answer: dict[str, Any] | IsolatedFault) -> None:
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any], float]] = []

    async def call(self, job: str, payload: dict[str, Any], *, timeout_s: float) -> Any:
        self.asked.append((job, payload, timeout_s))
        if isinstance(self.answer, IsolatedFault):
            raise self.answer
        return self.answer


def ran(stdout: str = "", stderr: str = "", code: int = 0, *, late: bool = False) -> dict[str, Any]:
    return {"stdout": stdout, "stderr": stderr, "exit_code": code, "timed_out": late}


async def run(jobs: Jobs, code: str = "print(1)") -> Observation:
    tools = ToolLoader(jobs=jobs).load(["python"])
    call = ToolCall("c", "python", {"code": code})
    [found] = await run_calls([call], tools, timeout_s=3, max_chars=4096)
    return found


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ran("1\n"), "1\n"),
        (ran(), ""),
        (ran("1\n", "a warning\n"), "1\n"),
        (ran("1\n", "NameError: x\n", 1), "1\n[stderr]\nNameError: x\n[exit code 1]"),
        (ran("", "", 3), "[exit code 3]"),
        (ran("a\x00b", "", 0), "a\ufffdb"),
        (
            ran("", "", -9) | {"ending": "stopped: over its limit of memory"},
            "[stopped: over its limit of memory]",
        ),
    ],
)
async def test_python_shows_what_was_printed_and_how_it_ended_where_that_was_not_well(
    answer: dict[str, Any], text: str
) -> None:
    jobs = Jobs(answer)
    found = await run(jobs)
    assert (found.text, found.error) == (text, None)
    [(job, payload, timeout_s)] = jobs.asked
    assert (job, payload["code"]) == ("python", "print(1)")
    assert payload["timeout_s"] <= 3
    assert timeout_s == payload["timeout_s"] + GRACE_S


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (ran(code=-9, late=True), "Error: the program did not end within"),
        (ran("so far\n", code=-9, late=True), "s; it had printed:\nso far\n"),
        (IsolatedFault("killed at 8 s", "timeout"), "Error: the program did not end within"),
    ],
)
async def test_python_says_that_a_program_took_too_long(answer: Any, text: str) -> None:
    found = await run(Jobs(answer))
    assert found.error is ToolError.TIMEOUT
    assert text in found.text


@pytest.mark.parametrize("detail", ["lost", "unreachable", "crashed", "raised", "invalid"])
async def test_python_without_a_verifier_ends_the_sample_and_is_no_text_for_the_model(
    detail: str,
) -> None:
    with pytest.raises(ToolFault, match="no result of python") as caught:
        await run(Jobs(IsolatedFault("no result of python within 16 s", detail)))
    assert caught.value.detail == detail
    assert caught.value.retryable is (detail != "invalid")


async def test_python_is_not_asked_to_run_what_is_too_long() -> None:
    jobs = Jobs(ran())
    found = await run(jobs, "x" * (MAX_CODE_CHARS + 1))
    assert found.error is ToolError.BAD_ARGUMENTS
    assert "code must have at most 65536 characters, got 65537" in found.text
    assert jobs.asked == []
