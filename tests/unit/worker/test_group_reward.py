"""The reward of a whole group: whatever its function does, each member gets one, or a cause."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ConfigError, RewardFault
from rollstream.group import Trajectory
from rollstream.settings import RewardTable
from tests.builders import a_sample
from worker.aggregate.group_reward import GroupReward, load_group_reward
from worker.rewards.verdicts import MAX_REWARD_BYTES

N = 4


class Waits:
    """Counts waits instead of waiting."""

    def __init__(self) -> None:
        self.num = 0

    async def __call__(self, seconds: float) -> None:
        self.num += 1


def group() -> list[Trajectory]:
    return [a_sample(0, member, reward=None) for member in range(N)]


async def scored(function: Any, **options: Any) -> list[Any]:
    """Return what each of four members gets: a reward, or the detail of why there is none."""
    reward = GroupReward("mine.py:f", function, **({"sleep": Waits()} | options))
    found = await reward.score(group())
    assert len(found) == N
    return [one.detail if isinstance(one, RewardFault) else one for one in found]


def row(*values: Any) -> Callable[[list[Trajectory]], Any]:
    return lambda samples: list(values)


class Odd:
    """A value whose every method raises."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)

    def __str__(self) -> str:
        raise ZeroDivisionError


NESTED: list[Any] = []
NESTED.append(NESTED)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(False), 0.0),
        (np.array(0.5), 0.5),
        (None, None),
        (-math.inf, -math.inf),
        ({"acc": np.float64(1), "why": "right"}, {"acc": 1.0, "why": "right"}),
        ({"acc": None}, "invalid"),
        ({"other": 1.0}, "invalid"),
        ("1.0", "invalid"),
        ([1.0], "invalid"),
        (10**400, "invalid"),
        (1 + 2j, "invalid"),
        (b"1", "invalid"),
        (Odd(), "invalid"),
        ({"acc": Odd()}, "invalid"),
        ({"acc": NESTED}, "invalid"),
        ({"acc": "\ud800"}, "invalid"),
        ({"acc": "x" * (MAX_REWARD_BYTES + 1)}, "too_large"),
        (np.array([1.0, 2.0]), "invalid"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_odd_value_costs_its_own_member_only(value: Any, expected: Any) -> None:
    assert await scored(row(1.0, value, 0.0, 1.0), key="acc") == [1.0, expected, 0.0, 1.0]


async def test_a_dictionary_without_its_entry_says_which_it_has_and_what_to_set() -> None:
    reward = GroupReward("mine.py:f", row(*[{"acc": 1.0, "why": "right"}] * N))
    first, *_ = await reward.score(group())
    assert isinstance(first, RewardFault)
    assert "dictionary of acc, why, and reward.key does not say which counts" in first.message


async def test_nan_stays_nan_for_the_judge_to_call_invalid() -> None:
    _, odd, *_ = await scored(row(1.0, math.nan, 0.0, 1.0))
    assert math.isnan(odd)


@pytest.mark.parametrize(
    "answer",
    [
        [], [1.0], [1.0] * (N + 1), None, 1.0, "1111", {"0": 1.0}, {0: 1, 1: 1, 2: 1, 3: 1},
        np.ones((N, 1)), iter([1.0] * N), {1.0, 2.0, 3.0, 4.0}, Odd(),
    ],
    ids=lambda answer: type(answer).__name__,
)  # fmt: skip
async def test_an_answer_that_is_no_row_of_rewards_is_invalid_for_every_member(answer: Any) -> None:
    assert await scored(lambda samples: answer) == ["invalid"] * N


@pytest.mark.parametrize("answer", [(1.0,) * N, np.ones(N), np.ones(N, dtype=bool)])
async def test_a_tuple_and_an_array_are_rows_of_rewards_too(answer: Any) -> None:
    assert await scored(lambda samples: answer) == [1.0] * N


class Shorter(list[float]):
    """A list that says a length and has another."""

    def __iter__(self) -> Iterator[float]:
        return iter([1.0])


class Unreadable(list[float]):
    """A list that breaks whoever reads it."""

    def __iter__(self) -> Iterator[float]:
        raise KeyError("gone")


@pytest.mark.parametrize(("kind", "detail"), [(Shorter, "invalid"), (Unreadable, "raised")])
async def test_a_row_of_its_own_kind_is_read_as_the_users_code_that_it_is(
    kind: type[list[float]], detail: str
) -> None:
    assert await scored(lambda samples: kind([1.0] * N)) == [detail] * N


def raising(error: BaseException) -> Callable[[list[Trajectory]], Any]:
    def f(samples: list[Trajectory]) -> Any:
        raise error

    return f


def awaiting(error: BaseException) -> Callable[[list[Trajectory]], Any]:
    async def f(samples: list[Trajectory]) -> Any:
        raise error

    return f


@pytest.mark.parametrize("kind", [raising, awaiting])
@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ValueError("boom"), "raised"),
        (ValueError("\ud800" * 5000), "raised"),
        (MemoryError(), "raised"),
        (RecursionError(), "raised"),
        (SystemExit(3), "raised"),
        (KeyboardInterrupt(), "raised"),
        (StopIteration(), "raised"),
        (asyncio.CancelledError(), "cancelled"),
        (BaseExceptionGroup("both", [SystemExit(1)]), "raised"),
        (TimeoutError("of its own"), "raised"),
        (RewardFault("busy", retryable=True, detail="unavailable"), "unavailable"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
async def test_whatever_a_group_reward_raises_is_the_cause_and_nobodys_zero(
    kind: Any, error: BaseException, detail: str
) -> None:
    assert await scored(kind(error)) == [detail] * N


async def test_a_group_reward_that_fails_is_asked_again_as_often_as_is_allowed() -> None:
    tries: list[int] = []

    async def at_the_third_try(samples: list[Trajectory]) -> list[float]:
        tries.append(len(samples))
        samples.clear()  # a list of its own each time
        if len(tries) < 3:
            raise ConnectionError("busy")
        return [1.0] * N

    waits = Waits()
    assert await scored(at_the_third_try, max_retries=2, sleep=waits) == [1.0] * N
    assert (tries, waits.num) == ([N] * 3, 2)
    tries.clear()
    assert await scored(at_the_third_try, max_retries=1, sleep=waits) == ["raised"] * N


async def test_what_is_not_retryable_is_not_asked_again() -> None:
    tries: list[int] = []

    async def refuses(samples: list[Trajectory]) -> Any:
        tries.append(1)
        raise RewardFault("no such model", detail="refused")

    assert await scored(refuses, max_retries=5) == ["refused"] * N
    assert tries == [1]


async def test_a_group_reward_that_hangs_is_told_to_stop_and_asked_again() -> None:
    cancelled: list[int] = []

    async def hangs(samples: list[Trajectory]) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    assert await scored(hangs, timeout_s=0.01, max_retries=1) == ["timeout"] * N
    await asyncio.sleep(0)
    assert cancelled == [1, 1]


async def test_a_group_reward_that_swallows_its_cancellation_is_not_waited_for() -> None:
    release = asyncio.Event()

    async def stubborn(samples: list[Trajectory]) -> Any:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return [1.0] * N

    assert await scored(stubborn, timeout_s=0.01) == ["timeout"] * N
    release.set()


async def test_an_ordinary_function_that_hangs_keeps_its_thread_and_gets_no_second_one() -> None:
    release, waits = threading.Event(), Waits()

    def hangs(samples: list[Trajectory]) -> Any:
        release.wait(30)
        return [1.0] * N

    try:
        assert await scored(hangs, timeout_s=0.01, max_retries=3, sleep=waits) == ["timeout"] * N
        assert waits.num == 0
    finally:
        release.set()


async def test_a_fault_names_the_function_what_it_did_and_how_often_it_was_asked() -> None:
    reward = GroupReward("mine.py:f", row(1.0), max_retries=2, sleep=Waits())
    first, *_ = await reward.score(group())
    assert isinstance(first, RewardFault)
    assert first.message == "the reward mine.py:f returned 1 rewards for 4 samples (asked 3 times)"
    assert not first.retryable


def test_a_group_reward_is_found_by_its_path_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(samples):\n    return [0.5 for _ in samples]\ndef g():\n    pass\n")
    loaded = load_group_reward(RewardTable(kind="none", group=f"{file}:f"))
    assert loaded is not None
    assert loaded.name == f"{file}:f"
    assert load_group_reward(RewardTable(kind="none")) is None
    for wrong, says in {"g": "is called with 1 argument", "h": "no 'h'"}.items():
        with pytest.raises(ConfigError, match="group reward") as caught:
            load_group_reward(RewardTable(kind="none", group=f"{file}:{wrong}"))
        assert says in str(caught.value)


async def test_others_have_the_loop_between_the_rewards_of_a_large_group() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def large(samples: list[Trajectory]) -> list[Any]:
        return [{"score": 1.0, "per_token": [0.5] * 1000}] * len(samples)

    beside = asyncio.create_task(others())
    scored = await GroupReward("mine.py:f", large).score([a_sample()] * 64)
    beside.cancel()
    assert len(scored) == 64
    assert turns >= 64
