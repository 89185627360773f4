"""`BlockingQueue`: the synchronous executor of script calls and reads, for the trainer.

Owns the connections of one process to one run, like `Queue`, whose names it has. Never decides
anything. Invariant: one thread at a time waits; calls from several threads are safe.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import redis
from redis.exceptions import ResponseError

from rollstream.queue import fetch, reads, streams
from rollstream.queue.answers import Lease
from rollstream.queue.calls import ScriptCall
from rollstream.queue.connection import (
    Reach,
    block_ms,
    evalsha,
    raise_first,
    unknown_scripts,
    wake_s,
)
from rollstream.queue.fetch import Trip, Trips
from rollstream.queue.keys import prefix, probe_of
from rollstream.queue.overview import Overview, overview
from rollstream.queue.reads import (
    Command,
    Confirmation,
    Delivery,
    Read,
    RunInfo,
    StoredGroup,
    StreamEntry,
)
from rollstream.queue.route import Route
from rollstream.queue.scripts import Script, load_scripts

T = TypeVar("T")
_PAGE = 100


class BlockingQueue:
    """One run, as the trainer and other synchronous processes see it.

    Attributes:
        run: its name.
        prefix: of every key it has.
        client: for commands beside the scripts; replies are bytes.
    """

    def __init__(
        self,
        client: redis.Redis,
        blocking: redis.Redis,
        run: str,
        scripts: Mapping[str, Script] | None = None,
    ) -> None:
        """Use `connect` but for tests.

        Args:
            client: for calls and reads.
            blocking: for waits; not the same pool, so that waits never starve calls.
            run: name of the run.
            scripts: other scripts than the package's.
        """
        self.run, self.prefix, self.client = run, prefix(run), client
        self.route: Route | None = None
        self._name = ""
        self._blocking = blocking
        self._scripts = load_scripts() if scripts is None else scripts

    @classmethod
    def connect(
        cls, url: str, run: str, *, ca: str | None = None, connect_timeout_s: float = 5.0
    ) -> Self:
        """Return a queue of `run`; connects at its first call.

        Errors of the connection surface there, as exceptions of redis-py.
        """
        name = f"rollstream-{secrets.token_hex(6)}"
        reach = Reach(url, probe_of(run), ca=ca, connect_timeout_s=connect_timeout_s, name=name)
        queue = cls(reach.blocking_client(), reach.blocking_client(), run)
        queue.route, queue._name = reach.route, name
        return queue

    @property
    def connection_name(self) -> str:
        """What the server calls every connection of this queue; empty where it does not."""
        return self._name if self.route is not None and self.route.is_named else ""

    def close(self) -> None:
        """Close every connection."""
        self.client.close()
        self._blocking.close()

    @contextlib.contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """Give every reply that this thread waits for inside `timeout_s` together, at most.

        A server that is alive and silent (frozen, cut off) is an outage after that; bounds of an
        outer `within` hold as well.
        """
        local: Any = threading.local() if self.route is None else self.route.limit
        outer = getattr(local, "mono_s", None)
        limit = time.monotonic() + timeout_s
        local.mono_s = limit if outer is None else min(outer, limit)
        try:
            yield
        finally:
            local.mono_s = outer

    # --- scripts -------------------------------------------------------------------------------
    def call(self, call: ScriptCall[T]) -> T:
        """Run one script.

        Raises:
            redis.exceptions.RedisError: the server refused it, or cannot be reached.
        """
        return self.call_many((call,))[0]

    def call_many(self, calls: Sequence[ScriptCall[T]]) -> list[T]:
        """Run scripts in one round trip, in order.

        Raises:
            redis.exceptions.ResponseError: the first one of any call, after all were answered.
        """
        commands = [evalsha(self._scripts[c.script], self.prefix, c) for c in calls]
        replies = self._send(commands)
        unknown = unknown_scripts(replies)
        if unknown:
            self._load({calls[j].script for j in unknown})
            again = self._send([commands[j] for j in unknown])
            for j, reply in zip(unknown, again, strict=True):
                replies[j] = reply
        raise_first(replies)
        return [c.parse(reply) for c, reply in zip(calls, replies, strict=True)]

    # --- the run -------------------------------------------------------------------------------
    def info(self) -> RunInfo | None:
        """Return what the run is; None where it was never opened, or is gone."""
        return self._read(reads.info(self.prefix, self.run))

    def counters(self) -> dict[str, int]:
        """Return the run's counters."""
        return self._read(reads.counters(self.prefix))

    def depths(self) -> dict[str, int]:
        """Return members in q d s l and groups in full, ready, delivered, live."""
        return self._read(reads.depths(self.prefix))

    def presence(self) -> dict[str, int]:
        """Return how many workers, producers and aggregators were seen within four leases."""
        return self._read(reads.presence(self.prefix))

    def confirmations(self) -> list[Confirmation]:
        """Return what every present worker confirmed, and when each was seen last."""
        return self._read(reads.confirmations(self.prefix))

    def overview(self) -> Overview | None:
        """Return everything that is measured of the run, in one round trip; None without one."""
        return self._make(overview(self.prefix, self.run))

    def past(self, count: int = 1000) -> list[dict[str, Any]]:
        """Return the last drops, newest first."""
        drops: list[dict[str, Any]] = []
        before = "+"
        while before and len(drops) < count:
            step = min(_PAGE, count - len(drops))
            before, page = self._read(reads.past_page(self.prefix, before, step))
            drops += page
        return drops

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands that are about the server; a refusal stands in place of its answer."""
        return self._send(commands)

    # --- waits ---------------------------------------------------------------------------------
    def wait_bell(self, timeout_s: float) -> bool:
        """Wait until work arrived, half a second at most; False where nobody rang."""
        return self._wait(streams.pop_wake(self.prefix, "bell", wake_s(timeout_s)))

    def wait_room(self, timeout_s: float) -> bool:
        """Wait until capacity came free, half a second at most; False where nobody rang."""
        return self._wait(streams.pop_wake(self.prefix, "room", wake_s(timeout_s)))

    def read_control(self, last_id: str, *, block_s: float) -> tuple[str, list[dict[str, str]]]:
        """Return control entries (`op`, `arg`) behind `last_id`, and the id to read on from.

        Args:
            last_id: `$` begins behind the newest entry there is now.
            block_s: how long to wait for one.
        """
        if last_id == "$":
            last_id = self._read(streams.control_tail(self.prefix))
        return self._wait(streams.read_control(self.prefix, last_id, block_ms(block_s)))

    # --- groups --------------------------------------------------------------------------------
    def read_full(self, consumer: str, *, count: int, block_s: float) -> list[StreamEntry]:
        """Take full groups to judge; nobody else gets them until they idled."""
        return self._wait(streams.read_full(self.prefix, consumer, count, block_ms(block_s)))

    def claim_full(self, consumer: str, *, idle_s: float, count: int) -> list[StreamEntry]:
        """Take over full groups that another aggregator took and did not judge in time."""
        entries: list[StreamEntry] = []
        start = "0-0"
        while len(entries) < count:
            # Never more than are wanted: a claim counts as a delivery, and begins the wait anew.
            size = min(_PAGE, count - len(entries))
            start, page = self._read(
                streams.claim_page(self.prefix, consumer, int(idle_s * 1000), start, size)
            )
            entries += page
            if start == "0-0":
                break
        if not entries:
            return []
        return self._read(streams.pending_counts(self.prefix, entries))

    def keep_full(self, consumer: str, message_ids: Sequence[str]) -> None:
        """Say that these entries are being judged: their idle time begins anew, uncounted."""
        if message_ids:
            self._read(streams.keep_full(self.prefix, consumer, message_ids))

    def headers(
        self, entries: Sequence[StreamEntry], *, prompts: bool = False
    ) -> list[StoredGroup]:
        """Return groups without their bodies, in one round trip for up to 8,192 members."""
        return self._make(fetch.headers(self.prefix, entries, prompts=prompts))

    def bodies(self, group: StoredGroup, *, text: bool = False) -> bool:
        """Add the bodies to a group of `headers`; False where it is another by now, or gone."""
        return self._make(fetch.bodies(self.prefix, group, text=text))

    def groups(self, ids: Sequence[tuple[str, int]], *, text: bool = False) -> list[StoredGroup]:
        """Return groups by (id, n) with prompt and bodies; bounded, so in several round trips."""
        return self._make(fetch.groups(self.prefix, ids, text=text))

    def deliver_and_fetch(
        self, consumer: str, entries: Sequence[StreamEntry], *, text: bool = False
    ) -> Delivery:
        """Take groups in hand and fetch them, as many as `fetch.first_trip` says in one trip."""
        read = fetch.deliver_and_fetch(self.prefix, consumer, entries, text=text)
        return self._make(read)

    def read_ready(self, *, count: int, block_s: float) -> list[StreamEntry]:
        """Take new ready groups for the trainer."""
        return self._wait(streams.read_ready(self.prefix, count, block_ms(block_s)))

    def pending_ready(self, after_id: str = "0", *, count: int = 100) -> list[StreamEntry]:
        """Page through what the trainer has not acked, read or not, behind `after_id`."""
        return self._read(streams.pending_ready(self.prefix, after_id, count))

    def newest(self, stream: str, count: int) -> list[StreamEntry]:
        """Return the newest entries of `full` or `ready`, without taking any."""
        return self._read(streams.newest(self.prefix, stream, count))

    def read_eval(
        self, after_id: str = "0", *, count: int = 100, block_s: float
    ) -> list[StreamEntry]:
        """Read evaluations that ended, behind `after_id`; each stays until it is acked."""
        return self._wait(streams.read_eval(self.prefix, after_id, count, block_ms(block_s)))

    def parked(self, lease: Lease) -> bytes | None:
        """Return what the leased member parked, None where it has nothing parked."""
        return self._read(reads.parked(self.prefix, lease.group_index, lease.member))

    # --- round trips ---------------------------------------------------------------------------
    def _read(self, read: Read[T]) -> T:
        if not read.commands:
            return read.parse([])
        replies = self._send(read.commands)
        raise_first(replies)
        return read.parse(replies)

    def _make(self, trips: Trips[T]) -> T:
        """Make the round trips of a read, one behind the other."""
        try:
            trip = next(trips)
            while True:
                trip = trips.send(self._make_one(trip))
        except StopIteration as end:
            result: T = end.value
            return result

    def _make_one(self, trip: Trip) -> list[Any]:
        scripts = {part.script for part in trip if isinstance(part, ScriptCall)}
        commands = [
            evalsha(self._scripts[part.script], self.prefix, part)
            if isinstance(part, ScriptCall)
            else part
            for part in trip
        ]
        replies = self._send(commands)
        if unknown_scripts(replies):
            self._load(scripts)
            replies = self._send(commands)
        raise_first(replies)
        return replies

    def _wait(self, read: Read[T]) -> T:
        replies = self._send(read.commands, self._blocking)
        raise_first(replies)
        return read.parse(replies)

    def _load(self, names: set[str]) -> None:
        commands = [("SCRIPT LOAD", self._scripts[name].source) for name in sorted(names)]
        raise_first(self._send(commands))

    def _send(self, commands: Sequence[Command], client: redis.Redis | None = None) -> list[Any]:
        """Send commands in one round trip; errors of single commands stand among the replies.

        On a pooled connection, without redis-py's pipeline: its answers would be made over.
        """
        pool: Any = (client or self.client).connection_pool
        connection = pool.get_connection()
        try:
            replies: list[Any] = connection.retry.call_with_retry(
                lambda: _exchange(connection, commands), lambda _: connection.disconnect()
            )
            return replies
        finally:
            pool.release(connection)


def _exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    """Write all commands, then read all replies; whatever interrupts that closes the connection."""
    replies: list[Any] = []
    try:
        connection.send_packed_command(connection.pack_commands(commands))
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except ResponseError as error:
                replies.append(error)
    except BaseException:
        connection.disconnect()
        raise
    return replies
