"""Members that an abort stops: what is parked, who goes on, and that nothing is done twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollstream.errors import EngineFault, MemberReason, Report, Status, StopReason, Withheld
from rollstream.sample import UNKNOWN_VERSION, Sample
from rollstream.wire import decode_body, encode_body
from tests.builders import a_prompt
from tests.contract.rolls import Recorder
from tests.generate_stage import Says
from tests.toy import A1, A2, CLOSE, HI, O1, P0
from worker.generate import multi_turn, resumable, single_turn
from worker.members.gate import Position
from worker.members.work import leaves_of
from worker.telemetry.spans import NoSpans
from worker.types import GenerateInput, GenerateOutput

from .resuming import Member, sample_of

FILL = [1104, 1101, 1108, 1111, 1032, 1110, 1111, 1119, 1046, 1046]
"""Ten plain tokens."""
END = Says(A2, matched=CLOSE)
variants = pytest.mark.parametrize("generate", [single_turn, multi_turn])


# --- inside a turn -------------------------------------------------------------------------------
@variants
async def test_case_66_a_resumed_turn_asks_for_what_is_left_and_ends_as_if_it_never_stopped(
    generate: Any,
) -> None:
    member = Member(generate=generate, limits={"max_response": 10})
    first = await member.attempt(Says(FILL[:4], "abort"))
    assert (first.report, member.asked[0].max_new_tokens) == (Report.PARK, 10)
    seed = member.asked[0].seed

    second = await member.attempt(Says(FILL[4:], "length"))
    assert second.report is Report.COMPLETE
    (asked,) = member.asked
    assert (asked.ids, asked.max_new_tokens, asked.seed) == (P0 + FILL[:4], 6, seed)
    sample = sample_of(second)
    assert sample.tokens.tolist() == P0 + FILL
    assert sample.stop_reason is StopReason.RESPONSE_LENGTH
    assert sample.response == member.renderer.decode(np.array(FILL, np.int32))
    assert sample.metadata["resumes"] == 1
    assert "parked_digest" not in sample.metadata


@variants
async def test_case_67_a_parked_sample_whose_budget_is_used_up_makes_no_call(
    generate: Any,
) -> None:
    member = Member(generate=generate, limits={"max_response": 10})
    assert (await member.attempt(Says(FILL, "abort"))).report is Report.PARK
    ending = await member.attempt()
    sample = sample_of(ending)
    assert (member.asked, ending.report, sample.status) == ([], Report.COMPLETE, Status.TRUNCATED)
    assert sample.tokens.tolist() == P0 + FILL
    assert sample.response == member.renderer.decode(np.array(FILL, np.int32))


@variants
async def test_case_68_without_partial_every_attempt_begins_at_the_prompt(generate: Any) -> None:
    member = Member(generate=generate, partial=False)
    for ids, version in ((FILL[:2], 2), (FILL[2:4], 4)):
        ending = await member.attempt(Says(ids, "abort", version=version))
        assert (ending.report, ending.reason) == (Report.BACK, MemberReason.ABORT_WEIGHTS)
        assert member.asked[0].ids == P0
    sample = sample_of(await member.attempt(Says([*FILL[:7], CLOSE], version=6, matched=CLOSE)))
    assert (sample.response_length, sample.weight_versions) == (8, [6])
    assert "resumes" not in sample.metadata


@variants
async def test_case_68_with_partial_every_segment_keeps_its_version(generate: Any) -> None:
    member = Member(generate=generate)
    for ids, version in ((FILL[:2], 2), (FILL[2:4], 4)):
        ending = await member.attempt(Says(ids, "abort", version=version))
        assert ending.report is Report.PARK
    sample = sample_of(await member.attempt(Says([*FILL[:7], CLOSE], version=6, matched=CLOSE)))
    assert (sample.response_length, sample.weight_versions) == (12, [2, 4, 6])
    spans = [span for call in sample.calls for span in call.versions]
    assert spans == [(2, 10, 12), (4, 12, 14), (6, 14, 22)]
    assert sample.metadata["resumes"] == 2
    assert member.fidelity.counters.unknown == 0


@variants
async def test_case_70_an_abort_before_the_first_token_is_given_back_with_nothing(
    generate: Any,
) -> None:
    member = Member(generate=generate)
    ending = await member.attempt(Says([], "abort"))
    assert (ending.report, sample_of(ending).calls) == (Report.BACK, [])
    assert member.body is None
    assert sample_of(await member.attempt(END)).tokens.tolist() == P0 + A2


async def test_case_70_an_empty_abort_of_a_resumed_turn_leaves_what_is_parked() -> None:
    member = Member()
    await member.attempt(Says(FILL[:4], "abort"))
    parked = member.body
    ending = await member.attempt(Says([], "abort"))
    assert (ending.report, ending.forget) == (Report.BACK, False)
    assert member.body is parked
    sample = sample_of(await member.attempt(Says([*FILL[4:6], CLOSE], matched=CLOSE)))
    assert sample.tokens.tolist() == [*P0, *FILL[:6], CLOSE]
    assert [(call.start, call.end) for call in sample.calls] == [(10, 14), (14, 17)]
    assert sample.metadata["resumes"] == 1, "an attempt that brought nothing is none"


# --- between turns, and while tools run ----------------------------------------------------------
async def test_a_member_stopped_between_turns_goes_on_behind_its_tools_results() -> None:
    tool = Recorder("f")
    member = Member(tools=[tool])

    def shut(_: dict[str, Any]) -> str:
        member.gate.move(Position.ABORT)  # the word comes while the tool runs
        return "ok"

    tool.answer = shut
    first = await member.attempt(Says(A1, matched=CLOSE))
    assert (first.report, sample_of(first).tokens.tolist()) == (Report.PARK, P0 + A1 + O1)

    tool.answer = "again"
    second = await member.attempt(END)
    assert [asked.ids for asked in member.asked] == [P0 + A1 + O1]
    sample = sample_of(second)
    assert (second.report, sample.tokens.tolist()) == (Report.COMPLETE, P0 + A1 + O1 + A2)
    assert len(tool.calls) == 1, "a tool that ran never runs again"
    assert [call["turn"] for call in sample.metadata["tool_calls"]] == [0]
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1] * 3 + [0] * 11 + [1] * 2


async def test_a_word_that_is_taken_back_while_tools_run_stops_nothing() -> None:
    tool = Recorder("f")
    member = Member(tools=[tool])

    def shut(_: dict[str, Any]) -> str:
        member.gate.move(Position.ABORT)
        member.gate.move(Position.OPEN)
        return "ok"

    tool.answer = shut
    ending = await member.attempt(Says(A1, matched=CLOSE), END)
    assert (ending.report, sample_of(ending).tokens.tolist()) == (
        Report.COMPLETE,
        P0 + A1 + O1 + A2,
    )


async def test_a_reply_that_was_whole_when_it_was_parked_is_executed_once_by_who_resumes() -> None:
    tool = Recorder("f")
    member = Member(tools=[tool])
    first = await member.attempt(Says(A1, "abort"))
    assert (first.report, tool.calls) == (Report.PARK, [])
    second = await member.attempt(Says([30], "abort"))
    assert (second.report, tool.calls) == (Report.PARK, [{}])
    third = await member.attempt(Says([2], matched=CLOSE))
    assert tool.calls == [{}]
    assert [asked.ids for asked in member.asked] == [[*P0, *A1, *O1, 30]]
    assert sample_of(third).tokens.tolist() == P0 + A1 + O1 + A2


async def test_what_was_noted_goes_on_through_two_workers() -> None:
    tool = Recorder("f")
    member = Member(tools=[tool], limits={"max_turns": 8, "max_context": 128}, debug_messages=True)
    member.group_fields = {"metadata": {"difficulty": 3}}
    await member.attempt(Says(A1, matched=CLOSE), Says(A1[:1], "abort"))
    await member.attempt(Says(A1[1:], matched=CLOSE), Says([30], "abort"))
    sample = sample_of(await member.attempt(Says([CLOSE], matched=CLOSE)))
    metadata = sample.metadata
    assert metadata["difficulty"] == 3
    assert [call["turn"] for call in metadata["tool_calls"]] == [0, 1]
    roles = ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["role"] for message in metadata["messages"]] == roles
    assert sample.response == member.renderer.decode(sample.tokens[10:])
    assert sample.tokens.tolist() == P0 + A1 + O1 + A1 + O1 + A2


async def test_spans_and_lifecycles_of_earlier_attempts_are_kept() -> None:
    member = Member()
    await member.attempt(Says(FILL[:2], "abort"))
    await member.attempt(Says(FILL[2:4], "abort"))
    sample = sample_of(await member.attempt(Says([CLOSE], matched=CLOSE)))
    names = [span.name for span in sample.spans]
    assert names == ["queue_wait", "generate", "merge"] * 3
    assert [set(one) for one in sample.metadata["earlier_attempts"]] == [
        {"attempt_start", "gen_start", "attempt_end"}
    ] * 2
    assert member.works[-1].num_earlier_spans == 6


# --- what is believed of it ----------------------------------------------------------------------
async def test_a_member_that_was_resumed_as_often_as_it_may_be_begins_anew() -> None:
    member = Member(max_resumes=2)
    for place in range(3):
        ending = await member.attempt(Says(FILL[place : place + 1], "abort"))
        assert ending.report is Report.PARK
    ending = await member.attempt()
    assert (ending.report, ending.forget) == (Report.RETRY, True)
    assert "resumed 2 times" in ending.error
    assert sample_of(await member.attempt(END)).tokens.tolist() == P0 + A2


def _edit(body: bytes, change: Any) -> bytes:
    sample = decode_body(body, a_prompt(0, prompt=HI))
    assert isinstance(sample, Sample)
    sample.tokens, log_probs = sample.tokens.copy(), sample.rollout_log_probs
    assert log_probs is not None
    sample.rollout_log_probs = log_probs.copy()
    change(sample)
    return encode_body(sample)


def _other_token(sample: Sample) -> None:
    sample.tokens[-1] = 5


def _other_log_prob(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[-1] = -0.75


def _other_prompt(sample: Sample) -> None:
    sample.tokens[0] = 5


def _huge_token(sample: Sample) -> None:
    sample.tokens[-1] = 1 << 30


def _other_member(sample: Sample) -> None:
    sample.index = 4097


def _another_function(sample: Sample) -> None:
    sample.generate_function_path = "another"


def _ended(sample: Sample) -> None:
    sample.finish(StopReason.STOP, Status.COMPLETED)


def _no_count(sample: Sample) -> None:
    sample.metadata["resumes"] = True


def _relabelled(sample: Sample) -> None:
    sample.calls[0].versions = [(9, sample.calls[0].start, sample.calls[0].end)]


def _no_calls(sample: Sample) -> None:
    sample.calls = []


EDITS = [
    _other_token, _other_log_prob, _other_prompt, _huge_token, _other_member, _another_function,
    _ended, _no_count, _relabelled, _no_calls,
]  # fmt: skip
RAW = {
    "empty": b"", "garbage": b"\xc1" * 64, "text": b"parked", "a number": b"\x01",
    "too new": b"\x81\xa1v\xcd\xff\xff", "gone": None,
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
async def test_a_parked_body_that_is_not_what_was_parked_is_forgotten(edit: Any) -> None:
    member = Member()
    await member.attempt(Says(FILL[:4], "abort"))
    assert member.body is not None
    member.body = _edit(member.body, edit)
    ending = await member.attempt()
    assert (ending.report, ending.forget) == (Report.RETRY, True), ending.error
    assert ending.reason is MemberReason.MERGE_ERROR
    assert sample_of(await member.attempt(END)).tokens.tolist() == P0 + A2


@pytest.mark.parametrize("name", RAW)
async def test_a_parked_body_that_cannot_be_read_is_forgotten(name: str) -> None:
    member = Member()
    await member.attempt(Says(FILL[:4], "abort"))
    member.body = RAW[name]
    member.parked_bytes = 100  # as the lease's answer says
    ending = await member.attempt()
    assert (ending.report, ending.forget) == (Report.RETRY, True), ending.error


async def test_a_flipped_byte_is_found_or_changes_nothing_that_is_trained() -> None:
    member = Member()
    await member.attempt(Says(FILL[:6], "abort", version=3))
    body = member.body
    assert body is not None
    found = 0
    for place in range(len(body)):
        member.body = body[:place] + bytes([body[place] ^ 0x55]) + body[place + 1 :]
        ending = await member.attempt(Says([CLOSE], matched=CLOSE, version=3))
        if ending.report is Report.RETRY:
            found += 1
            continue
        sample = sample_of(ending)
        assert sample.tokens.tolist() == [*P0, *FILL[:6], CLOSE]
        assert sample.rollout_log_probs is not None
        assert sample.rollout_log_probs[:6].tolist() == [-i / 128 for i in range(6)]
        assert sample.calls[0].versions == [(3, 10, 16)]
    assert found > len(body) // 3


# --- functions that are not built in -------------------------------------------------------------
async def plain_loop(given: GenerateInput) -> GenerateOutput:
    """Go on from nothing, whatever is parked."""
    assert len(given.sample.tokens) == 0
    assert not given.parks
    return await single_turn(given)


async def test_a_function_that_is_not_resumable_is_given_back_and_never_sees_a_parked_sample() -> (
    None
):
    member = Member()
    await member.attempt(Says(FILL[:4], "abort"))
    other = Member(generate=plain_loop)
    other.body = member.body
    ending = await other.attempt(Says(FILL[:4], "abort"))
    assert (ending.report, ending.forget) == (Report.BACK, False)
    assert other.asked[0].ids == P0


async def test_a_function_that_knows_nothing_of_pauses_is_given_back_uncharged() -> None:
    async def careless(given: GenerateInput) -> GenerateOutput:
        member.gate.move(Position.ABORT)
        from worker.types import RequestIds

        await given.engine.generate(
            RequestIds((given.prompt.json,), len(given.prompt.ids)), given.sampling,
            routing_key="k", version=0,
        )  # fmt: skip
        raise AssertionError("not reached")

    member = Member(generate=careless)
    ending = await member.attempt()
    assert (ending.report, ending.reason) == (Report.BACK, MemberReason.ABORT_WEIGHTS)


@pytest.mark.parametrize("damage", ["token", "log_prob", "observed"])
async def test_damage_to_what_was_parked_never_leaves_the_worker(damage: str) -> None:
    @resumable
    async def damages(given: GenerateInput) -> GenerateOutput:
        was_resumed = len(given.sample.tokens) > 0
        sample = (await multi_turn(given)).samples
        assert isinstance(sample, Sample)
        if was_resumed:
            assert sample.rollout_log_probs is not None
            at = {"token": 10, "log_prob": 0, "observed": 14}[damage]
            if damage == "log_prob":
                sample.rollout_log_probs[at] = -0.5
            else:
                sample.tokens[at] = 33
        return GenerateOutput(sample)

    member = Member(generate=damages, tools=[Recorder("f")])
    first = await member.attempt(Says(A1, matched=CLOSE), Says([30], "abort"))
    assert first.report is Report.PARK
    ending = await member.attempt(Says([CLOSE], matched=CLOSE))
    assert (ending.report, ending.stop_reason) == (Report.FINAL, StopReason.MERGE_ERROR)
    assert "parked" in ending.error or "sent" in ending.error
    assert sum(member.fidelity.counters.mismatches.values()) == 1


# --- versions ------------------------------------------------------------------------------------
async def test_a_call_has_the_version_of_its_try_and_later_ones_the_salt_of_the_first() -> None:
    member = Member(tools=[Recorder("f")], version=lambda: 5)
    # The worker knows of 5; the weights move while calls wait for an engine.
    await member.attempt(Says(A1, matched=CLOSE, dispatched=8), Says([30], "abort", dispatched=9))
    sample = sample_of(await member.attempt(Says([CLOSE], matched=CLOSE, dispatched=10)))
    assert [call.dispatched_version for call in sample.calls] == [8, 9, 10]
    assert member.salts == [None, 8, 8], "the first is salted by its own, here and elsewhere"


async def test_case_69_only_the_newest_versions_tokens_stay_in_the_mask() -> None:
    member = Member(mask_offpolicy=True, tools=[Recorder("f")])
    await member.attempt(Says(A1, matched=CLOSE, version=4), Says([30], "abort", version=4))
    assert member.body is not None
    parked = decode_body(member.body, a_prompt(0, prompt=HI))
    assert isinstance(parked, Sample)
    assert parked.loss_mask is not None
    assert parked.loss_mask.tolist() == [1] * 3 + [0] * 11 + [1], "what goes on is not masked yet"
    sample = sample_of(await member.attempt(Says([31, CLOSE], matched=CLOSE, version=6)))
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask.tolist() == [0] * 15 + [1, 1]
    assert len(sample.rollout_log_probs) == sample.response_length == 17
    assert sample.rollout_log_probs[:3].tolist() == [0.0, -1 / 128, -2 / 128]
    assert [v for call in sample.calls for v, _, _ in call.versions] == [4, 4, 6]


@pytest.mark.parametrize("versions", [(6, 6), (UNKNOWN_VERSION, UNKNOWN_VERSION)])
async def test_a_sample_of_one_version_keeps_its_mask(versions: tuple[int, int]) -> None:
    member = Member(mask_offpolicy=True, version=lambda: 6)
    await member.attempt(Says([30], "abort", version=versions[0]))
    sample = sample_of(await member.attempt(Says([CLOSE], matched=CLOSE, version=versions[1])))
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1, 1]


# --- evaluation ----------------------------------------------------------------------------------
class KeepsGiven:
    """`multi_turn`, keeping what it was given."""

    resumable = True

    def __init__(self) -> None:
        self.given: list[GenerateInput] = []

    async def __call__(self, given: GenerateInput) -> GenerateOutput:
        self.given.append(given)
        return await multi_turn(given)


async def test_members_of_an_evaluation_are_scored_unmasked_and_without_spans() -> None:
    class Scores:
        async def score(self, trajectory: Any, group: Any) -> None:
            for leaf in leaves_of(trajectory):
                leaf.reward = 0.5

    delivered: list[Any] = []
    generate = KeepsGiven()
    member = Member(
        key="e:gsm8k:ab:7", generate=generate, mask_offpolicy=True, scorer=Scores(),
        delivered=delivered.append,
    )  # fmt: skip
    member.group_fields = {"sampling": {"top_p": 0.5, "temperature": 0.0}}
    await member.attempt(Says([30], "abort", version=1))
    sample = sample_of(await member.attempt(Says([CLOSE], matched=CLOSE, version=2)))
    assert [given.evaluation for given in generate.given] == [True, True]
    assert (sample.group_index, sample.reward, sample.spans) == (7, 0.5, [])
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1, 1]
    assert sample.metadata["off_distribution"]
    assert delivered == [], "nobody rescores what nobody trains on"
    assert isinstance(member.works[-1].spans, NoSpans)


@pytest.mark.parametrize("outcome", [Withheld(), EngineFault("broken", retryable=True)])
async def test_a_fault_behind_a_resume_leaves_what_is_parked(outcome: Any) -> None:
    member = Member()
    await member.attempt(Says(FILL[:4], "abort"))

    async def broken() -> Any:
        raise outcome

    ending = await member.attempt(broken)
    assert not ending.forget
    sample = sample_of(await member.attempt(Says([CLOSE], matched=CLOSE)))
    assert sample.tokens.tolist() == [*P0, *FILL[:4], CLOSE]
    assert sample.metadata["resumes"] == 1
