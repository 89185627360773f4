"""Which generate functions may be stopped half-way and go on elsewhere.

Owns the mark `resumable` and the question after it. Never calls a function. Invariant: a function
without the mark never gets a sample that has tokens already.

Example:
    >>> @resumable
    ... async def my_turns(given: GenerateInput) -> GenerateOutput:
    ...     rollout = LinearRollout(given)  # goes on from `given.sample`, whatever it has
"""

from __future__ import annotations

from typing import TypeVar

from ..types import GenerateFunction

F = TypeVar("F", bound=GenerateFunction)


def resumable(function: F) -> F:
    """Mark a generate function: what it returns as `abort_weights`, it can go on from.

    Its sample is then stored, and a later attempt, on any worker, finds it as `given.sample`:
    aborted, with its tokens, calls and metadata. What it did beside the sample (a tool that ran
    without an observation in the tokens, say) is not known there.
    """
    function.resumable = True  # type: ignore[attr-defined]  # functions take attributes
    return function


def is_resumable(function: GenerateFunction) -> bool:
    """Return whether a function was marked."""
    return getattr(function, "resumable", False) is True
