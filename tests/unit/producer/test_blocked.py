"""How long a producer was blocked, by its own clock."""

from __future__ import annotations

import pytest

from producer.blocked import BlockedClock
from rollstream.queue.calls import BlockedTime


class Time:
    """Moves when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def test_blocked_time_ends_when_room_was_seen_and_not_when_the_row_was_ready(time: Time) -> None:
    clock = BlockedClock(time)
    clock.refused()
    time.now += 3
    clock.room_seen()
    time.now += 5  # the source takes its time
    clock.stop()
    time.now += 7
    assert clock.total_s == 3


def test_blocked_time_goes_on_where_room_was_seen_and_the_prompt_refused(time: Time) -> None:
    clock = BlockedClock(time)
    clock.refused()
    for _ in range(3):
        time.now += 1
        clock.room_seen()
        time.now += 1
        clock.refused()
    assert clock.total_s == 6


def test_time_without_a_refusal_is_not_blocked(time: Time) -> None:
    clock = BlockedClock(time)
    clock.room_seen()
    time.now += 2
    clock.stop()
    time.now += 2
    assert clock.total_s == 0
    assert clock.report() is None


def test_a_report_that_was_not_heard_is_made_again_with_what_came_since(time: Time) -> None:
    clock = BlockedClock(time)
    clock.refused()
    time.now += 1
    first = clock.report()
    assert first is not None
    assert (first.from_ms, first.to_ms) == (0, 1000)
    time.now += 1
    second = clock.report()
    assert second == BlockedTime(first.process, 0, 2000)
    clock.reported(second)
    clock.reported(first)  # its answer came late
    assert clock.report() is None
    time.now += 1
    assert clock.report() == BlockedTime(first.process, 2000, 3000)


def test_two_processes_never_share_a_name() -> None:
    clocks = [BlockedClock() for _ in range(2)]
    for clock in clocks:
        clock._total_s = 1.0
    assert len({report.process for clock in clocks if (report := clock.report())}) == 2
