"""The figures of a run and of one stream, for a trainer's tracker.

Owns their names, all under `stream/`. Never changes anything, and never waits long for a server.
Invariant: during an outage, and behind `close`, there is what this process knows by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollstream.runs import OUTAGES
from rollstream.updates import confirmed

if TYPE_CHECKING:
    from rollstream.trainer.hold import Hold
    from rollstream.updates.weights import Figures

TIMEOUT_S = 2.0
"""How long figures of a silent server are waited for."""


def stream_figures(hold: Hold, weights: Figures, wait_s: float) -> dict[str, float]:
    """Return the figures; see `GroupStream.metrics`."""
    figures: dict[str, float] = {
        "stream/version": hold.lineage.version,
        "stream/held_groups": len(hold.held),
        "stream/acked_here": hold.num_acked,
        "stream/wait_s": wait_s,
        "stream/stale_at_hand_out": hold.intake.num_stale,
        "stream/unreadable": hold.intake.num_unreadable,
        "stream/rollbacks": hold.lineage.rollbacks,
        "stream/updates": weights.updates,
        "stream/updates_failed": weights.failed,
        "stream/update_enter_s": weights.enter_s,
        "stream/update_s": weights.update_s,
        "stream/updating_s": weights.paused_s,
        "stream/engines_not_told": weights.not_told,
    }
    if hold.is_closed:
        return figures
    try:
        with hold.queue.within(TIMEOUT_S):
            counters, depths = hold.queue.counters(), hold.queue.depths()
            confirmations = hold.queue.confirmations()
    except OUTAGES:
        return figures
    figures["stream/dropped"] = 0
    for name, count in counters.items():
        kind, _, reason = name.removeprefix("e.").partition(":")
        # Evaluations are counted like groups, apart from them.
        kind = f"eval/{kind}" if name.startswith("e.") else kind
        figures[f"stream/{kind}/{reason}" if reason else f"stream/{kind}"] = count
        if kind == "dropped":
            figures["stream/dropped"] += count
    _add_ages(figures, counters)
    figures["stream/live"] = depths["live"]
    figures["stream/leased_members"] = depths["l"]
    alive = confirmed.live(confirmations, hold.info.lease_s)
    figures["stream/workers"] = len(alive)
    figures["stream/calls_in_flight"] = sum(one.in_flight for one in alive)
    for view in confirmed.engine_views(alive):
        name = f"stream/engines/{view.state}"
        figures[name] = figures.get(name, 0) + 1
    return figures


def _add_ages(figures: dict[str, float], counters: dict[str, int]) -> None:
    """Add how many versions old stale groups were on average, by the place where it was seen."""
    for name, count in counters.items():
        kind, _, place = name.partition(":")
        if kind == "stale" and count:
            age = counters.get(f"stale_age:{place}", 0)
            figures[f"stream/stale_age_mean/{place}"] = age / count
