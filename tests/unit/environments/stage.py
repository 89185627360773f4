"""A stage for environments: scripted ones, hostile ones, and episodes over scripted replies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollstream.sample import Sample
from tests.generate_stage import engine_of, given
from tests.unit.generate.weather import says
from worker.environments import Environments, EnvSample, StepResult
from worker.environments.load import LoadedEnvironment
from worker.generate.environment import EpisodeRules, episodes
from worker.types import GenerateFunction

END = "<|im_end|>"
ASKED = [{"role": "user", "content": "Guess a number from 1 to 9."}]
FOREVER_S = 3600.0
SHORT_S = 0.05
"""A time that every hang outlasts; nothing that ends by itself is held against it."""
LONG_S = 30.0


def a_sample(**fields: Any) -> EnvSample:
    """Return what an environment is told of its sample."""
    known: dict[str, Any] = {
        "group_index": 3, "member": 0, "prompt": ASKED, "label": "7", "metadata": {}, "seed": 5,
        "max_turns": 4, "evaluation": False,
    }  # fmt: skip
    return EnvSample(**(known | fields))


@dataclass
class Told:
    """What happened to the environments of one factory."""

    made: list[EnvSample] = field(default_factory=list)
    resets: list[EnvSample] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    closes: int = 0
    open: int = 0
    most_open: int = 0


class Scripted:
    """An environment that says what is in its list, step by step."""

    takes_calls = False

    def __init__(self, told: Told, sample: EnvSample, first: Any, steps: Sequence[Any]) -> None:
        self.told, self.first, self.steps = told, first, list(steps)
        told.made.append(sample)
        told.open += 1
        told.most_open = max(told.most_open, told.open)

    async def reset(self, sample: EnvSample) -> Any:
        self.told.resets.append(sample)
        return await _said(self.first)

    async def step(self, message: dict[str, Any]) -> Any:
        self.told.messages.append(message)
        return await _said(self.steps.pop(0))

    async def close(self) -> None:
        self.told.closes += 1
        self.told.open -= 1


async def _said(step: Any) -> Any:
    if isinstance(step, BaseException):
        raise step
    return await step() if callable(step) else step


def scripted(
    *steps: Any, first: Any = None, takes_calls: bool = False, **fields: Any
) -> tuple[LoadedEnvironment, Told]:
    """Return an environment of these steps (values, errors, or coroutine functions)."""
    told = Told()

    def make(sample: EnvSample) -> Scripted:
        env = Scripted(told, sample, first, steps)
        env.takes_calls = takes_calls
        return env

    return LoadedEnvironment("test:make", make, **fields), told


@asynccontextmanager
async def environments(most: int = 8, timeout_s: float = LONG_S) -> AsyncIterator[Environments]:
    """Yield the environments of a worker; none may be left behind."""
    held = Environments(most=most, timeout_s=timeout_s)
    try:
        yield held
    finally:
        await held.aclose()
    assert held.num_open == 0, "a slot leaked"


@dataclass
class Played:
    """One episode that ended."""

    sample: Sample
    asked: list[Any]
    replies: list[Any]


async def play(
    qwen3: Any,
    environment: LoadedEnvironment,
    *replies: Any,
    over: str = "process",
    timeout_s: float = LONG_S,
    prompt: Any = ASKED,
    rules: EpisodeRules | None = None,
    **fields: Any,
) -> Played:
    """Run one episode over these replies (texts, or `Says`)."""
    said = [says(qwen3, one + END) if isinstance(one, str) else one for one in replies]
    async with engine_of(over, *said) as engine, environments(timeout_s=timeout_s) as held:
        generate = episodes(held, environment, rules or EpisodeRules(7))
        sample = (await generate(given(engine, qwen3, prompt, **fields))).samples
    assert isinstance(sample, Sample)
    return Played(sample, engine.asked, said[: len(engine.asked)])


def guesses(number: str = "7") -> LoadedEnvironment:
    """Return a game: guess until it is right; a reward for each guess."""

    class Game:
        def __init__(self, sample: EnvSample) -> None:
            pass

        async def reset(self, sample: EnvSample) -> None:
            return None

        async def step(self, message: dict[str, Any]) -> StepResult:
            is_right = number in message["content"]
            return StepResult("No.", float(is_right) - 0.25, is_right, {"said": message["content"]})

        async def close(self) -> None:
            pass

    return LoadedEnvironment("test:Game", Game)


# --- hostile methods -----------------------------------------------------------------------------
async def hangs() -> None:
    """Never return."""
    await asyncio.sleep(FOREVER_S)


async def swallows() -> None:
    """Never return, and swallow the first cancellation."""
    for _ in range(2):  # the second one is of the end of the test
        try:
            await asyncio.sleep(FOREVER_S)
        except asyncio.CancelledError:
            continue


async def leaks() -> None:
    """Raise a cancellation that nobody asked for."""
    raise asyncio.CancelledError


async def exits() -> None:
    """End the interpreter."""
    raise SystemExit(3)


async def raises() -> None:
    """Raise an ordinary error."""
    raise ValueError("boom")


HOSTILE: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raises, "raised"),
    "hangs": (hangs, "timeout"),
    "swallows": (swallows, "timeout"),
    "leaks": (leaks, "cancelled"),
    "exits": (exits, "raised"),
}
"""By name: what a method does, and the detail of its fault."""


class Blocked:
    """A thread that hangs until it is let go, so that a test leaves none behind."""

    def __init__(self) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self.entered.set()
        self.let_go.wait(FOREVER_S)


def generate_of(held: Environments, environment: LoadedEnvironment) -> GenerateFunction:
    """Return the generate function of one environment."""
    return episodes(held, environment, EpisodeRules(7))


async def settled(condition: Callable[[], Any], *, what: str) -> None:
    """Return once `condition()` holds; its failure is a hang, not a slow machine."""
    for _ in range(4500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")
