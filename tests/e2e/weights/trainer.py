"""The trainer of the proof: takes, trains, acks, moves the weights, evaluates, and writes it down.

Owns the loop, in a thread: the main thread is the one that may start processes. Never judges.
Invariant: a batch is in the record before it is acked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollstream import Batch, GroupStream
from rollstream.group import FinishedGroup
from rollstream.sample import Sample
from tests.e2e.weights import posts
from tests.e2e.weights.record import Evaluation, Handed, HandedGroup, Record, Update
from tests.e2e.weights.rows import evaluation_rows
from tests.e2e.weights.scenes import GROUPS_A_BATCH, SAMPLES_A_GROUP, STALL_S

CONNECT_S = 60.0
STEP_S = 0.05
PUSH_S, LONG_PUSH_S = 0.02, 0.4
LONG_EVERY = 6
"""Of the updates, one in so many takes long: then it shows whether nothing is sent meanwhile."""
EVALUATION_S = 40.0
EVALUATED_PROMPTS = 3
OWN_POST_EVERY = 2
"""Of the updates, one in so many names the engines' weights by the push itself."""
FAILING = 1
"""Behind so many updates one fails."""
STILL_EVERY = 4
"""Of the updates, one in so many holds the engines still while it pushes."""


class _PushBroke(Exception):
    """What the trainer's own code raises within an update."""


@dataclass(eq=False)
class Trainer:
    """Trains until the run is over."""

    url: str
    record: Record
    engines: Sequence[str]
    error: BaseException | None = None
    batches: int = 0
    _evaluating: list[threading.Thread] = field(default_factory=list)

    def start(self) -> threading.Thread:
        """Start the thread."""
        thread = threading.Thread(target=self.run, name="trainer", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Train; whatever goes wrong is kept in `error` for the main thread."""
        try:
            with GroupStream.connect(
                self.url, run=self.record.scene.name, state="fresh", connect_timeout_s=CONNECT_S
            ) as stream:
                for batch in stream.batches(groups=GROUPS_A_BATCH, timeout_s=STALL_S):
                    self._step(stream, batch)
                for thread in self._evaluating:
                    thread.join(EVALUATION_S)
        except Exception as error:  # noqa: BLE001 - a thread's runner: the main thread reports it
            self.error = error

    def _step(self, stream: GroupStream, batch: Batch) -> None:
        self.record.handed.append(
            Handed(stream.version, [_handed(group) for group in batch.groups])
        )
        self.batches += 1
        self._evaluate_now_and_then(stream)
        self._move_engines(stream)
        time.sleep(STEP_S)
        modes = self.record.scene.modes
        if len(self.record.updates) < len(modes):
            self._update(stream, batch)
        else:
            batch.ack()
            self._note_ack(batch)

    def _update(self, stream: GroupStream, batch: Batch) -> None:
        scene, version = self.record.scene, stream.version + 1
        mode = scene.modes[len(self.record.updates)]
        label = scene.label_of(version)
        own = version % OWN_POST_EVERY == 0
        acks_inside = scene.weights_mode != "async" or version % 3 == 0
        if not acks_inside:
            batch.ack()
            self._note_ack(batch)
        if len(self.record.updates) == FAILING:
            self._fail(stream, version, label if scene.labels else None)
        asked_s = time.time()
        with stream.updating_weights(
            version,
            # What the run's own mode asks for is its default.
            mode if scene.weights_mode == "async" else None,
            label=label if scene.labels else None,
            ack=batch if acks_inside else None,
            post=not own,
        ) as update:
            entered_s = time.time()
            self._push(
                update.engines, label, named=own, still=version % STILL_EVERY == 0,
                is_long=version % LONG_EVERY == 2,
            )  # fmt: skip
            left_s = time.time()
        done_s = time.time()
        self.record.updates.append(
            Update(version, mode, asked_s, entered_s, left_s, done_s,
                   hides=mode == "keep" and not own)
        )  # fmt: skip
        if acks_inside:
            self._note_ack(batch)

    def _fail(self, stream: GroupStream, version: int, label: str | None) -> None:
        """Begin an update whose push breaks: the run goes on with the weights that it had."""
        asked_s = entered_s = time.time()
        with contextlib.suppress(_PushBroke), stream.updating_weights(version, label=label) as one:
            entered_s = time.time()
            time.sleep(PUSH_S)
            raise _PushBroke
        done_s = time.time()
        self.record.failed.append(
            Update(version, one.mode, asked_s, entered_s, done_s, done_s, hides=one.mode == "keep")
        )
        if stream.version != version - 1:
            self.record.findings.append(f"a failed update left version {stream.version}")

    def _move_engines(self, stream: GroupStream) -> None:
        """Leave one engine out for a while."""
        third = max(1, self.record.scene.num_updates // 3)
        if self.record.scene.moves and self.batches == third:
            stream.set_engines(self.engines[1:])
        elif self.record.scene.moves and self.batches == 2 * third:
            stream.set_engines(None)

    def _push(
        self, engines: Sequence[str], label: str, *, named: bool, still: bool, is_long: bool
    ) -> None:
        """Give the engines new weights: what samples from then on."""
        protocol = self.record.scene.protocol
        for url in engines:
            if still:
                posts.pause(protocol, url, posts.STILL[protocol])
            if posts.push(url, label, named=named) != 200:
                self.record.findings.append(f"an engine took no weights {label}")
        time.sleep(LONG_PUSH_S if is_long else PUSH_S)
        for url in engines if still else ():
            posts.go_on(protocol, url)

    def _note_ack(self, batch: Batch) -> None:
        if not batch.acked:
            self.record.findings.append(f"batch {batch.number} is not acked behind its update")
        self.record.acked.append(batch.group_indexes)

    # --- evaluation ----------------------------------------------------------------------------
    def _evaluate_now_and_then(self, stream: GroupStream) -> None:
        scene, number = self.record.scene, len(self._evaluating)
        due = 1 + number * max(1, scene.num_updates // max(1, scene.evaluations))
        if number < scene.evaluations and self.batches >= due:
            thread = threading.Thread(
                target=self._evaluate, args=(stream, number), name=f"evaluation-{number}",
                daemon=True,
            )  # fmt: skip
            self._evaluating.append(thread)
            thread.start()

    def _evaluate(self, stream: GroupStream, number: int) -> None:
        scene = self.record.scene
        name, before = f"held-out-{number}", stream.version
        rows = evaluation_rows(scene, number, EVALUATED_PROMPTS)
        try:
            result = stream.evaluate(
                name, rows, n=SAMPLES_A_GROUP, sampling={"temperature": 0.7, "top_p": 0.9},
                timeout_s=EVALUATION_S,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a thread's runner: the judge reads it
            self.record.findings.append(f"{name}: {type(error).__name__}: {error}")
            return
        missing = [
            f"{place}:{one.member} {one.reason} {one.error}" for place, one in result.missing
        ]
        asked = len(rows) * SAMPLES_A_GROUP
        self.record.evaluations.append(
            Evaluation(name, asked, result.flat(), missing, (before, stream.version))
        )


def _handed(group: FinishedGroup) -> HandedGroup:
    samples = [sample for sample in group.samples if isinstance(sample, Sample)]
    missing = [f"{one.member}: {one.reason} {one.error}" for one in group.missing]
    return HandedGroup(group.group_index, samples, group.staleness, missing)
