"""Budgets at their very edges, for both protocols: real generate functions, client and engine.

A trajectory is run once without budgets (a call, its tool's result, an answer). Under any budget it
must be a prefix of that one, end for the reason that `edges` works out from lengths alone, and cost
exactly the requests that it says: the engine counts them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from rollstream.errors import STATUS_OF, Status, StopReason
from rollstream.sample import Sample
from tests.contract.edges import NONE, Caps, Outcome, Story, outcome_of
from tests.contract.sim_process import KINDS, SimProcess, pool_of
from tests.generate_stage import given
from worker.engines.fleet.pool import EnginePool
from worker.generate import multi_turn, single_turn
from worker.sampling import Sampling
from worker.tools import load_tools

pytestmark = pytest.mark.xdist_group("contract-sim")
QUESTION = [{"role": "user", "content": "How much is 12 and 30?"}]
TOOLS = load_tools(("calculator",))


@dataclass
class Stage:
    """One protocol's pool on the engine, and what is never cut."""

    sim: SimProcess
    pool: EnginePool
    renderer: Any

    async def run(
        self, caps: Caps, *, held: Sample | None = None, generate: Any = multi_turn, **fields: Any
    ) -> Sample:
        """Run member 0 of group 3 under budgets."""
        limits = {"max_context": caps.context, "max_response": caps.response}
        # Built around the check of the constructor's own caller: a cap of 0 is asked for too.
        stage = given(
            self.pool, self.renderer, QUESTION, tools=TOOLS, sample=held,
            limits=limits | fields.pop("limits", {}),
            sampling=Sampling(max_new_tokens=caps.turn), **fields,
        )  # fmt: skip
        sample = (await generate(stage)).samples
        assert isinstance(sample, Sample)
        return sample

    async def whole(self) -> tuple[Sample, Story]:
        """Return the trajectory that nothing cuts, and its lengths."""
        sample = await self.run(Caps())
        first, second = sample.calls
        assert sample.stop_reason is StopReason.STOP
        story = Story(
            sample.prompt_length,
            [first.end - first.start, second.end - second.start],
            [second.start - first.end],
        )
        assert min(*story.replies, *story.observations) > 4, story
        return sample, story


@pytest_asyncio.fixture(params=KINDS)
async def stage(
    request: pytest.FixtureRequest, sim: SimProcess, qwen3: Any
) -> AsyncIterator[Stage]:
    """A stage of each protocol."""
    async with pool_of(request.param, sim.url) as pool:
        yield Stage(sim, pool, qwen3)


def cut(whole: Sample, held: int) -> Sample:
    """Return what an abort behind `held` tokens of the response leaves of a trajectory."""
    end = whole.prompt_length + held
    calls = [replace(call) for call in whole.calls if call.start < end]
    if calls and calls[-1].end >= end:
        last = calls[-1]
        last.end, last.finish, last.versions = end, "abort", [(0, last.start, end)]
    assert whole.loss_mask is not None
    assert whole.rollout_log_probs is not None
    return replace(
        whole, tokens=whole.tokens[:end].copy(), response_length=held, calls=calls,
        loss_mask=whole.loss_mask[:held].copy(), weight_versions=[],
        rollout_log_probs=whole.rollout_log_probs[:held].copy(), status=Status.ABORTED,
        stop_reason=StopReason.ABORT_WEIGHTS, metadata={}, response="",
    )  # fmt: skip


def difference(whole: Sample, found: Sample, expected: Outcome, held: int = 0) -> str:
    """Return how a sample is not what it should be."""
    own = [call for call in found.calls if call.finish != "abort" or call.end > call.start]
    asked = [call.sampling["max_new_tokens"] for call in own[len(own) - len(expected.asked) :]]
    length = expected.length
    is_prefix = np.array_equal(found.tokens, whole.tokens[: whole.prompt_length + length])
    checks = {
        "tokens": is_prefix and found.response_length == length,
        "reason": found.stop_reason is expected.reason
        and found.status is STATUS_OF[expected.reason],
        "asked": not expected.asked or asked == expected.asked,
        "log_probs": np.array_equal(
            found.rollout_log_probs,
            whole.rollout_log_probs[:length],
        ),
        "mask": np.array_equal(found.loss_mask, whole.loss_mask[:length]),
    }
    wrong = [name for name, right in checks.items() if not right]
    return f"{wrong}: {found.stop_reason} {found.response_length} {asked}" if wrong else ""


async def check_all(
    stage: Stage, runs: list[tuple[Caps, int | None]], *, generate: Any = multi_turn
) -> None:
    """Run every (budgets, tokens of an aborted attempt) and compare; count the requests."""
    whole, story = await stage.whole()
    if generate is single_turn:
        whole = await stage.run(Caps(), generate=single_turn)
        story = Story(story.prompt, story.replies[:1], ())
    before = stage.sim.reached()
    outcomes = [outcome_of(story, caps, held or 0) for caps, held in runs]
    samples = await asyncio.gather(
        *(
            stage.run(caps, held=None if held is None else cut(whole, held), generate=generate)
            for caps, held in runs
        )
    )
    found = {
        f"{caps} held={held}: expected {outcome}": difference(whole, sample, outcome)
        for (caps, held), outcome, sample in zip(runs, outcomes, samples, strict=True)
    }
    assert {run: text for run, text in found.items() if text} == {}
    assert stage.sim.reached() - before == sum(len(o.asked) for o in outcomes)


def around(*points: int) -> list[int]:
    """Return 0, 1, and each point with what is one below and one above it."""
    near = {point + step for point in points for step in (-1, 0, 1)}
    return sorted({0, 1} | {point for point in near if point >= 0})


def corners(story: Story) -> list[int]:
    """Return where something happens, in tokens behind the prompt."""
    (first, second), (seen,) = story.replies, story.observations
    return [0, first, first + seen, first + seen + second]


async def test_each_budget_alone_cuts_at_its_edge_and_not_one_token_beside_it(
    stage: Stage,
) -> None:
    _, story = await stage.whole()
    by_turn = around(*story.replies)
    by_response = around(*corners(story))
    by_context = around(story.prompt, *(story.prompt + at for at in corners(story)))
    runs = [
        *[(Caps(turn=cap), None) for cap in by_turn],
        *[(Caps(response=cap), None) for cap in by_response],
        *[(Caps(context=cap), None) for cap in by_context],
    ]
    reasons = {outcome_of(story, caps).reason for caps, _ in runs}
    assert reasons == {
        StopReason.STOP, StopReason.TURN_LENGTH, StopReason.RESPONSE_LENGTH,
        StopReason.CONTEXT_LENGTH, StopReason.PROMPT_TOO_LONG,
    }  # fmt: skip
    await check_all(stage, runs)


async def test_budgets_together_cut_where_the_least_does_and_the_widest_gives_the_reason(
    stage: Stage,
) -> None:
    _, story = await stage.whole()
    at = corners(story)
    runs = [
        (Caps(turn, response, context), None)
        for turn, response, context in itertools.product(
            (0, 1, story.replies[0], NONE),
            (0, 1, *at[1:], at[2] + 1, None),
            (story.prompt, story.prompt + 1, *(story.prompt + point for point in at[1:]), NONE),
        )
    ]
    assert len(runs) > 150
    await check_all(stage, random.Random(5).sample(runs, 80))


async def test_a_resume_has_what_is_left_of_every_budget_wherever_the_abort_came(
    stage: Stage,
) -> None:
    _, story = await stage.whole()
    first, behind, end = corners(story)[1:]
    runs: list[tuple[Caps, int | None]] = []
    for held in (0, 1, first - 1, first, behind, behind + 1, end - 1, end):
        left = {
            held,
            held + 1,
            *(point + step for point in (first, behind, end) for step in (-1, 0)),
        }
        for cap in sorted(point for point in left if point >= 0):
            runs += [(Caps(response=cap), held), (Caps(context=story.prompt + cap), held)]
        runs += [(Caps(turn=cap), held) for cap in (0, 1, *story.replies)]
    await check_all(stage, runs)


async def test_one_reply_has_the_same_edges(stage: Stage) -> None:
    _, story = await stage.whole()
    reply, prompt = story.replies[0], story.prompt
    runs: list[tuple[Caps, int | None]] = []
    for held in (None, 1, reply - 1):
        # A prompt that fits nowhere is no trajectory there (conformance 6): see below.
        for cap in around(reply)[1:]:
            runs += [(Caps(cap), held), (Caps(response=cap), held)]
            runs += [(Caps(context=prompt + cap), held)]
    await check_all(stage, runs, generate=single_turn)


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
async def test_a_prompt_that_leaves_no_room_is_never_sent(stage: Stage, generate: Any) -> None:
    _, story = await stage.whole()
    before = stage.sim.reached()
    for context in (1, story.prompt - 1, story.prompt):
        sample = await stage.run(Caps(context=context), generate=generate)
        assert (sample.response_length, sample.calls) == (0, [])
        assert (sample.status, sample.stop_reason) == (
            Status.TRUNCATED,
            StopReason.PROMPT_TOO_LONG,
        )
    assert stage.sim.reached() == before


async def test_the_longest_trajectory_is_a_budget_like_the_context(stage: Stage) -> None:
    whole, story = await stage.whole()
    for cap in around(*(story.prompt + at for at in corners(story)))[2:]:
        sample = await stage.run(Caps(), limits={"max_seq_len": cap})
        assert difference(whole, sample, outcome_of(story, Caps(context=cap))) == "", cap
        assert len(sample.tokens) <= max(cap, story.prompt)


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
@pytest.mark.parametrize(("stopped", "left"), [(0, 10), (4, 6), (9, 1), (10, 0)])
async def test_cases_66_and_67_what_an_engine_aborted_goes_on_with_what_is_left(
    stage: Stage, generate: Any, stopped: int, left: int
) -> None:
    whole, story = await stage.whole()
    caps = Caps(response=10, context=story.prompt + 54)
    stage.sim.damage({"kind": "abort", "after": stopped})
    first = await stage.run(caps, generate=generate)
    assert first.stop_reason is StopReason.ABORT_WEIGHTS
    assert first.response_length == stopped
    before = stage.sim.reached()
    sample = await stage.run(caps, held=first, generate=generate)
    asked = [call.sampling["max_new_tokens"] for call in sample.calls if call.finish != "abort"]
    assert asked == ([left] if left else [])
    assert stage.sim.reached() - before == len(asked)
    assert (sample.response_length, sample.stop_reason) == (10, StopReason.RESPONSE_LENGTH)
    assert sample.tokens.tolist() == whole.tokens[: story.prompt + 10].tolist()
