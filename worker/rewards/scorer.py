"""The scorer of one environment: which reward a trajectory gets, and how it is asked for.

Owns the judges by kind and the rule of leaves. Never overwrites a reward that is there. Invariant:
`score` gives all leaves of a trajectory one reward, or raises a `RewardFault` that nobody tries
again; "no verdict" stays None and is never 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from typing import Any, Protocol

import structlog

from rollstream.errors import ConfigError, RewardFault
from rollstream.group import PromptGroup, Trajectory
from rollstream.sample import Reward, Sample
from rollstream.settings import RewardTable

from ..functions import is_path, resolve
from ..isolation import Isolated
from ..types import Renderer
from . import kinds, verdicts
from .case import Case, Judge, computed, reply_of
from .details import Detail, no_verdict
from .gym import ReasoningGym
from .hub import PURE, random_reward
from .isolated import IsolatedRewards
from .own import called, own_function
from .remote import Remote, open_remote
from .retries import asked_again

log = structlog.get_logger("worker")


class Scorer(Protocol):
    """Gives trajectories their reward."""

    async def start(self) -> None:
        """Begin what takes time (imports); returns at once."""
        ...

    async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
        """Set the reward of every leaf that has none.

        Raises:
            RewardFault: no verdict can be had.
        """
        ...

    async def aclose(self) -> None:
        """Stop what was begun."""
        ...


def build_scorer(
    table: RewardTable,
    *,
    renderer: Renderer,
    run_seed: int,
    isolated: Isolated | None = None,
    is_own: bool = True,
) -> Scorer:
    """Return the scorer that the configuration asks for.

    Args:
        table: of the environment.
        renderer: parses the last turn, of which rewards see the text.
        run_seed: of the run.
        isolated: where `needs_isolation(table)`; whoever made it starts and closes it.
        is_own: whether the environment's own table says the kind; else rows may name another.

    Raises:
        ConfigError: an unknown kind, a function that cannot be found, or a remote server that is
            not said.
    """
    kinds.check_kinds(table)
    if kinds.always_isolated(table) and isolated is None:
        raise ConfigError(f"the reward {table.kind} runs isolated, and nothing is there to ask")
    remote = None
    if table.kind == kinds.REMOTE or table.url:
        remote = open_remote(table)
    return RewardScorer(
        table,
        renderer=renderer,
        run_seed=run_seed,
        isolated=isolated,
        remote=remote,
        is_own=is_own,
    )


class RewardScorer:
    """Scores by the kind of each sample, and a share of the samples by `math_verify`."""

    def __init__(
        self,
        table: RewardTable,
        *,
        renderer: Renderer,
        run_seed: int,
        isolated: Isolated | None,
        remote: Remote | None,
        is_own: bool,
    ) -> None:
        self._table, self._renderer, self._run_seed = table, renderer, run_seed
        self._remote, self._is_own = remote, is_own
        self._isolated = (
            None
            if isolated is None
            else IsolatedRewards(isolated, timeout_s=table.timeout_s, key=table.key)
        )
        self._gym = ReasoningGym()
        self._warming: asyncio.Task[None] | None = None
        self._judges: dict[str, Judge] = {}
        if table.kind != kinds.NONE:
            self._judges[table.kind] = self._judge_of(table.kind)

    async def start(self) -> None:
        """Import reasoning-gym in the background, where it is asked for."""
        if self._table.kind == kinds.GYM:
            self._warm_soon()

    def _warm_soon(self) -> asyncio.Task[None]:
        if self._warming is None:
            self._warming = asyncio.create_task(self._warm())
        return self._warming

    async def _warm(self) -> None:
        try:
            await asyncio.to_thread(self._gym.warm)
        except RewardFault as fault:  # every sample will say the same
            log.error("reward_not_available", error=fault.message)

    async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
        """Give every leaf that has no reward the trajectory's one.

        A reward that a leaf brings along is the trajectory's; else its last leaf is scored. A
        trajectory without a sampled token has nothing to judge.

        Raises:
            RewardFault: no verdict can be had, and was asked for as often as it may be.
        """
        leaves = trajectory if isinstance(trajectory, list) else [trajectory]
        reward = next((leaf.reward for leaf in leaves if leaf.reward is not None), None)
        is_judged = self._table.kind != kinds.NONE and any(leaf.num_sampled for leaf in leaves)
        if reward is None and is_judged:
            reward = await self._verdict(leaves[-1])
        for leaf in leaves:
            if leaf.reward is None:
                leaf.reward = reward

    async def _verdict(self, sample: Sample) -> Reward:
        kind = kinds.kind_for(self._table, sample.metadata, is_own=self._is_own)
        if kind == self._table.kind and self._is_shared_out(sample):
            kind = kinds.MATH_VERIFY
        judge = self._judges.get(kind)
        if judge is None:
            judge = self._judges[kind] = self._judge_of(kind)
        reply = await reply_of(sample, self._renderer, whole=kind == "deepscaler")
        return await asked_again(
            functools.partial(self._ask, judge, kind, sample, reply),
            max_retries=self._table.max_retries,
            backoff_s=self._table.retry_backoff_s,
        )

    async def _ask(
        self, judge: Judge, kind: str, sample: Sample, reply: Any, attempt: int
    ) -> Reward:
        reward = verdicts.checked(await judge(Case(sample, reply, attempt)), kind)
        return verdicts.with_its_key(reward, self._table.key, kind)

    def _is_shared_out(self, sample: Sample) -> bool:
        """Return whether this sample is of the share that is judged in isolation."""
        share = self._table.isolated_share
        if share <= 0 or self._table.kind == kinds.MATH_VERIFY:
            return False
        digest = hashlib.blake2b(f"{self._run_seed}:{sample.index}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big") / 2**64 < share

    def _judge_of(self, kind: str) -> Judge:
        """Return how a kind is asked for.

        Raises:
            ConfigError: a function that cannot be found.
            RewardFault: a row names it, and the configuration does not provide for it.
        """
        if kind in PURE:
            return functools.partial(self._pure, kind)
        if kind == kinds.RANDOM:
            return self._random
        if kind == kinds.GYM:
            return self._reasoning_gym
        if kind == kinds.REMOTE:
            return self._remote_judge()
        if kind in kinds.JOB_OF or kind in self._table.isolated:
            return self._isolated_judge(kind)
        assert is_path(kind)
        return functools.partial(
            own_function, resolve(kind, "reward", num_args=1), kind, self._table.timeout_s
        )

    def _remote_judge(self) -> Judge:
        if self._remote is None:
            raise no_verdict(
                Detail.NOT_CONFIGURED, "the reward 'remote' is asked for, and reward.url is empty"
            )
        return self._remote.judge

    def _isolated_judge(self, kind: str) -> Judge:
        job = kinds.JOB_OF.get(kind, kind)
        if self._isolated is None or job not in self._table.isolated:
            raise no_verdict(
                Detail.NOT_CONFIGURED,
                f"the reward {kind!r} is asked for and only runs isolated; add {job!r} to "
                "reward.isolated",
            )
        if kind == kinds.CODE:
            return self._isolated.code
        if kind == kinds.MATH_VERIFY:
            return self._isolated.math_verify
        if kind in kinds.JOB_OF:
            return self._isolated.boxed_math_verify
        return functools.partial(self._isolated.function, kind)

    async def _pure(self, kind: str, case: Case) -> Any:
        reward = await computed(PURE[kind], case.reply)
        if isinstance(reward, dict):
            return verdicts.one_of(reward, self._table.key, ("score",))
        return reward

    async def _random(self, case: Case) -> float:
        return random_reward(case.sample, self._run_seed)

    async def _reasoning_gym(self, case: Case) -> Any:
        warming = self._warm_soon()
        if not warming.done():
            await asyncio.wait((warming,), timeout=self._table.timeout_s)
        score = functools.partial(self._gym.score, text=case.reply.text)
        # The same answer breaks or hangs a scorer again.
        return await called(score, kinds.GYM, self._table.timeout_s, case.sample, may_pass=False)

    async def aclose(self) -> None:
        """Stop waiting for imports, and close the connections to a remote server."""
        if self._warming is not None:
            self._warming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._warming
        if self._remote is not None:
            await self._remote.aclose()
