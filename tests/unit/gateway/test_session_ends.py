"""Requests of one session at once, and its end: what is called and given out behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollstream.errors import ContractError, StopReason
from tests.generate_stage import Says
from tests.toy import A1, A2, HI, NO, P0
from tests.unit.gateway.play import Held, Play, refused, request_of, user, wait_until
from worker.gateway.book import Book
from worker.gateway.types import ErrorKind, Refusal
from worker.types import DivergencePolicy

FORK = {"on_divergence": DivergencePolicy.FORK}


@pytest.mark.parametrize("policy", list(DivergencePolicy))
async def test_107_four_requests_at_once_on_a_fresh_session_are_all_answered(
    policy: DivergencePolicy,
) -> None:
    steps = [Held(Says([40 + n, 2])) for n in range(4)]
    play = Play(*steps, rules={"on_divergence": policy})
    asked = [asyncio.create_task(play.ask([user(f"q{n}")])) for n in range(4)]
    await wait_until(lambda: play.engine.in_flight == 4)
    for step in steps:
        step.go.set()
    replies = await asyncio.gather(*asked)
    assert len({reply.id for reply in replies}) == 4
    samples = await play.end()
    stats = play.session.stats
    # What others committed meanwhile is no divergence: nobody could know of it.
    assert (stats["committed"], stats["raced"], stats["divergences"]) == (4, 3, 0)
    assert len(samples) == (4 if policy is DivergencePolicy.FORK else 1)
    assert stats["dropped_tokens"] == (0 if policy is DivergencePolicy.FORK else 6)


async def test_107_requests_beyond_those_that_may_be_under_way_are_told_to_wait() -> None:
    steps = [Held(Says(A1)), Held(Says(A2))]
    play = Play(*steps, rules={"max_in_flight": 2})
    asked = [asyncio.create_task(play.ask([user(f"q{n}")])) for n in range(2)]
    await wait_until(lambda: play.engine.in_flight == 2)
    assert play.book.num_in_flight == 2
    assert (await refused(play.ask(HI))).kind is ErrorKind.BUSY
    for step in steps:
        step.go.set()
    await asyncio.gather(*asked)
    assert play.book.num_in_flight == 0
    await play.end()


async def test_case_135_nothing_is_called_once_it_is_closed_and_the_sample_stays() -> None:
    play = Play(Says(A1), Held(Says(A2)), Says(A2))
    history: list[Any] = []
    await play.go_on(history, *HI)
    exchange = await play.begin([*history, *NO])
    await wait_until(lambda: play.engine.in_flight == 1)
    key = play.session.key
    await asyncio.gather(play.session.close(), play.session.close())
    assert (play.engine.cancelled, play.engine.in_flight) == (1, 0)
    assert (await refused(exchange.reply())).kind is ErrorKind.GONE
    with pytest.raises(Refusal) as gone:
        play.book.find(key)
    assert gone.value.kind is ErrorKind.GONE
    assert (await refused(play.ask([*history, *NO]))).kind is ErrorKind.GONE
    assert (await refused(play.session.count(request_of(HI)))).kind is ErrorKind.GONE
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A1
    assert await play.session.collect() is sample
    assert len(play.engine.asked) == 2
    assert play.book.num_open == play.book.num_in_flight == 0


async def test_case_135_closed_while_a_prompt_is_rendered_no_engine_is_called() -> None:
    play = Play(Says(A1))
    rendering, go = asyncio.Event(), asyncio.Event()
    first = play.rules.prompter.first

    async def slow(*args: Any) -> Any:
        rendering.set()
        await go.wait()
        return await first(*args)

    play.rules.prompter.first = slow  # type: ignore[method-assign]
    asked = asyncio.create_task(refused(play.begin(HI)))
    await rendering.wait()
    await play.session.close()
    go.set()
    assert (await asked).kind is ErrorKind.GONE
    assert play.engine.asked == []
    assert (await play.the_sample()).stop_reason is StopReason.NO_MODEL_CALL


async def test_case_135_closed_before_the_first_step_of_a_request_it_hears_so() -> None:
    play = Play(Says(A1))
    asked = asyncio.create_task(refused(play.begin(HI)))
    await asyncio.sleep(0)  # begun, and its own task has not run yet
    assert play.session.num_in_flight == 1
    await play.session.close()
    assert (await asked).kind is ErrorKind.GONE
    assert play.engine.asked == []


async def test_a_reply_that_was_there_when_it_closed_is_not_given_out() -> None:
    play = Play(Says(A1))
    exchange = await play.begin(HI)
    await exchange.reply()
    await play.session.close()
    with pytest.raises(Refusal) as gone:
        exchange.commit()
    assert gone.value.kind is ErrorKind.GONE
    sample = await play.the_sample()
    assert len(sample.tokens) == 0
    assert sample.metadata["agent"]["dropped_tokens"] == len(A1)


async def test_an_open_session_is_not_collected() -> None:
    with pytest.raises(ContractError):
        await Play().session.collect()


async def test_a_reply_is_not_committed_before_it_is_there() -> None:
    play = Play(Held(Says(A1)))
    exchange = await play.begin(HI)
    with pytest.raises(ContractError):
        exchange.commit()
    exchange.leave()
    await play.end()


async def test_100_sessions_have_keys_of_32_hex_and_unknown_ones_are_named() -> None:
    book = Book(max_tombstones=2)
    play = Play()
    sessions = [book.open(play.given, play.rules) for _ in range(4)]
    keys = [session.key for session in sessions]
    assert len(set(keys)) == 4
    assert all(len(key) == 32 and int(key, 16) >= 0 for key in keys)
    assert book.find(keys[0]) is sessions[0]
    with pytest.raises(Refusal, match="session not found: session_id=nonexistent") as unknown:
        book.find("nonexistent")
    assert unknown.value.kind is ErrorKind.NOT_FOUND
    for session in sessions[:3]:
        await session.close()
    assert book.num_open == 1
    kinds = []
    for key in keys[:3]:
        with pytest.raises(Refusal) as gone:
            book.find(key)
        kinds.append(gone.value.kind)
    # Of three closed ones two are remembered.
    assert kinds == [ErrorKind.NOT_FOUND, ErrorKind.GONE, ErrorKind.GONE]
