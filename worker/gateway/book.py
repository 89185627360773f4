"""The sessions of a worker by their keys.

Owns the keys: who may be called, and who was. Never runs a session. Invariant: a key is 128 random
bits and names one session for ever; a closed one leaves its key alone behind, and of those only so
many, so nothing here grows with the number of sessions.

Example:
    >>> book = Book()
    >>> session = book.open(given, rules)       # one per leased sample
    >>> url = gateway.base_url(session.key)     # the agent is given this
    >>> await session.close()                   # later requests: 410
    >>> samples = await session.collect()
"""

from __future__ import annotations

import secrets
from collections import OrderedDict

from ..types import GenerateInput
from .session import Session, SessionRules
from .types import ErrorKind, Refusal

_MAX_SHOWN_CHARS = 64


class Book:
    """Finds sessions by key; one for the whole worker."""

    def __init__(self, max_tombstones: int = 10_000) -> None:
        """Begin without sessions.

        Args:
            max_tombstones: keys of closed sessions that are remembered: their clients hear that
                the session is closed, and not that there was none.
        """
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._max_tombstones = max_tombstones

    def open(self, given: GenerateInput, rules: SessionRules) -> Session:
        """Return a new session for one attempt of one sample."""
        key = secrets.token_hex(16)
        session = Session(key, given, rules, on_closed=self._bury)
        self._open[key] = session
        return session

    def find(self, key: str) -> Session:
        """Return an open session.

        Raises:
            Refusal: there is none of this key, or it is closed.
        """
        session = self._open.get(key)
        if session is not None:
            return session
        shown = key[:_MAX_SHOWN_CHARS]
        if key in self._closed:
            raise Refusal(ErrorKind.GONE, f"session closed: session_id={shown}")
        raise Refusal(ErrorKind.NOT_FOUND, f"session not found: session_id={shown}")

    @property
    def num_open(self) -> int:
        """Sessions that may be called."""
        return len(self._open)

    @property
    def num_in_flight(self) -> int:
        """Requests under way, of all sessions."""
        return sum(session.num_in_flight for session in self._open.values())

    def _bury(self, key: str) -> None:
        if self._open.pop(key, None) is None:
            return
        self._closed[key] = None
        while len(self._closed) > self._max_tombstones:
            self._closed.popitem(last=False)
