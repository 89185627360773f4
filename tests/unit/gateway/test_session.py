"""A linear session: it goes on, repeats its last turn, and what becomes of anything else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from rollstream.errors import ContractError, EngineFault, Status, StopReason
from tests.generate_stage import Says
from tests.toy import A1, A2, HI, NO, O1, OK, P0, U1
from tests.unit.gateway.play import Play, echo, refused, request_of, system, user
from worker.gateway.types import ErrorKind, Refusal
from worker.sampling import call_seed
from worker.types import DivergencePolicy

REJECT = {"on_divergence": DivergencePolicy.REJECT}
FORK = {"on_divergence": DivergencePolicy.FORK}
A2B = [31, 32, 2]


async def test_a_session_of_two_turns_is_one_scalar_sample() -> None:
    play = Play(Says(A1, version=3), Says(A2, version=4))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *OK)
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert sample.loss_mask.tolist() == [1, 1, 1] + [0] * 11 + [1, 1]  # type: ignore[union-attr]
    assert sample.weight_versions == [3, 4]
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert (sample.rollout_id, sample.label) == (play.given.sample.index, "8")
    assert [span.name for span in play.given.spans.spans] == ["generate", "generate", "merge"]
    assert [span.turn for span in play.given.spans.spans] == [0, 1, -1]
    assert play.given.sample.metadata == {}  # the pending sample is left alone
    assert len(play.given.sample.tokens) == 0


async def test_87_a_snapshot_is_prompt_and_reply_and_the_next_prompt_begins_with_it() -> None:
    play = Play(Says([10, 11, 12, 2]), Says([30, 31, 2]))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    assert play.engine.asked[1].ids == [*P0, 10, 11, 12, 2, *U1]
    assert len(history) == 4
    assert (await play.the_sample()).tokens.tolist() == [*P0, 10, 11, 12, 2, *U1, 30, 31, 2]


async def test_88_three_turns_are_one_append_only_sample() -> None:
    play = Play(Says(A1), Says(A2), Says([50, 51, 2]))
    history: list[Any] = []
    for new in (HI, NO, OK):
        await play.go_on(history, *new)
    assert [len(asked.ids) for asked in play.engine.asked] == [10, 24, 37]
    assert len((await play.the_sample()).calls) == 3


async def test_seeds_routing_key_and_salt_are_those_of_the_trajectory() -> None:
    versions = iter([5, 5, 7, 7, 7, 7, 8, 8])
    play = Play(
        Says(A1, dispatched=6), Says(A2), Says(A2), Says(A2), version=lambda: next(versions)
    )
    history: list[Any] = []
    for new in (HI, NO, NO, NO):
        await play.go_on(history, *new)
    seeds = [call_seed(7, 3, 0, turn) for turn in range(4)]
    assert [asked.seed for asked in play.engine.asked] == seeds
    assert {asked.routing_key for asked in play.engine.asked} == {"run-3"}
    assert play.engine.salts == [None, 6, 6, 6]  # of the first call, as it was really dispatched
    sample = await play.the_sample()
    assert [call.dispatched_version for call in sample.calls] == [6, 7, 7, 8]


async def test_90_a_request_that_edits_the_last_turn_takes_its_place() -> None:
    play = Play(Says(A1), Says(A2), Says([50, 2]))
    history: list[Any] = []
    await play.go_on(history, *HI)
    first = list(history)
    await play.go_on(history, *NO)
    await play.ask([*first, *OK])
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A1 + O1 + [50, 2]
    assert sample.metadata["agent"]["superseded"] == 1
    assert sample.metadata["agent"]["divergences"] == 0
    assert sample.metadata["agent"]["dropped_tokens"] == len(A2)


async def test_92_the_first_request_again_takes_the_first_turns_place() -> None:
    play = Play(Says(A1), Says([99, 2]))
    await play.ask(HI)
    await play.ask(HI)
    sample = await play.the_sample()
    assert sample.tokens.tolist() == [*P0, 99, 2]
    assert sample.metadata["agent"]["superseded"] == 1


async def test_96_a_first_request_that_broke_leaves_room_for_another() -> None:
    play = Play(EngineFault("down", retryable=True), Says(A1), rules=REJECT)
    assert (await refused(play.ask(HI))).kind is ErrorKind.ENGINE
    assert play.session.fault is not None
    await play.ask(NO)
    assert play.session.fault is None
    sample = await play.the_sample()
    assert sample.tokens[:7].tolist() == [1, 21, 10, 1110, 1111, 2, 10]
    assert sample.metadata["agent"]["failed"] == 1


async def test_95_a_request_that_is_refused_leaves_everything_as_it_was() -> None:
    """Here nothing is rolled back: 400, and the session goes on."""
    play = Play(Says(A1), Says(A2), Says([50, 2]))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    wrong = await refused(play.ask([*history, {"role": "nobody", "content": "x"}]))
    assert wrong.kind is ErrorKind.INVALID
    assert "nobody" in wrong.message
    assert wrong.param == "messages"
    await play.go_on(history, *OK)
    sample = await play.the_sample()
    assert len(sample.calls) == 3
    assert sample.metadata["agent"]["refused"] == 1


async def test_99_what_is_stored_stays_as_it_was_first_spelled() -> None:
    play = Play(Says(A1), Says(A2), Says(A2), debug_messages=True)
    await play.ask(HI)
    spelled = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    spelled.append({"role": "assistant", "content": "hello", "refusal": None, "tool_calls": []})
    reply = await play.ask([*spelled, *NO])
    await play.ask([*spelled, *NO, echo(reply), *NO])
    sample = await play.the_sample()
    assert len(sample.calls) == 3
    assert sample.metadata["messages"][:2] == [*HI, {"role": "assistant", "content": "hello"}]


async def test_case_126_of_resent_twins_the_last_counts() -> None:
    play = Play(Says(A1), Says(A2), Says(A2B))
    history: list[Any] = []
    await play.go_on(history, *HI)
    history += OK
    await play.ask(history)
    await play.ask(history)
    assert play.engine.asked[1].ids == play.engine.asked[2].ids == P0 + A1 + O1
    assert play.engine.asked[1].seed != play.engine.asked[2].seed
    sample = await play.the_sample()
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2B
    agent = sample.metadata["agent"]
    assert (agent["superseded"], agent["dropped_tokens"]) == (1, len(A2))


@pytest.mark.parametrize("policy", list(DivergencePolicy))
async def test_case_126_of_resent_twins_the_one_that_is_gone_on_with_counts(
    policy: DivergencePolicy,
) -> None:
    play = Play(Says(A1), Says(A2), Says(A2B), Says(A1), rules={"on_divergence": policy})
    history: list[Any] = []
    await play.go_on(history, *HI)
    history += OK
    one = await play.ask(history)
    await play.ask(history)
    await play.ask([*history, echo(one) | {"content": "hello"}, *NO])
    sample = (await play.end())[0]
    # Both twins say "hello": identical ones, of which the latest is gone on with.
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2B + U1 + A1
    assert sample.metadata["agent"]["superseded"] == 1


@pytest.mark.parametrize("policy", list(DivergencePolicy))
async def test_case_126_the_earlier_twin_counts_where_the_client_went_on_with_it(
    policy: DivergencePolicy,
) -> None:
    play = Play(Says(A1), Says([50, 2]), Says(A2), Says(A1), rules={"on_divergence": policy})
    history: list[Any] = []
    await play.go_on(history, *HI)
    history += OK
    one = await play.ask(history)
    await play.ask(history)
    await play.ask([*history, echo(one), *NO])
    sample = (await play.end())[0]
    assert sample.tokens.tolist() == P0 + A1 + O1 + [50, 2] + U1 + A1
    agent = sample.metadata["agent"]
    assert (agent["superseded"], agent["divergences"]) == (1, 0)
    assert agent["dropped_tokens"] == len(A2)


async def _interleaved(policy: DivergencePolicy) -> Play:
    play = Play(Says(A1), Says([40, 2]), Says(A2), Says([41, 2]), rules={"on_divergence": policy})
    main: list[Any] = [system("s")]
    sub: list[Any] = [system("t")]
    await play.go_on(main, *HI)
    await play.go_on(sub, *HI)
    await play.go_on(main, *OK)
    await play.go_on(sub, *NO)
    return play


async def test_case_127_interleaved_lines_are_one_sample_of_the_newest_call() -> None:
    play = await _interleaved(DivergencePolicy.KEEP_PREFIX)
    main1, sub1, main2, sub2 = (asked.ids for asked in play.engine.asked)
    assert main2 == main1 + A1 + O1  # nothing is tokenized again
    assert sub2 == [*sub1, 40, 2, *U1]
    sample = await play.the_sample()
    assert sample.tokens.tolist() == [*sub2, 41, 2]
    agent = sample.metadata["agent"]
    assert (agent["divergences"], agent["dropped_tokens"]) == (3, len(A1) + len(A2))
    noted = sample.metadata["divergences"]
    assert [one["turn"] for one in noted] == [1, 2, 3]
    assert {one["policy"] for one in noted} == {"keep_prefix"}


async def test_case_127_a_fork_keeps_both_lines() -> None:
    play = await _interleaved(DivergencePolicy.FORK)
    later, earlier = await play.end()
    assert later.tokens.tolist() == [*play.engine.asked[3].ids, 41, 2]
    assert earlier.tokens.tolist() == play.engine.asked[2].ids + A2
    assert play.session.stats["dropped_tokens"] == 0
    assert later.metadata["tree"]["parents"] == [None, None, 0, 1]


async def test_case_127_reject_refuses_the_second_line_and_changes_nothing() -> None:
    play = Play(Says(A1), Says(A2), rules=REJECT)
    main: list[Any] = [system("s")]
    await play.go_on(main, *HI)
    wrong = await refused(play.ask([system("t"), *HI]))
    assert wrong.kind is ErrorKind.INVALID
    assert "message 0" in wrong.message
    assert "content" in wrong.message
    await play.go_on(main, *OK)
    sample = await play.the_sample()
    assert len(sample.calls) == 2
    assert sample.metadata["agent"]["refused"] == 1


async def test_reject_says_that_the_tools_are_others() -> None:
    play = Play(Says(A1), rules=REJECT)
    await play.ask(HI)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    wrong = await refused(play.ask(HI, tools=tools))
    assert (wrong.kind, wrong.param) == (ErrorKind.INVALID, "tools")


async def test_other_tools_begin_a_conversation_of_their_own() -> None:
    play = Play(Says(A1), Says(A2))
    history: list[Any] = []
    await play.go_on(history, *HI)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await play.ask([*history, *NO], tools=tools)
    sample = await play.the_sample()
    assert len(sample.calls) == 1
    assert sample.metadata["agent"]["divergences"] == 1


async def test_case_128_a_compaction_is_answered_and_counts_what_is_left_out() -> None:
    play = Play(default=lambda asked: Says(A1))
    history: list[Any] = [system("s")]
    for turn in range(20):
        await play.go_on(history, user(f"turn {turn}"))
    short: list[Any] = [system("s")]
    await play.go_on(short, user("a summary"), user("next"))
    await play.go_on(short, *NO)
    sample = await play.the_sample()
    assert len(sample.calls) == 2
    agent = sample.metadata["agent"]
    assert (agent["divergences"], agent["dropped_tokens"]) == (1, 20 * len(A1))
    assert sample.rollout_log_probs is not None
    held = sample.rollout_log_probs[sample.sampled_mask() == 1]
    assert held.tolist() == [-1 / 128, -2 / 128, -3 / 128] * 2


async def test_98_a_request_that_drops_the_last_turns_is_an_earlier_turn_again() -> None:
    play = Play(Says(A1), Says(A2), Says([50, 2]), Says([51, 2]))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    await play.ask(history[:3])  # a pure drop: the second turn again
    assert len((await play.the_sample()).calls) == 2


@pytest.mark.parametrize("policy", [DivergencePolicy.KEEP_PREFIX, DivergencePolicy.FORK])
async def test_130_a_turn_that_the_client_rewrote_is_prompt_and_never_trained(
    policy: DivergencePolicy,
) -> None:
    play = Play(Says(A1), Says(A2), Says([50, 2]), rules={"on_divergence": policy})
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    rewritten = [*history[:3], {"role": "assistant", "content": "no"}, *OK]
    await play.ask(rewritten)
    samples = await play.end()
    newest = next(s for s in samples if s.tokens[-2] == 50)
    assert newest.response_length == 2
    assert newest.prompt_length == len(play.renderer.render(rewritten, None))
    assert len(samples) == (2 if policy is DivergencePolicy.FORK else 1)


async def test_130_a_rewritten_turn_is_refused_where_history_may_not_be_rewritten() -> None:
    play = Play(Says(A1), Says(A2), rules=REJECT)
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    rewritten = [*history[:3], {"role": "assistant", "content": "no"}, *OK]
    wrong = await refused(play.ask(rewritten))
    assert "message 3" in wrong.message


async def test_130_reasoning_that_does_not_come_back_is_the_same_turn() -> None:
    play = Play(Says([4, 30, 5, 30, 2]), Says(A2), Says(A2))
    reply = await play.ask(HI)
    assert reply.message["reasoning_content"] == "hello"
    await play.ask([*HI, {"role": "assistant", "content": "hello"}, *NO])
    assert play.engine.asked[1].ids == [*P0, 4, 30, 5, 30, 2, *U1]
    changed = {"role": "assistant", "content": "hello", "reasoning_content": "other"}
    await play.ask([*HI, changed, *NO])  # rewritten: a conversation of its own
    sample = await play.the_sample()
    assert len(sample.calls) == 1


async def test_case_132_93_assistant_messages_of_the_first_request_are_prompt() -> None:
    shot = {"role": "assistant", "content": "hello"}
    play = Play(Says(A1), Says(A2))
    history: list[Any] = [*HI, shot]
    await play.go_on(history, *NO)
    await play.go_on(history, *OK)
    sample = await play.the_sample()
    assert sample.prompt_length == len(play.engine.asked[0].ids)
    assert len(sample.calls) == 2
    assert sample.response_length == len(A1) + len(O1) + len(A2)


async def test_94_system_and_user_messages_may_follow_a_reply_together() -> None:
    """The reference refuses them; here whatever the template takes is appended."""
    play = Play(Says(A1), Says(A2))
    history: list[Any] = [system("s"), system("t")]
    await play.go_on(history, *HI)
    await play.go_on(history, *OK, system("u"), *NO)
    sample = await play.the_sample()
    assert len(sample.calls) == 2


async def test_a_request_that_ends_with_our_own_reply_has_nothing_to_answer() -> None:
    play = Play(Says(A1))
    history: list[Any] = []
    await play.go_on(history, *HI)
    wrong = await refused(play.ask(history))
    assert (wrong.kind, wrong.param) == (ErrorKind.INVALID, "messages")
    assert "message 1" in wrong.message
    assert (await refused(play.ask([]))).kind is ErrorKind.INVALID
    assert (await play.the_sample()).metadata["agent"]["refused"] == 2


async def test_continues_goes_on_from_a_reply_by_its_id() -> None:
    play = Play(Says(A1), Says(A2), Says([50, 2]), Says([51, 2]))
    first = await play.ask(HI)
    second = await play.ask(OK, continues=first.id)
    assert play.engine.asked[1].ids == P0 + A1 + O1
    await play.ask(NO, continues=second.id)
    assert play.engine.asked[2].ids == P0 + A1 + O1 + A2 + U1
    assert (await refused(play.ask(NO, continues="x"))).kind is ErrorKind.NOT_FOUND
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await play.ask(NO, continues=second.id, tools=tools)  # rendered anew, all of it
    said = [*HI, first.message, *OK, second.message, *NO]
    assert play.engine.asked[3].ids == play.renderer.render(said, tools).tolist()
    await play.end()


async def test_32_no_call_is_one_aborted_sample() -> None:
    play = Play()
    sample = await play.the_sample()
    assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.NO_MODEL_CALL)
    assert len(sample.tokens) == 0
    tree = Play(rules={"kind": "tree"})
    await tree.session.close()
    found = await tree.session.collect()
    assert isinstance(found, list)
    assert len(found) == 1


async def test_count_says_how_long_a_prompt_is_and_calls_nothing() -> None:
    play = Play(Says(A1))
    history: list[Any] = []
    assert await play.session.count(request_of(HI)) == len(P0)
    await play.go_on(history, *HI)
    assert await play.session.count(request_of([*history, *OK])) == len(P0 + A1 + O1)
    assert await play.session.count(request_of(history)) == len(P0 + A1)
    assert len(play.engine.asked) == 1
    await play.end()


async def test_reply_tells_what_was_counted_and_log_probs_where_they_were_asked_for() -> None:
    play = Play(Says(A1, cached=4), Says(A2))
    reply = await play.ask(HI, log_probs=True)
    assert (reply.num_prompt, reply.num_cached) == (10, 4)
    assert list(reply.pieces) == ["he", "llo", "<|im_end|>"]
    assert reply.log_probs.tolist() == [-1 / 128, -2 / 128, -3 / 128]
    assert reply.ids.tolist() == A1
    assert list((await play.ask(HI)).pieces) == []
    await play.end()


async def test_a_stop_string_of_the_run_is_told() -> None:
    play = Play(Says([31, 32], matched="lo"))
    reply = await play.ask(HI)
    assert (reply.stop_text, reply.finish) == ("lo", "stop")
    await play.end()


async def test_the_first_prompts_ids_are_the_groups_where_they_are_the_same() -> None:
    play = Play(Says(A1))
    await play.ask(HI)
    node = play.session._tree.nodes[0]
    assert node.context.observed is play.given.prompt
    await play.end()


async def test_deep_json_is_refused_and_not_a_crash() -> None:
    deep: Any = "x"
    for _ in range(20_000):
        deep = [deep]
    play = Play(Says(A1))
    wrong = await refused(play.ask([{"role": "user", "content": deep}]))
    assert wrong.kind is ErrorKind.INVALID
    await play.ask(HI)
    await play.end()


async def test_odd_values_in_messages_are_no_crash() -> None:
    odd = [
        {"role": "user", "content": "hi", "name": 1 << 80},
        {"role": "user", "content": "h\ud800i"},
        {"role": "user", "content": "hi", "x": float("nan")},
    ]
    play = Play(default=lambda asked: Says(A1), debug_messages=True)
    for message in odd:
        with contextlib.suppress(Refusal):
            await play.ask([message])
    assert play.session.stats["failed"] == 0
    await play.end()


async def test_a_matcher_that_breaks_its_promise_is_our_error_and_changes_nothing() -> None:
    def broken(stored: Any, echoed: Any) -> bool:
        raise ContractError("must return bool, got int")

    play = Play(Says(A1), rules={"matcher": broken})
    await play.ask(HI)
    with pytest.raises(ContractError):
        await play.ask([*HI, *NO])
    assert play.session.num_in_flight == 0
    assert len((await play.the_sample()).calls) == 1


def _call(play: Play, name: str) -> list[int]:
    text = f'{{"name": "{name}", "arguments": {{}}}}'
    return [6, *play.renderer.encode(text).tolist(), 7]


_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]


async def test_case_42_whole_calls_of_a_cut_reply_are_text() -> None:
    call = _call(Play(), "f")
    play = Play(Says([*call, *call[:9]], "length"))
    reply = await play.ask(HI, tools=_TOOLS)
    assert reply.finish == "length"
    assert "tool_calls" not in reply.message
    assert "f" in reply.message["content"]
    await play.end()


async def test_case_49_results_in_another_order_are_rendered_in_that_of_their_calls() -> None:
    prompts = []
    for is_turned in (False, True):
        play = Play()
        play.engine._steps[:] = [Says([*_call(play, "f"), *_call(play, "g"), 2]), Says(A2)]
        reply = await play.ask(HI, tools=_TOOLS)
        results = [
            {"role": "tool", "content": f"r{place}", "tool_call_id": call["id"]}
            for place, call in enumerate(reply.message["tool_calls"])
        ]
        if is_turned:
            results.reverse()
        await play.ask([*HI, echo(reply), *results], tools=_TOOLS)
        prompts.append(play.engine.asked[1].ids)
        await play.end()
    assert prompts[0] == prompts[1]


async def test_a_message_that_cannot_be_rendered_is_named_by_its_place_in_therequest_of() -> None:
    play = Play(Says(A1))
    history: list[Any] = []
    await play.go_on(history, *HI)
    wrong = await refused(play.ask([*history, *OK, {"role": "nobody", "content": "x"}]))
    assert "message 3" in wrong.message
    await play.end()
