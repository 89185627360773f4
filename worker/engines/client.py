"""The seam between the pool and one engine, whatever protocol that engine speaks.

Owns what a pool may ask of an engine. Never does I/O, and implements nothing. Invariant: a client
makes one try per call; it never retries and never chooses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..sampling import Sampling
from ..types import Completion, RequestIds

Extension: TypeAlias = Callable[[], Awaitable[float]]
"""Asked when a call's time runs out, before its engine is told to stop: seconds more that it has,
e.g. because the engine is paused, or was meanwhile; 0 is none. It is asked again when those ran
out, and has as long for an answer as a connection has."""


@dataclass(frozen=True, slots=True)
class Look:
    """What an engine says of itself when it is asked without being loaded."""

    version: str | int | None
    """Its label of the weights that it serves; None where it does not say."""
    paused: bool = False
    """It is there, but samples nothing until it is told to go on."""


class EngineClient(Protocol):
    """One engine, by its base URL.

    Attributes:
        url: without a slash at the end.
        aborts: how many aborts were sent.
        failed_aborts: how many of them the engine did not take.
    """

    url: str
    aborts: int
    failed_aborts: int

    async def generate(
        self,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        rid: str,
        routing_key: str,
        version: int,
        timeout_s: float,
        salt: int,
        limit_s: float = float("inf"),
        extend: Extension | None = None,
    ) -> Completion:
        """Sample a continuation of `prompt` in one try.

        Args:
            prompt: all ids held so far.
            sampling: the effective parameters.
            rid: of this try, 32 hex digits.
            routing_key: sent with the request, for routers.
            version: the weight version current at dispatch; the reply's `dispatched_version`.
            timeout_s: after so long `extend` is asked, and then the engine told to stop; its reply
                to that is awaited for the client's own bounded time.
            salt: the weight version that the prefix cache is salted with.
            limit_s: nothing is awaited beyond it, whatever `extend` says.
            extend: see `Extension`.

        Raises:
            EngineFault: by the table in `faults`.
        """
        ...

    async def look(self) -> Look:
        """Ask the engine whether it is there, without loading it; also while it is paused.

        Raises:
            EngineFault: it did not answer, or not with 200.
        """
        ...

    async def score(self, body: bytes, *, timeout_s: float) -> bytes:
        """Return the raw answer to a request that samples nothing; never tried again.

        Raises:
            EngineFault: no answer in time, an error, or a protocol that has no such request.
        """
        ...

    async def abort(self, rid: str) -> bool:
        """Tell the engine to stop a request; whether it took that. Bounded, never raises."""
        ...

    def abort_soon(self, rid: str) -> None:
        """Abort in the background, for callers that cannot wait."""
        ...

    async def aclose(self) -> None:
        """Let aborts that are on their way go out."""
        ...
