"""Every row of the validation table of docs/engines.md, as exact bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import EngineFault
from rollstream.sample import UNKNOWN_VERSION, PrefixCacheInfo, SpecInfo
from tests.scripted_engine import a_reply
from worker.engines.faults import RULES, Detail
from worker.engines.protocol.reply import read_reply
from worker.engines.protocol.versions import VersionMap
from worker.types import Completion, Finish

MAX_ID = 151668
DOCS = Path(__file__).parents[3] / "docs" / "engines.md"


def read(
    raw: bytes, *, status: int = 200, num_prompt: int = 7, version: int = 0, **options: Any
) -> Completion:
    return read_reply(
        status,
        raw,
        rid="f" * 32,
        engine="http://e",
        num_prompt=num_prompt,
        version=version,
        max_token_id=MAX_ID,
        **options,
    )


def detail_of(raw: bytes, **options: Any) -> str:
    with pytest.raises(EngineFault) as caught:
        read(raw, **options)
    assert caught.value.retryable is RULES[Detail(caught.value.detail)].retryable
    return caught.value.detail


def test_reply_gives_arrays_json_and_provenance_of_what_was_sampled() -> None:
    got = read(a_reply(prompt_tokens=7, cached_tokens=3, weight_version="12"))
    assert got.ids.dtype == np.int32
    assert got.ids.tolist() == [59, 79075, 90, 23, 92]
    assert got.log_probs.dtype == np.float32
    assert got.log_probs.tolist() == [0.0, -0.0078125, -0.015625, -0.0234375, -0.03125]
    assert got.json == b"59,79075,90,23,92"
    assert (got.finish, got.matched, got.engine, got.rid) == (Finish.STOP, 92, "http://e", "f" * 32)
    assert got.versions == [(0, 0, 5), (12, 5, 5)]
    assert (got.cache.cached_tokens, got.cache.total_prompt_tokens) == (3, 7)


def test_reply_log_probs_are_bit_equal_to_the_float32_the_engine_had() -> None:
    exact = np.random.default_rng(0).uniform(-20, 0, 2000).astype(np.float32)
    got = read(a_reply(list(range(2000)), log_probs=[float(p) for p in exact]))
    assert got.log_probs.tobytes() == exact.tobytes()


@pytest.mark.parametrize(
    ("finish", "expected", "matched"),
    [
        ({"type": "stop", "matched": 151645}, Finish.STOP, 151645),
        ({"type": "stop", "matched": "</tool_call>"}, Finish.STOP, "</tool_call>"),
        ({"type": "stop", "matched": [90, 92]}, Finish.STOP, 92),
        ({"type": "stop"}, Finish.STOP, None),
        ({"type": "length", "length": 5}, Finish.LENGTH, None),
        ({"type": "abort", "message": "x", "status_code": None}, Finish.ABORT, None),
    ],
)
def test_reply_finish_reasons_keep_the_tokens(
    finish: dict[str, Any], expected: Finish, matched: Any
) -> None:
    got = read(a_reply(finish=finish))
    assert (got.finish, got.matched, len(got.ids)) == (expected, matched, 5)


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        # ids and log-probs that are not equally many (cases 51 and 53), or of other ids
        (a_reply([31, 32], log_probs=[-0.1], completion_tokens=2), "logprob_length_mismatch"),
        (a_reply([31, 32, 2], completion_tokens=2), "logprob_length_mismatch"),
        (a_reply([31, 32], output_token_logprobs=None), "logprob_length_mismatch"),
        (
            a_reply([31, 32], output_token_logprobs=[[-0.1, i, None] for i in (31, 32, 2)]),
            "logprob_length_mismatch",
        ),
        (
            a_reply([31, 32], output_token_logprobs=[[-0.1, 31, None], [-0.1, 30, None]]),
            "id_mismatch",
        ),
        # log-probs that no distribution has
        (a_reply([31], log_probs=[None]), "bad_logprob"),
        (a_reply([31], log_probs=[0.01]), "bad_logprob"),
        (a_reply([31, 32], log_probs=[-0.5, -1e39]), "bad_logprob"),
        (a_reply([31], log_probs=[-0.5]).replace(b"-0.5", b"-1e999"), "bad_reply"),
        (a_reply([31], log_probs=[-0.5]).replace(b"-0.5", b"NaN"), "bad_reply"),
        # ids outside the vocabulary
        (a_reply([31, MAX_ID + 1]), "bad_token"),
        (a_reply([-1]), "bad_token"),
        (a_reply([2**40]), "bad_token"),
        # what the engine calls an end
        (a_reply(finish={"type": "stop", "matched": "NaN happened"}), "nan"),
        (a_reply(finish={"type": "abort", "status_code": 500, "message": "x"}), "abort_error"),
        (a_reply(finish={"type": "abort", "status_code": 503, "message": "full"}), "abort_error"),
        (a_reply(finish={"type": "tool_calls"}), "unknown_finish"),
        (a_reply(drop=["finish_reason"]), "unknown_finish"),
        # prompts that were cut (case 83)
        (a_reply(prompt_tokens=6), "prompt_mismatch"),
        # frames
        (a_reply()[:-20], "bad_reply"),
        (b"", "bad_reply"),
        (b'{"error":{"message":"x"}}', "bad_reply"),
        (b"\xff\xfe", "bad_reply"),
        (b"[" * 100_000, "bad_reply"),
        (b'{"meta_info":' + b"[" * 100_000, "bad_reply"),
        # the reply of another request
        (a_reply(id="e" * 32), "bad_reply"),
        (a_reply(weight_versions=[{"version": "3", "start": 0, "end": 4}]), "bad_reply"),
        (a_reply(weight_versions=[{"version": "3", "start": 1, "end": 5}]), "bad_reply"),
        (
            a_reply(
                weight_versions=[
                    {"version": "3", "start": 0, "end": 2},
                    {"version": "4", "start": 3, "end": 5},
                ]
            ),
            "bad_reply",
        ),
    ],
)
def test_reply_that_contradicts_itself_is_a_fault_and_its_tokens_are_discarded(
    raw: bytes, detail: str
) -> None:
    assert detail_of(raw) == detail


def test_reply_tolerates_a_log_prob_above_zero_by_rounding_only() -> None:
    assert read(a_reply([31], log_probs=[1e-6])).log_probs[0] == np.float32(1e-6)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"text":"","meta_info":{"finish_reason":{"type":"stop"},"completion_tokens":0}}',
        b'{"text":"","meta_info":{"id":"ffffffffffffffffffffffffffffffff","finish_reason":{"type":"abort","message":"gone"}}}',
        a_reply(
            [],
            finish={"type": "abort", "message": "Abort in waiting queue"},
            weight_versions=[{"version": "1", "start": 0, "end": 0}],
            drop=["output_ids"],
        ),
    ],
)
def test_reply_without_tokens_is_empty_arrays_and_no_fault(raw: bytes) -> None:
    got = read(raw)
    assert (got.ids.shape, got.ids.dtype) == ((0,), np.int32)
    assert (got.log_probs.shape, got.log_probs.dtype) == ((0,), np.float32)
    assert (got.json, got.versions) == (b"", [])


def test_reply_without_output_ids_takes_them_from_the_log_probs() -> None:
    assert read(a_reply(drop=["output_ids"])).ids.tolist() == [59, 79075, 90, 23, 92]


@pytest.mark.parametrize(
    ("label", "dispatched", "version"),
    [
        ("7", 7, 7),
        (7, UNKNOWN_VERSION, 7),
        (None, 3, UNKNOWN_VERSION),
        ("default", 0, 0),
        ("default", 3, UNKNOWN_VERSION),
        ("default", UNKNOWN_VERSION, UNKNOWN_VERSION),
        ("v1.0", 1, UNKNOWN_VERSION),
        (-3, 1, UNKNOWN_VERSION),
        ("²", 1, UNKNOWN_VERSION),
        ("9" * 18, 10**18 - 1, 10**18 - 1),
        ("9" * 19, 1, UNKNOWN_VERSION),
        ("9" * 5000, 1, UNKNOWN_VERSION),
        (10**18 - 1, 10**18 - 1, 10**18 - 1),
        (10**18, 1, UNKNOWN_VERSION),
        ("", 1, UNKNOWN_VERSION),
    ],
)
def test_version_label_counts_as_a_number_or_is_unknown(
    label: Any, dispatched: int, version: int
) -> None:
    assert VersionMap().of(label, dispatched) == version
    assert read(a_reply(weight_version=label), version=dispatched).versions == [(version, 0, 5)]


@pytest.mark.parametrize(
    ("label", "dispatched", "spans"),
    [
        ("7", 3, [(3, 0, 5), (7, 5, 5)]),
        (7, 0, [(0, 0, 5), (7, 5, 5)]),
        ("step-9", 8, [(8, 0, 5), (9, 5, 5)]),
        ("step-9", 9, [(9, 0, 5)]),
        ("3", 7, [(3, 0, 5)]),
    ],
)
def test_label_without_spans_is_the_newest_and_claims_no_token_for_newer_weights_than_at_dispatch(
    label: Any, dispatched: int, spans: list[tuple[int, int, int]]
) -> None:
    versions = VersionMap()
    versions.set({"step-9": 9})
    raw = a_reply(weight_version=label)
    assert read(raw, version=dispatched, versions=versions).versions == spans


def test_reply_without_any_version_is_kept_under_the_unknown_marker() -> None:
    assert read(a_reply(drop=["weight_version"])).versions == [(UNKNOWN_VERSION, 0, 5)]


def test_reply_version_spans_are_kept_as_the_engine_reports_them() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 5}]
    assert read(a_reply(weight_versions=spans)).versions == [(3, 0, 2), (4, 2, 5)]


def test_reply_span_of_an_unknown_label_stays_unknown_between_known_ones() -> None:
    spans = [
        {"version": version, "start": at, "end": at + size}
        for version, at, size in (("3", 0, 1), ("v1.0", 1, 2), (None, 3, 1), (4, 4, 1))
    ]
    found = read(a_reply(weight_versions=spans), version=3).versions
    assert found == [(3, 0, 1), (UNKNOWN_VERSION, 1, 3), (UNKNOWN_VERSION, 3, 4), (4, 4, 5)]


@pytest.mark.parametrize(
    "names",
    [
        ("spec_accept_token_num", "spec_draft_token_num"),
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
    ],
)
def test_reply_speculation_counters_are_read_under_both_names(names: tuple[str, str]) -> None:
    spec = read(a_reply(**{names[0]: 10, names[1]: 15, "spec_verify_ct": 3})).spec
    assert (spec.spec_accept_token_num, spec.spec_draft_token_num) == (10, 15)
    assert (spec.spec_accept_rate, spec.spec_accept_length) == (10 / 15, 5 / 3)


@pytest.mark.parametrize("number", [-5, 2**31, 2**70])
def test_reply_counters_that_count_nothing_are_none(number: int) -> None:
    got = read(
        a_reply(
            cached_tokens=number, spec_num_correct_drafts=number, spec_num_proposed_drafts=number,
            spec_verify_ct=number,
        )
    )  # fmt: skip
    assert got.cache == PrefixCacheInfo(0, 7)
    assert got.spec == SpecInfo(0, 0, 0, 5)


@pytest.mark.parametrize(
    ("status", "body", "detail"),
    [
        (400, "This endpoint's maximum context length is 64 tokens", "context_overflow"),
        (
            400,
            "Input length (70) exceeds model's maximum context length (64)",
            "context_overflow",
        ),
        (400, "max_tokens must be at least 1", "context_overflow"),
        (400, "max_new_tokens must be at least 0, got -3.", "context_overflow"),
        (
            400,
            "The input (70 tokens) is longer than the model's context length (64 tokens).",
            "context_overflow",
        ),
        (
            400,
            "Requested token count exceeds the model's maximum context length of 64 tokens.",
            "context_overflow",
        ),
        (413, "prompt is too long", "context_overflow"),
        (400, "Unexpected message role", "refused"),
        (400, "unknown field `seed`", "refused"),
        (404, "Not Found", "refused"),
        (401, "Unauthorized", "refused"),
        (307, "", "refused"),
        (429, "slow down", "unavailable"),
        (502, "", "unavailable"),
        (503, "The request queue is full.", "unavailable"),
        (504, "", "unavailable"),
        (500, "maximum context length", "server_error"),
    ],
)
@pytest.mark.parametrize("shape", ["error", "nested", "message", "detail", "text"])
def test_http_status_decides_and_only_a_refusal_is_read_for_overflow(
    status: int, body: str, detail: str, shape: str
) -> None:
    raw = {
        "error": json.dumps({"error": body}),
        "nested": json.dumps({"error": {"message": body, "code": status}}),
        "message": json.dumps({"object": "error", "message": body}),
        "detail": json.dumps({"detail": body}),
        "text": body,
    }[shape].encode()
    assert detail_of(raw, status=status) == detail


@pytest.mark.parametrize(
    ("code", "message", "detail"),
    [
        (400, "The input is longer than the model's context length", "context_overflow"),
        (400, "bad grammar", "refused"),
        (429, "queue full", "unavailable"),
        (408, "maximum context length", "unavailable"),
        (302, "", "abort_error"),
        (500, "maximum context length", "abort_error"),
    ],
)
def test_abort_with_a_code_of_4xx_is_that_status_and_any_other_one_has_a_name_of_its_own(
    code: int, message: str, detail: str
) -> None:
    finish = {"type": "abort", "status_code": code, "message": message}
    assert detail_of(a_reply(finish=finish)) == detail


def test_fault_message_is_short_whatever_the_engine_says() -> None:
    with pytest.raises(EngineFault) as caught:
        read(b"x" * 100_000, status=500)
    assert len(caught.value.message) < 700


def test_docs_show_every_detail_with_its_rule() -> None:
    section = DOCS.read_text().partition("## Faults and retries\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", section, re.MULTILINE)
    shown = {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}
    yes = {True: "yes", False: "no"}
    assert shown == {
        detail.value: [
            rule.when,
            yes[rule.again],
            yes[rule.stop_first],
            str(rule.eject_after or "never"),
            yes[rule.retryable],
        ]
        for detail, rule in RULES.items()
    }


def test_reply_that_names_its_request_is_read() -> None:
    assert read(a_reply(id="f" * 32)).rid == "f" * 32
