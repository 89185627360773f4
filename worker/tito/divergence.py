"""What becomes of turns whose client rewrote history.

Owns the three policies and the count of what they drop. Never changes an id, never trains one after
another context than the engine saw. Invariant: in every sample, `tokens[:call.start]` is what the
engine was sent for that call and `tokens[call.start:call.end]` what it sampled, whatever the
policy; nothing that a client sends raises, but for `reject`, whose fault is the answer.

A turn *diverges* where its prompt does not begin with what the turn before it was sent and sampled.
A turn *continues* the turn whose ids are the most of its prompt, wherever that one stands: a
sub-agent that interleaves diverges twice and breaks nothing. A turn is *left out* where it ends
beyond `max_seq_len`, continues one that was not completed or was left out, or was aborted and
others follow.

Axes: P prompt ids of a turn, C its sampled ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollstream.errors import MergeFault
from rollstream.sample import Sample, TokenIds

from ..types import DivergencePolicy, Finish
from .ids import as_ids
from .merge import (
    Kept,
    Merged,
    assemble,
    before_gap,
    check_template,
    merge_turns,
    patch_of_turn,
    patches_of,
    prompts_of,
    replay_fields,
)
from .prefix_tree import PrefixTree, SharedWith, shared_depth
from .replay import Patch
from .turns import REPLAY, TurnRecord, finish_of

METADATA_KEY = "divergences"


@dataclass(frozen=True, slots=True)
class Divergence:
    """One turn that did not continue the turn before it."""

    turn: int
    """From 0."""
    index: int
    """The first index at which its prompt does not have what the turn before held."""
    policy: DivergencePolicy
    dropped_tokens: int = 0
    """Sampled ids of turns that were not left out and that no sample holds because of it."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as they stand in a sample's metadata."""
        return {
            "turn": self.turn,
            "index": self.index,
            "policy": self.policy.value,
            "dropped_tokens": self.dropped_tokens,
        }


@dataclass(slots=True)
class Resolved:
    """What recorded turns came to."""

    merged: list[Merged]
    """One, or under `fork` one per leaf in the order of their last turns; empty with a fault."""
    divergences: list[Divergence] = field(default_factory=list)
    """All of them; each also stands in the metadata of one sample."""
    left_out: int = 0
    fault: MergeFault | None = None
    """Of `reject`: says where."""


def resolve(
    turns: Sequence[TurnRecord],
    policy: DivergencePolicy,
    *,
    template: Sample | None = None,
    max_seq_len: int | None = None,
) -> Resolved:
    """Merge recorded turns, and apply the policy where they diverge.

    Without a divergence every policy gives what `merge_turns` gives.

    Args:
        turns: in the order of their calls.
        policy: what becomes of rewritten history.
        template: as for `merge_turns`; every sample gets its fields.
        max_seq_len: turns that end beyond it are left out.

    Raises:
        MergeFault: as `merge_turns`, but for `prefix`.
        EngineFault: an unknown finish word.
        ValueError: a record without prompt ids, a wrong template.
    """
    try:
        linear = merge_turns(turns, template=template, max_seq_len=max_seq_len)
    except MergeFault as fault:
        if fault.detail != "prefix":
            raise
        history = _History(turns, max_seq_len)
        if policy is DivergencePolicy.REJECT:
            return Resolved([], history.rejected(), fault=fault)
    else:
        if not linear.left_out or policy is DivergencePolicy.REJECT:
            return Resolved([linear], left_out=linear.left_out)
        history = _History(turns, max_seq_len)
        if not history.divergences:
            return Resolved([linear], left_out=linear.left_out)
    check_template(template)
    if policy is DivergencePolicy.FORK:
        return _fork(history, template)
    return _keep_prefix(history, template)


class _History:
    """The turns in the tree of their ids."""

    def __init__(self, turns: Sequence[TurnRecord], max_seq_len: int | None) -> None:
        self.turns = turns
        self.prompts = prompts_of(turns)
        self.tree = PrefixTree()
        self.parents: list[int | None] = []
        self.admitted: list[bool] = []
        self.divergences: list[tuple[int, int]] = []
        """(turn, index)"""
        for place, turn in enumerate(turns):
            parent = self.tree.add(self.prompts[place], as_ids(turn.output_ids))
            self.parents.append(parent)
            self._note_divergence(place)
            self.admitted.append(self._is_admitted(place, max_seq_len))

    def _note_divergence(self, place: int) -> None:
        if place == 0 or self.parents[place] == place - 1:
            return
        before = self.tree.ends[place - 1]
        index = shared_depth(before, self.tree.prompts[place])
        if index < before.depth:
            self.divergences.append((place, index))

    def _is_admitted(self, place: int, max_seq_len: int | None) -> bool:
        if max_seq_len is not None and self.tree.ends[place].depth > max_seq_len:
            return False
        finish = finish_of(self.turns[place].finish)
        if finish is Finish.ABORT and place + 1 < len(self.turns):
            return False
        parent = self.parents[place]
        if parent is None:
            return True
        return self.admitted[parent] and finish_of(self.turns[parent].finish) is Finish.STOP

    def kept(self, place: int, size: int | None = None) -> Kept:
        turn = self.turns[place]
        held = len(turn.output_ids) if size is None else size
        return Kept(turn, place, len(self.prompts[place]), held)

    def tokens(self, place: int) -> TokenIds:
        return np.concatenate([self.prompts[place], as_ids(self.turns[place].output_ids)])

    def rejected(self) -> list[Divergence]:
        """Return the divergences of a trajectory of which nothing is kept."""
        dropped = [sum(len(turn.output_ids) for turn in self.turns)]
        dropped += [0] * len(self.divergences)
        return [
            Divergence(turn, index, DivergencePolicy.REJECT, count)
            for (turn, index), count in zip(self.divergences, dropped, strict=False)
        ]


def _empty(history: _History, gap: str) -> Merged:
    reason = "replay_gap" if gap else "all_truncated"
    return Merged(None, reason, left_out=len(history.turns), gap=gap)


def _note(samples: Sequence[tuple[Sample, set[int]]], divergences: Sequence[Divergence]) -> None:
    """Put each divergence into the metadata of the sample that has its turn, else of the last."""
    for one in divergences:
        owner = next((s for s, places in samples if one.turn in places), samples[-1][0])
        owner.metadata.setdefault(METADATA_KEY, []).append(one.to_dict())


# --- fork ----------------------------------------------------------------------------------------
def _fork(history: _History, template: Sample | None) -> Resolved:
    """Return one sample per path; a turn is in exactly one.

    A turn joins the path whose end it continues. Where that path has gone on already, or there is
    none, it begins one of its own, with its whole prompt as the first prompt.
    """
    paths: list[list[int]] = []
    path_of: dict[int, list[int]] = {}
    for place, parent in enumerate(history.parents):
        if not history.admitted[place]:
            continue
        path = path_of[parent] if parent is not None else []
        if not path or path[-1] != parent:
            path = []
            paths.append(path)
        path.append(place)
        path_of[place] = path
    merged, gap = [], ""
    for path in sorted(paths, key=lambda path: path[-1]):
        one = _merge_path(history, path, template)
        gap = gap or one.gap
        if one.sample is not None:
            merged.append((one, set(path[: one.num_turns])))
    divergences = [Divergence(*where, DivergencePolicy.FORK) for where in history.divergences]
    if not merged:
        return Resolved([_empty(history, gap)], divergences, len(history.turns))
    _note([(one.sample, places) for one, places in merged if one.sample], divergences)
    held = sum(one.num_turns for one, _ in merged)
    return Resolved([one for one, _ in merged], divergences, len(history.turns) - held)


def _merge_path(history: _History, path: Sequence[int], template: Sample | None) -> Merged:
    first = path[0]
    lent = _lent_patches(history, first)

    def patches(kept: Sequence[Kept], name: str) -> list[Patch]:
        return [*lent[name], *patches_of(kept, name)]

    fields = replay_fields([history.turns[place] for place in path])
    kept, gap = before_gap([history.kept(place) for place in path], fields, patches)
    if not kept:
        return _empty(history, gap)
    sample = assemble(
        history.tokens(kept[-1].place),
        len(history.prompts[first]),
        kept,
        template,
        {name: patches(kept, name) for name in fields},
    )
    return Merged(sample, num_turns=len(kept), left_out=len(path) - len(kept), gap=gap)


def _lent_patches(history: _History, first: int) -> dict[str, list[Patch]]:
    """Return rows that a path's first turn did not ask for, from turns with the same ids there."""
    lent: dict[str, list[Patch]] = {name: [] for name in REPLAY}
    shared: SharedWith | None = None
    for name, of_turn in REPLAY.items():
        own = getattr(history.turns[first], of_turn)
        if own is None or own.start == 0:
            continue
        shared = shared or SharedWith(history.tree.prompts[first])
        for place in range(first):
            valid = shared.depth(history.tree.ends[place])
            lent[name].append(replace(patch_of_turn(history.kept(place, 0), name), valid=valid))
    return lent


# --- keep_prefix ---------------------------------------------------------------------------------
def _keep_prefix(history: _History, template: Sample | None) -> Resolved:
    """Return the one sample along the newest context.

    A sampled id of an earlier turn counts as sampled where every id up to it is the same there. Of
    two calls that sampled one position the newer one has it.
    """
    newest = next((k for k in reversed(range(len(history.turns))) if history.admitted[k]), None)
    none_dropped = [Divergence(*at, DivergencePolicy.KEEP_PREFIX) for at in history.divergences]
    if newest is None:
        return Resolved([_empty(history, "")], none_dropped, len(history.turns))
    shared = SharedWith(history.tree.ends[newest])
    depths = [shared.depth(end) for end in history.tree.ends[: newest + 1]]
    kept = _along(history, depths)

    def patches(kept: Sequence[Kept], name: str) -> list[Patch]:
        held = {one.place: one for one in kept}
        return [
            replace(patch_of_turn(held.get(place) or history.kept(place, 0), name), valid=depth)
            for place, depth in enumerate(depths[: kept[-1].place + 1])
        ]

    whole = len(kept)
    fields = replay_fields(history.turns[: newest + 1])
    kept, gap = before_gap(kept, fields, patches)
    if not kept:
        return Resolved([_empty(history, gap)], none_dropped, len(history.turns))
    tokens = history.tokens(newest)
    if len(kept) < whole:
        tokens = tokens[: kept[-1].start + kept[-1].size].copy()
    offset = kept[0].start
    first = history.tree.prompts[0]
    if shared.depth(first) == first.depth:
        offset = min(offset, first.depth)
    of_fields = {name: patches(kept, name) for name in fields}
    sample = assemble(tokens, offset, kept, template, of_fields)
    divergences = _dropped(history, kept)
    _note([(sample, set())], divergences)
    places = range(kept[-1].place + 1)
    left_out = len(history.turns) - sum(history.admitted[place] for place in places)
    trimmed = sum(one.dropped_tokens for one in divergences)
    merged = Merged(sample, None, len(kept), left_out, trimmed, gap)
    return Resolved([merged], divergences, left_out)


def _along(history: _History, depths: Sequence[int]) -> list[Kept]:
    """Return what of each turn the newest context holds, in order.

    Args:
        history: all turns.
        depths: of each turn up to the newest, how many ids it shares with that one.
    """
    kept: list[Kept] = []
    limit = depths[-1]
    for place in reversed(range(len(depths))):
        start = len(history.prompts[place])
        count = len(history.turns[place].output_ids)
        size = min(start + count, depths[place], limit) - start
        if history.admitted[place] and (size > 0 or size == count == 0):
            kept.append(history.kept(place, size))
            limit = start
    return kept[::-1]


def _dropped(history: _History, kept: Sequence[Kept]) -> list[Divergence]:
    """Return the divergences, each with the sampled ids that it made useless.

    A turn's ids are lost to the first divergence behind it that lies before their end.
    """
    held = {one.place: one.size for one in kept}
    lost = [0] * len(history.divergences)
    for place in range(kept[-1].place + 1):
        count = len(history.turns[place].output_ids) - held.get(place, 0)
        if count == 0 or not history.admitted[place]:
            continue
        end = history.tree.ends[place].depth
        cause = next(
            number
            for number, (turn, index) in enumerate(history.divergences)
            if turn > place and index < end
        )
        lost[cause] += count
    return [
        Divergence(turn, index, DivergencePolicy.KEEP_PREFIX, count)
        for (turn, index), count in zip(history.divergences, lost, strict=True)
    ]
