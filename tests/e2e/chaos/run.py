"""One chaos run: warm up, chaos, calm, drain, account.

Owns the order of things, on the main thread. Never judges: `judge` does, from what the trainers,
the observer and the auditor wrote down. Invariant: whatever ends the run, every process that it
started is ended, frozen ones included, and its folder stays exactly when something is wrong.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.devserver import DevServer
from rollstream.queue.blocking import BlockingQueue
from rollstream.runs import OUTAGES
from tests.e2e.chaos import operator_acts
from tests.e2e.chaos.cast import CLIENTS, RUN, assemble
from tests.e2e.chaos.journal import Life, read_lives, surviving, trained_twice
from tests.e2e.chaos.judge import lost_groups, retaken
from tests.e2e.chaos.links import Links
from tests.e2e.chaos.observer import Observer
from tests.e2e.chaos.options import Options
from tests.e2e.chaos.report import Report, say
from tests.e2e.chaos.rows import write_rows
from tests.e2e.chaos.schedule import ON_LINKS, Act
from tests.e2e.chaos.signs import signs_in_logs
from tests.e2e.chaos.stage import HARMLESS_EXITS, ChaosFailed, Stage, end_everybody

DRAIN_S = 120.0
STOP_S = 15.0
AUDIT_S = 300.0


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
            if stage.cast.trainer.child.exit_code == 0:
                return self._is_clean(queue)
            stage.tick()
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
            if odd:
                self.findings.append(f"{actor.name} ended by itself: {odd} (exit code: times)")
        self.findings += stage.cast.trainer.findings
        # One that ended by itself just now would have been started again.
        everyone = [actor for actor in stage.cast.everyone if actor.child.exit_code is None]
        for actor in everyone:
            actor.stop()
        limit = time.monotonic() + STOP_S
        for actor in everyone:
            code = actor.end(max(0.0, limit - time.monotonic()))
            if code not in (0, -signal.SIGTERM):  # the latter: it was still starting
                self.findings.append(f"{actor.name} ended with {code} when it was asked to stop")

    # --- the account ---------------------------------------------------------------------------
    def _account(self, stage: Stage, drain_s: float | None) -> Report:
        observer = stage.observer
        account = observer.settle()
        rows = [json.dumps(asdict(drop)) for drop in observer.drops.values()]
        (self.folder / "drops.jsonl").write_text("\n".join(rows))
        audit = self._audit(stage)
        lives = read_lives(self.folder)
        skipped, drops = frozenset(self.skipped), observer.drops.values()
        lost = lost_groups(self.options.num_rows, lives, drops, skipped)
        twice, trained = trained_twice(lives), surviving(lives)
        self._collect(observer, lives, audit, lost, twice)
        counters, info = stage.queue.counters(), stage.queue.info()
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
            kills=stage.done_to(Act.KILL, Act.AMNESIA),
            longest_stall_s=round(observer.longest_stall_s, 1),
            drain_s=drain_s,
            seconds=self.options.seconds,
            seed=self.options.seed,
            freezes=stage.done_to(Act.FREEZE, Act.USURP),
            cuts=stage.done_to(*ON_LINKS),
            trained=len(trained),
            trained_again=sum(len(life.until(None)) for life in lives.values()) - len(trained),
            calls_audited=audit["calls"],
            rewinds=0 if info is None else info.epoch,
            forgotten_bytes=stage.redis.forgotten_bytes,
            exits=stage.exits(),
            findings=self.findings,
        )

    def _collect(
        self,
        observer: Observer,
        lives: dict[int, Life],
        audit: dict[str, Any],
        lost: list[int],
        twice: list[int],
    ) -> None:
        """Say in words what is wrong, and what looks so."""
        found = self.findings
        found += [f"rollstream audit: {problem}" for problem in sorted(observer.problems)]
        found += [f"{name}: {ids[:20]}" for name, ids in (("lost", lost), ("twice", twice)) if ids]
        found += audit["findings"] + observer.findings
        unaudited = set(surviving(lives)) - set(audit["groups"])
        if unaudited:
            found.append(f"trained and not audited: {sorted(unaudited)[:20]}")
        for life in lives.values():
            found += [note for note in life.notes if note.startswith("StreamStalled")]
        found += signs_in_logs(self.folder)

    def _audit(self, stage: Stage) -> dict[str, Any]:
        """Let the auditor come to its end, and return its report."""
        (self.folder / "over").touch()
        stage.cast.auditor.wait_or_kill(AUDIT_S)
        try:
            found: dict[str, Any] = json.loads((self.folder / "audit.json").read_text())
        except OSError:
            raise ChaosFailed(f"the auditor broke:\n{stage.cast.auditor.tail()}") from None
        return found
