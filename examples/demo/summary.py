"""The demo's result: one JSON line that is an interface, and the same for people.

Owns the keys, which docs/demo.md defines. Never computes a figure. Invariant: the demo succeeded
exactly when `Summary.problems` is empty.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from examples.demo.tally import SpanFigures


@dataclass(frozen=True)
class Summary:
    """The keys of the JSON line, in order."""

    groups_acked: int
    groups_dropped: dict[str, int]
    samples: int
    turns: int
    tokens: int
    samples_per_s: float
    spans: dict[str, SpanFigures]
    retries: dict[str, int]
    """Keys: `attempts`, `crashes`."""
    fenced: int
    lost: int
    twice: int
    token_mismatches: int
    accounting_difference: int
    seconds: float
    audit: Literal["recomputed", "wire"]

    def to_json(self) -> str:
        """Return the one line."""
        return json.dumps(asdict(self))


def problems(summary: Summary, *, batches: int, wanted: int, broken: list[str]) -> list[str]:
    """Say what keeps the run from being a success; empty is success.

    Args:
        summary: the figures.
        batches: batches that were trained on.
        wanted: batches that were asked for.
        broken: what the run itself reported (a child that ended, a stream error).
    """
    found = list(broken)
    meaning = {
        "lost": "enqueued groups are neither acked, dropped nor live",
        "twice": "groups were handed to training more than once",
        "token_mismatches": "calls differ from what the engine sampled",
        "accounting_difference": "groups between enqueued and acked + dropped + live",
    }
    found += [
        f"{name} = {getattr(summary, name)}: {text}"
        for name, text in meaning.items()
        if getattr(summary, name) != 0
    ]
    if batches < wanted:
        found.append(f"{batches} of {wanted} batches were trained on")
    return found


@dataclass(frozen=True)
class Facts:
    """What the summary for people says beyond the interface."""

    batches: int
    lists: int
    calls_audited: int
    mean_reward: float
    versions: int
    kills: int
    injected: dict[str, int]
    """{kind: count} of the stand-in's faults."""
    engine: str
    """One line that says what sampled."""
    folder: str
    """Where the logs, the configuration and the checkpoint are."""


_HOW = {
    "recomputed": "recomputed from the seed, ids and log-probs bit for bit",
    "wire": "compared with the engine's recorded replies, bit for bit",
}


def for_people(summary: Summary, facts: Facts, wrong: list[str]) -> str:
    """Return the summary as lines of text."""
    lines = [f"  {name:<9} {text}" for name, text in _rows(summary, facts).items()]
    lines.append("  span        count    p50 s    p95 s")
    lines += [
        f"    {name:<10}{f['count']:>5}{f['p50_s']:>9.3f}{f['p95_s']:>9.3f}"
        for name, f in summary.spans.items()
    ]
    if wrong:
        lines += ["FAILED", *(f"  {line}" for line in wrong), f"  everything is in {facts.folder}"]
    else:
        lines.append(
            "OK: nothing lost, nothing trained twice, every token as the engine sampled it"
        )
    return "\n".join(lines)


def _rows(s: Summary, facts: Facts) -> dict[str, str]:
    ended = sum(s.groups_dropped.values()) + s.groups_acked
    retries = f"{s.retries['attempts']} attempts repeated"
    crashes = f"{s.retries['crashes']} leases of dead workers taken over"
    kills = f", {facts.kills} workers killed" if facts.kills else ""
    rows = {
        "engine": facts.engine,
        "trained": f"{s.groups_acked} groups in {facts.batches} batches, {s.samples} samples "
        f"({facts.lists} delivered as lists), mean reward {facts.mean_reward:.2f}",
        "dropped": f"{_listed(s.groups_dropped)} (of {ended} groups that ended)",
        "sampled": f"{s.tokens:,} tokens in {s.turns:,} calls; {facts.versions} weight versions",
        "speed": f"{s.samples_per_s:.1f} samples/s while training; {s.seconds:.1f} s in all",
        "injected": _listed(facts.injected),
        "faults": f"{retries}, {crashes}, {s.fenced} late results refused{kills}",
        "audit": f"{facts.calls_audited:,} calls {_HOW[s.audit]}: {s.token_mismatches} mismatches",
        "accounts": f"lost {s.lost}, trained twice {s.twice}, "
        f"enqueued - acked - dropped - live = {s.accounting_difference}",
    }
    if not facts.injected:
        del rows["injected"]
    return rows


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"
