"""Metrics: every series exists from the start, none grows without bound, spans always end."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from rollstream.errors import DropReason, StopReason
from rollstream.sample import Sample
from tests.builders import a_sample
from tests.series import num_series
from tests.unit.worker.views import rewarded
from worker.engines.fleet.pool import OUTCOMES, EngineCounters, PoolCounters
from worker.engines.fleet.states import State
from worker.members.fidelity import Kind
from worker.telemetry.catalog import (
    DIVERGENCE_POLICIES,
    ENGINE_OUTCOMES,
    GATEWAY_OUTCOMES,
    MAX_SERIES,
    MISMATCH_KINDS,
    RESCORE_OUTCOMES,
    WORKER_ENV_LABELS,
)
from worker.telemetry.metrics import Metrics
from worker.telemetry.spans import NoSpans, SpanList, timed
from worker.types import DivergencePolicy


def metrics(envs: int = 1) -> Metrics:
    return Metrics(version="1.2", wire=1, envs=[f"env{i}" for i in range(envs)])


def an_engine(slot: int = 0, url: str = "http://e", **figures: Any) -> EngineCounters:
    requests = dict.fromkeys(OUTCOMES, 0) | figures.pop("requests", {})
    engine = EngineCounters(url, slot, requests=requests)
    for name, value in figures.items():
        setattr(engine, name, value)
    return engine


def publish(given: Metrics, *engines: EngineCounters, **totals: int) -> None:
    given.engines(engines, PoolCounters(list(engines), **totals))


def text_of(given: Metrics) -> str:
    given.flush()
    return given.render().decode()


@pytest.mark.parametrize(("envs", "engines"), [(1, 1), (WORKER_ENV_LABELS, 4), (30, 40)])
def test_a_worker_has_a_bounded_number_of_series_all_from_the_start(
    envs: int, engines: int
) -> None:
    given = metrics(envs)
    before = num_series(given)

    for env in range(envs):
        for reason in StopReason:
            given.sample_ended(f"env{env}", reason, [a_sample()], delivered=True)
        for drop in (None, *DropReason):
            given.group_judged(f"env{env}", drop)
        given.outcomes.members_judged(f"env{env}", rewarded(1.0, -1.0).members, is_kept=True)
    publish(given, *(an_engine(i, requests=dict.fromkeys(OUTCOMES, 1)) for i in range(engines)))
    publish(given)
    given.sample_ended("env0", StopReason.STOP, [a_sample()], delivered=True, version=3)
    given.span("never heard of", 1.0)
    given.outcomes.tool_calls({"tool_calls_ok": 1, "tool_errors": {"never heard of": 1}})
    given.outcomes.reward_error("never heard of")
    given.sample_ended("never heard of", StopReason.STOP, [], delivered=True)
    given.sample_ended("env0", StopReason.STOP, [diverged(*DIVERGENCE_POLICIES)], delivered=True)
    given.fidelity(dict.fromkeys(Kind, 1), checked=1, unknown=1)
    given.rescored(dict.fromkeys(RESCORE_OUTCOMES, 1))
    given.differences([0.0, 0.02, 5.0])
    given.gateway(dict.fromkeys((*GATEWAY_OUTCOMES, "never heard of"), 1), open_sessions=2)
    given.flush()

    assert num_series(given) == before
    assert before <= MAX_SERIES


def diverged(*policies: Any) -> Sample:
    notes = [{"turn": 1, "index": 4, "policy": policy, "dropped_tokens": 2} for policy in policies]
    return a_sample(metadata={"divergences": notes})


def test_the_labels_are_those_of_their_owners() -> None:
    assert set(MISMATCH_KINDS) == {kind.value for kind in Kind}
    assert set(DIVERGENCE_POLICIES) == {policy.value for policy in DivergencePolicy}


def test_every_series_of_the_fidelity_checks_is_there_before_anything_happened() -> None:
    text = text_of(metrics())
    for kind in MISMATCH_KINDS:
        assert f'rollout_token_mismatch_total{{kind="{kind}"}} 0.0' in text
    for policy in DIVERGENCE_POLICIES:
        assert f'rollout_divergences_total{{policy="{policy}"}} 0.0' in text
    for outcome in RESCORE_OUTCOMES:
        assert f'rollout_rescored_samples_total{{outcome="{outcome}"}} 0.0' in text
    for outcome in ("checked", "unknown"):
        assert f'rollout_checked_calls_total{{outcome="{outcome}"}} 0.0' in text
    for edge in ("0.001", "0.05", "0.3", "+Inf"):
        assert f'rollout_logprob_difference_bucket{{le="{edge}"}} 0.0' in text


def test_divergences_are_counted_by_policy_from_what_samples_say_of_themselves() -> None:
    given = metrics()
    leaves = [diverged("fork", "fork"), diverged("keep_prefix"), diverged("reject")]
    given.sample_ended("env0", StopReason.STOP, leaves[:2], delivered=True)
    given.sample_ended("env0", StopReason.MERGE_ERROR, leaves[2:], delivered=False)
    text = text_of(given)
    for policy, count in {"fork": 2, "keep_prefix": 1, "reject": 1}.items():
        assert f'rollout_divergences_total{{policy="{policy}"}} {count}.0' in text


@pytest.mark.parametrize(
    "notes", [5, "fork", ["fork"], [{"policy": []}], [{"policy": "other"}], {}]
)
def test_anything_else_under_that_name_is_the_users_own_and_breaks_nothing(notes: Any) -> None:
    given = metrics()
    sample = a_sample(metadata={"divergences": notes})
    given.sample_ended("env0", StopReason.STOP, [sample], delivered=True)
    counts = re.findall(r"rollout_divergences_total\{.*\} (\S+)", text_of(given))
    assert counts == ["0.0"] * 3


def test_fidelity_figures_follow_running_totals() -> None:
    given = metrics()
    given.fidelity({Kind.PREFIX: 1, Kind.SAMPLED: 0, Kind.LOG_PROB: 2}, checked=10, unknown=1)
    given.fidelity({Kind.PREFIX: 1, Kind.SAMPLED: 1, Kind.LOG_PROB: 2}, checked=15, unknown=1)
    given.rescored({"compared": 3, "not_comparable": 0, "dropped": 1, "failed": 0})
    text = text_of(given)
    for kind, count in {"prefix": 1, "sampled": 1, "log_prob": 2}.items():
        assert f'rollout_token_mismatch_total{{kind="{kind}"}} {count}.0' in text
    assert 'rollout_checked_calls_total{outcome="checked"} 15.0' in text
    assert 'rollout_checked_calls_total{outcome="unknown"} 1.0' in text
    assert 'rollout_rescored_samples_total{outcome="compared"} 3.0' in text
    assert 'rollout_rescored_samples_total{outcome="dropped"} 1.0' in text


def test_log_prob_differences_fall_into_their_buckets() -> None:
    given = metrics()
    given.differences([0.0, 0.001, 0.02, 0.2, 7.0])
    text = text_of(given)
    counts = {"0.001": 2, "0.05": 3, "0.3": 4, "+Inf": 5}
    for edge, count in counts.items():
        assert f'rollout_logprob_difference_bucket{{le="{edge}"}} {count}.0' in text
    assert "rollout_logprob_difference_sum 7.221" in text


def test_an_unknown_environment_is_counted_as_other_where_there_are_many() -> None:
    given = metrics(envs=9)

    given.sample_ended("env8", StopReason.STOP, [], delivered=True)

    assert 'rollout_samples_total{env="other",reason="stop",status="completed"} 1.0' in text_of(
        given
    )


def test_a_samples_tokens_are_counted_by_where_they_came_from() -> None:
    given = metrics()
    turns = (((4, 5, 6), (7, 8)), ((9,), ()))
    masked = a_sample(turns=turns)
    assert masked.loss_mask is not None
    masked.loss_mask = masked.loss_mask * np.array([1, 1, 0, 0, 0, 1], dtype=np.uint8)
    masked.prefix_cache_info.total_prompt_tokens = 11
    masked.prefix_cache_info.cached_tokens = 4

    given.sample_ended("env0", StopReason.STOP, [masked], delivered=True)
    given.sample_ended("env0", StopReason.DEADLINE, [a_sample(turns=turns)], delivered=False)
    text = text_of(given)

    for kind, count in {
        "prompt": 11, "cached": 4, "sampled": 8, "tool": 4, "trainable": 3, "discarded": 4
    }.items():  # fmt: skip
        assert f'rollout_tokens_total{{kind="{kind}"}} {count}.0' in text
    assert 'rollout_turns_total{env="env0"} 4.0' in text
    assert 'rollout_samples_total{env="env0",reason="deadline",status="aborted"} 1.0' in text


def test_engine_requests_follow_the_clients_running_totals() -> None:
    given = metrics()

    publish(given, an_engine(requests={"stop": 3, "connect": 1, "nan": 1}))
    publish(given, an_engine(up=False, requests={"stop": 5, "connect": 2, "nan": 1}))
    text = text_of(given)

    assert 'rollout_engine_requests_total{engine="0",outcome="stop"} 5.0' in text
    assert 'rollout_engine_requests_total{engine="0",outcome="unavailable"} 2.0' in text
    assert 'rollout_engine_requests_total{engine="0",outcome="fault"} 1.0' in text
    assert 'rollout_engine_up{engine="0"} 0.0' in text


def test_every_outcome_of_an_engine_has_a_label() -> None:
    given = metrics()
    publish(given, an_engine(requests=dict.fromkeys(OUTCOMES, 1)))
    text = text_of(given)

    total = sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("rollout_engine_requests_total{")
    )
    assert total == len(OUTCOMES)
    assert set(ENGINE_OUTCOMES) >= {"stop", "length", "abort", "refused", "timeout"}


def test_an_engine_in_a_place_that_was_anothers_adds_to_its_counts() -> None:
    given = metrics()
    publish(given, an_engine(url="http://a", requests={"stop": 5}))
    publish(given)
    text = text_of(given)
    assert 'rollout_engine_up{engine="0"} NaN' in text
    assert 'rollout_engine_version_lag{engine="0"} NaN' in text

    publish(given, an_engine(url="http://b", requests={"stop": 2}))
    publish(given, an_engine(url="http://b", requests={"stop": 3}))
    text = text_of(given)
    assert 'rollout_engine_requests_total{engine="0",outcome="stop"} 8.0' in text
    assert 'rollout_engine_up{engine="0"} 1.0' in text


def test_engines_are_counted_by_state_also_beyond_the_places() -> None:
    given = metrics()
    engines = [an_engine(i, f"http://{i}", state=State.UP) for i in range(20)]
    engines[1].state = engines[17].state = State.PAUSED
    engines[2].state, engines[2].lag, engines[2].limit = State.BEHIND, 4, 64
    publish(given, *engines)
    text = text_of(given)
    counts = {"up": 17, "paused": 2, "behind": 1, "down": 0, "refused": 0}
    for state, count in counts.items():
        assert f'rollout_engines{{state="{state}"}} {count}.0' in text
    assert 'rollout_engine_version_lag{engine="2"} 4.0' in text
    assert 'rollout_engine_limit{engine="2"} 64.0' in text
    assert 'rollout_engine_up{engine="1"} 1.0' in text  # paused is not dead
    assert 'engine="17"' not in text


def test_totals_of_the_pool_are_followed() -> None:
    given = metrics()
    totals = {
        "retries": 7, "retries_denied": 2, "stale_connections": 3, "pauses": 4, "aborted": 5,
        "ejections": 6, "waits": 8,
    }  # fmt: skip
    publish(given, **totals)
    publish(given, **totals)
    text = text_of(given)
    for name, count in {
        "engine_retries": 7, "engine_retries_denied": 2, "engine_stale_connections": 3,
        "engine_pauses": 4, "aborted_calls": 5, "engine_ejections": 6, "engine_waits": 8,
    }.items():  # fmt: skip
        assert f"rollout_{name}_total {count}.0" in text


def test_a_samples_age_is_that_of_its_oldest_token_where_it_is_delivered_and_known() -> None:
    given = metrics()
    sample = a_sample(turns=(((4, 5), (6,)), ((7,), ())))
    sample.calls[0].versions = [(3, 0, 1), (4, 1, 2)]
    sample.calls[1].versions = [(5, 3, 4)]
    given.sample_ended("env0", StopReason.STOP, [sample], delivered=True, version=5)
    given.sample_ended("env0", StopReason.STOP, [sample], delivered=False, version=9)
    given.sample_ended("env0", StopReason.STOP, [sample], delivered=True)
    for call in sample.calls:
        call.versions = [(-1, call.start, call.end)]
    given.sample_ended("env0", StopReason.STOP, [sample], delivered=True, version=5)
    text = text_of(given)
    assert 'rollout_sample_staleness_versions_sum{kind="all"} 2.0' in text
    assert 'rollout_sample_staleness_versions_count{kind="all"} 1.0' in text


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(4, 0, 1), (2, 1, 2)], [(5, 3, 4)]),
        ([(4, 0, 2)], [(2, 3, 4)]),
        ([(-1, 0, 2)], [(2, 3, 4)]),
        ([(-1, 0, 1), (2, 1, 2)], []),
    ],
    ids=["within a call", "of a later call", "behind an unknown call", "behind an unknown part"],
)
def test_a_samples_age_is_that_of_its_oldest_known_token_wherever_it_stands(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]]
) -> None:
    given = metrics()
    sample = a_sample(turns=(((4, 5), (6,)), ((7,), ())))
    sample.calls[0].versions, sample.calls[1].versions = first, second
    given.sample_ended("env0", StopReason.STOP, [sample], delivered=True, version=5)
    text = text_of(given)
    assert 'rollout_sample_staleness_versions_sum{kind="all"} 3.0' in text
    assert 'rollout_sample_staleness_versions_count{kind="all"} 1.0' in text


def test_staleness_of_ended_trajectories_falls_into_its_buckets() -> None:
    given = metrics()
    sample = a_sample()
    sample.calls[0].versions = [(4, sample.calls[0].start, sample.calls[0].end)]
    for version in (4, 4, 5, 7, 13, 3):
        given.sample_ended("env0", StopReason.STOP, [sample], delivered=True, version=version)
    text = text_of(given)
    for edge, count in {"0.0": 3, "1.0": 4, "2.0": 4, "4.0": 5, "8.0": 5, "+Inf": 6}.items():
        assert (
            f'rollout_sample_staleness_versions_bucket{{kind="all",le="{edge}"}} {count}.0' in text
        )


def test_spans_reach_the_histogram_with_the_next_flush() -> None:
    given = metrics()
    sample = a_sample()
    spans = SpanList()
    spans.record("generate", 0, 0.0, 3.0)
    spans.record("tool", 0, 0.0, 2.5)
    sample.spans = spans.spans

    given.sample_ended("env0", StopReason.STOP, [sample], delivered=True)
    assert 'rollout_span_duration_seconds_count{span="generate"} 0.0' in given.render().decode()

    text = text_of(given)
    assert 'rollout_span_duration_seconds_bucket{le="2.5",span="generate"} 0.0' in text
    assert 'rollout_span_duration_seconds_bucket{le="5.0",span="generate"} 1.0' in text
    assert 'rollout_span_duration_seconds_bucket{le="1.0",span="tool"} 0.0' in text
    assert 'rollout_span_duration_seconds_bucket{le="2.5",span="tool"} 1.0' in text
    assert 'rollout_span_duration_seconds_sum{span="generate"} 3.0' in text


def test_a_span_ends_once_with_the_outcome_of_its_block() -> None:
    spans = SpanList()

    with timed(spans, "tool", 2):
        pass
    with pytest.raises(KeyError), timed(spans, "tool"):
        raise KeyError
    with pytest.raises(asyncio.CancelledError), timed(spans, "tool"):
        raise asyncio.CancelledError

    assert [(s.name, s.turn, s.outcome) for s in spans.spans] == [
        ("tool", 2, "ok"),
        ("tool", -1, "error"),
        ("tool", -1, "cancelled"),
    ]
    assert all(s.duration_s >= 0 for s in spans.spans)


def test_no_spans_records_nothing() -> None:
    spans = NoSpans()
    with timed(spans, "tool"):
        pass
    assert spans.spans == []


def test_requests_of_agents_are_counted_by_outcome_beside_the_open_sessions() -> None:
    given = metrics()

    assert 'rollout_gateway_requests_total{outcome="left"} 0.0' in text_of(given)
    given.gateway({"ok": 3, "left": 1}, open_sessions=5)
    given.gateway({"ok": 4, "left": 1, "refused": 2}, open_sessions=4)

    shown = text_of(given)
    totals = dict(re.findall(r'rollout_gateway_requests_total\{outcome="(\w+)"\} (\S+)', shown))
    assert totals == {"ok": "4.0", "refused": "2.0", "failed": "0.0", "left": "1.0"}
    assert "\nrollout_gateway_sessions 4.0\n" in shown


def test_calls_that_leaves_share_are_counted_once() -> None:
    given = metrics()
    first = a_sample(turns=(((4, 5, 6), (7, 8)), ((9,), (10,)), ((11, 12), (13,))))
    branch = a_sample(turns=(((4, 5, 6), (7, 8)), ((9,), (10, 14, 15))))
    for leaf in (first, branch):
        leaf.prefix_cache_info.total_prompt_tokens = 10
        leaf.prefix_cache_info.cached_tokens = 3
        for place, call in enumerate(leaf.calls):
            call.rid = f"{place}" if place == 0 else f"{leaf is branch}{place}"
    given.sample_ended("env0", StopReason.STOP, [first, branch], delivered=True)
    text = text_of(given)
    # The first one's 6 and 4 of 3 calls, and what stands behind the shared call in the branch.
    for kind, count in {"prompt": 10, "cached": 3, "sampled": 7, "tool": 9}.items():
        assert f'rollout_tokens_total{{kind="{kind}"}} {count}.0' in text
    assert 'rollout_turns_total{env="env0"} 4.0' in text


def test_calls_in_flight_are_those_of_the_engine_in_the_place() -> None:
    given = metrics()
    publish(given, an_engine(in_flight=5), an_engine(1, "http://f", in_flight=7))
    text = text_of(given)
    assert 'rollout_engine_inflight_requests{engine="0"} 5.0' in text
    assert 'rollout_engine_inflight_requests{engine="1"} 7.0' in text
    publish(given)
    assert 'rollout_engine_inflight_requests{engine="1"} NaN' in text_of(given)


def test_turns_are_those_of_trajectories_that_were_completed_or_cut() -> None:
    given = metrics()
    two = a_sample(turns=(((4, 5), (6,)), ((7,), ())))
    for reason, delivered in (
        (StopReason.STOP, True),
        (StopReason.TURN_LENGTH, True),
        (StopReason.AGENT_ERROR, True),
        (StopReason.MAX_TURNS, False),
    ):
        given.sample_ended("env0", reason, [two], delivered=delivered)
    given.sample_ended("env0", StopReason.PROMPT_TOO_LONG, [a_sample(turns=())], delivered=True)
    text = text_of(given)
    assert 'rollout_sample_turns_count{kind="all"} 2.0' in text
    assert 'rollout_sample_turns_sum{kind="all"} 4.0' in text
    assert 'rollout_sample_turns_bucket{kind="all",le="1.0"} 0.0' in text
    assert 'rollout_sample_turns_bucket{kind="all",le="3.0"} 2.0' in text


def test_time_of_a_trajectory_is_that_of_its_attempt_however_it_ended() -> None:
    given = metrics()
    for reason, seconds in ((StopReason.STOP, 3.0), (StopReason.TOOL_ERROR, 60.0)):
        leaves = [a_sample(), a_sample()]
        leaves[0].metadata["attempt"] = {"attempt_start": 1e9, "attempt_end": 1e9 + seconds}
        given.sample_ended("env0", reason, leaves, delivered=reason is StopReason.STOP)
    given.sample_ended("env0", StopReason.STOP, [a_sample()], delivered=True)  # nobody says when
    text = text_of(given)
    assert "rollout_trajectory_seconds_count 2.0" in text
    assert "rollout_trajectory_seconds_sum 63.0" in text
    assert 'rollout_trajectory_seconds_bucket{le="2.5"} 0.0' in text
    assert 'rollout_trajectory_seconds_bucket{le="10.0"} 1.0' in text
    assert "rollout_telemetry_failures_total 0.0" in text


def test_a_trajectory_of_many_leaves_has_one_age_and_one_number_of_turns() -> None:
    given = metrics()
    leaves = [a_sample(turns=(((4, 5), (6,)),)) for _ in range(9)]
    for number, leaf in enumerate(leaves):
        leaf.calls[0].rid = f"{number}"
        leaf.calls[0].versions = [(number, 0, 1)]
    given.sample_ended("env0", StopReason.STOP, leaves, delivered=True, version=9)
    text = text_of(given)
    assert 'rollout_sample_staleness_versions_count{kind="all"} 1.0' in text
    assert 'rollout_sample_staleness_versions_sum{kind="all"} 9.0' in text
    assert 'rollout_sample_turns_count{kind="all"} 1.0' in text


def test_unknown_totals_of_requests_and_rescoring_count_as_failed() -> None:
    given = metrics()
    given.gateway({"ok": 1, "failed": 2, "never heard of": 3}, open_sessions=0)
    given.rescored({"compared": 1, "never heard of": 4})
    text = text_of(given)
    assert 'rollout_gateway_requests_total{outcome="failed"} 5.0' in text
    assert 'rollout_rescored_samples_total{outcome="failed"} 4.0' in text
