"""What a prefill says of a sample's log-probs, and what a difference may be blamed on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollstream import rescore
from rollstream.sample import Sample
from tests.builders import a_sample


def reply_of(
    sample: Sample, log_probs: list[float | None] | None = None, *, version: Any = "0", **meta: Any
) -> dict[str, Any]:
    """Return an engine's answer: the recorded log-probs, or others, of the response."""
    request = rescore.request_of(sample)
    start = request["logprob_start_len"]
    ids = sample.tokens[start:].tolist()
    if log_probs is None:
        assert sample.rollout_log_probs is not None
        log_probs = sample.rollout_log_probs.astype(float).tolist()
    values = [None] * (len(ids) - len(log_probs)) + list(log_probs)
    known = {
        "weight_version": version,
        "input_token_logprobs": [[v, i, None] for v, i in zip(values, ids, strict=True)],
        "output_token_logprobs": [],
    }
    return {"text": "", "output_ids": [], "meta_info": known | meta}


def compared(
    sample: Sample, shift: float = 0.0, *, served: int = 0, **kw: Any
) -> rescore.Comparison:
    assert sample.rollout_log_probs is not None
    scored = (sample.rollout_log_probs + np.float32(shift)).astype(np.float32)
    return rescore.compare(sample, scored, served=served, **kw)


# --- the request and its reply -------------------------------------------------------------------
def conformance_164() -> Sample:
    return a_sample(prompt_ids=(10, 11, 12), turns=(((20, 21, 22), ()),))


def test_164_the_whole_response_is_scored_from_one_token_earlier_and_nothing_is_sampled() -> None:
    request = rescore.request_of(conformance_164())
    assert request["input_ids"] == [10, 11, 12, 20, 21, 22]
    assert request["logprob_start_len"] == 2
    assert request["sampling_params"] == {"max_new_tokens": 0, "temperature": 0}
    assert request["return_logprob"] is True


def test_164_log_probs_come_from_the_tail_of_the_answer() -> None:
    sample = conformance_164()
    scored = rescore.scores_of(sample, reply_of(sample, [-0.1, -0.2, -0.3]))
    assert scored.tolist() == [float(np.float32(x)) for x in (-0.1, -0.2, -0.3)]
    assert scored.dtype == np.float32
    assert rescore.SOURCE == "sglang_prefill_recompute"


def test_164_other_tokens_are_a_token_alignment_mismatch() -> None:
    sample = conformance_164()
    reply = reply_of(sample, [-0.1, -0.2, -0.3])
    reply["meta_info"]["input_token_logprobs"][2][1] = 99
    with pytest.raises(ValueError, match=r"token alignment mismatch: at token 4 .* 99, not 21"):
        rescore.scores_of(sample, reply)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[-0.1, 21, None], [-0.1, 22, None]], "token alignment mismatch: 2 tokens were scored"),
        (None, "scored nothing"),
        ("text", "scored nothing"),
        ([5, 6, 7], "is not \\[log-prob, id, text\\]"),
    ],
)
def test_an_answer_that_scores_something_else_is_refused(entries: Any, message: str) -> None:
    reply = {"meta_info": {"input_token_logprobs": entries}}
    with pytest.raises(ValueError, match=message):
        rescore.scores_of(conformance_164(), reply)


def test_a_refusal_of_the_engine_is_no_answer() -> None:
    with pytest.raises(ValueError, match=r"scored nothing: .*too long"):
        rescore.scores_of(conformance_164(), {"error": {"message": "too long"}})


def test_a_sample_without_a_prompt_begins_with_a_token_that_nobody_can_score() -> None:
    sample = a_sample(prompt_ids=(), turns=(((20, 21), ()),))
    assert rescore.request_of(sample)["logprob_start_len"] == 0
    scored = rescore.scores_of(sample, reply_of(sample, [None, -0.2]))
    assert np.isnan(scored[0])
    one = rescore.compare(sample, scored, served=0)
    assert len(one.counted()) == 1
    assert rescore.summarise([one]).not_comparable == {"no value": 1}


@pytest.mark.parametrize(
    ("label", "current", "current_label", "version"),
    [
        ("7", 9, "", 7),
        (7, 9, "", 7),
        ("step-9", 9, "step-9", 9),
        ("step-8", 9, "step-9", -1),
        ("default", 0, "", 0),
        ("default", 3, "", -1),
        (None, 3, "", -1),
        (True, 3, "", -1),
    ],
)
def test_an_engines_label_means_a_version_or_nothing(
    label: Any, current: int, current_label: str, version: int
) -> None:
    found = rescore.served_version(label, current=current, current_label=current_label)
    assert found == version


# --- what is compared ----------------------------------------------------------------------------
TURNS = (((4, 5, 6), (7, 8)), ((9, 10), ()))


def test_only_sampled_positions_are_compared_each_with_its_version() -> None:
    one = compared(a_sample(turns=TURNS, versions=[3, 4]), 0.01, served=4)
    assert one.positions.tolist() == [3, 4, 5, 8, 9]
    assert one.ids.tolist() == [4, 5, 6, 9, 10]
    assert one.versions.tolist() == [3, 3, 3, 4, 4]
    assert one.counted() == pytest.approx([0.01, 0.01], rel=1e-3)


def test_a_call_of_two_versions_is_compared_where_its_version_is_the_engines() -> None:
    sample = a_sample(turns=(((4, 5, 6, 7), ()),))
    sample.calls[0].versions = [(1, 3, 6), (2, 6, 7)]
    one = compared(sample, 0.5, served=2)
    assert len(one.counted()) == 1
    rows = {row.version: row for row in rescore.summarise([one]).rows}
    assert (rows[1].relation, rows[1].positions) == ("older", 3)
    assert (rows[2].relation, rows[2].positions) == ("same", 1)


def test_equal_log_probs_have_no_problem_and_a_row() -> None:
    summary = rescore.summarise([compared(a_sample(turns=TURNS))])
    assert summary.problems == []
    assert summary.first is None
    assert [(r.version, r.relation, r.positions, r.max) for r in summary.rows] == [
        (0, "same", 5, 0.0)
    ]


def test_a_difference_is_a_problem_with_the_first_position_and_both_values() -> None:
    good, bad = a_sample(turns=TURNS), a_sample(1, 2, turns=TURNS)
    assert bad.rollout_log_probs is not None
    scored = bad.rollout_log_probs.copy()
    scored[5] -= 1.5
    summary = rescore.summarise([compared(good), rescore.compare(bad, scored, served=0, leaf=1)])
    (problem,) = summary.problems
    assert "version 0" in problem
    assert "99th percentile" in problem
    first = summary.first
    assert first is not None
    assert (first.sample, first.position, first.id, first.version) == ("1:2/1", 8, 9, 0)
    assert (first.sampled, first.scored) == pytest.approx((-0.009, -1.509), rel=1e-4)


def test_an_older_sample_is_told_apart_and_accuses_nobody() -> None:
    summary = rescore.summarise([compared(a_sample(turns=TURNS, versions=2), 1.0, served=3)])
    assert summary.problems == []
    assert summary.compared == 0
    assert [row.relation for row in summary.rows] == ["older"]
    assert summary.not_comparable == {"another version": 5}
    assert summary.first is None


@pytest.mark.parametrize(
    ("version", "served", "relation"),
    [(4, 3, "newer"), (-1, 3, "unknown"), (3, -1, "unknown"), (-1, -1, "same")],
)
def test_versions_that_cannot_be_compared_have_rows_of_their_own(
    version: int, served: int, relation: str
) -> None:
    one = compared(a_sample(versions=version), 1.0, served=served)
    summary = rescore.summarise([one])
    assert [row.relation for row in summary.rows] == [relation]
    assert bool(summary.problems) is (relation == "same")


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "min_new_tokens"])
def test_penalties_are_in_what_was_sampled_and_not_in_a_prefill(name: str) -> None:
    sample = a_sample(turns=TURNS)
    for call in sample.calls:
        call.sampling[name] = 1
    summary = rescore.summarise([compared(sample, 1.0)])
    assert summary.problems == []
    assert summary.not_comparable == {"penalties or cuts": 5}


# --- the mode ------------------------------------------------------------------------------------
def a_mode(mode: str, temperature: float) -> Sample:
    sample = a_sample(turns=TURNS, temperature=temperature, logprob_mode=mode)
    for call in sample.calls:
        call.logprob_mode = mode
    return sample


def test_the_mode_is_temperature_where_only_temperature_1_agrees() -> None:
    plain, warm = a_mode("temperature", 1.0), a_mode("temperature", 0.7)
    summary = rescore.summarise([compared(plain), compared(warm, 0.4)])
    assert summary.mode == "temperature"
    assert summary.problems == []
    assert summary.not_comparable == {"temperature": 5}


def test_the_mode_is_raw_where_another_temperature_agrees_too_and_a_false_record_is_told() -> None:
    summary = rescore.summarise([compared(a_mode("temperature", 0.7), 0.001)])
    assert summary.mode == "raw"
    assert summary.problems == [
        "samples say that their log-probs are temperature, and they are raw"
    ]
    assert rescore.summarise([compared(a_mode("raw", 0.7), 0.001)]).problems == []


def test_samples_that_say_raw_are_compared_at_any_temperature() -> None:
    summary = rescore.summarise([compared(a_mode("raw", 0.7), 0.4)])
    assert summary.compared == 5
    assert len(summary.problems) == 1


def test_the_mode_is_unknown_at_temperature_1_alone_and_that_is_said() -> None:
    summary = rescore.summarise([compared(a_mode("temperature", 1.0))])
    assert (summary.mode, summary.problems) == ("unknown", [])
    assert "same values" in summary.mode_why


def test_the_mode_is_unknown_where_nothing_agrees() -> None:
    warm = compared(a_mode("temperature", 0.7), 0.4)
    assert rescore.summarise([warm]).mode == "unknown"
    cold = compared(a_mode("temperature", 1.0), 0.4)
    assert rescore.summarise([warm, cold]).mode == "unknown"


def test_greedy_samples_are_compared_as_temperature_1() -> None:
    assert rescore.summarise([compared(a_mode("temperature", 0.0), 1.0)]).compared == 5


def test_processed_log_probs_are_compared_where_nothing_was_cut() -> None:
    sample = a_mode("processed", 1.0)
    assert rescore.summarise([compared(sample)]).compared == 5
    for call in sample.calls:
        call.sampling["top_p"] = 0.9
    assert rescore.summarise([compared(sample, 1.0)]).not_comparable == {"penalties or cuts": 5}


def test_failures_are_problems_and_an_empty_summary_has_nothing() -> None:
    assert rescore.summarise([]).problems == []
    assert rescore.summarise([], {"status 400": 2}).problems == ["2 samples: status 400"]


def test_only_samples_with_sampled_tokens_and_log_probs_can_be_scored() -> None:
    assert rescore.can_score(a_sample())
    assert not rescore.can_score(Sample())
    without = a_sample()
    without.rollout_log_probs = None
    assert not rescore.can_score(without)
