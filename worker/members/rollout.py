"""One attempt of one member: prompt, generate function, reward, under one attribution of faults.

Owns the life of an attempt, also of one that goes on from what an earlier one parked, and where a
fault came from. Never talks to the queue, never limits time (the shift cancels), never lets a
user's exception out. Invariant: whatever user code does, `run` returns an `Ending` or raises the
`CancelledError` of our own cancellation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

import structlog

from rollstream.errors import (
    STATUS_OF,
    AgentFault,
    EngineFault,
    EnvFault,
    MemberReason,
    Report,
    RewardFault,
    RolloutFault,
    Status,
    StopReason,
)
from rollstream.group import Trajectory
from rollstream.sample import Sample

from ..functions import describe
from ..memory import MEMORY
from ..sampling import call_seed
from ..telemetry.spans import timed
from ..tito.masks import mask_off_policy
from ..types import Engine, GenerateInput, GenerateOutput, PromptIds, Renderer
from .fidelity import Fidelity, Watch, WatchedEngine
from .groups import GroupBook, new_sample
from .parked import RESUMES, Parking, Unusable
from .snapshots import keep_messages
from .unedited import Sampled
from .work import (
    MAX_ERROR_CHARS,
    Cause,
    Ending,
    EnvRuntime,
    Work,
    ending_of,
    ending_of_cause,
    ending_of_fault,
    leaves_of,
    worst_leaf,
)

Finish = Callable[[Sample, GenerateOutput], Trajectory]
"""Checks what a generate function returned and fills in what it left out (`generate.finish`)."""

_SCORED = (Status.COMPLETED, Status.TRUNCATED)
log = structlog.get_logger("worker")


class Rollout:
    """Runs attempts; one for the whole worker."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        book: GroupBook,
        finish: Finish,
        version: Callable[[], int],
        run_seed: int,
        debug_messages: bool = False,
        replay: bool = False,
        fidelity: Fidelity | None = None,
        delivered: Callable[[Trajectory], None] | None = None,
        parking: Parking | None = None,
        mask_offpolicy: bool = False,
        opened: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            engine: of all attempts.
            renderer: of the model.
            book: of the groups.
            finish: checks what a generate function returned.
            version: the weight version that this worker knows as current.
            run_seed: of the run.
            debug_messages: keep conversations as messages.
            replay: ask for routed experts.
            fidelity: the judge of samples.
            delivered: told of every training sample that ended.
            parking: where samples that an abort stopped are kept (`weights.partial`); without it
                they begin anew, and what others parked is not looked at.
            mask_offpolicy: of a sample over several versions, train the newest one's tokens only.
            opened: returns once calls may be made again (`weights.partial`).
        """
        self._engine, self._renderer, self._book = engine, renderer, book
        self._finish, self._version, self._run_seed = finish, version, run_seed
        self._debug_messages, self._replay = debug_messages, replay
        self._fidelity, self._delivered = fidelity or Fidelity(), delivered
        self._parking, self._mask_offpolicy = parking, mask_offpolicy
        self._opened = opened

    async def run(self, work: Work) -> Ending:
        """Run one attempt to its ending."""
        work.sample = new_sample(work)
        work.lifecycle["attempt_start"] = time.time()
        waited_from = work.group.group.enqueued_unix_s or work.leased_unix_s
        work.spans.record("queue_wait", -1, waited_from, max(0.0, work.leased_unix_s - waited_from))
        try:
            ending = self._stopped_before(work, work.sample)
            if ending is None:
                ending = ending_of(await self._attempt(work, work.sample))
                if ending.stop_reason is StopReason.ABORT_WEIGHTS:
                    ending.report = self._parks_or_gives_back(work, ending.trajectory)
        except Unusable as unusable:
            ending = _begins_anew(work, str(unusable))
        except RolloutFault as fault:
            ending = ending_of_fault(work.sample, fault, refused=_is_refusal(fault))
        finally:
            work.lifecycle["attempt_end"] = time.time()
        if ending.trajectory is not None:
            first = leaves_of(ending.trajectory)[0]
            first.metadata["attempt"] = work.lifecycle
            if not first.spans:
                first.spans = work.spans.spans
            is_training = not work.group.is_evaluation
            if self._delivered is not None and is_training and ending.report is Report.COMPLETE:
                self._delivered(ending.trajectory)
        return ending

    def _parks_or_gives_back(self, work: Work, trajectory: Trajectory | None) -> Report:
        """Return how a member is sent back that an abort stopped; both are uncharged."""
        if not self._parks(work) or not isinstance(trajectory, Sample):
            return Report.BACK
        # What is parked stays until the member ends: without a new token it is the same.
        held = 0 if work.sample is None else len(work.sample.tokens)
        is_new = trajectory.num_sampled > 0 and len(trajectory.tokens) > held
        return Report.PARK if is_new else Report.BACK

    def _parks(self, work: Work) -> bool:
        """Return whether what an abort leaves of a member is kept."""
        env = work.group.env
        return self._parking is not None and env is not None and env.resumable

    async def _begin(self, work: Work, pending: Sample, prompt: PromptIds, watch: Watch) -> Sample:
        """Return the sample that the attempt begins with: the pending one, or what was parked.

        Raises:
            Unusable: it cannot go on from what was parked.
        """
        if self._parking is None or not work.parked_bytes or not self._parks(work):
            return pending
        group, unusable = work.group.group, None
        with boundary(EnvFault):
            try:
                sample = await self._parking.resume(work.lease, group, prompt, pending)
            except Unusable as error:
                unusable = error
        if unusable is not None:
            raise unusable
        watch.resume(sample)
        # Its spans stand first among those of this attempt, and are handed over with them.
        work.num_earlier_spans = len(sample.spans)
        work.spans.spans[:0] = sample.spans
        sample.spans = []
        work.sample, work.resumes = sample, sample.metadata[RESUMES]
        return sample

    def _stopped_before(self, work: Work, sample: Sample) -> Ending | None:
        """Return the ending of an attempt that must not start: generate is never called."""
        cause = work.cause
        if cause is None and time.monotonic() >= work.deadline_mono_s:
            cause = Cause.DEADLINE
        if cause is None:
            return None
        ending = ending_of_cause(cause)
        sample.finish(ending.stop_reason, STATUS_OF[ending.stop_reason])
        ending.trajectory = sample
        return ending

    async def _attempt(self, work: Work, pending: Sample) -> Trajectory:
        env = work.group.env
        if env is None or work.group.problem:
            raise EnvFault(work.group.problem or "no environment")
        with boundary(EnvFault):
            prompt = await self._book.prompt_of(work.group)
        key, member = work.group.key, pending.member
        watch = Watch(prompt, is_prompt_proven=work.group.is_prompt_proven)
        sample = await self._begin(work, pending, prompt, watch)
        work.given = given = GenerateInput(
            sample=sample,
            sampling=work.group.sampling,
            engine=WatchedEngine(self._engine, watch),
            renderer=self._renderer,
            tools=work.group.tools,
            spans=work.spans,
            deadline=work.deadline_mono_s,
            prompt=prompt,
            limits=env.limits,
            version=self._version,
            turn_seed=lambda turn: call_seed(self._run_seed, key, member, turn),
            evaluation=work.group.is_evaluation,
            parks=self._parks(work),
            debug_messages=self._debug_messages,
            replay=self._replay,
            opened=self._opened,
        )
        work.lifecycle["gen_start"] = time.time()
        with boundary(AgentFault):
            trajectory = self._finish(sample, await env.generate(given))
        self._fidelity.judge(trajectory, watch)
        work.group.is_prompt_proven |= watch.is_prompt_proven
        if self._mask_offpolicy and not work.group.is_evaluation:
            mask_off_policy(leaves_of(trajectory))
        if self._debug_messages:
            with boundary(EnvFault):
                await keep_messages(leaves_of(trajectory), self._renderer)
        await self._score(work, env, trajectory)
        return trajectory

    async def _score(self, work: Work, env: EnvRuntime, trajectory: Trajectory) -> None:
        if env.scorer is None or worst_leaf(trajectory).status not in _SCORED:
            return
        held = [(leaf, Sampled.of(leaf)) for leaf in leaves_of(trajectory)]
        with timed(work.spans, "reward"), boundary(RewardFault):
            await env.scorer.score(trajectory, work.group.group)
            for leaf, sampled in held:
                sampled.check(leaf)


def _begins_anew(work: Work, why: str) -> Ending:
    """Return the ending of an attempt that could not go on from what was parked."""
    log.warning("parked_unusable", lease=work.lease.id, parked_bytes=work.parked_bytes, why=why)
    return Ending(
        Report.RETRY,
        StopReason.MERGE_ERROR,
        reason=MemberReason.MERGE_ERROR,
        error=f"what was parked: {why}"[:MAX_ERROR_CHARS],
        forget=True,
    )


def _is_refusal(fault: RolloutFault) -> bool:
    return isinstance(fault, EngineFault) and not fault.retryable


class boundary:  # noqa: N801 - it reads as a statement: `with boundary(AgentFault):`
    """Attribute what the block raises to one boundary; a fault that has one already keeps it.

    A CancelledError that nobody sent to this task leaked out of user code (it awaited something
    that was cancelled) and is data like any other exception; our own goes through. So is what is
    no `Exception` (SystemExit, a group with one in it): it would end the worker, or nobody would
    hear of it. Memory is the process's, and its end may be a neighbour's doing: MemoryError is
    tried again, as a fault of the environment. GeneratorExit is Python's own word that the
    coroutine is being closed.
    """

    __slots__ = ("_kind",)

    def __init__(self, kind: type[RolloutFault]) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, RolloutFault):
            return
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                return
            raise self._kind("a CancelledError leaked out of the function") from None
        if isinstance(error, MemoryError):
            MEMORY.ran_out()
            raise EnvFault(describe(error), retryable=True, detail="memory") from error
        if not isinstance(error, GeneratorExit):
            log.debug("fault", boundary=self._kind.__name__, exc_info=error)
            raise self._kind(describe(error)) from error
