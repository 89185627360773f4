"""Case 109 of the public reports: figures of prompts whose counts of samples differ."""

from __future__ import annotations

import numpy as np

from rollstream.errors import StopReason
from rollstream.group import PromptGroup
from rollstream.queue.answers import Lease
from rollstream.sample import Sample
from tests.backstage import Backstage
from tests.builders import a_sample
from tests.integration.stream.test_evaluate import Connect, at_work, nothing_left


def solved(prompt: PromptGroup, lease: Lease) -> Sample:
    """Return a sample; the digit in the prompt says how many solve it, and one of `A1` fails."""
    if prompt.prompt == "A1" and lease.member == 2:
        return a_sample(0, 2, stop_reason=StopReason.AGENT_ERROR, reward=None)
    is_right = lease.member < int(str(prompt.prompt)[1])
    return a_sample(0, lease.member, reward=float(is_right))


def test_case_109_pass_rates_are_by_prompt_whatever_the_counts_and_whoever_is_missing(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    stream = connect()
    with at_work(run, valkey_url, solved):
        four = stream.evaluate("A", ["A1", "A4", "A0"], 4, timeout_s=20)
        two = stream.evaluate("B", ["B2", "B1"], 2, timeout_s=20)

    nan = np.nan
    np.testing.assert_equal(four.rewards, [[1, 0, nan, 0], [1] * 4, [0] * 4])
    np.testing.assert_equal(two.rewards, [[1, 1], [1, 0]])
    assert np.nanmean(four.rewards, axis=1).tolist() == [1 / 3, 1.0, 0.0]
    assert [(place, m.member, m.reason) for place, m in four.missing] == [(0, 2, "agent_error")]
    figures = four.metrics() | two.metrics()
    assert figures["eval/A/samples"] == 11
    assert figures["eval/A/missing"] == 1
    assert figures["eval/A/reward_mean"] == 5 / 11
    assert (figures["eval/B/samples"], figures["eval/B/reward_mean"]) == (4, 0.75)
    nothing_left(run)
