"""Groups and filters: what becomes of groups, of which environment, and what rewards say.

Owns the panels about what is trained, rather than how fast. Never makes JSON of them.
"""

from __future__ import annotations

from .panels import Board, Panel, Query, Variable
from .phrases import PER_MINUTE, buckets, per_minute, rate

_CHOSEN = 'env=~"$env"'

_ENDS = (
    Panel(
        "Groups that ended", PER_MINUTE, "Acked by the trainer, or dropped.",
        [Query(per_minute("rollout_groups_total", "env, outcome", _CHOSEN), "{{env}} {{outcome}}")],
    ),
    Panel(
        "Groups dropped", PER_MINUTE, "By their one reason.",
        [
            Query(
                per_minute("rollout_groups_total", "reason", f'outcome="dropped", {_CHOSEN}'),
                "{{reason}}",
            )
        ],
        is_stacked=True,
    ),
    Panel(
        "Share dropped", "percentunit",
        "Of the groups judged in half an hour. Near 1 the filters let nothing through.",
        [Query(f"rollstream:drop_ratio:rate30m{{{_CHOSEN}}}", "{{env}}")],
        is_share=True, alarm=0.8,
    ),
    Panel(
        "Verdicts", PER_MINUTE, "Full groups judged: ready for the trainer, or dropped.",
        [
            Query(
                per_minute("rollout_judged_groups_total", "env, outcome", _CHOSEN),
                "{{env}} {{outcome}}",
            )
        ],
    ),
    Panel(
        "Identical groups", PER_MINUTE,
        "All members sampled the same tokens, although the temperature is above 0: seeds that do "
        "not differ, or an engine that ignores them. Always near 0.",
        [Query(per_minute("rollout_identical_groups_total", "env", _CHOSEN), "{{env}}")],
    ),
    Panel(
        "Too old, begun anew", PER_MINUTE,
        "Groups whose tokens were too old, by where they were, and groups that began anew.",
        [
            Query(per_minute("rollout_stale_groups_total", "place"), "stale, {{place}}"),
            Query(per_minute("rollout_requeued_total"), "begun anew"),
        ],
    ),
)  # fmt: skip

_BY_VIEW = "env, kind"
_MEAN = (
    f"({rate('rollout_reward_gained_total', _BY_VIEW, _CHOSEN)}"
    f" - {rate('rollout_reward_lost_total', _BY_VIEW, _CHOSEN)})"
    f" / ({rate('rollout_rewards_total', _BY_VIEW, _CHOSEN)} > 0)"
)
_REWARDS = (
    Panel(
        "Mean reward", "short",
        "Of members of judged groups (all), and of those that the trainer gets (delivered): where "
        "these two part, the filters choose.",
        [Query(_MEAN, "{{env}} {{kind}}")], is_signed=True,
    ),
    Panel(
        "Rewards", PER_MINUTE, "Members of judged groups that have one.",
        [Query(per_minute("rollout_rewards_total", _BY_VIEW, _CHOSEN), "{{env}} {{kind}}")],
    ),
    Panel(
        "Verdicts that could not be had", PER_MINUTE, "By what went wrong; docs/rewards.md.",
        [Query(per_minute("rollout_reward_errors_total", "detail"), "{{detail}}")],
        is_stacked=True,
    ),
)  # fmt: skip

_MEMBERS = (
    Panel(
        "Turns", "none", "Engine calls by trajectory, on average.",
        [
            Query(
                f"{rate('rollout_turns_total', 'env', _CHOSEN)}"
                f" / ({rate('rollout_samples_total', 'env', _CHOSEN)} > 0)",
                "{{env}}",
            )
        ],
    ),
    Panel(
        "Tool calls", PER_MINUTE, "By how they ended.",
        [Query(per_minute("rollout_tool_calls_total", "outcome"), "{{outcome}}")],
        is_stacked=True,
    ),
    Panel(
        "Members failed for good", PER_MINUTE, "Their groups are short by one, or dropped.",
        [Query(per_minute("rollout_members_failed_total", "reason"), "{{reason}}")],
        is_stacked=True,
    ),
    Panel(
        "Length of responses", "none", "Tokens of members of judged groups.",
        [Query(buckets("rollout_sample_tokens", 'kind="all"'), "{{le}}")], "heatmap",
    ),
    Panel(
        "Length of responses that the trainer gets", "none", "The same behind the filters.",
        [Query(buckets("rollout_sample_tokens", 'kind="delivered"'), "{{le}}")], "heatmap",
    ),
    Panel(
        "Endings", PER_MINUTE, "Trajectories by why they ended.",
        [Query(per_minute("rollout_samples_total", "reason", _CHOSEN), "{{reason}}")],
        is_stacked=True,
    ),
)  # fmt: skip

_QUEUE = (
    Panel(
        "Queues", "none",
        "Members: queued, delayed, suspect, leased. Groups: full, ready, delivered, live, and "
        "evaluations, which count nowhere else.",
        [Query("max by (queue) (rollout_queue_depth)", "{{queue}}")],
    ),
    Panel(
        "Oldest", "s", "How long the oldest has been there.",
        [Query("max by (queue) (rollout_queue_oldest_age_seconds)", "{{queue}}")],
    ),
    Panel(
        "Not accounted for", "none",
        "Groups enqueued less those acked, dropped and live. Always 0.",
        [Query("max(rollout_accounting_difference)", "difference")], is_signed=True, alarm=1,
    ),
    Panel(
        "Verifiers", "none",
        "Processes that run isolated rewards and tools, and what none of them has begun.",
        [
            Query("max(rollout_verifiers)", "verifiers"),
            Query("max(rollout_verifier_jobs_waiting)", "jobs waiting"),
        ],
    ),
    Panel(
        "Evaluations", PER_MINUTE, "Trajectories of evaluations that ended.",
        [Query(per_minute("rollout_evaluation_samples_total", "status"), "{{status}}")],
        is_stacked=True,
    ),
    Panel(
        "Trainer", "none", "1 while one is connected, while it waits, while the run is paused.",
        [
            Query("max(rollout_trainer_connected)", "connected"),
            Query("max(rollout_trainer_waiting)", "waiting"),
            Query("max(rollout_paused)", "paused"),
        ],
    ),
)  # fmt: skip

BOARD = Board(
    "rollstream-groups",
    "Groups and filters",
    "What becomes of groups, and what do rewards and filters make of them?",
    {"Ends": _ENDS, "What rewards say": _REWARDS, "Members": _MEMBERS, "Queue": _QUEUE},
    (Variable("env", "Environment", "label_values(rollout_groups_total, env)"),),
)
