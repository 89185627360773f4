"""A reply as its client gets it while it is sampled.

Owns the order of deltas: text as soon as it is certain (`worker.tito.settled`), the rest and the
calls once the whole reply was judged. Never parses a reply, never sends what could be taken back.
Invariant: the deltas, joined, are the final message, however the ids were cut; nothing of a call is
told before all of it was judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollstream.errors import RollstreamError
from rollstream.sample import Message, TokenIds

from ..tito.deltas import PIECE_CHARS, call_deltas
from ..tito.settled import CONTENT, REASONING, Kind, Nothing, Settler
from ..types import Renderer
from .types import Delta

_MAX_SHOWN_CHARS = 40


class StreamDiverged(RollstreamError):
    """What was streamed is no beginning of the reply: our bug; the stream can only end broken."""


@runtime_checkable
class _Settles(Protocol):
    """A renderer that can read a reply while it is sampled; others' replies come at the end."""

    def settler(self, window: TokenIds) -> Settler:
        """Return what reads one reply."""
        ...


class GrowingReply:
    """One reply under way.

    Example:
        >>> growing = GrowingReply(renderer, trajectory.window())
        >>> deltas = growing.feed(ids)  # as they come
        >>> deltas += growing.finish(reply_message(parsed, rule))  # once it ended
    """

    def __init__(
        self, renderer: Renderer, window: TokenIds, *, piece_chars: int = PIECE_CHARS
    ) -> None:
        """Begin a reply.

        Args:
            renderer: parses the whole of it.
            window: the tail of what the engine saw, as `Renderer.parse` is given it.
            piece_chars: of a call's arguments, in one delta.
        """
        self._settler = renderer.settler(window) if isinstance(renderer, _Settles) else Nothing()
        self._piece_chars = piece_chars
        self._sent: dict[Kind, list[str]] = {REASONING: [], CONTENT: []}

    def feed(self, ids: TokenIds | Sequence[int]) -> list[Delta]:
        """Return what the next sampled ids make certain; nothing raises, whatever they are.

        Shape: [any]
        """
        numbers: list[int] = np.asarray(ids).tolist() if len(ids) else []
        if numbers and min(numbers) < 0:
            self._settler = Nothing()  # no token: the reply will be found to be none
        settled = self._settler.feed(numbers)
        for kind, text in settled:
            self._sent[kind].append(text)
        return [{kind: text} for kind, text in settled]

    def finish(self, message: Message) -> list[Delta]:
        """Return the rest: reasoning, content, then the calls in order.

        Args:
            message: of all ids, as it is stored.

        Raises:
            StreamDiverged: it does not begin with what was sent.
        """
        deltas: list[Delta] = []
        for kind, pieces in self._sent.items():
            sent, whole = "".join(pieces), message.get(kind) or ""
            if not whole.startswith(sent):
                raise StreamDiverged(_difference(kind, sent, whole))
            if len(sent) < len(whole):
                deltas.append({kind: whole[len(sent) :]})
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        for index, call in enumerate(calls):
            deltas += call_deltas(call, index, piece_chars=self._piece_chars)
        return deltas


def _difference(kind: Kind, sent: str, whole: str) -> str:
    place = next((i for i, (a, b) in enumerate(zip(sent, whole, strict=False)) if a != b), None)
    at = min(len(sent), len(whole)) if place is None else place
    until = at + _MAX_SHOWN_CHARS
    return (
        f"{kind}: {sent[at:until]!r} was streamed at character {at}, where the reply has "
        f"{whole[at:until]!r}"
    )
