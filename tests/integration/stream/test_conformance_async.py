"""Conformance 148 and 151: what a batch is, and that a run that failed hands out nothing more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rollstream.errors import RunFailed
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage

Connect = Callable[..., GroupStream]


def test_148_a_batch_of_three_is_the_next_three_groups_that_were_ready(
    run: Backstage, connect: Connect
) -> None:
    for group_index in (2, 0, 1, 4, 3, 5):
        run.finish(group_index)
    stream = connect()
    first = stream.next_batch(groups=3, timeout_s=5)
    second = stream.next_batch(groups=3, timeout_s=5)
    assert first is not None
    assert second is not None
    assert [first.group_indexes, second.group_indexes] == [[2, 0, 1], [4, 3, 5]]
    first.ack()
    second.ack()
    figures = stream.metrics()
    assert figures["stream/acked"] == 6
    bad = ("dropped", "stale", "requeued", "given_back", "attempts")
    assert {name: n for name, n in figures.items() if n and name.split("/")[1] in bad} == {}


def test_151_a_run_that_failed_hands_out_none_of_the_groups_that_were_ready(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.finish(0, 1, 2)
    run.queue.call(calls.fail_run("engine says: no such model"))
    with pytest.raises(RunFailed, match="engine says: no such model"):
        stream.next_batch(groups=2, timeout_s=5)
