"""The proof of promise 1 can fail: its checks and its verdict, on made-up samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_model import valid_call
from rollstream.errors import Status, StopReason
from rollstream.sample import Call, Sample
from tests.e2e.fidelity.breaks import BREAKS, Text
from tests.e2e.fidelity.check import (
    Kind,
    check_log_probs,
    check_sample,
    expected_result,
)
from tests.e2e.fidelity.merges import check_merges
from tests.e2e.fidelity.proof import decode, encode
from tests.e2e.fidelity.report import Report
from tests.e2e.fidelity.teacher import exam_of
from tests.e2e.fidelity.wire import WireCall, WireFolder

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "<|im_start|>user\nWhat is 1 + 7?<|im_end|>\n<|im_start|>assistant\n"
# "ad" and "d": two tokens for what the vocabulary has as one.
FIRST = ("<tool_call>", '{"', "name", '":"', "ad", "d", '","', "arguments", '":{"', "a", '":', "1")
REST = (',"', "b", '":', "7", "}}", "</tool_call>", "<|im_end|>")
OBSERVED = (
    "\n<|im_start|>user\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
SAMPLING = {"temperature": 0.7, "max_new_tokens": 64, "seed": 5, "top_p": 1.0}
SENT = {"temperature": 0.7, "max_new_tokens": 64, "sampling_seed": 5}


def ids_of(*pieces: str) -> list[int]:
    return [number for piece in pieces for number in encode(piece)]


def a_case() -> tuple[Sample, dict[str, WireCall]]:
    """Return an honest sample of two turns, the first one aborted once and resumed."""
    replies = [(ids_of(*FIRST), "abort", 0), (ids_of(*REST), "stop", 1),
               (ids_of(" The", " sum", " is", ".", "<|im_end|>"), "stop", 1)]  # fmt: skip
    tokens = encode(PROMPT)
    num_prompt = len(tokens)
    mask: list[int] = []
    log_probs: list[float] = []
    calls: list[Call] = []
    wires: dict[str, WireCall] = {}
    for number, (ids, finish, version) in enumerate(replies):
        if number == 2:
            seen = encode(OBSERVED)
            tokens, mask = tokens + seen, mask + [0] * len(seen)
            log_probs += [0.0] * len(seen)
        own = np.array([-0.1234567 * (i + 1) - number for i in range(len(ids))], np.float32)
        rid, start, end = f"{number:032x}", len(tokens), len(tokens) + len(ids)
        wires[rid] = WireCall(
            rid, np.array(tokens, np.int32), SENT, np.array(ids, np.int32), own, finish,
            [(version, 0, len(ids))], 0, len(tokens),
        )  # fmt: skip
        calls.append(
            Call(rid, "http://e", start, end, finish, [(version, start, end)], version,
                 "temperature", dict(SAMPLING))
        )  # fmt: skip
        tokens, mask = tokens + ids, mask + [1] * len(ids)
        log_probs += own.tolist()
    told = {"turn": 0, "id": "c", "name": "add", "arguments": '{"a": 1, "b": 7}', "executed": True}
    sample = Sample(
        group_index=3, member=1, index=1, rollout_id=1, prompt=[{"role": "user", "content": "?"}],
        tokens=np.array(tokens, np.int32), response_length=len(tokens) - num_prompt,
        loss_mask=np.array(mask, np.uint8), rollout_log_probs=np.array(log_probs, np.float32),
        calls=calls, metadata={"tool_calls": [told]},
    )  # fmt: skip
    sample.response = decode(sample.tokens[num_prompt:])
    sample.derive_weight_versions()
    sample.spec_info.completion_token_num = sum(len(ids) for ids, _, _ in replies)
    sample.prefix_cache_info.total_prompt_tokens = sum(c.start for c in calls)
    sample.finish(StopReason.STOP, Status.COMPLETED)
    sample.validate()
    return sample, wires


def kinds(sample: Sample, wires: dict[str, WireCall]) -> set[Kind]:
    found = [*check_sample(sample, wires.get, decode), *check_merges(sample, wires.get, decode)]
    return {finding.kind for finding in found}


@pytest.fixture(autouse=True)
def _vocabulary(vocabulary: Path) -> None:
    """What `encode` and `decode` of the proof read."""
    assert vocabulary.exists()


# --- the checks ----------------------------------------------------------------------------------
def test_honest_sample_has_no_finding() -> None:
    sample, wires = a_case()
    found = [*check_sample(sample, wires.get, decode), *check_merges(sample, wires.get, decode)]
    assert [str(finding) for finding in found] == []


FOUND_AS = [
    ("retokenize", Kind.SAMPLED),
    ("retokenize", Kind.PREFIX),
    ("shift", Kind.LOG_PROB),
    ("temperature", Kind.CALLS),
    ("drop", Kind.PREFIX),
    ("versions", Kind.CALLS),
    ("observed", Kind.OBSERVED),
    ("mask", Kind.MASK),
    ("rounded", Kind.LOG_PROB),
]


@pytest.mark.parametrize(("damage", "kind"), FOUND_AS)
def test_damage_to_a_sample_is_found_by_its_name(damage: str, kind: Kind) -> None:
    sample, wires = a_case()
    damaged = BREAKS[damage](sample, Text(encode, decode))
    damaged.validate()  # the record itself cannot tell
    assert kind in kinds(damaged, wires)
    assert kinds(*a_case()) == set()  # and the damage was done to a copy
    assert kinds(sample, wires) == set()


def test_every_damage_is_tried() -> None:
    assert {damage for damage, _ in FOUND_AS} == set(BREAKS)


def edit(wires: dict[str, WireCall], number: int, **fields: Any) -> dict[str, WireCall]:
    rid = f"{number:032x}"
    return wires | {rid: dataclasses.replace(wires[rid], **fields)}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda w: {k: v for k, v in w.items() if int(k) != 1}, Kind.NO_WIRE),
        (lambda w: edit(w, 2, input_ids=w[f"{2:032x}"].input_ids[:-1]), Kind.PREFIX),
        (lambda w: edit(w, 2, prompt_tokens=3), Kind.PREFIX),
        (lambda w: edit(w, 0, finish="stop"), Kind.CALLS),
        (lambda w: edit(w, 0, sampling=SENT | {"sampling_seed": 6}), Kind.CALLS),
        (lambda w: edit(w, 0, sampling=SENT | {"top_p": 0.9}), Kind.CALLS),
        (lambda w: edit(w, 1, cached_tokens=4), Kind.MERGE),
    ],
)
def test_wire_that_says_otherwise_is_found(
    change: Callable[[dict[str, WireCall]], dict[str, WireCall]], kind: Kind
) -> None:
    sample, wires = a_case()
    assert kind in kinds(sample, change(wires))


@pytest.mark.parametrize(
    "told",
    [
        [],
        [{"turn": 0, "name": "add", "arguments": '{"a": 1, "b": 8}', "executed": True}],
        [{"turn": 0, "name": "sub", "arguments": '{"a": 1, "b": 7}', "executed": True}],
        [{"turn": 0, "name": "fly", "arguments": '{"a": 1, "b": 7}', "executed": True}],
        [{"turn": 1, "name": "add", "arguments": '{"a": 1, "b": 7}', "executed": True}],
        [{"turn": 0, "name": "add", "arguments": '{"a": 1, "b": 7}', "executed": False}],
    ],
)
def test_observation_that_the_tools_did_not_give_is_found(told: list[dict[str, Any]]) -> None:
    sample, wires = a_case()
    sample.metadata = {"tool_calls": told}
    assert kinds(sample, wires) == {Kind.OBSERVED}


def test_expected_result_is_computed_from_the_recorded_call_alone() -> None:
    def result(name: str, arguments: str, *, executed: bool = True) -> str | None:
        return expected_result({"name": name, "arguments": arguments, "executed": executed})

    assert result("add", '{"a": 12345678901234567890, "b": 1}') == "12345678901234567891"
    assert result("sub", '{"a": 1, "b": 7}') == "-6"
    assert result("add", '{"a": -4}') == "-4"
    assert result("fly", '{"a": 1}') is None
    assert result("add", '{"b": 1}') is None
    assert result("add", '{"a": 1') is None
    assert result("add", '{"a": 1}', executed=False) is None


def test_log_prob_beyond_the_tolerance_is_found_and_so_is_one_nobody_knows() -> None:
    sample, _ = a_case()
    exam = exam_of(sample)
    assert sample.rollout_log_probs is not None
    exact = sample.rollout_log_probs[exam.positions - sample.prompt_length].astype(np.float64)
    inside = check_log_probs(sample, exam.positions, exact + 0.9e-4, 1e-4)
    assert inside.findings == []
    assert inside.largest == pytest.approx(0.9e-4)
    assert inside.checked == len(exact) == sample.num_sampled
    for wrong in (
        exact + np.eye(1, len(exact), 4)[0] * 2e-4,
        np.where(exam.versions, exact, np.nan),
    ):
        assert [f.kind for f in check_log_probs(sample, exam.positions, wrong, 1e-4).findings] == [
            Kind.DISTRIBUTION
        ]


def test_exam_asks_for_the_version_and_temperature_of_each_token() -> None:
    sample, _ = a_case()
    first = sample.calls[0]
    middle = first.start + 3
    first.versions = [(0, first.start, middle), (1, middle, first.end), (7, first.end, first.end)]
    exam = exam_of(sample)
    assert exam.versions[:4].tolist() == [0, 0, 0, 1]
    assert set(exam.versions.tolist()) == {0, 1}
    assert set(exam.temperatures.tolist()) == {0.7}


# --- the verdict ---------------------------------------------------------------------------------
def a_report(**fields: Any) -> Report:
    good: dict[str, Any] = {
        "samples": 208, "checked_tokens": 30_000, "max_abs_difference": 2e-5,
        "service_samples": 104, "service_token_mismatches": 0.0, "calls_executed": 700,
        "malformed": 40, "noncanonical": 100, "aborted": 300, "resumed": 60, "versions": 6,
        "mixed_versions": 30, "mixed_calls": 12, "merged": 416, "top_p_samples": 4,
        "top_p_refused": True, "top_p_max_difference": 0.1,
    }  # fmt: skip
    report = Report(asked=208, **(good | fields))
    report.turns.update(dict.fromkeys(range(1, 13), 17))
    report.temperatures.update({1.0: 104, 0.7: 104})
    return report


def test_good_report_is_a_proof_and_its_line_has_the_promised_keys() -> None:
    report = a_report()
    assert (report.broken, report.missing) == ([], [])
    line = json.loads(report.to_json())
    assert [*line][:5] == [
        "samples", "checked_tokens", "max_abs_difference", "prefix_breaks", "mismatches"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_breaks": 1},
        {"mismatches": 1},
        {"max_abs_difference": 1.1e-4},
        {"max_abs_difference": float("nan")},
        {"service_token_mismatches": 1.0},
        {"top_p_refused": False},
        {"top_p_unmarked": 1},
        {"top_p_wrong": 1},
    ],
)
def test_broken_promise_is_said(fields: dict[str, Any]) -> None:
    assert len(a_report(**fields).broken) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"samples": 207},
        {"service_samples": 103},
        {"calls_executed": 100},
        {"malformed": 0},
        {"noncanonical": 0},
        {"aborted": 3},
        {"resumed": 3},
        {"versions": 2},
        {"mixed_versions": 0},
        {"mixed_calls": 0},
        {"merged": 208},
        {"top_p_samples": 0},
        {"top_p_max_difference": 0.0},
        {"service_token_mismatches": None},
    ],
)
def test_run_that_checked_too_little_is_no_proof(fields: dict[str, Any]) -> None:
    assert len(a_report(**fields).missing) == 1


def test_run_without_long_samples_or_without_one_temperature_is_no_proof() -> None:
    report = a_report()
    del report.turns[12]
    report.temperatures.clear()
    assert len(report.missing) == 2


# --- what it reads ---
def test_wire_folder_reads_what_went_over_http_and_nothing_that_failed(tmp_path: Path) -> None:
    request = {"rid": "a", "input_ids": [1, 2], "sampling_params": {"temperature": 1.0}}
    reply = {
        "meta_info": {
            "finish_reason": {"type": "abort", "message": "", "status_code": None},
            "output_token_logprobs": [[-0.1234567890123, 7, None]],
            "weight_versions": [{"version": "3", "start": 0, "end": 1}],
            "prompt_tokens": 2,
        }
    }
    (tmp_path / "a.req").write_text(json.dumps(request))
    (tmp_path / "a.rep").write_text(json.dumps(reply))
    (tmp_path / "b.req").write_text(json.dumps(request))
    (tmp_path / "c.req").write_text(json.dumps(request))
    (tmp_path / "c.rep").write_text(json.dumps({"error": "busy"}))
    folder = WireFolder(tmp_path)
    call = folder.call("a")
    assert call is not None
    assert (call.input_ids.tolist(), call.output_ids.tolist()) == ([1, 2], [7])
    assert call.log_probs.tolist() == [float(np.float32(-0.1234567890123))]
    assert (call.finish, call.versions) == ("abort", [(3, 0, 1)])
    assert folder.call("b") is None
    assert folder.call("c") is None
    assert folder.in_flight() == ["b"]
    assert folder.aborted() == 1


def test_valid_call_tells_calls_from_talk() -> None:
    assert valid_call('<tool_call>{"name":"add","arguments":{}}</tool_call>') is True
    assert valid_call('<tool_call>{"name":"add","arguments":{}</tool_call>') is False
    assert valid_call('<tool_call>{"arguments":{}}</tool_call>') is False
    assert valid_call(" The sum is one.") is None
