"""The pure rewards: functions of one reply and of the columns of its row.

Owns `PURE`, their table. They never wait, never run what a model wrote, and never look anything
up. Invariant: each takes time linear in the reply, whatever the model wrote, and gives the same
reward for the same reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from . import choices, dapo, maths, words
from .random import random_reward
from .reply import NO_LABEL, Reply, opened_label, plain_label

Pure: TypeAlias = Callable[[Reply], Any]

PURE: Mapping[str, Pure] = {
    "math": maths.score_math,
    "dapo": dapo.score_dapo,
    "deepscaler": maths.score_deepscaler,
    "f1": words.score_f1,
    "gpqa": choices.score_gpqa,
    "boxed_math": maths.score_boxed_math,
    "boxed_dapo": dapo.score_boxed_dapo,
    "boxed_deepscaler": maths.score_boxed_deepscaler,
    "boxed_f1": words.score_boxed_f1,
    "boxed_gpqa": choices.score_boxed_gpqa,
}
"""Name in the configuration → reward: a number, or a dictionary whose `score` it is."""

__all__ = ["NO_LABEL", "PURE", "Pure", "Reply", "opened_label", "plain_label", "random_reward"]
