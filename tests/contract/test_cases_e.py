"""Cases 66 to 74 and 78 of the public reports: aborts, cuts, resumes and versions, over HTTP.

Elsewhere: 76 (requests during a pause) in tests/e2e/test_paused_engines.py, 77 (groups that are
discarded too often) in tests/integration/worker/test_slow_prompts.py; both need a whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from rollstream.errors import Status, StopReason
from rollstream.group import PromptGroup
from rollstream.sample import UNKNOWN_VERSION, Call, Sample
from rollstream.wire import decode_body, decode_header, encode_body, encode_header
from tests.contract.rolls import Recorder, Rolled, rolled
from tests.generate_stage import Says, engine_of, given
from tests.integration.worker.parts import a_run
from tests.toy import A1, A2, CLOSE, HI, O1, P0, toy_renderer
from tests.unit.worker.works import a_book, a_work, an_env, answer, leased
from worker.generate import multi_turn, single_turn
from worker.sampling import Sampling
from worker.tito.masks import on_policy_mask
from worker.tools import FunctionTool
from worker.types import AssistantMessage, GenerateInput, GenerateOutput, ToolCall

pytestmark = pytest.mark.usefixtures("protocol")
variants = pytest.mark.parametrize("generate", [single_turn, multi_turn])
FILL = [1104, 1101, 1108, 1111, 1032, 1110, 1111, 1119, 1046, 1046]
"""Ten plain tokens."""


class Calling:
    """The toy renderer, reading a call of `f` in A1, and an answer in everything else."""

    def __init__(self) -> None:
        self._inner = toy_renderer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def parse(self, completion: Any, prompt_tail: Any, tools: Any = None) -> AssistantMessage:
        message: AssistantMessage = self._inner.parse(completion, prompt_tail, tools)
        if completion.tolist() == A1:
            message.tool_calls = [ToolCall("call_1", "f", {})]
        return message


def f() -> str:
    """Say ok."""
    return "ok"


async def attempt(
    *replies: Says, held: Sample | None = None, max_response: int | None = 10, **fields: Any
) -> Rolled:
    """Run one attempt, going on from what an earlier one held."""
    limits = {"max_context": 64, "max_response": max_response} | fields.pop("limits", {})
    known: dict[str, Any] = {"prompt": HI, "sampling": Sampling(max_new_tokens=32)} | fields
    return await rolled(Calling(), *replies, sample=held, limits=limits, **known)


@variants
async def test_case_66_a_resume_asks_for_what_is_left(generate: Any) -> None:
    first = await attempt(Says(FILL[:4], "abort"), generate=generate)
    assert first.requests[0]["sampling_params"]["max_new_tokens"] == 10
    assert (first.sample.status, first.sample.response_length) == (Status.ABORTED, 4)
    second = await attempt(Says(FILL[4:], "length"), held=first.sample, generate=generate)
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == 6
    assert second.prompts == [P0 + FILL[:4]]
    assert second.sample.tokens.tolist() == P0 + FILL
    assert second.sample.response_length == 10
    assert second.sample.stop_reason is StopReason.RESPONSE_LENGTH
    seeds = {body["sampling_params"]["sampling_seed"] for body in first.requests + second.requests}
    assert len(seeds) == 1, "the turn that goes on keeps its seed"


@pytest.mark.parametrize(("context", "left"), [(64, 6), (18, 4), (15, 1)])
async def test_case_66_a_resume_stays_within_the_context_too(context: int, left: int) -> None:
    limits = {"max_context": context}
    first = await attempt(Says(FILL[:4], "abort"), limits=limits)
    second = await attempt(Says(FILL[4 : 4 + left], "length"), held=first.sample, limits=limits)
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == left
    assert len(second.prompts[0]) + left <= context


@variants
async def test_case_66_the_cap_of_a_turn_counts_what_it_had_sampled_before(generate: Any) -> None:
    sampling = Sampling(max_new_tokens=6)
    first = await attempt(Says(FILL[:4], "abort"), sampling=sampling, generate=generate)
    second = await attempt(
        Says(FILL[4:6], "length"), held=first.sample, sampling=sampling, generate=generate
    )
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == 2
    assert (second.sample.response_length, second.sample.stop_reason) == (6, StopReason.TURN_LENGTH)


@variants
async def test_case_67_a_used_up_budget_makes_no_call(generate: Any) -> None:
    first = await attempt(Says(FILL, "abort"), generate=generate)
    assert first.sample.status is Status.ABORTED
    second = await attempt(held=first.sample, generate=generate)
    assert second.requests == []
    assert (second.sample.status, second.sample.stop_reason) == (
        Status.TRUNCATED,
        StopReason.RESPONSE_LENGTH,
    )
    assert second.sample.tokens.tolist() == P0 + FILL


@variants
@pytest.mark.parametrize("partial", [False, True])
async def test_case_68_aborted_tokens_are_gone_on_from_only_where_they_are_given(
    partial: bool, generate: Any
) -> None:
    held, runs = None, []
    for ids, finish, version in (
        (FILL[:2], "abort", 2), (FILL[2:4], "abort", 4), ([*FILL[:7], CLOSE], "stop", 6)
    ):  # fmt: skip
        run = await attempt(
            Says(ids, finish, version=version, matched=CLOSE if finish == "stop" else None),
            held=held, max_response=None, generate=generate,
        )  # fmt: skip
        runs.append(run)
        held = run.sample if partial else None
    last = runs[-1].sample
    assert last.status is Status.COMPLETED
    if partial:
        assert [run.prompts[0] for run in runs] == [P0, P0 + FILL[:2], P0 + FILL[:4]]
        assert (last.response_length, last.weight_versions) == (12, [2, 4, 6])
        spans = [span for call in last.calls for span in call.versions]
        assert spans == [(2, 10, 12), (4, 12, 14), (6, 14, 22)]
    else:
        assert [run.prompts[0] for run in runs] == [P0, P0, P0]
        assert (last.response_length, last.weight_versions) == (8, [6])
        assert last.calls[0].versions == [(6, 10, 18)]


async def test_case_69_masking_the_old_part_keeps_every_length() -> None:
    first = await attempt(Says(FILL[:4], "abort", version=4))
    sample = (await attempt(Says(FILL[4:], "length", version=6), held=first.sample)).sample
    sample.loss_mask = on_policy_mask(sample, 6)
    assert sample.loss_mask.tolist() == [0] * 4 + [1] * 6
    assert sample.rollout_log_probs is not None
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length == 10
    assert np.count_nonzero(sample.rollout_log_probs) == 8, (
        "log-probs are the engine's, masked or not"
    )
    sample.validate()
    back = decode_body(encode_body(sample), PromptGroup(3, 1, HI))
    assert isinstance(back, Sample)
    assert back.loss_mask is not None
    assert back.loss_mask.tolist() == sample.loss_mask.tolist()


def _spread(spans: Sequence[tuple[int, int, int]], mask: Sequence[int]) -> Sample:
    """Return a sample of 2 prompt ids whose one call has these version spans."""
    length = len(mask)
    call = Call("r", "e", 2, 2 + length, "stop", list(spans))
    return Sample(
        group_index=0, prompt="p", tokens=np.arange(2 + length, dtype=np.int32),
        response_length=length, loss_mask=np.array(mask, dtype=np.uint8),
        rollout_log_probs=np.full(length, -0.5, dtype=np.float32), calls=[call],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spans", "mask", "expected"),
    [
        ([(5, 2, 4), (6, 4, 6)], [1, 1, 1, 1], [0, 0, 1, 1]),  # within one call
        ([(5, 2, 4), (7, 4, 6)], [1, 1, 1, 0], [0, 0, 1, 0]),  # what was masked stays masked
        ([(UNKNOWN_VERSION, 2, 6)], [1, 1, 1, 1], [0, 0, 0, 0]),  # nobody knows that it is new
        ([(6, 2, 6), (7, 6, 6)], [1, 1, 1, 1], [1, 1, 1, 1]),  # an empty span takes nothing away
    ],
)
def test_case_69_the_mask_follows_the_versions_token_by_token(
    spans: list[tuple[int, int, int]], mask: list[int], expected: list[int]
) -> None:
    sample = _spread(spans, mask)
    assert on_policy_mask(sample, 6).tolist() == expected
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == mask, "the sample itself is left alone"


def test_case_69_a_sample_without_a_mask_counts_as_all_sampled() -> None:
    sample = _spread([(5, 2, 3), (6, 3, 5)], [1, 1, 1])
    sample.loss_mask = None
    assert on_policy_mask(sample, 6).tolist() == [0, 1, 1]


async def test_case_70_an_empty_abort_adds_nothing() -> None:
    tools = [FunctionTool(f)]
    base = await attempt(
        Says(A1, matched=CLOSE), Says(A2, matched=CLOSE), tools=tools, max_response=None
    )
    first = await attempt(
        Says(A1, matched=CLOSE), Says([], "abort"), tools=tools, max_response=None
    )
    assert first.sample.status is Status.ABORTED
    assert first.sample.tokens.tolist() == P0 + A1 + O1
    second = await attempt(
        Says(A2, matched=CLOSE), held=first.sample, tools=tools, max_response=None
    )
    assert second.prompts == [P0 + A1 + O1]
    sample = second.sample
    assert sample.tokens.tolist() == base.sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert sample.loss_mask is not None
    assert base.sample.loss_mask is not None
    assert sample.loss_mask.tolist() == base.sample.loss_mask.tolist()
    assert sample.rollout_log_probs is not None
    assert base.sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tobytes() == base.sample.rollout_log_probs.tobytes()
    assert sample.status is Status.COMPLETED
    assert sample.response == base.sample.response


@variants
async def test_an_abort_behind_the_end_of_a_reply_samples_nothing_more_of_it(
    generate: Any,
) -> None:
    first = await attempt(Says(A2, "abort"), generate=generate)
    assert first.sample.status is Status.ABORTED
    second = await attempt(held=first.sample, generate=generate)
    assert second.requests == []
    assert second.sample.tokens.tolist() == P0 + A2
    assert (second.sample.status, second.sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)


async def test_an_abort_behind_a_whole_call_goes_on_with_its_result() -> None:
    tools = [FunctionTool(f)]
    fields: dict[str, Any] = {"tools": tools, "max_response": None, "limits": {"max_turns": 2}}
    first = await attempt(Says(A1, "abort"), **fields)
    second = await attempt(Says([30], "abort"), held=first.sample, **fields)
    assert second.prompts == [P0 + A1 + O1]
    third = await attempt(Says([31, 2], matched=CLOSE), held=second.sample, **fields)
    assert third.prompts == [[*P0, *A1, *O1, 30]]
    assert third.requests[0]["sampling_params"]["max_new_tokens"] == 31
    assert third.sample.tokens.tolist() == [*P0, *A1, *O1, 30, 31, 2]
    assert [call["turn"] for call in third.sample.metadata["tool_calls"]] == [0]
    seeds = [run.requests[0]["sampling_params"]["sampling_seed"] for run in (first, second, third)]
    assert seeds[1] == seeds[2] != seeds[0]


async def test_a_stop_between_a_result_and_its_turn_goes_on_with_the_next_turn() -> None:
    tools = [FunctionTool(f)]
    base = await attempt(
        Says(A1, matched=CLOSE), Says(A2, matched=CLOSE), tools=tools, max_response=None
    )
    first = await attempt(Says(A1, "abort"), tools=tools, max_response=14)
    second = await attempt(held=first.sample, tools=tools, max_response=14)
    assert (second.requests, second.sample.tokens.tolist()) == ([], P0 + A1 + O1)
    second.sample.status = Status.ABORTED
    third = await attempt(
        Says(A2, matched=CLOSE), held=second.sample, tools=tools, max_response=None
    )
    assert third.prompts == [P0 + A1 + O1]
    assert third.requests[0]["sampling_params"] == base.requests[1]["sampling_params"]


@variants
@pytest.mark.parametrize("over", ["process", "http"])
async def test_case_71_a_cut_in_the_first_turn_ends_the_trajectory_everywhere(
    generate: Any, over: str
) -> None:
    async with engine_of(over, Says(FILL[:4], "length")) as engine:
        stage = given(
            engine, Calling(), HI, tools={"f": FunctionTool(f)},
            limits={"max_turns": 3}, sampling=Sampling(max_new_tokens=4),
        )  # fmt: skip
        sample = (await generate(stage)).samples
        assert len(engine.asked) == 1
    assert isinstance(sample, Sample)
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.TURN_LENGTH)
    assert sample.tokens.tolist() == P0 + FILL[:4]


async def test_case_72_one_token_of_room_is_one_turn_and_the_end() -> None:
    tools = [FunctionTool(f)]
    # A prompt of one id: the third turn's prompt has 1 + 2 * (3 + 11) = 29 of 30 ids.
    run = await attempt(
        Says(A1, matched=CLOSE), Says(A1, matched=CLOSE), *[Says([31], "length")] * 3,
        prompt="he", tools=tools, max_response=None, limits={"max_context": 30, "max_turns": 16},
    )  # fmt: skip
    assert [len(ids) for ids in run.prompts] == [1, 15, 29]
    assert run.requests[-1]["sampling_params"]["max_new_tokens"] == 1
    assert run.sample.stop_reason is StopReason.CONTEXT_LENGTH
    assert len(run.sample.tokens) == 30


async def test_case_74_every_turn_keeps_its_version_and_the_oldest_counts() -> None:
    run = await attempt(
        Says(A1, matched=CLOSE, version=3), Says(A1, matched=CLOSE, version=3),
        Says(A2, matched=CLOSE, version=4),
        tools=[FunctionTool(f)], max_response=None, version=lambda: 5,
    )  # fmt: skip
    sample = run.sample
    assert [call.versions for call in sample.calls] == [[(3, 10, 13)], [(3, 24, 27)], [(4, 38, 40)]]
    assert sample.weight_versions == [3, 3, 4]
    # The worker knew of version 5 all along; what an engine says of its tokens is not relabelled.
    assert [call.dispatched_version for call in sample.calls] == [5, 5, 5]
    leaf = decode_header(encode_header(sample)).leaves[0]
    assert leaf.versions == (3, 4)
    assert leaf.versions is not None
    assert 5 - leaf.versions[0] == 2, "too old where a staleness of 1 is allowed"


async def test_case_78_members_of_a_group_sample_with_seeds_of_their_own() -> None:
    async def seeds() -> list[list[int]]:
        found = []
        for member in range(4):  # each on an engine of its own
            run = await attempt(
                Says(A1, matched=CLOSE), Says(A2, matched=CLOSE), member=member,
                tools=[FunctionTool(f)], max_response=None,
                sampling=Sampling(max_new_tokens=32, seed=0),
            )  # fmt: skip
            found.append([body["sampling_params"]["sampling_seed"] for body in run.requests])
        return found

    first = await seeds()
    assert len({seed for member in first for seed in member}) == 8
    assert await seeds() == first, "a retry samples under the same seeds"


async def test_a_turn_that_was_resumed_twice_is_parsed_and_observed_as_one() -> None:
    tool = Recorder("f")
    held = None
    for ids, finish in ((A1[:1], "abort"), ([], "abort"), (A1[1:], "stop")):
        replies = [Says(ids, finish, matched=CLOSE if finish == "stop" else None)]
        if finish == "stop":
            replies.append(Says(A2, matched=CLOSE))
        run = await attempt(*replies, held=held, tools=[tool], max_response=None)
        held = run.sample
    assert tool.calls == [{}]
    assert run.prompts == [P0 + A1[:1], P0 + A1 + O1]
    assert run.sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert run.sample.loss_mask is not None
    assert run.sample.loss_mask.tolist() == [1, 1, 1] + [0] * 11 + [1, 1]


async def test_case_78_a_group_whose_members_sampled_the_same_is_counted(
    valkey_url: str, run_name: str
) -> None:
    async def by_member(stage: GenerateInput) -> GenerateOutput:
        alike = stage.sample.group_index in (1, 3)
        ids = (4, 5, 6 if alike else 6 + stage.sample.member)
        return GenerateOutput(answer(stage, ids=ids))

    with capture_logs() as lines:
        async with a_run(valkey_url, run_name) as run:
            for group_index, n in ((0, 4), (1, 4), (2, 1), (3, 4)):
                await run.enqueue(group_index, n)
            worker = run.worker(generate=by_member, filters=())
            worker.start()
            await run.ready(4)
            worker.metrics.flush()
            text = worker.metrics.render().decode()
    assert 'rollout_identical_groups_total{env="default"} 2.0' in text
    said = [line["log_level"] for line in lines if line["event"] == "members_sampled_the_same"]
    assert said == ["warning"]


async def test_case_78_a_temperature_of_0_makes_equal_members_by_itself() -> None:
    book = a_book(an_env(sampling=Sampling(temperature=0.0)))
    warm = a_book(an_env())
    found = []
    for one in (book, warm):
        group = a_work(one, leased(n=2)).group
        samples = [_spread([(1, 2, 5)], [1, 1, 1]) for _ in range(2)]
        found.append([group.all_alike(sample) for sample in samples])
    assert found == [[False, False], [False, True]]
