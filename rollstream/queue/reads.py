"""What processes read of a run beside the scripts: plain commands, and records of their answers.

Owns the records (`RunInfo`, `Confirmation`, `StreamEntry`, `StoredGroup`) and which commands fill
them, but for streams (`rollstream.queue.streams`) and groups, whose size needs care
(`rollstream.queue.fetch`). Never does I/O: an executor sends `Read.commands` in one round trip and
hands the replies to `Read.parse`. Invariant: a read of this module changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollstream.errors import RunMismatch
from rollstream.group import EnvRule
from rollstream.queue.calls import Arg
from rollstream.queue.keys import PAST_MEMBERS, SCHEMA
from rollstream.wire import decode_envs

T = TypeVar("T")
Command = tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """Commands of one round trip, and how their replies are read."""

    commands: tuple[Command, ...]
    parse: Callable[[list[Any]], T]


_MAX_DIGITS = 20


# --- records -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RunInfo:
    """The hash `m`: what a run is and where it stands."""

    run: str
    schema: int
    fingerprint: str
    state: str
    """`running`, `paused`, `aborting`, `ended` or `failed`."""
    epoch: int
    version: int
    capacity: int
    window: int
    lease_s: float
    max_attempts: int
    max_crashes: int
    max_stale: int
    """-1: groups never get stale."""
    max_body_bytes: int
    frontier: int
    done: bool
    """The producer has enqueued everything there is (of this epoch)."""
    delivered: int
    """Groups that the trainer holds without having acked them."""
    error: str
    """Why it was aborted or failed."""
    control_seq: int
    connects: int
    """Number of the latest connect of a trainer."""
    consumer: str
    """Token of that trainer."""
    rewind_id: str
    """Of the latest rewind; empty where there was none."""
    clock_ms: int
    """The queue clock at the latest sweep."""
    total: int = 0
    """Group indexes are 0..total-1; 0 where whoever opened the run did not say."""
    version_label: str = ""
    """The engines' own name of the current weights, where the trainer gave one."""
    envs: Mapping[str, EnvRule] = field(default_factory=dict)
    """What of each environment decides usability, as the producer opened the run."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """What the engines call which version: the newest 64 that the trainer named."""
    pause_mode: str = ""
    """`keep` or `abort`; empty while the run is not paused."""
    pause_by: str = ""
    """Token of the trainer that paused it; empty where somebody else did, or it is not paused."""
    paused_s: float = 0.0
    """How long the pause under way lasted at the latest sweep."""
    pause_left_s: float | None = None
    """Until it ends by itself, from the latest sweep on; None: it lasts, or there is no pause."""
    engines: tuple[str, ...] | None = None
    """The run's engines for every worker; None: each worker's own configuration."""
    on_stale: str = "drop"
    """What becomes of a group that is too old: `drop`, `requeue` or `deliver`."""
    max_requeues: int = 1
    """How often one group may begin anew."""
    weights_mode: str = "async"
    """`async`, `on_policy` or `colocated`."""
    opened_unix_s: float = 0.0
    """When the run was opened, on the server's clock; 0.0 where an older version opened it."""
    draining: bool = False
    """An operator closed it to new prompts; what lives goes on to its end."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A worker that is present, and what it confirmed last."""

    worker: str
    age_s: float
    """Queue clock since it was seen last; a lease or more: it does not live, or cannot say so."""
    control_seq: int = -1
    """It obeys every control word up to this one; -1 where it confirmed nothing."""
    in_flight: int = 0
    """Its calls to engines that were under way then."""
    engines: bytes = b""
    """JSON of what it knows of its engines, as it sent it."""

    def engine_states(self) -> list[dict[str, Any]]:
        """Return `engines` read; empty where it is none of ours."""
        try:
            found = json.loads(self.engines)
        except (ValueError, RecursionError):  # nested a thousandfold: nothing that we write
            return []
        states = found if isinstance(found, list) else []
        return [state for state in states if isinstance(state, dict)]


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of `full` or `ready`: a reference to a group."""

    message_id: str
    group_index: str
    n: int
    deliveries: int = 1
    """How often it was handed out, this time included."""
    num_bytes: int | None = None
    """Of all bodies and texts of the group; None where the entry does not say."""
    prompt_bytes: int = 0

    @property
    def unix_s(self) -> float:
        """When it was written, on the server's clock."""
        return stream_unix_s(self.message_id)


@dataclass(slots=True)
class StoredGroup:
    """A group as Redis holds it; `state` is empty where it holds none of that id."""

    group_index: str
    n: int
    state: str = ""
    prompt: bytes | None = None
    headers: list[bytes | None] = field(default_factory=list)
    errors: list[tuple[str, str] | None] = field(default_factory=list)
    """Per member (reason, text) where the queue ended it."""
    bodies: list[bytes | None] = field(default_factory=list)
    """Empty where bodies were not asked for."""
    texts: list[bytes | None] = field(default_factory=list)
    """Empty where texts were not asked for."""
    why: str = ""
    """Reason of the first member that failed for good."""
    full_id: str = ""
    ready_id: str = ""
    version_at_lease: int = -1
    """Weight version when its first member was leased; -1 before."""
    life: int = 0
    """How often it was requeued."""
    num_bytes: int = 0
    """Of all bodies and texts that it has."""

    @property
    def full_unix_s(self) -> float:
        """When its last member ended, on the server's clock; 0.0 before."""
        return stream_unix_s(self.full_id)

    @property
    def ready_unix_s(self) -> float:
        """When the aggregator kept it, on the server's clock; 0.0 before."""
        return stream_unix_s(self.ready_id)


@dataclass(slots=True)
class Delivery:
    """What became of a `deliver`, with the groups that are in hand now."""

    answers: list[str]
    """Per entry `ok`, `stale` (dropped there) or `gone`; empty where `taken`."""
    groups: list[StoredGroup | None]
    """Per entry, with bodies; None where the answer is not `ok`."""
    taken: bool = False
    """This consumer is not (or no longer) the run's."""


def stream_unix_s(message_id: str) -> float:
    """Return the time that a stream id carries; 0.0 for none."""
    return int(message_id.partition("-")[0]) / 1000 if message_id else 0.0


def _seconds(milliseconds: str) -> float:
    """Return milliseconds in seconds.

    Raises:
        ValueError: no number, or a larger one than any clock shows: it is damage.
    """
    if len(milliseconds) > _MAX_DIGITS:
        raise ValueError(f"{milliseconds[:_MAX_DIGITS]}… ms")
    return int(milliseconds) / 1000


# --- the run -------------------------------------------------------------------------------------
def info(prefix: str, run: str) -> Read[RunInfo | None]:
    """Read what the run is; None where there is no such run.

    Its parse raises RunMismatch where another version wrote it: nothing else of it means to us
    what it says.
    """
    commands = (("HGETALL", f"{prefix}m"), ("HGETALL", f"{prefix}lb"))
    return Read(commands, lambda replies: _parse_info(run, *replies))


def _parse_info(run: str, reply: Any, labels: Any) -> RunInfo | None:
    raw = {text_of(name): value for name, value in pairs_of(reply)}
    if "state" not in raw:
        return None
    schema = text_of(raw.get("schema", b""))
    if schema != str(SCHEMA):
        raise RunMismatch(
            f"run {run!r} was written by another version of Rollstream (layout "
            f"{schema or 'unknown'}, this one has {SCHEMA}) and was left as it is: use the release "
            f"that opened it, another run name, or remove it: rollstream runs --remove {run}"
        )
    envs = decode_envs(raw.pop("envs", None))
    m = {name: text_of(value) for name, value in raw.items()}
    paused = m["state"] == "paused"
    pause_until = int(m.get("pause_until", 0)) if paused else 0
    return RunInfo(
        run=run,
        schema=int(m["schema"]),
        fingerprint=m["fingerprint"],
        state=m["state"],
        epoch=int(m["epoch"]),
        version=int(m["version"]),
        capacity=int(m["cap"]),
        window=int(m["W"]),
        lease_s=_seconds(m["lease_ms"]),
        max_attempts=int(m["max_attempts"]),
        max_crashes=int(m["max_crashes"]),
        max_stale=int(m.get("max_stale", -1)),
        max_body_bytes=int(m["max_body"]),
        frontier=int(m["frontier"]),
        done=m["done"] == "1",
        delivered=int(m["delivered"]),
        error=m["error"],
        control_seq=int(m["control_seq"]),
        connects=int(m["connects"]),
        consumer=m["consumer"],
        rewind_id=m["rewind_id"],
        clock_ms=int(m["clock"]),
        total=int(m.get("total", 0)),
        version_label=m.get("label", ""),
        envs=envs,
        labels={text_of(label): int(version) for label, version in pairs_of(labels)},
        pause_mode=m.get("pause_mode", "") if paused else "",
        pause_by=m.get("pause_by", "") if paused else "",
        paused_s=max(0, int(m["clock"]) - int(m["paused_at"])) / 1000 if paused else 0.0,
        pause_left_s=max(0, pause_until - int(m["clock"])) / 1000 if pause_until else None,
        engines=tuple(json.loads(m["engines"])) if "engines" in m else None,
        on_stale=m.get("on_stale", "drop"),
        max_requeues=int(m.get("max_requeues", 1)),
        weights_mode=m.get("weights_mode", "async"),
        opened_unix_s=_seconds(m.get("opened", "0")),
        draining=m.get("draining") == "1",
    )


_BY_ENV = "env:"
"""Begins the names of counters of one environment: `env:<counter>:<environment>`."""


def counters(prefix: str) -> Read[dict[str, int]]:
    """Read every counter of the run, but for those of single environments."""
    return Read((("HGETALL", f"{prefix}c"),), _parse_counters)


def _parse_counters(replies: list[Any]) -> dict[str, int]:
    found = all_counters(replies[0])
    return {name: count for name, count in found.items() if not name.startswith(_BY_ENV)}


def all_counters(reply: Any) -> dict[str, int]:
    """Read a reply with every counter, also those of single environments."""
    return {text_of(name): int(value) for name, value in pairs_of(reply)}


def ends_by_env(counters: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return, of all counters, ends of groups by (environment, `acked` or `dropped:reason`)."""
    ends: dict[tuple[str, str], int] = {}
    for name, count in counters.items():
        if name.startswith(_BY_ENV):
            outcome, _, rest = name.removeprefix(_BY_ENV).partition(":")
            if outcome == "dropped":
                reason, _, rest = rest.partition(":")
                outcome = f"dropped:{reason}"
            ends[rest, outcome] = count
    return ends


_DEPTHS: tuple[tuple[str, str, str], ...] = (
    ("q", "ZCARD", "q"), ("d", "ZCARD", "d"), ("s", "ZCARD", "s"), ("l", "ZCARD", "l"),
    ("full", "XLEN", "full"), ("ready", "XLEN", "ready"), ("eval", "XLEN", "eval"),
    ("live", "SCARD", "gs"), ("evaluations", "SCARD", "ge"),
)  # fmt: skip


def depths(prefix: str) -> Read[dict[str, int]]:
    """Read how much lies where: members in q d s l, groups in full, ready, delivered, live.

    Of evaluations: how many live (`evaluations`), and how many of them ended (`eval`).
    """
    commands: list[Command] = [(command, prefix + key) for _, command, key in _DEPTHS]
    commands.append(("HGET", f"{prefix}m", "delivered"))
    return Read(tuple(commands), _parse_depths)


def _parse_depths(replies: list[Any]) -> dict[str, int]:
    found = {name: int(reply) for (name, _, _), reply in zip(_DEPTHS, replies, strict=False)}
    found["delivered"] = int(replies[-1] or 0)
    # The stream keeps an entry until its ack, so that a restarted trainer finds it.
    found["ready"] = max(0, found["ready"] - found["delivered"])
    return found


def presence(prefix: str) -> Read[dict[str, int]]:
    """Read how many processes of each role were seen within four leases."""
    sets = {"workers": "w", "producers": "wp", "aggregators": "wa"}
    commands = tuple(("ZCARD", prefix + key) for key in sets.values())
    return Read(commands, lambda replies: dict(zip(sets, map(int, replies), strict=True)))


def confirmations(prefix: str) -> Read[list[Confirmation]]:
    """Read what every worker confirmed that was seen within four leases."""
    commands = (
        ("ZRANGE", f"{prefix}w", 0, -1, "WITHSCORES"),
        ("HGETALL", f"{prefix}wc"),
        ("HMGET", f"{prefix}m", "clock", "clock_tick", "lease_ms"),
        ("TIME",),
    )
    return Read(commands, _parse_confirmations)


def _parse_confirmations(replies: list[Any]) -> list[Confirmation]:
    seen, said, run, time = replies
    if run[0] is None:
        return []
    clock, tick, lease_ms = (float(value) for value in run)
    # As the scripts read the clock: sweeps move it, by half a lease at most.
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    clock += max(0.0, min(now_ms - tick, lease_ms // 2))
    records = dict(pairs_of(said))
    return [
        Confirmation(
            worker.decode(errors="replace"),
            max(0.0, clock - float(score)) / 1000,
            *_parse_confirmed(records.get(worker, b"")),
        )
        for worker, score in pairs_of(seen)
    ]


def _parse_confirmed(record: bytes) -> tuple[int, int, bytes]:
    seq, _, rest = record.partition(b" ")
    in_flight, _, engines = rest.partition(b" ")
    # A number longer than any of ours is as foreign as a word, and Python may refuse to read it.
    if not (_is_count(seq) and _is_count(in_flight)):
        return -1, 0, b""
    return int(seq), int(in_flight), engines


def _is_count(digits: bytes) -> bool:
    return digits.isdigit() and len(digits) <= _MAX_DIGITS


def past_page(prefix: str, before: str, count: int) -> Read[tuple[str, list[dict[str, Any]]]]:
    """Read drops older than entry `before` (`+`: the newest), newest first; where to go on."""
    end = before if before == "+" else f"({before}"
    commands = (("XREVRANGE", f"{prefix}past", end, "-", "COUNT", count),)

    def parse(replies: list[Any]) -> tuple[str, list[dict[str, Any]]]:
        entries = replies[0]
        return text_of(entries[-1][0]) if entries else "", [_parse_drop(entry) for entry in entries]

    return Read(commands, parse)


def _parse_drop(entry: Any) -> dict[str, Any]:
    message_id = text_of(entry[0])
    row = {text_of(name): value for name, value in pairs_of(entry[1])}
    shown = range(min(int(row["n"]), PAST_MEMBERS, int(row.get("cut", PAST_MEMBERS))))
    return {
        "group_index": text_of(row["g"]),
        "n": int(row["n"]),
        "reason": text_of(row["reason"]),
        "detail": text_of(row["detail"]),
        "state": text_of(row["state"]),
        "why": text_of(row["why"]),
        "unix_s": stream_unix_s(message_id),
        "headers": [row.get(f"h{i}") for i in shown],
        "errors": [parse_error(row.get(f"e{i}")) for i in shown],
    }


def parse_error(value: bytes | None) -> tuple[str, str] | None:
    """Read `reason text` of a member that failed for good."""
    if value is None:
        return None
    reason, _, text = value.decode(errors="replace").partition(" ")
    return reason, text


def parked(prefix: str, group_index: str, member: int) -> Read[bytes | None]:
    """Read what a member parked."""
    command = ("HGET", f"{prefix}b:{group_index}", f"p{member}")
    return Read((command,), lambda replies: replies[0])


def pairs_of(reply: Any) -> Iterable[tuple[Any, Any]]:
    """Read a flat list of names and values, or a map where the client made one of it."""
    if isinstance(reply, dict):
        return reply.items()
    return zip(reply[::2], reply[1::2], strict=True)


def text_of(value: Any) -> str:
    """Return a reply as text."""
    return value.decode() if isinstance(value, bytes) else str(value)
