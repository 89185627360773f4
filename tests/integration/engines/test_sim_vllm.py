"""The simulated engine in vLLM's protocol, over HTTP: ids, aborts, pauses, versions, refusals."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sim_server import SimServer, eventually, sim_server
from tests.vocabulary_once import tokenizer_of
from worker.engines.sim.numbers import ReplayConfig, routed_experts
from worker.engines.sim.policy import Policy, expected_log_probs, sampled_by
from worker.engines.sim.server import LogProbsMode, Protocols

PROMPT = [1, 2, 3]
ONE_MINUTE = {"latency_s": 60.0}


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {})


def choice_of(reply: Any) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def log_probs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


async def test_reply_is_what_the_pure_function_says_for_seed_and_budget(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        for seed in range(5):
            reply = await sim.ask("vllm", PROMPT, seed=seed, num=30, rid=f"r{seed}")
            choice = choice_of(reply)
            ids, log_probs = policy.expected(PROMPT, {"seed": seed, "max_new_tokens": 30})
            assert choice["token_ids"] == ids.tolist()
            entries = choice["logprobs"]["content"]
            assert [entry["token_id"] for entry in entries] == ids.tolist()
            assert log_probs_of(choice) == log_probs.tolist()
            assert [entry["top_logprobs"][0]["token_id"] for entry in entries] == ids.tolist()
            assert reply.json()["request_id"] == f"generate-tokens-r{seed}"
            usage = reply.json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, len(ids))


async def test_reason_of_a_stop_is_null_at_the_models_own_end_and_names_what_was_asked_for(
    policy: Policy,
) -> None:
    async with sim_server(policy) as sim:
        whole = choice_of(await sim.ask("vllm", PROMPT))
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", None)
        token = whole["token_ids"][5]
        stopped = choice_of(await sim.ask("vllm", PROMPT, stop_token_ids=[token]))
        assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)
        own = choice_of(await sim.ask("vllm", PROMPT, stop_token_ids=[policy.vocabulary.im_end]))
        assert (own["stop_reason"], own["token_ids"]) == (None, whole["token_ids"])
        text = policy.vocabulary.decode(np.array(whole["token_ids"], dtype=np.int32))[10:16]
        named = choice_of(await sim.ask("vllm", PROMPT, stop=[text]))
        assert (named["finish_reason"], named["stop_reason"]) == ("stop", text)
        cut = choice_of(await sim.ask("vllm", PROMPT, num=4))
        assert (cut["finish_reason"], cut["stop_reason"]) == ("length", None)


async def test_abort_goes_by_the_whole_prefixed_id_only_and_is_answered_first(
    policy: Policy,
) -> None:
    async with sim_server(policy, **ONE_MINUTE) as sim:
        tasks = [
            asyncio.create_task(sim.ask("vllm", PROMPT, rid=rid)) for rid in ("a", "a", "ab", "b")
        ]
        await sim.flying(4)  # two may have one id
        sim.now_s += 30.0
        path = "/inference/v1/abort_requests"
        for ids in (["a"], ["generate-tokens-"], []):
            answer = await sim.post(path, {"request_ids": ids})
            assert (answer.status_code, answer.content) == (200, b"")
        assert len(sim.engine.core.flights) == 4
        assert sim.engine.counts["aborts_of_nothing"] == 3
        await sim.post(path, {"request_ids": ["generate-tokens-a"]})
        await sim.flying(2)
        whole, _ = policy.expected(PROMPT, {"seed": 1, "max_new_tokens": 4096})
        for task in tasks[:2]:
            choice = choice_of(await task)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
            assert choice["token_ids"] == whole[: len(whole) // 2].tolist()
        assert (await sim.post(path, {})).status_code == 400
        everything = await sim.post("/abort_requests", {"request_ids": []})
        assert everything.json() == {"status": "aborted", "aborted": 2}
        assert [choice_of(await task)["finish_reason"] for task in tasks[2:]] == ["abort"] * 2


async def test_abort_of_a_server_has_not_happened_when_it_is_answered(policy: Policy) -> None:
    async with sim_server(policy, **ONE_MINUTE) as sim:
        task = asyncio.create_task(sim.ask("vllm", PROMPT, rid="a"))
        await sim.flying(1)
        at_answer: list[int] = []

        class Asked:
            method, path = "POST", "/inference/v1/abort_requests"
            body = b'{"request_ids":["generate-tokens-a"]}'

            def answer(self, *_: Any) -> None:
                at_answer.append(len(sim.engine.core.flights))

        sim.engine.handle(Asked())  # type: ignore[arg-type]  # as much as that path asks of one
        assert (at_answer, len(sim.engine.core.flights)) == ([1], 1)
        await sim.flying(0)
        await task


async def test_id_of_the_header_wins_over_the_bodys(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        body = {"token_ids": PROMPT, "request_id": "x", "sampling_params": {"max_tokens": 1}}
        reply = await sim.client.post(
            "/inference/v1/generate", json=body, headers={"X-Request-Id": "h"}
        )
        assert reply.json()["request_id"] == "generate-tokens-h"
        assert reply.json()["choices"][0]["logprobs"] is None
        assert reply.json()["prompt_token_ids"] is None


@pytest.mark.parametrize("mode", ["", "?mode=abort"])
async def test_pause_abort_ends_what_flies_and_rejects_what_is_new_until_resume(
    policy: Policy, mode: str
) -> None:
    async with sim_server(policy, **ONE_MINUTE) as sim:
        before = asyncio.create_task(sim.ask("vllm", PROMPT))
        await sim.flying(1)
        assert (await sim.post(f"/pause{mode}")).json() == {"status": "paused"}
        assert choice_of(await before)["finish_reason"] == "abort"
        during = await sim.ask("vllm", PROMPT)
        assert during.status_code == 503
        error = during.json()["error"]
        assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
        assert "Generation is paused" in error["message"]
        assert await sim.get("/is_paused") == {"is_paused": True}
        await sim.post("/resume")
        assert await sim.get("/is_paused") == {"is_paused": False}
        after = asyncio.create_task(sim.ask("vllm", PROMPT))
        await sim.flying(1)
        await sim.post("/abort_requests")
        assert choice_of(await after)["token_ids"] == []


async def test_pause_wait_is_answered_when_what_flies_has_ended(policy: Policy) -> None:
    async with sim_server(policy, **ONE_MINUTE) as sim:
        flying = asyncio.create_task(sim.ask("vllm", PROMPT))
        other = asyncio.create_task(sim.ask("sglang", PROMPT))
        await sim.flying(2)
        pausing = asyncio.create_task(sim.post("/pause?mode=wait"))
        await eventually(lambda: sim.engine.core.paused is not None)
        assert (await sim.ask("vllm", PROMPT)).status_code == 503
        for last in (False, True):
            assert not pausing.done()
            key, flight = next(iter(sim.engine.core.flights.items()))
            sim.engine.core._land(key, flight)
            await (other if last else flying)
        assert choice_of(await flying)["finish_reason"] == "stop"
        assert (await pausing).json() == {"status": "paused"}


async def test_pause_keep_queues_what_is_new_and_goes_on_with_what_flies(policy: Policy) -> None:
    async with sim_server(policy, **ONE_MINUTE) as sim:
        before = asyncio.create_task(sim.ask("vllm", PROMPT, rid="before"))
        await sim.flying(1)
        sim.now_s += 60.0  # whole, but for its timer
        await sim.post("/pause?mode=keep")
        during = asyncio.create_task(sim.ask("vllm", PROMPT, rid="during"))
        await sim.flying(2)
        sim.now_s += 600.0  # a pause is no time
        await sim.post("/update_weight_version", {"new_version": "2", "abort_all_requests": False})
        assert not before.done()
        await sim.post("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-during"]})
        queued = choice_of(await during)  # an abort is not held up by the pause
        assert (queued["finish_reason"], queued["token_ids"]) == ("abort", [])
        assert queued["weight_versions"] == []
        await sim.post("/resume")
        kept = choice_of(await before)
        assert kept["finish_reason"] == "stop"
        assert [span["version"] for span in kept["weight_versions"]] == ["default"]


async def test_spans_and_versioned_log_probs_agree_on_which_weights_sampled_a_token(
    policy: Policy,
) -> None:
    async with sim_server(
        policy, **ONE_MINUTE, versioned=True, protocols=Protocols.VLLM, version="4"
    ) as sim:
        task = asyncio.create_task(sim.ask("vllm", PROMPT, rid="r"))
        await sim.flying(1)
        sim.now_s += 20.0
        answer = await sim.post("/update_weight_version", {"new_version": "5"})
        assert answer.json() == {"success": True, "new_version": "5"}
        assert not task.done()  # vLLM's call aborts nothing
        sim.now_s += 20.0
        await sim.post("/finish_weight_update", {"weight_version": "6"})
        assert await sim.get("/weight_info") == {"weight_version": "6"}
        sim.now_s += 10.0
        await sim.post("/abort_requests")
        choice = choice_of(await task)
    ids, spans = choice["token_ids"], choice["weight_versions"]
    assert [span["version"] for span in spans] == ["4", "5", "6"]
    labels = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    assert len(labels) == len(ids)
    said = np.array(log_probs_of(choice), dtype=np.float32)
    assert sampled_by([*PROMPT, *ids], 3, said, ["3", "4", "5", "6", "7"]) == labels


@pytest.mark.parametrize(
    ("mode", "sglang_t", "vllm_t"),
    [
        (LogProbsMode.AUTO, 0.7, 1.0),
        (LogProbsMode.TEMPERATURE, 0.7, 0.7),
        (LogProbsMode.PROCESSED, 0.7, 0.7),
        (LogProbsMode.RAW, 1.0, 1.0),
    ],
)
@pytest.mark.parametrize("versioned", [False, True])
async def test_log_probs_are_of_the_temperature_that_the_mode_says(
    policy: Policy, mode: LogProbsMode, sglang_t: float, vllm_t: float, versioned: bool
) -> None:
    async with sim_server(policy, logprobs_mode=mode, versioned=versioned) as sim:
        theirs = choice_of(await sim.ask("vllm", PROMPT, num=9, temperature=0.7))
        reply = (await sim.ask("sglang", PROMPT, num=9, temperature=0.7)).json()
    ours = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    ids = [*PROMPT, *reply["output_ids"]]
    version = "default" if versioned else None
    for said, temperature in ((ours, sglang_t), (log_probs_of(theirs), vllm_t)):
        expected = expected_log_probs(ids, 3, temperature=temperature, version=version)
        assert said == expected.tolist()


async def test_completions_answer_the_same_tokens_with_their_prompt(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        body = {
            "prompt": PROMPT,
            "max_tokens": 9,
            "seed": 1,
            "logprobs": 1,
            "return_token_ids": True,
            "request_id": "c",
        }
        reply = (await sim.post("/v1/completions", body)).json()
        ids, log_probs = policy.expected(PROMPT, {"seed": 1, "max_new_tokens": 9})
        choice = reply["choices"][0]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids.tolist(), PROMPT)
        assert choice["logprobs"]["token_logprobs"] == log_probs.tolist()
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert (reply["id"], choice["finish_reason"]) == ("cmpl-c", "length")
        short = (await sim.post("/v1/completions", {"prompt": [PROMPT]})).json()["choices"][0]
        assert (short["token_ids"], short["logprobs"]) == (None, None)
        assert sim.engine.counts["finish_length"] == 2


async def test_completion_is_aborted_by_its_own_id(policy: Policy) -> None:
    async with sim_server(policy, **ONE_MINUTE) as sim:
        task = asyncio.create_task(
            sim.post("/v1/completions", {"prompt": PROMPT, "request_id": "c"})
        )
        await sim.flying(1)
        await sim.post("/inference/v1/abort_requests", {"request_ids": ["cmpl-c-0"]})
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"token_ids": []}, 400, "at least 1 item"),
        ({"token_ids": [-1]}, 400, "must not contain negative"),
        ({"token_ids": "x"}, 400, "validation error"),
        ({"token_ids": [10**6]}, 400, "out of vocabulary"),
        ({"token_ids": [1] * 65}, 400, "longer than the maximum model length of 64"),
        ({"token_ids": [1] * 64}, 400, "plus the number of requested output tokens"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"cache_salt": "x" * 1025}, 400, "cache_salt"),
        ({"priority": 1}, 400, "Priority scheduling is not enabled"),
        ({"model": "other"}, 404, "The model `other` does not exist"),
        ({"output_mode": "text"}, 400, "requires a tokenizer"),
        ({"sampling_params": {"stream_interval": 0}}, 400, "stream_interval must be at least 1"),
        ({"sampling_params": {"max_tokens": 0}}, 400, "max_tokens must be at least 1, got 0"),
        ({"sampling_params": {"max_tokens": "9"}}, 400, "valid integer"),
        ({"sampling_params": {"temperature": 3}}, 400, "temperature must be in [0, 2]"),
        ({"sampling_params": {"top_p": 0}}, 400, "top_p must be in (0, 1]"),
        ({"sampling_params": {"n": 2}}, 400, "cannot honour n"),
        ({"sampling_params": {"stop": ["a"], "detokenize": False}}, 400, "detokenize is True"),
    ],
)
async def test_request_that_vllm_or_a_script_cannot_serve_is_refused_in_vllms_shape(
    policy: Policy, changes: dict[str, Any], status: int, text: str
) -> None:
    body = {"token_ids": PROMPT, "model": "m", "sampling_params": {}, **changes}
    async with sim_server(policy, context_tokens=64, model="m") as sim:
        answer = await sim.post("/inference/v1/generate", body)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status
        assert text in error["message"]
        assert sim.engine.counts["requests"] == 0


async def test_body_that_is_not_declared_as_json_is_refused(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        raw = b'{"token_ids":[1],"sampling_params":{}}'
        answer = await sim.client.post("/inference/v1/generate", content=raw)
        assert answer.status_code == 400
        assert "Unsupported Media Type" in answer.json()["error"]["message"]


async def test_unknown_sampling_keys_are_ignored_as_vllm_does_and_counted(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        plain = choice_of(await sim.ask("vllm", PROMPT, num=5))
        theirs = choice_of(await sim.ask("vllm", PROMPT, num=5, sampling_seed=9, max_new_tokens=1))
        assert theirs == plain
        assert sim.engine.counts["ignored_sampling_keys"] == 2


async def test_budget_beyond_the_context_is_cut_and_a_missing_one_is_what_fits(
    policy: Policy,
) -> None:
    async with sim_server(policy, context_tokens=10) as sim:
        for sampling in ({"max_tokens": 4096}, {}):
            body = {"token_ids": PROMPT, "sampling_params": sampling}
            choice = choice_of(await sim.post("/inference/v1/generate", body))
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (7, "length")


async def test_routed_experts_are_npy_of_the_narrowest_dtype_from_the_row_asked_for(
    policy: Policy,
) -> None:
    async with sim_server(policy, layers=3) as sim:
        for start in (0, 2):
            choice = choice_of(
                await sim.ask("vllm", PROMPT, num=5, routed_experts_prompt_start=start)
            )
            rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
            fed = np.array([*PROMPT, *choice["token_ids"]], dtype=np.int32)
            assert rows.dtype == np.uint8
            assert np.array_equal(rows, routed_experts(fed, start, ReplayConfig(3)))


async def test_control_calls_are_404_outside_dev_mode_and_generation_is_not(
    policy: Policy,
) -> None:
    async with sim_server(policy, vllm_dev=False, protocols=Protocols.VLLM) as sim:
        for path in ("/pause", "/resume", "/update_weight_version", "/abort_requests"):
            assert (await sim.post(path)).status_code == 404
        for path in ("/is_paused", "/weight_info", "/model_info", "/ready"):
            assert (await sim.client.get(path)).status_code == 404
        assert (await sim.client.get("/health")).status_code == 200
        assert (await sim.get("/v1/models"))["data"][0]["id"] == "simulated"
        choice_of(await sim.ask("vllm", PROMPT, num=1))


async def test_protocol_that_is_not_served_is_404(policy: Policy) -> None:
    async with sim_server(policy, protocols=Protocols.SGLANG) as sim:
        assert (await sim.ask("vllm", PROMPT)).status_code == 404
        assert (await sim.ask("sglang", PROMPT, num=1)).status_code == 200
    async with sim_server(policy, protocols=Protocols.VLLM) as sim:
        assert (await sim.ask("sglang", PROMPT)).status_code == 404


async def test_older_servers_name_ids_in_text_and_say_no_versions(policy: Policy) -> None:
    async with sim_server(policy, vllm_old=True) as sim:
        reply = await sim.ask("vllm", PROMPT, num=3)
        choice = choice_of(reply)
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert tokens == [f"token_id:{token}" for token in choice["token_ids"]]
        assert "weight_versions" not in choice
        assert "output_mode" not in reply.json()


async def test_both_protocols_meet_one_engine(policy: Policy) -> None:
    async with sim_server(policy, **ONE_MINUTE) as sim:
        one = asyncio.create_task(sim.ask("vllm", PROMPT))
        other = asyncio.create_task(sim.ask("sglang", PROMPT))
        await sim.flying(2)
        await sim.post("/update_weight_version", {"new_version": "3"})  # SGLang's: aborts
        assert choice_of(await one)["finish_reason"] == "abort"
        assert (await other).json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert await sim.get("/weight_info") == {"weight_version": "3"}
        assert (await sim.get("/model_info"))["weight_version"] == "3"
        await in_a_keep_pause(sim)


async def in_a_keep_pause(sim: SimServer) -> None:
    await sim.post("/pause?mode=keep")
    assert (await sim.client.get("/ready")).status_code == 503
    held = asyncio.create_task(sim.ask("sglang", PROMPT))
    await eventually(lambda: len(sim.engine.sglang.held) == 1)
    await sim.post("/resume")
    await sim.flying(1)
    await sim.post("/abort_request", {"abort_all": True})
    assert (await held).status_code == 200
