r"""Mathematical answers in a `\boxed{}`, compared as strings and plain numbers.

Owns `math` and `deepscaler`. Never evaluates symbols: `math_verify` does, isolated. Invariant: 1.0
or 0.0, whatever the model wrote.
"""

from __future__ import annotations

from ..answers import boxed, same_answer
from .reply import Reply, in_box, opened_label

_END_OF_THOUGHT = "</think>"
_RESPONSE = "###Response"


def score_math(reply: Reply) -> float:
    r"""Return 1.0 where the last `\boxed{}` is the label, else 0.0.

    Raises:
        RewardFault: the row has no usable label.
    """
    expected = opened_label(reply.label)
    given = boxed(reply.text)
    return float(given is not None and same_answer(given, expected))


def score_boxed_math(reply: Reply) -> float:
    r"""Return the same: `math` looks into the box anyway."""
    return score_math(reply)


def score_deepscaler(reply: Reply) -> float:
    r"""Return 1.0 where the last `\boxed{}` behind the reasoning is the label, else 0.0.

    A reply that never ended its reasoning is 0.0: that is what this reward teaches.

    Raises:
        RewardFault: the row has no usable label.
    """
    expected = opened_label(reply.label)
    solution = solution_of(reply)
    given = None if solution is None else boxed(solution)
    return float(given is not None and same_answer(given, expected))


def solution_of(reply: Reply) -> str | None:
    """Return what stands behind the reasoning; None where that was not ended.

    It ends with the last `</think>`, else with the first `###Response`, else where the model's own
    format says so.
    """
    if _END_OF_THOUGHT in reply.whole:
        return reply.whole.rpartition(_END_OF_THOUGHT)[2]
    if _RESPONSE in reply.whole:
        return reply.whole.split(_RESPONSE, 2)[1]
    return reply.text if reply.reasoned else None


def score_boxed_deepscaler(reply: Reply) -> float:
    r"""Return 1.0 where the last `\boxed{}` of the final text is the label, reasoned or not.

    Raises:
        RewardFault: the row has no usable label.
    """
    return float(same_answer(in_box(reply.text), opened_label(reply.label)))
