"""The keys of every `--json`: one schema a form, as docs/cli.md prints it.

Owns the names and what they mean. Never imported by a command: tests hold the commands to it, and
`docs/make_cli.py` writes the page from it. Invariant: keys may be added in a release; none changes
its meaning or goes without a line in CHANGELOG.md.

A key that ends with `?` is there only where there is something to say.
"""

from __future__ import annotations

Keys = dict[str, str]

RUN: Keys = {"run": "its name"}
_DROPS = (
    "newest first: group_index, n, reason, detail, state it had, why (first failure), means, at, "
    "members"
)
_TOP_HEAD: Keys = RUN | {
    "unix_s": "when it was read",
    "state": "of the run: running, paused, aborting, ended, failed; unreachable, unreadable, gone",
    "cause": "what holds the run up: a word of [operate.md](operate.md)",
    "evidence": "what says so, a sentence",
    "do": "what to do; empty for nothing",
}

SCHEMAS: dict[str, Keys] = {
    "top": _TOP_HEAD
    | {
        "window_s?": "seconds that rates and counts are of, 60 at most; it and what follows are "
        "missing where the state is one of the last three",
        "version?": "weight version",
        "draining?": "true while `drain` is in force",
        "pause?": "null, or mode, by_trainer, since_s",
        "groups_per_min?": "groups that ended (acked or dropped); null at the first look, so are "
        "the next two",
        "acked_per_min?": "groups that were trained",
        "samples_per_min?": "samples that were completed",
        "members?": "queued, delayed, suspect, leased",
        "groups?": "open, full (wait for a verdict), ready, delivered, live; evaluations",
        "capacity?": "groups that may be live",
        "producer_blocked?": "true where as many are",
        "trainer?": "none, waiting (for groups that are not there), here, left",
        "alive?": "workers, producers, aggregators",
        "calls_in_flight?": "at engines, as workers confirmed last",
        "engines?": "how many in each state",
        "ended?": "acked, and dropped by reason, in the window",
        "failed?": "members that failed for good, by reason, in the window",
        "sent_back?": "retried, crashed, given_back, parked, requeued, in the window",
        "stale?": "groups that got too old, by place, in the window",
        "oldest_s?": "age of the oldest group: queued, full, ready, delivered",
        "redis?": "round_trip_ms, used_memory and max_memory in bytes (null: may not be asked; "
        "0: no limit)",
        "newest_group?": "null, or one group that was looked into: group, samples, seconds by "
        "span (all samples together), tokens_per_s of a sample",
    },
    "stats": RUN
    | {
        "info": "the run's record: state, version, capacity, budgets, frontier, draining, …",
        "counters": "since the run was opened ([queue.md](queue.md), key `c`)",
        "by_env": "environment → acked, dropped by reason",
        "depths": "members in q d s l, groups in full, ready, delivered, live; eval, evaluations",
        "oldest_s": "as in `top`",
        "presence": "workers, producers, aggregators that are alive",
        "trainer": "as in `top`",
        "workers": "worker, age_s, live, control_seq, obeys, in_flight, engines, of each",
    },
    "audit": RUN
    | {
        "deep": "was asked for",
        "ok": "no problem was found",
        "enqueued": "groups, so are the next three",
        "acked": "trained",
        "dropped": "for all reasons",
        "live": "not ended",
        "problems": "sentences",
        "by_env": "as in `stats`",
    },
    "show (drops)": RUN | {"drops": _DROPS},
    "show GROUP (live)": RUN
    | {
        "group_index": "as text",
        "state": "open, full, ready, delivered",
        "n": "members",
        "left": "of them, that have not ended",
        "failed": "of them, that failed for good",
        "life": "how often it began anew",
        "why": "first failure",
        "version": "at its first lease; null before",
        "deadline_in_s": "null: none, or before its first lease",
        "full_id": "of its entry; empty before",
        "ready_id": "of its entry; empty before",
        "members": "member, where, attempts, crashes, worker, host, due_in_s, parked_bytes, "
        "reason, error, result? (status, stop_reason, reward, …) of each",
        "turns?": "with `--text`",
    },
    "show GROUP (not live)": RUN
    | {
        "group_index": "as text",
        "state": "dropped, ended, unknown",
        "drops": _DROPS,
    },
    "show GROUP --html": {
        "group_index": "as text",
        "file": "that was written",
        "bytes": "of it",
        "members": "on the page",
    },
    "show --dump": {
        "dump": "its folder",
        "groups": "group_index (a number), env, samples, missing, staleness, rewards, of each",
    },
    "show GROUP --dump": {
        "dump": "its folder",
        "group_index": "as text",
        "members": "member, where, status, reward, error, of each; none where the dump has no such "
        "group, and the exit code is 1",
        "turns?": "with `--text`",
    },
    "runs": {
        "[].run": "a list: the name of each",
        "[].state": "or unreadable; then the others are null",
        "[].live": "groups",
        "[].version": "weight version",
        "[].done": "all prompts are enqueued",
    },
    "runs --remove": RUN
    | {
        "state": "that it had",
        "live": "groups that went with it",
        "alive": "role → who was alive",
        "removed": "keys",
    },
    "doctor": {
        "ok": "nothing is to be mended",
        "facts": "redis, server, role, memory, clock, …; run, engines, tokenizer, verifiers, "
        "exporter where they were asked about",
        "findings": "check, level (problem, note), what, why, do, of each",
    },
    "engines": RUN
    | {
        "version": "weight version of the run",
        "set": "URLs that were set for every worker; null: each worker's own",
        "engines": "url, kind, state, states, version, in_flight, problem, of each",
        "workers": "as in `stats`",
    },
    "pause": RUN | {"state": "behind it"},
    "resume": RUN | {"state": "behind it"},
    "drain": RUN
    | {
        "drained": "no member waits or runs, and no group waits for its verdict",
        "waited_s": "seconds",
        "left": "queued, running (members); open, full, ready, delivered (groups); workers alive",
    },
    "abort": RUN | {"state": "behind it", "dropped": "groups", "live": "groups that are left"},
    "withdraw": RUN | {"group": "as text", "outcome": "dropped, gone, held", "why": "else"},
    "requeue": RUN
    | {"group": "as text", "outcome": "requeued, gone, held, other, exhausted", "why": "else"},
    "set": RUN | {"key": "in the configuration", "value": "that it has now", "state": "of the run"},
    "dump": {
        "dir": "of the dump",
        "run": "its name",
        "batches": "files that were written",
        "groups": "in them",
        "bytes": "of them",
        "recognised": "groups that were in the dump already",
        "taken": "false with `--peek`: the groups stay where they are",
        "ended?": "the run is over; without `--peek`",
        "unreadable?": "groups that could not be read; with `--peek`",
    },
    "dump --check": {
        "dir": "of the dump",
        "run": "its name",
        "ok": "every checksum is right",
        "batches": "files",
        "groups": "in them",
        "samples": "in them",
    },
    "config show": {"<table.key>": "value, origin, of every key; secrets are masked"},
    "version": {
        "version": "of Rollstream here",
        "wire": "version of records",
        "layout": "version of the keys in Redis",
        "python": "version",
    },
}
"""Form of a command → its keys."""
