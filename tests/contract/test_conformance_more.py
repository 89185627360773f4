"""Conformance sections 1 and 2: the values that the shared file leaves open, each over its case.

The numbers in the names are the cases'; where the reference differs, the name says what ours does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollstream.errors import Status, StopReason
from rollstream.sample import Sample
from tests.generate_stage import RUN_SEED, Says, check, chunks_of, engine_of, given
from tests.scripted_engine import a_reply
from tests.unit.generate import weather
from tests.unit.generate.weather import says
from worker.generate import multi_turn, single_turn
from worker.sampling import Sampling, call_seed, request_kwargs

PROMPT = [3838, 374, 220, 16, 10, 22, 30]
REPLY = [59, 79075, 90, 23, 92]
LOG_PROBS = [0.0, -0.0078125, -0.015625, -0.0234375, -0.03125]

variants = pytest.mark.parametrize("generate", [single_turn, multi_turn])
transports = pytest.mark.parametrize("over", ["process", "http"])


async def sample_of(generate: Any, stage: Any) -> Sample:
    samples = (await generate(stage)).samples
    assert isinstance(samples, Sample)
    samples.validate()
    return samples


@variants
async def test_1_the_request_has_the_references_keys_and_four_of_ours(
    generate: Any, qwen3: Any
) -> None:
    fixture_a = Sampling(temperature=0.7, max_new_tokens=16)
    async with engine_of("http", Says(REPLY)) as engine:
        await generate(given(engine, qwen3, sampling=fixture_a))
        [body] = [asked.body for asked in engine.asked]
    assert set(body) == {
        "input_ids", "sampling_params", "return_logprob", "return_routed_experts",
        "return_indexer_topk", "rid", "stream", "routing_key", "extra_key",
    }  # fmt: skip
    assert body["sampling_params"] == {
        "max_new_tokens": 16, "temperature": 0.7, "sampling_seed": call_seed(RUN_SEED, 3, 0, 0),
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True,
        # What a server would fill in from its own preferences is said, too.
        "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0,
    }  # fmt: skip


@transports
@variants
@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
async def test_2_every_finish_keeps_log_probs_mask_and_text(
    generate: Any, over: str, finish: str, qwen3: Any
) -> None:
    capped = Sampling(max_new_tokens=5 if finish == "length" else 16)
    async with engine_of(over, Says(REPLY, finish)) as engine:
        sample = await sample_of(generate, given(engine, qwen3, sampling=capped))
    assert sample.rollout_log_probs.tolist() == LOG_PROBS
    assert sample.loss_mask.tolist() == [1] * 5
    assert (sample.response, sample.response_length) == ("\\boxed{8}", 5)


@variants
async def test_9_a_label_that_is_no_number_counts_as_the_version_at_dispatch(
    generate: Any, qwen3: Any
) -> None:
    labelled = (200, a_reply(REPLY, weight_version="v1.0", cached_tokens=3))
    async with engine_of("http", labelled) as engine:
        sample = await sample_of(generate, given(engine, qwen3, version=lambda: 12))
    assert sample.weight_versions == [12]
    assert sample.calls[0].versions == [(12, 7, 12)]
    info = sample.prefix_cache_info
    assert (info.cached_tokens, info.total_prompt_tokens) == (3, 7)


@transports
@variants
async def test_14_no_group_restarts_at_the_seeds_of_another_and_no_request_is_without(
    generate: Any, over: str, qwen3: Any
) -> None:
    async with engine_of(over, *[Says(REPLY)] * 6) as engine:
        for group_index in (3, 4):
            for member in range(3):
                stage = given(engine, qwen3, group_index=group_index, member=member)
                sample = await sample_of(generate, stage)
                assert sample.calls[0].sampling["seed"] == engine.asked[-1].seed
        seeds = [asked.seed for asked in engine.asked]
    assert seeds == [call_seed(RUN_SEED, g, i, 0) for g in (3, 4) for i in range(3)]
    assert len(set(seeds)) == 6
    assert all(type(seed) is int for seed in seeds)
    assert call_seed(RUN_SEED + 1, 3, 0, 0) not in seeds


# --- 23: partial rollout is supported, where the reference asserts -------------------------------
def _end_of(reply: Says, at: int, **fields: Any) -> Says:
    return Says(list(reply.ids)[at:], matched=reply.matched, **fields)


async def _parked(qwen3: Any, *replies: Says, **options: Any) -> tuple[Sample, list[Any]]:
    """Return what an attempt left whose last call was aborted, and what it had asked."""
    async with engine_of("process", *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools(), **options)
        sample = await sample_of(multi_turn, stage)
    assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.ABORT_WEIGHTS)
    return sample, engine.asked


@pytest.mark.parametrize("held", [0, 6])
async def test_23_multi_turn_goes_on_inside_the_turn_that_was_aborted(
    held: int, qwen3: Any
) -> None:
    first, final = says(qwen3, weather.TURN_1, version=4), says(qwen3, weather.FINAL)
    cut = Says(list(final.ids)[:held], "abort", version=4)
    parked, before = await _parked(qwen3, first, cut)
    rest = _end_of(final, held, version=5)
    async with engine_of("process", rest) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools(), sample=parked)
        sample = await sample_of(multi_turn, stage)
    assert [asked.ids for asked in engine.asked] == [parked.tokens.tolist()]
    assert engine.asked[0].seed == before[1].seed, "the same turn, so the same seed"
    assert engine.asked[0].max_new_tokens == 64 - held
    check(sample, [*before, *engine.asked], [first, cut, rest])
    assert chunks_of(sample, qwen3.decode) == [
        (weather.TURN_1, 1), (weather.OBSERVED_1, 0), (weather.FINAL, 1),
    ]  # fmt: skip
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert [call["name"] for call in sample.metadata["tool_calls"]] == [
        "get_year", "get_temperature",
    ]  # fmt: skip


async def test_23_a_turn_that_goes_on_keeps_what_was_noted_before_and_its_conversation(
    qwen3: Any,
) -> None:
    texts = (weather.TURN_1, weather.TURN_2_OF_3, weather.FINAL_OF_3)
    first, second, final = (says(qwen3, text) for text in texts)
    cut = Says(list(second.ids)[:8], "abort")
    parked, _ = await _parked(qwen3, first, cut, debug_messages=True)
    async with engine_of("process", _end_of(second, 8), final) as engine:
        stage = given(
            engine, qwen3, weather.QUESTION, tools=weather.tools(), sample=parked,
            debug_messages=True,
        )  # fmt: skip
        sample = await sample_of(multi_turn, stage)
    assert [(call["turn"], call["name"]) for call in sample.metadata["tool_calls"]] == [
        (0, "get_year"), (0, "get_temperature"), (1, "get_temperature"),
    ]  # fmt: skip
    assert _conversation(sample) == [
        ("user", weather.QUESTION[0]["content"]),
        ("assistant", weather.TURN_1.removesuffix("<|im_end|>")),
        ("tool", '{"year": 2026}'),
        ("tool", '{"temperature": -60}'),
        ("assistant", weather.TURN_2_OF_3.removesuffix("<|im_end|>")),
        ("tool", '{"temperature": 15}'),
        ("assistant", weather.FINAL_OF_3.removesuffix("<|im_end|>")),
    ]
    assert len(parked.metadata["tool_calls"]) == 2, "the parked record is not written to"
    assert len(parked.metadata["messages"]) == 5


def _conversation(sample: Sample) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in sample.metadata["messages"]]


# --- 27, 35 --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('"arguments": ""', '{"year": 2026}'),
        ('"arguments": {}', '{"year": 2026}'),
        ('"arguments": {"x": 1,}', "not valid JSON"),
    ],
    ids=["empty", "an object", "unparsable"],
)
async def test_27_a_result_that_is_no_text_becomes_json_and_bad_arguments_an_observation(
    arguments: str, seen: str, qwen3: Any
) -> None:
    text = '<tool_call>\n{"name": "get_year", ' + arguments + "}\n</tool_call><|im_end|>"
    replies = [says(qwen3, text), says(qwen3, weather.FINAL)]
    async with engine_of("process", *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
        sample = await sample_of(multi_turn, stage)
    [_, (observed, mask), _] = chunks_of(sample, qwen3.decode)
    assert seen in observed
    assert mask == 0
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (
            {"max_new_tokens": 8, "min_new_tokens": 2, "sampling_seed": 5},
            {"max_tokens": 8, "min_tokens": 2, "seed": 5},
        ),
        ({"max_new_tokens": 8, "max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 3, "max_new_tokens": 8}, {"max_tokens": 3}),
        ({"model": "m", "messages": [], "rid": "r", "foo": 1, "temperature": 0.7},
         {"temperature": 0.7}),
        ({"top_p": None, "max_new_tokens": None, "seed": 0}, {"seed": 0}),
        ({"max_tokens": None, "max_new_tokens": 8}, {"max_tokens": 8}),
        ({}, {}),
    ],
)  # fmt: skip
def test_35_request_kwargs_are_in_the_words_of_chat_completions(
    given_: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = dict(given_)
    assert request_kwargs(given_) == expected
    assert given_ == before


def test_35_request_kwargs_know_every_parameter_of_ours() -> None:
    plain = Sampling(
        temperature=0.7, max_new_tokens=8, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.2,
        presence_penalty=0.3, repetition_penalty=1.1, min_new_tokens=2, stop=("x",),
        stop_token_ids=(2,), seed=9,
    ).to_dict()  # fmt: skip
    renamed = {"max_tokens": 8, "min_tokens": 2, "seed": 9}
    kept: Sequence[str] = [k for k in plain if k not in ("max_new_tokens", "min_new_tokens")]
    assert request_kwargs(plain) == {k: plain[k] for k in kept} | renamed
