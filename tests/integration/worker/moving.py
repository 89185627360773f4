"""Workers under a moving policy: real queue, real simulated engine, everything that a worker has.

Owns the putting together of one worker in this process (what `worker.process.app` does, without
signals and telemetry), the trainer's side of an update by hand, and the audit of what was delivered
against the policy, which knows every token and which weights sampled it.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.group import EnvRule, PromptGroup
from rollstream.link import Link
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.sample import Call, Sample
from rollstream.wire import decode_body, decode_prompt
from tests.unit.worker.works import a_book, an_env
from worker.aggregate.aggregator import Aggregator
from worker.aggregate.judge import EnvJudge
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.sim.policy import Policy
from worker.engines.sim.script import PolicyConfig
from worker.generate import multi_turn
from worker.generate.finish import finish
from worker.generate.resumable import is_resumable
from worker.members.fidelity import Fidelity
from worker.members.gate import Gate, GatedEngine
from worker.members.parked import Parking
from worker.members.rollout import Rollout
from worker.members.shift import Shift, ShiftLimits, new_incarnation
from worker.members.view import RunView
from worker.members.work import Cause
from worker.process.following import Follower
from worker.process.heart import Heart
from worker.sampling import Sampling
from worker.telemetry.metrics import Metrics
from worker.tito.load import render_prompt
from worker.types import Limits

from .parts import Run, wait_until
from .processes import Sim

MAX_TOKENS = 256
POLICY = PolicyConfig(tool_rate=1.0, again_rate=0.3, malformed_rate=0.0, max_sentences=3)
"""Nearly every sample calls its tool, some of them twice."""


def a_sim(folder: Path, vocabulary: Path, *, token_s: float = 0.004) -> Sim:
    """Return an engine of that pace, whose log-probs tell which weights sampled a token."""
    options = ["--token-s", str(token_s), "--versioned-log-probs", "--weight-version", "0"]
    for name, value in POLICY.to_dict().items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    return Sim(folder, vocabulary, latency_s=0.01, options=options)


class Moving:
    """One worker; `start` runs it until the test ends."""

    def __init__(
        self,
        run: Run,
        renderer: Any,
        *,
        url: str = "",
        kind: str = "sglang",
        engine: Any = None,
        tool: Any = None,
        generate: Any = multi_turn,
        partial: bool = True,
        mask_offpolicy: bool = False,
        max_resumes: int = 16,
        slots: int = 16,
        scorer: Any = None,
    ) -> None:
        self.queue, self.link, self.view, self.gate = run.queue, Link(), RunView(), Gate()
        self.metrics = Metrics(version="0", wire=1, envs=["default"])
        self.name, self.fidelity = new_incarnation(), Fidelity()
        top = renderer.max_token_id if hasattr(renderer, "max_token_id") else 151_668
        policy = RetryPolicy(abort_wait_s=1.0, probe_interval_s=0.1)
        self.pool: Any = engine or EnginePool([url], max_token_id=top, policy=policy, kind=kind)
        env = an_env(
            generate, limits=Limits(8, 4096), sampling=Sampling(max_new_tokens=MAX_TOKENS),
            tools={} if tool is None else {tool.name: tool}, resumable=is_resumable(generate),
            scorer=scorer,
        )  # fmt: skip
        book = a_book(env, lambda prompt, specs: render_prompt(renderer, prompt, specs))
        parking = Parking(self.queue.parked, max_token_id=top, max_resumes=max_resumes)
        rollout = Rollout(
            engine=GatedEngine(self.pool, self.gate), renderer=renderer, book=book, finish=finish,
            version=lambda: self.view.version, run_seed=7, fidelity=self.fidelity,
            parking=parking if partial else None, mask_offpolicy=mask_offpolicy,
            opened=self.gate.reopened if partial else None,
        )  # fmt: skip
        self.shift = Shift(
            self.queue, self.link, self.view, name=self.name, rollout=rollout, book=book,
            health=self.pool, limits=ShiftLimits(slots, 60.0, 0.0, 20), metrics=self.metrics,
            gate=self.gate,
        )  # fmt: skip
        self.follower = Follower(
            self.queue, self.link, self.view, name=self.name, gate=self.gate, fleet=self.pool,
            let_go_s=2.0,
        )  # fmt: skip
        self.heart = Heart(
            self.queue, self.link, self.view, name=self.name, held=self.shift.held,
            lost=self.shift.lost, metrics=self.metrics, also=self.follower.confirmations,
            look=self.follower.look,
        )  # fmt: skip
        judge = EnvJudge("default", EnvRule(needs_reward=False))
        self.aggregator = Aggregator(
            self.queue, self.link, {"default": judge}, metrics=self.metrics
        )
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self, *, beat: bool = True, follow: bool = True) -> Moving:
        """Run it."""
        await self.pool.probe()
        await self.follower.look()
        parts: list[Coroutine[Any, Any, Any]] = [
            self.shift.submitter.run(), self.shift.watch(), self.aggregator.run(),
        ]  # fmt: skip
        parts += [self.heart.run()] if beat else []
        parts += [self.follower.run()] if follow else []
        parts.append(self.shift.run())
        self._tasks = [asyncio.create_task(part) for part in parts]
        return self

    async def sigterm(self, finish_s: float = 0.0) -> None:
        """Stop as a process does at SIGTERM."""
        assert await self.shift.drain(finish_s, 5.0, park=self.follower.abort_calls) == 0
        await self.stop()
        await self.heart.leave()

    async def stop(self) -> None:
        """End at once, as a crash would: nothing is given back."""
        for task in self._tasks:
            task.cancel()
        self.shift.cancel_all(Cause.LOST)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ended, self._tasks = self._tasks, []
        await self.pool.aclose()
        for task in ended:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]  # it has one


# --- the trainer's side --------------------------------------------------------------------------
async def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Post JSON to an engine, and return what it answered."""

    def ask() -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            raw = answer.read()
        return json.loads(raw) if raw else None

    return await asyncio.to_thread(ask)


async def confirmed(queue: Queue, seq: int, names: Sequence[str], *, idle: bool) -> None:
    """Wait until these workers confirmed a control word, with no call in flight where `idle`."""

    async def all_did() -> bool:
        found = {c.worker: c for c in await queue.confirmations()}
        return all(
            name in found
            and found[name].control_seq >= seq
            and (not idle or found[name].in_flight == 0)
            for name in names
        )

    await wait_until(all_did, what=f"confirmations of {seq}")


async def update(
    run: Run, sim: Sim, version: int, mode: str, workers: Sequence[Moving], *, idle: bool = False
) -> None:
    """Give the engine new weights, as `GroupStream.updating_weights` does."""
    paused = await run.queue.call(calls.pause(mode, 30.0))
    names = [worker.name for worker in workers]
    await confirmed(run.queue, paused.control_seq, names, idle=idle or mode == "abort")
    body = {"new_version": str(version), "abort_all_requests": False}
    await post(sim.url, "/update_weight_version", body)
    await run.queue.call(calls.set_version(version))
    await run.queue.call(calls.resume())


async def some_running(workers: Sequence[Moving], calls_in_flight: int = 8) -> None:
    """Wait until so many calls are in flight, and have tokens: one comes every 4 ms."""
    await wait_until(
        lambda: sum(w.gate.in_flight for w in workers) >= calls_in_flight, what="calls in flight"
    )
    await asyncio.sleep(0.1)


# --- the audit -----------------------------------------------------------------------------------
async def delivered(run: Run, groups: dict[str, int]) -> list[Sample]:
    """Return every sample of these groups, from the wire."""
    found: list[Sample] = []
    for stored in await run.queue.groups(list(groups.items()), text=True):
        assert stored.prompt is not None
        number = int(stored.group_index.rpartition(":")[2])
        prompt: PromptGroup = decode_prompt(stored.prompt, number, stored.n)
        for body, text in zip(stored.bodies, stored.texts, strict=True):
            assert body is not None, (stored.group_index, stored.errors)
            sample = decode_body(body, prompt, text)
            assert isinstance(sample, Sample)
            found.append(sample)
    return found


def turns_of(sample: Sample) -> list[list[Call]]:
    """Return the calls of each turn; one that was stopped and went on has several."""
    turns: list[list[Call]] = []
    for call in sample.calls:
        if turns and turns[-1][-1].end == call.start:
            turns[-1].append(call)
        else:
            turns.append([call])
    return turns


def audit(policy: Policy, renderer: Any, samples: Sequence[Sample]) -> None:
    """Hold samples against the policy: each turn is one whole reply, each token of its weights."""
    for sample in samples:
        sample.validate()
        assert sample.rollout_log_probs is not None
        assert sample.response == renderer.decode(sample.tokens[sample.prompt_length :])
        for turn in turns_of(sample):
            first, end = turn[0], turn[-1].end
            context = sample.tokens[: first.start]
            sampling = first.sampling | {"max_new_tokens": MAX_TOKENS}
            assert {call.sampling["seed"] for call in turn} == {first.sampling["seed"]}
            ids, _ = policy.expected(context, sampling)
            assert sample.tokens[first.start : end].tolist() == ids.tolist()
            versions = [v for call in turn for v, a, b in call.versions for _ in range(a, b)]
            assert len(versions) == end - first.start
            said = policy.score(sample.tokens[:end], first.start, version=versions)
            held = sample.rollout_log_probs[first.start - sample.prompt_length :][: len(said)]
            assert np.array_equal(said, held), "another version sampled it than its call says"
            for call in turn:
                assert 1 <= call.end - call.start <= call.sampling["max_new_tokens"]


def executions(samples: Sequence[Sample]) -> Counter[str]:
    """Return how often each expression was to be executed, by what samples recorded."""
    return Counter(
        json.loads(call["arguments"])["expression"]
        for sample in samples
        for call in sample.metadata.get("tool_calls", ())
        if call["executed"]
    )


def versions_of(samples: Sequence[Sample]) -> list[set[int]]:
    """Return the weight versions of each sample's tokens."""
    spans = ([s for call in sample.calls for s in call.versions] for sample in samples)
    return [{version for version, a, b in one if a < b} for one in spans]


def engines_of(samples: Sequence[Sample]) -> list[int]:
    """Return how many engines had a part in each sample."""
    return [len({call.engine for call in sample.calls}) for sample in samples]
