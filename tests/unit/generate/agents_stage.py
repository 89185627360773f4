"""A stage for agent functions: sessions without HTTP, which an agent calls by its base URL."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rollstream.errors import STATUS_OF, EngineFault, StopReason
from rollstream.group import Trajectory
from rollstream.sample import Call, Sample
from tests.generate_stage import given as given_of
from worker.generate.agent import AgentLimits, Agents
from worker.generate.agent_function import AgentFunction
from worker.sampling import Sampling
from worker.types import GenerateInput, GenerateOutput

INSTANCE = "ab" * 16


class Gone(Exception):
    """The session is closed."""


class Held:
    """A session whose calls sample one token each; `hold` keeps the next one at its engine."""

    def __init__(self, given: GenerateInput) -> None:
        self.given, self.key = given, secrets.token_hex(16)
        self.fault: EngineFault | None = None
        self.ended_by: StopReason | None = None
        self.refused_by: StopReason | None = None
        self.calls = self.after_close = self.closes = 0
        self.hold: asyncio.Event | None = None
        self.over = asyncio.Event()
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._sample: Trajectory | None = None
        self.leaves = 1

    async def chat(self) -> None:
        """Do what a request does."""
        if self.closes:
            raise Gone
        task = asyncio.create_task(self._engine())
        self._in_flight.add(task)
        try:
            await task
        except asyncio.CancelledError:
            raise Gone from None
        self.calls += 1

    async def _engine(self) -> None:
        start = time.time()
        if self.hold is not None:
            await self.hold.wait()
        if self.closes:
            self.after_close += 1
        self.given.spans.record("generate", self.calls, start, time.time() - start)

    async def close(self) -> None:
        self.closes += 1
        for task in self._in_flight:
            task.cancel()
        await asyncio.sleep(0)

    async def collect(self) -> Trajectory:
        assert self.closes, "collected before it was closed"
        if self._sample is None:
            leaves = [self._leaf() for _ in range(self.leaves)]
            leaves[0].metadata["agent"] = {"calls": self.calls}
            self._sample = leaves[0] if self.leaves == 1 else leaves
        return self._sample

    def _leaf(self) -> Sample:
        pending, asked = self.given.sample, self.given.prompt.ids
        sample = Sample(**{n: getattr(pending, n) for n in ("group_index", "index", "rollout_id")})
        sample.metadata = dict(pending.metadata) | {"divergences": 0}
        if not self.calls:
            sample.finish(StopReason.NO_MODEL_CALL, STATUS_OF[StopReason.NO_MODEL_CALL])
            return sample
        sample.tokens = np.array([*asked, *[7] * self.calls], dtype=np.int32)
        sample.response_length = self.calls
        sample.rollout_log_probs = np.full(self.calls, -0.5, np.float32)
        sample.calls = [
            Call(f"{k:032x}", "http://e", len(asked) + k, len(asked) + k + 1, "stop")
            for k in range(self.calls)
        ]
        sample.finish(StopReason.STOP, STATUS_OF[StopReason.STOP])
        return sample


class Stage:
    """Sessions and their address, as the gateway is to a generate function."""

    instance_id = INSTANCE

    def __init__(self, **session: Any) -> None:
        self.sessions: dict[str, Held] = {}
        self.rules: list[Any] = []
        self._session = session

    def open(self, given: GenerateInput, rules: Any) -> Held:
        session = Held(given)
        for name, value in self._session.items():
            setattr(session, name, value)
        self.sessions[session.key] = session
        self.rules.append(rules)
        return session

    def base_url(self, key: str) -> str:
        return f"http://127.0.0.1:9500/sessions/{key}"

    def at(self, base_url: str) -> Held:
        """Return the session that a base URL names: what an agent's client would reach."""
        return self.sessions[base_url.rpartition("/")[2]]

    @property
    def only(self) -> Held:
        """The one session there was."""
        (session,) = self.sessions.values()
        return session


def an_input(renderer: Any, **fields: Any) -> GenerateInput:
    """Return what a generate function is given, of a row with metadata."""
    nothing: Any = None
    stage = given_of(nothing, renderer, **fields)
    stage.sample.metadata = {"row": {"k": [1]}}
    return stage


async def run_agent(
    stage: Stage,
    function: Callable[..., Any],
    given: GenerateInput,
    *,
    limits: AgentLimits | None = None,
    agents: Agents | None = None,
    **fields: Any,
) -> GenerateOutput:
    """Run one agent to its ending."""
    agent = AgentFunction("test:agent", function, **fields)
    maker = agents or Agents(stage, stage)
    return await maker.generate(agent, "rules", limits or AgentLimits())(given)


SAMPLING = Sampling(temperature=0.7, max_new_tokens=64)
