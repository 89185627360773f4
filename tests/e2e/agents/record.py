"""What one scene leaves behind, as plain records: everything that is judged, and nothing else.

Owns the shapes. Never judges and never talks to anybody. Invariant: a record is what somebody saw
(the trainer, the observer, an agent, an engine), never what somebody concluded.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

from rollstream.sample import Sample, TokenIds
from tests.e2e.agents.scenes import Scene
from tests.e2e.weights.record import Dropped


@dataclass(slots=True)
class Try:
    """One HTTP request of an agent, and what became of it."""

    n: int
    """Among those of its attempt."""
    line: int
    """Conversations of one attempt that run at once have different ones."""
    path: str
    body: dict[str, Any]
    retry: int
    """What it says of itself in the header of SDKs."""
    sent_s: float
    fate: str
    how: str = ""
    """`got`, `lost` (answered, and the client never saw it), `left`, `unsent`, or nothing: its
    process ended first."""
    status: int = 0
    raw: str = ""
    """The answer, as far as it came."""
    at_s: float = 0.0


@dataclass(slots=True)
class Attempt:
    """One run of an agent."""

    nonce: str
    group: str
    member: int
    pid: int
    dialect: str
    sdk: bool
    steps: list[str] = field(default_factory=list)
    """Kinds of the steps that were played to their end."""
    tries: list[Try] = field(default_factory=list)
    ended_s: float | None = None
    """None where its process ended first, or it was stopped."""
    stopped: str = ""
    """What made it end before its plan did."""


@dataclass(slots=True)
class EngineCall:
    """One request, as an engine saw it."""

    rid: str
    ids: TokenIds
    """[P] what was sent."""
    sampling: dict[str, Any]
    """In SGLang's names."""
    stream: bool
    started_s: float
    ended_s: float | None = None
    num_tokens: int = 0
    """As far as they were sent out."""
    finish: str = ""
    """`stop`, `length`, `abort`; `left`, `dropped`, `http 503`; empty where it never ended."""
    nonce: str = ""
    """Of the attempt that it belongs to, told by its ids."""

    @property
    def is_whole(self) -> bool:
        """Whether it is a reply, to its end: one may be empty, unless the call was stopped."""
        return self.finish in ("stop", "length") or (self.finish == "abort" and self.num_tokens > 0)


@dataclass(slots=True)
class HandedMember:
    """One trajectory, as the trainer got it."""

    member: int
    samples: list[Sample]
    is_list: bool


@dataclass(slots=True)
class HandedGroup:
    """A group in a batch."""

    group: str
    members: list[HandedMember]
    missing: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Record:
    """Everything that one scene left behind."""

    scene: Scene
    seed: int
    handed: list[HandedGroup] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    engine_calls: dict[str, EngineCall] = field(default_factory=dict)
    kills: int = 0
    killed_attempts: int = 0
    accounting_difference: int = 0
    audit_problems: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    drops: list[Dropped] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """What the stage itself found odd."""
    seconds: float = 0.0

    def members(self) -> list[tuple[str, HandedMember]]:
        """Return every trajectory that was handed out, with its group."""
        return [(group.group, one) for group in self.handed for one in group.members]


def packed(ids: TokenIds) -> str:
    """Return ids as text for a journal."""
    return zlib.compress(ids.astype("<i4").tobytes(), 1).hex()
