"""top_p = 0.9: why training on such samples is refused, shown on the real distribution.

Owns that part. Never trains on anything. Invariant: the refusal is the worker's own, at its start;
the difference is between what the samples record and what the cut sampler really drew from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollstream.sample import Sample
from tests.e2e.fidelity.options import TOLERANCE, TOP_P
from tests.e2e.fidelity.stage import Service
from tests.e2e.fidelity.teacher import Teacher, exam_of

REFUSED_CODE = 2
REFUSED_WORDS = ("sampling.top_p = 0.9", "allow_off_distribution")
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a worker said to top_p without permission."""

    exit_code: int | None
    sentence: str

    @property
    def is_one(self) -> bool:
        """Whether it refused, and said what to do."""
        return self.exit_code == REFUSED_CODE and all(w in self.sentence for w in REFUSED_WORDS)


def refusal(service: Service) -> Refusal:
    """Start a worker whose configuration cuts the distribution, and return how it ended."""
    worker = service.workers[0]
    worker.start()
    try:
        limit = time.monotonic() + START_S
        while worker.running and time.monotonic() < limit:
            time.sleep(0.05)
        code = worker.exit_code
    finally:
        worker.kill()
    return Refusal(code, worker.tail(4))


@dataclass(slots=True)
class CutFindings:
    """What samples that were drawn from a cut distribution say."""

    samples: int = 0
    unmarked: int = 0
    """Samples that do not say so of themselves."""
    max_difference: float = 0.0
    """Between the recorded log-prob and that of the distribution that was drawn from."""
    wrong: int = 0
    """Tokens whose recorded log-prob is not log softmax(logits / T) either, or that lie outside the
    nucleus."""


def cut_findings(samples: Sequence[Sample], teacher: Teacher) -> CutFindings:
    """Compare what the samples record with the distribution that they were drawn from."""
    found = CutFindings(samples=len(samples))
    exams = [exam_of(sample) for sample in samples]
    for sample, exam, plain in zip(samples, exams, teacher.log_probs(exams), strict=True):
        marks = sample.metadata.get("off_distribution")
        sent = all(call.sampling.get("top_p") == TOP_P for call in sample.calls)
        found.unmarked += not (marks == ["top_p"] and sent)
        if not len(exam.positions):
            continue
        assert sample.rollout_log_probs is not None
        recorded = sample.rollout_log_probs[exam.positions - sample.prompt_length]
        inside, masses = teacher.nucleus(exam, TOP_P)
        found.wrong += int((~inside | ~(np.abs(recorded - plain) <= TOLERANCE)).sum())
        drawn = plain - masses
        found.max_difference = max(found.max_difference, float(np.abs(recorded - drawn).max()))
    return found
