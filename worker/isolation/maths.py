"""The job `math_verify`: whether two pieces of LaTeX are the same mathematics.

Owns the call of the package. Never bounds its time: it can hang in C code, where only the kill of
its process ends it. Invariant: an answer that cannot be read is a wrong one.
"""

from __future__ import annotations

import logging
from typing import Any

MAX_ANSWER_CHARS = 8192
"""A longer answer is wrong: nobody's expected answer is that long."""


def math_verify(payload: dict[str, Any]) -> float:
    """Return 1.0 where `answer` equals `label` as mathematics, else 0.0.

    Raises:
        ValueError: one of the two is missing or no text.
    """
    answer, label = payload.get("answer"), payload.get("label")
    if not isinstance(answer, str) or not isinstance(label, str):
        raise ValueError("math_verify takes the texts 'answer' and 'label'")
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    package = _package()
    # Its own timeouts turn a hang into a wrong answer; the process is killed instead, and there
    # is no verdict.
    gold = package.parse(f"\\boxed{{{label}}}", parsing_timeout=None)
    given = package.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return float(package.verify(gold, given, timeout_seconds=None))


def _package() -> Any:
    import math_verify as package  # 2.4 s

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every disabled timeout
    return package


def warm() -> None:
    """Import and use what the job needs, so that the processes forked later have it already.

    The LaTeX grammar builds its tables at first use: 0.1 s that every fork would pay again.
    """
    for answer in ("\\frac{1}{2}", "x^2+1", "\\sqrt{2}", "(1,2)", "3.5"):
        math_verify({"answer": answer, "label": answer})
        math_verify({"answer": f"{answer}+1", "label": "not an answer"})
