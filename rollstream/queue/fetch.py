"""Reads of groups, a bounded piece of them a round trip.

Owns how many bytes one round trip asks for: Redis answers nobody else while it copies them, and
commands that are sent together run back to back. Never does I/O: a `Trips` yields what to send and
gets the replies. Invariant: no round trip asks for more than about `MAX_TRIP_BYTES`, except for one
member's body that alone is larger (`worker.max_body_bytes` bounds it).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rollstream.queue.calls import Arg, ScriptCall, deliver
from rollstream.queue.reads import Command, Delivery, StoredGroup, StreamEntry, parse_error

T = TypeVar("T")
Trip: TypeAlias = "tuple[Command | ScriptCall[Any], ...]"
"""What is sent together; the replies to scripts are given back as they are, not parsed."""
Trips: TypeAlias = Generator[Trip, list[Any], T]

MAX_TRIP_BYTES = 4 << 20
"""Valkey copies it in 2 to 4 ms; a usual group (8 members of 33 KB) fits fifteen times."""
HEAD_BYTES = 512
"""About what the header or the error of one member takes; texts of errors are bounded."""
MEMBERS_A_COMMAND = 2048
_FIELDS = ("state", "why", "full_id", "ready_id", "version", "life", "bytes")


@dataclass(slots=True)
class _Piece:
    """One command of a read, about how many bytes it brings, and who takes its reply."""

    command: Command
    weight: int
    take: Callable[[Any], None]


def weight_of(entry: StreamEntry) -> int | None:
    """Return about how many bytes a whole group takes on its way; None where nobody wrote it."""
    if entry.num_bytes is None:
        return None
    return entry.num_bytes + entry.prompt_bytes + entry.n * HEAD_BYTES


def first_trip(entries: Sequence[StreamEntry]) -> int:
    """Return how many of `entries`, from the first on, one round trip takes; at least one."""
    total = 0
    for count, entry in enumerate(entries):
        weight = weight_of(entry)
        if weight is None or total + weight > MAX_TRIP_BYTES:
            return max(1, count)
        total += weight
    return len(entries)


# --- what executors run --------------------------------------------------------------------------
def headers(
    prefix: str, entries: Sequence[StreamEntry], *, prompts: bool
) -> Trips[list[StoredGroup]]:
    """Read groups without bodies."""
    found = [StoredGroup(entry.group_index, entry.n) for entry in entries]
    pieces: list[_Piece] = []
    for entry, group in zip(entries, found, strict=True):
        pieces += _head(prefix, group, entry.prompt_bytes, prompts=prompts)
    yield from _run(pieces)
    return found


def bodies(prefix: str, group: StoredGroup, *, text: bool) -> Trips[bool]:
    """Add the bodies to a group whose headers were read; whether it stands as it stood then."""
    (sizes,) = yield from _sizes(prefix, [group], [group.num_bytes], text=text)
    now = StoredGroup(group.group_index, 0)
    yield from _run(
        [*_bodies(prefix, group, sizes, text=text), *_head(prefix, now, 0, prompts=False)]
    )
    return bool(now.state) and (now.state, now.life, now.full_id) == (
        group.state,
        group.life,
        group.full_id,
    )


def groups(prefix: str, ids: Sequence[tuple[str, int]], *, text: bool) -> Trips[list[StoredGroup]]:
    """Read groups by (id, n) with prompt and bodies; their sizes are asked for first."""
    found = [StoredGroup(gid, n) for gid, n in ids]
    prompts: list[int] = []
    yield from _run(_ask(("HSTRLEN", f"{prefix}g:{gid}", "prompt"), prompts) for gid, _ in ids)
    entries = [
        StreamEntry("", gid, n, prompt_bytes=size)
        for (gid, n), size in zip(ids, prompts, strict=True)
    ]
    yield from _read_whole(prefix, entries, found, text=text)
    return found


def deliver_and_fetch(
    prefix: str, consumer: str, entries: Sequence[StreamEntry], *, text: bool
) -> Trips[Delivery]:
    """Take groups in hand and read them whole; usual ones in as many round trips as they fill."""
    whole = Delivery([], [])
    start = 0
    while start < len(entries):
        end = start + first_trip(entries[start:])
        part = yield from _deliver_some(prefix, consumer, entries[start:end], text=text)
        if part.taken:
            return part
        whole.answers += part.answers
        whole.groups += part.groups
        start = end
    return whole


def _deliver_some(
    prefix: str, consumer: str, entries: Sequence[StreamEntry], *, text: bool
) -> Trips[Delivery]:
    call = deliver(consumer, [entry.group_index for entry in entries])
    found = [StoredGroup(entry.group_index, entry.n) for entry in entries]
    reading = _read_whole(prefix, entries, found, text=text)
    first = next(reading)
    replies = yield (call, *first)
    answers = call.parse(replies[0])
    if answers == ["taken"]:
        return Delivery([], [], taken=True)
    if "ok" in answers:
        yield from _go_on(reading, replies[1:])
    # Its state is read behind its bodies: between two commands an abort may have dropped it. And an
    # entry that the group does not name is a copy, or of an earlier life: its n may be wrong.
    answers = [
        "gone" if answer == "ok" and not _is_entry_of(group, entry) else answer
        for answer, group, entry in zip(answers, found, entries, strict=True)
    ]
    held = [g if answer == "ok" else None for answer, g in zip(answers, found, strict=True)]
    return Delivery(answers, held)


def _is_entry_of(group: StoredGroup, entry: StreamEntry) -> bool:
    return group.state == "delivered" and group.ready_id == entry.message_id


def _read_whole(
    prefix: str, entries: Sequence[StreamEntry], found: Sequence[StoredGroup], *, text: bool
) -> Trips[None]:
    totals = [entry.num_bytes for entry in entries]
    sizes_of = yield from _sizes(prefix, found, totals, text=text)
    pieces: list[_Piece] = []
    for entry, group, sizes in zip(entries, found, sizes_of, strict=True):
        pieces += _bodies(prefix, group, sizes, text=text)
        pieces += _head(prefix, group, entry.prompt_bytes, prompts=True)
    yield from _run(pieces)


def _go_on(trips: Trips[T], replies: list[Any]) -> Trips[T]:
    """Run the rest of `trips`, whose first round trip was made by another."""
    try:
        trip = trips.send(replies)
        while True:
            replies = yield trip
            trip = trips.send(replies)
    except StopIteration as end:
        result: T = end.value
        return result


# --- pieces --------------------------------------------------------------------------------------
def _run(pieces: Iterable[_Piece]) -> Trips[None]:
    for together in _packed(pieces):
        replies = yield tuple(piece.command for piece in together)
        for piece, reply in zip(together, replies, strict=True):
            piece.take(reply)


def _packed(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Split into round trips, in order."""
    together: list[_Piece] = []
    total = 0
    for piece in pieces:
        if together and total + piece.weight > MAX_TRIP_BYTES:
            yield together
            together, total = [], 0
        together.append(piece)
        total += piece.weight
    if together:
        yield together


def _ask(command: Command, into: list[int]) -> _Piece:
    return _Piece(command, HEAD_BYTES, lambda reply: into.append(int(reply or 0)))


def _sizes(
    prefix: str,
    found: Sequence[StoredGroup],
    totals: Sequence[int | None],
    *,
    text: bool,
) -> Trips[list[int | list[int]]]:
    """Return per group its bytes where they fit a round trip, else those of every member.

    Args:
        prefix: of the run.
        found: the groups.
        totals: per group the bytes of all its bodies, None where they are not known.
        text: whether texts count.
    """
    sizes: list[int | list[int]] = []
    pieces: list[_Piece] = []
    asked: list[tuple[int, list[int]]] = []
    for place, (group, total) in enumerate(zip(found, totals, strict=True)):
        sizes.append(total or 0)
        if total is not None and total <= MAX_TRIP_BYTES:
            continue
        lengths: list[int] = []
        asked.append((place, lengths))
        for field in _body_fields(range(group.n), text=text):
            command = ("HSTRLEN", f"{prefix}b:{group.group_index}", field)
            pieces.append(_ask(command, lengths))
    yield from _run(pieces)
    for place, lengths in asked:
        n = found[place].n
        sizes[place] = [sum(lengths[i::n]) for i in range(n)]
    return sizes


def _bodies(prefix: str, group: StoredGroup, sizes: int | list[int], *, text: bool) -> list[_Piece]:
    """Return the reads of a group's bodies.

    Args:
        prefix: of the run.
        group: that takes them.
        sizes: of all together, which fit a round trip, or of every member.
        text: whether texts are read too.
    """
    n = group.n
    group.bodies, group.texts = [None] * n, [None] * n if text else []
    if isinstance(sizes, int):
        parts = [(range(n), sizes)]
    else:
        parts = [(part, sum(sizes[i] for i in part)) for part in _members_together(sizes)]
    return [
        _Piece(
            ("HMGET", f"{prefix}b:{group.group_index}", *_body_fields(members, text=text)),
            weight,
            _body_taker(group, members),
        )
        for members, weight in parts
        if members
    ]


def _body_taker(group: StoredGroup, members: range) -> Callable[[Any], None]:
    def take(reply: list[bytes | None]) -> None:
        group.bodies[members.start : members.stop] = reply[: len(members)]
        if group.texts:
            group.texts[members.start : members.stop] = reply[len(members) :]

    return take


def _members_together(sizes: Sequence[int]) -> Iterator[range]:
    """Split members into runs whose bodies fit a round trip, in order."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and (total + size > MAX_TRIP_BYTES or i - start >= MEMBERS_A_COMMAND):
            yield range(start, i)
            start, total = i, 0
        total += size
    yield range(start, len(sizes))


def _body_fields(members: range, *, text: bool) -> tuple[Arg, ...]:
    return (*members, *(f"x{i}" for i in members)) if text else tuple(members)


def _head(prefix: str, group: StoredGroup, prompt_bytes: int, *, prompts: bool) -> list[_Piece]:
    """Return the reads of everything of a group but its bodies."""
    n, key = group.n, f"{prefix}g:{group.group_index}"
    group.headers, group.errors = [None] * n, [None] * n
    pieces = []
    for start in range(0, n, MEMBERS_A_COMMAND) or (0,):
        members = range(start, min(start + MEMBERS_A_COMMAND, n))
        # Of the last command: what the group is by then is what counts.
        is_last = members.stop >= n
        own = (*_FIELDS, "prompt") if prompts else _FIELDS
        names = (
            *(own if is_last else ()),
            *(f"h{i}" for i in members),
            *(f"e{i}" for i in members),
        )
        weight = len(members) * HEAD_BYTES + (prompt_bytes if is_last and prompts else 0)
        taker = _head_taker(group, members, len(own) if is_last else 0)
        pieces.append(_Piece(("HMGET", key, *names), weight, taker))
    return pieces


def _head_taker(group: StoredGroup, members: range, num_own: int) -> Callable[[Any], None]:
    def take(reply: list[bytes | None]) -> None:
        if num_own:
            _fill(group, reply[:num_own])
        at = num_own + len(members)
        group.headers[members.start : members.stop] = reply[num_own:at]
        group.errors[members.start : members.stop] = [parse_error(value) for value in reply[at:]]

    return take


def _fill(group: StoredGroup, row: list[bytes | None]) -> None:
    state, why, full_id, ready_id, version, life, num_bytes = row[: len(_FIELDS)]
    group.state = (state or b"").decode()
    group.why = (why or b"").decode()
    group.full_id = (full_id or b"").decode()
    group.ready_id = (ready_id or b"").decode()
    group.version_at_lease = -1 if version is None else int(version)
    group.life = int(life or 0)
    group.num_bytes = int(num_bytes or 0)
    if len(row) > len(_FIELDS):
        group.prompt = row[len(_FIELDS)]
