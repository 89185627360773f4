"""One look at everything that Redis holds of a run: the base of every check.

Owns the one script that reads it (atomically, in one round trip) and the records it is read into.
Never judges. Invariant: nothing here goes through the scripts under test, so a script that counts,
stores or reads wrongly cannot hide it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollstream.queue.calls import ScriptCall
from rollstream.queue.scripts import Script, load_scripts
from rollstream.states import MemberState
from tests.queue_bench import unpack_ids

ZSETS = ("q", "s", "d", "l", "age", "dl", "w", "wp", "wa")
HASHES = ("m", "c", "wl", "ws", "wc", "wb", "lb")
STREAMS = {"full": "aggregators", "ready": "trainer", "eval": "nobody"}
_LOOK = """
local K, call = KEYS[1], redis.call
local function pending(name, group)
  local found = redis.pcall('XPENDING', K .. name, group, '-', '+', 1000)
  return found.err and {} or found
end
local keys, groups = call('KEYS', K .. '*'), {}
for _, key in ipairs(keys) do
  if string.find(string.sub(key, #K + 1), '^[gb]:') then
    groups[#groups + 1] = string.sub(key, #K + 1)
    groups[#groups + 1] = call('HGETALL', key)
  end
end
local zsets, hashes, streams = {}, {}, {}
for name in string.gmatch(ARGV[2], '%S+') do
  zsets[#zsets + 1] = call('ZRANGE', K .. name, 0, -1, 'WITHSCORES')
end
for name in string.gmatch(ARGV[3], '%S+') do hashes[#hashes + 1] = call('HGETALL', K .. name) end
for name, group in string.gmatch(ARGV[4], '(%S+)=(%S+)') do
  streams[#streams + 1] = call('XRANGE', K .. name, '-', '+')
  streams[#streams + 1] = pending(name, group)
end
return {keys, groups, zsets, hashes, streams, call('SMEMBERS', K .. 'gs'),
  call('SMEMBERS', K .. 'ge'), call('GET', K .. 'cur') or '',
  call('XRANGE', K .. 'past', ARGV[1], '+'), call('XLEN', K .. 'past'),
  call('XREVRANGE', K .. 'ctl', '+', '-', 'COUNT', 1), call('LLEN', K .. 'bell'),
  call('LLEN', K .. 'room')}
"""
LOOK = Script(
    "look",
    _LOOK,
    hashlib.sha1(_LOOK.encode(), usedforsecurity=False).hexdigest(),
    load_scripts()["audit"].header,
)
"""Run as the scripts are, so a call and the look behind it are one round trip."""
_MEMBER_FIELD = re.compile(r"([axtfhekr])(\d+)")


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a live group."""

    attempts: int
    crashes: int
    token: str | None
    final: str | None
    """A token, or `x:reason`."""
    header: bytes | None
    error: bytes | None
    parked: int | None
    """Size of its parked body."""

    @property
    def failed(self) -> bool:
        return self.final is not None and self.final.startswith("x:")

    @property
    def done(self) -> bool:
        return self.final is not None and not self.failed


@dataclass(slots=True)
class Group:
    """One live group; `fields` are those of its hash."""

    gid: str
    fields: dict[str, bytes]
    bodies: dict[str, bytes]
    members: list[Member]

    def number(self, name: str) -> int | None:
        value = self.fields.get(name)
        return None if value is None else int(float(value))

    def text(self, name: str) -> str:
        return self.fields.get(name, b"").decode()

    @property
    def state(self) -> str:
        return self.text("state")

    @property
    def n(self) -> int:
        return int(self.fields["n"])

    @property
    def life(self) -> str:
        return self.text("life")


@dataclass(slots=True)
class Sight:
    """Everything of a run at one instant."""

    names: set[str]
    m: dict[str, str]
    c: dict[str, int]
    z: dict[str, dict[str, int]]
    wl: dict[str, str]
    ws: dict[str, str]
    wc: dict[str, str]
    """What every worker confirmed last: control word, calls under way, engines."""
    wb: dict[str, str]
    """What every producer reported last: which process it is, and how long it was blocked."""
    lb: dict[str, str]
    """Versions by label."""
    groups: dict[str, Group]
    """Every live group that has a hash, by id."""
    orphans: set[str]
    """Keys of groups that are not live, and bodies without a hash."""
    gs: set[str]
    ge: set[str]
    entries: dict[str, dict[str, dict[str, str]]]
    """Per stream, per message id, its fields."""
    pending: dict[str, dict[str, tuple[str, int]]]
    """Per stream, per message id: who has it, and how often it was handed out."""
    drops: list[tuple[str, dict[str, bytes]]]
    """Records of `past` since the last look."""
    num_past: int
    last_control: list[Any]
    bell: int
    room: int
    frontier: int
    base: int
    above: set[int]
    """Ids whose bit is set, from the base on."""
    terminal: set[int] = field(default_factory=set)

    @property
    def live(self) -> set[str]:
        return self.gs | self.ge

    @property
    def dangling(self) -> set[str]:
        """Live groups whose hash vanished."""
        return self.live - set(self.groups)

    @property
    def exists(self) -> bool:
        return "state" in self.m

    def budget(self, name: str) -> int:
        return int(self.m[name])

    def clock(self, now_ms: int) -> tuple[int, int, bool]:
        """Return the queue clock at `now_ms`, the run clock, and whether time jumped."""
        half = self.budget("lease_ms") // 2
        step = now_ms - int(self.m["clock_tick"])
        clock = int(self.m["clock"]) + max(0, min(step, half))
        at = int(self.m["paused_at"]) if self.m["state"] == "paused" else clock
        return clock, at - int(self.m["paused_total"]), not 0 <= step <= half

    def overdue(self, clock: int) -> bool:
        """Return whether the run is paused for longer than whoever paused it asked for."""
        pause_until = int(self.m.get("pause_until", 0))
        return self.m["state"] == "paused" and 0 < pause_until <= clock

    def crashes(self, gid: str, member: int | str) -> int:
        group = self.groups.get(gid)
        return group.members[int(member)].crashes if group else 0

    def state_of(self, gid: str, i: int) -> MemberState | None:
        """Return where one member stands; None where it stands nowhere."""
        member, name = self.groups[gid].members[i], f"{gid}:{i}"
        if member.failed:
            return MemberState.FAILED
        if member.done:
            return MemberState.DONE
        if f"{name}:{member.token}" in self.z["l"]:
            return MemberState.LEASED
        if name in self.z["d"]:
            return MemberState.DELAYED
        if name in self.z["q"] or name in self.z["s"]:
            return MemberState.QUEUED if member.parked is None else MemberState.PARKED
        return None

    def content(self) -> dict[str, Any]:
        """Return everything that a repeated call must leave as it is."""
        return {
            "names": self.names, "m": self.m, "z": self.z, "wl": self.wl, "ws": self.ws,
            "wc": self.wc, "wb": self.wb, "lb": self.lb,
            "groups": {g.gid: (g.fields, g.bodies) for g in self.groups.values()},
            "gs": self.gs, "ge": self.ge, "entries": self.entries, "pending": self.pending,
            "past": self.num_past, "ctl": self.last_control, "bell": self.bell,
            "room": self.room, "above": self.above,
            "c": {name: count for name, count in self.c.items() if name != "fenced"},
        }  # fmt: skip


class Looks:
    """The looks at one run; one that shows nothing new is the last one itself."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._raw: Any = None
        self._last: Sight | None = None

    def call(self, past_id: str = "-") -> ScriptCall[Sight]:
        """Read the whole run; of `past`, what came behind `past_id`."""
        streams = " ".join(f"{name}={group}" for name, group in STREAMS.items())
        since = past_id if past_id == "-" else f"({past_id}"
        args = (since, " ".join(ZSETS), " ".join(HASHES), streams)
        return ScriptCall(LOOK.name, args, self._read)

    def _read(self, raw: Any) -> Sight:
        for pending in raw[4][1::2]:
            for row in pending:
                row[2] = 0  # idle time
        if self._last is None or raw != self._raw:
            self._raw, self._last = raw, _parse(self._prefix, raw)
        return self._last


def _parse(prefix: str, raw: Any) -> Sight:
    keys, groups, zsets, hashes, streams_raw, gs, ge, cur, past, num_past, ctl, bell, room = raw
    m, c, wl, ws, wc, wb, lb = ({_text(k): _text(v) for k, v in _pairs(row)} for row in hashes)
    found, orphans = _groups(groups, {_text(gid) for gid in (*gs, *ge)})
    frontier, base = int(m.get("frontier", 0)), int(m.get("base", 0))
    above = unpack_ids(base, cur)
    sight = Sight(
        names={_text(key)[len(prefix) :] for key in keys},
        m=m,
        c={name: int(value) for name, value in c.items()},
        z={
            name: {_text(member): int(float(score)) for member, score in _pairs(row)}
            for name, row in zip(ZSETS, zsets, strict=True)
        },
        wl=wl,
        ws=ws,
        wc=wc,
        wb=wb,
        lb=lb,
        groups=found,
        orphans=orphans,
        gs={_text(gid) for gid in gs},
        ge={_text(gid) for gid in ge},
        entries={
            name: {_text(i): _row(row) for i, row in streams_raw[2 * j]}
            for j, name in enumerate(STREAMS)
        },
        pending={
            name: {
                _text(i): (_text(who), int(times)) for i, who, _, times in streams_raw[2 * j + 1]
            }
            for j, name in enumerate(STREAMS)
        },
        drops=[(_text(i), {_text(k): v for k, v in _pairs(row)}) for i, row in past],
        num_past=int(num_past),
        last_control=ctl,
        bell=int(bell),
        room=int(room),
        frontier=frontier,
        base=base,
        above=above,
    )
    sight.terminal = set(range(frontier)) | above
    return sight


def _groups(raw: list[Any], live: set[str]) -> tuple[dict[str, Group], set[str]]:
    rows = {_text(key): {_text(k): v for k, v in _pairs(row)} for key, row in _pairs(raw)}
    found, orphans = {}, set()
    for key, fields in rows.items():
        kind, _, gid = key.partition(":")
        if gid not in live or f"g:{gid}" not in rows:
            orphans.add(key)
        elif kind == "g":
            bodies = rows.get(f"b:{gid}", {})
            found[gid] = Group(gid, fields, bodies, _members(fields))
    return found, orphans


def _members(fields: dict[str, bytes]) -> list[Member]:
    per: list[dict[str, bytes]] = [{} for _ in range(int(fields.get("n", 0)))]
    for name, value in fields.items():
        match = _MEMBER_FIELD.fullmatch(name)
        if match:
            per[int(match[2])][match[1]] = value
    return [
        Member(
            attempts=int(row.get("a", 0)),
            crashes=int(row.get("x", 0)),
            token=_optional(row.get("t")),
            final=_optional(row.get("f")),
            header=row.get("h"),
            error=row.get("e"),
            parked=None if "k" not in row else int(row["k"]),
        )
        for row in per
    ]


def _row(row: Any) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in _pairs(row)}


def _pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _optional(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
