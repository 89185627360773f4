"""Every ending of a tool call is a text for the model, counted by its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from worker.tools import Cap, FunctionTool, ToolError, run_call, run_calls
from worker.types import ProblemKind, ToolCall


def call(name: str = "f", **arguments: Any) -> ToolCall:
    return ToolCall("call_1", name, arguments)


async def outcome(
    function: Callable[..., Any], *, timeout_s: float = 5, max_chars: int = 4096, **arguments: Any
) -> tuple[str, ToolError | None]:
    """Return the text and the reason of one call of `function`."""
    tool = FunctionTool(function)
    observation = await run_call(
        call(tool.name, **arguments), {tool.name: tool}, timeout_s=timeout_s, cap=Cap(max_chars)
    )
    return observation.text, observation.error


@dataclass
class Point:
    x: int
    y: float


class Opaque:
    """An object whose repr shows an address."""


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        (None, ""),
        ({"k": 1}, '{"k": 1}'),
        ([1, [2, [3]]], "[1, [2, [3]]]"),
        ((1, "é"), '[1, "é"]'),
        (b"\xff", "�"),
        (b"plain", "plain"),
        ("a\x00b", "a�b"),
        ("lone \ud800 surrogate", "lone � surrogate"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (True, "true"),
        (3, "3"),
        (2.5, "2.5"),
        ({3, 1, 2}, "[1, 2, 3]"),
        ({1: {"b": 2, "a": None}}, '{"1": {"b": 2, "a": null}}'),
        ({(1, 2): "tuple"}, '{"[1, 2]": "tuple"}'),
        (Point(1, 2.5), '{"x": 1, "y": 2.5}'),
        (Opaque(), '"<Opaque>"'),
        (np.float32(0.5), "0.5"),
        (np.array([[1, 2]]), "[[1, 2]]"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([], "[]"),
    ],
)
async def test_every_result_has_one_text(result: Any, text: str) -> None:
    def f() -> Any:
        """Return it."""
        return result

    assert await outcome(f) == (text, None)


async def test_a_result_that_contains_itself_is_an_observation() -> None:
    def f() -> Any:
        """Go round."""
        loop: list[Any] = []
        loop.append(loop)
        return loop

    text, error = await outcome(f)
    assert error is ToolError.BAD_RESULT
    assert "cannot be shown" in text


async def test_arguments_are_held_against_the_schema_before_the_tool_runs() -> None:
    ran = []

    def f(n: int, word: str = "x") -> str:
        """Do."""
        ran.append(n)
        return word * n

    assert await outcome(f, n=2) == ("xx", None)
    text, error = await outcome(f, n="2")
    assert error is ToolError.BAD_ARGUMENTS
    assert text == 'Error: wrong arguments for f: n must be integer, got "2"'
    assert (await outcome(f))[0] == "Error: wrong arguments for f: the argument n is missing"
    assert "there is no argument" in (await outcome(f, n=1, other=2))[0]
    assert ran == [2]


async def test_unknown_and_malformed_calls_never_reach_a_tool() -> None:
    def f() -> str:
        """Do."""
        raise AssertionError

    tools = {"f": FunctionTool(f)}
    long_name = "n" * 10_000
    broken = ToolCall("c", "f", {}, problem=ProblemKind.INVALID_JSON, problem_text="not JSON")
    calls = [call("nope"), call(long_name), broken]
    found = await run_calls(calls, tools, timeout_s=5, max_chars=4096)
    assert [o.error for o in found] == [
        ToolError.UNKNOWN_TOOL,
        ToolError.UNKNOWN_TOOL,
        ToolError.MALFORMED,
    ]
    assert found[0].text == "Error: unknown tool 'nope'; available tools: f"
    assert len(found[1].text) < 200
    assert len(found[1].message["name"]) <= 64
    assert found[2].text == "Error: not JSON"


async def test_results_are_in_order_and_one_bad_call_leaves_the_others() -> None:
    order: list[int] = []

    async def f(n: int) -> int:
        """Be slower for smaller n.

        Args:
            n: which.
        """
        await asyncio.sleep((3 - n) * 0.01)
        order.append(n)
        if n == 1:
            raise ValueError("one")
        return n

    calls = [call("f", n=n) for n in range(3)]
    found = await run_calls(calls, {"f": FunctionTool(f)}, timeout_s=5, max_chars=4096)
    assert order == [2, 1, 0]
    assert [o.text for o in found] == ["0", "Error: ValueError: one", "2"]
    assert [o.message["role"] for o in found] == ["tool"] * 3


async def test_an_observation_is_cut_to_its_cap() -> None:
    def f() -> str:
        """Say much."""
        return "x" * 10_000

    text, error = await outcome(f, max_chars=100)
    assert error is None
    assert 98 <= len(text) <= 100
