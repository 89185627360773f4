"""Weights that move under the pool: versions, pauses, and the abort of every call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollstream.errors import EngineFault, Withheld
from tests.engine_pool import a_pool, ask, chosen, key_of, one_token, wait_until
from tests.scripted_engine import ScriptedEngine, a_reply, hang, reset, scripted
from worker.engines.fleet.pool import EnginePool
from worker.engines.fleet.states import State
from worker.engines.sim.http import Exchange
from worker.members.gate import Gate, Passage
from worker.types import Completion, Finish


def states(pool: EnginePool) -> dict[str, str]:
    return {engine.url: engine.state.value for engine in pool.states()}


def state(pool: EnginePool) -> State:
    [engine] = pool.states()
    return engine.state


def spans(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": v, "start": s, "end": e} for v, s, e in spans]


@contextlib.asynccontextmanager
async def two(first: str, second: str, **changes: Any) -> AsyncIterator[Any]:
    """Yield two engines of these labels and a pool that has seen both; it looks only when told."""
    async with scripted() as a, scripted() as b:
        a.weight_version, b.weight_version = first, second
        async with a_pool(a.url, b.url, **({"probe_interval_s": 60.0} | changes)) as pool:
            assert await pool.probe()
            yield a, b, pool


# --- case 76 -------------------------------------------------------------------------------------
async def test_case_76_a_pause_longer_than_the_timeout_costs_nothing() -> None:
    """The case's figures to scale: held for 2.5 timeouts, 8 calls in flight and 8 waiting."""
    timeout_s, pause_s = 0.6, 1.5
    both = a_reply([59, 79075, 90], weight_versions=spans(("3", 0, 1), ("4", 1, 3)))
    after = a_reply([23], weight_version="4")
    async with scripted(*[both] * 8, after) as engine:
        engine.weight_version = "3"
        async with a_pool(engine.url, request_timeout_s=timeout_s, probe_interval_s=0.1) as pool:
            assert await pool.probe()
            pool.set_version(3, {})
            engine.pause()
            flying = [asyncio.create_task(ask(pool, f"f{i}")) for i in range(8)]
            await wait_until(lambda: len(engine.requests) == 8)
            await wait_until(lambda: state(pool) is State.PAUSED)
            waiting = [asyncio.create_task(ask(pool, f"w{i}")) for i in range(8)]
            await asyncio.sleep(pause_s)
            assert len(engine.requests) == 8  # nothing came on top, and nothing came again
            assert (pool.healthy(), pool.alive(), pool.counters.pauses) == (False, True, 1)
            assert pool.counters.engines[0].up
            engine.weight_version = "4"
            engine.go_on()
            pool.set_version(4, {})
            old, new = await asyncio.gather(*flying), await asyncio.gather(*waiting)
            counters = pool.counters
    assert [c.versions for c in old] == [[(3, 0, 1), (4, 1, 3)]] * 8
    assert [c.versions for c in new] == [[(4, 0, 1)]] * 8
    assert {c.dispatched_version for c in old} == {3}
    assert {c.dispatched_version for c in new} == {4}
    assert len(engine.requests) == len({body["rid"] for body in engine.requests}) == 16
    assert "/abort_request" not in engine.paths()
    assert (counters.retries, counters.retries_denied, counters.ejections) == (0, 0, 0)
    assert sum(counters.engines[0].requests.values()) == 16


async def test_pause_ends_and_the_timeout_is_whole_again_but_no_more() -> None:
    async with (
        scripted(hang) as engine,
        a_pool(engine.url, request_timeout_s=0.2, max_retries=0) as pool,
    ):
        assert await pool.probe()
        engine.pause()
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: state(pool) is State.PAUSED)
        await asyncio.sleep(0.4)
        assert not task.done()
        engine.go_on()  # it hangs from now on without a reason
        with pytest.raises(EngineFault) as caught:
            await task
    assert caught.value.detail == "timeout"
    assert engine.paths().count("/abort_request") >= 1


async def test_callers_deadline_holds_through_a_pause() -> None:
    async with scripted() as engine, a_pool(engine.url) as pool:
        assert await pool.probe()
        engine.pause()
        with pytest.raises(EngineFault) as caught:
            await ask(pool, deadline_s=0.2)
        assert caught.value.detail == "timeout"
        await wait_until(lambda: state(pool) is State.PAUSED)
        with pytest.raises(EngineFault) as caught:
            await ask(pool, deadline_s=0.05)
    assert caught.value.detail == "no_engine"
    assert f"{engine.url} is paused" in caught.value.message
    assert len(engine.requests) == 1


async def test_other_engines_take_the_calls_of_one_that_is_paused() -> None:
    async with two("1", "1") as (a, b, pool):
        key = key_of(pool, a.url)
        a.pause()
        pool.set_version(1, {"x": 1})
        await wait_until(lambda: states(pool)[a.url] == "paused")
        assert (await ask(pool, key)).engine == b.url
        a.go_on()
        await wait_until(lambda: states(pool)[a.url] == "up")  # nobody told the pool
        assert (await ask(pool, key)).engine == a.url


async def test_vllm_that_refuses_calls_during_a_pause_is_waited_for() -> None:
    async with scripted((503, b'{"error":"paused"}')) as engine:
        engine.paused = True
        async with a_pool(engine.url, max_retries=0, probe_interval_s=60.0) as pool:
            task = asyncio.create_task(ask(pool))
            await wait_until(lambda: state(pool) is State.PAUSED)
            engine.steps[:] = [a_reply([59])]
            engine.paused = False
            assert (await task).ids.tolist() == [59]
            counters = pool.counters.engines[0]
    assert (counters.requests["unavailable"], pool.counters.ejections) == (0, 0)
    assert len(engine.requests) == 2


async def test_call_that_waits_for_a_pause_can_be_cancelled_and_leaves_no_place_behind() -> None:
    async with scripted() as engine, a_pool(engine.url) as pool:
        assert await pool.probe()
        engine.pause()
        await wait_until(lambda: state(pool) is State.PAUSED)
        tasks = [asyncio.create_task(ask(pool)) for _ in range(3)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        tasks[2].cancel()
        engine.go_on()
        assert (await tasks[1]).ids.tolist()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [
            asyncio.CancelledError,
            Completion,
            asyncio.CancelledError,
        ]
        assert pool.counters.engines[0].in_flight == 0
    assert len(engine.requests) == 1


async def test_place_that_is_granted_as_its_call_is_cancelled_is_given_back() -> None:
    async with scripted(hang) as engine, a_pool(engine.url, max_in_flight=1) as pool:
        first = asyncio.create_task(ask(pool))
        await wait_until(lambda: len(engine.requests) == 1)
        waiting = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.01)
        [member] = pool._fleet.members
        pool._entrance.leave(member)  # grants the place, which nobody has taken up yet
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert member.counters.in_flight == 0
        member.counters.in_flight = 1  # the first call has it still
        engine.raw[0].answer(200, a_reply([7]))
        await first
        assert member.counters.in_flight == 0
    assert len(engine.requests) == 1


# --- versions ------------------------------------------------------------------------------------
async def test_engine_with_older_weights_takes_nothing_until_it_says_otherwise() -> None:
    async with two("4", "4") as (a, b, pool):
        key = key_of(pool, a.url)
        a.weight_version = "5"
        pool.set_version(5, {})
        assert not pool.healthy()
        await wait_until(lambda: states(pool) == {a.url: "up", b.url: "behind"})
        assert pool.counters.engines[1].lag == 1
        for i in range(20):
            assert (await ask(pool, f"x{i}", version=0)).dispatched_version == 5
        assert b.requests == []
        b.weight_version = "6"  # newer than the run is fine
        await wait_until(lambda: states(pool)[b.url] == "up")
        assert pool.counters.engines[1].lag == 0
        assert (await ask(pool, key)).engine == a.url


async def test_version_is_not_asked_for_where_that_is_switched_off() -> None:
    async with two("4", "4", require_version=False) as (a, _b, pool):
        pool.set_version(9, {})
        assert pool.healthy()
        await wait_until(lambda: "/ready" in a.paths())
        assert set(states(pool).values()) == {"up"}
        assert [engine.lag for engine in pool.counters.engines] == [5, 5]


async def test_engines_that_name_no_version_are_used() -> None:
    async with two("default", "default") as (_a, _b, pool):
        pool.set_version(7, {})
        assert set(states(pool).values()) == {"up"}
        assert (await ask(pool)).dispatched_version == 7


async def test_engine_that_began_anew_is_behind_where_another_names_the_version() -> None:
    async with two("7", "default") as (a, b, pool):
        pool.set_version(7, {})
        assert states(pool) == {a.url: "up", b.url: "behind"}
        assert pool.counters.engines[1].lag == 7
        a.steps[:] = [reset]
        a.info_status = 500
        with pytest.raises(EngineFault):
            await ask(pool, deadline_s=0.3)
        # It never takes calls with the weights of its start, not even as the last one there is.
        assert states(pool) == {a.url: "down", b.url: "behind"}
        assert b.requests == []
        pool.set_version(8, {})  # nor before anybody was seen to serve the next version
        assert states(pool) == {a.url: "down", b.url: "behind"}
        b.weight_version = "8"
        await wait_until(lambda: states(pool)[b.url] == "up")


async def test_engines_that_never_named_another_version_than_their_first_are_used() -> None:
    async with scripted(a_reply(weight_version="default")) as engine, a_pool(engine.url) as pool:
        assert [v for v, _, _ in (await ask(pool, version=0)).versions] == [0]
        pool.set_version(1, {})
        assert [v for v, _, _ in (await ask(pool)).versions] == [-1]


async def test_engine_that_is_slow_to_say_how_it_is_holds_up_nobody_for_ever() -> None:
    def slowly(exchange: Exchange) -> None:
        wait_s = 0.05 if exchange.path == "/model_info" else 0.0  # longer than between two looks
        asyncio.get_running_loop().call_later(wait_s, answer, exchange)

    async with scripted(a_reply()) as engine:
        answer, engine.handle = engine.handle, slowly  # type: ignore[method-assign]
        await engine.stop()
        await engine.start()
        async with a_pool(engine.url) as pool, asyncio.timeout(15):
            assert await pool.probe()
            looks = [
                asyncio.create_task(pool._fleet.looks.look(pool._fleet.members[0])) for _ in "abc"
            ]
            pool.set_version(0, {"a": 0})  # asks once more, behind that
            await asyncio.gather(*looks)


async def test_labels_of_the_trainer_mean_their_versions_at_once() -> None:
    async with two("step-a", "step-b") as (a, b, pool):
        pool.set_version(3, {"step-a": 3, "step-b": 2})
        assert states(pool) == {a.url: "up", b.url: "behind"}
        pool.set_version(3, {"step-a": 3, "step-b": 4})
        assert states(pool) == {a.url: "up", b.url: "up"}


async def test_reply_of_a_newer_version_is_as_good_as_a_look() -> None:
    async with two("4", "4") as (a, b, pool):
        b.steps[:] = [hang]
        key = key_of(pool, b.url)
        task = asyncio.create_task(ask(pool, key))
        await wait_until(lambda: len(b.requests) == 1)
        b.info_status = 404  # no look gets an answer from here on
        pool.set_version(5, {})
        await wait_until(lambda: states(pool)[a.url] == "behind")
        b.raw[0].answer(200, a_reply([1, 2], weight_versions=spans(("4", 0, 1), ("5", 1, 2))))
        await task
        assert states(pool)[b.url] == "up"


async def test_old_reply_lowers_nothing_but_an_engine_that_fell_back_is_found_out() -> None:
    async with two("4", "4") as (a, _b, pool):
        key = key_of(pool, a.url)
        pool.set_version(4, {})
        a.steps[:] = [hang]
        task = asyncio.create_task(ask(pool, key))
        await wait_until(lambda: len(a.requests) == 1)
        a.weight_version = "5"
        pool.set_version(5, {})
        await wait_until(lambda: states(pool)[a.url] == "up")
        a.raw[0].answer(200, a_reply([1], weight_version="4"))
        await task
        assert states(pool)[a.url] == "up"  # it ended before the update did
        a.steps[:] = [a_reply([1], weight_version="2")]
        a.weight_version = "2"
        await ask(pool, key)
        await wait_until(lambda: states(pool)[a.url] == "behind")


async def test_reply_of_an_engine_that_began_anew_is_refused_before_a_look_finds_out() -> None:
    named = a_reply(weight_version="3")
    async with two("3", "3") as (a, b, pool):
        pool.set_version(3, {})
        a.steps[:] = [named, a_reply(weight_version="default")]
        b.steps[:] = [named]
        key = key_of(pool, a.url)
        assert (await ask(pool, key)).engine == a.url
        a.weight_version = "default"
        completion = await ask(pool, key)
        assert (completion.engine, completion.versions) == (b.url, [(3, 0, 5)])
        assert len(a.requests) == 2  # it was tried there, and what came was not believed
        assert states(pool) == {a.url: "behind", b.url: "up"}


async def test_reply_without_a_name_is_taken_where_replies_never_had_one() -> None:
    async with two("3", "3") as (a, _, pool):
        pool.set_version(3, {})
        a.steps[:] = [a_reply(drop=["weight_version"])] * 2
        key = key_of(pool, a.url)
        assert [(await ask(pool, key)).engine for _ in range(2)] == [a.url] * 2
        assert states(pool)[a.url] == "up"


async def test_try_is_sent_under_the_version_and_salt_of_its_time() -> None:
    async with (
        scripted((500, b""), a_reply([59], weight_version="8")) as engine,
        a_pool(engine.url, backoff_s=0.2, require_version=False) as pool,
    ):
        pool.set_version(7, {})
        task = asyncio.create_task(ask(pool, version=6))
        await wait_until(lambda: len(engine.requests) == 1)
        pool.set_version(8, {})
        completion = await task
        other = await ask(pool, version=9, salt=3)
    assert [body["extra_key"] for body in engine.requests] == ["v7", "v8", "v3"]
    assert (completion.dispatched_version, other.dispatched_version) == (8, 9)


# --- abort of all --------------------------------------------------------------------------------
def partial(engine: ScriptedEngine, ids: list[int]) -> Callable[[str], None]:
    """Return what answers an aborted request with these tokens."""

    def answers(rid: str) -> None:
        for body, exchange in zip(engine.requests, engine.raw, strict=True):
            if body["rid"] == rid:
                exchange.answer(200, a_reply(ids, finish={"type": "abort"}))

    return answers


async def test_abort_of_all_brings_every_call_back_with_its_tokens() -> None:
    async with scripted(hang) as engine, a_pool(engine.url) as pool:
        engine.aborted = partial(engine, [1, 2])
        tasks = [asyncio.create_task(ask(pool, f"g{i}")) for i in range(40)]
        await wait_until(lambda: len(engine.requests) == 40)
        assert pool.abort_all() == 40
        completions = await asyncio.gather(*tasks)
        assert {c.finish for c in completions} == {Finish.ABORT}
        assert {tuple(c.ids.tolist()) for c in completions} == {(1, 2)}
        assert (pool.counters.aborted, pool.counters.retries) == (40, 0)
        assert pool.abort_all() == 0
        engine.steps[:] = [a_reply([59])]
        assert (await ask(pool)).finish is Finish.STOP  # calls after it are calls as ever
    assert len(engine.requests) == 41


async def test_abort_of_all_lets_whole_replies_be_whole() -> None:
    async with scripted(hang) as engine, a_pool(engine.url) as pool:
        engine.aborted = lambda rid: engine.raw[0].answer(200, a_reply([7]))
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: len(engine.requests) == 1)
        pool.abort_all()
        assert (await task).finish is Finish.STOP


async def test_abort_of_all_withholds_what_waits_in_the_pool() -> None:
    async with (
        scripted((500, b"")) as engine,
        a_pool(engine.url, backoff_s=60.0, backoff_max_s=60.0) as pool,
    ):
        resting = asyncio.create_task(ask(pool))
        await wait_until(lambda: pool.counters.retries == 1)
        engine.pause()
        await wait_until(lambda: state(pool) is State.PAUSED)
        waiting = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.01)
        assert pool.abort_all() == 2
        for task in (resting, waiting):
            with pytest.raises(Withheld):
                await task
    assert len(engine.requests) == 1


async def test_abort_of_all_is_bounded_where_an_engine_does_not_answer_it() -> None:
    async with scripted(hang) as engine, a_pool(engine.url, abort_wait_s=0.2) as pool:
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: len(engine.requests) == 1)
        pool.abort_all()
        with pytest.raises(Withheld, match="did not answer an abort"):
            await task
        assert pool.counters.engines[0].in_flight == 0
        assert pool.counters.ejections == 0


@pytest.mark.parametrize("retries", [0, 3])
async def test_call_that_breaks_while_all_are_aborted_is_withheld(retries: int) -> None:
    async with scripted(hang) as engine, a_pool(engine.url, max_retries=retries) as pool:

        def breaks(rid: str) -> None:
            engine.raw[0].answer(500, b"")

        engine.aborted = breaks
        task = asyncio.create_task(ask(pool))
        await wait_until(lambda: len(engine.requests) == 1)
        pool.abort_all()
        with pytest.raises(Withheld):
            await task
    assert len(engine.requests) == 1


async def test_calls_of_an_engine_that_is_leaving_are_aborted_as_well() -> None:
    held: list[Exchange] = []
    async with scripted(held.append) as a, scripted() as b, a_pool(a.url, b.url) as pool:
        assert await pool.probe()
        task = asyncio.create_task(ask(pool, key_of(pool, a.url)))
        await wait_until(lambda: len(held) == 1)
        a.aborted = partial(a, [1])
        pool.set_members([b.url])
        assert chosen(pool, "anything") == b.url
        assert pool.abort_all() == 1
        assert (await task).finish is Finish.ABORT


# --- questions about log-probs -------------------------------------------------------------------
@pytest.mark.parametrize("answers", [True, False])
async def test_questions_in_flight_end_with_an_abort_of_all_and_are_asked_anew_behind_it(
    answers: bool,
) -> None:
    gate = Gate()
    async with (
        scripted(hang) as engine,
        a_pool(engine.url, check_logprobs=True, abort_wait_s=1.0 if answers else 0.1) as pool,
    ):
        pool.ask_within(lambda: Passage(gate, None))
        engine.aborted = partial(engine, []) if answers else None
        first = asyncio.create_task(pool.probe())
        await wait_until(lambda: len(engine.requests) == 24)
        assert gate.in_flight == 1
        pool.hold(True)
        assert pool.abort_all() == 24
        await first
        assert gate.in_flight == 0
        rids = {body["rid"] for body in engine.requests}
        assert {rid for path, rid in engine.log if path == "/abort_request"} == rids
        assert (state(pool), pool.healthy()) == (State.PAUSED, False)
        looks = len(engine.paths()) + 6
        await wait_until(lambda: len(engine.paths()) > looks)
        assert len(engine.requests) == 24

        engine.steps[:] = [one_token("raw", a_reply())]
        pool.hold(False)
        pool.set_version(0, {})
        await wait_until(pool.healthy)
        assert (await ask(pool)).logprob_mode == "raw"


async def test_no_question_is_asked_where_no_call_may_be_made() -> None:
    @contextlib.asynccontextmanager
    async def shut() -> AsyncIterator[None]:
        raise Withheld
        yield

    async with (
        scripted(one_token("raw", a_reply())) as engine,
        a_pool(engine.url, check_logprobs=True) as pool,
    ):
        pool.ask_within(shut)
        assert await pool.probe()
        assert (state(pool), engine.requests) == (State.PAUSED, [])
        pool.ask_within(contextlib.nullcontext)
        await wait_until(pool.healthy)
