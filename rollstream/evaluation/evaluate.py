"""Prompts that are sampled to be measured, not to be trained on, while training goes on.

Owns the evaluations of one call, on a connection of its own: enqueue, gather, ack, and withdraw
what is left. Never touches a training group, and needs the trainer's lock only where Redis doubts
the claim. Invariant: each prompt has one entry in the result, and each of its n members is among
the samples or among the missing, with a reason; nothing of the evaluation stays in Redis.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from rollstream.errors import RunFailed, Status, StreamError, WireError, WireTooNew
from rollstream.evaluation.eval_result import EvalResult
from rollstream.group import INDEX_STRIDE, EnvRule, FinishedGroup, Missing, PromptGroup
from rollstream.parameters import problem_of
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import RunInfo, StoredGroup
from rollstream.runs import OUTAGES, REFUSALS, Interrupted
from rollstream.sample import Prompt
from rollstream.trainer.assemble import assemble
from rollstream.trainer.hold import Hold
from rollstream.trainer.lineage import RunMissing
from rollstream.wire import decode_prompt, encode_prompt

log = logging.getLogger("rollstream.stream")

EvalPrompt: TypeAlias = "Prompt | Mapping[str, Any] | PromptGroup"
"""A text, messages, a row of a prompt file, or a whole prompt group."""

MEMBERS_AT_ONCE = 4096
"""So many members wait and run at most: their results lie in Redis until they are read."""
PAGE = 64
PAGE_BYTES = 1 << 20
"""Of prompts in one round trip."""
BLOCK_S = 0.5
IDLE_S = 1.0
"""After so long without an entry Redis is asked for the groups themselves."""
PAUSE_S = 0.05
MAX_CHECK_S = 10.0
"""How long it is waited to hear whether the run is still this trainer's."""
REOPEN_S = 30.0
"""How long a run that vanished may take to be opened again."""
UNDO_TIMEOUT_S = 5.0
TIMEOUT = "timeout"
UNREADABLE = "unreadable"
"""Reasons of missing members that only an evaluation has."""
_ROW = ("prompt", "label", "metadata", "tools", "sampling", "env")
_DONE = ("ready", "delivered")
_SLUG = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(slots=True)
class Asked:
    """What one call of `evaluate` wants."""

    name: str
    groups: list[PromptGroup]
    """In order; `group_index` is the place."""
    n: int
    timeout_s: float
    rules: Mapping[str, EnvRule]
    text: bool
    ids: list[str] = field(default_factory=list)
    """Names in the queue, by place."""


def ask(
    info: RunInfo,
    name: str,
    prompts: Sequence[EvalPrompt],
    n: int,
    sampling: Mapping[str, Any] | None,
    timeout_s: float,
    env: str | None,
    *,
    text: bool,
) -> Asked:
    """Return what is to be evaluated.

    Raises:
        ValueError: no prompt, an n that is none, an environment that the run does not have, a row
            that is none; or a prompt that cannot be written (`WireError`).
        TypeError: a prompt of another kind, a name that is no text, an n that is no whole number.
    """
    if not isinstance(name, str):
        raise TypeError(f"name {name!r} is a {type(name).__name__}: expected a text")
    n = int(operator.index(n))
    if not 1 <= n <= INDEX_STRIDE:
        raise ValueError(f"n={n}: expected 1 to {INDEX_STRIDE} samples a prompt")
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s={timeout_s}: expected a positive number of seconds")
    if isinstance(prompts, str | bytes | Mapping) or not prompts:
        raise ValueError("prompts: expected a list of them, with at least one")
    groups = [_group_of(place, prompt, n, sampling or {}) for place, prompt in enumerate(prompts)]
    for group in groups:
        group.env = _env_of(env or group.env, info.envs)
        # Refused here and not by every worker in turn: one that nobody could read.
        decode_prompt(encode_prompt(group), group.group_index, n)
    slug = _SLUG.sub("_", name)[:64] or "eval"
    token = secrets.token_hex(4)
    ids = [f"e:{slug}-{token}:{place}" for place in range(len(groups))]
    rules = {env: rule.of_evaluation() for env, rule in info.envs.items()}
    return Asked(name, groups, n, timeout_s, rules, text, ids)


def _group_of(place: int, prompt: EvalPrompt, n: int, sampling: Mapping[str, Any]) -> PromptGroup:
    row: dict[str, Any]
    if isinstance(prompt, PromptGroup):
        row = {key: getattr(prompt, key) for key in _ROW}
    elif isinstance(prompt, Mapping):
        row = dict(prompt)
    elif isinstance(prompt, str | list | tuple):
        row = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    else:
        raise TypeError(
            f"prompt {place} is a {type(prompt).__name__}: expected a text, messages, a row with "
            "the key 'prompt', or a PromptGroup"
        )
    unknown = sorted(set(row) - set(_ROW))
    if unknown or not row.get("prompt"):
        what = f"unknown keys {unknown}" if unknown else "no prompt"
        raise ValueError(f"prompt {place}: {what}; a row has {', '.join(_ROW)}")
    row["sampling"] = {**(row.get("sampling") or {}), **sampling}
    for key, value in row["sampling"].items():
        if problem := problem_of(key, value):
            raise ValueError(f"prompt {place}: {problem}")
    row["metadata"] = row.get("metadata") or {}
    row["env"] = row.get("env") or ""
    return PromptGroup(group_index=place, n=n, **row)


def _env_of(name: str, envs: Mapping[str, EnvRule]) -> str:
    """Return the environment to use; a run that has one alone need not be told."""
    if not name or (name == "default" and name not in envs):
        if "default" in envs or not envs:
            return "default"
        if len(envs) == 1:
            return next(iter(envs))
        raise ValueError(f"env: the run has {sorted(envs)}: name one")
    if envs and name not in envs:
        raise ValueError(f"env={name!r}: the run has {sorted(envs)}")
    return name


def withdraw_all(queue: BlockingQueue) -> None:
    """End evaluations of earlier trainers: nobody waits for them, and they come before training."""
    found: Any = queue.client.smembers(f"{queue.prefix}ge")
    names = sorted(name.decode(errors="replace") for name in found)
    for part in _pages(names):
        queue.call_many([calls.withdraw(name) for name in part])
    if names:
        log.info("withdrew evaluations of an earlier trainer",
                 extra={"run": queue.run, "groups": len(names)})  # fmt: skip


def run_evaluation(
    hold: Hold, lock: threading.RLock, asked: Asked, interrupt: threading.Event
) -> EvalResult:
    """Evaluate beside a stream, which may iterate meanwhile; raises as `Evaluation.run`."""

    def contested() -> None:
        with lock:
            hold.patiently(hold.lineage.check, MAX_CHECK_S)

    with contextlib.closing(hold.open_queue()) as queue:
        consumer = hold.lineage.consumer
        return Evaluation(queue, asked, consumer, hold.refuse_if_closed, contested, interrupt).run()


class Evaluation:
    """One evaluation under way."""

    def __init__(
        self,
        queue: BlockingQueue,
        asked: Asked,
        consumer: str,
        check: Callable[[], object],
        contested: Callable[[], object],
        interrupt: threading.Event,
    ) -> None:
        """Enqueue nothing yet.

        Args:
            queue: of this evaluation alone.
            asked: what is wanted.
            consumer: the trainer's token.
            check: raises where the stream was closed.
            contested: called where Redis does not know the trainer; raises where that is right.
            interrupt: set by another thread to give up.
        """
        self._queue, self._asked, self._consumer = queue, asked, consumer
        self._check, self._contested, self._interrupt = check, contested, interrupt
        self._waiting = deque(range(len(asked.groups)))
        self._open: dict[str, int] = {}
        """Enqueued and not read yet → place."""
        self._found: dict[int, FinishedGroup] = {}
        self._unacked: set[str] = set()
        self._unfinished: set[str] = set()
        """Taken as they are, and to be withdrawn."""
        self._cursor = "0"
        self._lost_mono_s: float | None = None
        self._heard_mono_s = self._swept_mono_s = self._started_mono_s = time.monotonic()

    def run(self) -> EvalResult:
        """Return the result, at the latest after its time.

        Raises:
            RunFailed: the run was ended.
            RunLost: there is no such run.
            StreamError: Redis did not answer, and nothing was read.
            ConsumerTaken: a later trainer took the run over.
            Interrupted: `interrupt` was set.
            WireTooNew: the workers speak a newer wire version.
        """
        limit = self._started_mono_s + self._asked.timeout_s
        trouble: Exception | None = None
        try:
            while len(self._found) < len(self._asked.groups) or self._unacked:
                if self._interrupt.is_set():
                    raise Interrupted
                left_s = limit - time.monotonic()
                if left_s <= 0:
                    break
                trouble = self._outlast(partial(self._step, left_s), left_s)
            self._give_up(trouble)
        except BaseException:
            with contextlib.suppress(*OUTAGES, *REFUSALS), self._queue.within(UNDO_TIMEOUT_S):
                self._withdraw()
                self._end()
            raise
        groups = [self._found[place] for place in range(len(self._asked.groups))]
        seconds = time.monotonic() - self._started_mono_s
        return EvalResult(self._asked.name, self._asked.n, groups, seconds)

    def _outlast(self, action: Callable[[], None], timeout_s: float) -> Exception | None:
        """Do something with Redis; the outage that prevented it."""
        try:
            # A busy server that answers is not silent, however little time is left.
            with self._queue.within(max(1.0, timeout_s)):
                action()
        except REFUSALS as error:
            raise StreamError(f"Redis refuses this client: {error}") from error
        except (RunMissing, *OUTAGES) as error:
            now = time.monotonic()
            if isinstance(error, RunMissing):
                self._lost_mono_s = self._lost_mono_s or now
                if now - self._lost_mono_s >= REOPEN_S:
                    raise
            self._cursor = "0"
            time.sleep(PAUSE_S)
            return error
        self._lost_mono_s = None
        return None

    def _step(self, left_s: float) -> None:
        self._tick()
        self._enqueue(left_s)
        if self._open:
            self._read(left_s)
        elif self._waiting:
            time.sleep(PAUSE_S)  # the server's memory is full
        self._end()

    def _read(self, left_s: float) -> None:
        """Wait for groups that ended, and take them."""
        entries = self._queue.read_eval(
            self._cursor, count=PAGE, block_s=min(BLOCK_S, max(0.001, left_s))
        )
        if entries:
            self._cursor = entries[-1].message_id
        ours = [e.group_index for e in entries if e.group_index in self._open]
        if ours:
            self._heard_mono_s = time.monotonic()
            self._take(ours)
        elif time.monotonic() - self._heard_mono_s >= IDLE_S:
            # Redis may have forgotten entries, groups, or that it gave us any.
            self._heard_mono_s, self._cursor = time.monotonic(), "0"
            for part in _pages(list(self._open)):
                self._take(part)

    def _tick(self) -> None:
        """Keep the queue clock going: there may be nobody else."""
        now = time.monotonic()
        if now - self._swept_mono_s >= BLOCK_S:
            self._check()
            self._queue.call(calls.sweep())
            self._swept_mono_s = now

    # --- enqueue -------------------------------------------------------------------------------
    def _enqueue(self, left_s: float) -> None:
        most = max(1, MEMBERS_AT_ONCE // self._asked.n)
        while self._waiting and len(self._open) < most:
            part: list[tuple[int, bytes]] = []
            size = 0
            while self._waiting and len(part) < min(PAGE, most - len(self._open)):
                place = self._waiting[0]
                prompt = self._prompt(place)
                if part and size + len(prompt) > PAGE_BYTES:
                    break
                part.append((self._waiting.popleft(), prompt))
                size += len(prompt)
            answers: list[str] = []
            try:
                timeout_ms = int(1000 * left_s) + 1
                answers = self._queue.call_many(
                    [
                        calls.enqueue(
                            self._asked.ids[i], self._asked.n, prompt, timeout_ms=timeout_ms
                        )
                        for i, prompt in part
                    ]
                )
            finally:
                taken = [a in ("new", "dup") for a in answers] or [False] * len(part)
                back = [i for (i, _), ok in zip(part, taken, strict=True) if not ok]
                self._waiting.extendleft(reversed(back))
            for (place, _), ok in zip(part, taken, strict=True):
                if ok:
                    self._open[self._asked.ids[place]] = place
            refused = {a for a in answers if a not in ("new", "dup", "full")}
            if "lost" in refused:
                raise RunMissing(f"Redis has no run {self._queue.run!r}")
            if refused:
                raise RunFailed(f"it is {', '.join(sorted(refused))}, so nothing is evaluated")
            if back:
                return  # memory is full: later

    def _prompt(self, place: int) -> bytes:
        group = self._asked.groups[place]
        group.enqueued_unix_s = time.time()
        return encode_prompt(group)

    # --- gather --------------------------------------------------------------------------------
    def _take(self, ids: Sequence[str], *, unfinished: str = "") -> None:
        """Read groups and keep those that have ended; with `unfinished` the others as they are.

        Args:
            ids: names in the queue.
            unfinished: what is said of members that have not ended.
        """
        for stored in self._queue.groups([(g, self._asked.n) for g in ids], text=self._asked.text):
            place = self._open.get(stored.group_index)
            if place is None:
                continue
            if stored.state in _DONE or unfinished:
                self._found[place] = self._finished(place, stored, unfinished)
                del self._open[stored.group_index]
                read = self._unacked if stored.state in _DONE else self._unfinished
                read.add(stored.group_index)
            elif not stored.state:
                # A Redis that lost its last moments, or everything.
                del self._open[stored.group_index]
                self._waiting.append(place)

    def _finished(self, place: int, stored: StoredGroup, unfinished: str) -> FinishedGroup:
        group = self._asked.groups[place]
        if not stored.state or stored.prompt is None:
            return self._absent(
                place, Status.ABORTED, TIMEOUT, unfinished or "its records are gone"
            )
        if unfinished:
            for member, header in enumerate(stored.headers):
                if header is None and stored.errors[member] is None:
                    stored.errors[member] = (TIMEOUT, unfinished)
        try:
            finished, _ = assemble(stored, self._asked.rules, place)
        except WireTooNew:
            raise
        except WireError as error:
            log.error(
                "unreadable evaluation",
                extra={"evaluation": self._asked.name, "place": place, "error": str(error)},
            )
            return self._absent(place, Status.FAILED, UNREADABLE, str(error))
        for one in finished.missing:
            if one.reason == TIMEOUT:
                one.status = Status.ABORTED
        finished.env = group.env
        return finished

    def _absent(self, place: int, status: Status, reason: str, error: str) -> FinishedGroup:
        missing = [Missing(member, status, reason, error) for member in range(self._asked.n)]
        return FinishedGroup(place, self._asked.groups[place].env, [], missing)

    def _end(self) -> None:
        """Let Redis forget what was read."""
        for part in _pages(sorted(self._unacked)):
            if self._queue.call(calls.ack(self._consumer, part)) == ["taken"]:
                # A later trainer's, or a Redis that forgot this one: `check` finds out which.
                self._contested()
                return
            self._unacked.difference_update(part)

    # --- the end -------------------------------------------------------------------------------
    def _give_up(self, trouble: Exception | None) -> None:
        """Keep what there is of groups that have not ended, and withdraw them."""
        if len(self._found) == len(self._asked.groups) and not self._unacked:
            return
        said = f"not ended within {self._asked.timeout_s:g} s"
        late = self._outlast(lambda: self._gather_rest(said), UNDO_TIMEOUT_S) or trouble
        if late is not None and not self._found:
            raise StreamError(
                f"run {self._queue.run!r}: nothing was evaluated, Redis did not answer: {late}"
            ) from late
        for place in range(len(self._asked.groups)):
            if place not in self._found:
                self._found[place] = self._absent(place, Status.ABORTED, TIMEOUT, said)
        if late is not None:
            log.warning("an evaluation ended in an outage of Redis",
                        extra={"evaluation": self._asked.name, "error": str(late)})  # fmt: skip

    def _gather_rest(self, said: str) -> None:
        for part in _pages(list(self._open)):
            self._take(part, unfinished=said)
        self._withdraw()
        self._end()

    def _withdraw(self) -> None:
        """Stop what still runs."""
        for part in _pages([*self._open, *sorted(self._unfinished)]):
            self._queue.call_many([calls.withdraw(gid) for gid in part])
        self._unfinished.clear()


def _pages(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + PAGE] for start in range(0, len(ids), PAGE))
