"""`Queue`: the asyncio executor of script calls and reads, for producer and worker.

Owns the connections of one process to one run. Never decides anything: scripts do, and callers
read their answers. Invariant: a reply belongs to its call. Blocking reads have connections of
their own whose socket timeout exceeds the block, and a call that is cancelled while its reply is
under way closes its connection instead of leaving the reply for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import redis.asyncio
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
from rollstream.queue.scripts import Script, load_scripts

T = TypeVar("T")
_PAGE = 100


class Queue:
    """One run, as an asyncio process sees it.

    Attributes:
        run: its name.
        prefix: of every key it has.
        client: for commands beside the scripts; replies are bytes.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        blocking: redis.asyncio.Redis,
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
        self._blocking = blocking
        self._scripts = load_scripts() if scripts is None else scripts

    @classmethod
    def connect(
        cls, url: str, run: str, *, ca: str | None = None, connect_timeout_s: float = 5.0
    ) -> Self:
        """Return a queue of `run`; connects at its first call.

        Errors of the connection surface there, as exceptions of redis-py.
        """
        reach = Reach(url, probe_of(run), ca=ca, connect_timeout_s=connect_timeout_s)
        return cls(reach.asyncio_client(), reach.asyncio_client(), run)

    async def aclose(self) -> None:
        """Close every connection."""
        await self.client.aclose()
        await self._blocking.aclose()

    # --- scripts -------------------------------------------------------------------------------
    async def call(self, call: ScriptCall[T]) -> T:
        """Run one script.

        Raises:
            redis.exceptions.RedisError: the server refused it, or cannot be reached.
        """
        return (await self.call_many((call,)))[0]

    async def call_many(self, calls: Sequence[ScriptCall[T]]) -> list[T]:
        """Run scripts in one round trip, in order.

        Raises:
            redis.exceptions.ResponseError: the first one of any call, after all were answered.
        """
        commands = [evalsha(self._scripts[c.script], self.prefix, c) for c in calls]
        replies = await self._send(commands)
        unknown = unknown_scripts(replies)
        if unknown:
            await self._load({calls[j].script for j in unknown})
            again = await self._send([commands[j] for j in unknown])
            for j, reply in zip(unknown, again, strict=True):
                replies[j] = reply
        raise_first(replies)
        return [c.parse(reply) for c, reply in zip(calls, replies, strict=True)]

    # --- the run -------------------------------------------------------------------------------
    async def info(self) -> RunInfo | None:
        """Return what the run is; None where it was never opened, or is gone."""
        return await self._read(reads.info(self.prefix, self.run))

    async def counters(self) -> dict[str, int]:
        """Return the run's counters."""
        return await self._read(reads.counters(self.prefix))

    async def depths(self) -> dict[str, int]:
        """Return members in q d s l and groups in full, ready, delivered, live."""
        return await self._read(reads.depths(self.prefix))

    async def presence(self) -> dict[str, int]:
        """Return how many workers, producers and aggregators were seen within four leases."""
        return await self._read(reads.presence(self.prefix))

    async def confirmations(self) -> list[Confirmation]:
        """Return what every present worker confirmed, and when each was seen last."""
        return await self._read(reads.confirmations(self.prefix))

    async def overview(self) -> Overview | None:
        """Return everything that is measured of the run, in one round trip; None without one."""
        return await self._make(overview(self.prefix, self.run))

    async def past(self, count: int = 1000) -> list[dict[str, Any]]:
        """Return the last drops, newest first."""
        drops: list[dict[str, Any]] = []
        before = "+"
        while before and len(drops) < count:
            step = min(_PAGE, count - len(drops))
            before, page = await self._read(reads.past_page(self.prefix, before, step))
            drops += page
        return drops

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands that are about the server; a refusal stands in place of its answer."""
        return await self._send(commands)

    # --- waits ---------------------------------------------------------------------------------
    async def wait_bell(self, timeout_s: float) -> bool:
        """Wait until work arrived, half a second at most; False where nobody rang."""
        return await self._wait(streams.pop_wake(self.prefix, "bell", wake_s(timeout_s)))

    async def wait_room(self, timeout_s: float) -> bool:
        """Wait until capacity came free, half a second at most; False where nobody rang."""
        return await self._wait(streams.pop_wake(self.prefix, "room", wake_s(timeout_s)))

    async def read_control(
        self, last_id: str, *, block_s: float
    ) -> tuple[str, list[dict[str, str]]]:
        """Return control entries (`op`, `arg`) behind `last_id`, and the id to read on from.

        Args:
            last_id: `$` begins behind the newest entry there is now.
            block_s: how long to wait for one.
        """
        if last_id == "$":
            last_id = await self._read(streams.control_tail(self.prefix))
        return await self._wait(streams.read_control(self.prefix, last_id, block_ms(block_s)))

    # --- groups --------------------------------------------------------------------------------
    async def read_full(self, consumer: str, *, count: int, block_s: float) -> list[StreamEntry]:
        """Take full groups to judge; nobody else gets them until they idled."""
        return await self._wait(streams.read_full(self.prefix, consumer, count, block_ms(block_s)))

    async def claim_full(self, consumer: str, *, idle_s: float, count: int) -> list[StreamEntry]:
        """Take over full groups that another aggregator took and did not judge in time."""
        entries: list[StreamEntry] = []
        start = "0-0"
        while len(entries) < count:
            # Never more than are wanted: a claim counts as a delivery, and begins the wait anew.
            size = min(_PAGE, count - len(entries))
            start, page = await self._read(
                streams.claim_page(self.prefix, consumer, int(idle_s * 1000), start, size)
            )
            entries += page
            if start == "0-0":
                break
        if not entries:
            return []
        return await self._read(streams.pending_counts(self.prefix, entries))

    async def keep_full(self, consumer: str, message_ids: Sequence[str]) -> None:
        """Say that these entries are being judged: their idle time begins anew, uncounted."""
        if message_ids:
            await self._read(streams.keep_full(self.prefix, consumer, message_ids))

    async def headers(
        self, entries: Sequence[StreamEntry], *, prompts: bool = False
    ) -> list[StoredGroup]:
        """Return groups without their bodies, in one round trip for up to 8,192 members."""
        return await self._make(fetch.headers(self.prefix, entries, prompts=prompts))

    async def bodies(self, group: StoredGroup, *, text: bool = False) -> bool:
        """Add the bodies to a group of `headers`; False where it is another by now, or gone."""
        return await self._make(fetch.bodies(self.prefix, group, text=text))

    async def groups(
        self, ids: Sequence[tuple[str, int]], *, text: bool = False
    ) -> list[StoredGroup]:
        """Return groups by (id, n) with prompt and bodies; bounded, so in several round trips."""
        return await self._make(fetch.groups(self.prefix, ids, text=text))

    async def deliver_and_fetch(
        self, consumer: str, entries: Sequence[StreamEntry], *, text: bool = False
    ) -> Delivery:
        """Take groups in hand and fetch them, as many as `fetch.first_trip` says in one trip."""
        read = fetch.deliver_and_fetch(self.prefix, consumer, entries, text=text)
        return await self._make(read)

    async def read_ready(self, *, count: int, block_s: float) -> list[StreamEntry]:
        """Take new ready groups for the trainer."""
        return await self._wait(streams.read_ready(self.prefix, count, block_ms(block_s)))

    async def pending_ready(self, after_id: str = "0", *, count: int = 100) -> list[StreamEntry]:
        """Page through what the trainer has not acked, read or not, behind `after_id`."""
        return await self._read(streams.pending_ready(self.prefix, after_id, count))

    async def read_eval(
        self, after_id: str = "0", *, count: int = 100, block_s: float
    ) -> list[StreamEntry]:
        """Read evaluations that ended, behind `after_id`; each stays until it is acked."""
        return await self._wait(streams.read_eval(self.prefix, after_id, count, block_ms(block_s)))

    async def parked(self, lease: Lease) -> bytes | None:
        """Return what the leased member parked, None where it has nothing parked."""
        return await self._read(reads.parked(self.prefix, lease.group_index, lease.member))

    # --- round trips ---------------------------------------------------------------------------
    async def _read(self, read: Read[T]) -> T:
        if not read.commands:
            return read.parse([])
        replies = await self._send(read.commands)
        raise_first(replies)
        return read.parse(replies)

    async def _make(self, trips: Trips[T]) -> T:
        """Make the round trips of a read, one behind the other."""
        try:
            trip = next(trips)
            while True:
                trip = trips.send(await self._make_one(trip))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _make_one(self, trip: Trip) -> list[Any]:
        scripts = {part.script for part in trip if isinstance(part, ScriptCall)}
        commands = [
            evalsha(self._scripts[part.script], self.prefix, part)
            if isinstance(part, ScriptCall)
            else part
            for part in trip
        ]
        replies = await self._send(commands)
        if unknown_scripts(replies):
            await self._load(scripts)
            replies = await self._send(commands)
        raise_first(replies)
        return replies

    async def _wait(self, read: Read[T]) -> T:
        replies = await self._send(read.commands, self._blocking)
        raise_first(replies)
        return read.parse(replies)

    async def _load(self, names: set[str]) -> None:
        commands = [("SCRIPT LOAD", self._scripts[name].source) for name in sorted(names)]
        raise_first(await self._send(commands))

    async def _send(
        self, commands: Sequence[Command], client: redis.asyncio.Redis | None = None
    ) -> list[Any]:
        """Send commands in one round trip; errors of single commands stand among the replies.

        On a pooled connection, without redis-py's pipeline: that costs as much again.
        """
        pool: Any = (client or self.client).connection_pool
        connection = await pool.get_connection()
        try:
            replies: list[Any] = await connection.retry.call_with_retry(
                lambda: _exchange(connection, commands), lambda _: connection.disconnect()
            )
            return replies
        finally:
            await pool.release(connection)


async def _exchange(connection: Any, commands: Sequence[Command]) -> list[Any]:
    """Write all commands, then read all replies; whatever interrupts that closes the connection."""
    await connection.send_packed_command(connection.pack_commands(commands))
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies
