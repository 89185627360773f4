"""Workers: which replica is different from the others, and why.

Owns the panels that tell replicas apart. Never makes JSON of them. Fifty lines of fifty workers are
read from the top of the legend, which is sorted.
"""

from __future__ import annotations

from .panels import Board, Panel, Query, Variable
from .phrases import PER_MINUTE, buckets, per_minute, rate, total

_CHOSEN = 'instance=~"$instance"'
_JOB = f'job="rollstream-worker", {_CHOSEN}'
_EACH = "{{instance}}"

_FLEET = (
    Panel(
        "Workers", "none",
        "up: those that answer Prometheus, of those that have a name; the others: processes that "
        "the queue has heard of lately. Fewer than you started: WorkerDown, or they ended.",
        [
            Query(f"sum(up{{{_JOB}}})", "up"),
            Query(f"count(up{{{_JOB}}})", "have a name"),
            Query("max by (role) (rollout_processes)", "{{role}} seen alive"),
        ],
    ),
    Panel(
        "Samples in flight", "none", "Leased samples of each worker.",
        [Query(total("rollout_inflight_samples", "instance", _CHOSEN), _EACH)], is_stacked=True,
    ),
    Panel(
        "Slots in use", "percentunit",
        "Of each worker. One far below the others does not reach Redis or its engines.",
        [
            Query(
                f"{total('rollout_inflight_samples', 'instance', _CHOSEN)}"
                f" / ({total('rollout_concurrency_limit', 'instance', _CHOSEN)} > 0)",
                _EACH,
            )
        ],
        is_share=True,
    ),
    Panel(
        "Trajectories that ended", PER_MINUTE, "At each worker.",
        [Query(per_minute("rollout_samples_total", "instance", _CHOSEN), _EACH)], is_stacked=True,
    ),
    Panel(
        "Aborted or failed", PER_MINUTE,
        "At each worker. One far above the others has a fault of its own; all alike, the engines, "
        "tools or rewards have.",
        [
            Query(
                per_minute(
                    "rollout_samples_total", "instance", f'status=~"aborted|failed", {_CHOSEN}'
                ),
                _EACH,
            )
        ],
    ),
    Panel(
        "Versions", "none", "Workers by version; more than one while they are being replaced.",
        [Query(f"count by (version, wire) (rollout_build_info{{{_JOB}}})", "{{version}}")],
    ),
)  # fmt: skip

_LOOP = (
    Panel(
        "Event loop, p99", "s",
        "How late the loop of each worker runs what is due. Above the line something holds it: a "
        "reward, a tool or a tokenizer that computes, or a machine with too few cores.",
        [Query(f"rollstream:event_loop_lag_seconds:p99_5m{{{_CHOSEN}}}", _EACH)], alarm=0.25,
    ),
    Panel(
        "Event loop, all looks", "s", "Of all chosen workers.",
        [Query(buckets("rollout_event_loop_lag_seconds", _CHOSEN), "{{le}}")], "heatmap",
    ),
    Panel(
        "Garbage collection", "s", "Longest pause of the last second, of each worker.",
        [Query(f"max by (instance) (rollout_gc_longest_pause_seconds{{{_CHOSEN}}})", _EACH)],
    ),
    Panel(
        "Threads of users' functions", "none",
        "hung: nobody waits for them any more, and they still run. They are never given back.",
        [
            Query(total("rollout_user_threads", where=_CHOSEN), "run"),
            Query(total("rollout_user_threads_hung", where=_CHOSEN), "hung"),
        ],
    ),
    Panel(
        "Scrapes", "s", "How long each worker takes to answer Prometheus.",
        [Query(f"max by (instance) (scrape_duration_seconds{{{_JOB}}})", _EACH)],
    ),
    Panel(
        "Series", "none", "Of each worker's answer; 400 is the most.",
        [Query(f"max by (instance) (scrape_samples_scraped{{{_JOB}}})", _EACH)],
    ),
)  # fmt: skip

_LEASES = (
    Panel(
        "Leases", PER_MINUTE,
        "reclaimed: expired under a worker that did not beat. fenced: its late results, refused. "
        "duplicate: results that had landed already. All 0 while nobody dies.",
        [
            Query(per_minute("rollout_leases_reclaimed_total", where=_CHOSEN), "reclaimed"),
            Query(per_minute("rollout_fenced_results_total", where=_CHOSEN), "fenced"),
            Query(per_minute("rollout_duplicate_results_total", where=_CHOSEN), "duplicate"),
        ],
    ),
    Panel(
        "Beats that Redis did not answer", PER_MINUTE, "Of each worker.",
        [Query(per_minute("rollout_heartbeat_failures_total", "instance", _CHOSEN), _EACH)],
    ),
    Panel(
        "Samples over new weights", PER_MINUTE,
        "parked: stopped half-way and kept. resumed: went on. exhausted: began anew.",
        [
            Query(per_minute("rollout_parked_samples_total", where=_CHOSEN), "parked"),
            Query(per_minute("rollout_resumed_samples_total", where=_CHOSEN), "resumed"),
            Query(per_minute("rollout_resumes_exhausted_total", where=_CHOSEN), "exhausted"),
        ],
    ),
)  # fmt: skip

_AGENTS = (
    Panel(
        "Sessions of agents", "none", "Open at each worker; 0 where no environment has an agent.",
        [Query(total("rollout_gateway_sessions", "instance", _CHOSEN), _EACH)], is_stacked=True,
    ),
    Panel(
        "Requests of agents", "reqps", "By how they ended; left: the agent went first.",
        [Query(rate("rollout_gateway_requests_total", "outcome", _CHOSEN), "{{outcome}}")],
    ),
    Panel(
        "Troubles of telemetry", PER_MINUTE,
        "Figures that could not be counted, and seconds of spans with names of users' own.",
        [
            Query(per_minute("rollout_telemetry_failures_total", where=_CHOSEN), "failures"),
            Query(per_minute("rollout_other_span_seconds_total", where=_CHOSEN), "other spans, s"),
        ],
    ),
)  # fmt: skip

BOARD = Board(
    "rollstream-workers",
    "Workers",
    "Which worker is different from the others, and what holds it?",
    {"Fleet": _FLEET, "Event loop": _LOOP, "Leases and beats": _LEASES, "Agents": _AGENTS},
    (Variable("instance", "Worker", 'label_values(up{job="rollstream-worker"}, instance)'),),
)
