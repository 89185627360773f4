"""The simulated engine over real HTTP, by the client that workers use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.devserver import die_with_parent
from tests.vocabulary_once import tokenizer_of
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.sim.faults import NAMED, Fault, FaultConfig, FaultDice
from worker.engines.sim.http import port_of, serve
from worker.engines.sim.policy import Policy
from worker.engines.sim.server import SimEngine
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

ROOT = Path(__file__).parents[3]
QUESTION = "What is 3 + 4?"


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {QUESTION: "7"})


@pytest.fixture(scope="module")
def prompt(policy: Policy) -> list[int]:
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    return policy.vocabulary.encode_reply(text).tolist()[:-1]


async def wait_until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(45):
        while not true():
            await asyncio.sleep(0.002)


class Running:
    """A simulated engine, a pool on it, and a plain client for the control calls."""

    def __init__(self, engine: SimEngine, url: str, pool: EnginePool, prompt: list[int]) -> None:
        self.engine, self.url, self.pool, self.prompt = engine, url, pool, prompt
        self.now_s = 0.0
        engine.core.clock = lambda: self.now_s

    async def ask(
        self, seed: int, *, prompt: list[int] | None = None, version: int = 0, **changes: Any
    ) -> Completion:
        ids = prompt or self.prompt
        pieces = RequestIds([",".join(map(str, ids)).encode()], len(ids))
        sampling = Sampling(**{"max_new_tokens": 4096, "seed": seed, **changes})
        return await self.pool.generate(pieces, sampling, routing_key="g", version=version)

    async def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.post(self.url + path, json=body or {})

    async def flying(self, num: int) -> None:
        await wait_until(lambda: len(self.engine.core.flights) == num)

    async def held(self, num: int) -> None:
        await wait_until(lambda: len(self.engine.sglang.held) == num)


@contextlib.asynccontextmanager
async def running(
    policy: Policy,
    prompt: list[int],
    *,
    retries: int = 0,
    context_tokens: int = 32768,
    version: str = "default",
    **faults: float,
) -> AsyncIterator[Running]:
    config = FaultConfig(**{"latency_median_s": 0.0, "token_s": 0.0, **faults})
    engine = SimEngine(policy, faults=config, context_tokens=context_tokens, weight_version=version)
    server = await serve(engine.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port_of(server)}"
    bounds = RetryPolicy(max_retries=retries, backoff_s=0.001, backoff_max_s=0.01, retry_budget=1.0)
    pool = EnginePool([url], max_token_id=policy.vocabulary.size - 1, policy=bounds)
    try:
        yield Running(engine, url, pool, prompt)
    finally:
        await pool.aclose()
        server.close()


async def test_reply_over_http_is_what_the_pure_function_says(
    policy: Policy, prompt: list[int]
) -> None:
    async with running(policy, prompt) as sim:
        for seed in range(20):
            got = await sim.ask(seed)
            ids, log_probs = policy.expected(
                prompt, Sampling(seed=seed, max_new_tokens=4096).to_dict()
            )
            assert np.array_equal(got.ids, ids)
            assert got.log_probs.tobytes() == log_probs.tobytes()
            assert (got.finish, got.matched) == (Finish.STOP, policy.vocabulary.im_end)


async def test_aborted_call_resumed_gives_the_uncut_text(policy: Policy, prompt: list[int]) -> None:
    async with running(policy, prompt, latency_median_s=60.0, latency_sigma=0.0) as sim:
        whole, _ = policy.expected(prompt, {"seed": 3, "max_new_tokens": 4096})
        task = asyncio.create_task(sim.ask(3))
        await sim.flying(1)
        sim.now_s += 30.0
        await sim.post("/abort_request", {"abort_all": True})
        part = await task
        assert part.finish is Finish.ABORT
        assert len(part.ids) == len(whole) // 2
    async with running(policy, prompt) as sim:
        rest = await sim.ask(3, prompt=[*prompt, *part.ids.tolist()])
        assert np.array_equal(np.concatenate([part.ids, rest.ids]), whole)


async def test_abort_reaches_requests_by_prefix_and_an_empty_rid_reaches_none(
    policy: Policy, prompt: list[int]
) -> None:
    async with running(policy, prompt, latency_median_s=30.0) as sim:
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 9},
            "return_logprob": True,
        }
        tasks = [
            asyncio.create_task(sim.post("/generate", body | {"rid": rid}))
            for rid in ("aa1", "aa2", "b")
        ]
        await sim.flying(3)
        await sim.post("/abort_request", {"rid": ""})
        await sim.flying(3)
        await sim.post("/abort_request", {"rid": "aa"})
        await sim.flying(1)
        replies = [(await task).json() for task in tasks[:2]]
        assert [r["meta_info"]["finish_reason"]["type"] for r in replies] == ["abort"] * 2
        assert [r["meta_info"]["id"] for r in replies] == ["aa1", "aa2"]
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
        await sim.flying(0)  # a client that left is forgotten


@pytest.mark.parametrize("fault", [f for f in NAMED if f not in (Fault.RESET, Fault.UNAVAILABLE)])
async def test_fault_changes_only_where_a_reply_ends(
    policy: Policy, prompt: list[int], fault: Fault
) -> None:
    name = {Fault.UNAVAILABLE: "unavailable"}.get(fault, fault.value)
    async with running(policy, prompt, version="5", **{name: 1.0, "slow_factor": 1.0}) as sim:
        for seed in range(10):
            body = {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 4096, "sampling_seed": seed},
                "return_logprob": True,
            }
            reply = (await sim.post("/generate", body)).json()
            ids, log_probs = policy.expected(prompt, {"seed": seed, "max_new_tokens": 4096})
            num = len(reply["output_ids"])
            entries = reply["meta_info"]["output_token_logprobs"]
            assert reply["output_ids"] == ids[:num].tolist()
            assert [entry[1] for entry in entries] == ids[:num].tolist()
            assert [entry[0] for entry in entries] == log_probs[:num].tolist()
            finish = reply["meta_info"]["finish_reason"]
            spans = reply["meta_info"]["weight_versions"]
            whole = num == len(ids)
            expected = {
                Fault.SLOW: ("stop", whole),
                Fault.VERSION_CHANGE: (
                    "stop",
                    whole and [s["version"] for s in spans] == ["4", "5"],
                ),
                Fault.LENGTH: ("length", not whole),
                Fault.ABORT: ("abort", not whole and finish.get("status_code") is None),
                Fault.ABORT_CODE: ("abort", not whole and finish.get("status_code") == 500),
                Fault.NAN: ("stop", not whole and finish.get("matched") == "NaN happened"),
                Fault.NO_END: ("stop", num == len(ids) - 1),
            }[fault]
            assert (finish["type"], True) == expected


async def test_faults_of_every_kind_leave_the_pool_with_exact_tokens_only(
    policy: Policy, prompt: list[int]
) -> None:
    shares = dict.fromkeys("unavailable reset length abort abort_code nan no_end".split(), 0.06)
    async with running(policy, prompt, retries=10, seed=3, **shares) as sim:
        got = await asyncio.gather(*(sim.ask(seed) for seed in range(150)))
        seen = sim.engine.counts
        assert all(
            seen[kind.value] > 0 for kind in NAMED if kind.value not in ("slow", "version_change")
        )
    for seed, completion in enumerate(got):
        sampling = Sampling(seed=seed, max_new_tokens=4096).to_dict()
        assert policy.mismatch(prompt, sampling, completion.ids, completion.log_probs) is None
    assert Counter(c.finish for c in got)[Finish.STOP] > 100


def test_dice_fall_the_same_for_the_same_seed_and_at_the_rates_asked_for() -> None:
    config = FaultConfig(unavailable=0.2, nan=0.1, seed=5)
    first, second = (
        [dice.fault() for _ in range(5000)] for dice in (FaultDice(config), FaultDice(config))
    )
    assert first == second
    counts = Counter(first)
    assert 0.18 < counts[Fault.UNAVAILABLE] / 5000 < 0.22
    assert 0.085 < counts[Fault.NAN] / 5000 < 0.115
    assert set(counts) == {Fault.UNAVAILABLE, Fault.NAN, None}


async def test_version_update_aborts_everything_unless_told_otherwise(
    policy: Policy, prompt: list[int]
) -> None:
    async with running(
        policy, prompt, latency_median_s=60.0, latency_sigma=0.0, version="1"
    ) as sim:
        task = asyncio.create_task(sim.ask(1, version=1))
        await sim.flying(1)
        sim.now_s += 30.0
        answer = await sim.post(
            "/update_weight_version", {"new_version": "2", "abort_all_requests": False}
        )
        assert answer.json()["success"] is True
        sim.now_s += 15.0
        await sim.post("/update_weight_version", {"new_version": "3"})
        kept = await task
        assert kept.finish is Finish.ABORT
        assert [version for version, _, _ in kept.versions] == [1, 2]
        assert sim.engine.weight_version == "3"


async def test_pause_holds_requests_until_it_is_continued(
    policy: Policy, prompt: list[int]
) -> None:
    async with running(policy, prompt, latency_median_s=60.0, latency_sigma=0.0) as sim:
        before = asyncio.create_task(sim.ask(1))
        await sim.flying(1)
        sim.now_s += 60.0
        await sim.post("/pause_generation", {"mode": "in_place"})
        during = asyncio.create_task(sim.ask(2))
        await sim.held(1)
        assert not before.done()
        async with httpx.AsyncClient() as client:
            assert (await client.get(sim.url + "/model_info")).status_code == 200
            assert (await client.get(sim.url + "/ready")).status_code == 503
        await sim.post("/continue_generation")
        assert (await before).finish is Finish.STOP
        await sim.flying(1)
        await sim.post("/abort_request", {"abort_all": True})
        assert (await during).finish is Finish.ABORT


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"sampling_params": {"seed": 1}}, "unknown field `seed`"),
        ({"sampling_params": {"max_tokens": 1}}, "unknown field `max_tokens`"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0"),
        ({"sampling_params": {"regex": "a"}}, "cannot honour regex"),
        ({"sampling_params": {"max_new_tokens": 100}}, "maximum context length of 64"),
        ({"input_ids": [1] * 64}, "longer than the model's context length"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [10**6]}, "outside 0.."),
        ({"text": "hi"}, "not text"),
    ],
)
async def test_request_that_sglang_or_a_script_cannot_serve_is_a_400(
    policy: Policy, prompt: list[int], body: dict[str, Any], text: str
) -> None:
    async with running(policy, prompt, context_tokens=64) as sim:
        answer = await sim.post("/generate", {"input_ids": prompt, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert text in (error if isinstance(error, str) else error["message"])


async def test_overflow_is_told_from_other_refusals_by_the_client(
    policy: Policy, prompt: list[int]
) -> None:
    async with running(policy, prompt, context_tokens=64) as sim:
        with pytest.raises(Exception, match="maximum context length") as caught:
            await sim.ask(1)
    assert caught.value.detail == "context_overflow"  # type: ignore[attr-defined]  # an EngineFault


async def test_engine_says_that_it_is_no_model_wherever_it_is_asked(
    policy: Policy, prompt: list[int]
) -> None:
    async with running(policy, prompt) as sim, httpx.AsyncClient() as client:
        info = (await client.get(sim.url + "/model_info")).json()
        assert "not a model" in info["model_path"]
        assert info["weight_version"] == "default"
        state = (await client.get(sim.url + "/sim")).json()
        assert "not a model" in state["notice"]
        assert state["policy"] == policy.config.to_dict()
        assert (await client.get(sim.url + "/nothing")).status_code == 404
        assert (await client.get(sim.url + "/health")).status_code == 200
        assert (await client.post(sim.url + "/flush_cache")).status_code == 200


async def test_a_thousand_requests_are_in_flight_at_once(policy: Policy, prompt: list[int]) -> None:
    async with running(policy, prompt, latency_median_s=60.0, latency_sigma=0.0) as sim:
        tasks = [asyncio.create_task(sim.ask(seed, max_new_tokens=4)) for seed in range(1000)]
        await sim.flying(1000)
        await sim.post("/abort_request", {"abort_all": True})
        replies = await asyncio.gather(*tasks)
    assert all(reply.finish is Finish.ABORT for reply in replies)


async def wait_for_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return await asyncio.to_thread(process.stdout.readline)


def start(vocabulary: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "worker.engines.sim", "--port", "0"),
            *("--tokenizer", str(vocabulary), *options),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=die_with_parent,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )


async def test_process_announces_itself_serves_and_ends_on_sigterm(
    policy: Policy, prompt: list[int], vocabulary: Path, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"prompt": QUESTION, "label": "7"}))
    options = ("--answers", f"jsonl:{answers}", "--latency-median-s", "0", "--weight-version", "4")
    process = start(vocabulary, *options)
    try:
        line = await wait_for_line(process)
        assert "not a model" in line
        url = line.strip().rpartition(" ")[2]
        pool = EnginePool([url], max_token_id=policy.vocabulary.size - 1)
        sim = Running(SimEngine(policy), url, pool, prompt)
        got = await sim.ask(11)
        await pool.aclose()
        sampling = Sampling(seed=11, max_new_tokens=4096).to_dict()
        assert policy.mismatch(prompt, sampling, got.ids, got.log_probs) is None
        assert got.versions == [(4, 0, len(got.ids))]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--tokenizer", "/no/such/tokenizer.json"), "/no/such/tokenizer.json"),
        (("--answers", "csv:x"), "expected reasoning_gym"),
        (("--fault-nan", "2"), "--fault-nan 2.0: give 0 to 1"),
        (("--fault-nan", "0.6", "--fault-abort", "0.6"), "more than 1"),
    ],
)
async def test_process_with_a_wrong_option_says_what_and_exits_2(
    vocabulary: Path, options: tuple[str, ...], text: str
) -> None:
    process = start(vocabulary, *options)
    _, errors = await asyncio.to_thread(process.communicate, None, 15)
    assert process.returncode == 2
    assert text in errors


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"400"),
        (b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"413"),
        (b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 4000, b"431"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"200"),
    ],
)
async def test_server_refuses_what_it_cannot_frame(
    policy: Policy, prompt: list[int], raw: bytes, status: bytes
) -> None:
    async with running(policy, prompt) as sim:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(sim.url.rpartition(":")[2]))
        writer.write(raw)
        line = await reader.readline()
        writer.close()
    assert line.split()[1] == status


async def test_server_answers_pipelined_and_split_requests_in_order(
    policy: Policy, prompt: list[int]
) -> None:
    async with running(policy, prompt) as sim:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(sim.url.rpartition(":")[2]))
        for byte in b"GET /nothing HTTP/1.1\r\n\r\nGET /health HTTP/1.1\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
        text = b""
        while text.count(b"HTTP/1.1") < 2:
            text += await reader.read(4096)
        writer.close()
    assert text.index(b" 404 ") < text.index(b" 200 ")
