"""What may run in isolation, and how a job and its judgement look: the closed table.

Owns `JUDGES` and both ends' format. Never runs in a worker: a judge may hang, crash or take all
memory, which is why it has a process of its own. Invariant: a message names a judge, never code;
a judgement is JSON of at most `MAX_JUDGEMENT_BYTES`.

A judgement is {"token": str, "reward": float} or {"token": str, "error": str, "detail": str}.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from typing import Any

from rollstream.queue.keys import prefix

QUEUE = "verify"
MAX_JUDGEMENT_BYTES = 64 << 10
MAX_ANSWER_CHARS = 8192
"""A longer answer is wrong: nobody's expected answer is that long."""
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_INBOX = re.compile(r"[0-9A-Za-z._-]{1,80}")


def inbox_key(run: str, inbox: str) -> str:
    """Return the list that judgements for one worker are pushed to.

    Raises:
        ValueError: one of the names is not such a name.
    """
    if not _RUN.fullmatch(run) or not _INBOX.fullmatch(inbox):
        raise ValueError("not a run and an inbox")
    return f"{prefix(run)}r:{inbox}"


def judgement(token: str, reward: float) -> bytes:
    """Return the message for a verdict."""
    return json.dumps({"token": token, "reward": reward}).encode()


def failure(token: str, error: str, detail: str) -> bytes:
    """Return the message for no verdict.

    Args:
        token: of the request.
        error: what happened, for people.
        detail: `raised`, `timeout` or `crashed`.
    """
    return json.dumps({"token": token, "error": error[:2000], "detail": detail}).encode()


def math_verify(answer: str, label: str) -> float:
    """Return 1.0 where the answer equals the label as mathematics, else 0.0."""
    package = _package()
    if len(answer) > MAX_ANSWER_CHARS:
        return 0.0
    # Its own timeouts use the alarm that RQ uses, and turn a hang into a wrong answer; the
    # process is killed instead, and there is no verdict.
    gold = package.parse(f"\\boxed{{{label}}}", parsing_timeout=None)
    given = package.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return float(package.verify(gold, given, timeout_seconds=None))


def _package() -> Any:
    import math_verify as package  # 2.4 s

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every disabled timeout
    return package


def warm() -> None:
    """Import and use what judges need, so that the processes forked later have it already.

    The LaTeX grammar builds its tables at first use: 0.1 s that every fork would pay again.
    """
    for answer in ("\\frac{1}{2}", "x^2+1", "\\sqrt{2}", "(1,2)", "3.5"):
        math_verify(answer, answer)
        math_verify(f"{answer}+1", "not an answer")


JUDGES: dict[str, Callable[[str, str], float]] = {"math_verify": math_verify}
"""Name in a job → judge of (answer, label). Nothing else can be named."""


def judge(name: str, token: str, answer: str, label: str) -> bytes:
    """Run one judge and return its message, whatever it does short of not returning."""
    try:
        reward = float(JUDGES[name](answer, label))
    except Exception as error:  # noqa: BLE001 - the judged text can make it raise anything
        return failure(token, f"{type(error).__name__}: {error}", "raised")
    if not math.isfinite(reward):
        return failure(token, f"{name} gave {reward}", "raised")
    return judgement(token, reward)
