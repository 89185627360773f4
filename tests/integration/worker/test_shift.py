"""The shift over a real server: slots, faults, lost leases, give-backs, lost answers.

Conformance 139, 140, 142, 143 in our terms: a slot is one member's, whatever its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import exceptions as redis_errors
from structlog.testing import capture_logs

import worker.members.reports
import worker.members.shift
from rollstream.errors import EngineFault, MemberReason, Report
from rollstream.queue import calls
from rollstream.wire import decode_header
from tests.unit.worker.works import answer, plain
from worker.members.work import Cause
from worker.types import GenerateInput, GenerateOutput

from .parts import Gate, Run, a_run, wait_until

pytestmark = pytest.mark.asyncio


@pytest.fixture
async def run(valkey_url: str, run_name: str) -> AsyncIterator[Run]:
    async with a_run(valkey_url, run_name) as opened:
        yield opened


async def settled() -> None:
    """Let everything that could happen at once happen."""
    for _ in range(20):
        await asyncio.sleep(0.01)


# --- slots ---------------------------------------------------------------------------------------
async def test_shift_leases_as_many_members_as_it_has_slots_in_order_and_none_more(
    run: Run,
) -> None:
    gate = Gate()
    for g in (1, 2, 3):
        await run.enqueue(g, 4)
    run.worker(generate=gate, slots=8).start()

    await wait_until(lambda: len(gate.started) == 8)
    await settled()

    assert sorted(gate.started) == [(g, i) for g in (1, 2) for i in range(4)]


async def test_shift_fills_the_slot_of_any_ended_member_while_every_group_is_still_open(
    run: Run,
) -> None:
    gate = Gate()
    for g in (1, 2, 3, 4):
        await run.enqueue(g, 4)
    run.worker(generate=gate, slots=8).start()
    await wait_until(lambda: len(gate.started) == 8)

    gate.end(1, 0, 1, 2)
    gate.end(2, 3)
    await wait_until(lambda: len(gate.started) == 12)
    await settled()

    assert sorted(gate.started[8:]) == [(3, i) for i in range(4)]
    assert [await run.state_of(g, 4) for g in (1, 2, 3, 4)] == ["open"] * 4


async def test_shift_starts_one_member_for_one_ended_member(run: Run) -> None:
    gate = Gate()
    for g in (1, 2, 3):
        await run.enqueue(g, 4)
    run.worker(generate=gate, slots=8).start()
    await wait_until(lambda: len(gate.started) == 8)

    gate.end(1, 0, 1, 2)
    await wait_until(lambda: len(gate.started) == 11)
    await settled()

    assert {g for g, _ in gate.started[8:]} == {3}
    assert len(gate.started) == 11


async def test_shift_frees_the_slots_of_whole_groups_only_where_that_is_asked_for(
    run: Run,
) -> None:
    gate = Gate()
    for g in (1, 2, 3):
        await run.enqueue(g, 4)
    parts = run.worker(generate=gate, slots=8, whole_groups=True)
    parts.start()
    await wait_until(lambda: len(gate.started) == 8)

    gate.end(1, 0, 1, 2)
    gate.end(2, 3)
    await wait_until(lambda: len(parts.shift.held()) == 4, what="four reported members")
    await settled()
    assert (len(gate.started), parts.shift.num_busy) == (8, 8)

    gate.end(1, 3)
    await wait_until(lambda: len(gate.started) == 12)
    await settled()
    assert sorted(gate.started[8:]) == [(3, i) for i in range(4)]
    assert parts.shift.num_busy == 8
    gate.end(2, 0, 1, 2)
    gate.end(3, 0, 1, 2, 3)
    await run.ready(3)
    await wait_until(lambda: parts.shift.num_busy == 0)


async def test_one_member_that_raises_changes_no_sibling_and_all_of_them_land(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 4)
    run.worker(generate=gate).start(aggregate=False)
    await wait_until(lambda: len(gate.started) == 4)

    gate.end(1, 1, error=KeyError("boom"))
    gate.end(1, 0, 2, 3)

    async def full() -> bool:
        return await run.state_of(1, 4) == "full"

    await wait_until(full)
    group = await run.group(1, 4)
    assert all(header is not None for header in group.headers)
    assert await run.counter("completed") == 4


async def test_a_result_list_goes_through_the_worker_like_a_sample(run: Run) -> None:
    async def tree(given: GenerateInput) -> GenerateOutput:
        leaves = [answer(given, reward=float(given.sample.member)), copy.copy(given.sample)]
        return GenerateOutput(leaves if given.sample.member == 0 else leaves[0])

    await run.enqueue(1, 2)
    run.worker(generate=tree, filters=("no_aborted", "reward_nonzero_std")).start()

    await run.ready(1)
    headers = [decode_header(raw) for raw in (await run.group(1, 2)).headers if raw]
    assert [(h.is_list, len(h.leaves)) for h in headers] == [(True, 2), (False, 1)]
    await run.audit()


async def test_members_that_end_together_travel_in_one_call(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    await run.enqueue(1, 8)
    parts = run.worker(generate=gate)
    parts.start(aggregate=False, beat=False)
    await wait_until(lambda: len(gate.started) == 8)
    sent: list[list[str]] = []
    call_many = run.queue.call_many

    async def counted(asked: Any) -> Any:
        sent.append([call.script for call in asked])
        return await call_many(asked)

    monkeypatch.setattr(run.queue, "call_many", counted)
    gate.end(1, *range(8))
    await wait_until(lambda: parts.shift.num_busy == 0)

    assert [scripts for scripts in sent if "complete" in scripts] == [["complete"]]


# --- faults --------------------------------------------------------------------------------------
async def test_a_retryable_fault_charges_one_attempt_and_runs_the_member_again(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 2)
    run.worker(generate=gate).start()
    await wait_until(lambda: len(gate.started) == 2)

    gate.end(1, 0, error=EngineFault("503", retryable=True, detail="unavailable"))
    await wait_until(lambda: gate.started.count((1, 0)) == 2)
    gate.end(1, 0, 1)

    await run.ready(1)
    assert await run.counter("attempts") == 1


async def test_engines_that_are_behind_for_a_moment_after_an_update_are_not_missed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    parts = run.worker(generate=gate)
    looks = iter([False, False])
    monkeypatch.setattr(parts.engines, "healthy", lambda: next(looks, True))
    with capture_logs() as said:
        parts.start()
        await run.enqueue(1, 2)
        await wait_until(lambda: len(gate.started) == 2)
    assert next(looks, None) is None
    assert [line for line in said if line["event"] == "no_engine"] == []
    gate.end(1, 0, 1)
    await run.ready(1)


async def test_without_a_healthy_engine_nothing_is_leased_and_nothing_is_charged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.members.reports, "NO_ENGINE_DELAY_S", 0.0)
    gate = Gate()
    await run.enqueue(1, 2)
    await run.enqueue(2, 2)
    parts = run.worker(generate=gate, slots=2)
    parts.start()
    await wait_until(lambda: len(gate.started) == 2)

    parts.engines.up = False
    gate.end(1, 0, 1, error=EngineFault("no engine", retryable=True, detail="no_engine"))
    await wait_until(lambda: parts.shift.num_busy == 0)
    await settled()
    assert len(gate.started) == 2
    assert await run.counter("attempts") == 0
    assert await run.counter("given_back") == 2

    parts.engines.up = True
    await wait_until(lambda: len(gate.started) == 4)
    gate.end(1, 0, 1)
    gate.end(2, 0, 1)
    await run.ready(2)


def refuses(*groups: int) -> Any:
    async def generate(given: GenerateInput) -> GenerateOutput:
        if not groups or given.sample.group_index in groups:
            raise EngineFault("400: tool choice not enabled", detail="refused")
        return await plain(given)

    return generate


async def test_a_prompt_that_the_engine_refuses_is_dropped_and_the_others_go_on(run: Run) -> None:
    for g in range(9):
        await run.enqueue(g, 2)
    parts = run.worker(generate=refuses(7), fail_after_groups=2)
    parts.start()

    await run.ready(8)
    assert await run.drops() == {"short_group": 1}
    (drop,) = await run.queue.past()
    assert "engine_error" in str(drop)
    info = await run.queue.info()
    assert info is not None
    assert info.state == "running"


async def test_a_run_whose_every_prompt_is_refused_ends_with_the_engines_own_message(
    run: Run,
) -> None:
    for g in range(30):
        await run.enqueue(g, 2)
    parts = run.worker(generate=refuses(), fail_after_groups=3, slots=2)
    parts.start()
    assert parts.working is not None

    assert await asyncio.wait_for(parts.working, 10) == "failed"
    info = await run.queue.info()
    assert info is not None
    assert info.error.startswith("3 groups in a row were refused")
    assert "tool choice not enabled" in info.error


async def test_one_success_begins_the_count_of_refused_groups_anew(run: Run) -> None:
    for g in range(8):
        await run.enqueue(g, 1)
    parts = run.worker(generate=refuses(0, 2, 4, 6), fail_after_groups=2, slots=1)
    parts.start()

    await run.ready(4)
    info = await run.queue.info()
    assert info is not None
    assert info.state == "running"


async def test_a_group_with_a_member_that_fails_for_good_never_hangs(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 8)
    await run.enqueue(2, 8)
    run.worker(generate=gate, slots=16, min_samples=7).start()
    await wait_until(lambda: len(gate.started) == 16)

    gate.end(1, 5, error=EngineFault("gone", detail="refused"))
    gate.end(1, 0, 1, 2, 3, 4, 6, 7)
    gate.end(2, 5, 6, error=EngineFault("gone", detail="refused"))
    gate.end(2, 0, 1, 2, 3, 4, 7)

    await run.ready(1)
    await wait_until(run.drops)
    assert await run.drops() == {"short_group": 1}


async def test_a_result_over_the_limit_fails_its_member_and_names_the_group_after_it(
    valkey_url: str, run_name: str
) -> None:
    async with a_run(valkey_url, run_name, max_body=300) as run:
        await run.enqueue(1, 2)
        parts = run.worker()
        parts.view.max_body_bytes = 1 << 30  # the worker lets it pass: the queue is the judge
        parts.start(beat=False)

        await wait_until(run.drops)
        assert await run.drops() == {"too_large": 1}
        await run.audit()


# --- time ----------------------------------------------------------------------------------------
async def test_an_attempt_is_cancelled_at_its_deadline_and_its_group_named_after_it(
    run: Run,
) -> None:
    gate = Gate()
    await run.enqueue(1, 2)
    run.worker(generate=gate, sample_timeout_s=0.2).start()

    await wait_until(run.drops)
    assert await run.drops() == {"deadline": 1}


async def test_an_attempt_that_ignores_its_cancellation_loses_its_slot(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.members.shift, "STRAY_AFTER_S", 0.1)
    release = asyncio.Event()

    async def stubborn(given: GenerateInput) -> GenerateOutput:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        raise AssertionError

    await run.enqueue(1, 1)
    parts = run.worker(generate=stubborn, slots=1, sample_timeout_s=0.1)
    parts.start()

    await wait_until(run.drops)
    assert parts.shift.num_busy == 0
    release.set()
    await settled()
    await run.audit()


async def test_a_function_that_cancels_its_own_task_charges_attempts_and_no_crash(
    run: Run,
) -> None:
    async def cancels_itself(given: GenerateInput) -> GenerateOutput:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        raise AssertionError

    await run.enqueue(1, 1)
    run.worker(generate=cancels_itself).start()

    await wait_until(run.drops)
    counters = await run.queue.counters()
    assert counters["member_failed:agent_error"] == 1
    assert "crashes" not in counters


async def test_a_result_that_comes_after_the_cancellation_at_its_deadline_does_not_count(
    run: Run,
) -> None:
    async def swallows(given: GenerateInput) -> GenerateOutput:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return await plain(given)

    await run.enqueue(1, 1)
    run.worker(generate=swallows, sample_timeout_s=0.1).start()

    await wait_until(run.drops)
    assert await run.drops() == {"deadline": 1}
    assert await run.counter("completed") == 0


# --- leases --------------------------------------------------------------------------------------
async def take_away(run: Run) -> int:
    """Take every lease away behind the worker's back, as another worker's sweep would."""
    return int(await run.queue.client.delete(f"{run.queue.prefix}l"))


async def test_a_lost_lease_cancels_its_attempt_and_frees_the_slot_without_a_report(
    run: Run,
) -> None:
    gate = Gate()
    await run.enqueue(1, 2)
    parts = run.worker(generate=gate)
    parts.start()
    await wait_until(lambda: len(gate.started) == 2)

    await take_away(run)
    parts.heart.nudge()
    await wait_until(lambda: parts.shift.num_busy == 0)

    assert await run.counter("given_back") == 0
    assert await run.counter("completed") == 0


async def test_a_result_that_comes_too_late_is_fenced_and_counted(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 2)
    parts = run.worker(generate=gate)
    parts.start(beat=False)
    await wait_until(lambda: len(gate.started) == 2)

    await take_away(run)
    gate.end(1, 0)
    await wait_until(lambda: parts.shift.num_busy == 1)

    assert await run.counter("fenced") == 1
    assert parts.metrics.fenced_results_total._value.get() == 1
    assert await run.counter("completed") == 0


async def test_drain_gives_back_what_does_not_finish_uncharged(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 4)
    parts = run.worker(generate=gate)
    parts.start()
    await wait_until(lambda: len(gate.started) == 4)

    draining = asyncio.create_task(parts.shift.drain(finish_s=0.5, report_s=5))
    gate.end(1, 2)
    assert await draining == 0

    assert await run.counter("completed") == 1
    assert await run.counter("given_back") == 3
    assert await run.counter("attempts") == 0
    assert (await run.queue.depths())["q"] == 3
    await run.audit()


async def test_a_second_signal_gives_back_at_once(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 2)
    parts = run.worker(generate=gate)
    parts.start()
    await wait_until(lambda: len(gate.started) == 2)
    now = asyncio.Event()
    now.set()

    assert await asyncio.wait_for(parts.shift.drain(60, 5, now=now), 5) == 0
    assert await run.counter("given_back") == 2


async def test_a_lease_whose_answer_was_lost_is_answered_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    await run.enqueue(1, 4)
    call = run.queue.call
    lost: list[str] = []

    async def losing(asked: Any) -> Any:
        answer = await call(asked)
        if asked.script == "lease" and len(lost) < 2:
            lost.append(asked.script)
            raise redis_errors.ConnectionError("the answer was lost")
        return answer

    monkeypatch.setattr(run.queue, "call", losing)
    run.worker(generate=gate).start()

    await wait_until(lambda: len(gate.started) == 4)
    await settled()
    assert sorted(gate.started) == [(1, i) for i in range(4)]
    assert (await run.queue.depths())["l"] == 4


async def test_a_result_whose_answer_was_lost_lands_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.enqueue(1, 4)
    call_many = run.queue.call_many
    lost: list[str] = []

    async def losing(asked: Any) -> Any:
        answers = await call_many(asked)
        if asked[0].script == "complete" and not lost:
            lost.append("complete")
            raise redis_errors.TimeoutError("the answer was lost")
        return answers

    monkeypatch.setattr(run.queue, "call_many", losing)
    parts = run.worker()
    parts.start()

    await run.ready(1)
    assert lost
    assert await run.counter("completed") == 4
    assert await run.counter("fenced") == 0
    await wait_until(lambda: parts.shift.num_busy == 0)
    assert parts.metrics.duplicate_results_total._value.get() > 0


async def test_a_result_that_is_not_answered_yet_is_beaten_for_until_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    await run.enqueue(1, 2)
    parts = run.worker(generate=gate)
    call_many = run.queue.call_many
    away = True

    async def losing(asked: Any) -> Any:
        if away and asked[-1].script == "complete":
            raise redis_errors.ConnectionError("away")
        return await call_many(asked)

    monkeypatch.setattr(run.queue, "call_many", losing)
    parts.start(beat=False)
    await wait_until(lambda: len(gate.started) == 2)
    held = sorted(parts.shift.held())
    gate.end(1, 0, 1)
    await wait_until(lambda: parts.shift.submitter.num_unanswered == 2 and not parts.link.up)
    await wait_until(lambda: sorted(parts.shift.held()) == held)

    away = False
    await run.ready(1)
    assert parts.shift.held() == []


async def test_a_call_of_results_carries_at_most_one_megabyte(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def large(given: GenerateInput) -> GenerateOutput:
        return GenerateOutput(answer(given, ids=(7,) * 50_000))

    sizes: list[int] = []
    call_many = run.queue.call_many

    async def weighed(asked: Any) -> Any:
        sizes.extend(
            sum(len(arg) for arg in call.args if isinstance(arg, bytes))
            for call in asked
            if call.script == "complete"
        )
        return await call_many(asked)

    monkeypatch.setattr(run.queue, "call_many", weighed)
    await run.enqueue(1, 8)
    run.worker(generate=large).start()

    await run.ready(1)
    assert len(sizes) == 4  # two of 450 kB each
    assert max(sizes) <= 1 << 20


async def test_a_result_that_redis_refuses_fails_its_member_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_many = run.queue.call_many

    async def refusing(asked: Any) -> Any:
        for call in asked:
            if call.script == "complete" and 2 in call.args[1::6]:
                raise redis_errors.ResponseError("ERR Protocol error: invalid bulk length")
        return await call_many(asked)

    monkeypatch.setattr(run.queue, "call_many", refusing)
    await run.enqueue(1, 4)
    parts = run.worker(min_samples=3)
    parts.start()

    await run.ready(1)
    group = await run.group(1, 4)
    assert [header is not None for header in group.headers] == [True, True, False, True]
    assert group.errors[2] is not None
    assert "invalid bulk length" in group.errors[2][1]
    assert parts.shift.num_busy == 0


async def test_one_beat_sweeps_page_after_page_while_a_page_is_full(run: Run) -> None:
    await run.enqueue(1, 150)
    leased = await run.queue.call(calls.lease("w" * 12, 1, 256))
    members = [member.lease for group in leased.groups for member in group.members]
    late = [
        calls.fail(lease, Report.RETRY, MemberReason.ENGINE_ERROR, "503", delay_s=0.001)
        for lease in members
    ]
    await run.queue.call_many(late)
    assert (await run.queue.depths())["d"] == 150
    parts = run.worker()
    await asyncio.sleep(0.01)

    await parts.heart.beat()

    depths = await run.queue.depths()
    assert (depths["d"], depths["q"]) == (0, 150)


# --- ends of a run -------------------------------------------------------------------------------
async def test_an_aborted_run_stops_every_attempt_and_ends_the_shift(run: Run) -> None:
    gate = Gate()
    for g in (1, 2):
        await run.enqueue(g, 2)
    parts = run.worker(generate=gate, slots=3)
    parts.start()
    await wait_until(lambda: len(gate.started) == 3)

    await run.queue.call(calls.abort_run("enough"))
    parts.heart.nudge()
    assert parts.working is not None

    assert await asyncio.wait_for(parts.working, 10) == "ended"
    assert await run.drops() == {"run_aborted": 2}
    await run.audit()


async def test_an_emptied_redis_stops_attempts_and_a_new_run_is_worked_on(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 2)
    parts = run.worker(generate=gate)
    parts.start()
    await wait_until(lambda: len(gate.started) == 2)

    for key in await run.queue.client.keys(f"{run.queue.prefix}*"):
        await run.queue.client.delete(key)
    parts.heart.nudge()
    await wait_until(lambda: parts.shift.num_busy == 0)
    await run.open(lease_ms=6_000)
    await run.enqueue(5, 2)

    await wait_until(lambda: (5, 1) in gate.started)
    parts.heart.nudge()
    await wait_until(lambda: parts.view.lease_s == 6.0)
    gate.end(5, 0, 1)
    await run.ready(1)


async def test_cancelled_work_is_never_cancelled_for_a_second_cause(run: Run) -> None:
    gate = Gate()
    await run.enqueue(1, 1)
    parts = run.worker(generate=gate)
    parts.start()
    await wait_until(lambda: gate.started)

    parts.shift.cancel_all(Cause.SHUTDOWN)
    parts.shift.cancel_all(Cause.LOST)
    await wait_until(lambda: parts.shift.num_busy == 0)

    assert await run.counter("given_back") == 1
