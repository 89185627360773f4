"""The aggregators' acts: two of them read, take over, judge, judge late, and die in between."""

from __future__ import annotations

from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.reads import StreamEntry
from tests.integration.queue.model import Aggregator, WalkState

MAX_DELIVERIES = 3
"""As the service: an entry that killed two aggregators is not judged by a third."""


class AggregatorActs(WalkState):
    """Aggregators that hold entries between read and verdict."""

    def read_full(self) -> None:
        aggregator = self.rng.choice(self.aggregators)
        entries = self.bench.queue.read_full(
            aggregator.name, count=self.rng.randint(1, 4), block_s=0
        )
        self._got(aggregator, entries)

    def claim_full(self) -> None:
        """Take over everything, from a live one too: it was only slow."""
        aggregator = self.rng.choice(self.aggregators)
        entries = self.bench.queue.claim_full(aggregator.name, idle_s=0, count=10)
        self.stats["taken over"] += len(entries)
        self._got(aggregator, entries)

    def _got(self, aggregator: Aggregator, entries: list[StreamEntry]) -> None:
        self.look()
        for entry in entries:
            assert self.sight.pending["full"][entry.message_id] == (
                aggregator.name, entry.deliveries,
            )  # fmt: skip
        self.seen_entries = (self.seen_entries + entries)[-30:]
        if not self.chance(0.1):
            have = {entry.message_id for entry in aggregator.in_hand}
            aggregator.in_hand += [entry for entry in entries if entry.message_id not in have]

    def verdict(self) -> None:
        aggregator = self.rng.choice(self.aggregators)
        if self.seen_entries and self.chance(0.2):
            again = [entry for entry in self.seen_entries if self._is_full_again(entry)]
            self.judge_entry(self.rng.choice(again or self.seen_entries))
        elif aggregator.in_hand:
            self.judge_entry(aggregator.in_hand.pop(0))

    def _is_full_again(self, entry: StreamEntry) -> bool:
        """Whether the entry is of an earlier life of a group that is full now."""
        group = self.sight.groups.get(entry.group_index)
        full = group is not None and group.state == "full"
        return full and group is not None and group.text("full_id") != entry.message_id

    def judge_entry(self, entry: StreamEntry, *, keep: bool | None = None) -> None:
        keep = self.chance(0.6) if keep is None else keep
        reason = None if keep else DropReason.ZERO_STD
        if keep and entry.deliveries > MAX_DELIVERIES:
            reason = DropReason.FILTER_ERROR
        headers = dict.fromkeys(range(entry.n), b"judged") if self.chance(0.3) else {}
        group = self.sight.groups.get(entry.group_index)
        if group is None or group.n != entry.n:
            headers = {}
        headers = {i: h for i, h in headers.items() if group and group.members[i].done}
        call = calls.verdict(
            entry.group_index, entry.message_id, drop=reason, detail="why", headers=headers
        )
        self.stats[f"verdict {self.call(call)}"] += 1

    def aggregator_dies(self) -> None:
        """Let one die between read and verdict; its entries are pending until one takes over."""
        which = self.rng.randrange(len(self.aggregators))
        self.stats["aggregator died with entries"] += bool(self.aggregators[which].in_hand)
        self.aggregators[which] = Aggregator(self.name("a"))
