r"""Where the answer is in a reply, and whether two answers are the same.

Owns the finding of the final text, of `<answer>` and of the last `\boxed{}`, and the
normalization of mathematical answers as strings. Never evaluates symbols: that is what
`math_verify` does, isolated. Invariant: linear in the text, whatever the model wrote.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rollstream.sample import Sample, TokenIds, empty_ids

from ..types import AssistantMessage, Finish, Renderer

_OPEN, _CLOSE = "<answer>", "</answer>"
_BRACE = re.compile(r"(?P<box>\\boxed\s*\{)|\\(?!\\boxed\b).|(?P<open>\{)|(?P<close>\})", re.DOTALL)
"""What opens or closes; escaped braces are text."""
_NUMBER = re.compile(r"([-+]?)(\d{1,64}(?:\.\d{0,64})?|\.\d{1,64})")
_FRACTION = re.compile(r"([-+]?\d{1,64})/(\d{1,64})")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FRAC = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_SHORT_FRAC = re.compile(r"\\frac(\d)(\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SPACING = re.compile(r"\\[,!;: ]|\\q?quad|~|\s+")
_MARKUP = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[()\[\]$]|\$|\^\{?\\circ\}?")
_NAME = re.compile(r"^[a-zA-Z]=")


def final_turn_ids(sample: Sample) -> TokenIds:
    """Return the ids of the last turn that was sampled, joined where it was resumed.

    Shape: [C], empty where no call was made.
    """
    if not sample.calls:
        return empty_ids()
    last = sample.calls[-1]
    start = last.start
    for call in reversed(sample.calls[:-1]):
        if call.finish != Finish.ABORT or call.end != start:
            break
        start = call.start
    return sample.tokens[start : last.end]


def final_message(sample: Sample, renderer: Renderer) -> AssistantMessage | None:
    """Return the last assistant turn, parsed from its ids; None where nothing was sampled.

    Its content is the final text: neither reasoning nor tool calls are in it.
    """
    ids = final_turn_ids(sample)
    if len(ids) == 0:
        return None
    start = len(sample.tokens[: sample.calls[-1].end]) - len(ids)
    tail = sample.tokens[max(0, start - 64) : start]
    return renderer.parse(ids, tail)


def boxed(text: str) -> str | None:
    r"""Return what the last complete `\boxed{...}` holds, None where there is none."""
    # One pass over the braces: asking each box for its end is quadratic where none has one.
    last = (-1, -1)
    opened: list[int] = []  # where what the open braces hold begins; -1 where they are no box's
    for found in _BRACE.finditer(text):
        if found.lastgroup == "close":
            start = opened.pop() if opened else -1
            last = max(last, (start, found.start()))
        elif found.lastgroup is not None:
            opened.append(found.end() if found.lastgroup == "box" else -1)
    return text[slice(*last)].strip() if last[0] >= 0 else None


def tagged(text: str) -> str | None:
    """Return what the last complete `<answer>...</answer>` holds, None where there is none."""
    start = text.rfind(_OPEN, 0, max(0, text.rfind(_CLOSE)))
    if start < 0:
        return None
    start += len(_OPEN)
    return text[start : text.index(_CLOSE, start)].strip()


def answer_of(text: str) -> str:
    r"""Return the answer in a final text: its last `<answer>`, else its last `\boxed{}`, else all.

    A box inside the tag is opened.
    """
    inner = tagged(text)
    box = boxed(text if inner is None else inner)
    if box is not None:
        return box
    return text.strip() if inner is None else inner


def normalized(answer: str) -> str:
    """Return an answer with what does not change its meaning taken away."""
    text = _SPACING.sub(" ", _MARKUP.sub("", answer))
    text = re.sub(r"\\[dt]frac", r"\\frac", text).replace("{,}", ",").replace("\\%", "%")
    text = _WRAPPED.sub(r"\1", text)
    text = _SHORT_FRAC.sub(r"\1/\2", _FRAC.sub(_plain_fraction, text))
    text = _THOUSANDS.sub("", text)
    text = re.sub(r"\s+", "", text)
    return text.removesuffix(".")


def _plain_fraction(found: re.Match[str]) -> str:
    above, below = found[1].strip(), found[2].strip()
    if above.lstrip("+-").isalnum() and below.isalnum():
        return f"{above}/{below}"
    return f"({above})/({below})"


def same_answer(given: str, expected: str) -> bool:
    """Return whether two answers are equal as strings or as plain numbers."""
    left, right = normalized(given), normalized(expected)
    if left == right:
        return left != ""
    if "=" not in right:
        left = _NAME.sub("", left)
    if left == right:
        return left != ""
    first, second = _number(left), _number(right)
    return first is not None and first == second


def _number(text: str) -> Fraction | None:
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    found = _FRACTION.fullmatch(text)
    if found and int(found[2]):
        return Fraction(int(found[1]), int(found[2]))
    return None
