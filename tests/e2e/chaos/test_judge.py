"""The judge of the chaos run must see what it is there to see: records with one thing wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollstream.frontier import TerminalIds
from rollstream.trainer.checkpoint import Checkpoint
from tests.e2e.chaos.journal import (
    Journal,
    Life,
    last_checkpoint,
    read_lives,
    surviving,
    trained_twice,
)
from tests.e2e.chaos.judge import lost_groups, retaken
from tests.e2e.chaos.observer import Drop
from tests.e2e.chaos.report import Report


def a_state(*ids: int) -> dict[str, Any]:
    terminal = TerminalIds()
    terminal.add(ids)
    return Checkpoint("chaos", "data", terminal).to_plain()


def a_life(
    number: int,
    parent: tuple[int, int] | None,
    started_s: float,
    batches: Sequence[tuple[int, list[int]]],
    saves: dict[int, tuple[float, tuple[int, ...]]],
) -> Life:
    """A life; `saves` are {step: (when, terminal ids)}."""
    return Life(
        number=number,
        parent=parent,
        started_unix_s=started_s,
        connected=True,
        batches=list(batches),
        taken=[group for _, groups in batches for group in groups],
        states={step: a_state(*ids) for step, (_, ids) in saves.items()},
        checkpointed_unix_s={step: at for step, (at, _) in saves.items()},
    )


def a_drop(group: int, at_s: float, reason: str = "zero_std", **changes: Any) -> Drop:
    return Drop((int(at_s * 1000), 0), group, reason, changes.pop("detail", ""), **changes)


def two_lives() -> dict[int, Life]:
    """Life 1 trains 0 and 1, saves, trains 2 and dies; life 2 goes on from the save."""
    first = a_life(1, None, 0.0, [(1, [0]), (2, [1]), (3, [2])], {0: (0.1, ()), 2: (2.0, (0, 1))})
    second = a_life(2, (1, 2), 10.0, [(3, [2]), (4, [3])], {4: (14.0, (0, 1, 2, 3))})
    return {1: first, 2: second}


def test_judge_counts_a_group_trained_again_after_its_checkpoint_once() -> None:
    lives = two_lives()
    assert surviving(lives) == [0, 1, 2, 3]
    assert trained_twice(lives) == []
    assert lost_groups(4, lives, [], frozenset()) == []
    assert retaken(lives) == 1


def test_judge_sees_a_group_that_the_history_held_and_a_life_trained_again() -> None:
    lives = two_lives()
    lives[2].batches.append((5, [1]))
    assert trained_twice(lives) == [1]


def test_judge_sees_a_group_trained_twice_in_a_life_that_was_abandoned_later() -> None:
    lives = two_lives()
    lives[1].batches.append((4, [2]))
    assert trained_twice(lives) == [2]
    assert surviving(lives) == [0, 1, 2, 3]


def test_judge_sees_a_group_that_only_an_abandoned_life_trained() -> None:
    lives = two_lives()
    lives[2].batches = [(4, [3])]
    assert lost_groups(4, lives, [], frozenset()) == [2]


def test_judge_sees_a_group_without_any_end() -> None:
    assert lost_groups(6, two_lives(), [a_drop(4, 11.0)], frozenset()) == [5]
    assert lost_groups(6, two_lives(), [a_drop(4, 11.0)], frozenset({5})) == []


@pytest.mark.parametrize(
    "drop",
    [
        a_drop(4, 11.0, "seen"),
        a_drop(4, 11.0, "run_aborted"),
        a_drop(4, 11.0, "withdrawn", detail="beyond the window after a rewind"),
        a_drop(4, 11.0, "withdrawn", detail="its record vanished"),
        a_drop(4, 11.0, "withdrawn", detail="its results vanished"),
    ],
)
def test_judge_takes_no_drop_that_leaves_the_id_free(drop: Drop) -> None:
    assert lost_groups(5, two_lives(), [drop], frozenset()) == [4]


def test_judge_takes_no_drop_that_a_rewind_undid() -> None:
    before, after = a_drop(4, 9.0), a_drop(4, 11.0)
    assert lost_groups(5, two_lives(), [before], frozenset()) == [4]
    assert lost_groups(5, two_lives(), [before, after], frozenset()) == []


def test_judge_takes_a_drop_that_only_an_abandoned_life_undid() -> None:
    lives = two_lives()
    # Life 2 started from step 2, while life 1 still saved step 3; life 3 goes on from there.
    lives[1].states[3], lives[1].checkpointed_unix_s[3] = a_state(0, 1, 2, 4), 10.5
    lives[2].states.clear()
    lives[3] = a_life(3, (1, 3), 20.0, [(4, [3])], {4: (24.0, (0, 1, 2, 3, 4))})
    assert lost_groups(5, lives, [a_drop(4, 9.0)], frozenset()) == []
    lives[3].parent = (1, 2)
    assert lost_groups(5, lives, [a_drop(4, 9.0)], frozenset()) == [2, 4]


def test_judge_takes_a_drop_that_the_checkpoint_knew() -> None:
    lives = two_lives()
    lives[1].states[2] = a_state(0, 1, 4)
    assert lost_groups(5, lives, [a_drop(4, 1.5)], frozenset()) == []


def test_judge_takes_a_forgotten_drop_only_where_a_checkpoint_held_it_before() -> None:
    lives = two_lives()
    forgotten = a_drop(4, 11.0, forgotten_unix_s=13.0)
    assert lost_groups(5, lives, [forgotten], frozenset()) == [4]
    lives[2].states[3], lives[2].checkpointed_unix_s[3] = a_state(0, 1, 2, 4), 12.0
    assert lost_groups(5, lives, [forgotten], frozenset()) == []


def test_journal_gives_the_next_life_the_last_checkpoint_whatever_a_kill_cut_off(
    tmp_path: Path,
) -> None:
    first = Journal(tmp_path, 1)
    assert first.state is None
    first.checkpoint(0, a_state())
    first.taken(1, [5])
    first.trained(1, [5])
    first.checkpoint(1, a_state(5))
    first.trained(2, [6])
    first.close()
    with (tmp_path / "journal-1.jsonl").open("ab") as file:
        file.write(b'{"checkpoint": 2, "sta')
    second = Journal(tmp_path, 2)
    assert (second.parent, second.state) == ((1, 1), a_state(5))
    second.trained(2, [6])
    second.close()
    lives = read_lives(tmp_path)
    assert surviving(lives) == [5, 6]
    assert lives[1].taken == [5]
    # A life that died before its first checkpoint is no one's parent.
    assert last_checkpoint(lives, 3) == (1, 1)


def a_report(**changes: Any) -> Report:
    values: dict[str, Any] = dict.fromkeys(
        "enqueued acked lost twice token_mismatches accounting_difference fenced replays trained "
        "trained_again calls_audited rewinds forgotten_bytes seed".split(),
        0,
    )
    values |= {name: {} for name in "dropped kills freezes cuts exits".split()}
    return Report(**values | {"longest_stall_s": 1.0, "drain_s": 1.0, "seconds": 1.0} | changes)


@pytest.mark.parametrize(
    "changes",
    [{"lost": 1}, {"twice": 1}, {"token_mismatches": 1}, {"accounting_difference": 1},
     {"drain_s": None}],
)  # fmt: skip
def test_report_is_a_success_exactly_without_these(changes: dict[str, Any]) -> None:
    assert a_report().problems() == []
    assert len(a_report(**changes).problems()) == 1
    assert list(json.loads(a_report().to_json()))[:12] == [
        "enqueued", "acked", "dropped", "lost", "twice", "token_mismatches",
        "accounting_difference", "fenced", "replays", "kills", "longest_stall_s", "drain_s",
    ]  # fmt: skip
