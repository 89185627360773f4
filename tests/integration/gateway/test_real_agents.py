"""Agents as people have them, against the gateway and the simulated engine, to their end."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import Status, StopReason
from rollstream.sample import Sample
from tests.generate_stage import given
from tests.integration.gateway.stage import Stage, gateway_stage
from tests.vocabulary_once import tokenizer_of
from worker.engines.sim.policy import Policy
from worker.engines.sim.script import PolicyConfig
from worker.gateway.rules import SessionRules
from worker.generate.agent import AgentLimits, Agents
from worker.generate.agent_function import resolve_agent
from worker.generate.finish import finish
from worker.members.fidelity import Fidelity, Watch, WatchedEngine
from worker.members.work import leaves_of
from worker.sampling import Sampling

QUESTION, ANSWER = "Ann has 12 apples and buys 7 more. How many has she?", "19"
CONFIG = PolicyConfig(tool_rate=1.0, again_rate=0.4, malformed_rate=0.0, max_sentences=3)
"""Each agent uses its tool, often several times."""


ROOT = Path(__file__).resolve().parents[3]


@contextlib.asynccontextmanager
async def staged(qwen3: Any, vocabulary: Path) -> AsyncIterator[tuple[Stage, Policy]]:
    policy = Policy(tokenizer_of(str(vocabulary)), {QUESTION: ANSWER}, CONFIG)
    sim = {"policy": policy}
    async with gateway_stage(qwen3, over="sim", sim=sim, vocabulary=str(vocabulary)) as stage:
        yield stage, policy


async def run(
    stage: Stage, path: str, member: int = 0, *, row: dict[str, Any] | None = None, **rules: Any
) -> list[Sample]:
    """Run one agent, with the check that a worker makes of every sample."""
    leased = given(
        stage.engine, stage.renderer, QUESTION, member=member, limits={"max_context": 8192},
        sampling=Sampling(max_new_tokens=512),
    )  # fmt: skip
    leased.sample.label, leased.sample.metadata = ANSWER, dict(row or {})
    watch, fidelity = Watch(leased.prompt), Fidelity()
    leased.engine = WatchedEngine(stage.engine, watch)
    maker = Agents(stage.book, stage.gateway)
    generate = maker.generate(
        resolve_agent(path), SessionRules(**stage.rules | rules), AgentLimits()
    )
    trajectory = finish(leased.sample, await generate(leased))
    fidelity.judge(trajectory, watch)
    assert fidelity.counters.checked >= 1
    assert sum(fidelity.counters.mismatches.values()) == fidelity.counters.unknown == 0
    return leaves_of(trajectory)


def check(sample: Sample, policy: Policy) -> None:
    """Assert that a sample is whole turns, each as the policy says it."""
    sample.validate()
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP), (
        sample.metadata
    )
    assert sample.rollout_log_probs is not None
    assert len(sample.calls) >= 2
    for call in sample.calls:
        held = slice(call.start - sample.prompt_length, call.end - sample.prompt_length)
        ids, log_probs = sample.tokens[call.start : call.end], sample.rollout_log_probs[held]
        prompt = sample.tokens[: call.start]
        assert policy.mismatch(prompt, call.sampling, ids, log_probs) is None
        assert len(ids) == len(policy.expected(prompt, call.sampling)[0])
    assert int(np.count_nonzero(sample.loss_mask)) == sample.num_sampled
    agent = sample.metadata["agent"]
    assert agent["committed"] == len(sample.calls)
    assert (agent["dropped_tokens"], agent["refused"], agent["failed"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param("openai_sdk", {}, marks=pytest.mark.slow),
        pytest.param("anthropic_sdk", {}, marks=pytest.mark.slow),
        ("openai_agents", {}),
        ("openai_agents", {"api": "responses"}),
    ],
)
async def test_an_sdk_s_agent_runs_to_its_end_and_its_sample_is_what_was_sampled(
    qwen3: Any, vocabulary: Path, name: str, row: dict[str, Any]
) -> None:
    async with staged(qwen3, vocabulary) as (stage, policy):
        path = f"examples.agents.{name}:run"
        found = await asyncio.gather(*(run(stage, path, m, row=row) for m in range(4)))
    for (sample,) in found:
        check(sample, policy)
        assert sample.metadata["turns"] == len(sample.calls)


@pytest.mark.slow
async def test_a_coding_agent_from_its_command_line_works_in_a_shell_and_hands_in(
    qwen3: Any, vocabulary: Path
) -> None:
    async with staged(qwen3, vocabulary) as (stage, policy):
        path = "examples.agents.mini_swe:run"
        found = await asyncio.gather(*(run(stage, path, m) for m in range(3)))
    for (sample,) in found:
        check(sample, policy)
        told = sample.metadata
        assert (told["exit_status"], told["steps"]) == ("Submitted", len(sample.calls))
        assert sample.reward == float(told["handed_in"] == ANSWER)
        # What its commands wrote is in the tokens, and is not trained.
        observed = sample.tokens[sample.calls[0].end : sample.calls[1].start]
        assert "<returncode>0</returncode>" in qwen3.decode(observed)


async def test_agents_of_a_tree_session_are_lists_of_one(qwen3: Any, vocabulary: Path) -> None:
    async with staged(qwen3, vocabulary) as (stage, policy):
        found = await run(stage, "examples.agents.openai_agents:run", kind="tree")
    (sample,) = found
    check(sample, policy)


@pytest.mark.slow
def test_the_example_runs_an_agent_against_the_whole_stack() -> None:
    command = [sys.executable, "-m", "examples.agents", "anthropic_sdk"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 samples" in done.stdout
