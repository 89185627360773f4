"""A queue on a bench: every script on a server of the test's choice, under a clock that it moves.

Owns the one change that tests make to the scripts (where they read the wall clock) and short ways
to bring a group into a state. Invariant: everything goes through the package's own calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import fakeredis
import redis

from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease, SweepAnswer
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.calls import Arg, Completion, ScriptCall
from rollstream.queue.keys import SCHEMA, SWEEP_PAGE
from rollstream.queue.reads import StreamEntry
from rollstream.queue.scripts import Script, load_scripts, make_script
from tests.builders import budgets

T = TypeVar("T")
START_MS = 1_700_000_000_000
_WALL_CLOCK = """  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
"""
_TEST_CLOCK = """  return tonumber(call('GET', 'now:' .. K))
"""


def clocked_scripts(*changes: tuple[str, str, str]) -> dict[str, Script]:
    """Return the scripts under the test clock, with further changes (script or `*`, old, new).

    Raises:
        AssertionError: a change fits no script.
    """
    sources = {
        name: script.source.replace(_WALL_CLOCK, _TEST_CLOCK)
        for name, script in load_scripts().items()
    }
    assert any(_TEST_CLOCK in source for source in sources.values())
    for where, old, new in changes:
        hit = [name for name in sources if where in ("*", name) and old in sources[name]]
        assert hit, (where, old)
        for name in hit:
            sources[name] = sources[name].replace(old, new)
    return {name: make_script(name, source) for name, source in sources.items()}


class Bench:
    """One run under test.

    Attributes:
        queue: the executor.
        client: of the same server; replies are bytes.
        now_ms: the server's wall clock.
    """

    def __init__(
        self,
        client: redis.Redis,
        run: str = "bench",
        scripts: Mapping[str, Script] | None = None,
        **changes: Arg,
    ) -> None:
        scripts = clocked_scripts() if scripts is None else scripts
        self.client = client
        self.queue = BlockingQueue(client, client, run, scripts)
        self.key = self.queue.prefix
        self.set_clock(START_MS)
        self._call_nos: dict[str, Iterable[int]] = {}
        self.budgets = budgets(**changes)
        self.open()

    def open(self, fingerprint: str = "source", schema: int = SCHEMA) -> list[str]:
        return self.call(calls.open_run(schema, fingerprint, self.budgets))

    def call(self, call: ScriptCall[T]) -> T:
        return self.queue.call(call)

    # --- time ----------------------------------------------------------------------------------
    def set_clock(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.client.set(f"now:{self.key}", now_ms)

    def advance(self, ms: int) -> None:
        """Let time pass as in service: somebody sweeps more often than half a lease."""
        step = int(self.budgets["lease_ms"]) // 2 - 1
        for part in [*[step] * (ms // step), ms % step]:
            self.set_clock(self.now_ms + part)
            self.sweep()

    def sweep(self) -> SweepAnswer:
        """Sweep until no page is full; return what all pages did."""
        total = [0] * 6
        while True:
            page = self.call(calls.sweep(SWEEP_PAGE))
            did = (page.expired, page.promoted, page.deadlines, page.evicted, page.aborted,
                   page.vanished)  # fmt: skip
            total = [a + b for a, b in zip(total, did, strict=True)]
            if not page.more:
                return SweepAnswer(
                    False, *total[:5], grace=page.grace, lost=page.lost, vanished=total[5]
                )

    # --- the life of a group -------------------------------------------------------------------
    def enqueue(self, *ids: int | str, n: int = 2, **options: Any) -> list[str]:
        return [self.call(calls.enqueue(gid, n, b"prompt %s" % str(gid).encode(), **options))
                for gid in ids]  # fmt: skip

    def lease(self, worker: str = "worker", limit: int = 256) -> list[Lease]:
        number = next(self._call_nos.setdefault(worker, itertools.count(1)))  # type: ignore[call-overload]  # a counter
        answer = self.call(calls.lease(worker, number, limit))
        return [member.lease for group in answer.groups for member in group.members]

    def complete(self, leases: Sequence[Lease], body: bytes = b"body") -> list[str]:
        call = calls.complete([Completion(lease, b"header", body, b"text") for lease in leases])
        return [answer.outcome for answer in self.call(call)]

    def fail(
        self,
        lease: Lease,
        report: Report = Report.RETRY,
        reason: MemberReason = MemberReason.ENGINE_ERROR,
        delay_s: float = 0.0,
    ) -> str:
        return self.call(calls.fail(lease, report, reason, "it broke", delay_s=delay_s))

    def full(self, gid: int, n: int = 2) -> StreamEntry:
        """Bring a new group to `full` and take its entry, as an aggregator does."""
        assert self.enqueue(gid, n=n) == ["new"]
        leases: list[Lease] = []
        while len(leases) < n and (part := self.lease()):
            leases += [lease for lease in part if lease.group_index == str(gid)]
        assert set(self.complete(leases)) == {"ok"}
        entries = self.queue.read_full("aggregator", count=100, block_s=0)
        return next(entry for entry in entries if entry.group_index == str(gid))

    def ready(self, *ids: int, n: int = 2) -> list[StreamEntry]:
        """Bring new groups to `ready` and take their entries, as the trainer does."""
        for gid in ids:
            self.judge(self.full(gid, n))
        return self.queue.read_ready(count=100, block_s=0)

    def bring(self, gid: int, state: str, n: int = 2) -> None:
        """Bring a new group into a live state; `queued` is open and never leased."""
        if state in ("queued", "open"):
            self.enqueue(gid, n=n)
            if state == "open":
                assert [lease.group_index for lease in self.lease(limit=1)] == [str(gid)], (
                    "others were waiting"
                )
        elif state == "full":
            self.full(gid, n)
        else:
            self.ready(gid, n=n)
            if state == "delivered":
                assert self.deliver(gid) == ["ok"]

    def judge(self, entry: StreamEntry, drop: DropReason | None = None) -> str:
        return self.call(calls.verdict(entry.group_index, entry.message_id, drop=drop))

    def connect(self, consumer: str = "trainer", number: int = 1) -> str:
        assert self.call(calls.connect(consumer, number)).consumer == consumer
        return consumer

    def deliver(self, *ids: int | str, consumer: str = "trainer") -> list[str]:
        return self.call(calls.deliver(consumer, [str(gid) for gid in ids]))

    def ack(self, *ids: int | str, consumer: str = "trainer") -> list[str]:
        return self.call(calls.ack(consumer, [str(gid) for gid in ids]))

    # --- looking -------------------------------------------------------------------------------
    def state(self, gid: int | str) -> str | None:
        value = self.client.hget(f"{self.key}g:{gid}", "state")
        return None if value is None else value.decode()  # type: ignore[union-attr]  # bytes

    def where(self, gid: int | str, member: int) -> str:
        """Return which of q, s, d, l holds a member (as one string)."""
        name = f"{gid}:{member}".encode()
        found = [key for key in "qsd" if self.client.zscore(self.key + key, name) is not None]
        leases: list[bytes] = self.client.zrange(f"{self.key}l", 0, -1)
        return "".join(found) + ("l" if any(e.startswith(name + b":") for e in leases) else "")

    def m(self, field: str) -> str:
        return self.client.hget(f"{self.key}m", field).decode()  # type: ignore[union-attr]  # bytes

    def counters(self) -> dict[str, int]:
        return self.queue.counters()

    def audit(self) -> None:
        answer = self.call(calls.audit(deep=True))
        assert answer.problems == []
        assert answer.enqueued == answer.acked + answer.dropped + answer.live

    def terminal(self) -> set[int]:
        """Return every terminal id, those below the frontier included."""
        state = self.call(calls.state())
        return set(range(state.frontier)) | unpack_ids(state.frontier, state.bitmap)

    def dump(self) -> dict[str, Any]:
        """Return the content of every key of the run."""
        readers: dict[bytes, Callable[[str], Any]] = {
            b"hash": self.client.hgetall,
            b"set": lambda key: sorted(self.client.smembers(key)),
            b"zset": lambda key: self.client.zrange(key, 0, -1, withscores=True),
            b"list": lambda key: self.client.lrange(key, 0, -1),
            b"stream": self.client.xrange,
            b"string": self.client.get,
        }
        found = {}
        for raw in sorted(self.client.keys(f"{self.key}*")):
            key = raw.decode()
            found[key[len(self.key) :]] = readers[self.client.type(key)](key)
        return found

    def key_names(self) -> set[str]:
        return {raw.decode()[len(self.key) :] for raw in self.client.keys(f"{self.key}*")}


def fake_bench(scripts: Mapping[str, Script] | None = None, **changes: Arg) -> Bench:
    """Return a bench on a server in this process."""
    client = fakeredis.FakeRedis(server=fakeredis.FakeServer(), protocol=2)
    return Bench(client, scripts=scripts, **changes)


def unpack_ids(frontier: int, bitmap: bytes) -> set[int]:
    """Return the ids from `frontier` on whose bit is set."""
    base = frontier // 8 * 8
    ids = (base + 8 * j + bit for j, byte in enumerate(bitmap) for bit in range(8)
           if byte >> (7 - bit) & 1)  # fmt: skip
    return {i for i in ids if i >= frontier}


def pack_ids(frontier: int, ids: Iterable[int]) -> bytes:
    """Return the bitmap whose first byte holds id 8 * (frontier // 8)."""
    base, wanted = frontier // 8 * 8, sorted(ids)
    bitmap = bytearray((wanted[-1] - base) // 8 + 1 if wanted else 0)
    for i in wanted:
        bitmap[(i - base) // 8] |= 1 << (7 - (i - base) % 8)
    return bytes(bitmap)
