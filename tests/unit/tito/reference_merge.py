"""The merge once more, slow and obvious: what the real one is held against.

Plain lists, one position at a time, everything compared with everything. Owns no rule that is not
written out here, and imports nothing of `worker.tito`. A turn of the reference is what a call was
sent and what it answered; a row of routed experts is one number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class Turn:
    """One call in plain lists."""

    prompt: list[int]
    output: list[int]
    log_probs: list[float]
    finish: str = "stop"
    teacher: list[float] | None = None
    start: int | None = None
    """Where its rows begin; None where it brought none."""
    rows: list[int] = field(default_factory=list)

    @property
    def held(self) -> list[int]:
        return self.prompt + self.output

    def row(self, position: int) -> int | None:
        """The row of a position, if the call brought it."""
        if self.start is None or not 0 <= position - self.start < len(self.rows):
            return None
        return self.rows[position - self.start]


@dataclass
class Whole:
    """A merged sample in plain lists."""

    tokens: list[int]
    prompt_length: int
    calls: list[tuple[int, int, int]]
    """(turn, start, end)"""
    mask: list[int]
    log_probs: list[float]
    teacher: list[float] | None
    rows: list[int] | None
    status: str


@dataclass
class Outcome:
    """What a policy makes of turns."""

    samples: list[Whole]
    divergences: list[tuple[int, int, int]] = field(default_factory=list)
    """(turn, index, dropped tokens)"""
    left_out: int = 0
    reason: str = ""
    """Why there is no sample: an empty reason, or the detail of a fault."""


STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def common(a: list[int], b: list[int]) -> int:
    """How many leading ids two lists share."""
    count = 0
    while count < len(a) and count < len(b) and a[count] == b[count]:
        count += 1
    return count


def build(
    turns: list[Turn], kept: list[tuple[int, int]], tokens: list[int], prompt_length: int,
    rows_from: list[int],
) -> Whole | str:  # fmt: skip
    """Write every position of the result.

    `kept` are (turn, how many of its sampled ids); `rows_from` the turns whose rows may be used.
    """
    length = len(tokens) - prompt_length
    mask, log_probs, teacher = [0] * length, [0.0] * length, [0.0] * length
    with_teacher = [t for t, _ in kept if turns[t].teacher is not None]
    calls = []
    for t, size in kept:
        turn, start = turns[t], len(turns[t].prompt)
        if with_teacher and turn.teacher is None and turn.output:
            return "per_token"
        for i in range(size):
            mask[start + i - prompt_length] = 1
            log_probs[start + i - prompt_length] = turn.log_probs[i]
            if turn.teacher is not None:
                teacher[start + i - prompt_length] = turn.teacher[i]
        calls.append((t, start, start + size))
    rows: list[int] | None = None
    if any(turns[t].start is not None for t in rows_from):
        rows = []
        for position in range(max(0, len(tokens) - 1)):
            row = known_row(turns, rows_from, tokens, position)
            rows.append(-1 if row is None else row)
    return Whole(
        tokens, prompt_length, calls, mask, log_probs, teacher if with_teacher else None, rows,
        STATUS[turns[kept[-1][0]].finish],
    )  # fmt: skip


def known_row(
    turns: list[Turn], rows_from: list[int], tokens: list[int], position: int
) -> int | None:
    """The newest row of a position out of a call that was fed exactly these tokens up to it."""
    for t in reversed(rows_from):
        if turns[t].held[: position + 1] == tokens[: position + 1]:
            row = turns[t].row(position)
            if row is not None:
                return row
    return None


def is_complete(
    turns: list[Turn], kept: list[tuple[int, int]], tokens: list[int], rows_from: list[int]
) -> bool:
    """Whether every row that the kept calls need is there."""
    for t, size in kept:
        if size == 0 or turns[t].finish == "abort":
            continue
        for position in range(len(turns[t].prompt) + size - 1):
            if known_row(turns, rows_from, tokens, position) is None:
                return False
    return True


# --- linear --------------------------------------------------------------------------------------
def linear(turns: list[Turn], max_seq_len: int | None = None, max_trim: int = 0) -> Outcome:
    """Append-only turns as one sample."""
    if not turns:
        return Outcome([], reason="no_records")
    count = num_kept(turns, max_seq_len)
    if count == 0:
        return Outcome([], left_out=len(turns), reason="all_truncated")
    sizes = sizes_in_next(turns[:count], max_trim)
    if sizes is None:
        return Outcome([], reason="prefix")
    dormant = all(turn.start is None for turn in turns[:count])
    if not dormant and wrong_start(turns[:count], sizes):
        return Outcome([], reason="replay")
    while count:
        ends = [*sizes[: count - 1], len(turns[count - 1].output)]
        kept = list(zip(range(count), ends, strict=True))
        tokens = turns[count - 1].held
        if dormant or is_complete(turns, kept, tokens, list(range(count))):
            break
        count -= 1
    else:
        return Outcome([], left_out=len(turns), reason="replay_gap")
    whole = build(turns, kept, tokens, len(turns[0].prompt), list(range(count)))
    if isinstance(whole, str):
        return Outcome([], reason=whole)
    return Outcome([whole], left_out=len(turns) - count)


def num_kept(turns: list[Turn], max_seq_len: int | None) -> int:
    """How many turns there are before one that is too long, or with one that was not completed."""
    count = 0
    for turn in turns:
        if max_seq_len is not None and len(turn.held) > max_seq_len:
            break
        count += 1
        if turn.finish != "stop":
            break
    return count


def sizes_in_next(turns: list[Turn], max_trim: int) -> list[int] | None:
    """How many ids of each output the next prompt holds; None where one does not continue."""
    sizes = []
    for turn, after in itertools.pairwise(turns):
        for trim in range(min(max_trim, len(turn.output)) + 1):
            size = len(turn.output) - trim
            if after.prompt[: len(turn.prompt) + size] == turn.prompt + turn.output[:size]:
                sizes.append(size)
                break
        else:
            return None
    return sizes


def wrong_start(turns: list[Turn], sizes: list[int]) -> bool:
    """Whether a patch begins elsewhere than at 0 or at the rows that there are."""
    known, missing = [0], False
    for place, turn in enumerate(turns):
        start, length = len(turn.prompt), len(turn.output)
        size = sizes[place] if place < len(sizes) else length
        if turn.start is None:
            needs = start + size - 1 if size and turn.finish != "abort" else 0
            missing = missing or needs > known[0]
            continue
        if turn.start in (0, *known):
            missing = False
        elif not (missing and turn.start > known[0]):
            return True
        known = [min(start + length - 1, start + size)]
        if size < length:
            known.append(max(0, start + size - 1))
    return False


# --- divergence ----------------------------------------------------------------------------------
def divergences(turns: list[Turn]) -> list[tuple[int, int]]:
    """(turn, index) of every turn that does not begin with what the one before held."""
    found = []
    for place in range(1, len(turns)):
        before, prompt = turns[place - 1].held, turns[place].prompt
        if prompt[: len(before)] != before:
            found.append((place, common(before, prompt)))
    return found


def parent_of(turns: list[Turn], place: int) -> int | None:
    """The turn that one continues: the longest, and of equal ones the newest."""
    best = None
    for earlier in range(place):
        held = turns[earlier].held
        if turns[place].prompt[: len(held)] != held:
            continue
        if best is None or len(held) >= len(turns[best].held):
            best = earlier
    return best


def admitted(turns: list[Turn], max_seq_len: int | None) -> list[bool]:
    """Which turns are not left out."""
    result: list[bool] = []
    for place, turn in enumerate(turns):
        parent = parent_of(turns, place)
        result.append(
            (max_seq_len is None or len(turn.held) <= max_seq_len)
            and not (turn.finish == "abort" and place < len(turns) - 1)
            and (parent is None or (result[parent] and turns[parent].finish == "stop"))
        )
    return result


def resolved(turns: list[Turn], policy: str, max_seq_len: int | None = None) -> Outcome:
    """Turns under a policy."""
    plain = linear(turns, max_seq_len)
    if plain.reason not in ("", "prefix", "all_truncated", "replay_gap"):
        return plain
    broken = plain.reason == "prefix"
    if policy == "reject":
        if not broken:
            return plain
        sampled = sum(len(turn.output) for turn in turns)
        lost = [sampled] + [0] * len(turns)
        found = [(*at, lost[n]) for n, at in enumerate(divergences(turns))]
        return Outcome([], found, reason="prefix")
    if not broken and (plain.left_out == 0 or not divergences(turns)):
        return plain
    return fork(turns, max_seq_len) if policy == "fork" else keep_prefix(turns, max_seq_len)


def fork(turns: list[Turn], max_seq_len: int | None) -> Outcome:
    """One sample per path, every turn in one."""
    found = [(*at, 0) for at in divergences(turns)]
    alive = admitted(turns, max_seq_len)
    paths: list[list[int]] = []
    for place in range(len(turns)):
        if not alive[place]:
            continue
        parent = parent_of(turns, place)
        for path in paths:
            if path[-1] == parent:
                path.append(place)
                break
        else:
            paths.append([place])
    samples, used, had_gap = [], 0, False
    for path in sorted(paths, key=lambda path: path[-1]):
        first = turns[path[0]]
        lent = list(range(path[0])) if first.start else []
        count = len(path)
        while count:
            kept = [(t, len(turns[t].output)) for t in path[:count]]
            tokens = turns[path[count - 1]].held
            # Rows of other turns serve for the first prompt alone.
            helpers = [t for t in lent if common(turns[t].held, first.prompt)]
            trimmed = [clipped(turns[t], common(turns[t].held, first.prompt)) for t in helpers]
            view = [*trimmed, *turns[path[0] :]]
            shift = path[0] - len(helpers)
            own = [t - shift for t in path[:count]]
            local = [(t - shift, size) for t, size in kept]
            rows_from = [*range(len(helpers)), *own]
            dormant = all(turns[t].start is None for t in path)
            if dormant or is_complete(view, local, tokens, rows_from):
                break
            had_gap = True
            count -= 1
        else:
            continue
        whole = build(view, local, tokens, len(first.prompt), rows_from)
        if isinstance(whole, str):
            return Outcome([], reason=whole)
        whole.calls = [(t + shift, start, end) for t, start, end in whole.calls]
        samples.append(whole)
        used += count
    reason = "" if samples else ("replay_gap" if had_gap else "all_truncated")
    return Outcome(samples, found, len(turns) - used, reason)


def clipped(turn: Turn, count: int) -> Turn:
    """A turn as if only its first `count` ids had been fed."""
    rows = turn.rows[: max(0, count - (turn.start or 0))]
    return Turn(turn.held[:count], [], [], turn.finish, None, turn.start, rows)


def keep_prefix(turns: list[Turn], max_seq_len: int | None) -> Outcome:
    """One sample along the newest context."""
    found, alive = divergences(turns), admitted(turns, max_seq_len)
    if not any(alive):
        return Outcome([], [(*at, 0) for at in found], len(turns), "all_truncated")
    newest = max(place for place, is_alive in enumerate(alive) if is_alive)
    tokens = turns[newest].held
    owner: dict[int, int] = {}
    """Position -> the newest turn that sampled it there, in the newest context."""
    kept: list[tuple[int, int]] = []
    for place in range(newest, -1, -1):
        turn, start = turns[place], len(turns[place].prompt)
        if not alive[place] or tokens[:start] != turn.prompt:
            continue
        size = 0
        while (
            size < len(turn.output)
            and start + size < len(tokens)
            and tokens[start + size] == turn.output[size]
            and not any(position <= start + size for position in owner)
        ):
            size += 1
        if size == 0 and (turn.output or any(position < start for position in owner)):
            continue
        owner |= dict.fromkeys(range(start, start + size), place)
        owner.setdefault(start, place)
        kept.insert(0, (place, size))
    count = len(kept)
    dormant = all(turn.start is None for turn in turns[: newest + 1])
    while count:
        part = kept[:count]
        last, size = part[-1]
        ends = tokens if count == len(kept) else tokens[: len(turns[last].prompt) + size]
        rows_from = list(range(last + 1))
        if dormant or is_complete(turns, part, ends, rows_from):
            break
        count -= 1
    else:
        return Outcome([], [(*at, 0) for at in found], len(turns), "replay_gap")
    prompt_length = len(turns[part[0][0]].prompt)
    if tokens[: len(turns[0].prompt)] == turns[0].prompt:
        prompt_length = min(prompt_length, len(turns[0].prompt))
    whole = build(turns, part, ends, prompt_length, rows_from)
    if isinstance(whole, str):
        return Outcome([], reason=whole)
    lost = [0] * len(found)
    held = dict(part)
    for place in range(last + 1):
        missing = len(turns[place].output) - held.get(place, 0)
        if missing and alive[place]:
            end = len(turns[place].held)
            causes = [n for n, (turn, index) in enumerate(found) if turn > place and index < end]
            lost[causes[0]] += missing
    left_out = len(turns) - sum(alive[: last + 1])
    return Outcome([whole], [(*at, lost[n]) for n, at in enumerate(found)], left_out)
