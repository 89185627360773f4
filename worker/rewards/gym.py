"""The scorers that the data sets of reasoning-gym bring along.

Owns their import, which takes seconds, and one scorer per data set. Never bounds its time: whoever
calls `score` does that, from a thread. Invariant: a score is a finite number.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable
from typing import Any

from rollstream.errors import RewardFault
from rollstream.sample import Sample

from ..functions import describe
from .answers import answer_of
from .details import Detail, no_verdict


class ReasoningGym:
    """All scorers of the package; a data set's own is made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scorers: dict[str, Callable[..., Any]] = {}

    def warm(self) -> None:
        """Import the package, so that the first sample does not wait for it.

        Raises:
            RewardFault: it is not installed.
        """
        with self._lock:
            self._package()

    def score(self, sample: Sample, text: str) -> float:
        """Return the data set's own score of the answer in `text`.

        Raises:
            RewardFault: the sample does not say which data set it is from, or the scorer broke.
        """
        name = sample.metadata.get("source_dataset")
        if not isinstance(name, str):
            raise no_verdict(
                Detail.NO_LABEL,
                f"metadata of group {sample.group_index} has no 'source_dataset'; the reward "
                "'reasoning_gym' needs a source 'reasoning_gym:NAME'",
            )
        entry = {
            "question": question_of(sample),
            "answer": sample.label,
            "metadata": sample.metadata,
        }
        try:
            score = float(self._scorer(name)(answer_of(text), entry))
        except RewardFault:
            raise
        except Exception as error:
            raise no_verdict(
                Detail.RAISED, f"the scorer of {name} failed: {describe(error)}"
            ) from error
        if not math.isfinite(score):
            raise no_verdict(Detail.INVALID, f"the scorer of {name} gave {score}")
        return score

    def _scorer(self, name: str) -> Callable[..., Any]:
        with self._lock:
            if name not in self._scorers:
                try:
                    self._scorers[name] = self._package().get_score_answer_fn(name)
                except ValueError as error:
                    raise no_verdict(Detail.NO_LABEL, f"reasoning-gym: {error}") from None
            return self._scorers[name]

    @staticmethod
    def _package() -> Any:
        try:
            return importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise no_verdict(
                Detail.NOT_INSTALLED,
                f"reasoning-gym cannot be imported: {error}; install rollstream[service]",
            ) from None


def question_of(sample: Sample) -> str:
    """Return the text of the last user message of the prompt."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    for message in reversed(sample.prompt):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return ""
