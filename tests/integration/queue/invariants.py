"""What holds of a run at every instant, by the numbers of the list in the design of the queue.

Owns one function a number, over one look (and, where it speaks of change, the look before the
step and what the model knows). Never acts. Invariant: all is told from the keys themselves, so
`audit` is judged here as well instead of being believed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rollstream.queue.answers import AuditAnswer
from rollstream.states import GroupState
from tests.integration.queue.sight import Sight

MAX_SUSPECTS, SUSPECT_CRASHES, ALONE_CRASHES = 8, 2, 3
LEFT_AFTER_THE_END = {
    "m", "c", "w", "wp", "wa", "wl", "ws", "wh", "wc", "wb", "lb", "cur", "past", "full", "ready",
    "eval", "ctl", "bell", "room",
}  # fmt: skip


@dataclass(slots=True)
class Lineage:
    """What ended how, as one line of checkpoints sees it."""

    trained: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)

    def copy(self) -> Lineage:
        return Lineage(set(self.trained), set(self.dropped), set(self.skipped))

    def ended(self) -> set[int]:
        return self.trained | self.dropped | self.skipped


@dataclass(slots=True)
class Known:
    """What the model knows beside the run itself."""

    lineage: Lineage
    minted: dict[str, str]
    """Lease id by every token that a worker ever got."""
    may_go_back: bool
    """A rewind or a rollback happened in this step."""
    vanished: set[str]
    """Groups whose hash was taken away and that the queue has not ended yet."""


def check_all(before: Sight, now: Sight, known: Known, audit: AuditAnswer) -> None:
    """Check every invariant.

    Raises:
        AssertionError: one is broken; its text begins with the number.
    """
    if not now.exists:
        return
    for number, check in _INVARIANTS.items():
        try:
            check(before, now, known)
        except AssertionError as error:
            raise AssertionError(f"invariant {number}: {error}") from error
    check_audit(now, audit)


def check_audit(now: Sight, audit: AuditAnswer) -> None:
    """The audit script says the same as the keys do."""
    assert (audit.enqueued, audit.acked, audit.dropped, audit.live) == _counts(now, ""), "audit"
    assert bool(audit.problems) == bool(now.dangling), f"audit: {audit.problems}"


def _counts(now: Sight, prefix: str) -> tuple[int, int, int, int]:
    dropped = sum(n for name, n in now.c.items() if name.startswith(f"{prefix}dropped:"))
    enqueued, acked = now.c.get(f"{prefix}enqueued", 0), now.c.get(f"{prefix}acked", 0)
    return enqueued, acked, dropped, len(now.ge if prefix else now.gs)


def _identity(before: Sight, now: Sight, known: Known) -> None:
    for prefix in ("", "e."):
        enqueued, acked, dropped, live = _counts(now, prefix)
        assert enqueued == acked + dropped + live, (prefix, enqueued, acked, dropped, live)


def _one_place(before: Sight, now: Sight, known: Known) -> None:
    waiting = Counter(name for key in "qsd" for name in now.z[key])
    leased = Counter(lease_id.rsplit(":", 1)[0] for lease_id in now.z["l"])
    places = waiting + leased
    for group in now.groups.values():
        for i, member in enumerate(group.members):
            wanted = int(member.final is None)
            found = places.pop(f"{group.gid}:{i}", 0)
            assert found == wanted, f"member {group.gid}:{i} (final: {member.final}) in {found}"
            if leased[f"{group.gid}:{i}"]:
                assert f"{group.gid}:{i}:{member.token}" in now.z["l"], "not the current token"
        assert group.state == "open" or all(m.final for m in group.members)
    strays = {name for name in places if name.rsplit(":", 1)[0] not in now.dangling}
    assert not strays, f"members without a group: {strays}"


def _counts_of_groups(before: Sight, now: Sight, known: Known) -> None:
    for group in now.groups.values():
        left, failed = group.number("left") or 0, group.number("failed") or 0
        final = sum(member.final is not None for member in group.members)
        bad = sum(member.failed for member in group.members)
        assert (left, failed) == (group.n - final, bad), (group.gid, left, final, failed, bad)
        assert (group.state == GroupState.OPEN) == (left > 0), (group.gid, group.state, left)
        whys = {m.final[2:] for m in group.members if m.failed and m.final}
        assert group.text("why") in (whys or {""}), (group.gid, group.text("why"), whys)


def _bodies(before: Sight, now: Sight, known: Known) -> None:
    for group in now.groups.values():
        for i, member in enumerate(group.members):
            assert member.done == (str(i) in group.bodies), f"body of {group.gid}:{i}"
            assert member.done == (member.header is not None), f"header of {group.gid}:{i}"
            assert member.failed == (member.error is not None), f"error of {group.gid}:{i}"
            assert f"x{i}" not in group.bodies or member.done, f"text of {group.gid}:{i}"
            parked = group.bodies.get(f"p{i}")
            size = None if parked is None else len(parked)
            assert member.parked == size, f"parked body of {group.gid}:{i}"
            assert not (member.final and parked), f"{group.gid}:{i} ended and is parked"


def _indexes(before: Sight, now: Sight, known: Known) -> None:
    of_state: dict[str, set[str]] = {state: set() for state in GroupState}
    for group in now.groups.values():
        of_state[group.state].add(group.gid)
    assert not of_state["full"] & now.ge, "an evaluation waits for a verdict"
    kept = of_state["ready"] | of_state["delivered"]
    for stream, gids, name in (
        ("full", of_state["full"], "full_id"),
        ("ready", kept & now.gs, "ready_id"),
        ("eval", kept & now.ge, "ready_id"),
    ):
        rows = now.entries[stream]
        found = Counter(row["g"] for row in rows.values() if row["g"] not in now.dangling)
        assert found == Counter(gids), f"{stream} refers to {found}, groups there are {gids}"
        for gid in gids:
            entry = rows.get(now.groups[gid].text(name), {})
            assert entry.get("g") == gid, f"{gid} has no entry in {stream}"
            assert entry.get("n") == str(now.groups[gid].n), f"{gid}: n in {stream}"
        assert set(now.pending[stream]) <= set(rows), f"{stream} has pending entries that are gone"
    delivered, held = int(now.m["delivered"]), of_state["delivered"] & now.gs
    assert 0 <= delivered - len(held) <= len(now.dangling), f"delivered {delivered}, groups {held}"
    _check_age_and_dl(now)


def _check_age_and_dl(now: Sight) -> None:
    for gid, group in now.groups.items():
        aged = group.state != "delivered" and "version" in group.fields and gid in now.gs
        assert now.z["age"].get(gid) == (group.number("version") if aged else None), f"age of {gid}"
        deadline, at = group.number("deadline") or 0, now.z["dl"].get(gid)
        if deadline and gid in now.ge and group.state != "open":
            assert at is not None, f"the evaluation {gid} is never forgotten"
            assert at > deadline, f"the evaluation {gid} is forgotten too early"
        else:
            due = deadline > 0 and group.state == "open"
            assert at == (deadline if due else None), f"dl of {gid}"
    for name in ("age", "dl"):
        strays = set(now.z[name]) - set(now.groups) - now.dangling
        assert not strays, f"{name} holds {strays}"


def _frontier(before: Sight, now: Sight, known: Known) -> None:
    if not known.may_go_back:
        assert now.frontier >= before.frontier, "the frontier went back"
        assert now.terminal >= before.terminal, "a terminal id came free"
    assert now.frontier not in now.above, "the frontier is terminal"
    assert now.base % 8 == 0
    assert now.frontier - now.base >= 0, "the base is above the frontier"
    assert all(i in now.above for i in range(now.base, now.frontier)), "a hole below the frontier"
    live = {int(gid) for gid in now.gs}
    assert not live & now.terminal, f"live and terminal: {live & now.terminal}"


def _lineage(before: Sight, now: Sight, known: Known) -> None:
    lineage = known.lineage
    assert now.terminal <= lineage.ended(), f"nobody ended {now.terminal - lineage.ended()}"
    lost = lineage.trained - now.terminal
    assert not lost, f"trained and not terminal: {lost}"


def _tokens(before: Sight, now: Sight, known: Known) -> None:
    owners: dict[str, str] = {}
    for lease_id in now.z["l"]:
        token = lease_id.rsplit(":", 1)[1]
        assert owners.setdefault(token, lease_id) == lease_id, f"two leases under {token}"
        assert known.minted.get(token, lease_id) == lease_id, f"token {token} minted twice"


def _suspects(before: Sight, now: Sight, known: Known) -> None:
    per_worker: dict[str, list[int]] = {}
    for lease_id in now.z["l"]:
        gid, member, token = lease_id.rsplit(":", 2)
        if now.crashes(gid, member) >= SUSPECT_CRASHES:
            per_worker.setdefault(token.split("-")[0], []).append(now.crashes(gid, member))
    for worker, crashes in per_worker.items():
        assert len(crashes) <= MAX_SUSPECTS, (worker, crashes)
        assert max(crashes) < ALONE_CRASHES or len(crashes) == 1, (worker, crashes)
    for name in now.z["q"]:
        assert now.crashes(*name.rsplit(":", 1)) < SUSPECT_CRASHES, f"the suspect {name} is in q"
    for name in now.z["s"]:
        assert now.crashes(*name.rsplit(":", 1)) >= SUSPECT_CRASHES or (
            name.rsplit(":", 1)[0] in now.dangling
        ), f"{name} is no suspect and is in s"


def _no_keys_left(before: Sight, now: Sight, known: Known) -> None:
    orphans = {key for key in now.orphans if key.partition(":")[2] not in now.dangling}
    assert not orphans, f"keys of ended groups: {orphans}"
    assert now.dangling <= known.vanished, f"hashes are gone: {now.dangling - known.vanished}"
    bound = max(now.budget("cap"), len(before.gs))
    assert known.may_go_back or len(now.gs) <= bound, f"{len(now.gs)} groups live"
    assert set(now.wc) <= set(now.z["w"]), "what an absent worker confirmed is kept"
    assert set(now.wb) <= set(now.z["wp"]), "what an absent producer reported is kept"
    assert now.bell <= 1
    assert now.room <= 1


def check_drained(now: Sight, num_ids: int) -> None:
    """Everything ended, and nothing but the run's own keys is left."""
    assert now.frontier >= num_ids, f"invariant 16: does not drain, frontier {now.frontier}"
    assert not now.live, f"invariant 16: {now.live} live on"
    assert now.names <= LEFT_AFTER_THE_END, f"invariant 16: left are {now.names}"
    assert not any(now.entries.values()), "invariant 16: entries are left"
    assert not any(now.pending.values()), "invariant 16: pending entries are left"


_INVARIANTS: dict[int, Callable[[Sight, Sight, Known], None]] = {
    1: _identity, 2: _one_place, 3: _counts_of_groups, 4: _bodies, 5: _indexes, 6: _frontier,
    7: _lineage, 9: _tokens, 13: _suspects, 14: _no_keys_left,
}  # fmt: skip
"""By number, after every step. 8 is checked when the trainer acks; 9 (its second half), 10, 11, 12
and 15 with every call (`oracle`, `effects`, `WalkState.call`); 16 by `check_drained`."""
