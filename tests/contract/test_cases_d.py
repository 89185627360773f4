"""Cases 51 to 65 of the public reports: what engines answer that is short, long, empty or missing.

Whole attempts: a generate function, the real client, HTTP, and the worker's judgement of what
came of it. Where a reply itself is the case, it is read alone too. What is held against a sample
are the bodies that the engine got and the bytes that it answered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollstream.batch import Batch
from rollstream.errors import MemberReason, Report, Status, StopReason
from rollstream.group import FinishedGroup, PromptGroup, Trajectory
from rollstream.sample import UNKNOWN_VERSION, Sample
from rollstream.wire import decode_body, encode_body
from tests.generate_stage import OverHttp, engine_of
from tests.integration.worker.test_fidelity import a_stage
from tests.scripted_engine import a_reply, a_vllm_reply, scripted
from tests.toy import A1, A1_LOG_PROBS, A2, A2_LOG_PROBS, HI, O1, P0, toy_renderer
from worker.engines.faults import Detail
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.protocol.reply import read_reply
from worker.generate import multi_turn, single_turn
from worker.members.work import Ending, leaves_of
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

CALL_END = 7
FIRST = a_reply(A1, log_probs=A1_LOG_PROBS, finish={"type": "stop", "matched": 2})
LAST = a_reply(A2, log_probs=A2_LOG_PROBS, finish={"type": "stop", "matched": 2})
BOTH = [single_turn, multi_turn]


async def attempted(
    *steps: Any, generate: Any = multi_turn, first: Sequence[int] = A1, **sampling: Any
) -> tuple[Ending, list[list[int]]]:
    """Run one attempt of a worker; return its ending and the prompt of every request."""
    async with engine_of(
        "http", *[s if isinstance(s, tuple) else (200, s) for s in steps]
    ) as engine:
        assert isinstance(engine, OverHttp)
        stage = a_stage(engine, generate, first=first, sampling=Sampling(**sampling))
        ending = await stage.run()
        return ending, [body["input_ids"] for body in engine.bodies]


def delivered(ending: Ending) -> Sample:
    assert ending.report is Report.COMPLETE, ending.error
    assert ending.stop_reason is not StopReason.AGENT_ERROR, ending.error
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    return sample


def check(
    sample: Sample,
    requests: Sequence[Sequence[int]],
    replies: Sequence[tuple[list[int], list[float]]],
    *,
    num_calls: int | None = None,
) -> None:
    """Rebuild tokens, mask and log-probs from the wire alone, and compare."""
    assert len(requests) == len(replies)
    assert len(sample.calls) == (len(replies) if num_calls is None else num_calls)
    tokens: list[int] = list(requests[0])
    mask: list[int] = []
    log_probs: list[float] = []
    for request, (ids, values) in zip(requests, replies, strict=True):
        observed = list(request)[len(tokens) :]
        assert list(request)[: len(tokens)] == tokens
        tokens += [*observed, *ids]
        mask += [0] * len(observed) + [1] * len(ids)
        log_probs += [0.0] * len(observed) + values
    assert sample.tokens.tolist() == tokens
    assert sample.response_length == len(tokens) - len(requests[0])
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask.tolist() == mask
    assert sample.rollout_log_probs.tobytes() == np.array(log_probs, np.float32).tobytes()
    sample.validate()


def not_trained(ending: Ending, detail: Detail) -> None:
    """Assert that nothing of an attempt is trained on, that it is told why, and tried again."""
    assert (ending.report, ending.reason) == (Report.RETRY, MemberReason.ENGINE_ERROR)
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    assert (sample.status, sample.stop_reason) == (Status.FAILED, StopReason.ENGINE_ERROR)
    assert sample.metadata["error_detail"] == detail
    assert len(sample.tokens) == 0
    assert sample.effective_response_length == 0


def entries_of(ids: Sequence[int], log_probs: Sequence[Any]) -> list[list[Any]]:
    return [[p, i, None] for p, i in zip(log_probs, ids, strict=True)]


def read(raw: bytes, *, version: int = 0) -> Completion:
    return read_reply(200, raw, rid="r", engine="http://e", num_prompt=10, version=version,
                      max_token_id=2000)  # fmt: skip


# --- 51, 53, 60: numbers that disagree -----------------------------------------------------------
THREE = entries_of([31, 32, 2], A1_LOG_PROBS)
UNEQUAL = {
    "51: the stop id is cut from the ids only": a_reply(
        [31, 32], completion_tokens=2, output_token_logprobs=THREE
    ),
    "51: and the count is right": a_reply(
        [31, 32], completion_tokens=3, output_token_logprobs=THREE
    ),
    "53a: a log-prob is missing": a_reply(
        A1, log_probs=A1_LOG_PROBS[:2], completion_tokens=3
    ),
    "53b: log-probs are null": a_reply(A1, output_token_logprobs=None),
    "53: log-probs are absent": a_reply(A1, drop=["output_token_logprobs"]),
    "60: chunks got lost on the way": a_reply(
        [31, 32, 31, 32, 31, 2], completion_tokens=14
    ),
    "60: with ids named by their log-probs alone": a_reply(
        A1, completion_tokens=14, drop=["output_ids"]
    ),
    "ids are absent and counted": a_reply(
        [], completion_tokens=3, drop=["output_ids", "output_token_logprobs"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("raw", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("generate", BOTH)
async def test_case_51_53_60_lists_of_unequal_length_are_never_zipped_and_never_padded(
    generate: Any, raw: bytes
) -> None:
    ending, _ = await attempted(raw, generate=generate)
    not_trained(ending, Detail.LOGPROB_LENGTH_MISMATCH)


@pytest.mark.parametrize("raw", UNEQUAL.values(), ids=UNEQUAL)
async def test_case_53b_a_bad_second_turn_takes_the_good_first_one_with_it(raw: bytes) -> None:
    ending, requests = await attempted(FIRST, raw)
    assert len(requests) == 2
    not_trained(ending, Detail.LOGPROB_LENGTH_MISMATCH)


@pytest.mark.parametrize("raw", UNEQUAL.values(), ids=UNEQUAL)
async def test_case_60_a_bad_reply_is_fetched_again_and_only_the_good_one_counts(
    raw: bytes,
) -> None:
    async with scripted(raw, LAST) as engine:
        pool = EnginePool([engine.url], max_token_id=2000, policy=RetryPolicy(backoff_s=0.001))
        ending = await a_stage(pool, single_turn).run()
        await pool.aclose()
    sample = delivered(ending)
    assert len(engine.requests) == 2
    check(sample, [engine.requests[1]["input_ids"]], [(A2, A2_LOG_PROBS)])
    assert sample.calls[0].rid == engine.requests[1]["rid"]


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (b"null", Detail.BAD_LOGPROB),
        (b"0.5", Detail.BAD_LOGPROB),
        (b"-1e39", Detail.BAD_LOGPROB),
        (b"-1e999", Detail.BAD_REPLY),
        (b"NaN", Detail.BAD_REPLY),
        (b"-Infinity", Detail.BAD_REPLY),
        (b'"-0.5"', Detail.BAD_REPLY),
    ],
)
async def test_case_53_one_log_prob_that_is_none_is_not_replaced_by_anything(
    value: bytes, detail: Detail
) -> None:
    good = a_reply(A1, log_probs=[-0.5, -0.25, -0.123])
    ending, _ = await attempted(good.replace(b"-0.123", value))
    not_trained(ending, detail)


# --- 52, 62: ids behind a stop string, and turns that end without their end id --------------------
async def test_case_52_ids_behind_a_stop_string_are_kept_and_the_next_request_holds_them() -> None:
    ids, values = [31, 6, 32, CALL_END, 31, 32], [-0.5, -0.25, -0.125, -1.0, -2.0, -3.0]
    first = a_reply(ids, log_probs=values, finish={"type": "stop", "matched": "</tool_call>"})
    ending, requests = await attempted(first, LAST, first=ids, stop=("</tool_call>",))
    sample = delivered(ending)
    check(sample, requests, [(ids, values), (A2, A2_LOG_PROBS)])
    assert requests[1][: len(P0) + len(ids)] == [*P0, *ids]


async def test_case_62_an_end_id_that_nobody_sampled_is_an_observation() -> None:
    ids, values = [31, 32], [-0.5, -0.25]
    first = a_reply(ids, log_probs=values, finish={"type": "stop", "matched": "llo"})
    ending, requests = await attempted(first, LAST, first=ids, stop=("llo",))
    sample = delivered(ending)
    assert requests[1] == [*P0, *ids, 2, *O1]
    check(sample, requests, [(ids, values), (A2, A2_LOG_PROBS)])
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert (sample.tokens[12], sample.loss_mask[2], sample.rollout_log_probs[2]) == (2, 0, 0.0)


@pytest.mark.parametrize("generate", BOTH)
async def test_case_62_no_end_id_is_added_behind_the_last_turn(generate: Any) -> None:
    ids, values = [30], [-0.5]
    last = a_reply(ids, log_probs=values, finish={"type": "stop", "matched": "hello"})
    ending, requests = await attempted(last, generate=generate, stop=("hello",))
    sample = delivered(ending)
    assert sample.status is Status.COMPLETED
    check(sample, requests, [(ids, values)])


# --- 54, 55, 57, 64: little or nothing ------------------------------------------------------------
EMPTY = json.dumps(
    {"text": "", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 0}}
).encode()
NOTHING = {
    "no lists": EMPTY,
    "empty lists": a_reply([], finish={"type": "stop", "matched": None}),
    "null lists": json.dumps(
        {
            "text": "", "output_ids": None,
            "meta_info": {
                "finish_reason": {"type": "stop"}, "output_token_logprobs": None,
                "completion_tokens": None,
            },
        }
    ).encode(),
}  # fmt: skip


@pytest.mark.parametrize("raw", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("generate", BOTH)
async def test_case_54_an_empty_reply_is_a_sample_with_nothing_to_train_on(
    generate: Any, raw: bytes
) -> None:
    ending, requests = await attempted(raw, generate=generate)
    sample = delivered(ending)
    check(sample, requests, [([], [])])
    assert (sample.status, sample.response_length, sample.response) == (Status.COMPLETED, 0, "")
    assert (sample.effective_response_length, sample.num_sampled) == (0, 0)
    assert sample.tokens.tolist() == P0


async def test_case_54_an_empty_second_turn_keeps_the_first() -> None:
    ending, requests = await attempted(FIRST, EMPTY)
    check(delivered(ending), requests, [(A1, A1_LOG_PROBS), ([], [])])


def batch_of(*trajectories: Trajectory) -> Batch:
    group = FinishedGroup(group_index=0, env="default", samples=list(trajectories))
    return Batch([group])


async def test_case_54_a_reward_of_an_empty_response_is_written_at_no_token() -> None:
    empty, _ = await attempted(EMPTY)
    full, _ = await attempted(LAST)
    samples = [delivered(empty), delivered(full)]
    samples[0].reward, samples[1].reward = 0.25, 1.0
    samples[1].index = samples[1].rollout_id = 1
    arrays = batch_of(*samples).to_arrays(pad_id=0)
    assert arrays["reward"].tolist() == [0.25, 1.0]
    assert arrays["loss_mask"][0].sum() == 0
    assert not arrays["log_probs"][0].any()
    assert arrays["rollout_mask_sum"].tolist() == [0, 2]


@pytest.mark.parametrize("generate", BOTH)
async def test_case_55_a_reply_of_the_end_id_alone_is_a_completed_sample(generate: Any) -> None:
    raw = a_reply([2], log_probs=[-0.3], finish={"type": "stop", "matched": 2})
    ending, requests = await attempted(raw, generate=generate)
    sample = delivered(ending)
    check(sample, requests, [([2], [-0.3])])
    assert (sample.status, sample.response_length) == (Status.COMPLETED, 1)
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1]
    message = toy_renderer().parse(sample.tokens[-1:], sample.tokens[:-1])
    assert (message.content, message.tool_calls, message.abnormal_end) == ("", [], False)


ABORT = {"type": "abort", "message": "paused", "status_code": None}
BARE = json.dumps({"text": "", "meta_info": {"finish_reason": ABORT}}).encode()
BARER = json.dumps(
    {"meta_info": {"finish_reason": {"type": "abort", "message": "queued"}}}
).encode()  # fmt: skip


@pytest.mark.parametrize("raw", [BARE, BARER])
@pytest.mark.parametrize("generate", BOTH)
async def test_case_57_an_abort_with_almost_no_fields_brings_no_ids_and_is_given_back(
    generate: Any, raw: bytes
) -> None:
    ending, _ = await attempted(raw, generate=generate)
    assert (ending.report, ending.stop_reason) == (Report.BACK, StopReason.ABORT_WEIGHTS)
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    assert (sample.status, sample.response_length) == (Status.ABORTED, 0)


@pytest.mark.parametrize("raw", [BARE, BARER])
async def test_case_57_an_abort_in_the_second_turn_keeps_the_first(raw: bytes) -> None:
    ending, requests = await attempted(FIRST, raw)
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    assert (ending.report, sample.status) == (Report.BACK, Status.ABORTED)
    check(sample, requests, [(A1, A1_LOG_PROBS), ([], [])], num_calls=1)


async def test_case_64_no_log_probs_are_an_empty_array_for_the_group_and_the_trainer() -> None:
    three, _ = await attempted(a_reply(A1, log_probs=A1_LOG_PROBS), generate=single_turn)
    none, _ = await attempted(EMPTY, generate=single_turn)
    group = PromptGroup(0, 2, HI)
    back: list[Sample] = []
    for ending in (three, none):
        sample = decode_body(encode_body(delivered(ending)), group)
        assert isinstance(sample, Sample)
        back.append(sample)
    for sample, length in zip(back, (3, 0), strict=True):
        for name, dtype in (("rollout_log_probs", np.float32), ("loss_mask", np.uint8)):
            values = getattr(sample, name)
            assert isinstance(values, np.ndarray)
            assert (values.dtype, len(values)) == (dtype, length)
    assert back[1].to_dict()["rollout_log_probs"] == []
    assert back[1].to_dict()["loss_mask"] == []
    arrays = batch_of(*back).to_arrays(pad_id=0)
    assert arrays["loss_mask"].sum(axis=1).tolist() == [3, 0]


# --- 56: versions --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("label", "dispatched", "version"),
    [
        (None, 3, UNKNOWN_VERSION),
        ("default", 0, 0),
        ("default", 3, UNKNOWN_VERSION),
        ("7", 7, 7),
        (7, 7, 7),
        ("step-7", 3, UNKNOWN_VERSION),
        ("-7", 3, UNKNOWN_VERSION),
        (-7, 3, UNKNOWN_VERSION),
        ("", 3, UNKNOWN_VERSION),
    ],
)
def test_case_56_a_version_is_a_number_or_the_unknown_marker(
    label: Any, dispatched: int, version: int
) -> None:
    completion = read(a_reply(A2, weight_version=label), version=dispatched)
    assert completion.versions == [(version, 0, 2)]


@pytest.mark.parametrize("drop", [["weight_version"], []])
@pytest.mark.parametrize("generate", BOTH)
async def test_case_56_a_reply_without_a_version_is_kept_and_counts_as_the_one_at_dispatch(
    generate: Any, drop: list[str]
) -> None:
    raw = a_reply(A2, log_probs=A2_LOG_PROBS, weight_version="a label", drop=drop)
    ending, requests = await attempted(raw, generate=generate)
    sample = delivered(ending)
    check(sample, requests, [(A2, A2_LOG_PROBS)])
    assert sample.weight_versions == [sample.calls[0].dispatched_version] == [0]


async def test_case_56_text_and_number_of_one_version_compare_equal() -> None:
    text = a_reply(A1, log_probs=A1_LOG_PROBS, weight_version="7")
    number = a_reply(A2, log_probs=A2_LOG_PROBS, weight_version=7)
    ending, _ = await attempted(text, number)
    assert delivered(ending).weight_versions == [7, 7]


# --- 59: whose prompt ----------------------------------------------------------------------------
async def test_case_59_the_prompt_is_what_we_sent_whatever_the_reply_says_of_it() -> None:
    raw = a_reply(A2, log_probs=A2_LOG_PROBS, prompt_token_ids=[], input_ids=[])
    ending, requests = await attempted(raw)
    sample = delivered(ending)
    check(sample, requests, [(A2, A2_LOG_PROBS)])
    assert sample.tokens[: sample.prompt_length].tolist() == P0


async def test_case_59_a_prompt_of_another_length_is_a_refusal_and_never_half_a_sample() -> None:
    ending, _ = await attempted(a_reply(A2, log_probs=A2_LOG_PROBS, prompt_tokens=9))
    assert ending.report is Report.FINAL
    assert ending.refused
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    assert (sample.metadata["error_detail"], len(sample.tokens)) == ("prompt_mismatch", 0)


async def test_case_59_a_reply_of_another_protocol_is_no_reply() -> None:
    chat = {
        "choices": [
            {"token_ids": A2, "finish_reason": "stop", "message": {"content": "hello"}}
        ]
    }  # fmt: skip
    ending, _ = await attempted(json.dumps(chat).encode())
    not_trained(ending, Detail.BAD_REPLY)


# --- 63: ends ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ({"type": "stop", "matched": 3}, Status.COMPLETED),
        ({"type": "stop", "matched": [30, 3]}, Status.COMPLETED),
        ({"type": "stop", "matched": None}, Status.COMPLETED),
        ({"type": "length", "length": 2}, Status.TRUNCATED),
    ],
)
@pytest.mark.parametrize("ids", [[30, 3], [30, 2]])
@pytest.mark.parametrize("generate", BOTH)
async def test_case_63_the_finish_reason_decides_and_no_single_end_id(
    generate: Any, ids: list[int], finish: dict[str, Any], status: Status
) -> None:
    raw = a_reply(ids, log_probs=A2_LOG_PROBS, finish=finish)
    ending, requests = await attempted(raw, generate=generate, stop_token_ids=(2, 3))
    sample = delivered(ending)
    assert sample.status is status
    check(sample, requests, [(ids, A2_LOG_PROBS)])


# --- 65: streams ---------------------------------------------------------------------------------
@pytest.mark.parametrize("chunks", [1, 3])
async def test_case_65_an_engine_that_streams_unasked_is_no_reply(chunks: int) -> None:
    one = b"data: " + LAST + b"\n\n"
    ending, _ = await attempted(one * chunks + b"data: [DONE]\n\n")
    not_trained(ending, Detail.BAD_REPLY)


@pytest.mark.parametrize(
    ("kind", "raw"), [("sglang", LAST), ("vllm", a_vllm_reply(A2, prompt_tokens=2))]
)
async def test_case_60_65_every_request_asks_for_a_whole_reply(kind: str, raw: bytes) -> None:
    async with scripted(raw) as engine:
        pool = EnginePool([engine.url], max_token_id=2000, kind=kind)
        reply = await pool.generate(RequestIds([b"1,2"], 2), Sampling(), routing_key="k", version=0)
        await pool.aclose()
    assert reply.finish is Finish.STOP
    assert [body["stream"] for body in engine.requests] == [False]
