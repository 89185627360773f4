"""Our requests, and the simulated engine's replies, read by SGLang's own published types.

The types are one file of the wheel `sglang==0.5.23` that imports msgspec alone. It is read out of
the wheel (1.5 MB of 39) and kept in `.cache/contract`; nothing of SGLang is installed. What needs
no type of theirs to be run stands in test_engine_fields.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from rollstream import rescore
from tests.builders import a_sample
from tests.scripted_engine import a_reply
from tests.sim_server import sim_server
from tests.vocabulary_once import tokenizer_of
from worker.engines.protocol.replay import Asked, ReplayShape, RowShape
from worker.engines.protocol.request import RequestWriter, body_bytes
from worker.engines.sim.faults import FaultConfig
from worker.engines.sim.http import port_of, serve
from worker.engines.sim.policy import Policy
from worker.engines.sim.server import SimEngine
from worker.sampling import Sampling
from worker.types import RequestIds

from . import wheels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
    pytest.mark.xdist_group("sglang-types"),
]

VERSION = "0.5.23"
MEMBER = "sglang/api/v1/api_types.py"
CACHE = Path(__file__).parents[2] / ".cache" / "contract" / f"sglang-{VERSION}" / "api_types.py"


def fetch() -> None:
    """Put the types into the cache."""
    try:
        texts, _ = wheels.read_members(wheels.find(f"sglang=={VERSION}"), (MEMBER,))
    except wheels.NoWheelError as error:
        pytest.fail(f"SGLang's types are not in {CACHE.parent}, and {error}", pytrace=False)
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    partial = CACHE.with_suffix(f".{os.getpid()}")
    partial.write_text(texts[MEMBER], encoding="utf-8")
    partial.replace(CACHE)


@pytest.fixture(scope="module")
def sglang() -> ModuleType:
    """SGLang's `api_types`, imported from that one file."""
    if not CACHE.exists():
        fetch()
    spec = importlib.util.spec_from_file_location("sglang_api_types", CACHE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def a_request(sampling: Sampling) -> dict[str, Any]:
    head = RequestWriter().head(sampling, rid="a" * 32, routing_key="g1", salt=3)
    body: dict[str, Any] = json.loads(body_bytes(head, RequestIds([b"1,2", b"3"], 3)))
    return body


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
)


@pytest.mark.parametrize("sampling", [Sampling(), EVERYTHING])
def test_our_request_is_one_that_sglang_takes_and_says_what_we_mean(
    sglang: ModuleType, sampling: Sampling
) -> None:
    body = a_request(sampling)
    read = sglang.GenerateRequest.from_json_value(body)
    assert read.input_ids == [1, 2, 3]
    assert (read.rid, read.routing_key, read.extra_key) == ("a" * 32, "g1", "v3")
    assert (read.return_logprob, read.stream) == (True, False)
    params = read.sampling_params
    for name in ("temperature", "max_new_tokens", "top_p", "min_p", "min_new_tokens"):
        assert getattr(params, name) == getattr(sampling, name)
    assert params.sampling_seed == sampling.seed
    assert params.skip_special_tokens is False
    assert params.no_stop_trim is True
    if sampling is EVERYTHING:
        assert params.top_k == 40
        assert (params.stop, params.stop_token_ids) == (["</s>", "\n\n"], [2])
        penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
        assert penalties == (0.1, 0.1, 1.1)


def test_our_request_for_a_stream_is_one_that_sglang_takes(sglang: ModuleType) -> None:
    head = RequestWriter().head(Sampling(), rid="a" * 32, routing_key="g1", salt=3, interval=16)
    body = json.loads(body_bytes(head, RequestIds([b"1,2", b"3"], 3)))
    read = sglang.GenerateRequest.from_json_value(body)
    assert (read.stream, read.sampling_params.stream_interval) == (True, 16)
    assert set(body) == set(a_request(Sampling()))


@pytest.mark.parametrize("incremental", [False, True])
async def test_simulated_events_pass_sglangs_own_types(
    sglang: ModuleType, vocabulary: Path, incremental: bool
) -> None:
    policy = Policy(tokenizer_of(str(vocabulary)), {})
    async with sim_server(policy, incremental=incremental, version="3") as sim:
        body = a_request(Sampling(max_new_tokens=9)) | {"stream": True}
        answer = await sim.post("/generate", body)
    events = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    assert len(events) == 9
    for number, event in enumerate(events, 1):
        plain = json.loads(event.removeprefix("data: "))
        read = sglang.GenerateResponse.from_json_value(plain)
        assert read.meta_info.completion_tokens == number
        assert len(read.output_ids) == (1 if incremental else number)
        assert (read.meta_info.finish_reason is not None) == (number == 9)
        assert len(read.meta_info.output_token_logprobs) == len(read.output_ids)


def test_request_keys_that_the_types_do_not_name_are_ignored_by_sglang_not_refused(
    sglang: ModuleType,
) -> None:
    known = set(sglang.GenerateRequest.__struct_fields__)
    # Read by the Python server's own dataclass; the published types ignore unknown keys.
    assert set(a_request(Sampling())) - known == {"return_routed_experts", "return_indexer_topk"}


def test_a_request_for_replay_rows_is_one_that_sglang_takes_and_names_where_they_begin(
    sglang: ModuleType,
) -> None:
    asked = Asked(ReplayShape(RowShape(48, 8), RowShape(61, 2048)), 12)
    head = RequestWriter().head(Sampling(), rid="a" * 32, routing_key="g1", replay=asked)
    body = json.loads(body_bytes(head, RequestIds([b"1,2", b"3"], 3, 12)))
    assert sglang.GenerateRequest.from_json_value(body).input_ids == [1, 2, 3]
    assert set(body) - set(a_request(Sampling())) == {"routed_experts_start_len"}


def test_a_request_that_scores_a_sample_is_one_that_sglang_takes_and_samples_nothing(
    sglang: ModuleType,
) -> None:
    sample = a_sample(prompt_ids=(1, 2, 3), turns=(((4, 5), ()),))
    body = rescore.request_of(sample)
    assert set(body) <= set(sglang.GenerateRequest.__struct_fields__)
    read = sglang.GenerateRequest.from_json_value(body)
    assert read.input_ids == [1, 2, 3, 4, 5]
    assert (read.return_logprob, read.logprob_start_len, read.stream) == (True, 2, False)
    assert (read.sampling_params.max_new_tokens, read.sampling_params.temperature) == (0, 0)


def test_sampling_keys_that_sglang_refuses_are_refused_by_the_simulated_engine_too(
    sglang: ModuleType,
) -> None:
    from worker.engines.sim.protocol import _SAMPLING_KEYS

    assert set(_SAMPLING_KEYS) == set(sglang.SamplingParams.__struct_fields__)
    for key in ("seed", "max_tokens"):
        with pytest.raises(sglang.JsonContractError, match=f"unknown field `{key}`"):
            sglang.SamplingParams.from_json_value({key: 1})


def check_reply(sglang: ModuleType, raw: bytes) -> Any:
    """Read a reply by the published types; what is written back is what was read."""
    plain = json.loads(raw)
    read = sglang.GenerateResponse.from_json_value(plain)
    again = read.to_json_value()
    for name in ("output_ids", "text"):
        assert again[name] == plain[name]
    for name in ("id", "prompt_tokens", "completion_tokens", "weight_version", "weight_versions"):
        assert again["meta_info"][name] == plain["meta_info"][name]
    assert (
        again["meta_info"]["output_token_logprobs"] == plain["meta_info"]["output_token_logprobs"]
    )
    assert (
        again["meta_info"]["finish_reason"]["type"] == plain["meta_info"]["finish_reason"]["type"]
    )
    return read


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({}, "FinishStop"),
        ({"length": 1.0}, "FinishLength"),
        ({"abort": 1.0}, "FinishAbort"),
        ({"abort_code": 1.0}, "FinishAbort"),
        ({"nan": 1.0}, "FinishStop"),
        ({"no_end": 1.0}, "FinishStop"),
        ({"version_change": 1.0}, "FinishStop"),
    ],
)
async def test_simulated_replies_pass_sglangs_own_types(
    sglang: ModuleType, vocabulary: Path, fault: dict[str, Any], kind: str
) -> None:
    policy = Policy(tokenizer_of(str(vocabulary)), {})
    faults = FaultConfig(latency_median_s=0.0, token_s=0.0, **fault)
    engine = SimEngine(policy, faults=faults, weight_version="3")
    server = await serve(engine.handle, "127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port_of(server)}") as client:
            for seed in range(3):
                body = a_request(Sampling(seed=seed)) | {"rid": f"{seed:032x}"}
                answer = await client.post("/generate", json=body)
                read = check_reply(sglang, answer.content)
                assert type(read.meta_info.finish_reason).__name__ == kind
                assert len(read.meta_info.output_token_logprobs) == len(read.output_ids)
            info = sglang.GetModelInfoResponse.from_json_value(
                (await client.get("/model_info")).json()
            )
            assert info.weight_version == "3"
            aborted = await client.post("/abort_request", json={"rid": "x"})
            assert sglang.AbortResponse.from_json_value(aborted.json()).success
    finally:
        server.close()
        await asyncio.sleep(0)


def test_replies_of_the_scripted_engine_are_sglangs_too(sglang: ModuleType) -> None:
    spans = [{"version": "default", "start": 0, "end": 5}]
    raw = a_reply(id="f" * 32, prompt_tokens=7, weight_versions=spans)
    assert check_reply(sglang, raw).output_ids == [59, 79075, 90, 23, 92]


def test_types_that_can_be_neither_found_nor_fetched_fail_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(globals(), "CACHE", tmp_path / "types" / "api_types.py")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(
        pytest.fail.Exception, match="could not be found; run this again with access"
    ):
        fetch()
