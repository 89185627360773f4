r"""Multiple choice: which letter a reply settles on, or which choice it names.

Owns `gpqa`: what a row's columns mean and where a letter is looked for. Never guesses from a word
that only begins with the letter. Invariant: 1.0 or 0.0; a row that does not say which choice is
right is a `RewardFault`.
"""

from __future__ import annotations

import re
import string
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.errors import RewardFault

from ..answers import boxed
from .reply import NO_LABEL, Reply

DEFAULT_LETTERS = string.ascii_uppercase[:8]
"""Where a row has neither `choices` nor `valid_letters`."""
_END_OF_THOUGHT = "</think>"
_MARKUP = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s{0,4}\{|[*_`$]|\\[()\[\]]")
# Every repetition is bounded: two that may share a run of spaces would be quadratic in it.
_STATED = re.compile(
    r"\b(?:answer|option|choice)\b(?:\s{1,4}(?:is|was|are|would\s{1,4}be|should\s{1,4}be))?"
    r"\s{0,4}[:=]?\s{0,4}(?:(?:option|choice)\s{1,4})?[(\[{\"']{0,3}\s{0,4}([A-Z])(?![A-Za-z0-9'])"
    r"|(?<![A-Za-z0-9'])([A-Z])[)\]}\"']{0,3}\s{1,4}is\s{1,4}(?:the\s{1,4})?(?:correct|right)\b",
    re.IGNORECASE,
)
_CAPITAL = re.compile(r"(?<![A-Za-z0-9'])([A-Z])(?![A-Za-z0-9'])")
_GOES_ON = re.compile(r"\s{1,4}[a-z]")
"""Behind an "a": then it is the article."""
_NAMED = re.compile(
    r"\b(?:answer|option|choice)\s{1,4}is\b[\s:]{0,4}|\banswer\s{0,4}[:=]", re.IGNORECASE
)
_NO_WORD = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Question:
    """What a row says about its choices.

    Attributes:
        letters: that an answer may be, upper case, in order.
        right: the right one; None where only its text is known.
        texts: of the choices, by letter.
        wording: the right answer in words, normalized; empty where there are none.
    """

    letters: str
    right: str | None
    texts: Mapping[str, str]
    wording: str


def question_of(label: Any, metadata: Mapping[str, Any]) -> Question:
    """Return what the columns of a row say.

    Args:
        label: a letter, the text of the right choice, or its place (from 0).
        metadata: `choices` (a list of texts, or an object of texts by letter), `valid_letters` (a
            text or list of letters) and `correct_letter`, which wins over the label.

    Raises:
        RewardFault: they do not say which choice is right.
    """
    texts = _texts_of(metadata.get("choices"))
    letters = _letters_of(metadata.get("valid_letters"))
    if not letters and texts and all(len(key) == 1 and key.isalpha() for key in texts):
        letters = "".join(texts)
    letters = letters or DEFAULT_LETTERS
    by_letter = dict(zip(letters, texts.values(), strict=False))
    if set(texts) == set(letters):
        by_letter = dict(texts)
    right, wording = _right_of(label, metadata.get("correct_letter"), letters, by_letter)
    if right is None and not wording:
        raise RewardFault(
            f"the row's label ({type(label).__name__}) is no letter of {letters}, no place among "
            "them and no text, and metadata has no 'correct_letter'",
            detail=NO_LABEL,
        )
    if right is not None and right not in letters:
        letters += right
    return Question(letters, right, by_letter, wording)


def _texts_of(choices: Any) -> dict[str, str]:
    if isinstance(choices, Mapping):
        return {str(key).strip().upper(): str(text) for key, text in choices.items()}
    if isinstance(choices, list | tuple):
        return dict(zip(string.ascii_uppercase, map(str, choices), strict=False))
    return {}


def _letters_of(given: Any) -> str:
    if not isinstance(given, str | list | tuple):
        return ""
    found = (_one_letter(letter) for letter in given)
    return "".join(dict.fromkeys(one for one in found if one is not None))


def _one_letter(given: Any) -> str | None:
    text = given.strip(" ().").upper() if isinstance(given, str) else ""
    return text if len(text) == 1 and text in string.ascii_uppercase else None


def _right_of(
    label: Any, correct_letter: Any, letters: str, texts: Mapping[str, str]
) -> tuple[str | None, str]:
    """Return the right letter and the right words, as far as they are known."""
    right: str | None = None
    wording = ""
    if isinstance(label, str):
        right = _one_letter(label)
        if right is None or right not in letters:
            wording = _words(label)
            right = next((key for key, text in texts.items() if _words(text) == wording), None)
    elif isinstance(label, int | float) and not isinstance(label, bool):
        place = int(label) if label in range(len(letters)) else -1
        right = letters[place] if place >= 0 else None
    right = _one_letter(correct_letter) or right
    if right is not None and right in texts:
        wording = _words(texts[right])
    return right, "" if wording.upper() in letters else wording


def _words(text: str) -> str:
    return _NO_WORD.sub(" ", text.lower()).strip()


def gpqa(text: str | None, label: Any, metadata: Mapping[str, Any]) -> float:
    """Return 1.0 where the text settles on the right choice, else 0.0.

    Raises:
        RewardFault: the row does not say which is right.
    """
    question = question_of(label, metadata)
    if text is None:
        return 0.0
    final = text.rpartition(_END_OF_THOUGHT)[2]
    if question.wording and _names(final, question.wording):
        return 1.0
    said = _words(final)
    if any(said == _words(other) for other in question.texts.values() if len(other) > 1):
        return 0.0  # a wrong choice, word for word
    return float(
        question.right is not None and letter_in(final, question.letters) == question.right
    )


def letter_in(text: str, letters: str) -> str | None:
    r"""Return the letter that a text settles on, None where there is none.

    A letter alone in the last `\boxed{}` counts first, then the last statement ("the answer is
    B", "Option: C", "D is correct"), then the last capital that stands alone.
    """
    box = _MARKUP.sub(" ", boxed(text) or "").strip(" ().{}")
    if len(box) == 1 and box.upper() in letters:
        return box.upper()
    bare = _MARKUP.sub(" ", text)
    found = None
    for match in _STATED.finditer(bare):
        given = match[1] or match[2]
        is_article = given.islower() and _GOES_ON.match(bare, match.end(match.lastindex or 0))
        if given.upper() in letters and not is_article:
            found = given.upper()
    if found is not None:
        return found
    for match in _CAPITAL.finditer(bare):
        is_word = match[1] in "AI" and _GOES_ON.match(bare, match.end())
        if match[1] in letters and not is_word:
            found = match[1]
    return found


def _names(text: str, wording: str) -> bool:
    """Return whether a text is the answer in words, or its box, or what it calls its answer."""
    last = deque(_NAMED.finditer(text), maxlen=1)
    named = text[last[0].end() :].lstrip().partition("\n")[0] if last else ""
    return wording in (_words(text), _words(boxed(text) or ""), _words(named))


def score_gpqa(reply: Reply) -> float:
    """Return whether the final text settles on the right choice.

    Raises:
        RewardFault: the row does not say which is right.
    """
    return gpqa(reply.text, reply.label, reply.metadata)


def score_boxed_gpqa(reply: Reply) -> float:
    r"""Return whether the last `\boxed{}` is the right choice; 0.0 without a box.

    Raises:
        RewardFault: the row does not say which is right.
    """
    return gpqa(boxed(reply.text), reply.label, reply.metadata)
