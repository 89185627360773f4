"""A failure of telemetry is counted and said, and breaks nothing: no rollout, no other figure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollstream.errors import StopReason
from rollstream.sample import Span
from tests.builders import a_sample
from tests.series import num_series
from worker.telemetry.guard import SAID_EVERY_S, Guard
from worker.telemetry.metrics import Metrics
from worker.telemetry.pulse import Pulse
from worker.telemetry.tally import counted


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(version="1", wire=1, envs=["default"])


def shown(metrics: Metrics, series: str) -> float:
    """Return the value of one series."""
    metrics.flush()
    (value,) = re.findall(rf"^{re.escape(series)} (\S+)$", metrics.render().decode(), re.MULTILINE)
    return float(value)


def ended(metrics: Metrics, sample: Any) -> None:
    metrics.sample_ended("default", StopReason.STOP, [sample], delivered=True, version=3)


STOPPED = 'rollout_samples_total{env="default",reason="stop",status="completed"}'


def with_spans(*spans: Any) -> Any:
    sample = a_sample()
    sample.spans = list(spans)
    return sample


@pytest.mark.parametrize(
    "sample",
    [
        with_spans(None),
        with_spans(Span("my own", 0, 1.0, "long")),  # type: ignore[arg-type]
        with_spans(Span([], 0, 1.0, 2.0)),  # type: ignore[arg-type]
        a_sample(metadata=7),
        object(),
    ],
    ids=["no span", "no duration", "no name", "no metadata", "no sample"],
)
def test_a_sample_that_cannot_be_counted_has_ended_all_the_same(
    metrics: Metrics, sample: Any
) -> None:
    ended(metrics, sample)
    ended(metrics, a_sample())
    assert shown(metrics, STOPPED) == 2
    assert shown(metrics, "rollout_telemetry_failures_total") == 1
    assert shown(metrics, 'rollout_turns_total{env="default"}') >= 1


def test_a_duration_that_is_no_number_costs_none_beside_it(metrics: Metrics) -> None:
    bad = Span("tool", 0, 1.0, "long")  # type: ignore[arg-type]
    ended(metrics, with_spans(bad, Span("tool", 1, 1.0, 2.0), Span("reward", 0, 1.0, 2.0)))
    assert shown(metrics, 'rollout_span_duration_seconds_count{span="reward"}') == 1
    assert shown(metrics, 'rollout_span_duration_seconds_sum{span="tool"}') == 2
    ended(metrics, with_spans(Span("tool", 0, 1.0, 2.0)))
    assert shown(metrics, 'rollout_span_duration_seconds_sum{span="tool"}') == 4
    assert shown(metrics, "rollout_telemetry_failures_total") == 1


def test_an_integer_that_no_float_holds_costs_none_beside_it(metrics: Metrics) -> None:
    huge = Span("tool", 0, 1.0, 10**400)
    ended(metrics, with_spans(huge, Span("tool", 1, 1.0, 2.0), Span("reward", 0, 1.0, 2.0)))
    assert shown(metrics, 'rollout_span_duration_seconds_count{span="tool"}') == 2
    assert shown(metrics, 'rollout_span_duration_seconds_sum{span="reward"}') == 2
    assert shown(metrics, "rollout_telemetry_failures_total") == 1
    ended(metrics, with_spans(Span("reward", 0, 1.0, 2.0)))
    assert shown(metrics, 'rollout_span_duration_seconds_sum{span="reward"}') == 4


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, -float("inf"), 1e300])
def test_a_duration_that_is_none_spoils_no_sum(metrics: Metrics, seconds: float) -> None:
    ended(metrics, with_spans(Span("tool", 0, 1.0, seconds), Span("my own", 0, 1.0, seconds)))
    ended(metrics, with_spans(Span("tool", 0, 1.0, 2.0), Span("my own", 0, 1.0, 3.0)))
    assert shown(metrics, 'rollout_span_duration_seconds_count{span="tool"}') == 2
    most = 1e12 if seconds > 0 else 0.0
    total = shown(metrics, 'rollout_span_duration_seconds_sum{span="tool"}')
    assert total in (most + 2.0, 2.0 + most)
    assert shown(metrics, "rollout_other_span_seconds_total") == most + 3.0


def test_spans_of_a_users_own_name_are_added_up_without_a_label(metrics: Metrics) -> None:
    before = num_series(metrics)
    ended(metrics, with_spans(Span("sandbox", 0, 1.0, 2.5), Span("tool", 0, 1.0, 1.0)))
    metrics.span("browser", 0.5)
    assert shown(metrics, "rollout_other_span_seconds_total") == 3.0
    assert num_series(metrics) == before


def broken() -> None:
    raise RuntimeError("broken")


def test_what_is_published_before_a_flush_may_break_and_the_flush_goes_on(metrics: Metrics) -> None:
    pulse = Pulse(metrics, broken)
    for _ in range(3):
        ended(metrics, a_sample())
        pulse.flush()
    assert shown(metrics, STOPPED) == 3
    assert shown(metrics, "rollout_telemetry_failures_total") == 3


def test_what_breaks_while_it_is_counted_piles_nothing_up(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics.outcomes, "flush", broken)
    ended(metrics, with_spans(Span("tool", 0, 1.0, 2.0)))
    metrics.flush()
    assert [values for readings in metrics._readings for values in readings.values if values] == []
    assert shown(metrics, 'rollout_span_duration_seconds_count{span="tool"}') == 1


def test_a_failure_is_said_once_a_minute_and_counted_each_time() -> None:
    now = [100.0]
    guard = Guard(lambda: now[0])
    with capture_logs() as logs:
        for _ in range(5):
            guard.run(broken)
        now[0] += SAID_EVERY_S
        guard.run(broken)
    assert guard.num_failures == 6
    assert [(line["event"], line["failures"]) for line in logs] == [
        ("telemetry_failed", 1),
        ("telemetry_failed", 6),
    ]


def test_an_end_of_the_process_is_no_failure_of_telemetry() -> None:
    def ends() -> None:
        raise SystemExit

    part: Callable[[], None] = ends
    with pytest.raises(SystemExit):
        Guard().run(part)


def test_a_tally_of_leaves_has_the_oldest_version_of_all() -> None:
    leaves = [a_sample(), a_sample()]
    for leaf, version in zip(leaves, (5, 3), strict=True):
        for call in leaf.calls:
            call.rid = f"{version}"
            call.versions = [(version, call.start, call.end)]
    assert counted(leaves)[-1] == 3
    assert counted([])[-1] == -1
