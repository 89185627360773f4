"""What a pure reward is given: one reply, and the columns of its row.

Owns `Reply` and the readers of labels. Never scores. Invariant: a label that a reward cannot use is
a `RewardFault` that says what it needs, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.errors import RewardFault

from ..answers import boxed

NO_LABEL = "no_label"
"""Detail of a row that lacks what its reward compares with."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The last turn of a sample, and what its row says.

    Attributes:
        text: of the turn, without its reasoning and its tool calls.
        label: of the row.
        metadata: of the sample: that of the row, and what came by while it ran.
        whole: the turn as it was sampled, reasoning and control strings included.
        reasoned: it reasoned, ended that, and went on.
    """

    text: str
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    whole: str = ""
    reasoned: bool = False


def plain_label(label: Any) -> str:
    """Return a label as text.

    Raises:
        RewardFault: it is neither text nor a number.
    """
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise RewardFault(
            f"the row's label is {type(label).__name__}; this reward needs text or a number",
            detail=NO_LABEL,
        )
    return str(label)


def opened_label(label: Any) -> str:
    r"""Return a label as text; of one with a `\boxed{}` what that holds.

    Raises:
        RewardFault: it is neither text nor a number.
    """
    text = plain_label(label)
    box = boxed(text)
    return text if box is None else box


def in_box(text: str) -> str:
    r"""Return what the last `\boxed{}` holds, nothing where there is none."""
    return boxed(text) or ""
