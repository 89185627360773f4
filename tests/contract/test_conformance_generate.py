"""Conformance sections 1 and 2, linear generators: in process, and as SGLang's bytes over HTTP.

Where the reference differs from the design, the test's name says what ours does. Fixture A: the
raw prompt "What is 1+7?", the reply `\\boxed{8}`. Fixtures B and C: the year and the temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollstream.errors import Status, StopReason
from rollstream.sample import Call, Sample
from tests.generate_stage import RUN_SEED, Says, check, chunks_of, engine_of, given
from tests.unit.generate import weather
from tests.unit.generate.weather import says
from worker.generate import multi_turn, single_turn
from worker.sampling import Sampling, call_seed
from worker.types import GenerateInput

PROMPT = [3838, 374, 220, 16, 10, 22, 30]
REPLY = [59, 79075, 90, 23, 92]
LOG_PROBS = [0.0, -0.0078125, -0.015625, -0.0234375, -0.03125]
FIXTURE_A = Sampling(temperature=0.7, max_new_tokens=16)

Generate = Callable[[GenerateInput], Any]
variants = pytest.mark.parametrize("generate", [single_turn, multi_turn])
transports = pytest.mark.parametrize("over", ["process", "http"])


async def sample_of(generate: Generate, stage: GenerateInput) -> Sample:
    samples = (await generate(stage)).samples
    assert isinstance(samples, Sample)
    samples.validate()
    return samples


@transports
@variants
async def test_1_fixture_a_gives_one_request_and_an_array_mask_for_both(
    generate: Generate, over: str, qwen3: Any
) -> None:
    async with engine_of(over, Says(REPLY)) as engine:
        sample = await sample_of(generate, given(engine, qwen3, sampling=FIXTURE_A))
        [asked] = engine.asked
        check(sample, engine.asked, [Says(REPLY)])
    assert asked.ids == PROMPT
    assert (asked.max_new_tokens, asked.temperature) == (16, 0.7)
    if over == "http":
        flags = ("return_logprob", "return_routed_experts", "return_indexer_topk")
        assert [asked.body[flag] for flag in flags] == [True, False, False]
    assert sample.tokens.tolist() == PROMPT + REPLY
    assert sample.response_length == 5
    assert sample.rollout_log_probs.tolist() == LOG_PROBS
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 1]
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert sample.response == "\\boxed{8}"
    assert sample.prefix_cache_info.cached_tokens == 0
    assert sample.prefix_cache_info.total_prompt_tokens == 7


@transports
@variants
@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", Status.COMPLETED, StopReason.STOP),
        ("length", Status.TRUNCATED, StopReason.TURN_LENGTH),
        ("abort", Status.ABORTED, StopReason.ABORT_WEIGHTS),
    ],
)
async def test_2_every_finish_keeps_the_tokens(
    generate: Generate, over: str, finish: str, status: Status, reason: StopReason, qwen3: Any
) -> None:
    capped = Sampling(temperature=0.7, max_new_tokens=5 if finish == "length" else 16)
    async with engine_of(over, Says(REPLY, finish)) as engine:
        sample = await sample_of(generate, given(engine, qwen3, sampling=capped))
    assert (sample.status, sample.stop_reason) == (status, reason)
    assert sample.tokens.tolist() == PROMPT + REPLY
    assert sample.calls[0].finish == finish


@variants
@pytest.mark.parametrize("status", [Status.COMPLETED, Status.TRUNCATED])
async def test_3_an_ended_sample_is_a_value_error(
    generate: Generate, status: Status, qwen3: Any
) -> None:
    async with engine_of("process") as engine:
        stage = given(engine, qwen3)
        stage.sample.status = status
        with pytest.raises(ValueError, match="only a pending or an aborted one"):
            await generate(stage)


@variants
@pytest.mark.parametrize("status", [Status.PENDING, Status.ABORTED])
async def test_3_a_pending_or_aborted_sample_is_accepted(
    generate: Generate, status: Status, qwen3: Any
) -> None:
    async with engine_of("process", Says(REPLY)) as engine:
        stage = given(engine, qwen3)
        stage.sample.status = status
        assert (await sample_of(generate, stage)).status is Status.COMPLETED
        assert stage.sample.status is status, "the given sample is not written to"


def aborted(num_sampled: int) -> Sample:
    """Return a sample that was aborted behind `num_sampled` tokens of its first turn."""
    ids = list(range(1000, 1000 + num_sampled))
    at, end = len(PROMPT), len(PROMPT) + num_sampled
    return Sample(
        group_index=3, index=12288, rollout_id=12288, prompt="What is 1+7?",
        tokens=np.array(PROMPT + ids, dtype=np.int32), response="held", response_length=num_sampled,
        loss_mask=np.ones(num_sampled, dtype=np.uint8),
        rollout_log_probs=np.full(num_sampled, -0.5, dtype=np.float32),
        calls=[Call("r", "e", at, end, "abort", [(2, at, end)])], status=Status.ABORTED,
    )  # fmt: skip


@variants
async def test_5_a_used_up_budget_sends_nothing(generate: Generate, qwen3: Any) -> None:
    async with engine_of("process") as engine:
        stage = given(engine, qwen3, sample=aborted(10), sampling=Sampling(max_new_tokens=10))
        sample = await sample_of(generate, stage)
        assert engine.asked == []
    assert sample.status is Status.TRUNCATED
    assert sample.stop_reason is StopReason.TURN_LENGTH
    assert sample.tokens.tolist() == stage.sample.tokens.tolist()


@variants
async def test_a_resumed_turn_asks_for_what_is_left_under_its_first_seed(
    generate: Generate, qwen3: Any
) -> None:
    async with engine_of("process", Says(REPLY)) as engine:
        stage = given(engine, qwen3, sample=aborted(4), sampling=Sampling(max_new_tokens=10))
        sample = await sample_of(generate, stage)
        [asked] = engine.asked
    assert asked.max_new_tokens == 6
    assert asked.ids == stage.sample.tokens.tolist()
    assert asked.seed == call_seed(RUN_SEED, 3, 0, 0)
    assert sample.response_length == 9
    assert sample.weight_versions == [2, 0]


@transports
@pytest.mark.parametrize("cap", [5, 7])
@pytest.mark.parametrize(("generate", "kept"), [(single_turn, []), (multi_turn, PROMPT)])
async def test_6_a_prompt_without_room_sends_nothing_and_has_an_empty_mask(
    generate: Generate, kept: list[int], cap: int, over: str, qwen3: Any
) -> None:
    async with engine_of(over) as engine:
        sample = await sample_of(generate, given(engine, qwen3, limits={"max_context": cap}))
        assert engine.asked == []
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.PROMPT_TOO_LONG)
    assert sample.tokens.tolist() == kept
    assert sample.loss_mask.tolist() == []


@transports
@variants
@pytest.mark.parametrize(("cap", "sent"), [(10, 3), (8, 1), (100, 16)])
async def test_7_the_context_caps_what_is_asked_for(
    generate: Generate, cap: int, sent: int, over: str, qwen3: Any
) -> None:
    async with engine_of(over, Says(REPLY[:1])) as engine:
        await sample_of(
            generate, given(engine, qwen3, limits={"max_context": cap}, sampling=FIXTURE_A)
        )
        assert [asked.max_new_tokens for asked in engine.asked] == [sent]


@transports
@variants
async def test_9_prefix_cache_and_version_are_recorded_and_versions_are_ints(
    generate: Generate, over: str, qwen3: Any
) -> None:
    async with engine_of(over, Says(REPLY, version=1, cached=3)) as engine:
        sample = await sample_of(generate, given(engine, qwen3))
    info = sample.prefix_cache_info
    assert (info.cached_tokens, info.total_prompt_tokens) == (3, 7)
    assert sample.weight_versions == [1]
    assert sample.calls[0].versions == [(1, 7, 12)]


@transports
@variants
async def test_10_speculative_counters_and_their_rates(
    generate: Generate, over: str, qwen3: Any
) -> None:
    async with engine_of(over, Says(REPLY, accepted=10, drafted=15, verified=3)) as engine:
        sample = await sample_of(generate, given(engine, qwen3))
    spec = sample.spec_info
    counted = (spec.spec_accept_token_num, spec.spec_draft_token_num, spec.spec_verify_ct)
    assert counted == (10, 15, 3)
    assert spec.completion_token_num == 5
    assert spec.spec_accept_rate == 10 / 15
    assert spec.spec_accept_length == 5 / 3


@variants
async def test_14_seeds_are_hashes_that_differ_by_member_and_repeat_under_retry(
    generate: Generate, qwen3: Any
) -> None:
    async def seeds() -> list[int]:
        async with engine_of("process", *[Says(REPLY)] * 3) as engine:
            for member in range(3):
                await generate(given(engine, qwen3, member=member))
            return [asked.seed for asked in engine.asked]

    first = await seeds()
    assert len(set(first)) == 3
    assert await seeds() == first


@transports
async def test_15_an_answer_without_a_call_ends_the_trajectory(over: str, qwen3: Any) -> None:
    reply = says(qwen3, "The answer is 2.")
    async with engine_of(over, reply) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
        sample = await sample_of(multi_turn, stage)
        check(sample, engine.asked, [reply])
    assert sample.response_length == 6
    assert sample.loss_mask.tolist() == [1] * 6
    assert sample.status is Status.COMPLETED


@transports
async def test_16_fixture_b_is_one_scalar_sample_of_two_requests(over: str, qwen3: Any) -> None:
    replies = [says(qwen3, weather.TURN_1), says(qwen3, weather.FINAL)]
    async with engine_of(over, *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
        sample = await sample_of(multi_turn, stage)
        first, second = engine.asked
        check(sample, engine.asked, replies)
    assert chunks_of(sample, qwen3.decode) == [
        (weather.TURN_1, 1),
        (weather.OBSERVED_1, 0),
        (weather.FINAL, 1),
    ]
    observed = qwen3.encode_raw(weather.OBSERVED_1).tolist()
    assert second.ids == first.ids + list(replies[0].ids) + observed
    assert sample.response == weather.TURN_1 + weather.OBSERVED_1 + weather.FINAL
    assert sample.rollout_log_probs[-len(replies[1].ids)] == 0.0
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert first.seed != second.seed


@transports
async def test_17_fixture_c_alternates_over_three_requests(over: str, qwen3: Any) -> None:
    texts = (weather.TURN_1, weather.TURN_2_OF_3, weather.FINAL_OF_3)
    replies = [says(qwen3, text) for text in texts]
    async with engine_of(over, *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
        sample = await sample_of(multi_turn, stage)
        check(sample, engine.asked, replies)
        assert len(engine.asked) == 3
    chunks = chunks_of(sample, qwen3.decode)
    assert [mask for _, mask in chunks] == [1, 0, 1, 0, 1]
    assert chunks[3][0] == weather.OBSERVED_2
    assert "2023" in chunks[4][0]


@transports
@pytest.mark.parametrize(
    ("finish", "status"), [("length", Status.TRUNCATED), ("abort", Status.ABORTED)]
)
async def test_18_19_a_cut_or_aborted_turn_runs_no_tool(
    finish: str, status: Status, over: str, qwen3: Any
) -> None:
    reply = says(qwen3, weather.TURN_1, finish=finish)
    async with engine_of(over, reply) as engine:
        stage = given(
            engine,
            qwen3,
            weather.QUESTION,
            tools=weather.tools(),
            sampling=Sampling(max_new_tokens=len(reply.ids)),
        )
        sample = await sample_of(multi_turn, stage)
        assert len(engine.asked) == 1
    assert chunks_of(sample, qwen3.decode) == [(weather.TURN_1, 1)]
    assert sample.status is status
    assert "tool_calls" not in sample.metadata
    assert [span.name for span in stage.spans.spans] == ["generate", "merge"]


@transports
async def test_20_the_last_permitted_turn_records_its_calls_and_runs_none(
    over: str, qwen3: Any
) -> None:
    async with engine_of(over, says(qwen3, weather.TURN_1)) as engine:
        stage = given(
            engine, qwen3, weather.QUESTION, tools=weather.tools(), limits={"max_turns": 1}
        )
        sample = await sample_of(multi_turn, stage)
    assert chunks_of(sample, qwen3.decode) == [(weather.TURN_1, 1)]
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.MAX_TURNS)
    recorded = [
        (call["turn"], call["name"], call["arguments"], call["executed"])
        for call in sample.metadata["tool_calls"]
    ]
    assert recorded == [
        (0, "get_year", "{}", False),
        (0, "get_temperature", '{"location": "Mars"}', False),
    ]


@transports
async def test_20_with_execute_last_turn_the_reference_is_restored(over: str, qwen3: Any) -> None:
    async with engine_of(over, says(qwen3, weather.TURN_1)) as engine:
        stage = given(
            engine,
            qwen3,
            weather.QUESTION,
            tools=weather.tools(),
            limits={"max_turns": 1, "execute_last_turn": True},
        )
        sample = await sample_of(multi_turn, stage)
        assert len(engine.asked) == 1
    assert chunks_of(sample, qwen3.decode) == [(weather.TURN_1, 1), (weather.OBSERVED_1, 0)]
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.MAX_TURNS)


async def test_25_debug_messages_are_the_conversation_with_its_markup(qwen3: Any) -> None:
    replies = [says(qwen3, weather.TURN_1), says(qwen3, weather.FINAL)]
    async with engine_of("process", *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools(), debug_messages=True)
        sample = await sample_of(multi_turn, stage)
    messages = sample.metadata["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1]["content"] == weather.TURN_1.removesuffix("<|im_end|>")
    assert messages[2]["content"] == '{"year": 2026}'
    assert messages[4]["content"] == weather.FINAL.removesuffix("<|im_end|>")


async def test_26_two_responses_are_one_user_turn(qwen3: Any) -> None:
    replies = [says(qwen3, weather.TURN_1), says(qwen3, weather.FINAL)]
    async with engine_of("process", *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
        sample = await sample_of(multi_turn, stage)
    suffix = chunks_of(sample, qwen3.decode)[1][0]
    assert suffix.count("<|im_start|>user") == 1
    assert suffix.count("<tool_response>") == 2
    assert suffix.endswith("<|im_start|>assistant\n")


async def test_27_empty_arguments_are_an_object_and_missing_ids_are_made(qwen3: Any) -> None:
    call = '<tool_call>\n{"name": "get_year", "arguments": ""}\n</tool_call><|im_end|>'
    replies = [says(qwen3, call), says(qwen3, weather.FINAL)]
    async with engine_of("process", *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
        sample = await sample_of(multi_turn, stage)
    [recorded] = sample.metadata["tool_calls"]
    assert recorded["arguments"] == "{}"
    prefix, digits = recorded["id"].split("_")
    assert (prefix, len(digits), int(digits, 16) >= 0) == ("call", 24, True)
    assert '{"year": 2026}' in sample.response
