"""How a verdict that could not be had is asked for again."""

from __future__ import annotations

import pytest

from rollstream.errors import RewardFault
from worker.rewards.details import Detail, later, no_verdict
from worker.rewards.retries import MAX_WAIT_S, asked_again


class Stage:
    """Fails so often, and notes the tries and the waits."""

    def __init__(self, *faults: RewardFault) -> None:
        self._faults = list(faults)
        self.tries: list[int] = []
        self.waits: list[float] = []

    async def ask(self, attempt: int) -> float:
        self.tries.append(attempt)
        if self._faults:
            raise self._faults.pop(0)
        return 0.5

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)


def passing(detail: Detail = Detail.LOST) -> RewardFault:
    return no_verdict(detail, "gone", retryable=True)


async def ask(stage: Stage, max_retries: int, jitter: float = 0.5) -> float:
    return await asked_again(
        stage.ask,
        max_retries=max_retries,
        backoff_s=0.5,
        sleep=stage.sleep,
        jitter=lambda: jitter,
    )


async def test_asked_again_waits_twice_as_long_each_time() -> None:
    stage = Stage(passing(), passing(), passing())
    assert await ask(stage, 3) == 0.5
    assert (stage.tries, stage.waits) == ([0, 1, 2, 3], [0.5, 1.0, 2.0])


async def test_asked_again_spreads_its_waits() -> None:
    early, late = Stage(passing()), Stage(passing())
    await ask(early, 1, 0.0)
    await ask(late, 1, 0.999)
    assert early.waits == [0.25]
    assert late.waits == [pytest.approx(0.75, abs=0.001)]


async def test_asked_again_ends_with_the_last_cause_when_the_budget_is_used_up() -> None:
    stage = Stage(passing(), passing(), passing(Detail.CRASHED), passing())
    with pytest.raises(RewardFault, match=r"^gone \(asked 3 times\)$") as caught:
        await ask(stage, 2)
    assert (caught.value.detail, caught.value.retryable) == ("crashed", False)
    assert len(stage.tries) == 3


@pytest.mark.parametrize("max_retries", [0, 5])
async def test_asked_again_does_not_ask_what_would_end_the_same(max_retries: int) -> None:
    stage = Stage(no_verdict(Detail.NO_LABEL, "no label"))
    with pytest.raises(RewardFault, match=r"^no label$") as caught:
        await ask(stage, max_retries)
    assert (stage.tries, stage.waits, caught.value.retryable) == ([0], [], False)


async def test_asked_again_obeys_a_server_that_says_when_within_a_bound() -> None:
    stage = Stage(later("busy", 7.0), later("busy", 1e9), later("busy", 0.0))
    assert await ask(stage, 3) == 0.5
    assert stage.waits == [7.0, MAX_WAIT_S, 2.0]
