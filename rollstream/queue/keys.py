"""Names of the run's keys, all under one hash tag: one run is one Cluster slot.

Owns the names that Python uses; the scripts build theirs from the same prefix. Never touches a
server. Invariant: every key of a run begins with `rs:{run}:`.
"""

from __future__ import annotations

SCHEMA = 1
"""Version of the layout in Redis; a run of another schema is refused."""
FULL_GROUP = "aggregators"
READY_GROUP = "trainer"
"""Consumer groups of the two streams."""
READY_CONSUMER = "trainer"
"""The one consumer of `ready`: its name is fixed, so a restart finds what is pending."""
MAX_MEMBERS_A_CALL = 128
MAX_COMPLETE_BYTES = 1 << 20
"""Bounds of one `complete` call."""
MAX_LEASE = 256
SWEEP_PAGE = 64
MIN_WINDOW = 65536
"""How far ids may lie above the frontier: at least this, or eight times the capacity."""
MAX_ENGINES_BYTES = 16 << 10
"""Of what a worker says of its engines with a confirmation."""
MAX_LABEL_CHARS = 200
"""Of an engine's own name of its weights."""
PAST_MEMBERS = 512
"""Members whose header the record of a drop keeps, as far as they fit."""
EVALUATION_PRIORITY = -1
"""Of `e:…` groups, below that of every training group (0 and up): the lower runs first."""


def prefix(run: str) -> str:
    """Return the prefix of every key of `run`."""
    return f"rs:{{{run}}}:"


def probe_of(run: str) -> str:
    """Return the key by which a connection hears who owns the run's slot; empty for no run."""
    return f"{prefix(run)}m" if run else ""


def run_of(key: str) -> str:
    """Return the run that `key` belongs to (the inverse of `prefix`)."""
    return key[key.index("{") + 1 : key.index("}")]


def window_of(capacity: int) -> int:
    """Return how far above the frontier ids may be enqueued."""
    return max(8 * capacity, MIN_WINDOW)
