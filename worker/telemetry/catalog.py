"""Every metric there is, of workers and of the exporter: the one place that names them.

Owns the names, types, labels with all their values, buckets and help texts; workers and the
exporter make their metrics of it (`registry.Registry`), docs/metrics.md is written from it, and
dashboards, rules and pages are held against it. Never counts, and imports nothing but the closed
enums. Invariant: every value of every label stands here, but for the names of environments, so
that all series exist from the start, and a worker has at most `MAX_SERIES` of them; no label
carries an id, a prompt, a URL, a version of weights or an error text.

Unit: base units, named at the end (`_seconds`, `_tokens`, `_versions`); counters end in `_total`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal, TypeAlias

from rollstream.errors import STATUS_OF, DropReason, MemberReason, StopReason

from ..engines.fleet.states import State


class Bounded(Enum):
    """Labels whose values are known only at run time; how many there are is bounded."""

    ENV = "environments"
    """Names of the configuration; where there are more than fit, the rest is `other`."""
    TEXT = "text"
    """One value for the life of the process (`rollout_build_info`)."""


Kind: TypeAlias = Literal["counter", "gauge", "histogram", "info"]
Process: TypeAlias = Literal["worker", "exporter"]
Values: TypeAlias = tuple[str, ...] | Bounded

ENV, TEXT = Bounded.ENV, Bounded.TEXT
OTHER = "other"
"""What an unknown value of a label is counted as."""
PREFIX = "rollout_"

MAX_SERIES = 400
"""Of one worker: every replica is scraped, and there may be hundreds."""
WORKER_ENV_LABELS = 3
"""Labels of environments at a worker, `other` among them."""
EXPORTER_ENV_LABELS = 24
"""At the exporter, of which there is one."""

SECONDS_BUCKETS = (
    .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1200, 1800, 3600,
)  # fmt: skip
TRAJECTORY_BUCKETS = (0.5, 2.5, 10, 40, 160, 640, 1800, 3600)
TOKEN_BUCKETS = tuple(64 * 4**power for power in range(7))
TURN_BUCKETS = (1, 3, 10, 30, 100)
STALENESS_BUCKETS = (0, 1, 2, 4, 8)
DIFFERENCE_BUCKETS = (0.001, 0.05, 0.3)
LAG_BUCKETS = (0.01, 0.05, 0.25, 1)

ALL, DELIVERED = VIEWS = ("all", "delivered")
OK = "ok"
SPANS = ("queue_wait", "generate", "tool", "reward", "merge", "submit", "group_wait")
TOKEN_KINDS = ("prompt", "cached", "sampled", "tool", "trainable", "discarded")
ENGINES = ("0", "1", "2")
"""Engines with series of their own. Engines join and leave, so a label is a place, which the next
one takes when one has left; `rollout_engines` counts all."""
ENGINE_OUTCOMES = ("stop", "length", "abort", "unavailable", "timeout", "refused", "fault")
MISMATCH_KINDS = ("prefix", "sampled", "log_prob")
CHECKED_CALLS = ("checked", "unknown")
DIVERGENCE_POLICIES = ("reject", "fork", "keep_prefix")
RESCORE_OUTCOMES = ("compared", "not_comparable", "dropped", "failed")
GATEWAY_OUTCOMES = (OK, "refused", "failed", "left")
TOOL_OUTCOMES = (
    OK, "malformed", "too_many", "unknown_tool", "bad_arguments", "raised", "timeout", "cancelled",
    "bad_result", OTHER,
)  # fmt: skip
REWARD_DETAILS = (
    "missing", "invalid", "no_label", "unknown_kind", "not_configured", "not_installed", "raised",
    "cancelled", "timeout", "too_large", "crashed", "lost", "unreachable", "unavailable", "refused",
    OTHER,
)  # fmt: skip
STATUSES = tuple(sorted({status.value for status in STATUS_OF.values()}))
STOP_REASONS = tuple(reason.value for reason in StopReason)
MEMBER_REASONS = tuple(reason.value for reason in MemberReason)
DROP_REASONS = tuple(reason.value for reason in DropReason)
READY, ACKED, DROPPED = "ready", "acked", "dropped"
QUEUES = (
    "queued", "delayed", "suspect", "leased", "full", "ready", "delivered", "live", "evaluations",
)  # fmt: skip
AGED_QUEUES = ("queued", "full", "ready", "delivered")
UNREADABLE = "unreadable"
"""Of a run that is there and that the exporter cannot read, or may not."""
RUN_STATES = ("running", "paused", "aborting", "ended", "failed", UNREADABLE)
ROLES = ("worker", "aggregator", "producer")
STALE_PLACES = ("running", "ready", "hand_out")


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric."""

    name: str
    """As scraped: counters with `_total`, an info with `_info`; without `_bucket`, `_sum`, …"""
    kind: Kind
    help: str
    labels: Mapping[str, Values] = field(default_factory=dict)
    """Label → all its values, in the order in which children are addressed."""
    buckets: tuple[float, ...] = ()
    """Upper edges without +Inf, of a histogram."""
    process: Process = "worker"
    together: tuple[tuple[str, ...], ...] = ()
    """Of labels whose values depend on one another, which are the last ones: what goes together.
    Empty where every value goes with every other."""

    @property
    def base(self) -> str:
        """The name that prometheus-client is given."""
        ending = {"counter": "_total", "info": "_info"}.get(self.kind, "")
        return self.name.removesuffix(ending)

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names that a query may use."""
        if self.kind == "histogram":
            return tuple(self.name + end for end in ("_bucket", "_sum", "_count"))
        return (self.name,)

    def children(self, envs: Sequence[str]) -> Iterator[tuple[str, ...]]:
        """Return the label values of every child, in the order of `labels`.

        Args:
            envs: labels of environments, from `env_labels`.
        """
        num_own = len(self.labels) - (len(self.together[0]) if self.together else 0)
        own = list(self.labels.values())[:num_own]
        choices: list[Sequence[tuple[str, ...]]] = [[(v,) for v in _all(o, envs)] for o in own]
        if self.together:
            choices.append(self.together)
        for parts in itertools.product(*choices):
            yield tuple(itertools.chain.from_iterable(parts))

    def num_series(self, envs: Sequence[str]) -> int:
        """Return how many series a scrape has of it."""
        if self.kind == "info":
            return 1
        each = len(self.buckets) + 3 if self.kind == "histogram" else 1
        return each * sum(1 for _ in self.children(envs))


def _all(values: Values, envs: Sequence[str]) -> Sequence[str]:
    if values is Bounded.ENV:
        return envs
    return () if isinstance(values, Bounded) else values


def env_labels(names: Iterable[str], most: int) -> tuple[str, ...]:
    """Return the labels of environments, `most` at the most; `other` is always one of them."""
    named = sorted(set(names) - {OTHER})
    return (*named[: most - 1], OTHER)


def _spec(
    kind: Kind,
    name: str,
    text: str,
    /,
    *,
    buckets: tuple[float, ...] = (),
    together: tuple[tuple[str, ...], ...] = (),
    **labels: Values,
) -> Spec:
    return Spec(PREFIX + name, kind, text, labels, buckets, together=together)


_TRAJECTORIES = (
    _spec("info", "build_info", "Version of the worker and of its wire", version=TEXT, wire=TEXT),
    _spec(
        "counter", "samples_total", "Trajectories that ended here, each attempt of a sample once",
        env=ENV, status=STATUSES, reason=STOP_REASONS,
        together=tuple((STATUS_OF[reason].value, reason.value) for reason in StopReason),
    ),
    _spec(
        "counter", "judged_groups_total", "Full groups judged here, by the verdict",
        env=ENV, outcome=(READY, DROPPED),
    ),
    _spec(
        "counter", "identical_groups_total",
        "Groups that one worker ran whole and whose members all sampled the same tokens, above a "
        "temperature of 0: seeds that do not differ, or an engine that ignores them",
        env=ENV,
    ),
    _spec("counter", "turns_total", "Engine calls of ended trajectories", env=ENV),
    _spec("counter", "tokens_total", "Tokens of ended trajectories", kind=TOKEN_KINDS),
    _spec(
        "histogram", "span_duration_seconds",
        "Parts of trajectories, also of those that failed or were cancelled",
        span=SPANS, buckets=SECONDS_BUCKETS,
    ),
    _spec(
        "histogram", "trajectory_seconds",
        "Time of an attempt of a sample, from its lease to its ending, well or badly",
        buckets=TRAJECTORY_BUCKETS,
    ),
    _spec(
        "counter", "other_span_seconds_total",
        "Seconds of spans that users' functions recorded under names of their own",
    ),
    _spec(
        "histogram", "sample_tokens", "Response tokens of members of judged groups",
        kind=VIEWS, buckets=TOKEN_BUCKETS,
    ),
    _spec(
        "histogram", "sample_turns", "Engine calls of trajectories that were completed or cut",
        kind=(ALL,), buckets=TURN_BUCKETS,
    ),
    _spec(
        "histogram", "sample_staleness_versions",
        "Versions between the oldest token of a trajectory and the run's weights: when it ended "
        "(all), when its group was judged and kept (delivered)",
        kind=VIEWS, buckets=STALENESS_BUCKETS,
    ),
    _spec(
        "counter", "evaluation_samples_total",
        "Trajectories of evaluations that ended, which count nowhere else", status=STATUSES,
    ),
    _spec(
        "counter", "parked_samples_total",
        "Samples that were stopped half-way with what they had; their tokens and turns count once, "
        "where they end",
    ),
    _spec("counter", "resumed_samples_total", "Samples that went on from what was parked"),
    _spec(
        "counter", "resumes_exhausted_total",
        "Parked samples that began anew: resumed too often, or nothing to go on from",
    ),
)  # fmt: skip
_OUTCOMES = (
    _spec(
        "counter", "rewards_total", "Members of judged groups that have a reward",
        env=ENV, kind=VIEWS,
    ),
    _spec(
        "counter", "reward_gained_total", "Sum of their rewards above 0", env=ENV, kind=VIEWS
    ),
    _spec(
        "counter", "reward_lost_total", "Sum of their rewards below 0, without the sign",
        env=ENV, kind=VIEWS,
    ),
    _spec(
        "counter", "reward_errors_total", "Verdicts that could not be had", detail=REWARD_DETAILS
    ),
    _spec(
        "counter", "tool_calls_total", "Tool calls of ended trajectories", outcome=TOOL_OUTCOMES
    ),
    _spec(
        "counter", "token_mismatch_total",
        "Samples that are not what the engine saw and sampled; any at all is an alarm",
        kind=MISMATCH_KINDS,
    ),
    _spec(
        "counter", "checked_calls_total",
        "Calls of samples: held against what was sent, or sent by another worker",
        outcome=CHECKED_CALLS,
    ),
    _spec(
        "counter", "divergences_total", "Turns whose client had rewritten history",
        policy=DIVERGENCE_POLICIES,
    ),
    _spec(
        "counter", "rescored_samples_total", "Finished samples chosen to be scored again",
        outcome=RESCORE_OUTCOMES,
    ),
    _spec(
        "histogram", "logprob_difference",
        "Absolute difference (nats) of a sampled log-prob and a prefill of the same weights",
        buckets=DIFFERENCE_BUCKETS,
    ),
)  # fmt: skip
_ENGINES = (
    _spec(
        "gauge", "engine_up",
        "1 where the engine answers, also while it takes no calls; NaN where no engine has the "
        "place", engine=ENGINES,
    ),
    _spec(
        "gauge", "engine_inflight_requests", "Calls of this worker at the engine", engine=ENGINES
    ),
    _spec(
        "gauge", "engine_version_lag", "Weight versions that the engine is behind the run",
        engine=ENGINES,
    ),
    _spec(
        "gauge", "engine_limit", "Most calls of this worker at the engine; 0 is no limit",
        engine=ENGINES,
    ),
    _spec(
        "counter", "engine_requests_total", "Requests to engines that ended",
        engine=ENGINES, outcome=ENGINE_OUTCOMES,
    ),
    _spec("gauge", "engines", "Engines by state", state=tuple(state.value for state in State)),
    _spec("counter", "engine_retries_total", "Calls that were tried again"),
    _spec(
        "counter", "engine_retries_denied_total",
        "Calls that were not, because the budget of retries was used up",
    ),
    _spec(
        "counter", "engine_stale_connections_total",
        "Tries that met a connection which its engine had closed",
    ),
    _spec(
        "counter", "engine_ejections_total",
        "Times that an engine was put aside until it answers",
    ),
    _spec("counter", "engine_waits_total", "Tries of calls that found no engine up"),
    _spec("counter", "engine_pauses_total", "Pauses of engines that were seen to begin"),
    _spec(
        "counter", "aborted_calls_total",
        "Calls that were aborted for new weights or at the worker's end",
    ),
    _spec("gauge", "gateway_sessions", "Sessions that agents may call"),
    _spec(
        "counter", "gateway_requests_total",
        "Requests of agents; the failed ones for us or an engine, left: the agent went first",
        outcome=GATEWAY_OUTCOMES,
    ),
)  # fmt: skip
_PROCESS = (
    _spec("gauge", "inflight_samples", "Leased samples of this worker"),
    _spec("gauge", "concurrency_limit", "Slots of this worker"),
    _spec(
        "counter", "leases_reclaimed_total", "Expired leases that this worker's sweeps took back"
    ),
    _spec("counter", "fenced_results_total", "Late results that the queue refused"),
    _spec(
        "counter", "duplicate_results_total",
        "Results that had landed before (their answer was lost)",
    ),
    _spec("counter", "heartbeat_failures_total", "Beats that Redis did not answer"),
    _spec(
        "histogram", "event_loop_lag_seconds", "How late the event loop runs what is due",
        buckets=LAG_BUCKETS,
    ),
    _spec(
        "gauge", "gc_longest_pause_seconds", "Longest garbage collection of the last second"
    ),
    _spec("gauge", "user_threads", "Threads that run a user's function"),
    _spec("gauge", "user_threads_hung", "Those of them that nobody waits for any more"),
    _spec(
        "counter", "telemetry_failures_total",
        "Figures that could not be counted; rollouts went on without",
    ),
    _spec(
        "counter", "log_lines_dropped_total",
        "Lines of the log that nobody took: a full disk, or a pipe that nobody reads",
    ),
)  # fmt: skip
WORKER = (*_TRAJECTORIES, *_OUTCOMES, *_ENGINES, *_PROCESS)
"""What each worker says of itself."""


_RUN = (
    _spec(
        "info", "build_info", "Version of the exporter and of its wire", version=TEXT, wire=TEXT
    ),
    _spec(
        "counter", "groups_total", "Groups that ended, from the queue's own counts",
        env=ENV, outcome=(ACKED, DROPPED), reason=("", *DROP_REASONS),
        together=((ACKED, ""), *((DROPPED, reason) for reason in DROP_REASONS)),
    ),
    _spec("counter", "groups_enqueued_total", "Groups that were enqueued, evaluations aside"),
    _spec(
        "gauge", "queue_depth",
        "Members that wait or run (queued, delayed, suspect, leased) and groups (the others)",
        queue=QUEUES,
    ),
    _spec(
        "gauge", "queue_oldest_age_seconds", "How long the oldest has been there; 0 where empty",
        queue=AGED_QUEUES,
    ),
    _spec("gauge", "capacity_groups", "Groups that may be live at once"),
    _spec("gauge", "policy_version", "Weight version of the run"),
    _spec("gauge", "trainer_waiting", "1 while the trainer waits for groups that are not there"),
    _spec("gauge", "trainer_connected", "1 while a trainer is connected"),
    _spec(
        "counter", "producer_blocked_seconds_total",
        "Seconds that producers held prompts and the run had no room for them",
    ),
    _spec(
        "gauge", "accounting_difference",
        "Groups enqueued less those acked, dropped and live: anything but 0 is a loss",
    ),
    _spec(
        "gauge", "run_state", "1 for the state that the run is in; none of them: no run",
        state=RUN_STATES,
    ),
    _spec("gauge", "processes", "Processes that were seen alive", role=ROLES),
    _spec(
        "counter", "members_failed_total", "Members that failed for good", reason=MEMBER_REASONS
    ),
    _spec("counter", "requeued_total", "Groups that began anew"),
    _spec(
        "counter", "stale_groups_total", "Groups whose tokens were too old, by where they were",
        place=STALE_PLACES,
    ),
    _spec("gauge", "paused", "1 while the run is paused"),
    _spec("gauge", "redis_up", "1 where Redis answered the last look"),
    _spec("gauge", "verifiers", "Verifier processes that live"),
    _spec("gauge", "verifier_jobs_waiting", "Jobs that no verifier has begun"),
    _spec("gauge", "exporter_read_seconds", "How long the last look at Redis took"),
)  # fmt: skip
EXPORTER: tuple[Spec, ...] = tuple(replace(spec, process="exporter") for spec in _RUN)
"""What the exporter says of a run as a whole."""

CATALOG: tuple[Spec, ...] = (*WORKER, *EXPORTER)
NAMES = frozenset(spec.name for spec in CATALOG)
SERIES_NAMES = frozenset(name for spec in CATALOG for name in spec.series_names)
"""Every name that a query may use."""


def spec_of(name: str, process: Process = "worker") -> Spec:
    """Return the metric of a name.

    Raises:
        LookupError: the process has none of that name.
    """
    for spec in CATALOG:
        if spec.name == name and spec.process == process:
            return spec
    raise LookupError(f"the catalog has no metric {name} of the {process}")
