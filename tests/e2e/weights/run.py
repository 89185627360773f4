"""One scene after the other: start everybody, train, disturb, kill, end everybody, judge.

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

from examples.demo.children import ChildFailed, stop_all
from examples.devserver import DevServer
from tests.e2e.weights import trainer as trainer_module
from tests.e2e.weights.breaks import BREAKS
from tests.e2e.weights.cast import WORKER_READY, Cast, assemble
from tests.e2e.weights.disturber import Disturber
from tests.e2e.weights.findings import Finding
from tests.e2e.weights.journal import read_engines, read_workers
from tests.e2e.weights.judge import judge
from tests.e2e.weights.options import Options
from tests.e2e.weights.record import Record
from tests.e2e.weights.report import Report, Row
from tests.e2e.weights.rows import question_of, write_rows
from tests.e2e.weights.scenes import Scene
from tests.e2e.weights.trainer import Trainer
from tests.e2e.weights.truth import Truth
from tests.e2e.weights.watch import Watch

READY_S = 60.0
SCENE_S = 150.0
"""How long one scene may take before it is given up."""
STOP_S = 10.0
TICK_S = 0.03
RESTART_S = 0.2
Say = Callable[[str], None]


class SceneFailed(RuntimeError):
    """A scene came to no end; the message says why."""


def prove(options: Options, folder: Path, report: Report, say: Say) -> list[Finding]:
    """Play every scene and judge it; return what is wrong."""
    findings: list[Finding] = []
    with DevServer(aof=True) as server:
        for number, scene in enumerate(options.scenes):
            place = folder / scene.name
            place.mkdir()
            stage = Stage(scene, place, server.url, 1000 * options.seed + number, options.damage)
            record = stage.play()
            found, tokens = stage.judge(record)
            findings += found
            report.rows.append(Row.of(record, found, tokens))
            say(f"{scene.name}: {report.rows[-1].to_dict()}")
            if not found and not options.keep:
                shutil.rmtree(place, ignore_errors=True)
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
        broken = BREAKS.get(self.damage or "")
        self._sources = write_rows(self.folder, self.scene, trainer_module.EVALUATED_PROMPTS)
        cast = assemble(
            self.scene, self.folder, self.redis_url, self.seed, self._sources,
            (self.damage or "") if broken is not None and broken.place == "worker" else "",
        )  # fmt: skip
        record = Record(self.scene, self.seed)
        try:
            self._open(cast)
            with Watch(self.redis_url, record) as watch:
                self._train(cast, record)
                if broken is not None and broken.place == "run":
                    watch.queue.client.hincrby(f"{watch.queue.prefix}c", "enqueued", 1)
                watch.settle()
            self._close(cast, record)
        finally:
            stop_all(cast.everyone, STOP_S)
        read_workers(self.folder, record)
        read_engines(self.folder, record)
        if broken is not None and broken.damage is not None:
            broken.damage(record)
        record.seconds = time.monotonic() - started
        return record

    def judge(self, record: Record) -> tuple[list[Finding], int]:
        """Return what is wrong with it, and how many tokens were computed again."""
        answers = f"jsonl:{self._sources[1]}"
        newest = max((update.version for update in record.updates), default=0)
        truth = Truth.load(_vocabulary(), answers, self.seed, self.scene.label_of, newest)
        found = judge(record, truth, question_of, truth.policy.vocabulary.decode)
        return found, truth.checked

    def _open(self, cast: Cast) -> None:
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

    def _train(self, cast: Cast, record: Record) -> None:
        """Let the trainer train to the end of the data, and worse things happen meanwhile."""
        trainer = Trainer(self.redis_url, record, cast.urls)
        draw = random.Random(self.seed)
        kills = _kill_points(self.scene)
        restarts: list[tuple[float, Any]] = []
        limit = time.monotonic() + SCENE_S
        with Disturber(self.scene.protocol, cast.urls, self.seed) as disturber:
            thread = trainer.start()
            while thread.is_alive():
                thread.join(TICK_S)
                now = time.monotonic()
                if kills and trainer.batches >= kills[0]:
                    kills.pop(0)
                    victim = draw.choice(cast.workers)
                    assert victim.process is not None
                    record.killed[victim.process.pid] = time.time()
                    victim.kill()
                    restarts.append((now + RESTART_S, victim))
                for at, child in [entry for entry in restarts if entry[0] <= now]:
                    restarts.remove((at, child))
                    child.start()
                self._check_children(cast, {id(child) for _, child in restarts})
                if now > limit:
                    raise SceneFailed(f"{self.scene.name}: no end within {SCENE_S:g} s")
        record.disturbances = dict(disturber.done)
        record.findings += disturber.findings
        if trainer.error is not None:
            error = trainer.error
            raise SceneFailed(f"{self.scene.name}: {type(error).__name__}: {error}") from error

    def _check_children(self, cast: Cast, down: set[int]) -> None:
        for child in cast.everyone:
            if id(child) not in down and child.exit_code not in (None, 0):
                raise child.failure()

    def _close(self, cast: Cast, record: Record) -> None:
        """Ask everybody to end, and note who did not do so in peace."""
        everyone: Sequence[Any] = cast.everyone
        stop_all(everyone, STOP_S)
        for child in everyone:
            # The latter was still starting, or is an engine that has nothing to clean up.
            if child.exit_code not in (0, -15):
                record.findings.append(f"{child.name} ended with {child.exit_code}")


def _kill_points(scene: Scene) -> list[int]:
    """Return behind which batches a worker is killed: spread over the updates."""
    step = scene.num_updates / (scene.kills + 1)
    return [max(1, int(step * (number + 1))) for number in range(scene.kills)]


def _vocabulary() -> Path:
    from tests.e2e.weights.scenes import VOCABULARY

    return VOCABULARY


__all__ = ["ChildFailed", "SceneFailed", "Stage", "prove"]
