"""How a wait for groups ends other than with a group: pure judgements over one look at the run.

Owns the conditions and the sentences of `StreamStalled`, `ProducerGone`, `RunFailed` and
`CapacityTooSmall`. Never does I/O. Invariant: a normal end needs a finished producer and nothing
that could still arrive; whatever else stops the flow has a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollstream.errors import CapacityTooSmall, ProducerGone, RunFailed, StreamError, StreamStalled
from rollstream.updates import confirmed

if TYPE_CHECKING:
    from rollstream.queue.reads import Confirmation, RunInfo

ABORTED_STATES = frozenset({"aborting", "ended"})


@dataclass(frozen=True, slots=True)
class Look:
    """The run as one waiting trainer saw it."""

    info: RunInfo
    depths: Mapping[str, int]
    """q d s l full ready live delivered."""
    presence: Mapping[str, int]
    """workers, producers, aggregators that are alive."""
    num_held: int
    """Groups that this trainer has in hand."""
    is_paused_here: bool = False
    """This trainer has paused the run."""

    @property
    def num_undelivered(self) -> int:
        """Live groups that are not in this trainer's hands, whatever Redis counts as delivered.

        A delivered group that it does not hold was handed to an earlier trainer and still has to
        be found; one that it holds and Redis does not count as delivered was lost or began anew.
        """
        return self.depths.get("live", 0) - min(self.depths.get("delivered", 0), self.num_held)


def is_over(look: Look) -> bool:
    """Return whether nothing can arrive any more because everything has."""
    return look.info.done and look.num_undelivered <= 0


def failure(info: RunInfo) -> StreamError | None:
    """Return the error of a run that was ended as failed, or aborted."""
    if info.state == "failed":
        return RunFailed(info.error or "no reason was given")
    if info.state in ABORTED_STATES:
        return RunFailed(f"aborted: {info.error or 'no reason was given'}")
    return None


def deadlock(
    look: Look, *, groups: int, num_buffered: int, is_incomplete: bool = False
) -> StreamError | None:
    """Return what makes waiting pointless; to be raised once it has lasted a while.

    Args:
        look: the run.
        groups: size of the batch that is waited for.
        num_buffered: groups of it that are here already.
        is_incomplete: the producer said that it is done, and yet prompts are missing.
    """
    if look.num_undelivered > 0 or (look.info.done and not is_incomplete):
        return None
    live, capacity = look.depths.get("live", 0), look.info.capacity
    if live >= capacity:
        return CapacityTooSmall(groups, capacity, live)
    if look.presence.get("producers", 0) == 0:
        return ProducerGone(
            f"run {look.info.run!r} is not finished (frontier {look.info.frontier}), nothing is in "
            f"flight and no producer is alive; {num_buffered} of {groups} groups of the batch are "
            "here and stay. Start the producer again (python -m producer) and iterate again"
        )
    return None


def stalled(
    look: Look | None,
    timeout_s: float,
    oldest: str,
    confirmations: Sequence[Confirmation] = (),
) -> StreamStalled:
    """Return the error of a wait in which nothing ended.

    Args:
        look: the last one that succeeded; None where Redis never answered.
        timeout_s: how long nothing ended.
        oldest: a sentence on the oldest group, or empty.
        confirmations: of every worker.
    """
    if look is None:
        return StreamStalled(f"Redis did not answer for {timeout_s:g} s; iterate again to go on")
    depths, info = look.depths, look.info
    waiting = depths.get("q", 0) + depths.get("d", 0) + depths.get("s", 0)
    in_flight = (
        f"Groups in flight: {look.num_undelivered} ({depths.get('full', 0)} wait for a verdict, "
        f"{depths.get('ready', 0)} are ready); members: {depths.get('l', 0)} leased, "
        f"{waiting} waiting"
    )
    hints = [oldest] if oldest else []
    if info.state == "paused":
        hints.append(paused(info, here=look.is_paused_here))
    elif info.state != "running":
        hints.append(f"the run is {info.state}")
    if info.draining:
        hints.append("an operator drains it, so no prompts come: rollstream resume")
    views = confirmed.engine_views(confirmed.live(confirmations, info.lease_s))
    if hindered := confirmed.hindrances(views, info.version):
        hints.append(hindered)
    nobody = [
        f"no {stage} is alive ({start})"
        for stage, key, start in _STAGES
        if look.presence.get(key, 0) == 0 and _needed(key, look)
    ]
    hints += nobody or ["every stage that is needed has somebody alive"]
    return StreamStalled(
        f"run {info.run!r}: nothing ended for {timeout_s:g} s. {in_flight}; {'; '.join(hints)}. "
        "Nothing is lost: iterate again to go on"
    )


def paused(info: RunInfo, *, here: bool) -> str:
    """Return a sentence on a pause: whose, which, since when, and what ends it."""
    who, end = ("this trainer", "resume()") if here else (
        "somebody else (an operator, or an earlier trainer)", "rollstream resume, or resume() here,"
    )  # fmt: skip
    return (
        f"the run is paused ({info.pause_mode}) since {info.paused_s:.0f} s, by {who}: "
        f"{end} ends it"
    )


_STAGES = (
    ("producer", "producers", "python -m producer"),
    ("worker", "workers", "python -m worker"),
    ("aggregator", "aggregators", "python -m worker --worker.role aggregator"),
)


def _needed(key: str, look: Look) -> bool:
    if key == "producers":
        return not look.info.done
    if key == "workers":
        return look.num_undelivered > look.depths.get("full", 0)
    return look.depths.get("full", 0) > 0
