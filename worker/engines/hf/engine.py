"""The batch: who is in it, what runs next, and what control calls do to it.

Owns the one thread that touches the model. Never does I/O and never blocks anybody else: other
threads post commands and get futures. Invariant: between two steps every request that runs has its
ids, its log-probs and its version spans in agreement, so an abort, a pause or new weights may come
at any such moment; a request ends exactly once.

A step is: some prefill (at most `PREFILL_TOKENS`), then one token for everybody who can decode.
Requests join and leave between steps.
"""

from __future__ import annotations

import math
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from .model import Model, no_gradients, out_of_memory
from .prefixes import Ids, Kept, PrefixStore, num_common
from .sampler import Draw, LogprobMode, Row, draw, scores
from .task import Decoder, Task

PREFILL_TOKENS = 512
"""Prompt tokens fed in between two decode steps: what one long prompt may delay everybody else."""
_SCORED_LOGITS = 1 << 25
"""Floats of logits that scoring a prompt may hold at once."""
ABORTED = "Aborted by a request"
STOPPED = "The engine is stopping"

T = TypeVar("T")


class Batch:
    """The engine without its protocol.

    Attributes:
        version: the label of the weights; every sampled token is attributed to one.
        counts: what happened, for people, tests and benchmarks.
        paused: nothing runs until `resume`.
    """

    def __init__(
        self,
        model: Model,
        *,
        decoder: Decoder | None,
        max_batch: int,
        prefix_bytes: int,
        mode: LogprobMode = LogprobMode.TEMPERATURE,
        version: str = "default",
        seed: int | None = None,
    ) -> None:
        self.version, self.mode, self.paused = version, mode, False
        self.counts: Counter[str] = Counter()
        self._model, self._decoder, self._max_batch = model, decoder, max_batch
        self._store = PrefixStore(prefix_bytes)
        self._waiting: deque[Task] = deque()
        self._running: list[Task] = []
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._seeds = np.random.default_rng(seed)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="hf-engine", daemon=True)

    # -- for other threads

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, task: Task) -> None:
        """Let a request wait for its turn; `task.on_end` is called on the engine's thread."""
        self._commands.put(lambda: self._waiting.append(task))

    def abort(self, rid: str, *, exact: bool = False) -> None:
        """End the requests whose id begins with `rid`, as soon as the step that runs is over."""
        self._commands.put(
            lambda: self._abort(lambda t: t.rid == rid if exact else t.rid.startswith(rid))
        )

    def abort_all(self) -> None:
        """End every request."""
        self._commands.put(lambda: self._abort(lambda _: True))

    def pause(self, mode: str) -> Future[None]:
        """Stop running; done once no step runs. What becomes of requests says the mode."""
        return self._post(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Run again."""

        def resume() -> None:
            self.paused = False

        return self._post(resume)

    def set_version(self, version: str, *, abort_all: bool) -> Future[None]:
        """Label the weights from the next token on."""

        def set_version() -> None:
            if abort_all:
                self._abort(lambda _: True)
            self._set_version(version)

        return self._post(set_version)

    def reload(
        self, path: Path, version: str | None, *, abort_all: bool, recompute: bool
    ) -> Future[int]:
        """Take other weights; the future says how many requests were in flight.

        Args:
            path: a folder like the model's.
            version: their label; None keeps the old one.
            abort_all: end every request first.
            recompute: feed every request's ids in again, so that what it samples from now on is of
                the new weights alone; False goes on with the KV of the old ones.
        """
        return self._post(lambda: self._reload(path, version, abort_all, recompute))

    def flush(self) -> Future[bool]:
        """Empty the prefix cache; False where requests are in flight."""

        def flush() -> bool:
            idle = not self._waiting and not self._running
            if idle:
                self._store.clear()
            return idle

        return self._post(flush)

    def state(self) -> dict[str, Any]:
        """Return what it does now."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "paused": self.paused,
            "prefix_entries": len(self._store),
            "prefix_bytes": self._store.num_bytes,
            "counts": dict(self.counts),
        }

    def stop(self, timeout_s: float) -> bool:
        """Abort everything and end the thread; return whether it ended in time."""

        def stop() -> None:
            self._stopping = True
            self._abort(lambda _: True, STOPPED)

        self._commands.put(stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)

        self._commands.put(run)
        return future

    # -- the thread

    def _run(self) -> None:
        with no_gradients():
            while not self._stopping:
                try:
                    self._turn()
                except Exception as error:  # noqa: BLE001 - a bug is every request's error, no hang
                    traceback.print_exc(file=sys.stderr)
                    for task in (*self._running, *self._waiting):
                        task.error, task.place = f"{type(error).__name__}: {error}", None
                        task.on_end(task)
                    self._running.clear()
                    self._waiting.clear()
                    self._store.clear()
                    self._model.kv.clear()

    def _turn(self) -> None:
        busy = not self.paused and bool(self._waiting or self._running)
        if not busy or not self._commands.empty():
            self._commands.get()()
        else:
            self._step()

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            task = self._waiting.popleft()
            if self._guarded([task], lambda task=task: self._admit(task)):  # type: ignore[misc]
                self._running.append(task)
        budget = PREFILL_TOKENS
        for task in [task for task in self._running if not task.decodes]:
            while budget > 0 and task in self._running and not task.decodes:
                budget -= self._prefill(task, budget)
        ready = [task for task in self._running if task.decodes]
        groups = [ready] if self._model.kv.batched else [[task] for task in ready]
        for group in groups:
            if group:
                self._decode(group)
        self.counts["steps"] += 1

    def _admit(self, task: Task) -> bool:
        task.place = self._model.kv.open()
        if task.seed is None:
            seed = task.params.sampling_seed
            task.seed = int(self._seeds.integers(2**63)) if seed is None else seed
        return True

    def _prefill(self, task: Task, budget: int) -> int:
        """Feed in the next piece of a prompt; return how many tokens that was."""
        num = min(task.pending, budget)
        if task.done == 0:
            self._guarded([task], lambda: self._reuse(task))
            if task.finish is not None or task.error is not None:
                return 0
            num = min(task.pending, budget)
        start = task.done
        scoring = task.score_from is not None and task.score_from < start + num
        scoring = scoring and start < len(task.prompt)
        if scoring:
            num = min(num, max(1, _SCORED_LOGITS // self._model.vocabulary_size))
        ids = task.ids[start : start + num]
        keep = num if scoring else 1
        logits = self._guarded([task], lambda: self._feed(task, ids, keep))
        if logits is None:
            return num
        if scoring and not self._guarded([task], lambda: self._score(task, logits, start)):
            return num
        if task.finish is not None:
            self._end(task)
        elif task.pending == 0:
            self._sample([task], logits[-1:])
        return num

    def _feed(self, task: Task, ids: Sequence[int], keep: int) -> Any:
        if task.done == 0 and task.place.length:  # a try before this one failed half-way
            self._model.kv.reset(task.place)
        logits = self._model.kv.prefill(task.place, ids, keep)
        if task.wants_experts:
            task.note_experts(self._model.experts(len(ids)))
        task.done += len(ids)
        self.counts["prefill_tokens"] += len(ids)
        return logits

    def _decode(self, tasks: list[Task]) -> None:
        logits = self._guarded(tasks, lambda: self._feed_one_each(tasks))
        if logits is not None:
            self.counts["decode_tokens"] += len(tasks)
            self.counts["largest_batch"] = max(self.counts["largest_batch"], len(tasks))
            self._sample(tasks, logits)

    def _feed_one_each(self, tasks: list[Task]) -> Any:
        kv = self._model.kv
        logits = kv.decode([task.place for task in tasks], [task.ids[-1] for task in tasks])
        by_row = sorted(tasks, key=lambda task: int(task.place.row))
        wanted = any(task.wants_experts for task in tasks)
        rows = self._model.experts(len(tasks)) if wanted else None
        for i, task in enumerate(by_row):  # nothing here can fail half-way
            if rows is not None:
                task.note_experts(rows[i : i + 1])
            task.done += 1
        return logits

    def _score(self, task: Task, logits: Any, start: int) -> bool:
        """Note the log-probs of prompt tokens; logits begin at position `start`."""
        first = max(start, (task.score_from or 0) + len(task.scores))
        targets = task.prompt[first + 1 : start + len(logits) + 1]
        if targets:
            rows = logits[first - start : first - start + len(targets)]
            found = scores(rows, targets)
            if any(map(math.isnan, found)):
                task.finish_by_nan()
            task.scores.extend(found)
        return True

    def _sample(self, tasks: list[Task], logits: Any) -> None:
        eos = self._model.eos_ids
        scored_only = [task for task in tasks if task.params.max_new_tokens == 0]
        for task in scored_only:  # such a one is fed in alone
            task.finish_by_length()
            self._end(task)
        if scored_only:
            return
        rows = [
            Row(task.params, task.seed or 0, len(task.ids), task.counts, task.forbidden(eos))
            for task in tasks
        ]
        draws: list[Draw] | None = self._guarded(tasks, lambda: draw(logits, rows, self.mode))
        for task, drawn in zip(tasks, draws or (), strict=False):
            if drawn.token is None:
                task.finish_by_nan()
            else:
                task.take(drawn.token, drawn.log_prob, eos, self._decoder)
            if task.finish is not None:
                self._end(task)

    # -- the prefix cache

    def _reuse(self, task: Task) -> bool:
        """Begin with KV that somebody else computed of the same ids under the same weights."""
        kv, limit = self._model.kv, task.reach
        live = self._best_live(task, limit) if kv.batched else None
        kept = self._store.best(
            task.ids, task.salt, limit, experts=task.wants_experts and not task.experts
        )
        num = 0
        if live is not None and live[1] >= (kept[1] if kept else 0):
            source, num = live
            kv.copy(source.place, task.place, num)
            self._take_experts(task, source.experts, num)
        elif kept is not None:
            entry, num = kept
            kv.load(task.place, entry.kv, num)
            self._take_experts(task, [] if entry.experts is None else [entry.experts], num)
        task.done = num
        if not task.output:
            task.num_cached = num
            self.counts["cached_tokens"] += num
        return True

    def _best_live(self, task: Task, limit: int) -> tuple[Task, int] | None:
        """Return a running request with the longest common prefix: a group shares its prompt."""
        wanted: Ids = np.asarray(task.ids, dtype=np.int64)
        found: tuple[Task, int] | None = None
        for other in self._running:
            if other is task or not other.clean or other.salt != task.salt or other.done == 0:
                continue
            if task.wants_experts and not task.experts and not other.wants_experts:
                continue
            held: Ids = np.asarray(other.ids[: other.done], dtype=np.int64)
            num = min(num_common(held, wanted), limit)
            if num > (found[1] if found else 0):
                found = other, num
        return found

    def _take_experts(self, task: Task, rows: Sequence[Any], num: int) -> None:
        if task.wants_experts and not task.experts and num:
            task.note_experts(np.concatenate(list(rows))[:num])

    def _keep(self, task: Task) -> None:
        """Keep the KV of a request that ended, for its next turn."""
        if not task.clean or task.done == 0 or task.place is None or task.error is not None:
            return
        if task.finish is not None and task.finish.get("matched") == "NaN happened":
            return
        kv = self._model.kv
        saved, num_bytes = kv.save(task.place)
        experts = np.concatenate(task.experts)[: task.done] if task.experts else None
        ids: Ids = np.asarray(task.ids[: task.done], dtype=np.int64)
        self._store.keep(Kept(task.salt, ids, saved, num_bytes, not kv.batched, experts))

    # -- endings

    def _end(self, task: Task) -> None:
        """Give the place back and the answer out."""
        if task in self._running:
            self._running.remove(task)
        if task.place is not None:
            if self._store.is_on and not self._stopping:
                try:
                    self._keep(task)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    self._store.clear()
            self._model.kv.close(task.place)
            task.place = None
        task.version = self.version
        if task.finish is not None:
            self.counts[f"finish_{task.finish['type']}"] += 1
        else:
            self.counts["failed"] += 1
        task.on_end(task)

    def _fail(self, task: Task, message: str) -> None:
        task.error = message
        self._end(task)

    def _abort(self, chosen: Callable[[Task], bool], message: str = ABORTED) -> None:
        for task in [task for task in (*self._running, *self._waiting) if chosen(task)]:
            if task in self._waiting:
                self._waiting.remove(task)
            task.finish_by_abort(message)
            self._end(task)

    def _guarded(self, tasks: list[Task], work: Callable[[], T]) -> T | None:
        """Run a piece of work for some requests; what it cannot do is the error of one or all.

        Without memory: the prefix cache goes first, then the longest request. Returns None where it
        came to nothing; the requests that are left are fed in again by the next step.
        """
        try:
            return work()
        except Exception as error:  # noqa: BLE001 - the engine outlives every request
            if not out_of_memory(error):
                traceback.print_exc(file=sys.stderr)
                for task in tasks:
                    self._fail(task, f"{type(error).__name__}: {error}")
                return None
            message = str(error)
        for task in tasks:
            self._resettle(task)
        self.counts["out_of_memory"] += 1
        if len(self._store):
            self._store.clear()
        else:
            longest = max(tasks, key=lambda task: len(task.ids))
            self._fail(longest, f"out of memory with {len(longest.ids)} tokens: {message}")
        self._model.free_memory()
        return None

    def _resettle(self, task: Task) -> None:
        """Make a request agree with its KV after a piece of work that broke off half-way."""
        if task.place is None:
            return
        if self._model.kv.batched:  # rows are written by position: what is there may stay
            task.done = min(task.done, task.reach)
            task.place.length = task.done
        else:
            self._model.kv.reset(task.place)
            task.rewind()

    # -- control

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(lambda _: True)
        elif mode == "retract":
            for task in reversed(self._running):
                task.rewind()
                self._model.kv.close(task.place)
                task.place = None
                self._waiting.appendleft(task)
            self._running.clear()

    def _set_version(self, version: str) -> None:
        for task in (*self._running, *self._waiting):
            if task.output:
                task.changes.append((self.version, len(task.output)))
        self.version = version

    def _reload(self, path: Path, version: str | None, abort_all: bool, recompute: bool) -> int:
        if abort_all:
            self._abort(lambda _: True)
        num = len(self._running) + len(self._waiting)
        self._model.reload(path)
        self._store.clear()
        self.counts["reloads"] += 1
        for task in self._running:
            if recompute:
                self._model.kv.reset(task.place)
                task.rewind()
            else:
                task.clean = False
        if version is not None:
            self._set_version(version)
        return num
