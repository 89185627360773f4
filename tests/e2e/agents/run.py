"""One scene after the other: start everybody, train, kill a worker, end everybody, judge.

Owns the order of things, on the main thread. Never judges itself. Invariant: whatever ends a scene,
every process that it started is ended.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.children import Child, ChildFailed, stop_all
from examples.devserver import DevServer
from tests.e2e.agents.breaks import BREAKS
from tests.e2e.agents.cast import POLICY, Cast, assemble
from tests.e2e.agents.findings import Finding
from tests.e2e.agents.journal import read_agents, read_engines
from tests.e2e.agents.judge import judge
from tests.e2e.agents.options import Options
from tests.e2e.agents.overhead import measure
from tests.e2e.agents.record import Record
from tests.e2e.agents.report import Report, Row
from tests.e2e.agents.scenes import VOCABULARY, Scene
from tests.e2e.agents.trainer import Trainer
from tests.e2e.agents.truth import Truth
from tests.e2e.weights.cast import WORKER_READY
from tests.e2e.weights.run import Supervised
from tests.e2e.weights.watch import Watch

READY_S = 60.0
SCENE_S = 120.0
"""How long one scene may take before it is given up."""
STOP_S = 10.0
TICK_S = 0.03
Say = Callable[[str], None]


class SceneFailed(RuntimeError):
    """A scene came to no end; the message says why."""


def prove(options: Options, folder: Path, report: Report, say: Say) -> list[Finding]:
    """Play every scene and judge it, and measure; return what is wrong."""
    findings: list[Finding] = []
    with DevServer(aof=True) as server:
        for number, scene in enumerate(options.scenes):
            place = folder / scene.name
            place.mkdir()
            stage = Stage(scene, place, server.url, 1000 * options.seed + number, options.damage)
            record = stage.play()
            found, truth = stage.judge(record)
            findings += found
            report.rows.append(Row.of(record, found, truth.checked))
            say(f"{scene.name}: {report.rows[-1].to_dict()}")
            if not found and not options.keep:
                shutil.rmtree(place, ignore_errors=True)
        if options.calls:
            place = folder / "quiet"
            place.mkdir()
            report.overhead = measure(place, server.url, options.calls)
            say(f"overhead: {report.overhead}")
    return findings


@dataclass
class Stage:
    """One scene."""

    scene: Scene
    folder: Path
    redis_url: str
    seed: int
    damage: str | None = None

    def play(self) -> Record:
        """Run it to its end; return what it left behind.

        Raises:
            SceneFailed: it came to no end.
            ChildFailed: a process broke.
        """
        started = time.monotonic()
        cast = assemble(self.scene, self.folder, self.redis_url, self.seed)
        record = Record(self.scene, self.seed)
        try:
            open_cast(cast)
            with Watch(self.redis_url, record) as watch:  # type: ignore[arg-type]  # has its fields
                self._train(cast, record)
                if self.damage == "account":
                    watch.queue.client.hincrby(f"{watch.queue.prefix}c", "enqueued", 1)
                watch.settle()
            _close(cast, record)
        finally:
            stop_all(cast.everyone, STOP_S)
        read_agents(self.folder, record)
        read_engines(self.folder, record)
        broken = BREAKS.get(self.damage or "")
        if broken is not None and broken.damage is not None:
            broken.damage(record)
        record.seconds = time.monotonic() - started
        return record

    def judge(self, record: Record) -> tuple[list[Finding], Truth]:
        """Return what is wrong with it, and who computed its tokens again."""
        truth = Truth.load(VOCABULARY, f"jsonl:{self.folder / 'rows.jsonl'}", POLICY)
        return judge(record, truth), truth

    def _train(self, cast: Cast, record: Record) -> None:
        """Let the trainer train to the end of the data, and a worker die meanwhile."""
        trainer = Trainer(self.redis_url, record)
        draw = random.Random(self.seed)
        supervised = Supervised(cast.workers)
        limit = time.monotonic() + SCENE_S
        thread = trainer.start()
        while thread.is_alive():
            thread.join(TICK_S)
            if record.kills < self.scene.kills and trainer.groups >= self._due(record.kills):
                victim = draw.choice(cast.workers)
                victim.kill()
                record.kills += 1
                supervised.expect_end_of(victim)
            supervised.look()
            for child in cast.everyone:
                if not supervised.expects(child) and child.exit_code not in (None, 0):
                    raise child.failure()
            if time.monotonic() > limit:
                raise SceneFailed(f"{self.scene.name}: no end within {SCENE_S:g} s")
        if trainer.error is not None:
            error = trainer.error
            raise SceneFailed(f"{self.scene.name}: {type(error).__name__}: {error}") from error

    def _due(self, number: int) -> int:
        """Return behind how many groups a kill comes: in the middle of what there is to do."""
        return self.scene.groups * (number + 1) // (self.scene.kills + 2)


def open_cast(cast: Cast) -> None:
    """Start everybody, and return once the workers lease.

    Raises:
        ChildFailed: somebody ended, or was not ready in time.
    """
    for child in (*cast.engines, cast.producer, *cast.workers):
        child.start()
    for child in cast.engines:
        child.wait_ready(READY_S)
    limit = time.monotonic() + READY_S
    for worker in cast.workers:
        while WORKER_READY not in worker.log.read_text():
            if not worker.running or time.monotonic() > limit:
                raise worker.failure()
            time.sleep(TICK_S)


def _close(cast: Cast, record: Record) -> None:
    """Ask everybody to end, and note who did not do so in peace."""
    everyone: Sequence[Any] = cast.everyone
    stop_all(everyone, STOP_S)
    for child in everyone:
        # The latter was still starting, or is an engine that has nothing to clean up.
        if child.exit_code not in (0, -15):
            record.findings.append(f"{child.name} ended with {child.exit_code}")


__all__ = ["Child", "ChildFailed", "SceneFailed", "Stage", "prove"]
