"""What the parts of the gateway say to each other: a request, a reply, a refusal.

Owns the records and the seams between server, dialects and sessions. Never does I/O, never renders.
Invariant: a message is OpenAI's form (`rollstream.sample.Message`) whatever the client spoke, and
the reply that is stored is the very message that the client was given.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from rollstream.sample import LogProbs, Message, TokenIds

Delta: TypeAlias = dict[str, Any]
"""A piece of a reply: `{"reasoning_content": …}`, `{"content": …}` or `{"tool_calls": [one entry
with its index]}` (`worker.tito.deltas`)."""
Event: TypeAlias = tuple[str, dict[str, Any] | str]
"""One server-sent event: (its name, "" for none; its data, text as it is)."""


class ErrorKind(StrEnum):
    """Why a request is not answered; each dialect has words and a status of its own for it."""

    INVALID = "invalid"
    """400: the request itself; the same request never succeeds."""
    TOO_LONG = "too_long"
    """400: the context has no room for a token."""
    NOT_FOUND = "not_found"
    """404"""
    CONFLICT = "conflict"
    """409: what it wants to continue cannot be continued."""
    GONE = "gone"
    """410: the session is closed."""
    TOO_LARGE = "too_large"
    """413: its body."""
    BUSY = "busy"
    """429: too many requests of this session at once."""
    ENGINE = "engine"
    """503: no engine answered sensibly. The sample is tried again if it ends so."""
    INTERNAL = "internal"
    """500: our bug."""


STATUS: dict[ErrorKind, int] = {
    ErrorKind.INVALID: 400,
    ErrorKind.TOO_LONG: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.CONFLICT: 409,
    ErrorKind.GONE: 410,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.BUSY: 429,
    ErrorKind.ENGINE: 503,
    ErrorKind.INTERNAL: 500,
}
RETRYABLE = frozenset({ErrorKind.BUSY, ErrorKind.ENGINE})
"""Only these are worth another try; SDKs are told so by `x-should-retry`."""


class Refusal(Exception):
    """A request that is not answered, with what a client is told.

    Attributes:
        kind: of the error.
        message: what is wrong and what to do.
        param: the field of the request, "" for none.
    """

    def __init__(self, kind: ErrorKind, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.param = kind, message, param


class CallRule(StrEnum):
    """What becomes of tool calls in a reply."""

    AUTO = "auto"
    """They are given out as calls."""
    NONE = "none"
    """They stay text."""


@dataclass(slots=True)
class ChatRequest:
    """What a client asks for, whatever it spoke."""

    messages: list[Message]
    """The conversation; behind `continues`, only what is new."""
    tools: list[Message] | None = None
    """OpenAI's form: {"type": "function", "function": {…}}."""
    model: str = ""
    """As the client called it; goes into the reply."""
    max_tokens: int | None = None
    """Lowers the cap of this reply; never raises it."""
    call_rule: CallRule = CallRule.AUTO
    max_calls: int | None = None
    """Tool calls of this reply that are given out as calls (1 without parallel calls)."""
    stream: bool = False
    log_probs: bool = False
    """The reply is to say them."""
    continues: str = ""
    """Id of an earlier reply of this session whose whole conversation stands in front."""
    retry: int = 0
    """How often the client's SDK sent this before (`x-stainless-retry-count`)."""
    retry_key: str = ""
    """The same for all tries of one request, where the client says so (`idempotency-key`)."""
    pinned: tuple[str, ...] = ()
    """Parameters that were asked for and are the run's own all the same."""
    ignored: tuple[str, ...] = ()
    """Fields that nobody here knows."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the dialect wants to have again when it writes the reply."""


@dataclass(slots=True)
class ChatReply:
    """What an engine sampled for one request, ready to be told."""

    id: str
    """32 hex, unique; dialects put their prefix before it."""
    message: Message
    """As stored: role, content (text, "" for none), reasoning_content, tool_calls (where there are
    any)."""
    finish: str
    """`stop`, `tool_calls` or `length`."""
    ids: TokenIds
    """[C] all that was sampled."""
    log_probs: LogProbs
    """[C]"""
    pieces: Sequence[str]
    """[C] what each id stands for (`Renderer.pieces`), where log-probs were asked for; else empty.
    Half a character is surrogates (PEP 383)."""
    num_prompt: int
    num_cached: int
    created_unix_s: float
    stop_text: str = ""
    """The stop string that ended it, where one did."""
    num_reasoning: int | None = None
    """Of `ids`, those that were reasoning; None where that cannot be told."""


class Exchange(Protocol):
    """One request of a client under way: begun by `Session.begin`, ended by one of the last three.

    Several may stand for one call of an engine (a retry that joins its first try).
    """

    @property
    def reply_id(self) -> str:
        """Id that the reply will have."""
        ...

    def deltas(self) -> AsyncIterator[Delta]:
        """Yield the reply as it is sampled; ends once all of it was yielded.

        Raises:
            Refusal: it broke.
        """
        ...

    async def reply(self) -> ChatReply:
        """Return the whole reply, as soon as it is there; not committed yet.

        Raises:
            Refusal: there is none.
        """
        ...

    def commit(self) -> None:
        """Make the reply part of the conversation: called just before its last byte is given out.

        Raises:
            Refusal: the session was closed meanwhile.
        """
        ...

    def leave(self) -> None:
        """End without a commit: the client is gone before its reply was given out.

        The engine is told to stop; a request without stream waits a moment for its retry first.
        """
        ...


class Streamer(Protocol):
    """Writes one reply as events of a dialect."""

    def begin(self) -> list[Event]:
        """Return what is sent at once."""
        ...

    def delta(self, delta: Delta) -> list[Event]:
        """Return a piece of the reply."""
        ...

    def end(self, reply: ChatReply) -> list[Event]:
        """Return the end, usage included."""
        ...

    def error(self, refusal: Refusal) -> list[Event]:
        """Return how a stream that began ends broken."""
        ...

    def ping(self) -> Event | None:
        """Return what keeps a silent connection open; None is a comment line."""
        ...


class Dialect(Protocol):
    """One chat API.

    One that can count a prompt's tokens without a call has `async count(session, body) -> dict`
    too, which is served below its path as `count_tokens`.
    """

    name: str
    paths: tuple[str, ...]
    """Of its requests, without a slash in front (`chat/completions`), below a session's URL."""
    cannot_carry: Mapping[str, str]
    """{what it or we cannot express: what becomes of it}; docs/agents.md shows it."""

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ChatRequest:
        """Translate a request; header names are in lower case.

        Raises:
            Refusal: says which field, and what to do.
        """
        ...

    def reply(self, request: ChatRequest, reply: ChatReply) -> dict[str, Any]:
        """Return the body of a reply without stream."""
        ...

    def streamer(self, request: ChatRequest, reply_id: str, created_unix_s: float) -> Streamer:
        """Return a writer of one stream."""
        ...

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of an error, in the dialect's shape."""
        ...
