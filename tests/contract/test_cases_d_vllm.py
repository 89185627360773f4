"""Cases 51 to 64 once more, in what vLLM answers: short, long, empty, missing, in older spellings.

Whole attempts as in `test_cases_d`, with the same judgement; only the bytes are another protocol's.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.errors import Report, Status, StopReason
from tests import generate_stage
from tests.contract.test_cases_d import BOTH, attempted, check, delivered, not_trained
from tests.scripted_engine import a_vllm_reply
from tests.toy import A1, A1_LOG_PROBS, A2, A2_LOG_PROBS, O1, P0
from worker.engines.faults import Detail
from worker.members.work import leaves_of


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_stage, "PROTOCOL", "vllm")


def content(ids: Any, log_probs: Any) -> dict[str, Any]:
    """Return the log-probs of a choice."""
    return {"content": [{"token_id": i, "logprob": p} for i, p in zip(ids, log_probs, strict=True)]}


def counting(raw: bytes, completion_tokens: Any) -> bytes:
    """Return a reply that says another count."""
    body = json.loads(raw)
    body["usage"]["completion_tokens"] = completion_tokens
    return json.dumps(body).encode()


FIRST = a_vllm_reply(A1, log_probs=A1_LOG_PROBS)
LAST = a_vllm_reply(A2, log_probs=A2_LOG_PROBS)
UNEQUAL = {
    "51: the stop id is cut from the ids only": counting(
        a_vllm_reply([31, 32], logprobs=content([31, 32, 2], A1_LOG_PROBS)), 2
    ),
    "51: and the count is right": counting(
        a_vllm_reply([31, 32], logprobs=content([31, 32, 2], A1_LOG_PROBS)), 3
    ),
    "53a: a log-prob is missing": a_vllm_reply(A1, logprobs=content(A1[:2], A1_LOG_PROBS[:2])),
    "53b: log-probs are null": a_vllm_reply(A1, logprobs=None),
    "53b: their list is null": a_vllm_reply(A1, logprobs={"content": None}),
    "53: log-probs are absent": a_vllm_reply(A1, drop=["logprobs"]),
    "60: ids got lost on the way": counting(FIRST, 14),
    "ids are absent and counted": counting(a_vllm_reply([], drop=["token_ids", "logprobs"]), 3),
}


@pytest.mark.parametrize("raw", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("before", [(), (FIRST,)], ids=["first-turn", "second-turn"])
async def test_case_51_53_60_lists_of_unequal_length_are_never_zipped_and_never_padded(
    before: tuple[bytes, ...], raw: bytes
) -> None:
    ending, requests = await attempted(*before, raw)
    assert len(requests) == len(before) + 1
    not_trained(ending, Detail.LOGPROB_LENGTH_MISMATCH)


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (b"null", Detail.BAD_LOGPROB),
        (b"0.5", Detail.BAD_LOGPROB),
        (b"-9999.0", Detail.BAD_LOGPROB),  # its word for "no evidence"
        (b"-1e39", Detail.BAD_LOGPROB),
        (b"NaN", Detail.BAD_REPLY),
        (b'"-0.5"', Detail.BAD_REPLY),
    ],
)
async def test_case_53_one_log_prob_that_is_none_is_not_replaced_by_anything(
    value: bytes, detail: Detail
) -> None:
    good = a_vllm_reply(A1, log_probs=[-0.5, -0.25, -0.123])
    assert good.count(b"-0.123") == 1
    ending, _ = await attempted(good.replace(b"-0.123", value))
    not_trained(ending, detail)


async def test_case_52_ids_behind_a_stop_string_are_kept_and_the_next_request_holds_them() -> None:
    ids, values = [31, 6, 32, 7, 31, 32], [-0.5, -0.25, -0.125, -1.0, -2.0, -3.0]
    first = a_vllm_reply(ids, log_probs=values, stop_reason="</tool_call>")
    ending, requests = await attempted(first, LAST, first=ids, stop=("</tool_call>",))
    check(delivered(ending), requests, [(ids, values), (A2, A2_LOG_PROBS)])
    assert requests[1][: len(P0) + len(ids)] == [*P0, *ids]


async def test_case_62_an_end_id_that_nobody_sampled_is_an_observation() -> None:
    ids, values = [31, 32], [-0.5, -0.25]
    first = a_vllm_reply(ids, log_probs=values, stop_reason="llo")
    ending, requests = await attempted(first, LAST, first=ids, stop=("llo",))
    sample = delivered(ending)
    assert requests[1] == [*P0, *ids, 2, *O1]
    check(sample, requests, [(ids, values), (A2, A2_LOG_PROBS)])
    assert sample.loss_mask is not None
    assert (sample.tokens[12], sample.loss_mask[2]) == (2, 0)


NOTHING = {
    "empty lists": a_vllm_reply([]),
    "null lists": a_vllm_reply([], token_ids=None, logprobs=None, weight_versions=None),
    "no lists": a_vllm_reply([], drop=["token_ids", "logprobs", "weight_versions", "usage"]),
}


@pytest.mark.parametrize("raw", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("generate", BOTH)
async def test_case_54_an_empty_reply_is_a_sample_with_nothing_to_train_on(
    generate: Any, raw: bytes
) -> None:
    ending, requests = await attempted(raw, generate=generate)
    sample = delivered(ending)
    check(sample, requests, [([], [])])
    assert (sample.status, sample.response_length) == (Status.COMPLETED, 0)
    assert sample.tokens.tolist() == P0


async def test_case_55_a_reply_of_the_end_id_alone_is_a_completed_sample() -> None:
    ending, requests = await attempted(a_vllm_reply([2], log_probs=[-0.3]))
    sample = delivered(ending)
    check(sample, requests, [([2], [-0.3])])
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([{"version": "7", "start": 0, "end": 2}], [7]),
        ([{"version": 7, "start": 0, "end": 2}], [7]),
        ([{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}], [6, 7]),
        ([{"version": "step-7", "start": 0, "end": 2}], [0]),  # not named yet: that of the dispatch
        (None, [0]),
    ],
)
async def test_case_56_versions_are_numbers_and_what_names_none_counts_as_the_one_at_dispatch(
    spans: Any, versions: list[int]
) -> None:
    ending, requests = await attempted(
        a_vllm_reply(A2, log_probs=A2_LOG_PROBS, weight_versions=spans)
    )
    sample = delivered(ending)
    check(sample, requests, [(A2, A2_LOG_PROBS)])
    found = [version for version, _, _ in sample.calls[0].versions]
    assert found == versions


ABORTS = [
    a_vllm_reply([], finish="abort"),
    a_vllm_reply([], finish="abort", token_ids=None, logprobs=None, weight_versions=None),
    a_vllm_reply([], finish="abort", drop=["usage", "logprobs", "token_ids", "stop_reason"]),
]


@pytest.mark.parametrize("raw", ABORTS)
async def test_case_57_an_abort_with_almost_no_fields_brings_no_ids_and_is_given_back(
    raw: bytes,
) -> None:
    ending, requests = await attempted(FIRST, raw)
    assert (ending.report, ending.stop_reason) == (Report.BACK, StopReason.ABORT_WEIGHTS)
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    assert sample.status is Status.ABORTED
    check(sample, requests, [(A1, A1_LOG_PROBS), ([], [])], num_calls=1)


@pytest.mark.parametrize("echo", [None, "absent"])
async def test_case_59_the_prompt_is_what_we_sent_whatever_the_reply_says_of_it(echo: Any) -> None:
    raw = LAST if echo == "absent" else a_vllm_reply(A2, log_probs=A2_LOG_PROBS,
                                                      prompt_token_ids=None)  # fmt: skip
    ending, requests = await attempted(raw)
    sample = delivered(ending)
    check(sample, requests, [(A2, A2_LOG_PROBS)])
    assert sample.tokens[: sample.prompt_length].tolist() == P0


@pytest.mark.parametrize("echo", [[], P0[1:], [*P0, 3]])
async def test_case_59_an_echo_of_another_length_is_a_refusal_and_never_half_a_sample(
    echo: list[int],
) -> None:
    ending, _ = await attempted(a_vllm_reply(A2, log_probs=A2_LOG_PROBS, prompt_token_ids=echo))
    assert ending.report is Report.FINAL
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    assert (sample.metadata["error_detail"], len(sample.tokens)) == ("prompt_mismatch", 0)


@pytest.mark.parametrize(
    ("finish", "reason", "status"),
    [
        ("stop", None, Status.COMPLETED), ("stop", 3, Status.COMPLETED),
        ("stop", 2, Status.COMPLETED), ("length", None, Status.TRUNCATED),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ids", [[30, 3], [30, 2]])
async def test_case_63_the_finish_reason_decides_and_no_single_end_id(
    ids: list[int], finish: str, reason: Any, status: Status
) -> None:
    raw = a_vllm_reply(ids, log_probs=A2_LOG_PROBS, finish=finish, stop_reason=reason)
    ending, requests = await attempted(raw, stop_token_ids=(2, 3))
    sample = delivered(ending)
    assert sample.status is status
    check(sample, requests, [(ids, A2_LOG_PROBS)])


async def test_log_probs_in_the_older_spelling_are_of_the_ids_that_they_name() -> None:
    named = [
        {"token": f"token_id:{i}", "logprob": p} for i, p in zip(A2, A2_LOG_PROBS, strict=True)
    ]
    ending, requests = await attempted(a_vllm_reply(A2, logprobs={"content": named}))
    check(delivered(ending), requests, [(A2, A2_LOG_PROBS)])
    named[0]["token"] = "token_id:31"
    ending, _ = await attempted(a_vllm_reply(A2, logprobs={"content": named}))
    not_trained(ending, Detail.ID_MISMATCH)
