"""One wait for one batch: the clock of stalls, and the judgement of every idle moment.

Owns how long nothing moved and what that means. Never holds groups: `Hold` does, so whatever ends
a wait loses nothing. Invariant: every single block is half a second at most, and between two of
them the run was swept, the claim checked, and the stream read again where it might hold more.
"""

from __future__ import annotations

import logging
import time

from redis.exceptions import ResponseError

from rollstream.errors import StreamError
from rollstream.queue.reads import StreamEntry
from rollstream.runs import OUTAGES, REFUSALS, damaged, is_damage, missing
from rollstream.trainer import ends
from rollstream.trainer.hold import MAX_WAIT_S, PAUSE_S, Hold
from rollstream.trainer.lineage import Fenced, RunMissing

log = logging.getLogger("rollstream.stream")

REPAGE_S = 1.0
"""A wait that was idle for this long reads the stream again from its start."""
SAY_EVERY_S = 0.5
WAIT_BELIEVED_S = 1.5
"""For so long a trainer is seen to wait that said so and says no more (it was killed)."""
MIN_PATIENCE_S = 1.0
"""However late it is: a busy server that answers is not silent."""
TROUBLES = (Fenced, RunMissing, ResponseError, *OUTAGES)
_NO_GROUP = "NOGROUP"


class Wait:
    """Alternate `step` (needs the stream's lock) and `block` (must not have it) until it ends.

    Attributes:
        over: the run is over; a last, short batch may be left in the buffer.
    """

    def __init__(self, hold: Hold, groups: int, timeout_s: float) -> None:
        self._hold, self._groups, self._timeout_s = hold, groups, timeout_s
        self.over = False
        self._entries: list[StreamEntry] = []
        self._moved_mono_s = self._paged_mono_s = time.monotonic()
        self._told_mono_s = self._moved_mono_s
        self._stuck_mono_s: float | None = None
        self._lost_mono_s: float | None = None
        self._num_ended: int | None = None
        self._said_mono_s: float | None = None
        # With all prompts enqueued the run may be over already: look before the first block.
        self._idle = hold.info.done

    def step(self) -> bool:
        """Do everything that needs the lock; whether a full batch waits in the buffer.

        Raises:
            StreamError: how the wait ends otherwise, see `GroupStream.batches`.
        """
        try:
            with self._hold.queue.within(self._patience_s()):
                ready = self._advance()
                if self._said_mono_s is not None and (ready or self.over):
                    self._said_mono_s = None
                    self._hold.attend()
        except REFUSALS as error:
            raise StreamError(f"Redis refuses this client: {error}") from error
        except TROUBLES as error:
            self._outlast(error)
            return False
        self._lost_mono_s = None
        return ready

    def block(self) -> None:
        """Wait a moment for new entries."""
        hold = self._hold
        if self._entries or hold.intake.is_paging:
            return
        wanted = self._groups - len(hold.buffer)
        block_s = min(MAX_WAIT_S, self._timeout_s)
        try:
            with hold.queue.within(block_s + self._patience_s()):
                self._say_waiting()
                self._entries = hold.intake.read_new(wanted, block_s)
        except REFUSALS as error:
            raise StreamError(f"Redis refuses this client: {error}") from error
        except TROUBLES as error:
            self._outlast(error)
        self._idle = not self._entries

    def _say_waiting(self) -> None:
        """Say it for those who watch the run; after an error it is believed a bit longer."""
        now = time.monotonic()
        if self._said_mono_s is None or now - self._said_mono_s >= SAY_EVERY_S:
            self._said_mono_s = now
            self._hold.attend(WAIT_BELIEVED_S)

    def _patience_s(self) -> float:
        """Return how long an answer is waited for: a silent server is one that is away."""
        left_s = self._timeout_s - (time.monotonic() - self._moved_mono_s)
        return max(MIN_PATIENCE_S, left_s)

    def _advance(self) -> bool:
        hold = self._hold
        hold.pulse()
        self._refuse()
        if self.over:
            return False
        if self._entries:
            # A round trip's worth: others may have the lock before the next.
            end = hold.intake.first_part(self._entries, self._groups)
            part, self._entries = self._entries[:end], self._entries[end:]
            hold.keep(hold.intake.take(part))
            self._moved()
        if hold.page(self._groups):
            self._moved()
        hold.drop_stale()
        if len(hold.buffer) >= self._groups:
            return True
        if self._idle:
            self._judge()
        return False

    def _moved(self) -> None:
        self._moved_mono_s = time.monotonic()
        self._idle, self._stuck_mono_s = False, None

    def _refuse(self) -> None:
        """Raise what no waiting can heal."""
        hold, info = self._hold, self._hold.info
        if info.state in ends.ABORTED_STATES and hold.aborted_here:
            hold.buffer.clear()
            self.over = True
            return
        error = ends.failure(info)
        if error is not None:
            raise error
        hold.refuse_too_large(self._groups)

    def _judge(self) -> None:
        """Nothing came for a while: say whether the run is over, stuck, or just slow."""
        hold, now = self._hold, time.monotonic()
        num_ended = sum(
            count
            for name, count in hold.queue.counters().items()
            if name == "acked" or name.startswith("dropped:")
        )
        depths, presence = hold.queue.depths(), hold.queue.presence()
        look = ends.Look(hold.info, depths, presence, len(hold.held), hold.is_paused_here)
        if look.is_paused_here:
            self._wait_for_resume(now)
        if num_ended != self._num_ended:
            self._moved_mono_s = now if self._num_ended is not None else self._moved_mono_s
            self._num_ended = num_ended
        is_over = ends.is_over(look)
        if is_over or now - self._paged_mono_s >= REPAGE_S:
            # An answer may have been lost on its way: nobody has its entries.
            self._paged_mono_s = now
            hold.page_again()
            if hold.page(self._groups):
                self._moved()
                return
        if is_over and hold.is_complete():
            self.over = True
            return
        is_late = now - self._moved_mono_s >= self._timeout_s
        # An end that is none: whoever said that all prompts are enqueued has to enqueue the rest.
        deadlock = ends.deadlock(
            look, groups=self._groups, num_buffered=len(hold.buffer), is_incomplete=is_over
        )
        if deadlock is not None and (is_late or self._has_lasted(now, look.info.lease_s)):
            raise deadlock
        if deadlock is None:
            self._stuck_mono_s = None
        if is_late:
            raise ends.stalled(look, self._timeout_s, hold.oldest(), hold.queue.confirmations())

    def _wait_for_resume(self, now: float) -> None:
        """Begin the time anew, in which nothing may end: nothing ends because we want it so."""
        self._moved_mono_s = now
        if now - self._told_mono_s >= self._timeout_s:
            self._told_mono_s = now
            log.warning("waiting for groups, and %s", ends.paused(self._hold.info, here=True),
                        extra={"run": self._hold.info.run})  # fmt: skip

    def _has_lasted(self, now: float, grace_s: float) -> bool:
        """A producer that restarts, or an ack from another thread, gets its time."""
        self._stuck_mono_s = self._stuck_mono_s or now
        return now - self._stuck_mono_s >= grace_s

    def _outlast(self, error: Exception) -> None:
        """Wait out an outage, a rollback and a run that is opened anew, within the timeout."""
        hold, now = self._hold, time.monotonic()
        hold.pulse_soon()
        is_lost = isinstance(error, RunMissing) or str(error).startswith(_NO_GROUP)
        if is_lost:
            self._lost_mono_s = self._lost_mono_s or now
            if now - self._lost_mono_s >= hold.reopen_s:
                raise missing(hold.queue, hold.url, hold.reopen_s) from error
        elif isinstance(error, OUTAGES):
            if now - self._moved_mono_s >= self._timeout_s:
                raise ends.stalled(None, self._timeout_s, "") from error
        elif not isinstance(error, Fenced):
            if is_damage(error):
                raise damaged(hold.queue, hold.url, error) from error
            raise error  # an error of a script is a bug, not an outage
        time.sleep(PAUSE_S)
