"""Every fault of the simulated engine, over HTTP in both protocols: exactly one thing is wrong."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.sim_server import GENERATE, SimServer, eventually, sim_server
from tests.vocabulary_once import tokenizer_of
from worker.engines.faults import Detail, detail_of_status
from worker.engines.sim.damage import OVERFLOW_WORDS
from worker.engines.sim.faults import NAMED, STATUSES, Fault
from worker.engines.sim.policy import Policy, expected_log_probs, sampled_by
from worker.engines.sim.server import LogProbsMode

PROMPT = list(range(20, 32))
KINDS = ("sglang", "vllm")
TIMES = {"e2e_latency", "created"}
NO_SUCH_NAMES = {"cached_tokens", "total_tokens"}


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    return Policy(tokenizer_of(str(vocabulary)), {})


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return what a reply says, by field."""
    if isinstance(value, dict):
        found: dict[str, Any] = {}
        for key, one in value.items():
            if key not in TIMES | NO_SUCH_NAMES:
                found |= leaves(one, key)
        return found
    if isinstance(value, list) and value and isinstance(value[0], dict) and name != "content":
        if name == "weight_versions":
            return {name: value}
        return leaves(value[0], name)
    return {name: value}


def differing(good: bytes, bad: bytes) -> set[str]:
    one, other = leaves(json.loads(good)), leaves(json.loads(bad))
    missing = object()
    return {key for key in one | other if one.get(key, missing) != other.get(key, missing)}


SGLANG_WRONG: dict[Fault, str] = {
    Fault.NO_FINISH: "matched type length",
    Fault.UNKNOWN_FINISH: "type matched length",
    Fault.LOGPROBS_MISSING: "output_token_logprobs",
    Fault.LOGPROBS_SHORT: "output_token_logprobs",
    Fault.LOGPROBS_LONG: "output_token_logprobs",
    Fault.LOGPROB_NULL: "output_token_logprobs",
    Fault.LOGPROB_POSITIVE: "output_token_logprobs",
    Fault.LOGPROB_NAN: "output_token_logprobs",
    Fault.LOGPROB_LOWEST: "output_token_logprobs",
    Fault.LOGPROBS_WRONG: "output_token_logprobs",
    Fault.OTHER_IDS: "output_token_logprobs",
    Fault.BAD_TOKEN: "output_ids output_token_logprobs",
    Fault.NEGATIVE_TOKEN: "output_ids output_token_logprobs",
    Fault.TOO_MANY: "output_ids output_token_logprobs completion_tokens weight_versions length",
    Fault.COMPLETION_TOKENS: "completion_tokens",
    Fault.PROMPT_CUT: "prompt_tokens",
    Fault.OTHER_RID: "id",
    Fault.SPANS_GAP: "weight_versions",
    Fault.SPANS_OVERLAP: "weight_versions",
    Fault.SPANS_SHORT: "weight_versions",
    Fault.SPANS_WRONG: "weight_versions weight_version",
    Fault.NO_VERSION: "weight_versions weight_version",
    Fault.EXPERTS_MISSING: "routed_experts",
    Fault.EXPERTS_SHORT: "routed_experts",
    Fault.EXPERTS_GARBAGE: "routed_experts",
}
"""Field by field; of a list of entries at least one is another."""
IN_VLLM = {
    "output_token_logprobs": "logprobs content",
    "output_ids": "token_ids",
    "type": "finish_reason",
    "matched": "stop_reason",
    "length": "",
    "id": "request_id",
    "weight_version": "",
}


def wrong(kind: str, fault: Fault) -> set[str]:
    names = SGLANG_WRONG[fault].split()
    if kind == "sglang":
        return set(names)
    return {one for name in names for one in IN_VLLM.get(name, name).split()}


async def order(sim: SimServer, *damage: Any) -> None:
    answer = await sim.post("/sim/next", {"damage": list(damage)})
    assert answer.json() == {"ordered": len(damage)}


@pytest.mark.parametrize("kind", KINDS)
async def test_damage_changes_the_fields_of_that_damage_and_no_other(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy, layers=2, version="3") as sim:
        good = (await sim.ask(kind, PROMPT, num=6, rid="r")).content
        assert differing(good, (await sim.ask(kind, PROMPT, num=6, rid="r")).content) == set()
        for fault in SGLANG_WRONG:
            await order(sim, fault)
            reply = await sim.ask(kind, PROMPT, num=6, rid="r")
            assert reply.status_code == 200
            found = differing(good, reply.content)
            assert found, fault
            assert found <= wrong(kind, fault), fault
            assert sim.engine.counts[fault.value] == 1
        assert differing(good, (await sim.ask(kind, PROMPT, num=6, rid="r")).content) == set()


@pytest.mark.parametrize("kind", KINDS)
async def test_spans_that_name_other_weights_are_found_by_the_log_probs_alone(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy, version="7", versioned=True) as sim:
        await order(sim, "spans_wrong")
        reply = (await sim.ask(kind, PROMPT, num=6)).json()
    if kind == "vllm":
        choice = reply["choices"][0]
        ids, spans = choice["token_ids"], choice["weight_versions"]
        said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    else:
        ids, spans = reply["output_ids"], reply["meta_info"]["weight_versions"]
        said = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert spans == [{"version": "8", "start": 0, "end": 6}]
    log_probs = np.array(said, dtype=np.float32)
    assert sampled_by([*PROMPT, *ids], len(PROMPT), log_probs, [6, 7, 8]) == [7] * 6


@pytest.mark.parametrize("kind", KINDS)
async def test_nan_is_the_word_that_pythons_own_writer_has_for_it(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy) as sim:
        await order(sim, "logprob_nan")
        raw = (await sim.ask(kind, PROMPT, num=6)).content
    assert raw.count(b"NaN") in (1, 2)  # vLLM says it of the token and of the best one
    json.loads(raw)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", STATUSES)
async def test_status_fault_is_that_status_before_anything_is_sampled(
    policy: Policy, kind: str, fault: Fault
) -> None:
    async with sim_server(policy) as sim:
        await order(sim, fault)
        answer = await sim.ask(kind, PROMPT)
        assert answer.status_code == STATUSES[fault]
        assert sim.engine.counts[fault.value] == 1
        assert sim.engine.core.most_in_flight == 0
        if kind == "vllm":
            assert answer.json()["error"]["code"] == STATUSES[fault]


@pytest.mark.parametrize("kind", KINDS)
async def test_overflow_takes_every_wording_in_turn_and_the_client_knows_each(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy) as sim:
        await order(sim, *["overflow"] * len(OVERFLOW_WORDS), "400")
        said = [
            (await sim.ask(kind, PROMPT)).json()["error"]["message"]
            for _ in range(len(OVERFLOW_WORDS) + 1)
        ]
    assert tuple(said[:-1]) == OVERFLOW_WORDS
    details = [detail_of_status(400, words) for words in said]
    assert details == [Detail.CONTEXT_OVERFLOW] * len(OVERFLOW_WORDS) + [Detail.REFUSED]


@pytest.mark.parametrize("kind", KINDS)
async def test_half_a_body_a_reset_and_no_json_are_what_the_transport_says(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy) as sim:
        await order(sim, "half_body", "reset", "not_json", None)
        with pytest.raises(httpx.RemoteProtocolError, match="complete message body"):
            await sim.ask(kind, PROMPT)
        with pytest.raises(httpx.RemoteProtocolError, match="disconnected"):
            await sim.ask(kind, PROMPT)
        spoilt = await sim.ask(kind, PROMPT)
        assert spoilt.status_code == 200
        with pytest.raises(ValueError, match="Expecting"):
            spoilt.json()
        assert (await sim.ask(kind, PROMPT)).json()


@pytest.mark.parametrize("kind", KINDS)
async def test_hang_is_answered_by_nothing_and_ends_with_its_client(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy) as sim:
        await order(sim, "hang")
        task = asyncio.create_task(sim.ask(kind, PROMPT, rid="h"))
        await sim.flying(1)
        await sim.post("/abort_request", {"abort_all": True})
        await sim.post("/pause_generation", {"mode": "in_place"})
        await sim.post("/continue_generation")
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sim.flying(0)


async def test_ordered_abort_ends_where_it_was_asked_to(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        await order(sim, {"kind": "abort", "after": 4}, {"kind": "length", "after": 0}, None)
        replies = [(await sim.ask("sglang", PROMPT, num=10)).json() for _ in range(3)]
    ends = [(len(one["output_ids"]), one["meta_info"]["finish_reason"]["type"]) for one in replies]
    assert ends == [(4, "abort"), (0, "length"), (10, "length")]


@pytest.mark.parametrize(
    ("fault", "status"), [("abort_code", 500), ("nan", 500), ("abort_503", 503)]
)
async def test_finish_reason_of_a_fault_in_sglang_is_an_http_error_in_vllm(
    policy: Policy, fault: str, status: int
) -> None:
    async with sim_server(policy) as sim:
        await order(sim, fault, fault)
        theirs, ours = await sim.ask("vllm", PROMPT), await sim.ask("sglang", PROMPT)
        assert theirs.status_code == theirs.json()["error"]["code"] == status
        finish = ours.json()["meta_info"]["finish_reason"]
        assert finish.get("status_code") == (None if fault == "nan" else status)


async def test_abort_that_comes_before_a_fault_is_an_ordinary_abort(policy: Policy) -> None:
    async with sim_server(policy, latency_s=60.0) as sim:
        await order(sim, "abort_code", "nan")
        tasks = [asyncio.create_task(sim.ask("vllm", PROMPT)) for _ in range(2)]
        await sim.flying(2)
        await sim.post("/abort_requests")
        for task in tasks:
            assert (await task).json()["choices"][0]["finish_reason"] == "abort"


async def test_empty_abort_has_id_and_reason_and_next_to_nothing_else(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        await order(sim, "abort_empty", "abort_empty")
        meta = (await sim.ask("sglang", PROMPT)).json()["meta_info"]
        assert set(meta) == {"id", "finish_reason", "weight_version", "e2e_latency"}
        reply = (await sim.ask("vllm", PROMPT)).json()
        assert reply["usage"] is None
        choice = reply["choices"][0]
        assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
        assert (choice["logprobs"], choice["routed_experts"]) == (None, None)


@pytest.mark.parametrize("kind", KINDS)
async def test_damage_that_needs_tokens_does_not_happen_to_a_reply_without(
    policy: Policy, kind: str
) -> None:
    stop = policy.expected(PROMPT, {"seed": 1, "max_new_tokens": 1})[0].tolist()
    async with sim_server(policy) as sim:
        if kind == "sglang":
            await order(sim, "logprobs_short")
            await sim.ask(kind, PROMPT, num=0)
            assert sim.engine.counts["logprobs_short"] == 0
        await order(sim, "logprobs_short")
        await sim.ask(kind, PROMPT, num=1, stop_token_ids=stop)
        assert sim.engine.counts["logprobs_short"] == 1


@pytest.mark.parametrize(
    "body", [{}, {"damage": "nan"}, {"damage": ["nun"]}, {"damage": [{"kind": 3}]}]
)
async def test_order_that_makes_no_sense_is_refused(policy: Policy, body: dict[str, Any]) -> None:
    async with sim_server(policy) as sim:
        assert (await sim.post("/sim/next", body)).status_code == 400


async def test_shares_draw_every_fault_with_a_name_of_its_own(policy: Policy) -> None:
    names = [fault.value for fault in Fault if fault not in NAMED and fault is not Fault.HANG]
    async with sim_server(policy, faults=dict.fromkeys(names, 1 / len(names)), layers=1) as sim:
        for seed in range(300):
            try:
                await sim.ask("sglang", PROMPT, num=4, seed=seed)
            except httpx.RemoteProtocolError:
                continue
        assert set(names) <= set(sim.engine.counts)


async def test_shares_can_be_changed_while_it_runs_and_what_is_left_out_ends(
    policy: Policy,
) -> None:
    async with sim_server(policy, faults={"500": 1.0}) as sim:
        assert (await sim.ask("sglang", PROMPT)).status_code == 500
        await sim.post("/sim/faults", {"503": 1, "nan": 0})
        assert (await sim.ask("sglang", PROMPT)).status_code == 503
        assert (await sim.get("/sim"))["faults"]["others"] == {"503": 1, "nan": 0}
        await order(sim, "400")
        await sim.post("/sim/faults", {})
        assert (await sim.ask("sglang", PROMPT)).status_code == 400  # orders stay
        assert (await sim.ask("sglang", PROMPT)).status_code == 200


@pytest.mark.parametrize("body", [{"nun": 1.0}, {"nan": "1"}, {"nan": True}, {"nan": 2}])
async def test_shares_that_make_no_sense_are_refused_and_change_nothing(
    policy: Policy, body: dict[str, Any]
) -> None:
    async with sim_server(policy) as sim:
        assert (await sim.post("/sim/faults", body)).status_code == 400
        assert (await sim.ask("sglang", PROMPT)).status_code == 200
        assert (await sim.get("/sim"))["faults"]["others"] == {}


# -- control faults


@pytest.mark.parametrize("kind", KINDS)
async def test_restart_loses_what_flies_what_is_held_and_the_label(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy, latency_s=60.0) as sim:
        await sim.post("/update_weight_version", {"new_version": "7"})
        flying = asyncio.create_task(sim.ask(kind, PROMPT))
        await sim.flying(1)
        await sim.post("/pause_generation", {"mode": "in_place"})
        held = asyncio.create_task(sim.ask("sglang", PROMPT))
        await eventually(lambda: len(sim.engine.sglang.held) == 1)
        await sim.post("/sim/restart")
        for lost in (flying, held):
            with pytest.raises(httpx.RemoteProtocolError):
                await lost
        assert await sim.get("/weight_info") == {"weight_version": "default"}
        assert (await sim.client.get("/ready")).status_code == 200
        assert len(sim.engine.core.flights) == 0
        await sim.post("/sim/restart", {"weight_version": "9"})
        assert (await sim.get("/sim"))["weight_version"] == "9"


async def test_pause_by_nobody_ends_by_itself_and_leaves_the_pauses_of_others_alone(
    policy: Policy,
) -> None:
    async with sim_server(policy) as sim:
        await sim.post("/sim/pause", {"seconds": 600})
        assert (await sim.get("/sim"))["paused"] == "freeze"
        await sim.post("/resume")
        sim.engine.core.pause_for(0.05)
        assert (await sim.ask("sglang", PROMPT, num=2)).status_code == 200  # hung till then
        assert (await sim.get("/sim"))["paused"] is None

        await sim.post("/sim/pause", {"seconds": 0.02})
        await sim.post("/resume")
        await sim.post("/pause?mode=keep")  # the trainer's: the timer has no part in it
        await asyncio.sleep(0.06)
        await sim.post("/sim/pause", {"seconds": 0})
        await asyncio.sleep(0.02)
        assert (await sim.get("/is_paused"))["is_paused"]
        assert (await sim.post("/sim/pause", {"seconds": "x"})).status_code == 400


# -- what an auditor relies on


async def test_scored_prompt_is_of_the_weights_of_today(policy: Policy) -> None:
    async with sim_server(policy, version="7", versioned=True) as sim:
        body = {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 3,
        }
        said = []
        for _ in range(2):
            meta = (await sim.post("/generate", body)).json()["meta_info"]
            said.append([entry[0] for entry in meta["input_token_logprobs"][1:]])
            await sim.post("/update_weight_version", {"new_version": "8"})
    assert said == [expected_log_probs(PROMPT, 4, version=one).tolist() for one in ("7", "8")]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_change_is_not_made_up_for_a_request_that_saw_a_real_one(
    policy: Policy, kind: str
) -> None:
    async with sim_server(policy, latency_s=60.0, version="6") as sim:
        await order(sim, "version_change", "version_change")
        asked = [asyncio.create_task(sim.ask(kind, PROMPT, num=6, rid=rid)) for rid in "ab"]
        await sim.flying(2)
        sim.now_s += 30.0
        name = {"new_version": "6~7", "abort_all_requests": False}  # as an update in `keep` does
        assert (await sim.post("/update_weight_version", name)).status_code == 200
        for key, flight in list(sim.engine.core.flights.items()):
            sim.engine.core._land(key, flight)
        for reply in await asyncio.gather(*asked):
            body = reply.json()
            spans = (body["choices"][0] if kind == "vllm" else body["meta_info"])["weight_versions"]
            assert [span["version"] for span in spans] == ["6", "6~7"]


@pytest.mark.parametrize("kind", KINDS)
async def test_weights_that_were_pushed_sample_under_the_old_label_until_somebody_names_them(
    policy: Policy, kind: str
) -> None:
    async with sim_server(
        policy, latency_s=60.0, version="6", versioned=True, logprobs_mode=LogProbsMode.PROCESSED
    ) as sim:
        asked = asyncio.create_task(sim.ask(kind, PROMPT, num=60))
        await sim.flying(1)
        sim.now_s += 20.0
        assert (await sim.post("/sim/weights", {"weights": "7"})).status_code == 200
        sim.now_s += 20.0
        name = {"new_version": "7", "abort_all_requests": False}
        assert (await sim.post("/update_weight_version", name)).status_code == 200
        state = await sim.get("/sim")
        assert (state["weight_version"], state["weights"]) == ("7", "7")
        sim.now_s += 10.0
        await sim.post("/abort_request", {"abort_all": True})
        reply = (await asked).json()
    ids, said, spans = read_weights(reply)
    labels = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    really = sampled_by([*PROMPT, *ids], len(PROMPT), said, ["6", "7"])
    assert [span["version"] for span in spans] == ["6", "7"]
    assert 0 < really.count("6") < labels.count("6")
    assert really == sorted(really, key=str)


async def test_push_that_names_its_weights_does_so_from_the_same_token_on(policy: Policy) -> None:
    async with sim_server(policy, latency_s=60.0, version="6", versioned=True) as sim:
        asked = asyncio.create_task(sim.ask("sglang", PROMPT, num=60))
        await sim.flying(1)

        def later() -> float:  # a clock that goes on while the engine does two things
            sim.now_s += 5.0
            return sim.now_s

        sim.engine.core.clock = later
        await sim.post("/sim/weights", {"weights": "7", "weight_version": "7"})
        await sim.post("/abort_request", {"abort_all": True})
        ids, said, spans = read_weights((await asked).json())
    labels = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    assert set(labels) == {"6", "7"}
    assert sampled_by([*PROMPT, *ids], len(PROMPT), said, ["6", "7"]) == labels


@pytest.mark.parametrize("kind", KINDS)
async def test_label_is_the_weights_until_they_are_set_and_a_restart_has_those_of_its_label(
    policy: Policy, kind: str
) -> None:
    async def sampling() -> Any:
        ids, said, _ = read_weights((await sim.ask(kind, PROMPT, num=6)).json())
        return sampled_by([*PROMPT, *ids], len(PROMPT), said, ["6", "7", "8", "9"])[-1]

    async with sim_server(
        policy, version="6", versioned=True, logprobs_mode=LogProbsMode.PROCESSED
    ) as sim:
        await sim.post("/update_weight_version", {"new_version": "7"})
        assert await sampling() == "7"
        await sim.post("/sim/weights", {"weights": "8"})
        await sim.post("/update_weight_version", {"new_version": "9"})
        assert await sampling() == "8"
        await sim.post("/sim/restart")
        assert await sampling() == "6"
        await sim.post("/update_weight_version", {"new_version": "9"})
        assert await sampling() == "6"
        await sim.post("/sim/weights", {"weights": "8", "weight_version": "9"})
        assert await sampling() == "8"
        assert (await sim.get("/sim"))["weight_version"] == "9"
        for wrong in ({}, {"weights": 7}, {"weights": "7", "weight_version": 7}):
            assert (await sim.post("/sim/weights", wrong)).status_code == 400


def read_weights(reply: Any) -> tuple[list[int], np.ndarray, list[dict[str, Any]]]:
    """Return (ids, log-probs, spans) of a reply of either protocol."""
    if "meta_info" in reply:
        meta = reply["meta_info"]
        said = [entry[0] for entry in meta["output_token_logprobs"]]
        return reply["output_ids"], np.array(said, np.float32), meta["weight_versions"]
    choice = reply["choices"][0]
    said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], np.array(said, np.float32), choice["weight_versions"]


# -- SGLang's pauses


@pytest.mark.parametrize(("mode", "num"), [("in_place", "half"), ("retract", "none")])
async def test_abort_in_a_pause_waits_in_place_and_finds_nothing_when_retracted(
    policy: Policy, mode: str, num: str
) -> None:
    whole = len(policy.expected(PROMPT, {"seed": 1, "max_new_tokens": 4096})[0])
    async with sim_server(policy, latency_s=60.0) as sim:
        task = asyncio.create_task(sim.ask("sglang", PROMPT, rid="r"))
        await sim.flying(1)
        sim.now_s += 30.0
        await sim.post("/pause_generation", {"mode": mode})
        await sim.post("/abort_request", {"rid": "r"})
        if mode == "in_place":
            assert not task.done()
            assert len(sim.engine.core.flights) == 1
            await sim.post("/continue_generation")
        reply = (await task).json()
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) == (whole // 2 if num == "half" else 0)
    assert ("prompt_tokens" in reply["meta_info"]) is (num == "half")


async def test_abort_that_names_no_request_is_counted(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        await sim.post("/abort_request", {"rid": "x"})
        await sim.post("/inference/v1/abort_requests", {"request_ids": ["x"]})
        await eventually(lambda: sim.engine.counts["aborts_of_nothing"] == 2)


async def test_health_of_a_paused_server_hangs_and_a_probe_of_it_is_counted(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.sim.sglang.HEALTH_TIMEOUT_S", 0.02)
    async with sim_server(policy) as sim:
        assert (await sim.client.get("/health")).status_code == 200
        await sim.post("/pause_generation", {"mode": "in_place"})
        assert (await sim.client.get("/health")).status_code == 503
        assert (await sim.client.get("/model_info")).status_code == 200
        assert sim.engine.counts["health_in_pause"] == 1


async def test_wrong_method_is_405_and_the_paths_are_counted(policy: Policy) -> None:
    async with sim_server(policy) as sim:
        assert (await sim.client.get(GENERATE["sglang"])).status_code == 405
        assert (await sim.post("/ready")).status_code == 405
        assert (await sim.get("/sim"))["paths"] == {"/generate": 1, "/ready": 1, "/sim": 1}


async def test_most_in_flight_is_remembered(policy: Policy) -> None:
    async with sim_server(policy, latency_s=60.0) as sim:
        tasks = [asyncio.create_task(sim.ask(kind, PROMPT)) for kind in KINDS * 3]
        await sim.flying(6)
        await sim.post("/abort_requests")
        await asyncio.gather(*tasks)
        state = await sim.get("/sim")
        assert (state["in_flight"], state["most_in_flight"]) == (0, 6)


# -- connections


async def is_closed(reader: asyncio.StreamReader) -> bool:
    return await reader.read(1) == b""


async def test_idle_connection_is_closed_and_a_busy_one_is_not(policy: Policy) -> None:
    async with sim_server(policy, latency_s=60.0, keepalive_s=0.1) as sim:
        port = int(sim.url.rpartition(":")[2])
        body = json.dumps({"rid": "k", "input_ids": PROMPT}).encode()
        asks = b"GET /ready HTTP/1.1\r\n\r\n"
        generates = b"POST /generate HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        idle, busy, fresh = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in (idle, busy):
            writer.write(asks)
        await idle[0].readuntil(b"\r\n\r\n")
        await busy[0].readuntil(b"\r\n\r\n")
        busy[1].write(generates)
        await sim.flying(1)
        async with asyncio.timeout(20):
            assert await is_closed(idle[0])
        assert len(sim.engine.core.flights) == 1  # however long it takes
        await sim.post("/abort_request", {"rid": "k"})
        assert b"200 OK" in await busy[0].readline()
        fresh[1].write(asks)  # it never had an answer to be idle after
        assert b"200 OK" in await fresh[0].readline()
        for _, writer in (idle, busy, fresh):
            writer.close()
