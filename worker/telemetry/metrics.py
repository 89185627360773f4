"""The metrics of a worker, and how observations reach them.

Owns the accumulators. Never does I/O, never raises into a rollout: an unknown label value is
counted as `other`, and what breaks in here is counted (`guard`). Invariant: names, labels and
series are those of `catalog`, all of them from the start.

The hot path adds to plain counters and arrays; `flush`, once a second, moves them to Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollstream.errors import STATUS_OF, DropReason, Status, StopReason
from rollstream.log_sink import lines_dropped
from rollstream.sample import UNKNOWN_VERSION, Sample, Span

from . import catalog
from .catalog import ALL, DROPPED, OTHER, READY
from .figures import EngineFigures, EngineMetrics, PoolFigures
from .guard import Guard
from .outcomes import OutcomeMetrics
from .readings import MOST, Readings, Totals, move, tally_of
from .registry import Registry
from .tally import counted

_REWARD_ERROR = StopReason.REWARD_ERROR
_ENDED_WELL = frozenset(
    reason for reason, status in STATUS_OF.items() if status in (Status.COMPLETED, Status.TRUNCATED)
)


class Metrics:
    """The metrics of one worker process."""

    def __init__(self, *, version: str, wire: int, envs: Iterable[str]) -> None:
        labels = catalog.env_labels(envs, catalog.WORKER_ENV_LABELS)
        self._envs = frozenset(labels)
        self.registry = registry = Registry("worker", labels)
        registry.info("rollout_build_info", version=version, wire=str(wire))
        self.guard = Guard()
        self._bind_process()
        self._bind_counts()
        self._bind_readings()
        self.outcomes = OutcomeMetrics(registry, labels)
        self._engines = EngineMetrics(registry)

    def _bind_process(self) -> None:
        gauge, counter = self.registry.gauge, self.registry.counter
        self.inflight = gauge("rollout_inflight_samples")
        self.concurrency_limit = gauge("rollout_concurrency_limit")
        self.gc_pause_seconds = gauge("rollout_gc_longest_pause_seconds")
        self.user_threads = gauge("rollout_user_threads")
        self.user_threads_hung = gauge("rollout_user_threads_hung")
        self.leases_reclaimed_total = counter("rollout_leases_reclaimed_total")
        self.fenced_results_total = counter("rollout_fenced_results_total")
        self.duplicate_results_total = counter("rollout_duplicate_results_total")
        self.heartbeat_failures_total = counter("rollout_heartbeat_failures_total")
        self.parked_samples_total = counter("rollout_parked_samples_total")
        self.resumed_samples_total = counter("rollout_resumed_samples_total")
        self.resumes_exhausted_total = counter("rollout_resumes_exhausted_total")
        self._failures = counter("rollout_telemetry_failures_total")
        self._lines_dropped = counter("rollout_log_lines_dropped_total")

    def _bind_counts(self) -> None:
        registry = self.registry
        self._sample_children = {
            (env, StopReason(reason)): child
            for (env, _, reason), child in registry.by_labels("rollout_samples_total").items()
        }
        self._group_children = registry.by_labels("rollout_judged_groups_total")
        self._alike_children = registry.counters("rollout_identical_groups_total")
        self._turn_children = registry.counters("rollout_turns_total")
        self._token_children = registry.counters("rollout_tokens_total")
        self._divergence_children = registry.counters("rollout_divergences_total")
        self._evaluated_children = registry.counters("rollout_evaluation_samples_total")
        self._samples = tally_of(self._sample_children)
        self._groups = tally_of(self._group_children)
        self._alike = tally_of(self._alike_children)
        self._turns = tally_of(self._turn_children)
        self._tokens = tally_of(self._token_children)
        self._divergences = tally_of(self._divergence_children)
        self._other_span_s = 0.0
        self._other_spans = registry.counter("rollout_other_span_seconds_total")
        self._mismatches = registry.counters("rollout_token_mismatch_total")
        self._checked = registry.counters("rollout_checked_calls_total")
        self._rescored = registry.counters("rollout_rescored_samples_total")
        self._gateway = registry.counters("rollout_gateway_requests_total")
        self._sessions = registry.gauge("rollout_gateway_sessions")
        self._totals = Totals()

    def _bind_readings(self) -> None:
        self._readings: list[Readings] = []
        self._span_values = self._readings_of("rollout_span_duration_seconds")
        (self._lags,) = self._readings_of("rollout_event_loop_lag_seconds").values()
        (self._differences,) = self._readings_of("rollout_logprob_difference").values()
        self._stalenesses = self._readings_of("rollout_sample_staleness_versions")[ALL]
        (self._turn_counts,) = self._readings_of("rollout_sample_turns").values()
        (self._trajectories,) = self._readings_of("rollout_trajectory_seconds").values()

    def _readings_of(self, name: str) -> dict[str, list[float]]:
        """Return what values of a histogram are appended to, by its label; "" where it has none."""
        children = self.registry.by_labels(name)
        readings = Readings(list(children.values()), catalog.spec_of(name).buckets)
        self._readings.append(readings)
        return {"".join(key): values for key, values in zip(children, readings.values, strict=True)}

    # --- the hot path ----------------------------------------------------------------------------
    def sample_ended(
        self,
        env: str,
        reason: StopReason,
        leaves: Sequence[Sample],
        *,
        delivered: bool,
        version: int = UNKNOWN_VERSION,
    ) -> None:
        """Count one trajectory: its ending, turns, tokens, spans, and its age in weight versions.

        Args:
            env: of its group.
            reason: why it ended.
            leaves: its samples.
            delivered: they go to the aggregator.
            version: the run's weights now; unknown counts no age.
        """
        env = env if env in self._envs else OTHER
        self._samples[env, reason] += 1
        try:
            self._count(env, reason, leaves, delivered, version)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rollout goes on
            self.guard.failed(error)

    def _count(
        self, env: str, reason: StopReason, leaves: Sequence[Sample], delivered: bool, version: int
    ) -> None:
        if reason is _REWARD_ERROR:
            detail = leaves[0].metadata.get("error_detail") if leaves else None
            self.outcomes.reward_error(detail if isinstance(detail, str) else OTHER)
        if not leaves:
            return
        turns, prompt, cached, sampled, tool, trainable, oldest = counted(leaves)
        tokens = self._tokens
        self._turns[env] += turns
        tokens["prompt"] += prompt
        tokens["cached"] += cached
        tokens["sampled"] += sampled
        tokens["tool"] += tool
        if not delivered:
            tokens["discarded"] += sampled
        else:
            tokens["trainable"] += trainable
            if version >= 0 and oldest >= 0:
                self._stalenesses.append(version - oldest if version > oldest else 0)
            if turns and reason in _ENDED_WELL:
                self._turn_counts.append(turns)
        metadata = leaves[0].metadata
        times = metadata.get("attempt")
        if times:
            self._trajectories.append(times["attempt_end"] - times["attempt_start"])
        self.outcomes.tool_calls(metadata)
        for leaf in leaves:
            diverged = leaf.metadata.get("divergences")
            if diverged:
                self._diverged(diverged)
            self._spans(leaf.spans)

    def _spans(self, spans: Iterable[Span]) -> None:
        values = self._span_values
        for span in spans:
            try:
                values[span.name].append(span.duration_s)
            except KeyError:  # where nothing is raised this costs nothing
                self._other_span(span.duration_s)

    def _other_span(self, duration_s: float) -> None:
        if duration_s > 0:  # neither NaN
            self._other_span_s += min(MOST, duration_s)

    def evaluation_ended(self, reason: StopReason) -> None:
        """Count one trajectory of an evaluation, which counts nowhere else."""
        self._evaluated_children[STATUS_OF[reason].value].inc()

    def _diverged(self, found: object) -> None:
        """Count what a merge noted, each turn once: in the leaf that has it (`tito.divergence`).

        Metadata is the user's too, so anything may be there.
        """
        for entry in found if isinstance(found, list) else ():
            policy = entry.get("policy") if isinstance(entry, dict) else None
            if isinstance(policy, str) and policy in self._divergence_children:
                self._divergences[policy] += 1

    def differences(self, values: Iterable[float]) -> None:
        """Keep the absolute differences of one rescored sample until the next flush."""
        self._differences += values

    def span(self, name: str, duration_s: float) -> None:
        """Keep one duration until the next flush; of a user's own name it counts as `other`."""
        values = self._span_values.get(name)
        if values is None:
            self._other_span(duration_s)
        else:
            values.append(duration_s)

    def spans(self, spans: Iterable[Span]) -> None:
        """Keep the durations of a trajectory that has no sample to count them with."""
        try:
            self._spans(spans)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rollout goes on
            self.guard.failed(error)

    def group_judged(self, env: str, drop: DropReason | None) -> None:
        """Count one verdict."""
        env = env if env in self._envs else OTHER
        self._groups[env, READY if drop is None else DROPPED] += 1

    def group_alike(self, env: str) -> None:
        """Count one group whose members all sampled the same tokens."""
        self._alike[env if env in self._envs else OTHER] += 1

    def lag(self, seconds: float) -> None:
        """Keep one reading of how late the loop was."""
        self._lags.append(max(0.0, seconds))

    # --- once a second ---------------------------------------------------------------------------
    def flush(self) -> None:
        """Move what was accumulated to Prometheus; a part that breaks stops no other."""
        run = self.guard.run
        run(self._move)
        for readings in self._readings:
            run(readings.flush)
        run(self.outcomes.flush)
        self._totals.follow(self._failures, self.guard.num_failures)
        self._totals.follow(self._lines_dropped, lines_dropped())

    def _move(self) -> None:
        move(self._samples, self._sample_children)
        move(self._groups, self._group_children)
        move(self._alike, self._alike_children)
        move(self._turns, self._turn_children)
        move(self._tokens, self._token_children)
        move(self._divergences, self._divergence_children)
        seconds, self._other_span_s = self._other_span_s, 0.0
        self._other_spans.inc(seconds)

    def fidelity(self, mismatches: Mapping[str, int], *, checked: int, unknown: int) -> None:
        """Publish the running totals of the check on every sample."""
        self._totals.follow_all(self._mismatches, mismatches)
        self._totals.follow_all(self._checked, {"checked": checked, "unknown": unknown})

    def rescored(self, totals: Mapping[str, int]) -> None:
        """Publish the running totals of the rescoring, by outcome."""
        self._totals.follow_all(self._rescored, totals, rest="failed")

    def gateway(self, requests: Mapping[str, int], open_sessions: int) -> None:
        """Publish the running totals of agents' requests, by outcome, and the sessions now."""
        self._totals.follow_all(self._gateway, requests, rest="failed")
        self._sessions.set(open_sessions)

    def engines(self, engines: Iterable[EngineFigures], pool: PoolFigures) -> None:
        """Publish how the engines are; their counts and the pool's are running totals."""
        self._engines.publish(engines, pool)

    def render(self) -> bytes:
        """Return the exposition text."""
        return self.registry.render()
