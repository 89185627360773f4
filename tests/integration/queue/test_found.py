"""What the walks found in the scripts, each as the shortest way to it."""

from __future__ import annotations

from rollstream.queue import calls
from tests.queue_bench import Bench


def test_a_lease_that_suspects_fill_rings_for_what_it_leaves_in_the_queue(bench: Bench) -> None:
    bench.enqueue(0, n=1)
    for _ in range(2):
        bench.lease()
        bench.advance(30_000)
    bench.enqueue(1, n=1)
    assert (bench.where(0, 0), bench.where(1, 0)) == ("s", "q")
    bench.client.delete(f"{bench.key}bell")

    assert [lease.group_index for lease in bench.lease("other", limit=1)] == ["0"]

    assert bench.queue.wait_bell(0.1), "the next worker that waits is told of group 1"


def test_audit_counts_no_evaluation_among_the_groups_that_the_trainer_holds(bench: Bench) -> None:
    bench.connect()
    bench.enqueue("e:math:0", n=1)
    bench.complete(bench.lease())

    assert bench.call(calls.deliver("trainer", ["e:math:0"])) == ["ok"]

    bench.audit()
    assert bench.m("delivered") == "0"
