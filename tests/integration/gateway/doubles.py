"""Doubles of what the server serves: sessions and exchanges that do exactly what a test says.

For tests of HTTP alone: what was committed and what was left is on record, in order.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from worker.gateway.types import ChatReply, ChatRequest, Delta, ErrorKind, Refusal
from worker.tito.ids import as_ids


def a_reply(content: str = "8", num_tokens: int = 1, **changes: Any) -> ChatReply:
    """Return a reply of some text."""
    known: dict[str, Any] = {
        "id": secrets.token_hex(16),
        "message": {"role": "assistant", "content": content},
        "finish": "stop",
        "ids": as_ids(range(num_tokens)),
        "log_probs": as_ids([0] * num_tokens).astype("float32"),
        "pieces": ["x"] * num_tokens,
        "num_prompt": 7,
        "num_cached": 0,
        "created_unix_s": time.time(),
    }
    return ChatReply(**known | changes)


@dataclass
class Acts:
    """What one exchange does."""

    texts: Sequence[str] = ("8",)
    refused: Refusal | Exception | None = None
    """Raised by `begin`."""
    breaks: Refusal | Exception | None = None
    """Raised behind the texts, in place of a reply."""
    commits: Refusal | Exception | None = None
    """Raised by `commit`."""
    waits: Callable[[int], Awaitable[None]] | None = None
    """Awaited before the text of this number; and before the reply, with their number."""
    begins: Callable[[], Awaitable[None]] | None = None
    """Awaited by `begin`."""
    reply: ChatReply | None = None


@dataclass
class Record:
    """What became of one exchange."""

    request: ChatRequest
    ends: list[str] = field(default_factory=list)
    """`commit` and `leave`, in order."""


class DoubleExchange:
    """One exchange."""

    def __init__(self, acts: Acts, record: Record) -> None:
        self._acts, self._record = acts, record
        self.reply_id = secrets.token_hex(16)

    async def deltas(self) -> AsyncIterator[Delta]:
        for number, text in enumerate(self._acts.texts):
            if self._acts.waits is not None:
                await self._acts.waits(number)
            yield {"content": text}
        if self._acts.breaks is not None:
            raise self._acts.breaks

    async def reply(self) -> ChatReply:
        if self._acts.waits is not None:
            await self._acts.waits(len(self._acts.texts))
        if self._acts.breaks is not None:
            raise self._acts.breaks
        return self._acts.reply or a_reply("".join(self._acts.texts), id=self.reply_id)

    def commit(self) -> None:
        if self._acts.commits is not None:
            raise self._acts.commits
        self._record.ends.append("commit")

    def leave(self) -> None:
        self._record.ends.append("leave")


class DoubleSession:
    """One session: the same acts for each request, or one after another."""

    def __init__(self, *acts: Acts) -> None:
        self.key = secrets.token_hex(16)
        self.acts = list(acts) or [Acts()]
        self.records: list[Record] = []
        self.bugs: list[Exception] = []

    def broke(self, error: Exception) -> None:
        self.bugs.append(error)

    async def begin(self, request: ChatRequest) -> DoubleExchange:
        acts = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
        if acts.begins is not None:
            await acts.begins()
        if acts.refused is not None:
            raise acts.refused
        self.records.append(Record(request))
        return DoubleExchange(acts, self.records[-1])

    async def count(self, request: ChatRequest) -> int:
        return 7

    @property
    def ends(self) -> list[list[str]]:
        """Return how each exchange ended."""
        return [record.ends for record in self.records]


class DoubleBook:
    """Sessions by key."""

    def __init__(self, *sessions: DoubleSession) -> None:
        self.sessions = {session.key: session for session in sessions}
        self.closed: set[str] = set()
        self.found = 0

    def find(self, key: str) -> DoubleSession:
        self.found += 1
        if key in self.closed:
            raise Refusal(ErrorKind.GONE, f"the session is closed: session_id={key}")
        if key not in self.sessions:
            raise Refusal(ErrorKind.NOT_FOUND, f"session not found: session_id={key}")
        return self.sessions[key]

    @property
    def num_open(self) -> int:
        return len(self.sessions) - len(self.closed)

    @property
    def num_in_flight(self) -> int:
        return sum(not r.ends for s in self.sessions.values() for r in s.records)


async def forever(_: int = 0) -> None:
    """Wait until cancelled."""
    await asyncio.Event().wait()
