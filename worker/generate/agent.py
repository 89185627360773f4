"""The generate function `agent`: the user's agent runs against a session of the gateway.

Owns the life of one agent: its session, its time, what stops it, and how its trajectory ends. Never
reads a request or a reply: the session does. Invariants: when the function returns, raises or is
cancelled its session is closed, so no engine call follows; what an infrastructure broke is raised
as that fault, whatever the agent made of it, and is never a reward; what was generated is kept
whatever the agent did, unless its sample begins anew.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import structlog

from rollstream.errors import (
    EngineFault,
    EnvFault,
    Report,
    RolloutFault,
    StopReason,
    report_of,
)
from rollstream.group import Trajectory

from ..bounded import AGENT_THREADS, Exited, LeakedCancel, Overdue, run_bounded
from ..functions import describe
from ..types import GenerateFunction, GenerateInput, GenerateOutput
from .agent_function import AgentFunction, agent_metadata, chat_kwargs
from .agent_result import Outcome, failed, faulted, outcome_of, with_picked, write
from .agent_time import record_gaps

ABORT_S = 5.0
"""How long `abort` may take."""
MAX_SAID, KIND_CHARS = 100, 80
"""Kinds of failures that are logged, and how much of an error tells a kind."""
Rules = TypeVar("Rules", contravariant=True)
log = structlog.get_logger("worker")


class Session(Protocol):
    """What an agent function has to know of its session (`worker.gateway.session`)."""

    @property
    def key(self) -> str:
        """Names it in its URL; nobody can guess it."""
        ...

    @property
    def fault(self) -> EngineFault | EnvFault | None:
        """What broke the last request, where that was no doing of the agent's."""
        ...

    @property
    def ended_by(self) -> StopReason | None:
        """The limit that refused the last request, or cut the last turn; or `abort_weights`."""
        ...

    @property
    def refused_by(self) -> StopReason | None:
        """The limit that refused the last request."""
        ...

    @property
    def over(self) -> asyncio.Event:
        """Set once its sample begins anew whatever the agent still does."""
        ...

    async def close(self) -> None:
        """End it: calls in flight are stopped, later requests refused."""
        ...

    async def collect(self) -> Trajectory:
        """Return its samples; the same ones each time."""
        ...


class Sessions(Protocol[Rules]):
    """Opens sessions (`worker.gateway.book`)."""

    def open(self, given: GenerateInput, rules: Rules) -> Session:
        """Return a new session of one sample."""
        ...


class Address(Protocol):
    """Where sessions are served (`worker.gateway.server`)."""

    @property
    def instance_id(self) -> str:
        """32 hex, new at every start."""
        ...

    def base_url(self, key: str) -> str:
        """Return the URL of one session."""
        ...


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """The numbers of an agent."""

    timeout_s: float | None = None
    """Never beyond the sample's own deadline; None is that alone."""
    max_seq_len: int | None = None
    """Told to the agent where it is configured."""


class Agents:
    """Makes the generate functions of environments with agents; one for the whole worker."""

    def __init__(self, sessions: Sessions[Any], address: Address) -> None:
        """Begin with no agent running.

        Args:
            sessions: of the gateway.
            address: of the gateway, listening before the first agent runs.
        """
        self._sessions, self._address = sessions, address
        self._aborts: set[asyncio.Task[None]] = set()
        self._said: set[str] = set()

    def generate(self, agent: AgentFunction, rules: Any, limits: AgentLimits) -> GenerateFunction:
        """Return the generate function that runs `agent`."""

        async def generate(given: GenerateInput) -> GenerateOutput:
            try:
                return await self._run(given, agent, rules, limits)
            except (RolloutFault, MemoryError):
                raise
            except Exception as error:  # what the agent raises is data by now: this is our own
                log.error("agent_bug", agent=agent.path, exc_info=error)
                raise EnvFault(
                    f"running the agent failed: {describe(error)}", retryable=True
                ) from error

        return generate

    async def aclose(self) -> None:
        """Wait for the `abort`s that are under way; they are bounded."""
        while self._aborts:
            await asyncio.wait(self._aborts)

    async def _run(
        self, given: GenerateInput, agent: AgentFunction, rules: Any, limits: AgentLimits
    ) -> GenerateOutput:
        session = self._sessions.open(given, rules)
        start_mono_s = time.monotonic()
        start_unix_s = given.spans.unix_s(start_mono_s)
        # A pause moves the sample's deadline, and the agent's with it.
        earlier_s = 0.0
        if limits.timeout_s is not None:
            earlier_s = max(0.0, given.deadline - start_mono_s - limits.timeout_s)
        running: asyncio.Task[Any] | None = None
        outside_s = 0.0
        try:
            running = self._start(given, agent, session.key, limits)
            await _wait(running, given, earlier_s, session.over)
            has_ended = running.done()
        finally:
            # Its exception is looked at here, also where we are being cancelled.
            spent_s, ended = time.monotonic() - start_mono_s, _span_outcome(running)
            if running is not None and not running.done():
                running.cancel()
                self._abort(given, agent, session.key, limits)
            try:
                await session.close()
            finally:  # behind it, the calls that it stopped have recorded themselves
                if not given.evaluation:  # which records no spans
                    outside_s = record_gaps(given.spans, start_unix_s, spent_s, ended)
        if session.fault is not None and not session.over.is_set():
            raise session.fault
        if session.over.is_set():
            outcome = Outcome()  # whatever the agent made of it
        else:
            outcome = _outcome(running) if has_ended else _overdue(spent_s, earlier_s)
        trajectory = await session.collect()
        outcome = with_picked(outcome, trajectory)
        if outcome.error:
            self._say(agent, given, outcome)
        first = trajectory[0] if isinstance(trajectory, list) else trajectory
        first.non_generation_time += outside_s
        return GenerateOutput(
            write(
                trajectory,
                outcome,
                row=given.sample.metadata,
                ended_by=session.ended_by,
                refused_by=session.refused_by,
            )
        )

    def _start(
        self, given: GenerateInput, agent: AgentFunction, key: str, limits: AgentLimits
    ) -> asyncio.Task[Any]:
        base_url = self._address.base_url(key)
        call = agent.bound(
            given,
            base_url=base_url,
            prompt=copy.deepcopy(given.sample.prompt),
            request_kwargs=chat_kwargs(given),
            metadata=self._metadata(given, base_url, limits),
        )
        return asyncio.create_task(
            run_bounded(call, timeout_s=math.inf, threads=AGENT_THREADS),
            name=f"agent of {given.sample.group_index}:{given.sample.member}",
        )

    def _metadata(self, given: GenerateInput, base_url: str, limits: AgentLimits) -> dict[str, Any]:
        return agent_metadata(
            given,
            base_url=base_url,
            instance_id=self._address.instance_id,
            max_seq_len=limits.max_seq_len,
        )

    def _say(self, agent: AgentFunction, given: GenerateInput, outcome: Outcome) -> None:
        """Log an agent that broke, each kind of it once: all members may break alike."""
        kind = f"{agent.path} {outcome.error[:KIND_CHARS]}"
        if kind in self._said or len(self._said) >= MAX_SAID:
            return
        self._said.add(kind)
        log.warning(
            "agent_failed",
            agent=agent.path,
            group_index=given.sample.group_index,
            member=given.sample.member,
            reason=outcome.reason,
            error=outcome.error,
        )

    # --- abort -----------------------------------------------------------------------------------
    def _abort(
        self, given: GenerateInput, agent: AgentFunction, key: str, limits: AgentLimits
    ) -> None:
        """Tell an agent that we stop it, beside what we do next: its slot does not wait."""
        if agent.abort is None:
            return
        base_url = self._address.base_url(key)
        call = agent.bound_abort(base_url, self._metadata(given, base_url, limits))
        task = asyncio.create_task(_aborted(call, agent.path))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


async def _wait(
    running: asyncio.Task[Any], given: GenerateInput, earlier_s: float, over: asyncio.Event
) -> None:
    """Wait for the agent, until its time is over, or nothing that it does counts any more."""
    told = asyncio.create_task(over.wait())
    try:
        while not running.done() and not over.is_set():
            left_s = given.deadline - earlier_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.wait((running, told), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        told.cancel()


def _span_outcome(running: asyncio.Task[Any] | None) -> str:
    """Return how the agent's own last stretch ended, before we stop what still runs."""
    if running is None or not running.done():
        return "cancelled"
    return "error" if running.cancelled() or running.exception() is not None else "ok"


def _overdue(spent_s: float, earlier_s: float) -> Outcome:
    """Return the outcome of an agent whose time was over, `earlier_s` before its sample's."""
    error = f"the agent did not return within {spent_s:.1f} s (gateway.agent_timeout_s)"
    if earlier_s <= 0:
        error = (
            f"the agent did not return before its sample's deadline (worker.sample_timeout_s), "
            f"{spent_s:.1f} s after it was called"
        )
    return Outcome(reason=StopReason.DEADLINE, error=error)


def _outcome(running: asyncio.Task[Any]) -> Outcome:
    """Return how an agent ended by itself, from its task, which is done.

    Raises:
        RolloutFault: it raised one that nothing is kept of (`_is_passed_on`).
        MemoryError: the process's matter, not the sample's.
    """
    if running.cancelled():
        return failed("a CancelledError leaked out of the agent")
    error = running.exception()
    if error is None:
        return outcome_of(running.result())
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, RolloutFault):
        if _is_passed_on(error):
            raise error
        return faulted(error)
    if isinstance(error, LeakedCancel):
        return failed("a CancelledError leaked out of the agent")
    if isinstance(error, Exited):
        return failed(f"the agent raised {error}")
    return failed(f"the agent raised {describe(error)}")


def _is_passed_on(fault: RolloutFault) -> bool:
    """Return whether a fault is raised as it is, and what was generated is not kept.

    Its sample begins anew; or an engine refused, which is counted over all members as what may
    have to end the run, and is no result of a sample's.
    """
    report = report_of(fault.reason, retryable=fault.retryable)
    return isinstance(fault, EngineFault) or report not in (Report.COMPLETE, Report.FINAL)


async def _aborted(call: Any, path: str) -> None:
    """Run an `abort` to its end; what it raises is a line in the log."""
    try:
        await run_bounded(call, timeout_s=ABORT_S, threads=AGENT_THREADS)
    except Overdue:
        log.warning("agent_abort_failed", agent=path, error=f"not within {ABORT_S:g} s")
    except Exception as error:  # noqa: BLE001 - the user's; nobody waits for its answer
        log.warning("agent_abort_failed", agent=path, error=describe(error))
