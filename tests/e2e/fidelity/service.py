"""The first half: samples that went the whole way, from the producer to a trainer's batch.

Owns the trainer's loop and what it does to the run meanwhile. Never looks into a worker. Invariant:
the samples are those of `GroupStream`, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from examples.demo.children import stop_all
from rollstream import GroupStream
from rollstream.sample import Sample
from tests.e2e.fidelity.stage import EngineControl, Service

STALL_S = 120.0
READY_S = 60.0
GROUPS_A_BATCH = 2
MISMATCHES = "rollout_token_mismatch_total"


@dataclass
class Delivered:
    """What a run gave."""

    samples: list[Sample] = field(default_factory=list)
    aborts: int = 0
    """How often everything in flight was aborted."""
    token_mismatches: float | None = None
    """The workers' own counter; None where they have none."""


def run_service(
    service: Service, redis_url: str, control: EngineControl | None, groups: int
) -> Delivered:
    """Run a service to its end, and return what its trainer was handed.

    Args:
        service: not started.
        redis_url: of its server.
        control: of the engine, which is disturbed on the way; None leaves it in peace.
        groups: how many come.
    """
    delivered = Delivered()
    acts: list[tuple[int, Callable[[GroupStream], None]]] = []
    if control is not None:
        acts = _acts(delivered, control, -(-groups // GROUPS_A_BATCH))
    try:
        for one in service.children:
            one.start()
        for one in service.workers:
            one.wait_ready(READY_S)
        with GroupStream.connect(redis_url, run=service.run, state="fresh", text=True) as stream:
            for batch in stream.batches(groups=GROUPS_A_BATCH, timeout_s=STALL_S):
                delivered.samples += batch.flat()
                # Read while the workers live: they end with the run.
                delivered.token_mismatches = service.counter(MISMATCHES)
                batch.ack()
                for act in [act for number, act in acts if number == batch.number]:
                    act(stream)
    finally:
        stop_all(service.children)
    return delivered


def _acts(
    delivered: Delivered, control: EngineControl, batches: int
) -> list[tuple[int, Callable[[GroupStream], None]]]:
    """Return what the trainer does behind which batch, all of it however few there are."""

    def abort_all(_: GroupStream) -> None:
        control.abort(None)
        delivered.aborts += 1

    def update(stream: GroupStream) -> None:
        """New weights under running calls: their later tokens are of the new version."""
        stream.pause("keep")
        stream.set_weight_version(control.update(abort_all=False))
        stream.resume()

    def update_and_abort(stream: GroupStream) -> None:
        stream.pause("abort")
        stream.set_weight_version(control.update(abort_all=True))
        stream.resume()
        delivered.aborts += 1

    early, middle, late = max(1, batches // 4), max(1, batches // 2), max(1, 3 * batches // 4)
    return [(early, abort_all), (middle, update), (late, update_and_abort)]
