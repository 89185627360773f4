"""One reply that comes in chunks: ids and log-probs gathered, whichever way the engine sends them.

Owns the rule of the two kinds of streams and the count at the end. Never does I/O, never parses
JSON, never repairs. Invariant: what leaves here is exactly as long as the engine says it sampled,
with a log-prob for every id; a stream that cannot be that is an `EngineFault`, and its tokens are
discarded. So a reply of which chunks are missing (a parser held them back) is never trained on.

    increments   every chunk holds what is new since the last one
    cumulative   every chunk holds everything so far

For engine clients that read streams; the clients of today ask for whole replies, because their
validation (`engines.reply`) is one function per reply.

Cost: a chunk costs what it adds, however much is held: of a cumulative one only what is new is
read, and the last id that was held; its beginning is compared once, at the end.

Axes: C sampled tokens of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from rollstream.sample import LogProbs, TokenIds

from .faults import Detail, fault


class StreamKind(StrEnum):
    """What a chunk holds."""

    INCREMENTS = "increments"
    CUMULATIVE = "cumulative"


class StreamedReply:
    """Gathers one reply.

    Example:
        >>> reply = StreamedReply(StreamKind.CUMULATIVE, "http://engine")
        >>> for chunk in chunks:
        ...     reply.add(chunk.ids, chunk.log_probs)
        >>> ids, log_probs = reply.finish(completion_tokens=chunk.completion_tokens)
    """

    def __init__(self, kind: StreamKind, engine: str) -> None:
        self._kind, self._engine = kind, engine
        self._ids: list[int] = []
        self._log_probs: list[float] = []
        self._last: tuple[Sequence[int], Sequence[float]] = ((), ())

    def add(self, ids: Sequence[int], log_probs: Sequence[float]) -> list[int]:
        """Take one chunk and return the ids that are new.

        Raises:
            EngineFault: ids and log-probs of different lengths, or a cumulative chunk that does
                not begin with what was held.
        """
        if len(ids) != len(log_probs):
            raise fault(
                Detail.LOGPROB_LENGTH_MISMATCH,
                f"{self._engine}: a chunk of {len(ids)} ids and {len(log_probs)} log-probs",
            )
        start = 0
        if self._kind is StreamKind.CUMULATIVE:
            start = len(self._ids)
            self._last = (ids, log_probs)
            if len(ids) < start or (start and ids[start - 1] != self._ids[-1]):
                raise self._broken(ids)
        new = list(ids[start:])
        self._ids += new
        self._log_probs += log_probs[start:]
        return new

    def finish(self, *, completion_tokens: int | None) -> tuple[TokenIds, LogProbs]:
        """Return what was gathered, held against the engine's own count.

        Args:
            completion_tokens: what the engine says it sampled; None where it does not say.

        Returns:
            [C] int32 and [C] float32.

        Raises:
            EngineFault: another count, a beginning that changed on the way, or a log-prob that is
                no number.
        """
        if completion_tokens is not None and completion_tokens != len(self._ids):
            raise fault(
                Detail.LOGPROB_LENGTH_MISMATCH,
                f"{self._engine}: the stream's chunks hold {len(self._ids)} ids, "
                f"completion_tokens is {completion_tokens}; ask for the reply without streaming",
            )
        if self._kind is StreamKind.CUMULATIVE:
            ids, given = self._last
            if list(ids) != self._ids or list(given) != self._log_probs:
                raise self._broken(ids)
        log_probs = np.array(self._log_probs, dtype=np.float32)
        if not np.isfinite(log_probs).all():
            raise fault(Detail.BAD_LOGPROB, f"{self._engine}: a streamed log-prob is no number")
        return np.array(self._ids, dtype=np.int32), log_probs

    def _broken(self, ids: Sequence[int]) -> Exception:
        return fault(
            Detail.BAD_REPLY,
            f"{self._engine}: a chunk of {len(ids)} ids does not go on from the {len(self._ids)} "
            "held; cumulative and incremental chunks in one stream?",
        )
