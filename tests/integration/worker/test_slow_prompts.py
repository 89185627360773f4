"""Case 77: a prompt that needs three versions where one is permitted; a whole run around it.

Owns a real producer (its budgets, its capacity), a real worker and a real trainer. The slow prompt
ends its reply only three versions after it began it, so whoever waits for it waits in vain: what is
shown is that it costs a bounded number of lives, that everybody can see what became of it, and that
the others train meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.integration.producer.scene import Trainer, producing, rows_file, settings_of
from tests.integration.worker.parts import POLL_S, Parts, wait_until
from tests.unit.worker.works import answer
from worker.types import GenerateInput, GenerateOutput

N, ROWS, STEPS, A_STEP, REQUEUES = 2, 400, 20, 2, 2
SLOW, NEEDS = 0, 3


class Begun:
    """A generate function that remembers what it began, and is slow for one prompt."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    async def __call__(self, given: GenerateInput) -> GenerateOutput:
        group_index = given.sample.group_index
        assert group_index is not None
        self.counts[group_index] += 1
        first = given.version()
        while group_index == SLOW and given.version() < first + NEEDS:
            await asyncio.sleep(POLL_S)
        sample = answer(given, reward=float(given.sample.member))
        # It was sampled under the weights that it began with.
        call = sample.calls[0]
        call.versions, call.dispatched_version = [(first, call.start, call.end)], first
        return GenerateOutput(sample)


class Training:
    """A trainer in a thread of its own, as trainers are."""

    def __init__(self, url: str, run: str) -> None:
        self.staleness: dict[int, int] = {}
        """Of every group that was trained on, in versions."""
        self.steps = 0
        self.figures: dict[str, Any] = {}
        self._url, self._run = url, run
        self._is_over = threading.Event()

    def run(self) -> None:
        """Take batches of `A_STEP` groups, each of them a new version, until told to stop."""
        with GroupStream.connect(self._url, run=self._run, state="fresh") as stream:
            while not self._is_over.is_set():
                batch = stream.next_batch(A_STEP, timeout_s=30.0)
                assert batch is not None
                for group in batch.groups:
                    self.staleness[group.group_index] = group.staleness
                batch.ack()
                self.steps += 1
                stream.set_weight_version(self.steps)
                self.figures = dict(stream.metrics())
                self._is_over.wait(0.02)

    def stop(self) -> None:
        """Let it end with the next step."""
        self._is_over.set()


@pytest.mark.parametrize("on_stale", ["requeue", "drop", "deliver"])
async def test_case_77_a_prompt_that_is_always_too_old_ends_after_a_bounded_number_of_lives(
    valkey_url: str, run_name: str, tmp_path: Path, on_stale: str
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, ROWS), f"--weights.groups_per_step={A_STEP}",
        "--weights.max_staleness=1", f"--weights.on_stale={on_stale}",
        f"--weights.max_requeues={REQUEUES}", "--worker.lease_s=1",
    )  # fmt: skip
    queue, begun = Queue.connect(valkey_url, run_name), Begun()
    async with producing(settings), Trainer(valkey_url, run_name) as accounts:
        worker = Parts(queue, generate=begun, slots=16)
        worker.start()
        training = Training(valkey_url, run_name)
        thread = asyncio.create_task(asyncio.to_thread(training.run))
        try:

            async def is_over() -> bool:
                assert not thread.done(), thread.exception()
                ended = SLOW in training.staleness or (
                    SLOW not in await accounts.live() and begun.counts[SLOW]
                )
                return bool(ended and training.steps >= STEPS)

            await wait_until(is_over, what="an end of the slow prompt and 20 steps")
            training.stop()
            await thread
            counters = await queue.counters()
            await accounts.check_accounts()
        finally:
            training.stop()
            await asyncio.wait((thread,))
            await worker.stop()
            await queue.aclose()

    lives = {"requeue": 1 + REQUEUES, "drop": 1, "deliver": 1}[on_stale]
    assert begun.counts[SLOW] == lives * N
    assert len(training.staleness) == A_STEP * training.steps
    stale = {name: count for name, count in counters.items() if name.startswith("stale:")}
    if on_stale == "deliver":
        assert training.staleness[SLOW] >= NEEDS, "it says of itself how old it is"
        assert stale == {}
        assert not [name for name in counters if name.startswith("dropped")]
        return
    assert SLOW not in training.staleness
    assert max(training.staleness.values()) <= 1
    # Others may be late once, on a machine that does much else; they are counted alike.
    late = sum(stale.values()) - lives
    assert late >= 0
    ages = {name: counters[name.replace("stale:", "stale_age:")] for name in stale}
    assert all(ages[name] >= 2 * count for name, count in stale.items())
    assert counters["dropped:stale"] + counters.get("requeued:stale", 0) == sum(stale.values())
    assert counters.get("requeued:stale", 0) >= (REQUEUES if on_stale == "requeue" else 0)
    assert counters["dropped:stale"] >= 1
    shown = {name.removeprefix("stream/stale_age_mean/") for name in training.figures
             if name.startswith("stream/stale_age_mean/")}  # fmt: skip
    assert shown, sorted(training.figures)
