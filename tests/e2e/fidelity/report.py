"""The one line of the proof, and whether it is one.

Owns the counts and the verdict. Never compares anything itself. Invariant: a run that checked too
little to mean something is no proof, whatever it found (`missing`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollstream.sample import Sample
from tests.e2e.fidelity.check import Finding, Kind
from tests.e2e.fidelity.options import MAX_TURNS, TOLERANCE

LARGE = 200
"""From so many samples on nearly every number of turns from 1 to the limit must have come."""


@dataclass(slots=True)
class Report:
    """Everything that is counted."""

    asked: int
    samples: int = 0
    checked_tokens: int = 0
    max_abs_difference: float = 0.0
    prefix_breaks: int = 0
    mismatches: int = 0
    service_samples: int = 0
    service_token_mismatches: float | None = None
    turns: Counter[int] = field(default_factory=Counter)
    temperatures: Counter[float] = field(default_factory=Counter)
    calls: int = 0
    calls_executed: int = 0
    malformed: int = 0
    noncanonical: int = 0
    """Samples with a reply whose ids are not what its text would be encoded as."""
    aborted: int = 0
    """Replies that ended by an abort, of both halves."""
    resumed: int = 0
    """Samples that were generated on after an abort, and delivered."""
    versions: int = 0
    mixed_versions: int = 0
    """Samples whose tokens are of more than one version of the weights."""
    mixed_calls: int = 0
    """Of those, samples in which the weights changed within a call."""
    merged: int = 0
    """Comparisons with a merge of per-turn records; two a sample."""
    top_p_samples: int = 0
    top_p_unmarked: int = 0
    top_p_wrong: int = 0
    top_p_max_difference: float = 0.0
    top_p_refused: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    def count(self, sample: Sample, encode: Callable[[str], list[int]],
              decode: Callable[[Sequence[int]], str]) -> None:  # fmt: skip
        """Count what one sample shows."""
        self.samples += 1
        turns = sum(call.finish != "abort" for call in sample.calls)
        self.turns[turns] += 1
        self.calls += len(sample.calls)
        self.resumed += any(call.finish == "abort" for call in sample.calls)
        told = sample.metadata.get("tool_calls", ())
        self.calls_executed += sum(bool(call["executed"]) for call in told)
        self.malformed += sum(sample.metadata.get("malformed_calls", {}).values())
        if sample.calls:
            self.temperatures[float(sample.calls[0].sampling["temperature"])] += 1
        by_call = [{v for v, a, b in call.versions if b > a} for call in sample.calls]
        self.mixed_versions += len(set().union(*by_call)) > 1
        self.mixed_calls += any(len(seen) > 1 for seen in by_call)
        for call in sample.calls:
            ids = sample.tokens[call.start : call.end].tolist()
            if encode(decode(ids)) != ids:
                self.noncanonical += 1
                break

    def add(self, findings: Sequence[Finding]) -> None:
        """Count findings."""
        breaks = sum(finding.kind is Kind.PREFIX for finding in findings)
        self.prefix_breaks += breaks
        self.mismatches += len(findings) - breaks

    @property
    def broken(self) -> list[str]:
        """What of the promise does not hold, in words."""
        wrong = {
            f"{self.prefix_breaks} prompts that the engine saw are no prefix of their sample":
                self.prefix_breaks,
            f"{self.mismatches} mismatches": self.mismatches,
            f"a log-prob is off by {self.max_abs_difference:.2e}":
                not self.max_abs_difference <= TOLERANCE,
            f"the workers counted {self.service_token_mismatches} mismatches themselves":
                self.service_token_mismatches,
            "top_p = 0.9 was not refused": not self.top_p_refused,
            f"{self.top_p_unmarked} samples of top_p = 0.9 are not marked": self.top_p_unmarked,
            f"{self.top_p_wrong} tokens of top_p = 0.9 are of neither distribution":
                self.top_p_wrong,
        }  # fmt: skip
        return [text for text, is_so in wrong.items() if is_so]

    @property
    def missing(self) -> list[str]:
        """What there was too little of for the run to mean something."""
        asked = self.asked
        several = sum(n for turns, n in self.turns.items() if turns > 1)
        least = {
            "samples": (self.samples, asked),
            "samples through the service": (self.service_samples, asked // 2),
            "samples of several turns": (several, asked // 3),
            "tool calls that ran": (self.calls_executed, asked),
            "malformed calls": (self.malformed, 1),
            "samples with ids that their text does not encode to": (self.noncanonical, 1),
            "aborted replies": (self.aborted, max(2, asked // 10)),
            "resumed samples": (self.resumed, max(1, asked // 20)),
            "weight versions": (self.versions, 3),
            "samples of several versions": (self.mixed_versions, 1),
            "samples whose weights changed within a call": (self.mixed_calls, asked >= LARGE),
            "merges": (self.merged, 2 * asked),
            "samples of top_p = 0.9": (self.top_p_samples, 1),
            "workers with a counter of mismatches": (self.service_token_mismatches is not None, 1),
        }
        found = [f"{what}: {have}, needed {need}" for what, (have, need) in least.items()
                 if have < need]  # fmt: skip
        if min(self.temperatures.get(1.0, 0), self.temperatures.get(0.7, 0)) < asked // 5:
            found.append(f"samples of each temperature: {dict(self.temperatures)}")
        if self.top_p_max_difference <= TOLERANCE:
            found.append("top_p = 0.9 made no difference that could be seen")
        lacking = [turns for turns in range(1, MAX_TURNS + 1) if not self.turns[turns]]
        if asked >= LARGE and (len(lacking) > 2 or {1, MAX_TURNS} & set(lacking)):
            found.append(f"samples of {lacking} turns")
        return found

    def to_json(self) -> str:
        """Return the line."""
        turns = {str(turns): self.turns[turns] for turns in sorted(self.turns)}
        return json.dumps(
            {
                "samples": self.samples,
                "checked_tokens": self.checked_tokens,
                "max_abs_difference": float(f"{self.max_abs_difference:.3g}"),
                "prefix_breaks": self.prefix_breaks,
                "mismatches": self.mismatches,
                "service_samples": self.service_samples,
                "service_token_mismatches": self.service_token_mismatches,
                "turns": turns,
                "temperatures": {str(t): n for t, n in sorted(self.temperatures.items())},
                "calls": self.calls,
                "calls_executed": self.calls_executed,
                "malformed": self.malformed,
                "noncanonical": self.noncanonical,
                "aborted": self.aborted,
                "resumed": self.resumed,
                "versions": self.versions,
                "mixed_versions": self.mixed_versions,
                "mixed_calls": self.mixed_calls,
                "merged": self.merged,
                "top_p_samples": self.top_p_samples,
                "top_p_max_difference": float(f"{self.top_p_max_difference:.3g}"),
                "top_p_refused": self.top_p_refused,
                "seconds": {k: round(v, 1) for k, v in self.seconds.items()},
            }
        )
