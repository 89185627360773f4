"""Answers in words: how many of them are the expected ones.

Owns `f1` and its normalization. Never looks at their order or meaning. Invariant: in [0, 1];
articles, punctuation and case do not count.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import NamedTuple

from .reply import Reply, in_box, plain_label

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})
"""Right as a whole or not at all."""


class Overlap(NamedTuple):
    """How two texts share their words."""

    f1: float
    precision: float
    """Share of the given words that are expected."""
    recall: float
    """Share of the expected words that are given."""


NOTHING = Overlap(0.0, 0.0, 0.0)


def overlap(given: str | None, expected: str) -> Overlap:
    """Return how much of one text is in the other, as words that may repeat."""
    if given is None:
        return NOTHING
    left, right = _normalized(given), _normalized(expected)
    if left != right and (left in _WHOLE_ANSWERS or right in _WHOLE_ANSWERS):
        return NOTHING
    words, wanted = left.split(), right.split()
    num_shared = (Counter(words) & Counter(wanted)).total()
    if num_shared == 0:
        return NOTHING
    precision, recall = num_shared / len(words), num_shared / len(wanted)
    return Overlap(2 * precision * recall / (precision + recall), precision, recall)


def _normalized(text: str) -> str:
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def score_f1(reply: Reply) -> float:
    """Return the F1 of the final text's words against the label's.

    Raises:
        RewardFault: the row has no usable label.
    """
    return overlap(reply.text, plain_label(reply.label)).f1


def score_boxed_f1(reply: Reply) -> float:
    r"""Return the F1 of the words in the last `\boxed{}` against the label's; 0.0 without a box.

    Raises:
        RewardFault: the row has no usable label.
    """
    return overlap(in_box(reply.text), plain_label(reply.label)).f1
