"""What environments return: the rules of steps, observations, infos and states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollstream.errors import EnvFault
from worker.environments import StepResult
from worker.environments.values import (
    assistant_message,
    info_of,
    messages_of,
    state_of,
    step_of,
)
from worker.types import AssistantMessage, ProblemKind, ToolCall


def a_call(number: int, **fields: Any) -> ToolCall:
    return ToolCall(f"c{number}", f"tool_{number}", {"x": number}, **fields)


class Unreadable:
    """Raises whatever is done with it."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")

    def item(self) -> Any:
        raise RuntimeError("no item")

    ndim = 0


@pytest.mark.parametrize(
    ("given", "reward", "done"),
    [
        (StepResult(), None, False),
        (StepResult("x", 1, True), 1.0, True),
        (("x", 0.5, False, {}), 0.5, False),
        (StepResult(reward=True, done=np.bool_(True)), 1.0, True),
        (StepResult(reward=np.float32(0.25)), 0.25, False),
        (StepResult(reward=np.int64(-3)), -3.0, False),
    ],
)
def test_a_step_is_read_as_plain_numbers(given: Any, reward: float | None, done: bool) -> None:
    step = step_of(given)
    assert (step.reward, step.done) == (reward, done)
    assert type(step.reward) in (float, type(None))
    assert type(step.done) is bool


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "NoneType from step"),
        ("text", "str from step"),
        (("x", 1.0, True), "tuple of 3 from step"),
        (("x", 1.0, False, True, {}), "tuple of 5 from step"),
        ({"observation": "x"}, "dict from step"),
        (StepResult(reward="1.0"), "str as reward"),  # type: ignore[arg-type]
        (StepResult(reward=[1.0]), "list as reward"),  # type: ignore[arg-type]
        (StepResult(reward=math.nan), "the reward nan"),
        (StepResult(reward=math.inf), "the reward inf"),
        (StepResult(reward=10**400), "the reward inf"),
        (StepResult(reward=np.array([1.0, 2.0])), "ndarray as reward"),  # type: ignore[arg-type]
        (StepResult(done="yes"), "str as done"),  # type: ignore[arg-type]
        (StepResult(done=None), "NoneType as done"),  # type: ignore[arg-type]
        (StepResult(reward=Unreadable()), "no item"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_step_is_a_fault_that_says_so_and_is_not_tried_again(
    given: Any, says: str
) -> None:
    with pytest.raises(EnvFault, match=says) as caught:
        step_of(given)
    assert (caught.value.retryable, caught.value.detail) == (False, "invalid")


@dataclass
class Board:
    size: int


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (None, {}),
        ({}, {}),
        ({"a": 1, 2: (3, 4)}, {"a": 1, "2": [3, 4]}),
        ({"x": np.arange(3), "y": np.float32(0.5)}, {"x": [0, 1, 2], "y": 0.5}),
        ({"board": Board(3)}, {"board": {"size": 3}}),
        ({"o": object()}, {"o": "<object>"}),
        ({"big": 10**30}, {"left_out": "OverflowError: Integer value out of range"}),
    ],
)
def test_an_info_is_stored_as_plain_values(given: Any, stored: dict[str, Any]) -> None:
    assert info_of(given) == stored


def test_an_info_that_cannot_be_stored_breaks_nothing() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    for given in ({"x": "y" * 5000}, endless, {"x": [10**30]}):
        assert list(info_of(given)) == ["left_out"]


def test_an_info_is_a_copy() -> None:
    held = {"seen": [1]}
    stored = info_of(held)
    held["seen"].append(2)
    assert stored == {"seen": [1]}


@pytest.mark.parametrize("given", [7, "text", [("a", 1)]])
def test_an_info_of_another_type_is_a_fault(given: Any) -> None:
    with pytest.raises(EnvFault, match="as info; it must be a dictionary"):
        info_of(given)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (None, [user("")]),
        ("", [user("")]),
        ("a\x00b\ud800", [user("a�b�")]),
        ([], [user("")]),
        (["one", "two"], [user("one"), user("two")]),
        (user("hello"), [user("hello")]),
        ({"role": "system", "content": "x", "other": 1}, [{"role": "system", "content": "x"}]),
        ([user("a"), "b"], [user("a"), user("b")]),
        ({"role": "user", "content": {"k": 1}}, [user('{"k": 1}')]),
        ({"role": "user", "content": [{"type": "text", "text": "t"}]}, [user("t")]),
        ({"role": "user", "content": None}, [user("")]),
        ({"role": "user"}, [user("")]),
    ],
)
def test_an_observation_becomes_messages_that_can_be_rendered(given: Any, messages: Any) -> None:
    assert messages_of(given) == messages


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (7, "int as observation"),
        (b"bytes", "bytes as observation"),
        ([7], "int in an observation"),
        ({"role": "assistant", "content": "I say"}, "role 'assistant'; it may be user or system"),
        ({"role": "tool", "content": "x"}, "role 'tool'"),
        ({"content": "x"}, "role 'None'"),
        ({"type": "text", "text": "x"}, "role 'None'"),
        (["x"] * 1025, "1025 messages"),
        (Unreadable(), "Unreadable as observation"),
    ],
)
def test_what_is_no_observation_is_a_fault_that_says_so(given: Any, says: str) -> None:
    with pytest.raises(EnvFault, match=says) as caught:
        messages_of(given)
    assert not caught.value.retryable


def answer(number: int, text: str) -> dict[str, Any]:
    return {
        "role": "tool",
        "content": text,
        "tool_call_id": f"c{number}",
        "name": f"tool_{number}",
    }


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("both", [answer(1, ""), answer(2, "both")]),
        (None, [answer(1, ""), answer(2, "")]),
        (["one", "two"], [answer(1, "one"), answer(2, "two")]),
        (
            [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, user("go on")],
            [answer(1, "one"), answer(2, "two"), user("go on")],
        ),
        (
            [answer(1, "one") | {"tool_call_id": "mine"}, answer(2, "two")],
            [answer(1, "one") | {"tool_call_id": "mine"}, answer(2, "two")],
        ),
    ],
)
def test_an_observation_answers_each_call_in_order(given: Any, messages: Any) -> None:
    assert messages_of(given, [a_call(1), a_call(2)]) == messages


@pytest.mark.parametrize(
    ("given", "count"),
    [(["a", "b", "c"], 3), ([answer(1, "one")], 1), ([user("x")], 0), (["x", user("y")], 0)],
)
def test_calls_that_are_not_all_answered_are_a_fault(given: Any, count: int) -> None:
    with pytest.raises(EnvFault, match=f"{count} answers to 2 tool calls"):
        messages_of(given, [a_call(1), a_call(2)])


def test_a_state_is_stored_as_plain_values_or_refused() -> None:
    state = {"board": [[1, 2]], "note": "é", "none": None, "parts": [{"type": "text", "text": "x"}]}
    assert state_of(state) == state
    assert state_of("text") == "text"
    assert state_of(None) is None
    with pytest.raises(EnvFault, match="characters; 1048576 are the most"):
        state_of(["x" * (1 << 20)])


def test_an_environment_gets_a_reply_in_openais_form_without_what_cannot_be_run() -> None:
    calls = [a_call(1), a_call(2, problem=ProblemKind.INVALID_JSON)]
    message = assistant_message(AssistantMessage("text", "thought", calls))
    assert message == {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "thought",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "tool_1", "arguments": '{"x": 1}'},
            }
        ],
    }
    assert assistant_message(AssistantMessage("x", None, [])) == {
        "role": "assistant",
        "content": "x",
    }
