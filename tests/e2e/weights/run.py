"""One scene after the other: start everybody, train, disturb, kill, end everybody, judge.

Owns the order of things, on the main thread. Never judges itself. Invariant: whatever ends a scene,
every process that it started is ended.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from examples.demo.children import Child, ChildFailed, stop_all
from examples.devserver import DevServer
from rollstream.updates.naming import Naming
from tests.e2e.weights import posts
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
            found, truth = stage.judge(record)
            findings += found
            report.rows.append(Row.of(record, found, truth.checked, truth.unknown))
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
            with Watch(self.redis_url, record) as watch, late_labels(self.damage):
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

    def judge(self, record: Record) -> tuple[list[Finding], Truth]:
        """Return what is wrong with it, and what counted the tokens that were computed again."""
        answers = f"jsonl:{self._sources[1]}"
        newest = max((update.version for update in record.updates), default=0)
        truth = Truth.load(_vocabulary(), answers, self.seed, self.scene.label_of, newest)
        found = judge(record, truth, question_of, truth.policy.vocabulary.decode)
        return found, truth

    def _open(self, cast: Cast) -> None:
        for child in (*cast.engines, cast.producer, *cast.workers):
            child.start()
        for child, url in zip(cast.engines, cast.urls, strict=True):
            child.wait_ready(READY_S)
            # From here on a label is a name only.
            if posts.push(url, self.scene.label_of(0), named=False) != 200:
                raise child.failure()
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
        acts = _acts(self.scene)
        supervised = Supervised(cast.workers)
        limit = time.monotonic() + SCENE_S
        with Disturber(self.scene.protocol, cast.urls, self.seed) as disturber:
            thread = trainer.start()
            while thread.is_alive():
                thread.join(TICK_S)
                while acts and trainer.batches >= acts[0][0]:
                    self._act(acts.pop(0)[1], cast, record, supervised, draw, disturber)
                supervised.look()
                self._check_children(cast, supervised)
                if time.monotonic() > limit:
                    raise SceneFailed(f"{self.scene.name}: no end within {SCENE_S:g} s")
        record.disturbances = dict(disturber.done)
        record.stood_still = disturber.stood_still
        record.findings += disturber.findings
        if trainer.error is not None:
            error = trainer.error
            raise SceneFailed(f"{self.scene.name}: {type(error).__name__}: {error}") from error

    def _act(
        self, act: str, cast: Cast, record: Record, supervised: Supervised, draw: random.Random,
        disturber: Disturber,
    ) -> None:  # fmt: skip
        if act == "restart":
            # Always the same: the other one still serves what the run asks for.
            disturber.note("restart", posts.restart(cast.urls[0]))
            return
        victim = draw.choice([one for one in cast.workers if one.running] or cast.workers)
        if act == "stop":
            victim.ask_to_stop()
            record.stopped += 1
        elif victim.process is not None:
            record.killed[victim.process.pid] = time.time()
            victim.kill()
        supervised.expect_end_of(victim)

    def _check_children(self, cast: Cast, supervised: Supervised) -> None:
        for child in cast.everyone:
            if not supervised.expects(child) and child.exit_code not in (None, 0):
                raise child.failure()

    def _close(self, cast: Cast, record: Record) -> None:
        """Ask everybody to end, and note who did not do so in peace."""
        everyone: Sequence[Any] = cast.everyone
        stop_all(everyone, STOP_S)
        for child in everyone:
            # The latter was still starting, or is an engine that has nothing to clean up.
            if child.exit_code not in (0, -15):
                record.findings.append(f"{child.name} ended with {child.exit_code}")


@contextlib.contextmanager
def late_labels(damage: str | None) -> Iterator[None]:
    """Name weights only when an update ends, where that is the damage."""
    if damage != "late-label":
        yield
        return
    with mock.patch.object(Naming, "hide", return_value=None):
        yield


class Supervised:
    """Workers that are started again once they have ended, as compose does it."""

    def __init__(self, workers: Sequence[Child]) -> None:
        self._workers = workers
        self._expected: list[Child] = []
        self._due: dict[str, float] = {}

    def expect_end_of(self, worker: Child) -> None:
        """Start it again when it has ended."""
        self._expected.append(worker)

    def expects(self, child: Child) -> bool:
        """Whether it may be gone."""
        return child in self._expected

    def look(self) -> None:
        """Start again what has been down long enough."""
        now = time.monotonic()
        for worker in list(self._expected):
            if worker.running:
                continue
            if now >= self._due.setdefault(worker.name, now + RESTART_S):
                if worker.exit_code not in (0, -9):
                    raise worker.failure()
                del self._due[worker.name]
                self._expected.remove(worker)
                worker.start()


def _acts(scene: Scene) -> list[tuple[int, str]]:
    """Return what is done behind which batch: spread over the updates, in turn."""
    names = ["kill"] * scene.kills + ["stop"] * scene.stops + ["restart"] * scene.restarts
    step = scene.num_updates / (len(names) + 1)
    return [(max(1, int(step * (number + 1))), name) for number, name in enumerate(names)]


def _vocabulary() -> Path:
    from tests.e2e.weights.scenes import VOCABULARY

    return VOCABULARY


__all__ = ["ChildFailed", "SceneFailed", "Stage", "prove"]
