"""Reads one snapshot of a run for `top`.

Owns the commands beyond the queue's own reads, and the one group that is looked into. Never writes.
Invariant: whatever a server may not be asked (INFO under an ACL), or a record that cannot be read,
leaves its figure out and breaks nothing; at most `MAX_BYTES` of bodies are read a snapshot.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollstream.cli.reach import DAMAGE
from rollstream.cli.top.snapshot import Snapshot, Spans
from rollstream.errors import WireError
from rollstream.group import PromptGroup, Trajectory
from rollstream.health import facts_of
from rollstream.queue import calls
from rollstream.queue.reads import pairs_of, text_of
from rollstream.runs import OUTAGES, REFUSALS
from rollstream.updates import confirmed
from rollstream.wire import decode_body

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue
    from rollstream.queue.reads import Command

_NO_TIME = ValueError("not asked")
MAX_BYTES = 4 << 20
"""Of bodies that are read of one group; larger ones are not looked into."""
MAX_MEMBERS = 8
"""Of one group."""
MAX_SPAN_S = 1e9
"""Longer ones, negative ones and NaN are damage."""
MIN_BLOCK_S = 0.01
MAX_TRIED = 16
"""Live groups that are tried for a member that has ended."""


class Reader:
    """Takes snapshots of one run, and keeps what of its groups was read already."""

    def __init__(
        self,
        queue: BlockingQueue,
        timeout_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Read the run of `queue`, which is connected and waits `timeout_s` for a reply."""
        self._queue, self._sleep = queue, sleep
        self._block_s = min(1.0, timeout_s / 2)
        self._seen: Spans | None = None

    def take(self) -> Snapshot | None:
        """Return the run as it is now; None where there is none.

        Raises:
            redis.exceptions.RedisError: the server cannot be reached, or refuses.
        """
        queue = self._queue
        info = queue.info()
        if info is None:
            return None
        counters, depths = queue.counters(), queue.depths()
        found = confirmed.live(queue.confirmations(), info.lease_s)
        measured = queue.call(calls.measure())
        if measured is None:
            return None
        started = time.perf_counter()
        queue.ask((("PING",),))
        trip_ms = (time.perf_counter() - started) * 1000
        facts = facts_of([*queue.ask((("INFO", "memory"),)), [], [], _NO_TIME])
        return Snapshot(
            mono_s=time.monotonic(),
            run=queue.run,
            state=info.state,
            version=info.version,
            capacity=info.capacity,
            done=info.done,
            draining=info.draining,
            error=info.error,
            pause_mode=info.pause_mode,
            pause_by=info.pause_by,
            paused_s=info.paused_s,
            depths=depths,
            counters=counters,
            workers=measured.workers,
            producers=measured.producers,
            aggregators=measured.aggregators,
            in_flight=sum(one.in_flight for one in found),
            engines=tuple(confirmed.engine_views(found)),
            trainer_connects=info.connects,
            trainer=measured.trainer,
            oldest_s=measured.oldest_s,
            used_memory=None if facts.info is None else facts.number("used_memory"),
            max_memory=facts.number("maxmemory"),
            round_trip_ms=trip_ms,
            spans=self._spans(),
        )

    def wait(self, seconds: float) -> None:
        """Pass the time, and look into the first group that gets ready meanwhile.

        A trainer that waits acks a group moments later: at the next look it would be gone.
        """
        limit = time.monotonic() + seconds
        try:
            while (left_s := limit - time.monotonic()) > MIN_BLOCK_S:
                name = self._next_ready(min(left_s, self._block_s))
                if name and (spans := self._look_into(name, self._sizes([name])[0])) is not None:
                    self._seen = spans
                    break
        except (*OUTAGES, *REFUSALS, *DAMAGE):
            pass  # the next look says so
        self._sleep(max(0.0, limit - time.monotonic()))

    def _next_ready(self, block_s: float) -> str:
        """Return the next group that gets ready, without taking it; empty where none does."""
        stream = f"{self._queue.prefix}ready"
        command = ("XREAD", "COUNT", 1, "BLOCK", int(1000 * block_s), "STREAMS", stream, "$")
        reply = self._queue.ask((command,))[0]
        if not isinstance(reply, list) or not reply:
            return ""
        _, entries = reply[0]
        fields = dict(pairs_of(entries[0][1]))
        return text_of(fields.get(b"g", b""))

    def _spans(self) -> Spans | None:
        """Return where the time of a group went: the newest one that is ready, else one that lives.

        Where groups leave as fast as they come, none is ready when we look; where none has ended,
        members of open ones have. What was seen last stays while nothing newer is found.
        """
        names = [entry.group_index for entry in self._queue.newest("ready", 1)]
        if not names:
            found = self._queue.ask((("SRANDMEMBER", f"{self._queue.prefix}gs", MAX_TRIED),))[0]
            names = [text_of(name) for name in found] if isinstance(found, list) else []
        if self._seen is not None and self._seen.group_index in names[:1]:
            return self._seen
        for name, sizes in zip(names, self._sizes(names), strict=True):
            if (spans := self._look_into(name, sizes)) is not None:
                self._seen = spans
                break
        return self._seen

    def _sizes(self, names: Sequence[str]) -> list[list[Any]]:
        """Return of each group how many bytes its first members have, 0 where one has not ended."""
        members = range(MAX_MEMBERS)
        keys = [f"{self._queue.prefix}b:{name}" for name in names]
        commands = [("HSTRLEN", key, member) for key in keys for member in members]
        replies = self._queue.ask(commands) if commands else []
        return [replies[MAX_MEMBERS * j : MAX_MEMBERS * (j + 1)] for j in range(len(names))]

    def _look_into(self, name: str, sizes: Sequence[Any]) -> Spans | None:
        """Read some of a group's members, as many as fit `MAX_BYTES`; None where there are none."""
        chosen: list[int] = []
        room = MAX_BYTES
        for member, size in enumerate(sizes):
            if isinstance(size, int) and 0 < size <= room:
                chosen.append(member)
                room -= size
        if not chosen:
            return None
        group = PromptGroup(0, len(sizes), "")
        try:
            command: Command = ("HMGET", f"{self._queue.prefix}b:{name}", *chosen)
            bodies = self._queue.ask((command,))[0]
            if not isinstance(bodies, list):  # became another key since its sizes were read
                return None
            found = [decode_body(body, group) for body in bodies if body is not None]
        except WireError:
            return None
        return spans_of(name, found) if found else None  # none: acked meanwhile


def spans_of(group_index: str, trajectories: list[Trajectory]) -> Spans:
    """Add up the spans and the sampled tokens of a group."""
    seconds: defaultdict[str, float] = defaultdict(float)
    tokens = 0
    for trajectory in trajectories:
        for sample in trajectory if isinstance(trajectory, list) else [trajectory]:
            for span in sample.spans:
                if 0 <= span.duration_s < MAX_SPAN_S:
                    seconds[span.name] += span.duration_s
            tokens += sum(call.end - call.start for call in sample.calls)
    return Spans(group_index, len(trajectories), dict(seconds), tokens)
