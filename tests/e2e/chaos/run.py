"""One chaos run: warm up, chaos, calm, drain, account.

Owns the order of things, on the main thread. Never judges: `judge` does, from what the trainers,
the observer and the auditor wrote down. Invariant: whatever ends the run, every process that it
started is ended, frozen ones included, and its folder stays exactly when something is wrong.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from examples.demo.children import stop_all
from examples.devserver import DevServer
from rollstream.queue.blocking import BlockingQueue
from rollstream.runs import OUTAGES
from tests.e2e.chaos import operator_acts
from tests.e2e.chaos.actors import Actor, ServerActor
from tests.e2e.chaos.cast import CLIENTS, MAX_STALENESS, RUN, Cast, assemble
from tests.e2e.chaos.journal import read_lives, surviving, trained_twice
from tests.e2e.chaos.judge import lost_groups, retaken
from tests.e2e.chaos.links import Links
from tests.e2e.chaos.observer import Observer
from tests.e2e.chaos.options import Options
from tests.e2e.chaos.report import Report, say
from tests.e2e.chaos.rows import write_rows
from tests.e2e.chaos.schedule import ON_LINKS, Act, Event, schedule
from tests.e2e.chaos.signs import signs_in_logs

READY_S = 90.0
DRAIN_S = 120.0
STOP_S = 15.0
AUDIT_S = 300.0
TICK_S = 0.03
SAY_EVERY_S = 5.0
HARMLESS_EXITS = frozenset({-9, 3, 5})
"""Killed by its own sample; Redis or every engine was away when it started; its loop stood still
for so long that it ended itself, or the trainer was taken over."""


class ChaosFailed(RuntimeError):
    """The run could not even begin; the message says why."""


@dataclass
class Chaos:
    """One run."""

    options: Options
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="rollstream-chaos-")))
    findings: list[str] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)

    def run(self) -> Report:
        """Run it to its end.

        Raises:
            ChaosFailed: it did not get going.
        """
        write_rows(self.folder / "rows.jsonl", self.options.num_rows)
        server = DevServer("--auto-aof-rewrite-min-size", "64mb", aof=True)
        report: Report | None = None
        try:
            with server, Links(server.port, CLIENTS) as links:
                cast = assemble(self.options, self.folder, links.ports)
                try:
                    with Observer(server.port, RUN) as observer:
                        stage = Stage(self.options, self.folder, cast, server, links, observer)
                        report = self._act(stage)
                finally:
                    end_everybody(cast)
                    if report is None or not report.is_clean:
                        self._keep_server(server)
        finally:
            if report is not None and report.is_clean and not self.options.keep:
                shutil.rmtree(self.folder, ignore_errors=True)
        return report

    def _keep_server(self, server: DevServer) -> None:
        server.kill()
        with contextlib.suppress(OSError):
            shutil.copytree(server.folder, self.folder / "redis")

    def _act(self, stage: Stage) -> Report:
        stage.open()
        say("everybody works; chaos begins")
        stage.play()
        say("chaos ends; draining")
        (self.folder / "calm").touch()
        calm_mono_s = time.monotonic()
        if stage.observer.is_done:
            self.findings.append("the source ran dry under chaos: raise ROWS_A_SECOND")
        stage.heal()
        drained = self._drain(stage)
        drain_s = round(time.monotonic() - calm_mono_s, 1) if drained else None
        self._check_exits(stage)
        say(f"drained in {drain_s} s; judging" if drained else "it did not drain; judging")
        return self._account(stage, drain_s)

    # --- the drain -----------------------------------------------------------------------------
    def _drain(self, stage: Stage) -> bool:
        """Let the source end and everybody finish; whether the run came to its end."""
        limit = time.monotonic() + DRAIN_S
        tail: int | None = None
        queue = stage.queue
        while time.monotonic() < limit:
            stage.tick()
            if stage.cast.trainer.child.exit_code == 0:
                return self._is_clean(queue)
            lives = read_lives(self.folder)
            # Before that it may rewind the run, and what was skipped would come again.
            is_connected = lives[max(lives)].connected and max(lives) == stage.cast.trainer.lives
            with contextlib.suppress(*OUTAGES):
                info = queue.info()
                if is_connected and info is not None and not info.done:
                    tail, skipped = operator_acts.end_source(queue, self.options.num_rows, tail)
                    self.skipped |= skipped
            stage.note("draining")
            time.sleep(0.1)
        self.findings.append(f"did not drain in {DRAIN_S:g} s: {queue.depths()}, {queue.info()}")
        return False

    def _is_clean(self, queue: BlockingQueue) -> bool:
        """Whether everything is terminal and nothing of any group is left."""
        info, depths = queue.info(), queue.depths()
        left = [
            key.decode()
            for key in queue.client.scan_iter(match=f"{queue.prefix}*", count=1000)
            if key.removeprefix(queue.prefix.encode())[:2] in (b"g:", b"b:")
        ]
        if left:
            self.findings.append(f"keys of ended groups are left: {left[:5]}")
        frontier = 0 if info is None else info.frontier
        if frontier != self.options.num_rows:
            self.findings.append(f"frontier {frontier}, the source has {self.options.num_rows}")
        busy = {name: count for name, count in depths.items() if count}
        if busy:
            self.findings.append(f"something is left: {busy}")
        return not busy and frontier == self.options.num_rows

    def _check_exits(self, stage: Stage) -> None:
        for actor in stage.actors.values():
            odd = {code: n for code, n in actor.exits.items() if code not in HARMLESS_EXITS}
            if actor is stage.cast.trainer:
                odd.pop(0, None)
            if odd:
                self.findings.append(f"{actor.name} ended by itself: {odd} (exit code: times)")
        self.findings += stage.cast.trainer.findings
        everyone = [actor for actor in stage.cast.everyone if actor is not stage.cast.trainer]
        for actor in everyone:
            actor.stop()
        limit = time.monotonic() + STOP_S
        for actor in everyone:
            code = actor.end(max(0.0, limit - time.monotonic()))
            if code not in (0, -signal.SIGTERM):  # the latter: it was still starting
                self.findings.append(f"{actor.name} ended with {code} when it was asked to stop")

    # --- the account ---------------------------------------------------------------------------
    def _account(self, stage: Stage, drain_s: float | None) -> Report:
        observer, queue = stage.observer, stage.queue
        account = observer.settle()
        rows = [json.dumps(asdict(drop)) for drop in observer.drops.values()]
        (self.folder / "drops.jsonl").write_text("\n".join(rows))
        audit = self._audit(stage)
        lives = read_lives(self.folder)
        trained = surviving(lives)
        lost = lost_groups(
            self.options.num_rows, lives, observer.drops.values(), frozenset(self.skipped)
        )
        twice = trained_twice(lives)
        counters = queue.counters()
        info = queue.info()
        self.findings += [f"rollstream audit: {problem}" for problem in sorted(observer.problems)]
        self.findings += [f"lost: {lost[:20]}"] if lost else []
        self.findings += [f"twice: {twice[:20]}"] if twice else []
        self.findings += audit["findings"] + observer.findings
        unaudited = set(trained) - set(audit["groups"])
        if unaudited:
            self.findings.append(f"trained and not audited: {sorted(unaudited)[:20]}")
        for life in lives.values():
            self.findings += [n for n in life.notes if n.startswith("StreamStalled")]
        self.findings += signs_in_logs(self.folder)
        everything = [group for life in lives.values() for group in life.until(None)]
        actors = stage.actors.values()
        return Report(
            enqueued=account.enqueued,
            acked=account.acked,
            dropped={
                name.partition(":")[2]: count
                for name, count in sorted(counters.items())
                if name.startswith("dropped:")
            },
            lost=len(lost),
            twice=len(twice),
            token_mismatches=audit["mismatches"],
            accounting_difference=observer.accounting_difference + len(observer.problems),
            fenced=counters.get("fenced", 0),
            replays=observer.replays + retaken(lives),
            kills=by_role(actors, Act.KILL, Act.AMNESIA),
            longest_stall_s=round(observer.longest_stall_s, 1),
            drain_s=drain_s,
            seconds=self.options.seconds,
            seed=self.options.seed,
            freezes=by_role(actors, Act.FREEZE, Act.USURP),
            cuts=by_role(actors, *ON_LINKS),
            trained=len(trained),
            trained_again=len(everything) - len(trained),
            calls_audited=audit["calls"],
            rewinds=0 if info is None else info.epoch,
            forgotten_bytes=stage.redis.forgotten_bytes,
            exits=dict(
                sum((Counter({f"{a.role}:{c}": n for c, n in a.exits.items()}) for a in actors),
                    Counter())
            ),
            findings=self.findings,
        )  # fmt: skip

    def _audit(self, stage: Stage) -> dict[str, Any]:
        """Let the auditor come to its end, and return its report."""
        (self.folder / "over").touch()
        stage.cast.auditor.wait_or_kill(AUDIT_S)
        try:
            found: dict[str, Any] = json.loads((self.folder / "audit.json").read_text())
        except OSError:
            raise ChaosFailed(f"the auditor broke:\n{stage.cast.auditor.tail()}") from None
        return found


class Stage:
    """Everybody, and what is done to them.

    Attributes:
        actors: by name.
        queue: straight to the server; for the calm after.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        cast: Cast,
        server: DevServer,
        links: Links,
        observer: Observer,
    ) -> None:
        self.cast, self.observer = cast, observer
        self.queue = BlockingQueue.connect(server.url, RUN)
        self._options, self._links, self._folder = options, links, folder
        self._draw = random.Random(f"{options.seed} durations")
        draw = random.Random(f"{options.seed} crashes")
        self.redis = ServerActor(server, draw, observer.server_restarted)
        self.actors: dict[str, Actor] = {actor.name: actor for actor in cast.everyone}
        self.actors["redis"] = self.redis
        self._later: list[tuple[float, Callable[[], None]]] = []

    def open(self) -> None:
        """Start everybody and wait until a first group was trained on.

        Raises:
            ChaosFailed: that took too long, or somebody broke.
        """
        self.cast.auditor.start()
        for engine in self.cast.engines:
            engine.start()
        for engine in self.cast.engines:
            engine.child.wait_ready(READY_S)
        for actor in self.cast.everyone:
            if actor not in self.cast.engines:
                actor.start()
        limit = time.monotonic() + READY_S
        while self.queue.counters().get("acked", 0) == 0:
            self.tick()
            broken = [a for a in self.cast.everyone if set(a.exits) - HARMLESS_EXITS]
            if broken or time.monotonic() > limit:
                who = (broken or [self.cast.trainer])[0]
                raise ChaosFailed(f"nothing was trained on; {who.name}:\n{who.child.tail()}")
            time.sleep(0.05)

    def play(self) -> None:
        """Let everything on the schedule happen, at its time."""
        started = time.monotonic()
        next_say_s = SAY_EVERY_S
        self.observer.time_stalls(on=True)
        for event in schedule(self._options.seed, self._options.seconds):
            while (now_s := time.monotonic() - started) < event.at_s:
                self.tick()
                time.sleep(min(TICK_S, max(0.0, event.at_s - now_s)))
            if now_s >= next_say_s:
                next_say_s = now_s + SAY_EVERY_S
                say(f"{now_s:.0f} s, {self.observer.num_ended} groups ended")
            self._do(event)
            self.note(f"{event.act} {event.victim} {event.duration_s:.1f} s")
        while time.monotonic() - started < self._options.seconds:
            self.tick()
            time.sleep(TICK_S)
        self.observer.time_stalls(on=False)

    def tick(self) -> None:
        """Do what is due."""
        for actor in self.actors.values():
            actor.tick()
        now = time.monotonic()
        due = [action for at, action in self._later if at <= now]
        self._later = [(at, action) for at, action in self._later if at > now]
        for action in due:
            action()

    def heal(self) -> None:
        """End all chaos: Redis first, then everybody else."""
        for _, action in self._later:
            action()
        self._later = []
        self.redis.heal()
        for name in CLIENTS:
            self._links.heal(name)
        for actor in self.actors.values():
            actor.heal()

    def _do(self, event: Event) -> None:
        if event.role == "operator":
            self._operate(event)
            return
        actor = self.actors[event.victim]
        if event.act in ON_LINKS:
            self._spoil(event, actor)
        elif event.act is Act.KILL:
            actor.kill(event.duration_s)
        elif event.act is Act.FREEZE:
            actor.freeze(event.duration_s)
        elif event.act is Act.AMNESIA:
            self.redis.forget(event.duration_s)
        elif event.act is Act.USURP:
            self.cast.trainer.usurp(event.duration_s)

    def note(self, what: str) -> None:
        """Write something down, with the time that the processes' logs have."""
        now = datetime.now(tz=UTC).isoformat()
        seen = f"{self.observer.num_ended} ended, {self.observer.depths}"
        with (self._folder / "events.log").open("a") as log:
            log.write(f"{now} {what}; {seen}\n")

    def _spoil(self, event: Event, actor: Actor) -> None:
        actor.acts[event.act] += 1
        name = event.victim
        if event.act is Act.CUT:
            self._links.cut(name)
        elif event.act is Act.TEAR:
            self._links.tear(name)
        elif event.act is Act.LOSE:
            self._links.lose(name, self._draw.randint(1, 3))
        else:
            self._links.stall(name)
            self._after(event.duration_s, partial(self._links.heal, name))

    def _operate(self, event: Event) -> None:
        errand = self.observer.run_errand
        if event.act is Act.WITHDRAW:
            errand(partial(operator_acts.withdraw_some, draw=self._draw))
        elif event.act is Act.REQUEUE:
            errand(partial(operator_acts.requeue_some, draw=self._draw))
        else:
            errand(partial(operator_acts.bound_staleness, versions=1))
            loosen = partial(operator_acts.bound_staleness, versions=MAX_STALENESS)
            self._after(event.duration_s, partial(errand, loosen))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))


def end_everybody(cast: Cast) -> None:
    """End every process, whatever state it is in."""
    for actor in cast.everyone:
        actor.child.thaw()
    cast.trainer.end(0.0)
    stop_all([*(actor.child for actor in cast.everyone), cast.auditor])


def by_role(actors: Any, *acts: Act) -> dict[str, int]:
    """Return how often something was done to processes of each role."""
    counts: Counter[str] = Counter()
    for actor in actors:
        counts[actor.role] += sum(actor.acts[act] for act in acts)
    return {role: count for role, count in sorted(counts.items()) if count}
