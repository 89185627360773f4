"""Which server the connections of one run go to, and which of them go to a wrong one by now.

Owns the present address: that of the URL, the master that Sentinel names, or the owner of the
run's slot of a cluster (all keys of a run lie in one). Never does I/O. Invariant: whatever says
that the address is wrong (READONLY, MOVED, another master) starts a new generation, and a
connection of an older one is closed before it is used again.

During the migration of its slot a run is away: following ASK would run a script on the new node,
where half of the run's keys are missing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

Address: TypeAlias = tuple[str, int]
MAX_NODES = 64
"""Of a cluster that are remembered as places to ask for the owner."""
_ELSEWHERE = (
    AskError, ClusterDownError, MasterDownError, MovedError, ReadOnlyError, TryAgainError,
)  # fmt: skip
_ELSEWHERE_TEXT = re.compile(r"^UNBLOCKED |-READONLY |^READONLY |-MASTERDOWN ")
"""Where no class says it: a blocked read whose server was demoted, and Redis 6's words about a
command inside a script."""
_DEMOTED = re.compile(r"READONLY|UNBLOCKED|MASTERDOWN")


def is_elsewhere(error: ResponseError) -> bool:
    """Return whether a server refuses because it is not (now) the one to ask."""
    return isinstance(error, _ELSEWHERE) or bool(_ELSEWHERE_TEXT.search(str(error)))


class Route:
    """The way of one run's connections, shared by all of them; safe for threads.

    Attributes:
        generation: rises whenever connections made before go to a wrong server.
        is_cluster: a server has answered MOVED.
        settled: this address has answered for the run's keys; else the next connection asks.
        limit: of the calling thread (`mono_s`): when it wants its answer, at the latest.
        sentinel: the one that answered last.
        is_named: the server calls our connections by their name (this user may name them).
    """

    def __init__(self, seeds: Sequence[Address], *, settled: bool = False) -> None:
        """Begin at the first of `seeds`; a unix socket has none."""
        self.generation = 0
        self.is_cluster = False
        self.settled = settled or not seeds
        self.limit = threading.local()
        self.sentinel: Address | None = None
        self.is_named = False
        self._seeds = list(seeds)
        self._address = seeds[0] if seeds else None
        self._nodes: list[Address] = []
        self._lock = threading.Lock()

    @property
    def address(self) -> Address | None:
        """Where the next connection goes; None for a unix socket."""
        return self._address

    @property
    def wants_nodes(self) -> bool:
        """Whether other nodes of the cluster are to be asked for."""
        return self.is_cluster and not self._nodes

    @property
    def nodes(self) -> list[Address]:
        """Every node of the cluster that is known; the one address where it is none."""
        known = [*self._nodes, *([self._address] if self._address else [])]
        return list(dict.fromkeys(known))

    def found(self, address: Address) -> None:
        """Take over what Sentinel says."""
        with self._lock:
            if address != self._address:
                self._address = address
                self.generation += 1

    def refused(self, error: ResponseError, at: Address | None, generation: int) -> None:
        """Take over what a server said about not being the one to ask."""
        with self._lock:
            if generation != self.generation:
                return  # said on an old connection: others have heard it already
            if isinstance(error, MovedError):
                self.is_cluster, self.settled = True, True
                # An empty host is the one that answered.
                self._address = (error.host or (at[0] if at else ""), int(error.port))
                self.generation += 1
            elif isinstance(error, ReadOnlyError) or _DEMOTED.search(str(error)):
                # Connect anew: a name may resolve to the new primary by now.
                self.generation += 1

    def unreachable(self, at: Address | None) -> None:
        """Ask another node of the cluster next: one that is gone may have been replaced."""
        with self._lock:
            if not self.is_cluster or at is None or at != self._address:
                return
            # In a circle that is the same from wherever it is entered, so that each has its turn.
            circle = list(dict.fromkeys((*self._nodes, *self._seeds, at)))
            if len(circle) == 1:
                return
            self._address = circle[(circle.index(at) + 1) % len(circle)]
            self.settled = False
            self.generation += 1

    def learned(self, cluster_slots: Any) -> None:
        """Remember the nodes in an answer of CLUSTER SLOTS."""
        nodes: list[Address] = []
        at = self._address
        for row in cluster_slots:
            for host, port, *_ in row[2:]:
                name = host.decode() if isinstance(host, bytes) else host
                nodes.append((name or (at[0] if at else ""), int(port)))
        with self._lock:
            self._nodes = list(dict.fromkeys(nodes))[:MAX_NODES]
