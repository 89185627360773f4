"""What one scene leaves behind, as plain records: everything that is judged, and nothing else.

Owns the shapes. Never judges and never talks to anybody. Invariant: a record is what somebody saw
(the trainer, the observer, a worker's journal, an engine), never what somebody concluded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollstream.sample import Sample
from tests.e2e.weights.scenes import Mode, Scene


@dataclass(slots=True)
class HandedGroup:
    """A group in a batch, as the trainer got it."""

    group: int
    samples: list[Sample]
    staleness: int
    """What the group says of itself."""
    missing: list[str] = field(default_factory=list)
    """Why members are missing."""


@dataclass(slots=True)
class Handed:
    """A batch."""

    version: int
    """The trainer's when it was handed out."""
    groups: list[HandedGroup]


@dataclass(slots=True)
class Update:
    """One `updating_weights`, on the wall clock of this machine, in seconds."""

    version: int
    mode: Mode
    asked_s: float
    """Before the `with`."""
    entered_s: float
    """The body began: everybody had confirmed the pause."""
    left_s: float
    """The body ended."""
    done_s: float
    """Behind the `with`."""
    hides: bool = False
    """Calls went on, and the push named nothing: what was sampled in between is of nobody knows
    which weights."""


@dataclass(slots=True)
class Evaluation:
    """One `evaluate`."""

    name: str
    asked: int
    """Samples."""
    samples: list[Sample]
    missing: list[str]
    """Why samples are missing."""
    versions: tuple[int, int]
    """The trainer's version when it was asked and when it was answered."""


@dataclass(slots=True)
class Dropped:
    """One entry of the run's list of drops."""

    group: str
    reason: str
    detail: str = ""


@dataclass(slots=True)
class Execution:
    """A tool that ran."""

    attempt: str
    group: str
    member: int
    turn: int
    rid: str
    """Of the call whose reply asked for it (the last of the turn's, where it was resumed)."""
    place: int
    """Among the executions of one attempt and one reply."""
    nonce: str
    """What the tool's result carries, and nothing else has."""
    pid: int


@dataclass(slots=True)
class Attempt:
    """One call of the generate function."""

    id: str
    group: str
    member: int
    pid: int
    held: int
    """Response tokens that it went on from."""
    ended: str = ""
    """The sample's status, `raised`, or nothing: its process ended first."""


@dataclass(slots=True)
class EngineCall:
    """One request, as an engine saw it."""

    rid: str
    started_s: float
    ended_s: float | None = None
    num_tokens: int | None = None
    """None where it brought no tokens (an error, a client that left)."""
    finish: str = ""


@dataclass(slots=True)
class Record:
    """Everything that one scene left behind."""

    scene: Scene
    seed: int
    handed: list[Handed] = field(default_factory=list)
    acked: list[list[int]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    drops: list[Dropped] = field(default_factory=list)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    executions: list[Execution] = field(default_factory=list)
    pid_of: dict[str, int] = field(default_factory=dict)
    """rid → the worker that sent it, as far as a reply came back."""
    engine_calls: dict[str, EngineCall] = field(default_factory=dict)
    killed: dict[int, float] = field(default_factory=dict)
    """Processes that the stage killed → when, on the wall clock."""
    stopped: int = 0
    """Workers that were asked to end, and started again."""
    failed: list[Update] = field(default_factory=list)
    """Updates whose body raised."""
    stood_still: list[tuple[float, float]] = field(default_factory=list)
    """From when to when somebody else had an engine paused, on the wall clock."""
    disturbances: dict[str, int] = field(default_factory=dict)
    accounting_difference: int = 0
    audit_problems: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    """Of the run, at its end."""
    left: dict[str, int] = field(default_factory=dict)
    """What the run still held when it was over, by place."""
    findings: list[str] = field(default_factory=list)
    """What the stage itself found odd: exits, threads that stumbled."""
    seconds: float = 0.0

    def samples(self) -> list[Sample]:
        """Return every training sample that was handed out."""
        return [s for batch in self.handed for group in batch.groups for s in group.samples]
