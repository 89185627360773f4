"""A run whose weights move: pauses of every mode, parked samples, and who goes on with them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.queue import calls
from rollstream.wire import encode_prompt
from tests.builders import a_prompt
from tests.contract.rolls import Recorder
from tests.toy import a_completion
from tests.unit.worker.works import answer
from worker.engines.fleet.pool import EnginePool
from worker.engines.sim.policy import Policy
from worker.members import reports
from worker.types import Finish, GenerateInput, GenerateOutput, RequestIds

from .moving import (
    POLICY,
    Moving,
    a_sim,
    audit,
    confirmed,
    delivered,
    engines_of,
    executions,
    post,
    some_running,
    turns_of,
    update,
    versions_of,
)
from .parts import Run, a_run, wait_until
from .processes import Sim

N = 4
GROUPS = 4
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Sim]:
    engine = a_sim(tmp_path_factory.mktemp("sim"), vocabulary)
    engine.start()
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy.load(str(vocabulary), {}, POLICY)


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name, lease_ms=4_000, max_attempts=3) as opened:
        yield opened


@pytest.fixture
async def start(run: Run, qwen3: Any, sim: Sim) -> AsyncIterator[Start]:
    started: list[Moving] = []

    async def begin(*, beat: bool = True, follow: bool = True, **options: Any) -> Moving:
        url = sim.url.replace("127.0.0.1", options.pop("host", "127.0.0.1"))
        worker = Moving(run, qwen3, **({"url": url} | options))
        started.append(worker)
        return await worker.start(beat=beat, follow=follow)

    # Versions only rise: each test begins where the one before left the engine.
    version = int((await asyncio.to_thread(_model_info, sim))["weight_version"])
    await run.queue.call(calls.set_version(version))
    yield begin
    for worker in started:
        await worker.stop()


def _model_info(sim: Sim) -> Any:
    with urllib.request.urlopen(f"{sim.url}/model_info", timeout=10) as answered:
        return json.loads(answered.read())


def calculator() -> Recorder:
    """Return a tool whose executions a test counts."""
    return Recorder(
        "calculator", "8", properties={"expression": {"type": "string"}}, required=["expression"]
    )


async def enqueue(run: Run, groups: int = GROUPS, **fields: Any) -> dict[str, int]:
    for g in range(groups):
        content = f"What is {g + 11}+{g + 7}?"
        await run.enqueue(g, N, prompt=[{"role": "user", "content": content}], **fields)
    return {str(g): N for g in range(groups)}


def executed(*tools: Recorder) -> Counter[str]:
    return Counter(call["expression"] for tool in tools for call in tool.calls)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_samples_that_updates_stop_go_on_at_their_token_on_any_worker(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy, kind: str
) -> None:
    tools = [calculator() for _ in range(3)]
    groups = await enqueue(run, 2 * GROUPS)
    workers = [await start(tool=tools[0], kind=kind)]
    for tool, host in zip(tools[1:], ("localhost", "127.0.0.1"), strict=True):
        await some_running(workers, 4)
        workers[-1].shift.stop()  # what it parks, another goes on with
        workers.append(await start(tool=tool, kind=kind, host=host))
        await update(run, sim, workers[0].view.version + 1, "abort", workers)
    await some_running(workers, 1)
    await update(run, sim, workers[0].view.version + 1, "abort", workers)
    await run.ready(2 * GROUPS)

    samples = await delivered(run, groups)
    audit(policy, qwen3, samples)
    assert await run.counter("parked") > 0
    assert max(sample.metadata.get("resumes", 0) for sample in samples) >= 2
    assert max(engines_of(samples)) == 2, "no sample went from one worker to another"
    assert max(map(len, versions_of(samples))) >= 2
    # Each call of a tool that is in a sample was executed once, and nothing else was.
    assert executed(*tools) == executions(samples)
    for name in ("attempts", "crashes"):
        assert await run.counter(name) == 0
    for worker in workers:
        assert worker.fidelity.counters.unknown == 0
        assert sum(worker.fidelity.counters.mismatches.values()) == 0
    await run.audit()


async def test_case_68_without_partial_what_an_update_stops_begins_anew(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    groups = await enqueue(run)
    worker = await start(partial=False)
    version = worker.view.version + 1
    await some_running([worker])
    await update(run, sim, version, "abort", [worker])
    await run.ready(GROUPS)

    samples = await delivered(run, groups)
    audit(policy, qwen3, samples)
    assert await run.counter("given_back") > 0
    assert await run.counter("parked") == 0
    assert await run.counter("attempts") == 0
    assert all(len(versions) == 1 for versions in versions_of(samples))
    assert not any("resumes" in sample.metadata for sample in samples)


async def test_keep_lets_calls_go_on_holds_new_ones_and_sends_nothing_back(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    tool = calculator()
    groups = await enqueue(run)
    worker = await start(tool=tool)
    version = worker.view.version + 1
    await some_running([worker])
    paused = await run.queue.call(calls.pause("keep"))
    await confirmed(run.queue, paused.control_seq, [worker.name], idle=False)
    # What is in flight ends by itself, and no other call follows it.
    await confirmed(run.queue, paused.control_seq, [worker.name], idle=True)
    assert worker.gate.in_flight == 0
    assert worker.shift.num_busy > 0
    await post(sim.url, "/update_weight_version",
               {"new_version": str(version), "abort_all_requests": False})  # fmt: skip
    await run.queue.call(calls.set_version(version))
    await run.queue.call(calls.resume())
    await run.ready(GROUPS)

    samples = await delivered(run, groups)
    audit(policy, qwen3, samples)
    for name in ("parked", "given_back", "attempts"):
        assert await run.counter(name) == 0
    assert executed(tool) == executions(samples)
    assert max(map(len, versions_of(samples))) == 2, "nobody's turns lie on both sides"


async def test_only_the_newest_versions_tokens_are_trained_where_that_is_asked_for(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    groups = await enqueue(run)
    worker = await start(mask_offpolicy=True)
    await some_running([worker])
    await update(run, sim, worker.view.version + 1, "abort", [worker])
    await run.ready(GROUPS)
    samples = await delivered(run, groups)
    audit(policy, qwen3, samples)
    masked = 0
    for sample in samples:
        newest = max(v for call in sample.calls for v, _, _ in call.versions)
        assert sample.loss_mask is not None
        for call in sample.calls:
            for version, start_, end in call.versions:
                part = sample.loss_mask[start_ - sample.prompt_length : end - sample.prompt_length]
                assert bool(part.all()) == (version == newest) or start_ == end
                masked += version != newest
    assert masked > 0


async def test_an_abort_of_the_engines_own_is_parked_and_goes_on_without_a_pause(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    groups = await enqueue(run)
    worker = await start()
    await some_running([worker])

    async def parked() -> int:
        # What had no token yet is given back: a little later everything has some.
        await post(sim.url, "/abort_request", {"abort_all": True})
        await asyncio.sleep(0.05)
        return await run.counter("parked")

    await wait_until(parked, what="a parked member")
    await run.ready(GROUPS)
    audit(policy, qwen3, await delivered(run, groups))
    assert await run.counter("attempts") == 0


async def test_a_worker_that_is_told_to_stop_parks_what_runs(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    tools = calculator(), calculator()
    groups = await enqueue(run, 2)
    first = await start(tool=tools[0])
    await some_running([first])
    await first.sigterm()
    depths = await run.queue.depths()
    assert (depths["l"], depths["q"] + await run.counter("completed")) == (0, 2 * N)
    assert await run.counter("parked") > 0

    second = await start(tool=tools[1], host="localhost")
    await run.ready(2)
    samples = await delivered(run, groups)
    audit(policy, qwen3, samples)
    assert max(engines_of(samples)) == 2
    assert any(len(turn) > 1 for sample in samples for turn in turns_of(sample)), "inside a turn"
    assert executed(*tools) == executions(samples)
    assert await run.counter("attempts") == await run.counter("crashes") == 0
    assert second.fidelity.counters.unknown == 0


async def test_a_worker_that_dies_with_a_resumed_member_loses_nothing_that_was_parked(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    await run.queue.call(calls.set_budget("lease_ms", 500))
    groups = await enqueue(run, 1)
    first = await start()
    await some_running([first], N)
    await first.sigterm()
    parked = await run.counter("parked")
    assert parked > 0

    second = await start()
    await wait_until(lambda: second.gate.in_flight >= parked, what="resumed members")
    await second.stop()  # as kill -9 does

    third = await start(host="localhost")
    await run.ready(1)
    samples = await delivered(run, groups)
    audit(policy, qwen3, samples)
    assert await run.counter("crashes") > 0
    resumed = [sample for sample in samples if sample.metadata.get("resumes")]
    assert len(resumed) == parked, "what lay parked was gone on from, again"
    assert third.fidelity.counters.unknown == 0


async def test_a_parked_body_that_cannot_be_read_is_forgotten_and_the_member_begins_anew(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    groups = await enqueue(run, 1)
    answered = await run.queue.call(calls.lease("f" * 12, 1, N))
    for member in answered.groups[0].members:
        assert await run.queue.call(calls.park(member.lease, b"\xc1garbage")) == "parked"
    await start()
    await run.ready(1)
    samples = await delivered(run, groups)
    audit(policy, qwen3, samples)
    assert await run.counter("attempts") == N, "it costs each of them an attempt"
    assert not any("resumes" in sample.metadata for sample in samples)
    (stored,) = await run.queue.groups([("0", N)])
    assert stored.errors == [None] * N


class StopsAtEveryToken:
    """A pool whose engine samples one token and stops, unless it is told to let go."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.calls, self.stops = inner, 0, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, prompt: Any, sampling: Any, **how: Any) -> Any:
        self.calls += 1
        cut = dataclasses.replace(sampling, max_new_tokens=1, min_new_tokens=0)
        completion = await self._inner.generate(prompt, cut if self.stops else sampling, **how)
        if self.stops:
            completion.finish, completion.matched = Finish.ABORT, None
        return completion


async def test_a_member_that_is_stopped_again_and_again_begins_anew_after_so_many_resumes(
    run: Run, start: Start, sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "ABORT_DELAY_S", 0.0)
    engine = StopsAtEveryToken(EnginePool([sim.url], max_token_id=151_668))
    await run.enqueue(0, 1)
    await start(engine=engine, max_resumes=2)

    async def ended() -> bool:
        return await run.counter("dropped:short_group") == 1

    await wait_until(ended, what="the end of its attempts")
    # Three attempts of a first try and two resumes each; the queue ends what used them up.
    assert engine.calls == 3 * 3
    assert await run.counter("parked") == 3 * 3
    assert await run.counter("attempts") == 3
    (drop,) = await run.queue.past()
    assert drop["errors"][0][0] == "merge_error"
    assert "resumed 2 times" in drop["errors"][0][1]


async def test_an_evaluation_runs_beside_training_and_counts_for_itself(
    run: Run, start: Start, sim: Sim, qwen3: Any, policy: Policy
) -> None:
    class Half:
        async def score(self, trajectory: Any, group: Any) -> None:
            trajectory.reward = 0.5

    worker = await start(scorer=Half(), mask_offpolicy=True)
    user = [{"role": "user", "content": "What is 3+4?"}]
    record = encode_prompt(a_prompt(0, 2, prompt=user, sampling={"temperature": 0.0}))
    assert await run.queue.call(calls.enqueue("e:sums:1", 2, record)) == "new"
    groups = await enqueue(run, 1)
    await some_running([worker], N)
    await update(run, sim, worker.view.version + 1, "abort", [worker])
    await run.ready(1)
    entries = await wait_until(
        lambda: run.queue.read_eval("0", count=10, block_s=0.5), what="the evaluation"
    )
    assert [entry.group_index for entry in entries] == ["e:sums:1"]
    evaluated = await delivered(run, {"e:sums:1": 2})
    audit(policy, qwen3, [*evaluated, *await delivered(run, groups)])
    assert [(s.group_index, s.reward, s.spans) for s in evaluated] == [(1, 0.5, [])] * 2
    worker.metrics.flush()
    text = worker.metrics.render().decode()
    assert 'rollout_evaluation_samples_total{status="completed"} 2.0' in text
    assert 'rollout_samples_total{env="default",reason="stop",status="completed"} 4.0' in text


# --- words ---------------------------------------------------------------------------------------
class HeldEngine:
    """A pool whose calls end when the test says so, and an abort only when it is let through."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[None]] = []
        self.aborted, self.versions, self.members = 0, list[Any](), list[Any]()
        self.held: list[bool] = []

    async def generate(self, *_: Any, **__: Any) -> Any:
        self.calls.append(asyncio.get_running_loop().create_future())
        await self.calls[-1]
        return a_completion([], finish=Finish.ABORT)

    def end(self) -> None:
        for call in self.calls:
            if not call.done():
                call.set_result(None)

    def hold(self, is_held: bool) -> None:
        self.held.append(is_held)

    def set_version(self, version: int, labels: Any) -> None:
        self.versions.append((version, dict(labels)))

    def set_members(self, urls: Any) -> None:
        self.members.append(urls)

    def abort_all(self) -> int:
        self.aborted += 1
        return len(self.calls)

    def states(self) -> list[Any]:
        return []

    def healthy(self) -> bool:
        return True

    async def probe(self) -> bool:
        return True

    async def aclose(self) -> None:
        self.end()


async def test_an_abort_is_confirmed_once_no_call_is_in_flight_and_not_before(
    run: Run, start: Start
) -> None:
    engine = HeldEngine()
    worker = await start(engine=engine)
    await enqueue(run, 1)
    await some_running([worker], N)
    paused = await run.queue.call(calls.pause("abort"))
    await wait_until(lambda: engine.aborted > 0, what="the abort")
    worker.heart.nudge()  # a beat in between confirms no more than is true

    async def seen() -> int:
        (found,) = await run.queue.confirmations()
        return found.in_flight

    await wait_until(lambda: seen(), what="its calls in flight")
    (found,) = await run.queue.confirmations()
    assert (found.in_flight, found.control_seq < paused.control_seq) == (N, True)
    engine.end()
    await confirmed(run.queue, paused.control_seq, [worker.name], idle=True)


async def test_an_engine_that_stops_no_call_is_let_go_and_the_word_is_confirmed(
    run: Run, start: Start
) -> None:
    engine = HeldEngine()
    worker = await start(engine=engine)
    await enqueue(run, 1)
    await some_running([worker], N)
    paused = await run.queue.call(calls.pause("abort"))
    await confirmed(run.queue, paused.control_seq, [worker.name], idle=True)
    assert engine.aborted > 1, "it is asked again first"
    assert await wait_until(lambda: run.counter("given_back"), what="members") == N


@pytest.mark.parametrize("way", ["stream", "beat"])
async def test_words_arrive_by_the_stream_and_by_the_beat_where_that_stands_still(
    run: Run, start: Start, way: str
) -> None:
    engine = HeldEngine()
    await run.queue.call(calls.set_budget("lease_ms", 500))
    worker = await start(engine=engine, beat=way == "beat", follow=way == "stream")
    await run.queue.call(calls.set_engines(["http://one:1", "http://two:2"]))
    version = worker.view.version + 5
    await run.queue.call(calls.set_label(version, "v5"))
    set_to = await run.queue.call(calls.set_version(version))
    await wait_until(lambda: worker.view.control_seq >= set_to.control_seq, what="the words")
    await wait_until(lambda: engine.versions[-1] == (version, {"v5": version}))
    assert engine.members == [("http://one:1", "http://two:2")]
    await run.queue.call(calls.set_engines(None))
    await wait_until(lambda: engine.members[-1] is None, what="its own engines again")
    paused = await run.queue.call(calls.pause("keep"))
    await confirmed(run.queue, paused.control_seq, [worker.name], idle=True)
    assert (worker.gate.position, engine.held[-1]) == ("keep", True)
    resumed = await run.queue.call(calls.resume())
    await confirmed(run.queue, resumed.control_seq, [worker.name], idle=True)
    assert (worker.gate.position, engine.held[-1]) == ("open", False)


async def test_a_pause_that_begins_before_a_worker_does_holds_its_first_call(
    run: Run, start: Start, sim: Sim
) -> None:
    await run.queue.call(calls.pause("abort"))
    await enqueue(run, 1)
    worker = await start()
    assert worker.gate.position == "abort"
    await run.queue.call(calls.resume())
    await run.ready(1)
    assert await run.counter("given_back") == 0, "nothing was leased before"


async def test_a_function_of_ones_own_that_is_not_resumable_is_given_back_at_an_abort(
    run: Run, start: Start, sim: Sim
) -> None:
    gone = 0

    async def own(given: GenerateInput) -> GenerateOutput:
        nonlocal gone
        if gone < N:
            gone += 1
            prompt = RequestIds((given.prompt.json,), len(given.prompt.ids))
            how: dict[str, Any] = {"routing_key": "k", "version": 0}
            completion = await given.engine.generate(prompt, given.sampling, **how)
            assert completion.finish == "abort"
            await given.engine.generate(prompt, given.sampling, **how)
        return GenerateOutput(answer(given, reward=float(given.sample.member)))

    worker = await start(generate=own)
    await enqueue(run, 1)
    await some_running([worker], N)
    await update(run, sim, worker.view.version + 1, "abort", [worker])
    await run.ready(1)
    assert await run.counter("given_back") == N
    assert await run.counter("attempts") == 0
