"""What processes read of the run's streams: groups that wait, evaluations, control words.

Owns the commands and how entries are told from what is none of ours. Never does I/O: an executor
sends `Read.commands` and hands the replies to `Read.parse`. Invariant: a read changes nothing but
the pending lists of `full` and `ready`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rollstream.queue.keys import FULL_GROUP, READY_CONSUMER, READY_GROUP
from rollstream.queue.reads import Command, Read, StreamEntry, pairs_of, text_of

MAX_N_DIGITS = 6
"""Of the size of a group; a longer one is damage, and would ask for a million fields."""


def read_full(prefix: str, consumer: str, count: int, block_ms: int) -> Read[list[StreamEntry]]:
    """Take new entries of `full` for one aggregator."""
    command = _read_group(FULL_GROUP, consumer, count, block_ms, f"{prefix}full", ">")
    return Read((command,), lambda replies: _parse_streams(replies[0]))


def read_ready(prefix: str, count: int, block_ms: int) -> Read[list[StreamEntry]]:
    """Take new entries of `ready` for the trainer."""
    command = _read_group(READY_GROUP, READY_CONSUMER, count, block_ms, f"{prefix}ready", ">")
    return Read((command,), lambda replies: _parse_streams(replies[0]))


def pending_ready(prefix: str, after_id: str, count: int) -> Read[list[StreamEntry]]:
    """Page through what the trainer has not acked, read or not, behind `after_id`.

    It reads the stream and not the consumer's pending list, which is gone with its consumer: the
    stream keeps an entry until the group's end. What is none of ours has an empty `group_index`,
    so only the end of the stream is an empty page.
    """
    command = ("XRANGE", f"{prefix}ready", f"({after_id}", "+", "COUNT", count)

    def parse(replies: list[Any]) -> list[StreamEntry]:
        found = ((entry, _parse_entry(entry)) for entry in replies[0])
        return [ours or StreamEntry(text_of(entry[0]), "", 0) for entry, ours in found]

    return Read((command,), parse)


def read_eval(prefix: str, after_id: str, count: int, block_ms: int) -> Read[list[StreamEntry]]:
    """Read evaluations that ended, behind `after_id`, waiting for the first.

    An entry stays until its group is acked, so whoever reads from "0" finds all there are. What is
    none of ours has an empty `group_index`: it has to be passed, too.
    """
    block = ("BLOCK", block_ms) if block_ms > 0 else ()
    command = ("XREAD", "COUNT", count, *block, "STREAMS", f"{prefix}eval", after_id)

    def parse(replies: list[Any]) -> list[StreamEntry]:
        found = ((entry, _parse_entry(entry)) for entry in _raw_entries(replies[0]))
        return [ours or StreamEntry(text_of(entry[0]), "", 0) for entry, ours in found]

    return Read((command,), parse)


def newest(prefix: str, stream: str, count: int) -> Read[list[StreamEntry]]:
    """Look at the newest entries of `full` or `ready`, newest first; nobody takes them by that.

    `ready` keeps an entry until its group is acked, so what the trainer has in hand is there too.
    """
    command = ("XREVRANGE", f"{prefix}{stream}", "+", "-", "COUNT", count)
    return Read((command,), lambda replies: _parse_entries(replies[0]))


def _read_group(
    group: str, consumer: str, count: int, block_ms: int, key: str, after: str
) -> Command:
    block = ("BLOCK", block_ms) if block_ms > 0 else ()
    return ("XREADGROUP", "GROUP", group, consumer, "COUNT", count, *block, "STREAMS", key, after)


def claim_page(
    prefix: str, consumer: str, idle_ms: int, start: str, count: int
) -> Read[tuple[str, list[StreamEntry]]]:
    """Take over entries of `full` that were handed out long ago; returns where to go on."""
    key = f"{prefix}full"
    command = ("XAUTOCLAIM", key, FULL_GROUP, consumer, idle_ms, start, "COUNT", count)
    return Read((command,), lambda replies: (text_of(replies[0][0]), _parse_entries(replies[0][1])))


def keep_full(prefix: str, consumer: str, message_ids: Sequence[str]) -> Read[None]:
    """Begin the idle time of entries of `full` anew; JUSTID leaves their count alone."""
    key = f"{prefix}full"
    command: Command = ("XCLAIM", key, FULL_GROUP, consumer, 0, *message_ids, "JUSTID")
    return Read((command,), lambda replies: None)


def pending_counts(prefix: str, entries: Sequence[StreamEntry]) -> Read[list[StreamEntry]]:
    """Read how often each entry of `full` was handed out."""
    key = f"{prefix}full"
    commands: tuple[Command, ...] = tuple(
        ("XPENDING", key, FULL_GROUP, e.message_id, e.message_id, 1) for e in entries
    )

    def parse(replies: list[Any]) -> list[StreamEntry]:
        found = []
        for entry, reply in zip(entries, replies, strict=True):
            times = int(reply[0][3]) if reply else entry.deliveries
            found.append(replace(entry, deliveries=times))
        return found

    return Read(commands, parse)


def control_tail(prefix: str) -> Read[str]:
    """Read the id of the newest control entry, to read on from there."""
    command = ("XREVRANGE", f"{prefix}ctl", "+", "-", "COUNT", 1)
    return Read((command,), lambda replies: text_of(replies[0][0][0]) if replies[0] else "0-0")


def read_control(
    prefix: str, last_id: str, block_ms: int
) -> Read[tuple[str, list[dict[str, str]]]]:
    """Read control entries behind `last_id`."""
    block = ("BLOCK", block_ms) if block_ms > 0 else ()
    command = ("XREAD", "COUNT", 64, *block, "STREAMS", f"{prefix}ctl", last_id)

    def parse(replies: list[Any]) -> tuple[str, list[dict[str, str]]]:
        found, newest = [], last_id
        for message_id, row in _raw_entries(replies[0]):
            newest = text_of(message_id)
            found.append({text_of(name): text_of(value) for name, value in pairs_of(row)})
        return newest, found

    return Read((command,), parse)


def pop_wake(prefix: str, name: str, timeout_s: float) -> Read[bool]:
    """Wait for a token of `bell` or `room`."""
    return Read((("BLPOP", prefix + name, timeout_s),), lambda replies: replies[0] is not None)


def _parse_streams(reply: Any) -> list[StreamEntry]:
    return _parse_entries(_raw_entries(reply))


def _raw_entries(reply: Any) -> Iterable[Any]:
    return [entry for _, entries in reply or () for entry in entries]


def _parse_entries(entries: Iterable[Any]) -> list[StreamEntry]:
    """Read entries of `full` or `ready`; what is none of ours is skipped, and the audit counts it.

    Entries that were deleted while they were pending come without fields. A foreign or damaged one
    stays where it is: it must not stop those behind it.
    """
    parsed = (_parse_entry(entry) for entry in entries if entry is not None and entry[1])
    return [entry for entry in parsed if entry is not None]


def _parse_entry(entry: Any) -> StreamEntry | None:
    row = dict(pairs_of(entry[1]))
    gid, n = row.get(b"g", b""), row.get(b"n", b"")
    named = gid.isdigit() or (gid.startswith(b"e:") and gid.isascii())
    if not named or not n.isdigit() or len(n) > MAX_N_DIGITS:
        return None
    return StreamEntry(
        message_id=text_of(entry[0]),
        group_index=text_of(gid),
        n=int(n),
        num_bytes=_size(row.get(b"b")),
        prompt_bytes=_size(row.get(b"p")) or 0,
    )


def _size(value: bytes | None) -> int | None:
    return int(value) if value is not None and len(value) < 16 and value.isdigit() else None
