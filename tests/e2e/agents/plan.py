"""What the agent of one sample does, drawn from a seed: the same on every attempt.

Owns the script. Never sends anything. Invariant: a plan is a function of (seed, group, member); its
last step goes on from a reply, and whatever is left or lost on the way is asked for again, so that
what a client goes on with is never in doubt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import StrEnum

from tests.e2e.agents.scenes import MAX_TURNS


class Kind(StrEnum):
    """What a step does with a conversation."""

    TURN = "turn"
    """Goes on."""
    RESEND = "resend"
    """Sends the last request again, not as a retry, and goes on with the new reply."""
    RESEND_OLD = "resend_old"
    """The same, and goes on with the old reply."""
    EDIT = "edit"
    """Edits the last turn."""
    BACK = "back"
    """Goes back several turns."""
    COMPACT = "compact"
    """Begins anew with a summary."""
    SUB = "sub"
    """Asks a sub-agent with a system prompt of its own."""
    SUBS = "subs"
    """Two of them at once."""


class Fate(StrEnum):
    """What happens to one try of a request on its way."""

    PASS = "pass"
    REFUSE = "refuse"
    """503 before it reaches anybody."""
    LOSE = "lose"
    """It is answered, and the answer lost: the client sees a 503."""
    TIMEOUT = "timeout"
    """The client stops waiting, and tries again as an SDK does."""
    LEAVE = "leave"
    """The client leaves, in mid-stream where there is one; what it asks later is a new request."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step, and what happens to the tries of its (first) request."""

    kind: Kind
    stream: bool
    fates: tuple[Fate, ...] = ()
    count: int = 1
    """Turns of a sub-agent, or turns to go back."""
    draw: int = 0
    """For whatever else the step has to choose."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One session."""

    dialect: str
    sdk: bool
    tools: bool
    echoes_reasoning: bool
    by_id: bool
    """Responses: goes on by `previous_response_id`."""
    steps: tuple[Step, ...] = field(default=())


DIALECTS = ("chat", "anthropic", "responses")
_WEIGHTS = (0.6, 0.22, 0.18)
_SPECIAL, _DISTURBED = 0.3, 0.3
_LINEAR = {Kind.RESEND: 3, Kind.RESEND_OLD: 1, Kind.EDIT: 4, Kind.BACK: 1, Kind.COMPACT: 2,
           Kind.SUB: 2}  # fmt: skip
_TREE = {**_LINEAR, Kind.BACK: 2, Kind.SUB: 3, Kind.SUBS: 2}
_FATES: tuple[tuple[Fate, ...], ...] = (
    (Fate.REFUSE,), (Fate.LOSE,), (Fate.LOSE, Fate.LOSE), (Fate.TIMEOUT,),
    (Fate.TIMEOUT, Fate.LOSE), (Fate.LEAVE,), (Fate.LEAVE,), (Fate.REFUSE, Fate.TIMEOUT),
)  # fmt: skip


def plan_of(seed: int, group: int, member: int, *, tree: bool) -> Plan:
    """Return the plan of a sample."""
    draw = random.Random(f"{seed}:{group}:{member}")
    dialect = draw.choices(DIALECTS, _WEIGHTS)[0]
    turns = draw.randint(1, MAX_TURNS)
    steps: list[Step] = []
    spent = 0
    while spent < turns:
        step = _step(draw, first=not steps, last=spent >= turns - 1, tree=tree)
        spent += 1 if step.kind is Kind.BACK else step.count * (1 + (step.kind is Kind.SUBS))
        steps.append(step)
    if steps[-1].kind is not Kind.TURN:
        steps.append(Step(Kind.TURN, draw.random() < 0.5))
    return Plan(
        dialect,
        sdk=draw.random() < 0.3,
        tools=draw.random() < 0.7,
        echoes_reasoning=draw.random() < 0.6,
        by_id=draw.random() < 0.5,
        steps=tuple(steps),
    )


def _step(draw: random.Random, *, first: bool, last: bool, tree: bool) -> Step:
    stream = draw.random() < 0.5
    fates = draw.choice(_FATES) if draw.random() < _DISTURBED else ()
    kind = Kind.TURN
    if not first and not last and draw.random() < _SPECIAL:
        kinds = _TREE if tree else _LINEAR
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
    count = draw.randint(1, 3) if kind in (Kind.SUB, Kind.SUBS, Kind.BACK) else 1
    return Step(kind, stream, fates, count, draw.randrange(1 << 30))
