"""What `top` knows of a run at one moment, and what two moments say together.

Owns the records. Never does I/O, never judges: `diagnosis.py` does. Invariant: a counter of Redis
is a fact of the whole run, so only differences of two snapshots speak of now; a server that forgot
(its counters fell) has no differences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rollstream.updates.confirmed import EngineView

STALE = ("stale:running", "stale:ready", "stale:hand_out")


@dataclass(frozen=True, slots=True)
class Spans:
    """Where the time of the newest finished group's trajectories went."""

    group_index: str
    samples: int
    seconds: Mapping[str, float]
    """Span → seconds, all samples together."""
    sampled_tokens: int

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens a second of one sample's calls; None where no call took time."""
        took = self.seconds.get("generate", 0.0)
        return self.sampled_tokens / took if took > 0 and self.sampled_tokens else None

    def share(self, name: str) -> float:
        """Return the part of generate, tool and reward together that `name` took, 0 to 1."""
        parts = {part: self.seconds.get(part, 0.0) for part in ("generate", "tool", "reward")}
        whole = sum(parts.values())
        return parts[name] / whole if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment."""

    mono_s: float
    """When it was read, on the reader's clock."""
    run: str
    state: str
    version: int
    capacity: int
    done: bool = False
    """All prompts are enqueued."""
    draining: bool = False
    """No new prompts are taken, by `rollstream drain`."""
    error: str = ""
    pause_mode: str = ""
    pause_by: str = ""
    """Token of the trainer that paused it; empty: an operator, or not paused."""
    paused_s: float = 0.0
    depths: Mapping[str, int] = field(default_factory=dict)
    """q d s l full ready live delivered eval evaluations."""
    counters: Mapping[str, int] = field(default_factory=dict)
    workers: int = 0
    """Seen within four leases; so are the next two."""
    producers: int = 0
    aggregators: int = 0
    in_flight: int = 0
    """Calls to engines, as workers confirmed them last: a beat (a third of a lease) old at most."""
    engines: Sequence[EngineView] = ()
    trainer_connects: int = 0
    trainer: str = "none"
    """`none` (yet), `waiting` for groups that are not there, `here`, or `left`."""
    oldest_s: Mapping[str, float] = field(default_factory=dict)
    """Since when the oldest group is `queued`, `full`, `ready`, `delivered`; 0 where none is."""
    used_memory: int | None = None
    max_memory: int = 0
    """0: no limit."""
    round_trip_ms: float = 0.0
    spans: Spans | None = None

    @property
    def waiting(self) -> int:
        """Members that wait for a lease."""
        return sum(self.depths.get(key, 0) for key in "qds")

    @property
    def leased(self) -> int:
        """Members that a worker has."""
        return self.depths.get("l", 0)

    @property
    def live(self) -> int:
        """Groups that have not ended."""
        return self.depths.get("live", 0)

    @property
    def full(self) -> int:
        """Groups that wait for their verdict."""
        return self.depths.get("full", 0)

    @property
    def ready(self) -> int:
        """Groups that the trainer may take."""
        return self.depths.get("ready", 0)

    @property
    def delivered(self) -> int:
        """Groups that the trainer has not acked."""
        return self.depths.get("delivered", 0)

    @property
    def open(self) -> int:
        """Groups of which a member has not ended."""
        return max(0, self.live - self.full - self.ready - self.delivered)

    @property
    def trainer_waits(self) -> bool:
        """A trainer asks for groups at this moment, which are not there."""
        return self.trainer == "waiting"

    @property
    def is_blocked(self) -> bool:
        """The producer may add nothing."""
        return self.live >= self.capacity

    def engine_states(self) -> dict[str, int]:
        """Return how many engines are in which state."""
        found: dict[str, int] = {}
        for view in self.engines:
            found[view.state] = found.get(view.state, 0) + 1
        return found


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive snapshots of one run, oldest first; at least one."""

    looks: Sequence[Snapshot]

    @property
    def last(self) -> Snapshot:
        """The newest one."""
        return self.looks[-1]

    @property
    def seconds(self) -> float:
        """From the first to the last."""
        return self.last.mono_s - self.looks[0].mono_s

    def gained(self, *names: str) -> int:
        """Return by how much these counters rose together."""
        return sum(self._gain(name) for name in names)

    def gained_by(self, prefix: str) -> dict[str, int]:
        """Return by how much each counter `prefix:…` rose, by what stands behind the colon."""
        names = {name for look in (self.looks[0], self.last) for name in look.counters}
        rose = {name: self._gain(name) for name in names if name.startswith(f"{prefix}:")}
        return {name.partition(":")[2]: n for name, n in sorted(rose.items()) if n > 0}

    def _gain(self, name: str) -> int:
        steps = (after.counters.get(name, 0) - before.counters.get(name, 0)
                 for before, after in pairwise(self.looks))  # fmt: skip
        return sum(step for step in steps if step > 0)

    def ended(self) -> int:
        """Return how many groups were acked or dropped."""
        return self.gained("acked") + sum(self.gained_by("dropped").values())

    def per_minute(self, count: int) -> float | None:
        """Return a rate; None where there is only one look."""
        return 60 * count / self.seconds if self.seconds > 0 else None

    def share(self, holds: str) -> float:
        """Return the part of the looks, 0 to 1, at which a property of theirs holds."""
        return sum(bool(getattr(look, holds)) for look in self.looks) / len(self.looks)

    def median_of(self, name: str) -> float:
        """Return the median of a number of the looks."""
        return float(median(getattr(look, name) for look in self.looks))

    def least(self, name: str) -> int:
        """Return the smallest value of a number of the looks."""
        return min(int(getattr(look, name)) for look in self.looks)

    def most(self, name: str) -> int:
        """Return the largest value of a number of the looks."""
        return max(int(getattr(look, name)) for look in self.looks)

    def call_share(self) -> float | None:
        """Return the part of the leased members with a call at an engine; None where none is."""
        leased = sum(look.leased for look in self.looks)
        return min(1.0, sum(look.in_flight for look in self.looks) / leased) if leased else None

    @property
    def spans(self) -> Spans | None:
        """Of the newest group that was looked into."""
        return next((look.spans for look in reversed(self.looks) if look.spans is not None), None)
