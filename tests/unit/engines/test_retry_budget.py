"""The retry budget: a share of the calls of one minute, some in hand, and nothing older counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.engines.fleet.retry_budget import IN_HAND, WINDOW_S, RetryBudget


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def taken(budget: RetryBudget, tries: int) -> int:
    return sum(budget.take() for _ in range(tries))


def test_budget_has_some_retries_in_hand_before_any_call() -> None:
    assert taken(RetryBudget(0.2, Clock()), 50) == IN_HAND


def test_budget_is_a_share_of_the_calls() -> None:
    budget = RetryBudget(0.2, Clock())
    for _ in range(1000):
        budget.called()
    assert taken(budget, 1000) == 200
    for _ in range(5):
        budget.called()
    assert taken(budget, 10) == 1


def test_budget_forgets_calls_and_retries_after_a_minute() -> None:
    clock = Clock()
    budget = RetryBudget(0.5, clock)
    for _ in range(100):
        budget.called()
    assert taken(budget, 100) == 50
    clock.now += WINDOW_S / 2
    assert taken(budget, 100) == 0
    clock.now += WINDOW_S / 2 + 5.0
    assert taken(budget, 100) == IN_HAND
    clock.now += 1e6
    assert taken(budget, 100) == IN_HAND


@given(st.lists(st.tuples(st.sampled_from("cr"), st.floats(0, 20)), max_size=300))
def test_budget_allows_no_minute_more_than_its_share(acts: list[tuple[str, float]]) -> None:
    clock = Clock()
    budget = RetryBudget(0.25, clock)
    calls: list[float] = []
    allowed: list[float] = []
    for act, later in acts:
        clock.now += later
        if act == "c":
            budget.called()
            calls.append(clock.now)
        elif budget.take():
            allowed.append(clock.now)
            # The window moves in parts: it is never longer than a minute.
            minute = [at for at in calls if at > clock.now - WINDOW_S]
            narrow = [at for at in allowed if at > clock.now - WINDOW_S * 11 / 12]
            assert len(narrow) <= max(IN_HAND, int(0.25 * len(minute)))
