"""One run of the demo: processes, training, kills, and the account at its end.

Owns the order of things, on the main thread. Never computes what a batch is worth and never
compares a token: the trainer and the auditor do. Invariant: whatever ends the run, every process
that it started is ended, and what went wrong is told with the tail of the log that says it.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo.auditor import Auditor, Evidence, Recomputed, Recorded, questions_of
from examples.demo.cast import FAULTS, Cast, assemble
from examples.demo.children import ChildFailed, stop_all
from examples.demo.killer import Killer
from examples.demo.options import DATASET, ROOT, Options
from examples.demo.show import Moment, Show
from examples.demo.summary import Facts, Summary, problems
from examples.demo.trainer import Trainer
from examples.devserver import redis_url
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue

LIMIT_S = 240.0
"""The whole demo gives up after so long."""
READY_S = 20.0
TICK_S = 0.1
STOP_S = 8.0
KEPT_RUNS = 5
ENGINE_NOTE = "a scripted stand-in for a model (SGLang's protocol, Qwen3's vocabulary), with faults"


class DemoFailed(RuntimeError):
    """The run cannot go on; the message says what broke and what it said."""


@dataclass
class Outcome:
    """What a run came to."""

    summary: Summary
    facts: Facts
    wrong: list[str]
    """Empty exactly when the demo succeeded."""


@dataclass
class Demo:
    """One run."""

    options: Options
    show: Show
    check_interrupts: Callable[[], None] = lambda: None
    """Raises KeyboardInterrupt where one came and was dropped."""
    run_name: str = field(default_factory=lambda: f"demo-{secrets.token_hex(4)}")
    started_s: float = field(default_factory=time.monotonic)
    broken: list[str] = field(default_factory=list)
    kills: int = 0

    def run(self) -> Outcome:
        """Run it to its end, whatever that is.

        Raises:
            DemoFailed: it could not even begin.
        """
        folder = new_folder(self.run_name)
        with redis_url() as url:
            cast = assemble(self.options, redis_url=url, run=self.run_name, folder=folder)
            queue = BlockingQueue.connect(url, self.run_name)
            try:
                outcome = self._act(cast, queue, url, folder)
                if not outcome.wrong:
                    forget_run(queue)
                return outcome
            finally:
                stop_all(cast.everyone)
                queue.close()

    def _act(self, cast: Cast, queue: BlockingQueue, url: str, folder: Path) -> Outcome:
        for child in (cast.sim, cast.producer, cast.verifier):
            if child is not None:
                child.start()
        # Both take a second or two, and neither needs the other.
        auditor = self._auditor(folder)
        trainer = Trainer(
            url=url,
            run_name=self.run_name,
            auditor=auditor,
            checkpoint=folder / "checkpoint.json",
            stop_after=None if self.options.simulated else self.options.batches,
        )
        try:
            if cast.sim is not None:
                cast.sim.wait_ready(READY_S)
            for worker in cast.workers:
                worker.start()
            self._watch(cast, queue, trainer)
        except (ChildFailed, DemoFailed) as error:
            self.broken.append(str(error))
        injected = injected_faults(cast)
        stop_all(cast.everyone, STOP_S)
        return self._account(queue, trainer, auditor, folder, injected)

    def _auditor(self, folder: Path) -> Auditor:
        options = self.options
        if not options.simulated:
            return Auditor(Recorded(folder / "wire"))
        try:
            evidence: Evidence = Recomputed(options.tokenizer, options.source)
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing more special
            raise DemoFailed(f"--tokenizer {options.tokenizer}: {error}") from None
        num = options.num_groups
        return Auditor(evidence, questions_of(DATASET, num, options.seed, num))

    def _watch(self, cast: Cast, queue: BlockingQueue, trainer: Trainer) -> None:
        """Let the trainer train; look after the processes until it is done."""
        every_s = self.options.kill_every
        killer = Killer(cast.workers, every_s, self.options.seed) if every_s else None
        thread = trainer.start()
        next_look_s = 0.0
        while thread.is_alive():
            thread.join(TICK_S)
            self.check_interrupts()
            self._check(cast)
            if time.monotonic() - self.started_s > LIMIT_S:
                raise DemoFailed(f"the run did not end within {LIMIT_S:.0f} s")
            if killer is not None and thread.is_alive():
                killed = killer.tick()
                self.kills = killer.kills
                if killed is not None:
                    self.show.say(f"killed {killed} (SIGKILL) and started it again")
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + 0.5
                self.show.update(self._moment(cast, queue, trainer))
        if trainer.error is not None:
            error = trainer.error
            raise DemoFailed(f"the trainer ended with {type(error).__name__}: {error}")

    def _check(self, cast: Cast) -> None:
        """Raise where a process ended that nobody ended."""
        for child in cast.everyone:
            over_by_itself = child.exit_code == 0 and child is not cast.sim
            if child.exit_code is not None and not over_by_itself:
                raise child.failure()

    def _moment(self, cast: Cast, queue: BlockingQueue, trainer: Trainer) -> Moment:
        counters, depths = queue.counters(), queue.depths()
        tally, seconds = trainer.tally, time.monotonic() - (trainer.started_s or time.monotonic())
        return Moment(
            seconds=time.monotonic() - self.started_s,
            batches=tally.batches,
            wanted=self.options.batches,
            acked=counters.get("acked", 0),
            dropped=drops(counters),
            samples=tally.samples,
            samples_per_s=tally.samples / seconds if seconds > 0 else 0.0,
            version=trainer.version,
            loss=trainer.loss,
            depths=depths,
            workers={
                w.name: ("ready" if w.ready() else "starting")
                + (f", started {w.starts} times" if w.starts > 1 else "")
                for w in cast.workers
            },
            calls_audited=trainer.auditor.calls,
            mismatches=trainer.auditor.mismatches,
            kills=self.kills,
        )

    def _account(
        self,
        queue: BlockingQueue,
        trainer: Trainer,
        auditor: Auditor,
        folder: Path,
        injected: dict[str, int],
    ) -> Outcome:
        """Compare the trainer's own log with what the queue says."""
        counters = queue.counters()
        account = queue.call(calls.audit(deep=True))
        self.broken += [f"rollstream audit: {problem}" for problem in account.problems]
        self.broken += auditor.findings
        tally = trainer.tally
        if tally.batches < self.options.batches:
            self.broken += why_dropped(queue)
        summary = Summary(
            groups_acked=account.acked,
            groups_dropped=drops(counters),
            samples=tally.samples,
            turns=tally.turns,
            tokens=tally.tokens,
            samples_per_s=round(tally.samples / trainer.seconds, 1),
            spans=tally.spans(),
            retries={name: counters.get(name, 0) for name in ("attempts", "crashes")},
            fenced=counters.get("fenced", 0),
            lost=len(lost_groups(queue, account.enqueued, tally.trained)),
            twice=len(tally.twice),
            token_mismatches=auditor.mismatches,
            accounting_difference=abs(
                account.enqueued - account.acked - account.dropped - account.live
            ),
            seconds=round(time.monotonic() - self.started_s, 1),
            audit=auditor.evidence.name,
        )
        rewards = tally.rewards
        facts = Facts(
            batches=tally.batches,
            lists=tally.lists,
            calls_audited=auditor.calls,
            mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
            versions=trainer.version,
            kills=self.kills,
            injected=injected,
            engine=ENGINE_NOTE if self.options.simulated else ", ".join(self.options.urls),
            folder=str(folder),
        )
        wrong = problems(
            summary, batches=tally.batches, wanted=self.options.batches, broken=self.broken
        )
        return Outcome(summary, facts, wrong)


def injected_faults(cast: Cast) -> dict[str, int]:
    """Return what the stand-in did wrong on purpose, {} where it cannot be asked."""
    if cast.sim is None or not cast.sim.running:
        return {}
    try:
        with urllib.request.urlopen(f"{cast.engines[0]}/sim", timeout=5) as reply:
            counts = json.loads(reply.read())["counts"]
    except (OSError, ValueError, KeyError):
        return {}
    return {kind: counts[name] for kind in FAULTS if (name := kind.replace("-", "_")) in counts}


def drops(counters: dict[str, int]) -> dict[str, int]:
    """Return {reason: count} of dropped groups."""
    return {
        name.partition(":")[2]: count
        for name, count in sorted(counters.items())
        if name.startswith("dropped:")
    }


def why_dropped(queue: BlockingQueue) -> list[str]:
    """Return what the members of the last group that was cut short failed for."""
    for drop in queue.past(100):
        errors = [f"{reason}: {text}" for reason, text in filter(None, drop["errors"])]
        if errors:
            group, reason = drop["group_index"], drop["reason"]
            return [f"group {group}, like others, was dropped as {reason}: {errors[0]}"]
    return []


def lost_groups(queue: BlockingQueue, enqueued: int, trained: list[int]) -> set[int]:
    """Return the enqueued groups that are neither trained and acked, dropped, nor live.

    The producer enqueues 0, 1, 2, …, so `enqueued` names them all. What the trainer trained is
    known from its own log; it acked all of that, or its last batch is live.
    """
    dropped = {int(drop["group_index"]) for drop in queue.past(10_000)}
    live = {int(gid) for gid in queue.client.smembers(f"{queue.prefix}gs")}
    return set(range(enqueued)) - set(trained) - dropped - live


def forget_run(queue: BlockingQueue) -> None:
    """Remove what an ended run leaves on a server that may be somebody's; a failed one stays."""
    for key in list(queue.client.scan_iter(match=f"{queue.prefix}*", count=1000)):
        queue.client.unlink(key)


def new_folder(run_name: str) -> Path:
    """Return an empty folder for this run; only the latest few are kept."""
    above = ROOT / "out" / "demo"
    above.mkdir(parents=True, exist_ok=True)
    older = sorted(above.iterdir(), key=lambda path: path.stat().st_mtime)
    for path in older[: -KEPT_RUNS + 1]:
        shutil.rmtree(path, ignore_errors=True)
    folder = above / run_name
    folder.mkdir()
    return folder
