"""Engines and Redis: what the workers lean on.

Owns the panels about engines, the fidelity of their tokens, and the server of the queue. Never
makes JSON of them.
"""

from __future__ import annotations

from .panels import Board, Panel, Query
from .phrases import PER_MINUTE, WINDOW, buckets, per_minute, placed, quantile, rate

_PLACE = "engine {{engine}}"
_GENERATE = 'span="generate"'

_ENGINES = (
    Panel(
        "Engines by state", "none",
        "As the worker sees them that sees most of each state. Only up takes new calls; behind has "
        "older weights, paused waits, down does not answer, refused has log-probs of another "
        "distribution.",
        [Query("max by (state) (rollout_engines)", "{{state}}")],
    ),
    Panel(
        "Workers that reach each engine", "percentunit",
        "By the place of the engine in the workers' lists. Some do and some do not: a network, or "
        "lists that differ.",
        [Query(placed("avg", "rollout_engine_up"), _PLACE)], is_share=True,
    ),
    Panel(
        "Weight versions behind", "none", "Of each engine, as the worker sees it that sees most.",
        [Query(placed("max", "rollout_engine_version_lag"), _PLACE)],
    ),
    Panel(
        "Calls in flight", "none", "Of all workers, by engine.",
        [Query(placed("sum", "rollout_engine_inflight_requests"), _PLACE)], is_stacked=True,
    ),
    Panel(
        "Limit of calls", "none",
        "The most calls of all workers at each engine; 0 where there is no limit.",
        [Query(placed("sum", "rollout_engine_limit"), _PLACE)],
    ),
    Panel(
        "Calls by engine", "reqps", "That ended, well or badly: engines that are alike get alike.",
        [Query(rate("rollout_engine_requests_total", "engine"), _PLACE)], is_stacked=True,
    ),
    Panel(
        "Calls by outcome", "reqps", "unavailable and timeout are tried again elsewhere.",
        [Query(rate("rollout_engine_requests_total", "outcome"), "{{outcome}}")],
        is_stacked=True,
    ),
    Panel(
        "Time of a call", "s", "One turn, from the request to its last token.",
        [
            Query(quantile(q, "rollout_span_duration_seconds", where=_GENERATE), f"p{q * 100:g}")
            for q in (0.5, 0.95, 0.99)
        ],
    ),
    Panel(
        "Time of calls", "s", "All calls: two bands are two kinds of engines, or of prompts.",
        [Query(buckets("rollout_span_duration_seconds", _GENERATE), "{{le}}")], "heatmap",
    ),
    Panel(
        "Troubles", PER_MINUTE,
        "Calls tried again, or not because the budget was used up; connections that had been "
        "closed; engines put aside; tries that found no engine.",
        [
            Query(per_minute(f"rollout_engine_{name}_total"), name.replace("_", " "))
            for name in ("retries", "retries_denied", "stale_connections", "ejections", "waits")
        ],
    ),
    Panel(
        "Updates of weights", PER_MINUTE,
        "Pauses of engines, and calls aborted for new weights or at a worker's end.",
        [
            Query(per_minute("rollout_engine_pauses_total"), "pauses"),
            Query(per_minute("rollout_aborted_calls_total"), "aborted calls"),
        ],
    ),
    Panel(
        "Weight version", "none", "Of the run.",
        [Query("max(rollout_policy_version)", "version")], is_signed=True,
    ),
)  # fmt: skip

_FIDELITY = (
    Panel(
        "Token mismatches", "none",
        "Samples that are not what the engine saw and sampled. Any at all is TokenMismatch.",
        [
            Query(
                f"sum by (kind) (increase(rollout_token_mismatch_total{WINDOW}))", "{{kind}}"
            )
        ],
        width=6,
    ),
    Panel(
        "Calls checked", "reqps", "Held against what was sent, or sent by another worker.",
        [Query(rate("rollout_checked_calls_total", "outcome"), "{{outcome}}")], width=6,
    ),
    Panel(
        "Scored again", PER_MINUTE, "Finished samples that were scored again, by what came of it.",
        [Query(per_minute("rollout_rescored_samples_total", "outcome"), "{{outcome}}")], width=6,
    ),
    Panel(
        "Log-probs: sampled against prefill", "none",
        "Absolute difference in nats, of samples scored again with the same weights.",
        [Query(buckets("rollout_logprob_difference"), "{{le}}")], "heatmap", width=6,
    ),
    Panel(
        "History rewritten by clients", PER_MINUTE, "Turns of agents, by what was done about it.",
        [Query(per_minute("rollout_divergences_total", "policy"), "{{policy}}")], width=24,
    ),
)  # fmt: skip

_REDIS = (
    Panel(
        "Redis answers", "none",
        "1 where it answered the last look of the run's exporter, and of its own.",
        [
            Query("max(rollout_redis_up)", "the run's exporter"),
            Query("max(redis_up)", "its own exporter"),
        ],
        is_share=True,
    ),
    Panel(
        "Memory", "bytes", "Used, and the limit; 0 is none. Full memory stops the producer only.",
        [
            Query("max(redis_memory_used_bytes)", "used"),
            Query("max(redis_memory_max_bytes)", "limit"),
        ],
    ),
    Panel(
        "Keys evicted", PER_MINUTE, "Always 0 with maxmemory-policy noeviction.",
        [Query(per_minute("redis_evicted_keys_total"), "evicted")],
    ),
    Panel(
        "Commands", "ops", "Commands and scripts each second.",
        [Query(rate("redis_commands_processed_total"), "commands")],
    ),
    Panel(
        "Network", "Bps", "In is samples and prompts, out is prompts and batches.",
        [
            Query(rate("redis_net_input_bytes_total"), "in"),
            Query(rate("redis_net_output_bytes_total"), "out"),
        ],
    ),
    Panel(
        "Clients", "none", "Connections, and those that wait for something to come.",
        [
            Query("max(redis_connected_clients)", "connected"),
            Query("max(redis_blocked_clients)", "waiting"),
        ],
    ),
    Panel(
        "Append-only file", "none",
        "1 where it is written, and where its last write went well. Otherwise a crash of the "
        "server forgets all since the trainer's checkpoint.",
        [
            Query("max(redis_aof_enabled)", "written"),
            Query("max(redis_aof_last_write_status)", "last write went well"),
        ],
        width=12, is_share=True,
    ),
    Panel(
        "A look at the run", "s", "How long the exporter's last look at Redis took.",
        [Query("max(rollout_exporter_read_seconds)", "look")], width=12,
    ),
)  # fmt: skip

BOARD = Board(
    "rollstream-engines",
    "Engines and Redis",
    "Do the engines and Redis keep up, and are tokens what the engines saw?",
    {"Engines": _ENGINES, "Token fidelity": _FIDELITY, "Redis": _REDIS},
)
