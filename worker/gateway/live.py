"""A reply while it is sampled, for everybody who reads along.

Owns the deltas so far, and the promise to whoever read one. Never calls an engine, never parses a
finished reply. Invariant: what was read is never taken back. So where an engine breaks behind what
somebody read, no other try is made and the reply is broken; where nobody read anything of the try
yet, it is as if the try had not been.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from rollstream.sample import Message, TokenIds

from ..engines.faults import Detail, fault
from .types import Delta


class Growing(Protocol):
    """A reply that grows (`growing.GrowingReply`)."""

    def feed(self, ids: TokenIds) -> list[Delta]:
        """Take the next ids, and return what they settle."""
        ...

    def finish(self, message: Message) -> list[Delta]:
        """Return what is left of the finished reply."""
        ...


class LiveReply:
    """The deltas of one reply; a `TokenSink` of the calls that sample it, one after another."""

    __slots__ = (
        "_base", "_fed", "_grow", "_growing", "_num_fed", "_told", "_try", "_waiting", "deltas",
        "num_read",
    )  # fmt: skip

    def __init__(self, grow: Callable[[], Growing], told: Callable[[], None]) -> None:
        """Begin with nothing.

        Args:
            grow: makes a fresh reply that grows.
            told: called whenever there is something new to read.
        """
        self.deltas: list[Delta] = []
        self.num_read = 0
        """How many of them somebody has read."""
        self._grow, self._told = grow, told
        self._growing = grow()
        self._try: list[TokenIds] = []
        """Ids of the try under way."""
        self._fed: list[TokenIds] = []
        """All that the growing reply was fed, as it was cut."""
        self._waiting: list[TokenIds] = []
        """Ids of answered calls that it was not fed: nobody streamed them, and they are told with
        what follows, or with the whole reply."""
        self._base = self._num_fed = 0
        """How many deltas there were, and pieces fed, when the try began."""

    def begin(self, rid: str) -> bool:
        """Take the beginning of a try; False where somebody read of the one before it."""
        del rid
        if not self._try:
            return True
        if self.num_read > self._base:
            return False
        self._take_back()
        return True

    def add(self, ids: TokenIds) -> None:
        """Take the next sampled ids of the try under way."""
        if len(ids) == 0:
            return
        parts = [ids] if self._try else [*self._waiting, ids]
        self._try.append(ids)
        for part in parts:
            self._fed.append(part)
            self._push(self._growing.feed(part))

    def settle(self, ids: TokenIds) -> None:
        """Take what the call really brought: all of its ids, checked; none where it broke.

        Raises:
            EngineFault: somebody read what is not part of it.
        """
        streamed = sum(map(len, self._try))
        if streamed:
            told = np.concatenate(self._try)
            if streamed > len(ids) or not np.array_equal(told, ids[:streamed]):
                if self.num_read > self._base:
                    raise fault(
                        Detail.BAD_REPLY,
                        f"{streamed} tokens were streamed that are not those of the reply",
                    )
                self._take_back()
                streamed = 0
        if streamed:
            self._waiting = []
        if len(ids) > streamed:
            self._waiting.append(ids[streamed:])
        self._try = []
        self._base, self._num_fed = len(self.deltas), len(self._fed)

    def finish(self, message: Message) -> None:
        """Take the finished reply: what of it was not told yet is."""
        self._push(self._growing.finish(message))

    def _push(self, deltas: list[Delta]) -> None:
        if deltas:
            self.deltas += deltas
            self._told()

    def _take_back(self) -> None:
        """Be as if the try under way had not been."""
        del self.deltas[self._base :]
        del self._fed[self._num_fed :]
        self._try = []
        self._growing = self._grow()
        for ids in self._fed:  # cut as they were: what it says is what it said
            self._growing.feed(ids)
