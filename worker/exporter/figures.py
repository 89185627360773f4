"""What the exporter publishes: from one look at a run to the series of the catalog.

Owns the children and the sums behind them. Never asks Redis. Invariants: the ends of groups by
environment add up to the queue's own counts, exactly (what has no environment that is shown is
`other`); while nothing is known, gauges are 0 and counters stand still; while Redis is away,
everything but `rollout_redis_up` is as it was last.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from rollstream.errors import DropReason
from rollstream.queue.overview import Overview
from rollstream.queue.reads import ends_by_env

from ..telemetry import catalog
from ..telemetry.catalog import ACKED, DROPPED, OTHER
from ..telemetry.registry import Registry
from .rising import Rising

_DEPTHS = {
    "queued": "q", "delayed": "d", "suspect": "s", "leased": "l", "full": "full", "ready": "ready",
    "delivered": "delivered", "live": "live", "evaluations": "evaluations",
}  # fmt: skip
_DROP = "dropped:"


class Figures:
    """The metrics of one exporter process.

    Args:
        version: of this program.
        wire: of its records.
        envs: environments of the configuration, until the run says which it has.
    """

    def __init__(self, *, version: str, wire: int, envs: Iterable[str]) -> None:
        self._about = {"version": version, "wire": str(wire)}
        self._envs = catalog.env_labels(envs, catalog.EXPORTER_ENV_LABELS)
        self._run: object = None
        """What tells the run that is shown from another one of its name; None before the first."""
        self._verifiers = (0, 0)
        self._begin()
        self._shown = self._registry

    def _begin(self) -> None:
        """Begin with all counters at 0; nobody sees it before everything is published."""
        self._registry = registry = Registry("exporter", self._envs)
        self._rising = Rising()
        registry.info("rollout_build_info", **self._about)
        self.verifiers(*self._verifiers)
        self.redis(up=True)

    def render(self) -> bytes:
        """Return the exposition text."""
        return self._shown.render()

    # --- what was seen -------------------------------------------------------------------------
    def redis(self, *, up: bool) -> None:
        """Publish whether the last look was answered."""
        self._registry.gauge("rollout_redis_up").set(up)

    def took(self, seconds: float) -> None:
        """Publish how long the last look took."""
        self._registry.gauge("rollout_exporter_read_seconds").set(seconds)

    def verifiers(self, alive: int, waiting: int) -> None:
        """Publish how many verifiers there are, and how many jobs none of them has begun."""
        self._verifiers = (alive, waiting)
        self._registry.gauge("rollout_verifiers").set(alive)
        self._registry.gauge("rollout_verifier_jobs_waiting").set(waiting)

    def no_run(self, *, is_gone: bool) -> None:
        """Publish that there is no such run, or none that can be read; counters stand still.

        Args:
            is_gone: there is none: the next that is seen is another one.
        """
        gauge = self._registry.gauge
        if is_gone:
            self._run = None
        for name in (
            "rollout_capacity_groups", "rollout_policy_version", "rollout_trainer_waiting",
            "rollout_trainer_connected", "rollout_paused", "rollout_accounting_difference",
        ):  # fmt: skip
            gauge(name).set(0)
        for name in (
            "rollout_queue_depth", "rollout_queue_oldest_age_seconds", "rollout_run_state",
            "rollout_processes",
        ):  # fmt: skip
            for child in self._registry.gauges(name).values():
                child.set(0)
        gauge("rollout_run_state", catalog.UNREADABLE).set(not is_gone)

    def seen(self, run: Overview, *, trainer_connected: bool) -> None:
        """Publish one look at the run."""
        self._follow(run)
        gauge, info = self._registry.gauge, run.info
        self._count(run.counters)
        for queue, name in _DEPTHS.items():
            gauge("rollout_queue_depth", queue).set(run.depths[name])
        for queue, seconds in run.measured.oldest_s.items():
            gauge("rollout_queue_oldest_age_seconds", queue).set(seconds)
        gauge("rollout_capacity_groups").set(info.capacity)
        gauge("rollout_policy_version").set(info.version)
        gauge("rollout_trainer_waiting").set(run.measured.trainer == "waiting")
        gauge("rollout_trainer_connected").set(trainer_connected)
        gauge("rollout_paused").set(info.state == "paused")
        for state, child in self._registry.gauges("rollout_run_state").items():
            child.set(state == info.state)
        for role, alive in (
            ("worker", run.measured.workers),
            ("aggregator", run.measured.aggregators),
            ("producer", run.measured.producers),
        ):
            gauge("rollout_processes", role).set(alive)
        proof = run.audit
        gauge("rollout_accounting_difference").set(
            proof.enqueued - proof.acked - proof.dropped - proof.live
        )
        self._shown = self._registry

    def _follow(self, run: Overview) -> None:
        """Begin anew where this is another run, or one whose environments were not known."""
        identity = (run.info.opened_unix_s, run.info.fingerprint)
        envs = self._envs
        if run.info.envs:
            envs = catalog.env_labels(run.info.envs, catalog.EXPORTER_ENV_LABELS)
        if identity == self._run and envs == self._envs:
            return
        self._run, self._envs = identity, envs
        self._begin()

    # --- counters ------------------------------------------------------------------------------
    def _count(self, counters: Mapping[str, int]) -> None:
        ends = self._ends(counters)
        for key, child in self._registry.by_labels("rollout_groups_total").items():
            self._rising.show(child, key, ends[key])
        counter, show = self._registry.counter, self._rising.show
        for name, count in (
            ("rollout_groups_enqueued_total", counters.get("enqueued", 0)),
            ("rollout_requeued_total", counters.get("requeued", 0)),
            ("rollout_producer_blocked_seconds_total", counters.get("blocked_ms", 0) / 1000),
        ):
            show(counter(name), name, count)
        for name, of in (
            ("rollout_members_failed_total", "member_failed"),
            ("rollout_stale_groups_total", "stale"),
        ):
            for label, child in self._registry.counters(name).items():
                show(child, (name, label), counters.get(f"{of}:{label}", 0))

    def _ends(self, counters: Mapping[str, int]) -> Tally[tuple[str, ...]]:
        """Return ends of groups by (environment, outcome, reason): `other` is what is left."""
        ends: Tally[tuple[str, ...]] = Tally()
        for name, count in counters.items():
            if name == ACKED or name.startswith(_DROP):
                ends[(OTHER, *_outcome(name))] += count
        for (env, name), count in ends_by_env(counters).items():
            if env in self._envs:
                outcome = _outcome(name)
                ends[(env, *outcome)] += count
                if env != OTHER:
                    ends[(OTHER, *outcome)] -= count
        return ends


def _outcome(name: str) -> tuple[str, str]:
    """Return outcome and reason; a reason that a newer version added is a custom one here."""
    if name == ACKED:
        return ACKED, ""
    reason = name.removeprefix(_DROP)
    return DROPPED, reason if reason in catalog.DROP_REASONS else DropReason.CUSTOM.value
