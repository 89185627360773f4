"""The simulated engine's replies and paths against what SGLang's and vLLM's own source names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sim_server import sim_server
from tests.vocabulary_once import tokenizer_of
from worker.engines.sim.policy import Policy
from worker.engines.sim.server import Protocols

from .engine_fields import load

KNOWN = load()
VLLM = KNOWN["vllm"]["classes"]
PROMPT = [20, 21, 22]
NOT_SENT = {"completion_tokens_details", "field_names"}
"""Of `UsageInfo`: left out where there is nothing, and a class variable."""
ELSEWHERE = {"/v1/models"}
"""A path of vLLM whose file the list of paths does not read."""


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {})


def fields_of(name: str) -> set[str]:
    bases = [base for base in VLLM[name]["bases"] if base in VLLM]
    return set(VLLM[name]["fields"]).union(*map(fields_of, bases))


def same(reply: dict[str, Any], name: str) -> None:
    assert set(reply) == fields_of(name) - NOT_SENT, name


@pytest.mark.parametrize("damage", [None, {"kind": "abort", "after": 2}])
async def test_replies_have_the_fields_of_vllms_classes_and_all_of_them(
    policy: Policy, damage: Any
) -> None:
    async with sim_server(policy, layers=2) as sim:
        await sim.post("/sim/next", {"damage": [damage, damage]})
        reply = (await sim.ask("vllm", PROMPT, num=5)).json()
        body = {"prompt": PROMPT, "logprobs": 1, "max_tokens": 5, "return_weight_versions": True}
        completion = (await sim.post("/v1/completions", body)).json()
    same(reply, "GenerateTokensResponse")
    same(reply["choices"][0], "GenerateTokensChoice")
    same(reply["choices"][0]["logprobs"]["content"][0], "GenerateLogProbsContent")
    same(reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0], "GenerateLogProb")
    same(reply["choices"][0]["weight_versions"][0], "WeightVersionSpan")
    same(reply["usage"], "UsageInfo")
    same(completion, "CompletionResponse")
    same(completion["choices"][0], "CompletionResponseChoice")
    same(completion["choices"][0]["logprobs"], "CompletionLogProbs")


def events_in(answer: Any) -> list[dict[str, Any]]:
    parts = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("damage", [None, {"kind": "abort", "after": 2}])
async def test_events_have_the_fields_of_vllms_stream_classes_and_all_of_them(
    policy: Policy, damage: Any
) -> None:
    counts = {"stream": True, "stream_options": {"include_usage": True}}
    async with sim_server(policy, layers=2) as sim:
        await sim.post("/sim/next", {"damage": [damage, damage]})
        sampling = {"max_tokens": 5, "seed": 1, "logprobs": 1}
        body = {"token_ids": PROMPT, "sampling_params": sampling, **counts}
        *told, usage = events_in(await sim.post("/inference/v1/generate", body))
        body = {
            "prompt": PROMPT,
            "logprobs": 1,
            "max_tokens": 5,
            "return_token_ids": True,
            **counts,
        }
        *texts, text_usage = events_in(await sim.post("/v1/completions", body))
    assert (len(told), len(texts)) == ((2, 2) if damage else (5, 5))
    for event in told:
        # Left out where they are nothing, as vLLM does (`exclude`).
        left_out = {"prompt_token_ids", "mm_placeholders", "metrics"}
        assert set(event) == fields_of("GenerateTokensStreamResponse") - left_out
        same(event["choices"][0], "GenerateTokensStreamChoice")
        for entry in event["choices"][0]["logprobs"]["content"]:
            same(entry, "GenerateLogProbsContent")
    for event in texts:
        # What was never set is left out (`exclude_unset`).
        unset = {"usage", "system_fingerprint", "metrics"}
        assert set(event) == fields_of("CompletionStreamResponse") - unset
        same(event["choices"][0], "CompletionResponseStreamChoice")
    assert [event["choices"][0]["weight_versions"] is not None for event in told] == [
        *[False] * (len(told) - 1),
        True,
    ]
    assert set(usage) <= fields_of("GenerateTokensStreamResponse")
    assert set(text_usage) <= fields_of("CompletionStreamResponse")
    assert usage["choices"] == text_usage["choices"] == []
    assert set(usage["usage"]) <= fields_of("UsageInfo")


@pytest.mark.parametrize(("kind", "more"), [(Protocols.SGLANG, set()), (Protocols.VLLM, ELSEWHERE)])
async def test_every_path_that_is_served_is_one_of_the_servers(
    policy: Policy, kind: Protocols, more: set[str]
) -> None:
    async with sim_server(policy, protocols=kind) as sim:
        served = {path for path in sim.engine._routes if not path.startswith("/sim")}
    assert served - more <= set(KNOWN[kind.value]["paths"])
    assert more <= served
