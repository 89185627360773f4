"""Spans: every part of every trajectory is timed once, however it ended, and never an evaluation's.

Through the parts of a worker: the queue, a shift, each generate function there is, a scripted
engine, tools, environments, sessions of agents, rewards, the aggregator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollstream.errors import EngineFault, RewardFault, ToolFault
from rollstream.queue import calls
from rollstream.wire import encode_prompt
from tests.builders import a_prompt
from tests.unit.environments.stage import guesses, scripted
from tests.unit.gateway.play import Engine, Held, take, user
from tests.unit.generate import weather
from tests.unit.generate.weather import says
from worker.environments import Environments
from worker.gateway.book import Book
from worker.gateway.prompting import Prompter
from worker.gateway.session import SessionRules
from worker.gateway.types import ChatRequest
from worker.generate import multi_turn, single_turn
from worker.generate.agent import AgentLimits, Agents
from worker.generate.agent_function import AgentFunction
from worker.generate.environment import EpisodeRules, episodes
from worker.generate.records import merge_records, record_call
from worker.telemetry.catalog import SPANS
from worker.telemetry.spans import timed
from worker.tito.load import render_prompt
from worker.tools import FunctionTool
from worker.types import GenerateInput, GenerateOutput

from .parts import Parts, Run, a_run, wait_until

pytestmark = pytest.mark.asyncio

DONE = "It is 7.<|im_end|>"
CALLS_TOOL = '<tool_call>\n{"name":"look","arguments":{}}\n</tool_call><|im_end|>'
NEWLINE = 198
AGENT_GAPS = 3
"""Before, between and behind its two calls."""


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name, max_attempts=1) as opened:
        yield opened


class Waits:
    """Stands still for ever, and says that it does."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.entered.set()
        await asyncio.Event().wait()


class Scorer:
    """A reward that is 1, raises or stands still."""

    def __init__(self, then: Any = None) -> None:
        self._then = then

    async def score(self, trajectory: Any, group: Any) -> None:
        if isinstance(self._then, Exception):
            raise self._then
        if self._then is not None:
            await self._then()
        for leaf in trajectory if isinstance(trajectory, list) else [trajectory]:
            leaf.reward = 1.0


async def recorded(given: GenerateInput) -> GenerateOutput:
    """Make two calls, the second behind the first, and merge them."""
    turns: list[Any] = []
    first = await record_call(given, turns, given.prompt.ids)
    assert first is not None
    await record_call(given, turns, [*given.prompt.ids, *first.output_ids, NEWLINE])
    return await merge_records(given, turns)


class Gateway:
    """Sessions without HTTP, whose keys are base URLs."""

    instance_id = "ab" * 16

    def __init__(self, renderer: Any) -> None:
        self.book, self.rules = Book(), SessionRules(prompter=Prompter(renderer))

    def base_url(self, key: str) -> str:
        return key

    async def ask(self, base_url: str, history: list[Any]) -> None:
        """Do what a request does."""
        exchange = await self.book.find(base_url).begin(ChatRequest(list(history)))
        history.append((await take(exchange)).message)

    def generate(self, behind: Any = None) -> Any:
        """Return the function of an agent that asks twice; `behind` comes then."""

        async def agent(base_url: str, prompt: Any, **_: Any) -> None:
            history = list(prompt)
            await self.ask(base_url, history)
            await self.ask(base_url, [*history, user("And?")])
            if isinstance(behind, Exception):
                raise behind
            if behind is not None:
                await behind()

        function = AgentFunction("test:agent", agent)
        return Agents(self.book, self).generate(function, self.rules, AgentLimits())


def episode(*steps: Any, first: Any = None) -> Any:
    """Return the function of an environment that is scripted, or guesses 7."""
    environment = scripted(*steps, first=first)[0] if steps or first else guesses("7")
    held = Environments(most=8, timeout_s=30.0)
    return episodes(held, environment, EpisodeRules(7))


class Stage:
    """One group of one member, run by a worker's parts."""

    def __init__(self, run: Run, renderer: Any) -> None:
        self.run, self.renderer = run, renderer

    async def start(
        self,
        generate: Any,
        steps: list[Any],
        *,
        tool: Any = None,
        scorer: Any = None,
        evaluation: bool = False,
    ) -> Parts:
        """Run it with an engine that answers in these steps."""
        if evaluation:
            record = encode_prompt(a_prompt(0, 1, prompt=weather.QUESTION))
            assert await self.run.queue.call(calls.enqueue("e:exam:0", 1, record)) == "new"
        else:
            await self.run.enqueue(0, 1, prompt=weather.QUESTION)
        tools = {} if tool is None else {"look": FunctionTool(tool)}
        self.parts = self.run.worker(
            generate=generate,
            engine=Engine(steps, None),
            renderer=self.renderer,
            render=lambda prompt, specs: render_prompt(self.renderer, prompt, specs),
            tools=tools,
            scorer=scorer or Scorer(),
            filters=(),
        )
        self.parts.start()
        return self.parts

    async def judged(self) -> dict[str, int]:
        """Wait until the group was judged; return the spans, by name."""

        async def is_judged() -> bool:
            depths = await self.run.queue.depths()
            return depths["ready"] == depths["live"]

        await wait_until(is_judged, what="the verdict")
        return await self.left()

    async def left(self) -> dict[str, int]:
        """Wait until the member left; return its spans, by name."""
        sent = self.parts.shift.submitter

        def is_over() -> bool:
            return self.parts.shift.num_busy == 0 and sent.num_unanswered == 0

        await wait_until(is_over, what="the end of the member")
        return spans_of(self.parts)

    async def stopped(self) -> dict[str, int]:
        """Take the lease away; return the spans."""
        self.parts.shift.lost(None)
        return await self.left()


def spans_of(parts: Parts) -> dict[str, int]:
    """Return how often each span was recorded."""
    parts.metrics.flush()
    value = parts.metrics.registry.prometheus.get_sample_value
    name = "rollout_span_duration_seconds_count"
    counts = {span: int(value(name, {"span": span}) or 0) for span in SPANS}
    return {span: count for span, count in counts.items() if count}


@pytest.fixture
def stage(run: Run, qwen3: Any) -> Stage:
    return Stage(run, qwen3)


async def look() -> str:
    """Look."""
    return "seen"


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], list[str], dict[str, int]]] = {
    "single_turn": (lambda _: single_turn, [DONE], {"generate": 1}),
    "multi_turn": (lambda _: multi_turn, [CALLS_TOOL, DONE], {"generate": 2, "tool": 1}),
    "records": (lambda _: recorded, [DONE, DONE], {"generate": 2}),
    "environment": (lambda _: episode(), [DONE], {"generate": 1, "tool": 2}),
    "agent": (lambda r: Gateway(r).generate(), [DONE, DONE], {"generate": 2, "tool": AGENT_GAPS}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_every_part_of_a_trajectory_that_ends_well_is_recorded(
    stage: Stage, qwen3: Any, name: str
) -> None:
    make, texts, expected = FUNCTIONS[name]
    await stage.start(make(qwen3), [says(qwen3, text) for text in texts], tool=look)
    found = await stage.judged()
    around = dict.fromkeys(("queue_wait", "merge", "reward", "submit", "group_wait"), 1)
    assert found == around | expected


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_every_part_of_a_trajectory_whose_engine_fails_is_recorded(
    stage: Stage, qwen3: Any, name: str
) -> None:
    make, texts, _ = FUNCTIONS[name]
    steps: list[Any] = [says(qwen3, text) for text in texts]
    steps[-1] = EngineFault("broken")
    await stage.start(make(qwen3), steps, tool=look)
    found = await stage.judged()
    outside = {"multi_turn": 1, "environment": 1, "agent": AGENT_GAPS}.get(name, 0)
    expected = {"queue_wait": 1, "generate": len(texts), "tool": outside, "submit": 1}
    assert found == {span: count for span, count in expected.items() if count}


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_every_part_of_a_trajectory_that_is_cancelled_in_a_call_is_recorded(
    stage: Stage, qwen3: Any, name: str
) -> None:
    make, texts, _ = FUNCTIONS[name]
    steps: list[Any] = [says(qwen3, text) for text in texts]
    steps[-1] = Held(steps[-1])
    await stage.start(make(qwen3), steps, tool=look)
    engine: Any = stage.parts.shift._rollout._engine
    await wait_until(lambda: len(engine.asked) == len(texts), what="the last call")
    found = await stage.stopped()
    outside = {"multi_turn": 1, "environment": 1, "agent": AGENT_GAPS - 1}.get(name, 0)
    expected = {"queue_wait": 1, "generate": len(texts), "tool": outside}
    assert found == {span: count for span, count in expected.items() if count}


OUTSIDE: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "tool": lambda then, _: {"generate": multi_turn, "texts": [CALLS_TOOL], "tool": then},
    "step": lambda then, _: {"generate": episode(then), "texts": [DONE]},
    "reset": lambda then, _: {"generate": episode(first=then), "texts": []},
    "agent": lambda then, r: {"generate": Gateway(r).generate(then), "texts": [DONE, DONE]},
    "reward": lambda then, _: {"generate": single_turn, "texts": [DONE], "scorer": Scorer(then)},
}
"""What is neither a call nor ours: how it is made to do what `then` says."""
BEFORE = {
    "tool": {"generate": 1, "tool": 1},
    "step": {"generate": 1, "tool": 2},
    "reset": {"tool": 1},
    "agent": {"generate": 2, "tool": AGENT_GAPS},
    "reward": {"generate": 1, "merge": 1, "reward": 1},
}


def broken(where: str) -> Any:
    """Return what has a part break."""
    if where == "tool":

        async def look() -> str:
            """Look."""
            raise ToolFault("its host is gone")

        return look
    return RewardFault("no verdict") if where == "reward" else RuntimeError("broken")


@pytest.mark.parametrize("where", OUTSIDE)
async def test_a_part_that_breaks_is_recorded(stage: Stage, qwen3: Any, where: str) -> None:
    asked = OUTSIDE[where](broken(where), qwen3)
    await stage.start(steps=[says(qwen3, text) for text in asked.pop("texts")], **asked)
    found = await stage.judged()
    # An agent that raises has ended its trajectory: it is merged and handed over.
    handed_over = {"merge": 1, "group_wait": 1} if where == "agent" else {}
    assert found == {"queue_wait": 1, "submit": 1} | BEFORE[where] | handed_over


@pytest.mark.parametrize("where", OUTSIDE)
async def test_a_part_that_is_cancelled_is_recorded(stage: Stage, qwen3: Any, where: str) -> None:
    waits = Waits()

    async def look() -> str:
        """Look."""
        return str(await waits())

    asked = OUTSIDE[where](look if where == "tool" else waits, qwen3)
    await stage.start(steps=[says(qwen3, text) for text in asked.pop("texts")], **asked)
    await waits.entered.wait()
    assert await stage.stopped() == {"queue_wait": 1} | BEFORE[where]


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_nothing_of_an_evaluation_is_recorded(stage: Stage, qwen3: Any, name: str) -> None:
    make, texts, _ = FUNCTIONS[name]
    steps: list[Any] = [says(qwen3, text) for text in texts]
    await stage.start(make(qwen3), steps, tool=look, evaluation=True)
    await wait_until(
        lambda: stage.run.queue.read_eval("0", count=10, block_s=0.5), what="the evaluation"
    )
    assert await stage.left() == {}


async def test_a_telemetry_that_only_fails_changes_nothing_for_a_group(
    stage: Stage, qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("worker.telemetry.metrics.counted", broken)
    monkeypatch.setattr("worker.telemetry.outcomes.OutcomeMetrics.members_judged", broken)
    monkeypatch.setattr("worker.telemetry.readings.Readings.flush", broken)
    parts = await stage.start(single_turn, [says(qwen3, DONE)])
    await stage.run.ready(1)
    await stage.left()
    await stage.run.audit()
    parts.metrics.flush()
    assert parts.metrics.guard.num_failures > 2


async def test_a_part_that_ignores_its_cancellation_is_recorded_when_it_ends(
    stage: Stage, qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.members.shift.STRAY_AFTER_S", 0.05)
    entered, go = asyncio.Event(), asyncio.Event()

    async def stubborn(given: GenerateInput) -> GenerateOutput:
        with timed(given.spans, "tool", 0):
            entered.set()
            while not go.is_set():
                try:
                    await go.wait()
                except asyncio.CancelledError:
                    continue
        return await single_turn(given)

    await stage.start(stubborn, [says(qwen3, DONE)])
    await entered.wait()
    assert await stage.stopped() == {"queue_wait": 1}
    go.set()
    await wait_until(lambda: spans_of(stage.parts).get("merge") == 1, what="its end")
    await wait_until(lambda: not stage.parts.shift._strays, what="its task's end")
    assert spans_of(stage.parts) == {
        "queue_wait": 1, "tool": 1, "generate": 1, "merge": 1, "reward": 1
    }  # fmt: skip
