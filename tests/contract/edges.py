"""What budgets permit, worked out without the code that is tested: whole turns as mere lengths.

Axes: T turns. Unit: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream.errors import StopReason

NONE = 16_000
"""A cap that never matters here, within the context of the engine itself."""


@dataclass(frozen=True)
class Caps:
    """The three budgets."""

    turn: int = NONE
    response: int | None = None
    context: int = NONE


@dataclass(frozen=True)
class Story:
    """A trajectory that nothing cuts: replies, and what the environment wrote between them."""

    prompt: int
    replies: Sequence[int]
    """[T] tokens of each, its end token included."""
    observations: Sequence[int]
    """[T-1]"""


@dataclass
class Outcome:
    """What of a story remains under budgets."""

    length: int
    """Tokens behind the prompt."""
    reason: StopReason
    asked: list[int] = field(default_factory=list)
    """The budget of every request that is sent."""


def outcome_of(story: Story, caps: Caps, held: int = 0) -> Outcome:
    """Return what remains of a story.

    Args:
        story: without budgets.
        caps: the budgets.
        held: tokens behind the prompt that an earlier attempt left, inside a reply or behind it.
    """
    length, asked = 0, list[int]()
    for place, reply in enumerate(story.replies):
        begun = min(max(0, held - length), reply)
        at = length + begun
        if begun < reply:
            rooms = _rooms(story, caps, at, begun)
            room = min(rooms.values())
            if room <= 0:
                reason = _widest(rooms, room)
                if at == 0 and reason is StopReason.CONTEXT_LENGTH:
                    reason = StopReason.PROMPT_TOO_LONG
                return Outcome(at, reason, asked)
            asked.append(room)
            if room < reply - begun:
                return Outcome(at + room, _widest(rooms, room), asked)
        length += reply
        if place == len(story.observations):
            break
        seen = story.observations[place]
        if held < length + seen:
            rooms = _rooms(story, caps, length, 0)
            del rooms[StopReason.TURN_LENGTH]
            fits = min(rooms.values())
            if seen > fits:
                return Outcome(length, _widest(rooms, fits), asked)
        length += seen
    return Outcome(length, StopReason.STOP, asked)


def _rooms(story: Story, caps: Caps, length: int, begun: int) -> dict[StopReason, int]:
    """Return what each budget leaves, the widest first."""
    return {
        StopReason.CONTEXT_LENGTH: caps.context - story.prompt - length,
        StopReason.RESPONSE_LENGTH: NONE if caps.response is None else caps.response - length,
        StopReason.TURN_LENGTH: caps.turn - begun,
    }


def _widest(rooms: dict[StopReason, int], room: int) -> StopReason:
    return next(reason for reason, left in rooms.items() if left == room)
