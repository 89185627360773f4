"""Rewards computed in this process: pure functions of a sample and its final text.

Owns `math`, `deterministic_random` and `reasoning_gym`. Never runs anything that a model's answer
can make hang: that is what isolation is for. Invariant: the same sample gets the same reward.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import threading
from collections.abc import Callable
from typing import Any

from rollstream.errors import RewardFault
from rollstream.sample import Sample

from ..functions import describe
from .answers import answer_of, boxed, same_answer


def label_text(sample: Sample) -> str:
    """Return the expected answer as text; a label that is itself boxed is opened.

    Raises:
        RewardFault: there is no label, or it is neither text nor a number.
    """
    label = sample.label
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise RewardFault(
            f"the label of group {sample.group_index} is {type(label).__name__}; this reward "
            "needs text or a number",
            detail="no_label",
        )
    text = str(label)
    box = boxed(text)
    return text if box is None else box


def score_math(sample: Sample, text: str) -> float:
    r"""Return 1.0 where the last `\boxed{}` is the label, else 0.0.

    Raises:
        RewardFault: the prompt has no usable label.
    """
    expected = label_text(sample)
    given = boxed(text)
    return float(given is not None and same_answer(given, expected))


def score_deterministic_random(sample: Sample, run_seed: int) -> float:
    """Return a number in [0, 1) that depends on the seed, the tokens and the response alone."""
    digest = hashlib.blake2b(str(run_seed).encode(), digest_size=8)
    digest.update(sample.tokens.astype("<i4", copy=False).tobytes())
    digest.update(sample.response.encode("utf-8", "replace"))
    return int.from_bytes(digest.digest(), "big") / 2**64


class ReasoningGym:
    """The scorers that the datasets of reasoning-gym bring along.

    The import takes seconds and a dataset's scorer is built once, so both run in threads.
    """

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
        """Return the dataset's own score of the answer in `text`.

        Raises:
            RewardFault: the sample does not say which dataset it is from, or the scorer broke.
        """
        name = sample.metadata.get("source_dataset")
        if not isinstance(name, str):
            raise RewardFault(
                f"metadata of group {sample.group_index} has no 'source_dataset'; the reward "
                "'reasoning_gym' needs a source 'reasoning_gym:NAME'",
                detail="no_label",
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
            raise RewardFault(
                f"the scorer of {name} failed: {describe(error)}", detail="raised"
            ) from error
        if not math.isfinite(score):
            raise RewardFault(f"the scorer of {name} gave {score}", detail="invalid")
        return score

    def _scorer(self, name: str) -> Callable[..., Any]:
        with self._lock:
            if name not in self._scorers:
                try:
                    self._scorers[name] = self._package().get_score_answer_fn(name)
                except ValueError as error:
                    raise RewardFault(f"reasoning-gym: {error}", detail="no_label") from None
            return self._scorers[name]

    @staticmethod
    def _package() -> Any:
        try:
            return importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise RewardFault(
                f"reasoning-gym cannot be imported: {error}; install rollstream[service]",
                detail="not_installed",
            ) from None


def question_of(sample: Sample) -> str:
    """Return the text of the last user message of the prompt."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    for message in reversed(sample.prompt):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return ""
