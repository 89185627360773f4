"""What we ask of SGLang and vLLM, and what we read of their replies, against their own source.

The fields, defaults and paths of both are in tests/data/engine_fields.json, read from their wheels
by `tests.contract.engine_fields`; tests/ops/test_engine_wheels.py reads the wheels again.
"""

from __future__ import annotations

import json
from dataclasses import fields as fields_of_class
from typing import Any

import msgspec
import pytest

from rollstream import rescore
from tests.builders import a_sample
from tests.scripted_engine import a_reply, a_vllm_completion, a_vllm_reply
from tests.streams import events_of
from worker.engines.protocol import reply, stream, streams, vllm_reply, vllm_stream
from worker.engines.protocol.checks import VersionSpan
from worker.engines.protocol.replay import Asked, ReplayFields, ReplayShape, RowShape
from worker.engines.protocol.request import RequestWriter, body_bytes
from worker.engines.protocol.vllm_request import PATHS, Route, VllmWriter
from worker.sampling import Sampling
from worker.types import RequestIds

from .engine_fields import load

KNOWN = load()
EVERYTHING = Sampling(
    temperature=0.7,
    max_new_tokens=9,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    repetition_penalty=1.1,
    min_new_tokens=1,
    stop=("</s>", "\n\n"),
    stop_token_ids=(2,),
    seed=7,
    logit_bias=((5, 1.0),),
    json_schema="{}",
    regex="a",
    ebnf="b",
)
ASKED = Asked(ReplayShape(RowShape(48, 8), RowShape(61, 2048)), 12)
PROMPT = RequestIds([b"1,2", b"3"], 3)
OLDER = {"spec_accept_token_num", "spec_draft_token_num", "indexer_topk_num_layers"}
"""Of SGLang's older versions and of miles: read too."""
IN_META = {
    "routed_experts", "indexer_topk", "spec_num_correct_drafts", "spec_num_proposed_drafts",
    "spec_verify_ct",
}  # fmt: skip
"""Put into meta_info by SGLang's tokenizer manager; the published types do not name them. That its
source still does is checked when the file is made (`engine_fields.WORDS`)."""


def known(engine: str, *classes: str) -> dict[str, str | None]:
    """Return the fields of classes with their defaults, those of their bases there included."""
    found: dict[str, str | None] = {}
    for name in classes:
        held = KNOWN[engine]["classes"][name]
        bases = [base for base in held["bases"] if base in KNOWN[engine]["classes"]]
        found |= known(engine, *bases) | held["fields"]
    return found


def names_of(*structs: type[msgspec.Struct]) -> set[str]:
    return {name for struct in structs for name in struct.__struct_fields__}


def sglang_body(sampling: Sampling, interval: int = 0) -> dict[str, Any]:
    writer = RequestWriter(lora_path="adapter")
    head = writer.head(
        sampling, rid="a" * 32, routing_key="g", salt=3, replay=ASKED, interval=interval
    )
    body: dict[str, Any] = json.loads(body_bytes(head, PROMPT))
    return body


def vllm_body(route: Route, sampling: Sampling, interval: int = 0) -> dict[str, Any]:
    head = VllmWriter(route, model="m").head(
        sampling, rid="a" * 32, salt=3, replay=ASKED, interval=interval
    )
    body: dict[str, Any] = json.loads(body_bytes(head, PROMPT))
    return body


# --- SGLang --------------------------------------------------------------------------------------
def test_every_key_of_a_request_is_a_field_of_sglangs() -> None:
    body = sglang_body(EVERYTHING)
    assert set(body) <= set(known("sglang", "io_struct.GenerateReqInput"))
    # An unknown one of these is a 400.
    assert set(body["sampling_params"]) <= set(known("sglang", "api_types.SamplingParams"))
    assert len(body["sampling_params"]) == len(fields_of_class(Sampling)) + 3
    # The gate's own types take all but what only the Python server reads.
    assert set(body) - set(known("sglang", "api_types.GenerateRequest")) == {
        "return_routed_experts", "return_indexer_topk",
    }  # fmt: skip


def test_a_request_that_scores_a_sample_is_of_fields_of_sglangs() -> None:
    sample = a_sample(prompt_ids=(1, 2, 3), turns=(((4, 5), ()),))
    body = rescore.request_of(sample)
    assert set(body) <= set(known("sglang", "api_types.GenerateRequest"))
    assert set(body["sampling_params"]) <= set(known("sglang", "api_types.SamplingParams"))


def test_sglangs_defaults_that_would_harm_are_never_left_to_it() -> None:
    params = known("sglang", "api_types.SamplingParams")
    assert {"seed", "max_tokens"} & set(params) == set()
    asked = sglang_body(Sampling())["sampling_params"]
    for name, harm in (
        ("max_new_tokens", "128"), ("skip_special_tokens", "True"), ("no_stop_trim", "False"),
    ):  # fmt: skip
        assert params[name] == harm
        assert name in asked
    assert known("sglang", "io_struct.UpdateWeightVersionReqInput")["abort_all_requests"] == "True"
    assert known("sglang", "io_struct.PauseGenerationReqInput")["mode"] == "'abort'"


def test_every_field_that_is_read_of_sglangs_reply_is_one_of_its_own() -> None:
    meta = set(known("sglang", "api_types.GenerateMetaInfo"))
    assert names_of(reply._Meta, ReplayFields) - meta == OLDER | IN_META
    assert names_of(reply._Reply) <= set(known("sglang", "api_types.GenerateResponse"))
    assert names_of(VersionSpan) == set(known("sglang", "api_types.WeightVersionSpan"))
    ends = known(
        "sglang", "api_types.FinishStop", "api_types.FinishLength", "api_types.FinishAbort"
    )
    assert names_of(reply._FinishReason) - {"type"} <= set(ends)
    assert {"weight_version", "model_path"} <= set(
        known("sglang", "api_types.GetModelInfoResponse")
    )


def test_sglang_serves_every_path_that_it_is_asked_on() -> None:
    assert {
        "/generate", "/abort_request", "/model_info", "/ready", "/pause_generation",
        "/continue_generation", "/update_weight_version",
    } <= set(KNOWN["sglang"]["paths"])  # fmt: skip


def test_a_scripted_reply_of_sglang_has_fields_of_sglangs_alone() -> None:
    body = json.loads(a_reply(prompt_tokens=7, id="x"))
    assert set(body) <= set(known("sglang", "api_types.GenerateResponse"))
    assert set(body["meta_info"]) <= set(known("sglang", "api_types.GenerateMetaInfo"))


# --- vLLM ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("sampling", [Sampling(), EVERYTHING])
def test_every_key_of_a_request_is_a_field_of_vllms(sampling: Sampling) -> None:
    body = vllm_body(Route.GENERATE, sampling)
    assert set(body) <= set(known("vllm", "GenerateRequest"))
    params = known("vllm", "SamplingParams")
    assert set(body["sampling_params"]) <= set(params)
    grammar = body["sampling_params"].get("structured_outputs", {})
    assert set(grammar) <= set(known("vllm", "StructuredOutputsParams"))
    flat = vllm_body(Route.COMPLETIONS, sampling)
    assert set(flat) <= set(known("vllm", "CompletionRequest"))
    assert set(body["sampling_params"]) - {"detokenize"} <= set(flat)


def test_vllms_defaults_that_would_harm_are_never_left_to_it() -> None:
    params = known("vllm", "SamplingParams")
    asked = vllm_body(Route.GENERATE, Sampling())["sampling_params"]
    for name, harm in (
        ("max_tokens", "16"), ("skip_special_tokens", "True"), ("logprobs", "None"),
        ("watermarking", "None"),
    ):  # fmt: skip
        assert params[name] == harm
        assert name in asked
    flat = vllm_body(Route.COMPLETIONS, Sampling())
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        # None is the model's generation_config.json.
        assert known("vllm", "CompletionRequest")[name] == "None"
        assert flat[name] is not None
    assert "output_mode" in known("vllm", "GenerateRequest"), "whose default is ids"
    assert "output_mode" not in vllm_body(Route.GENERATE, Sampling())


def test_every_field_that_is_read_of_vllms_replies_is_one_of_its_own() -> None:
    tokens = set(known("vllm", "GenerateTokensResponse"))
    text = set(known("vllm", "CompletionResponse"))
    assert names_of(vllm_reply._Reply) <= tokens | text
    assert {"request_id", "prompt_token_ids", "choices", "usage"} <= tokens
    assert {"id", "choices", "usage"} <= text
    choices = known("vllm", "GenerateTokensChoice", "CompletionResponseChoice")
    assert names_of(vllm_reply._Choice) <= set(choices)
    log_probs = known("vllm", "GenerateLogProbs", "CompletionLogProbs")
    assert names_of(vllm_reply._LogProbs) <= set(log_probs)
    entry = set(known("vllm", "GenerateLogProbsContent"))
    assert names_of(vllm_reply._Entry) - entry == {"token"}, "of older servers"
    assert names_of(VersionSpan) == set(known("vllm", "WeightVersionSpan"))
    assert names_of(vllm_reply._Usage) <= set(known("vllm", "UsageInfo"))
    assert names_of(vllm_reply._PromptDetails) <= set(known("vllm", "PromptTokenUsageInfo"))
    assert names_of(vllm_reply._Metrics) <= set(known("vllm", "PerRequestMetrics"))
    assert names_of(vllm_reply._Speculation) <= set(known("vllm", "SpeculativeDecodingMetrics"))


def test_vllm_serves_every_path_that_it_is_asked_on() -> None:
    assert {
        *PATHS.values(), "/inference/v1/abort_requests", "/abort_requests", "/is_paused",
        "/weight_info", "/health", "/pause", "/resume", "/update_weight_version",
    } <= set(KNOWN["vllm"]["paths"])  # fmt: skip


def test_scripted_replies_of_vllm_have_fields_of_vllms_alone() -> None:
    tokens = json.loads(a_vllm_reply(prompt_tokens=7))
    assert set(tokens) <= set(known("vllm", "GenerateTokensResponse"))
    assert set(tokens["choices"][0]) <= set(known("vllm", "GenerateTokensChoice"))
    text = json.loads(a_vllm_completion())
    assert set(text) <= set(known("vllm", "CompletionResponse"))
    assert set(text["choices"][0]) <= set(known("vllm", "CompletionResponseChoice"))


# --- streams -------------------------------------------------------------------------------------
def test_every_key_of_a_request_for_a_stream_is_one_of_the_servers() -> None:
    body = sglang_body(EVERYTHING, 16)
    assert (body["stream"], body["sampling_params"]["stream_interval"]) == (True, 16)
    assert set(body) <= set(known("sglang", "io_struct.GenerateReqInput"))
    assert set(body["sampling_params"]) <= set(known("sglang", "api_types.SamplingParams"))
    body = vllm_body(Route.GENERATE, EVERYTHING, 16)
    assert (body["stream"], body["sampling_params"]["stream_interval"]) == (True, 16)
    assert set(body) <= set(known("vllm", "GenerateRequest"))
    assert set(body["sampling_params"]) <= set(known("vllm", "SamplingParams"))
    flat = vllm_body(Route.COMPLETIONS, EVERYTHING, 16)
    assert (flat["stream"], flat["stream_interval"]) == (True, 16)
    assert set(flat) <= set(known("vllm", "CompletionRequest"))
    options = known("vllm", "StreamOptions")
    assert (set(body["stream_options"]), options["include_usage"]) == ({"include_usage"}, "False")
    assert set(flat["stream_options"]) <= set(options)


def test_every_field_that_is_read_of_an_event_is_one_of_the_servers() -> None:
    # SGLang's events are its replies; an error of theirs has no class there.
    assert names_of(stream._Event) - set(known("sglang", "api_types.GenerateResponse")) == {"error"}
    meta = set(known("sglang", "api_types.GenerateMetaInfo"))
    assert names_of(stream._Meta, stream._MetaLogProbs) <= meta
    tokens = set(known("vllm", "GenerateTokensStreamResponse"))
    text = set(known("vllm", "CompletionStreamResponse"))
    assert names_of(vllm_stream._Event) - tokens - text == {"error"}
    assert names_of(vllm_stream._Event) - {"error", "id"} <= tokens
    choices = known("vllm", "GenerateTokensStreamChoice", "CompletionResponseStreamChoice")
    assert names_of(vllm_stream._Choice) <= set(choices)
    log_probs = known("vllm", "GenerateLogProbs", "CompletionLogProbs")
    assert names_of(vllm_stream._LogProbs) <= set(log_probs)
    assert set(known("vllm", "ErrorResponse")) == {"error"}
    assert names_of(streams._Error) <= set(known("vllm", "ErrorInfo"))


def test_what_a_joined_reply_is_read_for_comes_in_the_events_of_it() -> None:
    """But for the experts in streams of completions, for which that route is not streamed."""
    choice = names_of(vllm_reply._Choice)
    tokens, text = known("vllm", "GenerateTokensStreamChoice"), known(
        "vllm", "CompletionResponseStreamChoice"
    )  # fmt: skip
    assert choice - set(tokens) == {"prompt_token_ids"}, "of the event itself there"
    assert choice - set(text) == {"routed_experts"}
    read = names_of(vllm_reply._Reply) - {"id", "request_id"}
    assert read <= set(known("vllm", "GenerateTokensStreamResponse"))
    assert read - set(known("vllm", "CompletionStreamResponse")) == {"prompt_token_ids"}


def test_scripted_events_have_fields_of_the_servers_alone() -> None:
    for event in events_of("sglang", a_reply(prompt_tokens=7, id="x"), [1, 3]):
        assert set(event) <= set(known("sglang", "api_types.GenerateResponse"))
        assert set(event["meta_info"]) <= set(known("sglang", "api_types.GenerateMetaInfo"))
    for raw, reply_class, choice_class in (
        (
            a_vllm_reply(prompt_tokens=7),
            "GenerateTokensStreamResponse",
            "GenerateTokensStreamChoice",
        ),
        (a_vllm_completion(), "CompletionStreamResponse", "CompletionResponseStreamChoice"),
    ):
        for event in events_of("vllm", raw, [1, 3]):
            assert set(event) <= set(known("vllm", reply_class))
            for choice in event["choices"]:
                assert set(choice) <= set(known("vllm", choice_class))


# --- what stands in for them ---------------------------------------------------------------------
def test_the_simulated_engine_takes_the_keys_of_both_and_no_others() -> None:
    from worker.engines.sim.protocol import _SAMPLING_KEYS
    from worker.engines.sim.vllm_request import SAMPLING_KEYS

    assert set(_SAMPLING_KEYS) == set(known("sglang", "api_types.SamplingParams"))
    assert set(known("vllm", "SamplingParams")) == set(SAMPLING_KEYS)
