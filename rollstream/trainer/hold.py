"""What one trainer process holds of a run, and how it keeps its claim to it.

Owns the groups in hand (buffered, or in a batch that is handed out), the pulse (sweep, claim,
look at the run) and patience with a server that is away. Never waits for groups; not safe for
threads by itself: `GroupStream` brings the lock. Invariant: a group is in the buffer, in one
handed-out batch, or ended, and in no two of them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from redis.exceptions import ResponseError

from rollstream.batch import Batch
from rollstream.errors import CapacityTooSmall, DropReason, StreamError
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import RunInfo, StreamEntry
from rollstream.runs import OUTAGES, REFUSALS, damaged, is_damage, missing
from rollstream.trainer.intake import HeldGroup, Intake
from rollstream.trainer.lineage import Fenced, Lineage, RunMissing
from rollstream.wire import decode_prompt

T = TypeVar("T")
log = logging.getLogger("rollstream.stream")

MAX_WAIT_S = 0.5
"""Longest single wait for Redis: also how late an end or a takeover is noticed."""
GOODBYE_S = 0.5
"""How long a stream that closes waits for the server to hear it."""
PAUSE_S = 0.05
"""Between two tries while Redis is away."""
SWEEP_PAGES = 32
ACK_GROUPS = 64
"""Of one ack call, which ends them all before Redis answers anybody else."""


@dataclass(slots=True)
class HandedOut:
    """A batch that the user has and did not ack."""

    batch: Batch
    held: list[HeldGroup]


class Hold:
    """The state behind one `GroupStream`.

    Attributes:
        info: the run as of the last look.
        buffer: groups in hand that no batch has yet.
        handed_out: batches without an ack, by number.
    """

    def __init__(
        self,
        queue: BlockingQueue,
        info: RunInfo,
        *,
        url: str,
        reopen_s: float,
        text: bool,
        open_queue: Callable[[], BlockingQueue],
    ) -> None:
        """Hold nothing yet.

        Args:
            queue: of the run.
            info: the run.
            url: for messages.
            reopen_s: how long a run that vanished may take to be opened again.
            text: fetch response texts.
            open_queue: connects to the same run once more, for what must not wait here.
        """
        self.queue, self.info, self.url, self.reopen_s = queue, info, url, reopen_s
        self.open_queue = open_queue
        self.lineage = Lineage(queue)
        self.lineage.fingerprint = info.fingerprint
        self.held: set[int] = set()
        self.buffer: deque[HeldGroup] = deque()
        self.handed_out: dict[int, HandedOut] = {}
        self.intake = Intake(queue, self.lineage, self.held, text=text)
        self.intake.rules = info.envs
        self.aborted_here = False
        self.paused_here = False
        """This process has paused the run, and not resumed it yet."""
        self.is_closed = False
        self.num_acked = 0
        self._num_batches = 0
        self._num_rollbacks = 0
        self._next_pulse_mono_s = 0.0

    def close(self) -> None:
        """Close every connection, and call nothing any more: a call would open one anew."""
        is_first, self.is_closed = not self.is_closed, True
        if is_first:
            with contextlib.suppress(*OUTAGES, ResponseError), self.queue.within(GOODBYE_S):
                self.lineage.attend(leaving=True)
        self.queue.close()

    def attend(self, wait_s: float = 0.0) -> None:
        """Say whether this trainer waits; what cannot be said now is said the next time."""
        if not self.is_closed:
            with contextlib.suppress(*OUTAGES, ResponseError):
                self.lineage.attend(wait_s=wait_s)

    def refuse_if_closed(self) -> None:
        """Raise StreamError where the stream was closed."""
        if self.is_closed:
            raise StreamError("the stream was closed")

    # --- the claim -----------------------------------------------------------------------------
    def pulse(self) -> None:
        """Keep the queue clock going and see what became of the run; often enough, not always.

        Raises:
            RunMissing: there is no such run.
            ConsumerTaken: a later trainer took the run over.
        """
        now = time.monotonic()
        if now < self._next_pulse_mono_s:
            return
        self.lineage.check()
        if self.lineage.rollbacks != self._num_rollbacks:
            self._num_rollbacks = self.lineage.rollbacks
            self.intake.tell_again(self.held)
        self.sweep(SWEEP_PAGES)
        info = self.queue.info()
        if info is None:
            raise RunMissing(f"Redis has no run {self.queue.run!r}")
        self.info, self.intake.rules = info, info.envs
        self._end_own_pause(info)
        self.lineage.fold()
        self._next_pulse_mono_s = now + min(MAX_WAIT_S, info.lease_s / 4)

    def _end_own_pause(self, info: RunInfo) -> None:
        """End a pause of ours that is over here, and not in Redis.

        It was away when the pause was to be ended, or has forgotten that it was.
        """
        consumer = self.lineage.consumer
        if info.pause_by == consumer and not self.paused_here:
            self.queue.call(calls.by(consumer, calls.resume(consumer)))

    def pulse_soon(self) -> None:
        """Look at everything again with the next pulse: something went wrong."""
        self._next_pulse_mono_s = 0.0
        self.intake.page_again()

    def mark_paused(self, here: bool) -> None:
        """Note whether this process has the run paused; what was seen before says it no more."""
        self.paused_here = here
        self._next_pulse_mono_s = 0.0

    def is_complete(self) -> bool:
        """Return whether no prompt is missing: each is ended or in hand, as Redis says right now.

        Whoever says that all prompts are enqueued may have said it to a server that then forgot
        some of them, or its answer may be of a history that this trainer has abandoned.

        Raises:
            RunMissing: there is no such run.
            ConsumerTaken: a later trainer took the run over.
        """
        ended = self.lineage.snapshot()
        if self.lineage.rollbacks != self._num_rollbacks:
            self.pulse_soon()
            return False
        return ended.first_missing(self.info.total, besides=self.held) is None

    def sweep(self, pages: int) -> bool:
        """Sweep until nothing is left or `pages` are done; whether something may be left."""
        return all(self.queue.call(calls.sweep()).more for _ in range(pages))

    def patiently(self, action: Callable[[], T], timeout_s: float) -> T:
        """Run `action`, again through outages, rollbacks and a run that is being opened anew.

        Raises:
            ConsumerTaken: a later trainer took the run over.
            RunLost: there was no such run for `timeout_s`.
            StreamError: Redis did not answer for `timeout_s`, or the stream was closed.
        """
        limit = time.monotonic() + timeout_s
        while True:
            self.refuse_if_closed()
            trouble: Exception | None = None
            try:
                with self.queue.within(limit - time.monotonic()):
                    return action()
            except REFUSALS as error:
                raise StreamError(f"Redis refuses this client: {error}") from error
            except (Fenced, *OUTAGES) as error:
                trouble = self._settled(error)
            except RunMissing:
                pass
            except ResponseError as error:
                if is_damage(error):
                    raise damaged(self.queue, self.url, error) from error
                raise
            if time.monotonic() >= limit:
                raise missing(self.queue, self.url, timeout_s, trouble) from trouble
            self.pulse_soon()
            time.sleep(PAUSE_S)

    def _settled(self, error: Exception) -> Exception | None:
        """After `Fenced`, find out why: taken over (raised), or told again (None)."""
        if not isinstance(error, Fenced):
            return error
        try:
            self.lineage.check()
        except OUTAGES as outage:
            return outage
        except (RunMissing, Fenced):
            return None
        return error

    # --- groups --------------------------------------------------------------------------------
    def keep(self, taken: list[HeldGroup]) -> None:
        """Add groups that were taken in hand."""
        self.held.update(held.group.group_index for held in taken)
        self.buffer.extend(taken)

    def page_again(self) -> None:
        """Read the stream from its start, as after a wait in which nothing came.

        Redis may have forgotten something without a trace: that it delivered what is in hand.
        """
        self.intake.tell_again(self.held)

    def page(self, wanted: int) -> bool:
        """Read on in the pending list until it ends or `wanted` groups wait; whether any came."""
        before = len(self.buffer)
        while self.intake.is_paging and len(self.buffer) < wanted:
            self.keep(self.intake.take_pending(wanted - len(self.buffer)))
        return len(self.buffer) > before

    @property
    def is_paused_here(self) -> bool:
        """Whether nothing ends because this process wants it so."""
        return self.paused_here and self.info.state == "paused"

    def drop_stale(self) -> None:
        """Give up what got stale here: the version may have moved on since Redis judged it.

        Redis drops it or begins it anew, by the run's `on_stale`; either way it is not held any
        more. What a batch has that is handed out stays the trainer's.
        """
        bound = self.info.max_stale
        if bound < 0 or self.info.on_stale == "deliver":
            return
        for held in [h for h in self.buffer if h.staleness(self.lineage.version) > bound]:
            self.intake.retire(held.group.group_index, DropReason.STALE)
            self.intake.num_stale += 1
            self.held.discard(held.group.group_index)
            self.buffer.remove(held)

    def hand_out(self, groups: int, ack_through: Callable[[Batch], None]) -> Batch:
        """Return a batch of the first groups that wait here."""
        self._num_batches += 1
        chosen = [self.buffer.popleft() for _ in range(min(groups, len(self.buffer)))]
        for held in chosen:
            held.stamp(self.lineage.version, time.time())
        batch = Batch([h.group for h in chosen], self._num_batches, ack_through=ack_through)
        self.handed_out[batch.number] = HandedOut(batch, chosen)
        return batch

    def refuse_too_large(self, groups: int) -> None:
        """Refuse a batch for which there is not capacity enough, whatever is acked.

        Raises:
            CapacityTooSmall: with the numbers.
        """
        if groups > self.info.capacity:
            raise CapacityTooSmall(groups, self.info.capacity, len(self.held))

    def has_handed_out(self, batch: Batch) -> bool:
        """Return whether this very batch is out and not acked."""
        out = self.handed_out.get(batch.number)
        return out is not None and out.batch is batch

    def ack(self, ids: list[int]) -> None:
        """Tell Redis that groups were trained on.

        Raises:
            Fenced: this trainer is not the run's consumer.
            ConsumerTaken: a later trainer took the run over.
        """
        self.lineage.refuse_if_taken()
        for start in range(0, len(ids), ACK_GROUPS):
            part = [str(i) for i in ids[start : start + ACK_GROUPS]]
            if self.queue.call(calls.ack(self.lineage.consumer, part)) == ["taken"]:
                raise Fenced

    def forget(self, batch: Batch) -> None:
        """Count the groups of an acked batch as ended."""
        ids = batch.group_indexes
        self.lineage.ended(ids)
        self.held.difference_update(ids)
        del self.handed_out[batch.number]
        self.num_acked += len(ids)

    def let_go(self, group_index: int) -> bool:
        """Forget a group that waits in the buffer, for it ended or runs again; whether it did."""
        waiting = [held for held in self.buffer if held.group.group_index == group_index]
        for held in waiting:
            self.buffer.remove(held)
            self.held.discard(group_index)
        return bool(waiting)

    def take_back(self, batch: Batch) -> None:
        """Put a batch that nobody trained on back to the front."""
        out = self.handed_out.pop(batch.number)
        self.buffer.extendleft(reversed(out.held))

    def oldest(self) -> str:
        """Return a sentence on the lowest id that is not terminal: nearly always the oldest."""
        frontier = self.info.frontier
        group = self.queue.headers([StreamEntry("", str(frontier), 0)], prompts=True)[0]
        if group.prompt is None:
            return ""
        age_s = time.time() - decode_prompt(group.prompt, frontier, 0).enqueued_unix_s
        return f"the oldest group, {frontier}, is {group.state} and {age_s:.0f} s old"
