"""What a session refuses because something is used up, and what a cut reply means."""

from __future__ import annotations

from typing import Any

from rollstream.errors import EngineFault, Status, StopReason
from tests.generate_stage import Says
from tests.toy import A1, A2, HI, NO, OK, P0
from tests.unit.gateway.play import Play, refused, system, user
from worker.gateway.types import ErrorKind


async def test_110_a_reply_that_was_cut_is_not_gone_on_from() -> None:
    play = Play(Says([31, 32], "length"), Says(A2))
    history: list[Any] = []
    reply = await play.go_on(history, *HI, max_tokens=2)
    assert (reply.finish, play.engine.asked[0].max_new_tokens) == ("length", 2)
    assert play.session.ended_by is StopReason.TURN_LENGTH
    wrong = await refused(play.ask([*history, *NO]))
    assert wrong.kind is ErrorKind.CONFLICT
    assert play.session.ended_by is StopReason.TURN_LENGTH
    await play.ask(HI)  # asking again in its place is fine
    assert play.session.ended_by is None
    assert (await play.the_sample()).stop_reason is StopReason.STOP


async def test_case_129_a_session_that_ends_cut_says_so() -> None:
    play = Play(Says([31, 32], "length"))
    history: list[Any] = []
    await play.go_on(history, *HI)
    assert (await refused(play.ask([*history, *NO]))).kind is ErrorKind.CONFLICT
    sample = await play.the_sample()
    # Below its own cap: the engine's context was the limit.
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT_LENGTH)
    assert sample.tokens.tolist() == [*P0, 31, 32]


async def test_case_41_a_cut_that_the_finish_hides_is_a_cut() -> None:
    play = Play(Says([6, 31, 32], "stop"))
    reply = await play.ask(HI, max_tokens=3)
    assert reply.finish == "length"
    assert not reply.message.get("tool_calls")
    assert (await play.the_sample()).stop_reason is StopReason.TURN_LENGTH


async def test_a_client_lowers_the_cap_and_never_raises_it() -> None:
    play = Play(default=lambda asked: Says(A1))
    for asked_for, got in ((None, 64), (5, 5), (64, 64), (4096, 64)):
        await play.ask(HI, max_tokens=asked_for)
        assert play.engine.asked[-1].max_new_tokens == got
    await play.end()


async def test_a_prompt_without_room_is_refused_in_words_that_sdks_know() -> None:
    play = Play(Says(A1), limits={"max_context": 20})
    wrong = await refused(play.ask([user("a prompt of more than twenty ids")]))
    assert wrong.kind is ErrorKind.TOO_LONG
    assert "maximum context length is 20 tokens" in wrong.message
    assert "prompt is too long" in wrong.message
    assert play.session.ended_by is StopReason.PROMPT_TOO_LONG
    await play.ask(HI)
    assert play.session.ended_by is None
    assert play.engine.asked[0].max_new_tokens == 10
    await play.end()


async def test_a_later_prompt_without_room_is_the_context_length() -> None:
    play = Play(Says(A1), limits={"max_context": 20})
    history: list[Any] = []
    await play.go_on(history, *HI)
    assert (await refused(play.ask([*history, *OK]))).kind is ErrorKind.TOO_LONG
    assert play.session.ended_by is StopReason.CONTEXT_LENGTH
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A1
    assert sample.stop_reason is StopReason.STOP


async def test_the_response_budget_counts_everything_behind_the_first_prompt() -> None:
    play = Play(Says(A1), Says([30, 30], "length"), limits={"max_response": 16})
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *OK)
    assert [asked.max_new_tokens for asked in play.engine.asked] == [16, 2]
    assert (await play.the_sample()).stop_reason is StopReason.RESPONSE_LENGTH


async def test_an_engine_whose_context_is_smaller_is_the_same_refusal() -> None:
    play = Play(EngineFault("too long", detail="context_overflow"))
    assert (await refused(play.ask(HI))).kind is ErrorKind.TOO_LONG
    assert play.session.ended_by is StopReason.PROMPT_TOO_LONG
    assert play.session.fault is None
    await play.end()


async def test_the_last_permitted_turn_is_the_last() -> None:
    play = Play(Says(A1), Says(A2), Says(A2), rules={"max_turns": 2})
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    assert (await refused(play.ask([*history, *NO]))).kind is ErrorKind.INVALID
    assert play.session.ended_by is StopReason.MAX_TURNS
    await play.ask(history[:3])  # its last turn again
    assert len((await play.the_sample()).calls) == 2


async def test_a_session_holds_so_many_tokens_in_all_its_lines() -> None:
    play = Play(Says(A1), Says(A1), Says(A1), rules={"max_tokens": 2 * (len(P0) + len(A1))})
    await play.ask(HI)
    await play.ask([system("be kind"), *HI])  # a root of its own
    refusal = await refused(play.ask([system("be wild"), *HI]))
    assert refusal.kind is ErrorKind.INVALID
    assert "gateway.max_session_tokens" in refusal.message
    assert play.session.ended_by is StopReason.RESPONSE_LENGTH
    assert len(play.engine.asked) == 2
    await play.end()


async def test_a_prompt_that_is_asked_again_is_held_once() -> None:
    play = Play(Says(A1), Says(A2))
    other = [system("be kind"), *HI]
    await play.ask(other)
    await play.ask(other)
    first, again = play.session._tree.nodes
    assert first.context.observed is again.context.observed
    await play.end()
