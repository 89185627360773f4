"""Overview: is the run all right, and if not, which part of it is what it waits for.

Owns the panels of the first dashboard that anybody opens. Never makes JSON of them.
"""

from __future__ import annotations

from .panels import Board, Panel, Query
from .phrases import PER_MINUTE, WINDOW, buckets, per_minute, placed, quantile, rate

_STATS = (
    Panel(
        "Alerts that are on", "none",
        "How many alerts are on now; Prometheus says which, and ops/runbook.md what to do.",
        [Query('count(ALERTS{alertstate="firing"}) or vector(0)', "alerts")],
        "stat", width=3, height=4, alarm=1,
    ),
    Panel(
        "Run", "none", "The state that the run is in.",
        [Query("max by (state) (rollout_run_state) > 0", "{{state}}")],
        "stat", width=3, height=4, text_mode="name",
    ),
    Panel(
        "Workers", "none", "Workers that answer Prometheus.",
        [Query("rollstream:workers:up", "workers")], "stat", width=3, height=4,
    ),
    Panel(
        "Groups trained", PER_MINUTE, "Groups that the trainer acked: what all this is for.",
        [Query(per_minute("rollout_groups_total", where='outcome="acked"'), "groups")],
        "stat", width=3, height=4,
    ),
    Panel(
        "Trajectories", PER_MINUTE, "Trajectories that ended, well or badly.",
        [Query(per_minute("rollout_samples_total"), "trajectories")], "stat", width=3, height=4,
    ),
    Panel(
        "Trainable tokens", "si:tok/s", "Sampled tokens that go on towards the trainer.",
        [Query(rate("rollout_tokens_total", where='kind="trainable"'), "tokens")],
        "stat", width=3, height=4,
    ),
    Panel(
        "Slots in use", "percentunit",
        "Samples in flight by the slots of all workers. Full and a trainer that waits: the engines "
        "or the number of workers are the bound. Empty: prompts or capacity are.",
        [
            Query(
                "rollstream:inflight_samples:sum / (rollstream:concurrency_limit:sum > 0)", "in use"
            )
        ],
        "stat", width=3, height=4, is_share=True,
    ),
    Panel(
        "Trainer waits", "percentunit",
        "Share of the time in which the trainer waits for groups that are not there.",
        [Query(f"max(avg_over_time(rollout_trainer_waiting{WINDOW}))", "waits")],
        "stat", width=3, height=4, is_share=True, alarm=0.9,
    ),
)  # fmt: skip

_FLOW = (
    Panel(
        "Groups", PER_MINUTE,
        "Groups that came in and how they ended. In a steady run, enqueued is acked + dropped.",
        [
            Query(per_minute("rollout_groups_enqueued_total"), "enqueued"),
            Query(per_minute("rollout_groups_total", "outcome"), "{{outcome}}"),
        ],
    ),
    Panel(
        "Trajectories by status", PER_MINUTE,
        "How trajectories end. Completed and truncated ones are usable; aborted and failed ones "
        "are generated again, or missing in their group.",
        [Query(per_minute("rollout_samples_total", "status"), "{{status}}")], is_stacked=True,
    ),
    Panel(
        "Tokens", "si:tok/s",
        "Sampled is what the engines worked for; trainable what is left of it; discarded what was "
        "sampled for nothing; cached is the part of prompt that no engine computed again.",
        [Query(rate("rollout_tokens_total", "kind"), "{{kind}}")],
    ),
    Panel(
        "In flight against the limit", "none",
        "Samples that workers hold, and the slots that they have.",
        [
            Query("rollstream:inflight_samples:sum", "in flight"),
            Query("rollstream:concurrency_limit:sum", "limit"),
        ],
    ),
    Panel(
        "Samples that wait or run", "none",
        "Members of groups before their end. Many queued and all slots in use: more workers or "
        "engines would help. None queued: the producer or its capacity is the bound.",
        [
            Query(
                'max by (queue) (rollout_queue_depth{queue=~"queued|delayed|suspect|leased"})',
                "{{queue}}",
            )
        ],
        is_stacked=True,
    ),
    Panel(
        "Groups that wait", "none",
        "full waits for an aggregator, ready for the trainer, delivered for its ack; live is all "
        "of them and the open ones, and never above capacity.",
        [
            Query(
                'max by (queue) (rollout_queue_depth{queue=~"full|ready|delivered|live"})',
                "{{queue}}",
            ),
            Query("max(rollout_capacity_groups)", "capacity"),
        ],
    ),
    Panel(
        "Who waits for whom", "percentunit",
        "Share of the time. The trainer waits: rollouts are too slow. The producer is blocked: "
        "there is no room, so the trainer is what is slow. Both: groups are stuck or dropped.",
        [
            Query(f"max(avg_over_time(rollout_trainer_waiting{WINDOW}))", "trainer waits"),
            Query(
                f"clamp_max({rate('rollout_producer_blocked_seconds_total')}, 1)",
                "producer blocked",
            ),
        ],
        is_share=True,
    ),
    Panel(
        "Oldest", "s", "How long the oldest of each queue has been there.",
        [Query("max by (queue) (rollout_queue_oldest_age_seconds)", "{{queue}}")],
    ),
    Panel(
        "Age in weight versions", "none",
        "Versions between the oldest token of a trajectory and the run's weights when it ended.",
        [
            Query(quantile(0.5, "rollout_sample_staleness_versions", where='kind="all"'), "p50"),
            Query('rollstream:sample_staleness_versions:p95_10m{kind="all"}', "p95, 10 min"),
        ],
        alarm=4,
    ),
)  # fmt: skip

_LOST = (
    Panel(
        "Trajectories aborted or failed", PER_MINUTE,
        "By reason; docs/guarantees.md and `rollstream show` tell of a single one.",
        [
            Query(
                per_minute("rollout_samples_total", "reason", 'status=~"aborted|failed"'),
                "{{reason}}",
            )
        ],
        width=12, is_stacked=True,
    ),
    Panel(
        "Groups dropped", PER_MINUTE, "By their one reason.",
        [Query(per_minute("rollout_groups_total", "reason", 'outcome="dropped"'), "{{reason}}")],
        width=12, is_stacked=True,
    ),
)  # fmt: skip

_TIME = (
    Panel(
        "Time of a trajectory", "s",
        "From its lease to its end, well or badly; waiting before and behind it is not in it.",
        [
            Query(quantile(q, "rollout_trajectory_seconds"), f"p{q * 100:g}") for q in (0.5, 0.95)
        ],
    ),
    Panel(
        "Where the time of a trajectory goes", "s",
        "Seconds of each part by trajectory that ended, all its turns together. The largest is the "
        "bound: generate is the engines, tool and reward are yours, queue_wait is too few slots, "
        "group_wait is the slowest sibling and the aggregator.",
        [
            Query(
                f"{rate('rollout_span_duration_seconds_sum', 'span')}"
                f" / on () group_left () ({rate('rollout_samples_total')} > 0)",
                "{{span}}",
            )
        ],
        is_stacked=True,
    ),
    Panel(
        "Parts, p95", "s", "The slowest of twenty of each part, each turn counted for itself.",
        [Query("rollstream:span_duration_seconds:p95_5m", "{{span}}")],
    ),
    Panel(
        "Length of responses", "none", "Tokens of members of judged groups.",
        [Query(buckets("rollout_sample_tokens", 'kind="all"'), "{{le}}")], "heatmap",
    ),
    Panel(
        "Length of responses that the trainer gets", "none",
        "The same behind the filters: what is missing here was dropped.",
        [Query(buckets("rollout_sample_tokens", 'kind="delivered"'), "{{le}}")], "heatmap",
    ),
    Panel(
        "Turns", "none", "Engine calls of a trajectory.",
        [Query(buckets("rollout_sample_turns"), "{{le}}")], "heatmap",
    ),
)  # fmt: skip

_ENGINES = (
    Panel(
        "Engines by state", "none",
        "As the worker sees them that sees most of each state. Only up takes new calls.",
        [Query("max by (state) (rollout_engines)", "{{state}}")], width=6,
    ),
    Panel(
        "Calls", "reqps", "Calls of engines that ended, by how.",
        [Query(rate("rollout_engine_requests_total", "outcome"), "{{outcome}}")],
        width=6, is_stacked=True,
    ),
    Panel(
        "Calls in flight", "none",
        "Of all workers, by the place of the engine in their list (the same list: the same place).",
        [Query(placed("sum", "rollout_engine_inflight_requests"), "engine {{engine}}")],
        width=6, is_stacked=True,
    ),
    Panel(
        "Weight versions behind", "none", "Of each engine, as the worker sees it that sees most.",
        [
            Query(placed("max", "rollout_engine_version_lag"), "engine {{engine}}"),
        ],
        width=6,
    ),
)  # fmt: skip

BOARD = Board(
    "rollstream-overview",
    "Overview",
    "Is the run all right, and if not, what does it wait for?",
    {
        "Now": _STATS,
        "Flow": _FLOW,
        "What is lost": _LOST,
        "Where the time goes": _TIME,
        "Engines": _ENGINES,
    },
)
