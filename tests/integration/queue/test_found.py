"""What the walks found in the scripts, each as the shortest way to it."""

from __future__ import annotations

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
