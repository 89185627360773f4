"""How attempts end under signals, version changes, dead engines and poison, over a real server.

The same faults on real processes are in `tests/e2e/test_workers.py` and `test_poison.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollstream.errors import EngineFault, RewardFault
from rollstream.group import PromptGroup, Trajectory
from rollstream.queue import calls
from tests.unit.worker.works import answer
from worker.memory import MEMORY
from worker.types import GenerateInput, GenerateOutput

from .parts import Gate, Run, a_run, wait_until


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name) as opened:
        yield opened


# --- SIGTERM at the worst moments (rq/rq#2236, celery/celery#3802) -------------------------------
async def test_a_stop_while_the_answer_of_a_lease_is_on_its_way_gives_it_back_uncharged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, leased, go_on = Gate(), asyncio.Event(), asyncio.Event()
    call = run.queue.call

    async def slow_answer(asked: Any) -> Any:
        answered = await call(asked)
        if asked.script == "lease" and answered.groups:
            leased.set()
            await go_on.wait()
        return answered

    monkeypatch.setattr(run.queue, "call", slow_answer)
    await run.enqueue(1, 4)
    parts = run.worker(generate=gate)
    parts.start()
    await leased.wait()

    parts.shift.stop()
    go_on.set()
    assert parts.working is not None
    assert await parts.working == ""
    assert await parts.shift.drain(finish_s=0, report_s=5) == 0

    assert (await run.queue.depths())["q"] == 4
    counters = await run.queue.counters()
    assert counters["given_back"] == 4
    assert not {"attempts", "crashes"} & set(counters)
    await run.audit()


async def test_a_stop_while_results_are_on_their_way_lands_them_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, go_on = asyncio.Event(), asyncio.Event()
    call_many = run.queue.call_many

    async def slow_answer(asked: Any) -> Any:
        answers = await call_many(asked)
        if asked[-1].script == "complete":
            sent.set()
            await go_on.wait()
        return answers

    monkeypatch.setattr(run.queue, "call_many", slow_answer)
    await run.enqueue(1, 4)
    parts = run.worker()
    parts.start()
    await sent.wait()

    draining = asyncio.create_task(parts.shift.drain(finish_s=0, report_s=5))
    await asyncio.sleep(0.05)
    go_on.set()
    assert await draining == 0

    await run.ready(1)
    counters = await run.queue.counters()
    assert counters["completed"] == 4
    assert not {"attempts", "crashes", "given_back", "fenced"} & set(counters)
    await run.audit()


# --- counting (microsoft/agent-lightning#480) ----------------------------------------------------
async def test_a_member_that_failed_and_was_tried_again_counts_once(run: Run) -> None:
    tried: Counter[int] = Counter()

    async def fails_once(given: GenerateInput) -> GenerateOutput:
        member = given.sample.member
        tried[member] += 1
        if tried[member] == 1:
            raise EngineFault("connection reset", retryable=True)
        return GenerateOutput(answer(given, reward=float(member)))

    await run.enqueue(1, 32)
    run.worker(generate=fails_once, slots=32).start()
    await run.ready(1)

    group = await run.group(1, 32)
    assert sum(body is not None for body in group.bodies) == 32
    assert sum(header is not None for header in group.headers) == 32
    assert await run.counter("completed") == 32
    assert await run.counter("attempts") == 32
    await run.audit()


# --- a judge whose process was killed (celery/celery#1628) ---------------------------------------
async def test_a_sample_whose_judge_was_killed_is_tried_again_and_lands(run: Run) -> None:
    class Killed:
        """A verifier whose process is killed for its first verdict."""

        asked = 0

        async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
            self.asked += 1
            if self.asked == 1:
                message = "math_verify gave no verdict (crashed): wait status 9"
                raise RewardFault(message, retryable=True, detail="crashed")
            assert not isinstance(trajectory, list)
            trajectory.reward = 1.0

    scorer = Killed()
    await run.enqueue(1, 1)
    run.worker(scorer=scorer).start()
    await run.ready(1)

    assert scorer.asked == 2
    assert await run.counter("attempts") == 1
    assert await run.counter("completed") == 1


# --- stale rollouts (huggingface/trl#7176) -------------------------------------------------------
async def test_a_new_version_cancels_stale_attempts_within_one_beat_and_no_others(
    valkey_url: str, run_name: str
) -> None:
    gate = Gate()
    async with a_run(valkey_url, run_name, max_stale=0, lease_ms=60_000) as run:
        await run.enqueue(1, 4)
        parts = run.worker(generate=gate, slots=8)
        parts.start()
        await wait_until(lambda: len(gate.started) == 4)
        await run.queue.call(calls.set_version(1))
        await run.enqueue(2, 4)
        await wait_until(lambda: len(gate.started) == 8)

        # The next beat would come 20 s later: control words make one at once.
        parts.heart.nudge()
        await wait_until(lambda: parts.shift.num_busy == 4, what="stale attempts cancelled")

        assert await run.drops() == {"stale": 1}
        gate.end(2, 0, 1, 2, 3)
        await run.ready(1)
        assert await run.counter("completed") == 4
        await run.audit()


# --- an engine that never comes back (case I 114 b) ----------------------------------------------
async def test_an_engine_that_stays_away_ends_groups_by_their_deadline_and_no_worker(
    valkey_url: str, run_name: str
) -> None:
    tries: list[int] = []

    async def away(given: GenerateInput) -> GenerateOutput:
        tries.append(given.sample.member)
        parts.engines.up = False
        raise EngineFault("no engine answers", retryable=True, detail="no_engine")

    async with a_run(valkey_url, run_name, lease_ms=600) as run:
        await run.enqueue(1, 2, timeout_ms=900)
        parts = run.worker(generate=away)
        parts.start()
        await wait_until(run.drops)
        assert tries

        assert await run.drops() == {"deadline": 1}
        assert parts.working is not None
        assert not parts.working.done()
        await run.audit()


# --- memory --------------------------------------------------------------------------------------
async def test_a_memory_error_is_tried_again_and_makes_the_worker_look_at_itself(
    run: Run,
) -> None:
    tried: list[int] = []

    async def greedy(given: GenerateInput) -> GenerateOutput:
        tried.append(given.sample.member)
        if len(tried) == 1:
            raise MemoryError("cannot allocate")
        return GenerateOutput(answer(given))

    before = MEMORY.num_errors
    await run.enqueue(1, 1)
    run.worker(generate=greedy).start()
    await run.ready(1)

    assert tried == [0, 0]
    assert await run.counter("attempts") == 1
    assert MEMORY.num_errors == before + 1
