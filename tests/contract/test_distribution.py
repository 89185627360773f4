"""What a reply is drawn from: sent as it was asked for, and recorded with every call.

Both protocols over HTTP: scripted bytes where a parameter is the case, the engine process where
log-probs are.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import EngineFault
from rollstream.sample import Sample
from tests.contract.rolls import rolled
from tests.contract.sim_process import KINDS, SimProcess, pool_of
from tests.generate_stage import Says, given
from tests.toy import A2, CLOSE, HI, toy_renderer
from tests.unit.test_parameters import OFF
from worker.engines.sim.policy import Policy
from worker.engines.sim.script import PolicyConfig
from worker.generate import multi_turn
from worker.sampling import Sampling
from worker.tools import load_tools

pytestmark = pytest.mark.xdist_group("contract-sim")
QUESTION = [{"role": "user", "content": "How much is 12 and 30?"}]
VLLM_WORDS: dict[str, Any] = {
    "json_schema": ("structured_outputs", {"json": '{"type":"object"}'}),
    "regex": ("structured_outputs", {"regex": "[0-9]+"}),
    "ebnf": ("structured_outputs", {"grammar": "x"}),
}
"""What vLLM says otherwise, and is not the same under another name."""
SENT = {name: value for name, value in OFF.items() if name != "json_schema"} | {
    "json_schema": '{"type":"object"}', "logit_bias": {"17": -100.0},
}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
async def test_a_permitted_parameter_is_sent_in_the_engines_words_and_recorded_with_its_call(
    protocol: str, name: str
) -> None:
    sampling = Sampling(max_new_tokens=8).with_overrides({name: OFF[name]})
    run = await rolled(toy_renderer(), Says(A2, matched=CLOSE), prompt=HI, sampling=sampling)
    (body,), (call,) = run.requests, run.sample.calls
    word, value = name, SENT[name]
    if protocol == "vllm" and name in VLLM_WORDS:
        word, value = VLLM_WORDS[name]
    assert body["sampling_params"][word] == value
    assert call.sampling[name] == SENT[name]
    plain = await rolled(toy_renderer(), Says(A2, matched=CLOSE), prompt=HI)
    if name != "temperature":
        assert plain.requests[0]["sampling_params"].get(word) != value


@pytest.mark.parametrize(("room", "asked"), [(8, 5), (5, 5), (4, 4), (1, 1)])
async def test_the_least_number_of_tokens_is_never_above_the_room(
    protocol: str, room: int, asked: int
) -> None:
    del protocol
    run = await rolled(
        toy_renderer(), Says([1104] * room, "length"), prompt=HI,
        sampling=Sampling(max_new_tokens=64, min_new_tokens=5), limits={"max_response": room},
    )  # fmt: skip
    params = run.requests[0]["sampling_params"]
    assert (params["max_new_tokens"], params["min_new_tokens"]) == (room, asked)
    assert run.sample.calls[0].sampling["min_new_tokens"] == asked


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.25])
@pytest.mark.parametrize("kind", KINDS)
async def test_log_probs_are_of_the_temperature_that_the_row_asked_for(
    sim: SimProcess, qwen3: Any, vocabulary: Any, kind: str, temperature: float
) -> None:
    sampling = Sampling(max_new_tokens=512).with_overrides({"temperature": temperature})
    async with pool_of(kind, sim.url, check_logprobs=True) as pool:
        stage = given(pool, qwen3, QUESTION, sampling=sampling, tools=load_tools(("calculator",)))
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert sample.rollout_log_probs is not None
    config = PolicyConfig(**sim.get()["policy"])
    policy = Policy.load(str(vocabulary), {}, config)
    mode = {"sglang": "temperature", "vllm": "processed"}[kind]
    assert len(sample.calls) == 2
    for call in sample.calls:
        assert (call.sampling["temperature"], call.logprob_mode) == (temperature, mode)
        ids, log_probs = policy.expected(sample.tokens[: call.start], call.sampling)
        at = slice(call.start - sample.prompt_length, call.end - sample.prompt_length)
        assert sample.tokens[call.start : call.end].tolist() == ids.tolist()
        assert sample.rollout_log_probs[at].tobytes() == log_probs.tobytes()
    assert sample.logprob_mode == mode


@pytest.mark.parametrize("kind", KINDS)
async def test_what_an_engine_cannot_honour_is_a_refusal_and_nothing_hangs(
    sim: SimProcess, qwen3: Any, kind: str
) -> None:
    async with pool_of(kind, sim.url, retries=3) as pool:
        await pool.probe()  # vLLM is asked once whether it has the route, with a request of nothing
        before = sim.reached()
        stage = given(pool, qwen3, QUESTION, sampling=Sampling(regex="[0-9]+"))
        with pytest.raises(EngineFault) as caught:
            await multi_turn(stage)
    assert (caught.value.detail, caught.value.retryable) == ("refused", False)
    assert sim.reached() == before + 1
