"""SGLang's reply as a stream: which ids are new in an event, and the whole reply of all of them.

Owns how SGLang streams `/generate`. Never believes a count without the ids that it counts, and
never validates a whole reply (`reply` does). Invariant: `joined` is the body that SGLang would have
answered without a stream.

Two ways, which no field tells apart but the counts do. Cumulative (its default): each event has all
ids and log-probs so far, and the last one is the whole reply. With `--incremental-streaming-output`
each has the new ones, while `completion_tokens` goes on counting all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ..faults import Detail, fault
from .checks import UNREADABLE, check_prompt
from .streams import NOTHING, Joiner, changed, decode_event, no_finish, odd_event

if TYPE_CHECKING:
    from .http_base import Sent

MIN_INTERVAL = 16
MAX_EVENTS = 32


def interval_of(max_new_tokens: int) -> int:
    """Return how many new tokens one event is to have, at least (SGLang's `stream_interval`).

    Each event says all log-probs again: 32 of them are 16 times the bytes of the reply.
    """
    return max(MIN_INTERVAL, max_new_tokens // MAX_EVENTS)


class _Meta(msgspec.Struct, gc=False):
    """What an event is told apart by; its log-probs are skipped, not decoded."""

    id: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: msgspec.Raw = msgspec.Raw()


class _Event(msgspec.Struct, gc=False):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: msgspec.Raw = msgspec.Raw()


class _MetaLogProbs(msgspec.Struct, gc=False):
    output_token_logprobs: list[msgspec.Raw] | None = None


class _LogProbs(msgspec.Struct, gc=False):
    meta_info: _MetaLogProbs


_EVENT = msgspec.json.Decoder(_Event)
_LOG_PROBS = msgspec.json.Decoder(_LogProbs)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()


class SglangJoiner(Joiner):
    """Of one reply of `/generate`."""

    def __init__(self, sent: Sent) -> None:
        super().__init__(sent)
        self._is_delta: bool | None = None
        """None until the second event tells."""
        self._first = self._final = b""
        """The events that are kept: the first, as long as it is not known how to read it."""
        self._end = _Event()
        self._log_probs: list[bytes] = []
        """Where events are incremental: the entries so far, as JSON."""

    def add(self, data: bytes) -> list[int]:
        """Take an event, and return the ids that are new in it (`Joiner.add`)."""
        event = self._read(data)
        assert event.meta_info is not None
        if bytes(event.meta_info.finish_reason) not in NOTHING:
            self.is_whole, self._end, self._final = True, event, data
            return []
        given, total = event.output_ids or [], event.meta_info.completion_tokens
        num = len(self.ids)
        if total in (None, len(given)) and not (num and self._is_delta):
            if given[:num] != self.ids:
                raise changed(self._sent.engine, num)
            new = given[num:]
            self._is_delta = False if num else None
        elif total == num + len(given) and self._is_delta is not False:
            self._log_probs += [*self._entries_of_first(), *_entries(data)]
            self._is_delta, new = True, given
        else:
            raise fault(
                Detail.LOGPROB_LENGTH_MISMATCH,
                f"{self._sent.engine}: {len(given)} ids in an event behind {num}, "
                f"completion_tokens {total}",
            )
        self._first = b"" if num else data
        self.ids += new
        return new

    def _read(self, data: bytes) -> _Event:
        engine = self._sent.engine
        event = decode_event(_EVENT, data, engine)
        if event.meta_info is None or self.is_whole:
            raise odd_event(data, engine, is_late=self.is_whole)
        said = event.meta_info.id
        if said is not None and said != self._sent.rid:
            raise fault(
                Detail.BAD_REPLY,
                f"{engine} answered request {self._sent.rid} with the reply of {said}",
            )
        check_prompt(event.meta_info.prompt_tokens, self._sent.num_prompt, engine)
        return event

    def _entries_of_first(self) -> list[bytes]:
        """Return the log-probs of the first event, which looks alike in both ways, once."""
        first, self._first = self._first, b""
        return _entries(first) if first else []

    def joined(self) -> bytes:
        """Return the reply as SGLang would have answered it without a stream (`Joiner.joined`)."""
        if not self.is_whole:
            raise no_finish(self._sent.engine)
        meta, num = self._end.meta_info, len(self.ids)
        given = self._end.output_ids or []
        total = None if meta is None else meta.completion_tokens
        if num == 0 or self._is_delta is False or total in (None, len(given)):
            return self._final
        entries = _entries(self._final)
        if len(entries) == total:
            # A request that is aborted while it waits again (retracted) says all log-probs, and of
            # its ids the last one.
            return _with(self._final, None, entries)
        if self._is_delta is None and num + len(given) != total:
            return self._final
        entries = [*self._log_probs, *self._entries_of_first(), *entries]
        return _with(self._final, [*self.ids, *given], entries)


def _entries(data: bytes) -> list[bytes]:
    """Return the log-probs of an event, each as it stands there.

    Raises:
        EngineFault: they are no list.
    """
    try:
        found = _LOG_PROBS.decode(data).meta_info.output_token_logprobs
    except UNREADABLE as error:
        raise fault(Detail.BAD_REPLY, f"log-probs of a stream: {error}") from None
    return [bytes(entry) for entry in found or ()]


def _with(data: bytes, ids: list[int] | None, entries: list[bytes]) -> bytes:
    """Return an event with all ids (None leaves them to the log-probs) and log-probs in it."""
    fields = _FIELDS.decode(data)
    meta = _FIELDS.decode(fields["meta_info"])
    meta["output_token_logprobs"] = msgspec.Raw(b"[%b]" % b",".join(entries))
    fields.pop("text", None)  # of this event alone, and nobody reads it
    fields.pop("output_ids", None)
    whole = {**fields, "meta_info": meta}
    return _ENCODER.encode(whole if ids is None else {**whole, "output_ids": ids})
