"""The limit of one engine: down by half once a round trip, up by steps, within its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.fleet.limiter import Limiter

MANY = 4
"""Complaints that no answer makes up for."""


def complain(limiter: Limiter, in_flight: int, sent_at: float, now: float) -> bool:
    """Complain so often that it counts; whether it did."""
    return [limiter.overloaded(in_flight, sent_at, now) for _ in range(MANY)][-1]


def test_limiter_without_a_bound_has_room_until_complaints_are_many() -> None:
    limiter = Limiter()
    assert limiter.has_room(10**6)
    assert limiter.shown == 0
    assert complain(limiter, in_flight=40, sent_at=0.0, now=1.0)
    assert (limiter.limit, limiter.shown) == (20, 20)
    assert limiter.has_room(19)
    assert not limiter.has_room(20)


def test_limiter_starts_at_its_bound_and_halves_what_was_there() -> None:
    limiter = Limiter(100)
    assert limiter.limit == 100
    assert not limiter.has_room(100)
    complain(limiter, in_flight=30, sent_at=0.0, now=1.0)
    assert limiter.limit == 15


def test_limiter_goes_down_once_for_all_complaints_of_one_round_trip() -> None:
    limiter = Limiter(64)
    assert complain(limiter, in_flight=64, sent_at=0.5, now=2.0)
    assert not any(limiter.overloaded(in_flight=63 - i, sent_at=1.0, now=2.1) for i in range(60))
    assert limiter.limit == 32
    assert complain(limiter, in_flight=32, sent_at=2.2, now=3.0)
    assert limiter.limit == 16


def test_limiter_never_ends_below_one() -> None:
    limiter = Limiter(2)
    for now in range(5):
        complain(limiter, in_flight=1, sent_at=float(now), now=now + 0.5)
    assert limiter.limit == 1
    assert limiter.has_room(0)


@pytest.mark.parametrize("held", [4, 64, 1024])
def test_limiter_is_back_within_as_many_round_trips_whatever_the_size(held: int) -> None:
    limiter = Limiter(held)
    complain(limiter, in_flight=held, sent_at=0.0, now=1.0)
    trips = 0
    while limiter.limit < held:
        trips += 1
        for _ in range(limiter.shown):  # one round trip, always full
            limiter.answered(in_flight=limiter.shown)
    assert trips <= 20
    limiter.answered(in_flight=held)
    assert limiter.limit == held


def test_limiter_is_back_as_soon_after_a_storm_that_turned_everything_away() -> None:
    limiter = Limiter()
    for now in range(9):
        complain(limiter, in_flight=min(512, limiter.shown or 512), sent_at=now, now=now + 0.5)
    assert limiter.limit == 1
    trips = 0
    while limiter.limit < 512:
        trips += 1
        for _ in range(limiter.shown):
            limiter.answered(in_flight=limiter.shown)
    assert trips <= 20
    complain(limiter, in_flight=32, sent_at=10.0, now=11.0)  # it answers, so it means this
    complain(limiter, in_flight=16, sent_at=12.0, now=13.0)
    limiter.answered(in_flight=8)
    assert 8 < limiter.limit < 9


def test_limiter_stays_where_calls_do_not_need_more() -> None:
    limiter = Limiter(64)
    complain(limiter, in_flight=64, sent_at=0.0, now=1.0)
    for _ in range(1000):
        limiter.answered(in_flight=10)
    assert limiter.limit == 32


@pytest.mark.parametrize("share", [50, 20, 12])
def test_limiter_stays_where_one_call_in_many_fails_as_engines_do(share: int) -> None:
    limiter = Limiter(64)
    for now in range(2000):
        if now % share:
            limiter.answered(in_flight=64)
        else:
            limiter.overloaded(in_flight=64, sent_at=now - 0.5, now=now)
    assert limiter.limit == 64


@pytest.mark.parametrize("share", [5, 3, 2])
def test_limiter_goes_down_where_more_calls_fail_than_an_engines_everyday(share: int) -> None:
    limiter = Limiter(64)
    for now in range(200):
        if now % share:
            limiter.answered(in_flight=8)
        else:
            limiter.overloaded(in_flight=64, sent_at=now - 0.5, now=now)
    assert limiter.limit <= 32


@given(
    cap=st.integers(0, 50),
    acts=st.lists(st.tuples(st.booleans(), st.integers(1, 100), st.floats(0, 10)), max_size=60),
)
def test_limiter_stays_within_its_bounds_whatever_happens(
    cap: int, acts: list[tuple[bool, int, float]]
) -> None:
    limiter, now = Limiter(cap), 0.0
    for overloaded, in_flight, back in acts:
        now += 1.0
        if overloaded:
            limiter.overloaded(in_flight, sent_at=now - back, now=now)
        else:
            limiter.answered(in_flight)
        assert limiter.limit >= 1
        assert limiter.limit <= (cap or float("inf"))
