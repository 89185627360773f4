"""What a run came to: one line of JSON, and whether it kept the promise.

Owns the comparison of every checkpoint with the prompts. Never starts anything. Invariant: the
promise is kept exactly when no prompt was skipped or trained twice, every one was trained once (or
dropped, where something drops), and the queue's own audit finds nothing at the end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from tests.e2e.resume.checkpoints import judge, judge_midway, read
from tests.e2e.resume.director import Director
from tests.e2e.resume.journal import account
from tests.e2e.resume.line import Choice
from tests.e2e.resume.storage import Memory


@dataclass(frozen=True)
class Summary:
    """The line of JSON."""

    prompts: int
    trained_once: int
    """Prompts that the surviving history holds exactly once."""
    skipped: int
    """Prompts that it lacks, or that any checkpoint counted as done without having learned them."""
    twice: int
    """Prompts that it, or any checkpoint, learned more than once or would learn again."""
    restarts: int
    """Of the trainer."""
    empty_redis_restarts: int
    dropped: int
    """Prompts that something else than training ended; nothing in this configuration does."""
    seconds: float
    seed: int
    epochs: int
    starts: Mapping[str, int]
    """Of trainers, by where they started."""
    rewinds: int
    """How often a run was set back to a checkpoint."""
    told_again: int
    """How often a living trainer told Redis again what it had forgotten."""
    kills: Mapping[str, int]
    redis_restarts: Mapping[str, int]
    """By what it still knew."""
    zombies: int
    zombies_refused: int
    zombie_acks: int
    """Acks of a frozen trainer that Redis took although a later one was connected: after Redis had
    forgotten that one. The later trainer does not believe them."""
    checkpoints: int
    trained: int
    """Groups that trainers acked, in all histories together."""
    stream_errors: Mapping[str, int]
    audit_problems: int

    @property
    def kept(self) -> bool:
        """Whether the promise was kept."""
        whole = self.trained_once + self.dropped == self.prompts
        return whole and self.skipped == self.twice == self.audit_problems == 0

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self))


def summarize(
    director: Director, survivor: str, *, dropped: frozenset[int], problems: int, seconds: float
) -> Summary:
    """Judge the surviving checkpoint, and every other one midway."""
    folder, options = director.folder, director.options
    paths = sorted(folder.glob("[0-9]*-[0-9]*.json"))
    final = judge(read(folder / survivor), options.prompts)
    midway = [judge_midway(read(path)) for path in paths]
    missing = final.skipped.union(*(verdict.skipped for verdict in midway))
    journal = account(folder / "journal.jsonl")
    return Summary(
        prompts=options.prompts,
        trained_once=final.trained_once,
        skipped=len(missing - dropped),
        twice=len(final.twice.union(*(verdict.twice for verdict in midway))),
        restarts=director.generation - 1,
        empty_redis_restarts=director.memories[Memory.EMPTY],
        dropped=len(final.skipped & dropped),
        seconds=round(seconds, 1),
        seed=options.seed,
        epochs=options.epochs,
        starts={choice.value: director.choices[choice] for choice in Choice},
        rewinds=journal.rewinds,
        told_again=journal.rollbacks,
        kills=dict(sorted(director.kills.items())),
        redis_restarts={memory.value: director.memories[memory] for memory in Memory},
        zombies=director.num_zombies,
        zombies_refused=director.zombies_refused,
        zombie_acks=journal.zombie_acks,
        checkpoints=len(paths),
        trained=journal.trained,
        stream_errors=journal.errors,
        audit_problems=problems,
    )
