"""What the scripts answer, as records.

Owns their fields. Never reads a reply (`calls` does) and never talks to a server. Invariant: a
record is what one script said of one call, whoever sent it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run one member until its deadline."""

    group_index: str
    """As Redis names it: decimal digits, or `e:…` for an evaluation."""
    member: int
    token: str
    """`incarnation-callno-place`: the fence."""

    @property
    def id(self) -> str:
        """The entry in the lease set, which `beat` names."""
        return f"{self.group_index}:{self.member}:{self.token}"


@dataclass(frozen=True, slots=True)
class LeasedMember:
    """One member of a lease answer."""

    lease: Lease
    attempts: int
    crashes: int
    parked_bytes: int


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """The members of one group in a lease answer, with their prompt once."""

    group_index: str
    n: int
    remaining_s: float | None
    """Until the group's deadline; None is no deadline."""
    prompt: bytes
    members: list[LeasedMember]


@dataclass(frozen=True, slots=True)
class LeaseAnswer:
    """What `lease` answered."""

    state: str
    """`running`, or why nothing was leased: another run state, `old`, `lost`."""
    version: int
    control_seq: int
    groups: list[LeasedGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """What `beat` answered."""

    state: str
    version: int
    control_seq: int
    lost: list[str]
    """Lease ids that are no longer held; their work is to be cancelled."""


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    """What became of one completion."""

    outcome: str
    """`ok`, `dup` (landed before; a success), `fenced`, `too_large`."""
    left: int | None = None
    """Members of the group that have not ended, for `ok`."""


@dataclass(frozen=True, slots=True)
class SweepAnswer:
    """What one page of `sweep` did."""

    more: bool
    """A page was full: call again at once."""
    expired: int = 0
    promoted: int = 0
    deadlines: int = 0
    evicted: int = 0
    aborted: int = 0
    grace: bool = False
    """An outage was seen less than a lease ago; nothing expires."""
    lost: bool = False
    """There is no such run."""
    vanished: int = 0
    """Groups whose keys were evicted or deleted by hand; they are enqueued again."""


@dataclass(frozen=True, slots=True)
class StateAnswer:
    """The frontier: every id below `frontier` and every set bit is terminal."""

    frontier: int
    bitmap: bytes
    """First byte holds id 8 * (frontier // 8), most significant bit first."""
    epoch: int


@dataclass(frozen=True, slots=True)
class RewindAnswer:
    """What `rewind` did."""

    taken: bool
    frontier: int = 0
    epoch: int = 0
    seen: int = 0
    """Live groups withdrawn because the checkpoint counts them as trained."""
    beyond: int = 0
    """Live groups withdrawn because they lie beyond the window; they come again."""
    more: bool = False
    """Live groups are left to withdraw: repeat the call (`sweep` does it too)."""


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """The run's control words after a `control` or `present` call."""

    state: str
    """A run state, `lost` (no such run) or `unknown` (no such operation)."""
    version: int
    control_seq: int
    epoch: int
    consumer: str = ""
    """Token of the trainer that is connected."""
    connects: int = 0
    """Number of its connect."""
    rewind_id: str = ""
    """Of the latest rewind."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What `measure` answered."""

    oldest_s: dict[str, float]
    """Since when the oldest group waits in `queued`, `full`, `ready`, or (since it became ready)
    in the trainer's hands, `delivered`; 0 where there is none. Server clock."""
    workers: int
    producers: int
    aggregators: int
    """Seen within four leases."""
    trainer: str
    """`none`, `waiting` (for groups that are not there), `here`, `left`."""
    connection: str
    """What the server calls that trainer's connections; empty where it does not."""


@dataclass(frozen=True, slots=True)
class AuditAnswer:
    """The accounting identity in one atomic reading."""

    enqueued: int
    acked: int
    dropped: int
    live: int
    problems: list[str]
    """Empty where everything holds."""
