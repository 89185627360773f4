"""The one line of the proof, and whether it is one.

Owns the counts and the verdict. Never compares anything itself. Invariant: a run that did too
little to mean something is no proof, whatever it found (`missing`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.sample import Sample
from tests.e2e.weights.bubble import bubbles_ms, longest_pause_s, p99
from tests.e2e.weights.findings import Finding, Kind
from tests.e2e.weights.record import Record
from tests.e2e.weights.scenes import Scene

FIRST = (Kind.LOST, Kind.TWICE, Kind.TOKEN, Kind.VERSION, Kind.TOOL)
BESIDE = (
    Kind.ACCOUNT,
    Kind.PAUSE,
    Kind.STALE,
    Kind.MASK,
    Kind.BUDGET,
    Kind.EVALUATION,
    Kind.DROP,
    Kind.ODD,
)


@dataclass(slots=True)
class Row:
    """What one scene came to."""

    scene: Scene
    wrong: Counter[Kind] = field(default_factory=Counter)
    updates: Counter[str] = field(default_factory=Counter)
    """By mode."""
    groups: int = 0
    samples: int = 0
    tokens: int = 0
    """Sampled, and computed again."""
    unknown_tokens: int = 0
    """Of those, recorded as of unknown weights, rightly."""
    resumed: int = 0
    """Delivered samples that were stopped and went on elsewhere or later."""
    stopped: int = 0
    """Replies that an abort ended, as the engines answered them."""
    parked: int = 0
    """Attempts that ended with tokens of an abort."""
    mixed: int = 0
    """Delivered samples over several versions."""
    mixed_calls: int = 0
    """Of those, samples in which one reply is of several versions."""
    executions: int = 0
    evaluations: int = 0
    evaluated: int = 0
    """Samples."""
    kills: int = 0
    stops: int = 0
    failed_updates: int = 0
    disturbances: dict[str, int] = field(default_factory=dict)
    stale: dict[str, int] = field(default_factory=dict)
    """By where it was found, and `requeued`."""
    oldest_handed_out: int = 0
    longest_pause_s: float = 0.0
    bubbles_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @classmethod
    def of(cls, record: Record, findings: Sequence[Finding], tokens: int, unknown: int = 0) -> Row:
        """Count a scene."""
        row = cls(record.scene, tokens=tokens, unknown_tokens=unknown, seconds=record.seconds)
        for finding in findings:
            row.wrong[finding.kind] += finding.count
        row.updates.update(update.mode for update in record.updates)
        row.groups = sum(len(batch.groups) for batch in record.handed)
        for sample in record.samples():
            row._count(sample)
        row.stopped = sum(c.finish == "abort" for c in record.engine_calls.values())
        row.parked = sum(one.ended == "aborted" for one in record.attempts.values())
        row.executions = len(record.executions)
        row.evaluations = len(record.evaluations)
        row.evaluated = sum(len(one.samples) for one in record.evaluations)
        row.kills, row.disturbances = len(record.killed), dict(record.disturbances)
        row.stops, row.failed_updates = record.stopped, len(record.failed)
        row.stale = {
            name.removeprefix("stale:"): count
            for name, count in sorted(record.counters.items())
            if name.startswith("stale:") or name == "requeued:stale"
        }
        row.oldest_handed_out = max(
            (group.staleness for batch in record.handed for group in batch.groups), default=0
        )
        row.longest_pause_s = longest_pause_s(record)
        row.bubbles_ms = list(bubbles_ms(record).values())
        return row

    def _count(self, sample: Sample) -> None:
        self.samples += 1
        self.resumed += is_resumed(sample)
        by_call = [{v for v, a, b in call.versions if b > a} for call in sample.calls]
        self.mixed += len(set().union(*by_call)) > 1
        self.mixed_calls += any(len(seen) > 1 for seen in by_call)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for the JSON line."""
        return {
            "scene": self.scene.name,
            "protocol": self.scene.protocol.value,
            "partial": self.scene.partial,
            "mode": self.scene.weights_mode,
            "updates": dict(self.updates),
            **{kind.value: self.wrong[kind] for kind in (*FIRST, *BESIDE)},
            "groups": self.groups,
            "samples": self.samples,
            "tokens": self.tokens,
            "unknown_version_tokens": self.unknown_tokens,
            "resumed": self.resumed,
            "stopped": self.stopped,
            "parked": self.parked,
            "mixed": self.mixed,
            "mixed_calls": self.mixed_calls,
            "tools": self.executions,
            "evaluations": self.evaluations,
            "evaluated": self.evaluated,
            "kills": self.kills,
            "stops": self.stops,
            "failed_updates": self.failed_updates,
            "disturbances": self.disturbances,
            "stale": self.stale,
            "oldest_handed_out": self.oldest_handed_out,
            "longest_pause_s": round(self.longest_pause_s, 3),
            "update_bubble_ms_p99": round(p99(self.bubbles_ms), 1),
            "seconds": round(self.seconds, 1),
        }


def is_resumed(sample: Sample) -> bool:
    """Return whether a reply of it was stopped, and something came behind that."""
    calls = sample.calls
    return any(
        call.finish == "abort" and (place + 1 < len(calls) or call.end < len(sample.tokens))
        for place, call in enumerate(calls)
    )


@dataclass(slots=True)
class Report:
    """Every scene's row."""

    least_updates: int
    """Of each mode."""
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    def wrong(self, kind: Kind) -> int:
        """Return a figure that must be 0, over all scenes."""
        return sum(row.wrong[kind] for row in self.rows)

    def _sum(self, name: str) -> int:
        return sum(int(getattr(row, name)) for row in self.rows)

    @property
    def updates(self) -> Counter[str]:
        """By mode."""
        return sum((row.updates for row in self.rows), Counter())

    @property
    def broken(self) -> list[str]:
        """What of the promise does not hold, in words."""
        found = [
            f"{kind.value} = {self.wrong(kind)}"
            for kind in (*FIRST, *BESIDE)
            if self.wrong(kind) != 0
        ]
        for row in self.rows:
            if row.scene.partial and row.resumed == 0:
                found.append(f"{row.scene.name}: nothing was resumed, and partial is on")
            if not row.scene.partial and row.resumed:
                found.append(f"{row.scene.name}: {row.resumed} resumed, and partial is off")
        return found

    @property
    def missing(self) -> list[str]:
        """What there was too little of for the run to mean something."""
        found = [
            f"updates in {mode}: {self.updates[mode]} of {self.least_updates}"
            for mode in ("keep", "abort")
            if self.updates[mode] < self.least_updates
        ]
        for row in self.rows:
            scene = row.scene
            least = {
                **{f"updates in {m}": (row.updates[m], n) for m, n in scene.updates.items()},
                "samples": (row.samples, scene.num_updates),
                "tools that ran": (row.executions, row.samples // 2),
                "evaluations": (row.evaluations, scene.evaluations),
                "stopped replies": (row.stopped, scene.updates.get("abort", 0)),
                "engines' aborts and pauses": (sum(row.disturbances.values()), 1),
                "killed workers": (row.kills, scene.kills),
                "stopped workers": (row.stops, scene.stops),
                "restarted engines": (row.disturbances.get("restart", 0), scene.restarts),
                "failed updates": (row.failed_updates, 1),
            }
            if scene.bound != 0:
                # Without staleness a step's groups are done before its update: all stand still.
                # Half of the updates in `keep` name their weights late; a few say nothing.
                late = scene.updates.get("keep", 0) // 4
                least["tokens between a push and its name"] = (row.unknown_tokens, late)
                least["updates with a bubble"] = (len(row.bubbles_ms), scene.num_updates // 4)
                least["samples of several versions"] = (row.mixed, 1)
                least["replies of several versions"] = (row.mixed_calls, 1)
            found += [
                f"{scene.name}: {what}: {have}, needed {need}"
                for what, (have, need) in least.items()
                if have < need
            ]
        return found

    def to_json(self) -> str:
        """Return the line."""
        bubbles = [bubble for row in self.rows for bubble in row.bubbles_ms]
        stale: Counter[str] = Counter()
        for row in self.rows:
            stale.update(row.stale)
        longest = max((row.longest_pause_s for row in self.rows), default=0.0)
        return json.dumps(
            {
                **{kind.value: self.wrong(kind) for kind in FIRST},
                "resumed": self._sum("resumed"),
                "longest_pause_s": round(longest, 3),
                "update_bubble_ms_p99": round(p99(bubbles), 1),
                **{kind.value: self.wrong(kind) for kind in BESIDE},
                "update_bubble_ms_p50": round(p50(bubbles), 1),
                "updates": dict(self.updates),
                "samples": self._sum("samples"),
                "tokens": self._sum("tokens"),
                "unknown_version_tokens": self._sum("unknown_tokens"),
                "mixed": self._sum("mixed"),
                "mixed_calls": self._sum("mixed_calls"),
                "stopped": self._sum("stopped"),
                "parked": self._sum("parked"),
                "tools": self._sum("executions"),
                "evaluations": self._sum("evaluations"),
                "evaluated": self._sum("evaluated"),
                "kills": self._sum("kills"),
                "stops": self._sum("stops"),
                "failed_updates": self._sum("failed_updates"),
                "stale": dict(stale),
                "seconds": round(self.seconds, 1),
                "scenes": [row.to_dict() for row in self.rows],
            }
        )


def p50(values: list[float]) -> float:
    """Return the median, 0 of nothing."""
    return sorted(values)[len(values) // 2] if values else 0.0
