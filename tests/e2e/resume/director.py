"""Kills, freezes and starts again; the order of things in one run, on the main thread.

Owns every process and every decision that chance makes. Never trains and never judges a history.
Invariant: whatever is killed is started again within seconds, so the run can always end; whatever
ends the run, no process is left.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo.children import Child, stop_all
from rollstream.config import EXIT_UNREACHABLE
from tests.e2e.resume import cast as cast_module
from tests.e2e.resume.cast import Cast, assemble
from tests.e2e.resume.fates import Fate, Point, Way
from tests.e2e.resume.line import Choice, Line
from tests.e2e.resume.options import Options
from tests.e2e.resume.storage import Memory, Storage
from tests.e2e.resume.trainer import EXIT_STREAM, EXIT_TAKEN

TICK_S = 0.03
READY_S = 30.0
WORKER_READY = "worker_ready"
"""What a worker logs once it leases."""
CALM_LIMIT_S = 120.0
"""How long the end may take once nothing is killed any more."""
ZOMBIE_LIMIT_S = 60.0
MEAN_PEACE_S = 1.7
"""Between two faults: long enough for a trainer to be far behind its last checkpoint."""
FATED = 0.6
"""Share of trainers that end at a point of their own loop."""
FROZEN = 0.3
"""Share of those that freeze there; the others die."""
PASSES = {
    Point.CONNECTED: 1, Point.HANDED_OUT: 30, Point.TRAINED: 30, Point.ACKED: 30,
    Point.STATE_TAKEN: 10, Point.WRITTEN: 10, Point.SAVED: 10,
}  # fmt: skip
"""How often a fated trainer passes its point at most."""


class Broken(RuntimeError):
    """The run cannot be measured: a process failed in a way that is nobody's plan."""


@dataclass
class Zombie:
    """A trainer that is frozen, and then is not."""

    child: Child
    thaws_mono_s: float
    ends_mono_s: float = float("inf")
    """When it must have ended."""


@dataclass
class Director:
    """One run."""

    options: Options
    folder: Path
    storage: Storage
    generation: int = 0
    choices: Counter[Choice] = field(default_factory=Counter)
    memories: Counter[Memory] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    endings: int = 0
    """How often training came to its end before the last time."""
    num_zombies: int = 0
    zombies_refused: int = 0

    def __post_init__(self) -> None:
        """Prepare everything, start nothing."""
        self._rng = random.Random(self.options.seed)
        self._line = Line(self.folder, self._rng)
        self._cast: Cast = assemble(self.options, self.storage.url, self.folder)
        self._trainer: Child | None = None
        self._zombies: list[Zombie] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._awaited: list[Child] = []
        """Children that are down and will be started."""
        self._redis_is_down = False
        self._next_memories: list[Memory] = [Memory.EMPTY]
        """What Redis knows after its next deaths; drawn anew when it is used up."""
        self._calm_mono_s = 0.0

    # --- the run -------------------------------------------------------------------------------
    def run(self) -> str:
        """Run it; return the name of the checkpoint that survives.

        Raises:
            Broken: it came to no end.
        """
        try:
            self._start_cast()
            self._calm_mono_s = time.monotonic() + self.options.seconds
            self._start_trainer(Choice.FRESH)
            next_fault = time.monotonic() + 1.0
            while not self._is_over():
                time.sleep(TICK_S)
                now = time.monotonic()
                self.storage.watch()
                self._do_what_is_due(now)
                self._look_after_cast(now)
                self._look_after_trainer(now)
                self._look_after_zombies(now)
                if now >= next_fault and now < self._calm_mono_s:
                    self._break_something(now)
                    next_fault = now + min(5.0, max(0.2, self._rng.expovariate(1 / MEAN_PEACE_S)))
                if now > self._calm_mono_s + CALM_LIMIT_S:
                    raise Broken(f"no end within {CALM_LIMIT_S:.0f} s of calm\n{self._tails()}")
            return self._line.newest
        finally:
            everyone = [zombie.child for zombie in self._zombies]
            everyone += [self._trainer] if self._trainer is not None else []
            for child in everyone:
                child.kill()
            stop_all(self._cast.everyone)

    def _start_cast(self) -> None:
        cast = self._cast
        for child in (cast.sim, cast.producer, *cast.workers):
            child.start()
        cast.sim.wait_ready(READY_S)
        limit = time.monotonic() + READY_S
        for worker in cast.workers:
            while WORKER_READY not in worker.log.read_text():
                if not worker.running or time.monotonic() > limit:
                    raise worker.failure()
                time.sleep(TICK_S)

    def _is_over(self) -> bool:
        """Whether training ended with nothing left to break, and every zombie was heard."""
        trainer = self._trainer
        is_calm = time.monotonic() >= self._calm_mono_s
        return is_calm and trainer is None and not self._zombies and not self._due

    # --- what looks after processes ------------------------------------------------------------
    def _look_after_cast(self, now: float) -> None:
        """Do what a supervisor does; raise where a process ended that had no reason to."""
        for child in self._cast.everyone:
            code = child.exit_code
            if code == EXIT_UNREACHABLE and child not in self._awaited:
                self._start_again(child, now, 0.3)
            elif code not in (None, -signal.SIGKILL, EXIT_UNREACHABLE):
                raise Broken(str(child.failure()))

    def _look_after_trainer(self, now: float) -> None:
        trainer = self._trainer
        if trainer is None:
            return
        if trainer.exit_code is not None:
            self._trainer = None
            self._line.add_saves_of(self.generation)
            self._follow(trainer, now)
        elif is_frozen(trainer):
            self._trainer = None
            self._line.add_saves_of(self.generation)
            self.num_zombies += 1
            self._zombies.append(Zombie(trainer, now + self._rng.uniform(0.5, 3.0)))
            self._start_trainer_soon(now)

    def _follow(self, trainer: Child, now: float) -> None:
        """Start a trainer after one that ended, unless that was the end."""
        if trainer.exit_code == 0:
            if now < self._calm_mono_s:
                self.endings += 1
                self._start_trainer_soon(now, Choice.OLDER)
            return
        if trainer.exit_code == -signal.SIGKILL:
            self.kills["trainer"] += 1
        elif trainer.exit_code not in (EXIT_STREAM, EXIT_TAKEN):
            raise Broken(str(trainer.failure()))
        self._start_trainer_soon(now)

    def _start_trainer_soon(self, now: float, choice: Choice | None = None) -> None:
        if choice is None:
            choice = self._line.draw() if now < self._calm_mono_s else Choice.NEWEST
        self._later(now, self._rng.uniform(0.0, 0.4), lambda: self._start_trainer(choice))

    def _start_trainer(self, choice: Choice) -> None:
        self.generation += 1
        self.choices[choice] += 1
        fate = self._draw_fate() if time.monotonic() < self._calm_mono_s else None
        self._trainer = cast_module.trainer(
            self.storage.url,
            self.folder,
            self.generation,
            self._line.go_to(choice),
            None if fate is None else fate.to_plain(),
        )
        self._trainer.start()

    def _draw_fate(self) -> Fate | None:
        if self._rng.random() > FATED:
            return None
        point = self._rng.choice(list(Point))
        way = Way.FREEZE if self._rng.random() < FROZEN else Way.DIE
        return Fate(point, way, self._rng.randint(1, PASSES[point]))

    def _look_after_zombies(self, now: float) -> None:
        """Thaw trainers whose time has come; each must end by what it is told."""
        for zombie in list(self._zombies):
            child = zombie.child
            if child.exit_code is not None:
                self.zombies_refused += child.exit_code == EXIT_TAKEN
                if child.exit_code not in (0, EXIT_TAKEN, EXIT_STREAM, -signal.SIGKILL):
                    raise Broken(str(child.failure()))
                self._zombies.remove(zombie)
            elif now >= zombie.ends_mono_s:
                raise Broken(f"a thawed trainer lives on after {ZOMBIE_LIMIT_S:.0f} s")
            elif now >= zombie.thaws_mono_s and is_frozen(child):
                # Perhaps for the second time: frozen from outside first, by its own fate then.
                zombie.ends_mono_s = min(zombie.ends_mono_s, now + ZOMBIE_LIMIT_S)
                send(child, signal.SIGCONT)

    # --- what breaks ---------------------------------------------------------------------------
    def _break_something(self, now: float) -> None:
        # A run in which Redis never forgot everything would not measure what it is there for.
        is_late = now > self._calm_mono_s - 0.7 * self.options.seconds
        if is_late and not self.memories[Memory.EMPTY]:
            self._kill_redis(now)
            return
        breaks: list[tuple[int, Callable[[float], None]]] = [
            (15, self._kill_trainer),
            (10, self._freeze_trainer),
            (10, self._kill_producer),
            (10, self._kill_worker),
            (45, self._kill_redis),
            (4, self._kill_everything),
        ]
        weights = [weight for weight, _ in breaks]
        self._rng.choices([action for _, action in breaks], weights)[0](now)

    def _kill_trainer(self, _now: float) -> None:
        if self._trainer is not None:
            self._trainer.kill()

    def _freeze_trainer(self, _now: float) -> None:
        if self._trainer is not None:
            send(self._trainer, signal.SIGSTOP)

    def _kill_producer(self, now: float) -> None:
        self._kill(self._cast.producer, "producer", now, self._rng.uniform(0.0, 1.5))

    def _kill_worker(self, now: float) -> None:
        worker = self._rng.choice(self._cast.workers)
        self._kill(worker, "worker", now, self._rng.uniform(0.0, 1.0))

    def _kill_redis(self, now: float) -> None:
        """Kill Redis; sometimes with somebody who would have told it what it forgets."""
        if self._redis_is_down:
            return
        self._redis_is_down = True
        if not self._next_memories:
            self._next_memories = self._rng.sample(list(Memory), len(Memory))
        memory = self._next_memories.pop()
        self.kills["redis"] += 1
        self.memories[memory] += 1
        self.storage.kill(memory, self._rng.uniform(0.05, 1.5))
        if self._rng.random() < 0.3:
            self._kill_trainer(now)
        if self._rng.random() < 0.2:
            self._kill_producer(now)
        self._later(now, self._rng.uniform(0.02, 1.0), self._start_redis)

    def _kill_everything(self, now: float) -> None:
        self._kill_trainer(now)
        self._kill_producer(now)
        for worker in self._cast.workers:
            self._kill(worker, "worker", now, self._rng.uniform(0.0, 1.0))
        self._kill_redis(now)

    def _kill(self, child: Child, role: str, now: float, down_s: float) -> None:
        if child.running:
            self.kills[role] += 1
            child.kill()
            self._start_again(child, now, down_s)

    def _start_again(self, child: Child, now: float, down_s: float) -> None:
        self._awaited.append(child)

        def start() -> None:
            self._awaited.remove(child)
            child.start()

        self._later(now, down_s, start)

    def _start_redis(self) -> None:
        self.storage.server.start()
        self._redis_is_down = False

    # --- time ----------------------------------------------------------------------------------
    def _later(self, now: float, delay_s: float, action: Callable[[], None]) -> None:
        self._due.append((now + delay_s, action))

    def _do_what_is_due(self, now: float) -> None:
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()

    def _tails(self) -> str:
        children = [*self._cast.everyone, *([self._trainer] if self._trainer else [])]
        return "\n".join(f"{child.name}:\n{child.tail()}" for child in children)


def send(child: Child, number: signal.Signals) -> None:
    """Send a signal to a child that lives."""
    if child.running:
        assert child.process is not None
        os.kill(child.process.pid, number)


def is_frozen(child: Child) -> bool:
    """Return whether a child was stopped by SIGSTOP."""
    assert child.process is not None
    try:
        stat = Path(f"/proc/{child.process.pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"
