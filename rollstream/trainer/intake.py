"""How groups come from Redis into a trainer's hands, a few of them a round trip.

Owns the place in the stream, how much one round trip takes, and the filter against what the
trainer holds or has ended. Never waits for anything but new entries, and never acks what was
not ended before. Invariant: a group leaves here at most once in the life of this process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollstream.errors import DropReason, WireError, WireTooNew
from rollstream.group import INDEX_STRIDE, EnvRule, FinishedGroup
from rollstream.queue import calls
from rollstream.queue.fetch import MAX_TRIP_BYTES, weight_of
from rollstream.trainer.assemble import assemble
from rollstream.trainer.lineage import Fenced, Lineage

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue
    from rollstream.queue.reads import StoredGroup, StreamEntry

log = logging.getLogger("rollstream.stream")

PAGE = 64
"""Entries of one read: references, each a few dozen bytes."""


def _index_of(entry: StreamEntry) -> int | None:
    """Return the id that an entry refers to; None where nothing of ours has written it."""
    gid = entry.group_index
    # The length first: reading a number of a million digits takes a while.
    if len(gid) < 20 and gid.isdecimal() and gid.isascii() and 1 <= entry.n <= INDEX_STRIDE:
        return int(gid)
    return None


@dataclass(slots=True)
class HeldGroup:
    """A group that the trainer holds, with what its hand-out needs."""

    group: FinishedGroup
    oldest_version: int | None
    ready_unix_s: float

    def staleness(self, version: int) -> int:
        """Return how far `version` is ahead of the oldest sampled token; 0 where none is known."""
        return 0 if self.oldest_version is None else max(0, version - self.oldest_version)

    def stamp(self, version: int, now_unix_s: float) -> None:
        """Write on the group what is known only when it is handed out."""
        self.group.staleness = self.staleness(version)
        if self.ready_unix_s:
            self.group.spans["ready_wait"] = [max(0.0, now_unix_s - self.ready_unix_s)]


class Intake:
    """Reads entries of `ready`, marks their groups as delivered, and decodes them."""

    def __init__(
        self, queue: BlockingQueue, lineage: Lineage, held: Set[int], *, text: bool
    ) -> None:
        self._queue, self._lineage, self._held, self.text = queue, lineage, held, text
        self._untold: set[int] = set()
        """Groups in hand of which Redis may have forgotten that they were delivered."""
        self._cursor: str | None = "0"
        self.rules: Mapping[str, EnvRule] = {}
        self.num_stale = 0
        """Groups that Redis dropped as stale when they were about to be handed out."""
        self.num_unreadable = 0
        """Groups that were given up because their records are garbage."""

    @property
    def is_paging(self) -> bool:
        """Whether the stream is not read to its end yet."""
        return self._cursor is not None

    def page_again(self) -> None:
        """Read the stream from its start: an answer may have been lost on its way."""
        self._cursor = "0"

    def tell_again(self, group_indexes: Iterable[int]) -> None:
        """Read the stream from its start, and say of these groups that they are in hand."""
        self._untold.update(group_indexes)
        self.page_again()

    def read_new(self, wanted: int, block_s: float) -> list[StreamEntry]:
        """Wait for entries that nobody was given yet."""
        return self._queue.read_ready(count=min(wanted, PAGE), block_s=block_s)

    def first_part(self, entries: Sequence[StreamEntry], wanted: int) -> int:
        """Return how many entries, from the first on, one `take` should get; at least one.

        Their groups fill one round trip, and no more than `wanted` of them are new here.
        """
        fresh, total = 0, 0
        for place, entry in enumerate(entries):
            group_index = _index_of(entry)
            if group_index is None or self._is_known(group_index):
                continue
            weight = weight_of(entry)
            total += MAX_TRIP_BYTES if weight is None else weight
            if fresh and (fresh >= wanted or total > MAX_TRIP_BYTES):
                return place
            fresh += 1
        return len(entries)

    def _is_known(self, group_index: int) -> bool:
        return group_index in self._held or group_index in self._lineage.terminal

    def take_pending(self, wanted: int) -> list[HeldGroup]:
        """Return what waits for this run's trainer, given to it before or not: a part of it."""
        if self._cursor is None:
            return []
        entries = self._queue.pending_ready(self._cursor, count=PAGE)
        if not entries:
            self._cursor = None
            return []
        part = entries[: self.first_part(entries, wanted)]
        taken = self.take(part)
        self._cursor = part[-1].message_id
        return taken

    def take(self, entries: list[StreamEntry]) -> list[HeldGroup]:
        """Take entries in hand, but for what is held or ended; the latter are acked again.

        Raises:
            Fenced: this trainer is not the run's consumer; the entries stay pending.
            WireTooNew: the records are of a newer wire version; the groups stay pending.
        """
        fresh: dict[int, StreamEntry] = {}
        ended: list[str] = []
        again: list[StreamEntry] = []
        for entry in entries:
            group_index = _index_of(entry)
            if not entry.group_index:
                continue  # a page was read over it: a line each time would fill the log
            if group_index is None:
                log.error("foreign entry ignored", extra={"entry": str(entry)[:200]})
            elif group_index in self._lineage.terminal:
                ended.append(entry.group_index)
            elif group_index not in self._held:
                fresh[group_index] = entry
            elif group_index in self._untold:
                # Redis may think that nobody has it: then the run would never be over.
                again.append(entry)
        self._untold &= self._held
        if again:
            self._deliver_again(again)
        if ended:
            # Acked before a rollback, or of the checkpoint: that is a fact, so it is told again.
            answers = self._queue.call(calls.ack(self._lineage.consumer, ended))
            if answers == ["taken"]:
                raise Fenced
        return self._fetch(list(fresh.values())) if fresh else []

    def _deliver_again(self, entries: list[StreamEntry]) -> None:
        """Say once more that groups are in hand, of those that Redis does not know it of.

        (Of the others nothing is said: each delivery judges staleness anew.)
        """
        stored = self._queue.headers(entries)
        self._untold.difference_update(
            int(group.group_index) for group in stored if group.state == "delivered"
        )
        ready = [group.group_index for group in stored if group.state == "ready"]
        if ready and self._queue.call(calls.deliver(self._lineage.consumer, ready)) == ["taken"]:
            raise Fenced

    def _fetch(self, entries: list[StreamEntry]) -> list[HeldGroup]:
        delivery = self._queue.deliver_and_fetch(self._lineage.consumer, entries, text=self.text)
        if delivery.taken:
            raise Fenced
        taken: list[HeldGroup] = []
        for answer, stored in zip(delivery.answers, delivery.groups, strict=True):
            if answer == "stale":
                self.num_stale += 1
            elif stored is not None:
                held = self._decode(stored)
                if held is not None:
                    taken.append(held)
        return taken

    def _decode(self, stored: StoredGroup) -> HeldGroup | None:
        try:
            group, oldest = assemble(stored, self.rules)
        except WireTooNew:
            raise
        except WireError as error:
            # Waiting for it to become readable would stop the trainer for ever.
            log.error("unreadable group dropped", extra={"error": str(error)})
            self.num_unreadable += 1
            self.retire(int(stored.group_index), DropReason.CUSTOM)
            return None
        return HeldGroup(group, oldest, stored.ready_unix_s)

    def retire(self, group_index: int, reason: DropReason) -> None:
        """Drop a group that is in hand.

        Raises:
            Fenced: this trainer is not the run's consumer.
        """
        answer = self._queue.call(calls.retire(self._lineage.consumer, str(group_index), reason))
        if answer == "taken":
            raise Fenced
