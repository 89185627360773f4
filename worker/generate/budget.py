"""How many tokens one call may sample, and which limit says so.

Owns the arithmetic of budgets: per-turn cap, response budget, context. Never calls anything.
Invariant: a call is made only for a room of at least one token, and a turn that was cut is named
after the limit that cut it.

Unit: tokens.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from rollstream.errors import StopReason

from ..sampling import Sampling
from ..types import Completion, Finish, Limits


@dataclass(frozen=True, slots=True)
class Room:
    """What is left for the next tokens."""

    turn: int
    """Under the per-turn cap."""
    response: int | None
    """Under the cap of everything behind the first prompt; None is uncapped."""
    context: int
    """Up to the context, or to `max_seq_len` where that is less."""

    @property
    def tokens(self) -> int:
        """The least of them: what a call may sample."""
        return min(self.turn, self.fits)

    @property
    def fits(self) -> int:
        """What may be added without being sampled (an observation has no per-turn cap)."""
        return self.context if self.response is None else min(self.response, self.context)

    @property
    def bound(self) -> StopReason:
        """The limit that is the least; of equal ones the widest, behind which nothing follows."""
        if self.context <= self.tokens:
            return StopReason.CONTEXT_LENGTH
        if self.response is not None and self.response <= self.tokens:
            return StopReason.RESPONSE_LENGTH
        return StopReason.TURN_LENGTH

    @property
    def fits_bound(self) -> StopReason:
        """The limit of `fits`."""
        return (
            StopReason.CONTEXT_LENGTH if self.context <= self.fits else (StopReason.RESPONSE_LENGTH)
        )


def room_left(
    limits: Limits, sampling: Sampling, *, held: int, response: int, turn: int = 0
) -> Room:
    """Return the room behind `held` tokens.

    Args:
        limits: of the trajectory.
        sampling: of the group; its `max_new_tokens` is the per-turn cap.
        held: prompt and response so far.
        response: everything behind the first prompt, sampled or observed.
        turn: sampled already of the turn that goes on (a resumed one; else 0).
    """
    context = limits.max_context
    if limits.max_seq_len is not None:
        context = min(context, limits.max_seq_len)
    return Room(
        turn=sampling.max_new_tokens - turn,
        response=None if limits.max_response is None else limits.max_response - response,
        context=context - held,
    )


def effective(sampling: Sampling, room: Room, seed: int) -> Sampling:
    """Return the parameters of one call: within the room, with its own seed."""
    tokens = room.tokens
    return replace(
        sampling,
        max_new_tokens=tokens,
        # Engines refuse a minimum above the maximum.
        min_new_tokens=min(sampling.min_new_tokens, tokens),
        seed=seed,
    )


def cut_by(completion: Completion, room: Room, closing: Container[int]) -> StopReason | None:
    """Return the limit that cut a reply; None where its turn is complete.

    Args:
        completion: not an aborted one.
        room: what its call was given.
        closing: ids that end a turn.
    """
    length = len(completion.ids)
    if completion.finish is Finish.LENGTH:
        # Cut before our own cap: the engine's context is smaller than ours says.
        return room.bound if length >= room.tokens else StopReason.CONTEXT_LENGTH
    is_closed = length > 0 and int(completion.ids[-1]) in closing
    if length >= room.tokens and completion.matched is None and not is_closed:
        return room.bound  # the count says what the finish reason hides
    return None
