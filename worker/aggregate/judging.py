"""One full group at a time, from what is stored of it to what is said of it.

Owns what is read for a judgement (bodies once, and only where somebody asks for them), the order of
scoring and judging, and the tries of a filter that breaks. Never writes to the queue. Invariant:
the group's reward is asked once a judgement, however often a filter breaks behind it; what it
answered travels in new headers and nowhere else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from rollstream.errors import DropReason, MemberReason, RewardFault, RolloutFault, WireError
from rollstream.group import (
    GroupView,
    MemberView,
    PromptGroup,
    Trajectory,
    mask_truncated,
)
from rollstream.link import Link
from rollstream.logs import group_id
from rollstream.queue.queue import Queue
from rollstream.queue.reads import StoredGroup, StreamEntry
from rollstream.sample import Reward, Sample
from rollstream.wire import decode_body, decode_prompt, rewarded_header

from ..bounded import in_thread
from ..members.work import place_of
from ..telemetry.metrics import Metrics
from .judge import KEEP, EnvJudge, FilterError, FilterHung, Verdict, judge, view_of

TRIES = 3
LARGE_BYTES = 1 << 20
"""Bodies and texts of one group, or its headers, that together are larger are read in a thread."""
MAX_CAUSE_CHARS = 1000
"""Of why there is no reward, kept with each member."""
MISSING = "missing"

log = structlog.get_logger("aggregator")


class MovedOn(Exception):
    """The group was ended or requeued while it was judged."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was decided on one group."""

    env: str
    verdict: Verdict
    view: GroupView | None = None
    """None where it was not looked at."""
    headers: dict[int, bytes] = field(default_factory=dict)
    """New ones, of members that the group's reward was asked about."""
    details: dict[int, str] = field(default_factory=dict)
    """Why members have no reward (`worker.rewards.details`), where the group's said so."""


class Judging:
    """Judges groups of the run's environments."""

    def __init__(
        self, queue: Queue, link: Link, envs: Mapping[str, EnvJudge], metrics: Metrics
    ) -> None:
        self._queue, self._link, self._envs, self._metrics = queue, link, envs, metrics
        self.runs_user_code = any(env.runs_user_code for env in envs.values())
        # One environment whose filters look at headers only needs no prompt at all.
        self._only = next(iter(envs.values())) if len(envs) == 1 else None
        self.reads_prompts = self._only is None or self.runs_user_code

    async def judge(self, entry: StreamEntry, stored: StoredGroup) -> Judgement:
        """Judge the group that an entry names; never raises for what is wrong with it."""
        if stored.state != "full" or stored.full_id != entry.message_id:
            # It moved on: the verdict deletes the entry and changes nothing.
            return Judgement("", KEEP)
        if entry.deliveries > TRIES:
            return _broken(
                entry,
                "",
                f"its judgement never ended: {TRIES} aggregators had it and died or stood still",
            )
        error, env_name = "", ""
        case: Case | None = None
        for _ in range(TRIES):
            try:
                if case is None:
                    env, prompt = self._env_of(stored)
                    env_name = env.name
                    case = Case(
                        self._queue, self._link, stored, env, prompt, span=self._metrics.span
                    )
                judgement = await case.judgement()
                self._note_waits(entry, judgement.view)
                return judgement
            except MovedOn:
                return Judgement(env_name, KEEP)
            except FilterHung as raised:
                error = str(raised)
                break
            except (FilterError, WireError, RolloutFault, LookupError) as raised:
                error = str(raised)
        return _broken(entry, env_name, error)

    def _env_of(self, stored: StoredGroup) -> tuple[EnvJudge, PromptGroup | None]:
        if not self.reads_prompts and self._only is not None:
            return self._only, None
        if stored.prompt is None:
            raise WireError(f"group {stored.group_index} has no prompt record")
        prompt = decode_prompt(stored.prompt, place_of(stored.group_index), stored.n)
        env = self._envs.get(prompt.env)
        if env is None:
            raise LookupError(
                f"environment {prompt.env!r} is not configured here; known: {sorted(self._envs)}"
            )
        return env, prompt

    def _note_waits(self, entry: StreamEntry, view: GroupView | None) -> None:
        for member in view.members if view is not None else ():
            if member.header is not None and member.header.done_unix_s:
                waited_s = entry.unix_s - member.header.done_unix_s
                self._metrics.span("group_wait", max(0.0, waited_s))


def _broken(entry: StreamEntry, env: str, error: str) -> Judgement:
    log.error("filter_error", group_index=group_id(entry.group_index), error=error)
    return Judgement(env, Verdict(DropReason.FILTER_ERROR, error))


class Case:
    """One group under judgement."""

    def __init__(
        self,
        queue: Queue,
        link: Link,
        stored: StoredGroup,
        env: EnvJudge,
        prompt: PromptGroup | None,
        *,
        span: Callable[[str, float], None],
    ) -> None:
        self._queue, self._link, self._env, self._prompt = queue, link, env, prompt
        self._span = span
        self._stored = stored
        self._full: StoredGroup | None = None
        """With its bodies, once they were asked for."""
        self._trajectories: list[Trajectory | None] | None = None
        self._headers: dict[int, bytes] = {}
        self._details: dict[int, str] = {}
        self._is_scored = env.group_reward is None

    async def judgement(self) -> Judgement:
        """Score and judge the group.

        Raises:
            FilterError: a filter broke.
            WireError: a record is missing or garbage.
            MovedOn: it is another group by now.
        """
        env = self._env
        # Until the group's reward was asked, nobody lacks one.
        rule = env.rule if self._is_scored else replace(env.rule, needs_reward=False)
        view = await self._view_by(replace(env, rule=rule))

        async def bodies() -> None:
            await self._fill(view)

        async def score() -> None:
            await self._score(view)
            view.members[:] = (await self._view_by(env)).members

        verdict = await judge(
            view, env, self._stored.why, bodies, None if self._is_scored else score
        )
        return Judgement(env.name, verdict, view, self._headers, self._details)

    async def _view_by(self, env: EnvJudge) -> GroupView:
        metadata = self._prompt.metadata if self._prompt is not None else {}
        if sum(len(raw or b"") for raw in self._stored.headers) > LARGE_BYTES:
            view = await in_thread(view_of, self._stored, env, metadata)
        else:
            view = view_of(self._stored, env, metadata)
        if self._trajectories is not None:
            for member, trajectory in zip(view.members, self._trajectories, strict=True):
                member.trajectory = trajectory
        return view

    # --- scoring ---------------------------------------------------------------------------------
    async def _score(self, view: GroupView) -> None:
        """Ask the group's reward, and write what it says into headers and trajectories."""
        reward = self._env.group_reward
        asked = view.usable
        if reward is not None and any(_own_reward(member) is None for member in asked):
            await self._fill(view)
            start_mono_s = time.monotonic()
            try:
                answers = await reward.score([self._trajectory_of(member) for member in asked])
            finally:
                self._span("reward", time.monotonic() - start_mono_s)
            for member, scored in zip(asked, answers, strict=True):
                if isinstance(scored, dict):
                    await asyncio.sleep(0)  # a large one takes a moment to pack, and there are many
                self._give(member, scored)
            self._trajectories = None  # the function may have written into them
        headers = [
            self._headers.get(member, raw) for member, raw in enumerate(self._stored.headers)
        ]
        self._stored = replace(self._stored, headers=headers)
        self._is_scored = True

    def _trajectory_of(self, member: MemberView) -> Trajectory:
        if member.trajectory is None:
            raise WireError(
                f"group {self._stored.group_index}: the body of member {member.member} is gone"
            )
        return member.trajectory

    def _give(self, member: MemberView, scored: Reward | RewardFault) -> None:
        raw, place = self._stored.headers[member.member], member.member
        own = _own_reward(member)
        if raw is None or (own is not None and not _lacks(member)):
            return
        # What a leaf brought along is the whole trajectory's: never overwritten.
        reward, cause = own, ""
        if own is None:
            if isinstance(scored, RewardFault):
                self._details[place] = scored.detail
                cause = printable(scored.message)
            else:
                reward = scored
        self._headers[place] = rewarded_header(raw, reward, cause)

    # --- bodies ----------------------------------------------------------------------------------
    async def _fill(self, view: GroupView) -> None:
        """Give the members of a view their trajectories."""
        if self._trajectories is None:
            self._trajectories = await self._decoded(view)
        for member, trajectory in zip(view.members, self._trajectories, strict=True):
            member.trajectory = trajectory

    async def _decoded(self, view: GroupView) -> list[Trajectory | None]:
        """Return each member's trajectory, with the reward that its header says."""
        prompt, is_masking = self._prompt, self._env.rule.on_truncated == "mask"
        if prompt is None:
            raise WireError(f"group {self._stored.group_index} has no prompt record")
        if self._full is None:
            self._full = await self._read()
        full = self._full
        if sum(len(part or b"") for part in (*full.bodies, *full.texts)) > LARGE_BYTES:
            found = await in_thread(_decoded, full, prompt, is_masking)
        else:
            found = _decoded(full, prompt, is_masking)
        for member, trajectory in zip(view.members, found, strict=True):
            if member.header is not None and trajectory is not None:
                for sample, leaf in zip(_leaves(trajectory), member.header.leaves, strict=False):
                    sample.reward = leaf.reward
        return found

    async def _read(self) -> StoredGroup:
        stored = self._stored
        ids = [(stored.group_index, stored.n)]
        (full,) = await self._link.answered(lambda: self._queue.groups(ids, text=True))
        # Their state is read behind the bodies.
        if (full.state, full.full_id) != (stored.state, stored.full_id):
            raise MovedOn
        return full


def _decoded(full: StoredGroup, prompt: PromptGroup, is_masking: bool) -> list[Trajectory | None]:
    found: list[Trajectory | None] = []
    for body, text in zip(full.bodies, full.texts, strict=True):
        trajectory = None if body is None else decode_body(body, prompt, text)
        if trajectory is not None and is_masking:
            mask_truncated(trajectory)
        found.append(trajectory)
    return found


def printable(message: str) -> str:
    """Return what is kept of a message, bounded; a lone surrogate, which UTF-8 cannot say, as ?."""
    return message[:MAX_CAUSE_CHARS].encode(errors="replace").decode()


def _leaves(trajectory: Trajectory) -> list[Sample]:
    return trajectory if isinstance(trajectory, list) else [trajectory]


def _own_reward(member: MemberView) -> Reward:
    """Return the reward that any leaf of a member brought along."""
    leaves = member.header.leaves if member.header is not None else []
    return next((leaf.reward for leaf in leaves if leaf.reward is not None), None)


def _lacks(member: MemberView) -> bool:
    return any(leaf.reward is None for leaf in member.header.leaves) if member.header else False


def reward_troubles(judgement: Judgement) -> list[str]:
    """Return why members of a judged group have no reward, a label for each of them."""
    view = judgement.view
    if view is None:
        return []
    wrong = [
        member
        for member in view.members
        if member.header is not None
        and member.missing is not None
        and member.missing.reason == MemberReason.REWARD_ERROR
    ]
    return [
        judgement.details.get(m.member, m.missing.error if m.missing else MISSING) for m in wrong
    ]
