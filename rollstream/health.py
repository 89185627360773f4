"""Is this server fit for a run? What it says of itself, judged, with what to do about it.

Owns which facts are asked for and the sentences about them. Does no I/O: an executor sends
`COMMANDS` and hands over the replies, errors among them (a managed Redis forbids CONFIG, an ACL
may forbid INFO too; what cannot be read is not judged). Invariant: every finding says what, why
it matters, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("INFO",),
    ("CONFIG", "GET", "appendfsync"),
    ("CONFIG", "GET", "save"),
    ("TIME",),
)
"""One round trip."""
OLDEST = (6, 2)
NEARLY_FULL = 0.9
FAR_CLOCK_S = 5.0
SLOW_MS = 50.0
PROBLEM, NOTE = "problem", "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a server or a run."""

    check: str
    """Which question was asked: a word of `docs/cli.md`."""
    level: str
    """`problem` (to be mended), or `note` (to be known)."""
    what: str
    why: str
    do: str

    @property
    def sentence(self) -> str:
        """All of it, for people."""
        return f"{self.what}: {self.why}. {self.do}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself; what it may not say is None or missing."""

    info: dict[str, str] | None = None
    config: dict[str, str] = field(default_factory=dict)
    config_error: str = ""
    unix_s: float | None = None

    def text(self, name: str) -> str:
        """Return a value of INFO, empty where there is none."""
        return "" if self.info is None else self.info.get(name, "")

    def number(self, name: str) -> int:
        """Return a number of INFO, 0 where there is none."""
        text = self.text(name)
        return int(text) if text.isdigit() else 0

    @property
    def name(self) -> str:
        """Product and version, for people."""
        if valkey := self.text("valkey_version"):
            return f"Valkey {valkey}"
        return f"Redis {self.text('redis_version') or 'of an unknown version'}"

    @property
    def version(self) -> tuple[int, ...]:
        """Of Redis, which Valkey claims to be as well; empty where unknown."""
        parts = self.text("redis_version").split(".")
        return tuple(int(part) for part in parts if part.isdigit())


def facts_of(replies: Sequence[Any]) -> Facts:
    """Read the replies to `COMMANDS`; an exception stands for a refused command."""
    info, fsync, save, now = replies
    config: dict[str, str] = {}
    refused = ""
    for reply in (fsync, save):
        if isinstance(reply, Exception):
            refused = str(reply)
        else:
            texts = [_text(part) for part in reply]
            config |= dict(zip(texts[::2], texts[1::2], strict=False))
    return Facts(
        info=None if isinstance(info, Exception) else _lines(_text(info)),
        config=config,
        config_error=refused,
        unix_s=None if isinstance(now, Exception) else int(now[0]) + int(now[1]) / 1e6,
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _lines(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value.strip() for name, colon, value in pairs if colon}


def judge(facts: Facts) -> list[Finding]:
    """Return what is to be mended or known about a server, the gravest first."""
    if facts.info is None:
        why = "its version, memory, policy and append-only file cannot be judged"
        return [Finding("info", NOTE, "INFO is forbidden to this user", why,
                        "Permit it (ACL +info), or make sure of them in another way")]  # fmt: skip
    checks = (_version, _role, _eviction, _memory, _persistence, _failed_writes, _config)
    found = [finding for check in checks for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.level != PROBLEM)


def _version(facts: Facts) -> list[Finding]:
    if not facts.version or facts.version >= OLDEST:
        return []
    return [Finding("version", PROBLEM, f"{facts.name} is too old",
                    "the scripts use commands of Redis 6.2 (XAUTOCLAIM, ZADD GT)",
                    "Upgrade to Redis 6.2 or newer, or to Valkey")]  # fmt: skip


def _role(facts: Facts) -> list[Finding]:
    if facts.text("role") != "slave":
        return []
    master = f"{facts.text('master_host')}:{facts.text('master_port')}"
    return [Finding("role", PROBLEM, f"this server is a replica of {master}",
                    "it takes no writes, so everybody waits",
                    f"Give the URL of the primary (redis://{master}), or of its sentinels "
                    "(redis+sentinel://…)")]  # fmt: skip


def _eviction(facts: Facts) -> list[Finding]:
    limit, policy = facts.number("maxmemory"), facts.text("maxmemory_policy")
    if not limit or not policy or policy == "noeviction":
        return []
    return [Finding("eviction", PROBLEM, f"maxmemory-policy is {policy}",
                    "when memory is full this server deletes keys, and groups vanish in the middle",
                    "CONFIG SET maxmemory-policy noeviction, and in its file: full memory then "
                    "only stops the producer")]  # fmt: skip


def _memory(facts: Facts) -> list[Finding]:
    limit, used = facts.number("maxmemory"), facts.number("used_memory")
    if not limit or used < NEARLY_FULL * limit:
        return []
    state = "full" if used >= limit else "nearly full"
    return [Finding("memory", PROBLEM,
                    f"memory is {state}: {megabytes(used)} of {megabytes(limit)} used",
                    "the producer waits while it is full; what runs goes on and frees it",
                    "Raise maxmemory, lower producer.capacity_groups, or start the trainer that "
                    "acks")]  # fmt: skip


def _persistence(facts: Facts) -> list[Finding]:
    if facts.text("aof_enabled") == "":
        return []
    if facts.text("aof_enabled") == "0":
        snapshots = facts.config.get("save")
        if snapshots == "":
            lost = "a restart of it loses the run: everything since the trainer's last checkpoint"
        else:
            lost = "a restart of it loses everything since its last snapshot, minutes perhaps"
        return [Finding("persistence", PROBLEM, "the append-only file is off (appendonly no)",
                        f"{lost} is generated again",
                        "CONFIG SET appendonly yes, and in its file")]  # fmt: skip
    fsync = facts.config.get("appendfsync", "everysec")
    if fsync == "no":
        return [Finding("persistence", PROBLEM, "appendfsync is no",
                        "a crash of the machine loses what the kernel has not written, up to 30 s",
                        "CONFIG SET appendfsync everysec: at most a second")]  # fmt: skip
    if fsync == "always":
        return [Finding("persistence", NOTE, "appendfsync is always",
                        "every call waits for the disk, for a second that a trainer would tell "
                        "again anyway",
                        "appendfsync everysec is enough")]  # fmt: skip
    return []


def _failed_writes(facts: Facts) -> list[Finding]:
    aof, rdb = facts.text("aof_last_write_status"), facts.text("rdb_last_bgsave_status")
    failed = "its append-only file" if aof == "err" else "a snapshot" if rdb == "err" else ""
    if not failed:
        return []
    return [Finding("disk", PROBLEM, f"this server could not write {failed}",
                    "it may refuse writes (MISCONF), and keeps nothing through a restart",
                    "Look at its disk and its log")]  # fmt: skip


def _config(facts: Facts) -> list[Finding]:
    if not facts.config_error:
        return []
    return [Finding("config", NOTE, "CONFIG is forbidden here (a managed server, or an ACL)",
                    "how often the append-only file is synced cannot be read; the rest is judged "
                    "by INFO",
                    "Make sure of appendfsync everysec where the server is managed")]  # fmt: skip


def clock_finding(facts: Facts, unix_s: float) -> list[Finding]:
    """Judge the distance of the server's clock from `unix_s`, read when it answered."""
    if facts.unix_s is None or abs(facts.unix_s - unix_s) < FAR_CLOCK_S:
        return []
    return [Finding("clock", NOTE,
                    f"its clock is {facts.unix_s - unix_s:+.1f} s from the one here",
                    "ages and waits that are shown are wrong by that (leases are not: they use "
                    "the server's clock only)",
                    "Synchronize both machines (NTP)")]  # fmt: skip


def latency_finding(round_trips_ms: Sequence[float]) -> list[Finding]:
    """Judge the round trips of a few pings."""
    middle = sorted(round_trips_ms)[len(round_trips_ms) // 2]
    if middle < SLOW_MS:
        return []
    return [Finding("latency", PROBLEM, f"a round trip takes {middle:.0f} ms",
                    "every lease, result and batch waits for some",
                    "Bring Redis nearer to workers and trainer, or find out what keeps it busy "
                    "(SLOWLOG GET)")]  # fmt: skip


def megabytes(num_bytes: int) -> str:
    """Return a size for people."""
    return f"{num_bytes / (1 << 20):,.1f} MB"


def problems(findings: Sequence[Finding]) -> list[Finding]:
    """Return what is to be mended."""
    return [finding for finding in findings if finding.level == PROBLEM]
