r"""The reward of DAPO: 1 or -1 for the last line that says `Answer: …`.

Owns `dapo`, its two ways of looking, and the normalization of Minerva (appendix D.1 of
arXiv:2206.14858), which it compares by. Never looks further back than `TAIL_CHARS`. Invariant: the
score is 1.0 or -1.0, and `pred` is what was compared.
"""

from __future__ import annotations

import re
from typing import TypedDict

from ..answers import boxed
from .reply import Reply, plain_label

TAIL_CHARS = 300
"""Of the final text, its end: the answer stands there, and nobody's is longer."""
STRICT_TAIL_CHARS = 100
"""The same where only a box counts."""
INVALID = "[INVALID]"
"""`pred` where nothing was found."""
STRICT_KEY = "strict_box_verify"
"""Column of `metadata` that asks for the box."""
_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_WORDS = (
    "square ways integers dollars mph inches hours km units points feet minutes digits cents "
    "degrees cm gm pounds meters meals edges students childrentickets multiples"
).split()
_DROPPED = re.compile(
    "|".join(
        [
            *_WORDS,
            *map(re.escape, (r"\ldots", r"\dots", "\\text{s}", "\\text{.}", "\\text{}^2")),
            *map(re.escape, ("\\text{}^3", "\\text{\n}", "\\text{}", r"\mathrm{th}")),
            *map(re.escape, (r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"')),
        ]
    )
)
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_IN_DOLLARS = re.compile(r"\$([^$]*)\$")
_WRAPPED = re.compile(r"\\(?:text|textbf|overline|boxed)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac([^{\s])([^{\s])")
_FRACTION = re.compile(r"\\[dt]frac(?=\{)")
_SHORT_ROOT = re.compile(r"\\sqrt([^{\s\[])")


class DapoScore(TypedDict):
    """What `dapo` gives."""

    score: float
    acc: bool
    pred: str


def dapo(text: str, expected: str, *, strict_box: bool = False) -> DapoScore:
    r"""Return the score of a text.

    Args:
        text: of which the last `TAIL_CHARS` are looked at.
        expected: the answer.
        strict_box: the last `\boxed{}` must be the answer, character by character; else it is the
            last `Answer: …`, normalized.
    """
    if strict_box:
        box = boxed(text[-STRICT_TAIL_CHARS:])
        return _score(box == expected, INVALID if box is None else box)
    found = _ANSWER.findall(text[-TAIL_CHARS:])
    return _judged(found[-1] if found else None, expected)


def _judged(given: str | None, expected: str) -> DapoScore:
    if given is None:
        return _score(False, INVALID)
    pred = normalized(given)
    return _score(pred == normalized(expected), pred)


def _score(is_right: bool, pred: str) -> DapoScore:
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def normalized(answer: str) -> str:
    """Return an answer as Minerva compares it: units, words and LaTeX that say nothing removed."""
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    text = _DROPPED.sub("", text)
    if inside := _IN_DOLLARS.search(text):
        text = inside[1]
    text = _WRAPPED.sub(r"\1", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", text))
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text).replace("$", "").strip()
    bare = text.replace(",", "")
    return bare if bare.isdigit() else text


def score_dapo(reply: Reply) -> DapoScore:
    """Return the score of the final text; `metadata.strict_box_verify` asks for the box.

    Raises:
        RewardFault: the row has no usable label.
    """
    strict = reply.metadata.get(STRICT_KEY) is True
    return dapo(reply.text, plain_label(reply.label), strict_box=strict)


def score_boxed_dapo(reply: Reply) -> DapoScore:
    r"""Return the score of the last `\boxed{}`: of an `Answer: …` in it, else of all of it.

    Raises:
        RewardFault: the row has no usable label.
    """
    expected = plain_label(reply.label)
    box = boxed(reply.text)
    if box is None:
        return _score(False, INVALID)
    box = box[-TAIL_CHARS:]
    found = _ANSWER.findall(box)
    return _judged(found[-1] if found else box, expected)
