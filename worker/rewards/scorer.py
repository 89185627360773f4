"""The scorer of one environment: which reward a trajectory gets, and how it is asked for.

Owns the choice between the kinds, the deadline of a verdict and its checks. Never overwrites a
reward that is there. Invariant: `score` gives all leaves of a trajectory one reward, or raises a
`RewardFault`; "no verdict" stays None and is never 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

import structlog

from rollstream.errors import ConfigError, RewardFault
from rollstream.group import PromptGroup, Trajectory
from rollstream.sample import Reward, Sample
from rollstream.settings import RewardTable

from ..bounded import LeakedCancel, Overdue, run_bounded
from ..functions import describe, is_path, resolve, unknown_name
from ..isolation import Isolated, IsolatedFault
from ..types import Renderer
from .answers import answer_of, final_text
from .builtin import ReasoningGym, label_text, score_deterministic_random, score_math

ISOLATED = ("math_verify",)
"""Kinds that only run through a verifier."""
BUILT_IN = ("deterministic_random", "math", "math_verify", "none", "reasoning_gym")
SHARED_JUDGE = "math_verify"
"""What `reward.isolated_share` of the samples is scored by."""
Judge: TypeAlias = Callable[[Sample], Awaitable[Any]]
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
) -> Scorer:
    """Return the scorer that the configuration asks for.

    Args:
        table: of the environment.
        renderer: parses the last turn, of which rewards see the text.
        run_seed: of the run.
        isolated: where `needs_isolation(table)`; whoever made it starts and closes it.

    Raises:
        ConfigError: an unknown kind, or a function that cannot be found.
    """
    unknown = [n for n in table.isolated if n not in (*ISOLATED, "code") and not is_path(n)]
    if unknown:
        raise ConfigError(
            f"reward.isolated names {unknown[0]!r}; what can run isolated is {sorted(ISOLATED)}"
        )
    if needs_isolation(table):
        judge = table.kind if table.kind in ISOLATED else SHARED_JUDGE
        if judge not in table.isolated:
            raise ConfigError(
                f"{judge} can hang or crash and only runs isolated; add it to reward.isolated"
            )
    return RewardScorer(table, renderer=renderer, run_seed=run_seed, isolated=isolated)


def needs_isolation(table: RewardTable) -> bool:
    """Return whether the scorer of this table asks verifiers."""
    return table.kind in ISOLATED or table.isolated_share > 0


class RewardScorer:
    """Scores by `reward.kind`, and a share of the samples by an isolated judge."""

    def __init__(
        self,
        table: RewardTable,
        *,
        renderer: Renderer,
        run_seed: int,
        isolated: Isolated | None,
    ) -> None:
        self._table, self._renderer, self._run_seed = table, renderer, run_seed
        self._isolated = isolated
        self._gym = ReasoningGym()
        self._warming: asyncio.Task[None] | None = None
        self._judge = self._judge_of(table.kind)

    async def start(self) -> None:
        """Import reasoning-gym in the background, where it is asked for."""
        if self._table.kind == "reasoning_gym":
            self._warming = asyncio.create_task(self._warm())

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
            RewardFault: no verdict can be had.
        """
        leaves = trajectory if isinstance(trajectory, list) else [trajectory]
        reward = next((leaf.reward for leaf in leaves if leaf.reward is not None), None)
        if reward is None and self._judge is not None and any(leaf.num_sampled for leaf in leaves):
            reward = await self._verdict(leaves[-1])
        for leaf in leaves:
            if leaf.reward is None:
                leaf.reward = reward

    async def _verdict(self, sample: Sample) -> Reward:
        if self._is_shared_out(sample):
            return await self._ask(SHARED_JUDGE, sample)
        assert self._judge is not None
        return _checked(await self._judge(sample), self._table.kind)

    def _is_shared_out(self, sample: Sample) -> bool:
        """Return whether this sample is of the share that is judged in isolation."""
        share = self._table.isolated_share
        if share <= 0 or self._table.kind == SHARED_JUDGE:
            return False
        digest = hashlib.blake2b(f"{self._run_seed}:{sample.index}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big") / 2**64 < share

    def _judge_of(self, kind: str) -> Judge | None:
        if kind == "none":
            return None
        if kind == "math":
            return self._math
        if kind == "deterministic_random":
            return self._random
        if kind == "reasoning_gym":
            return self._reasoning_gym
        if kind in ISOLATED:
            return functools.partial(self._ask, kind)
        if not is_path(kind):
            raise unknown_name(kind, "reward", list(BUILT_IN))
        return functools.partial(self._own, resolve(kind, "reward", num_args=1), kind)

    async def _math(self, sample: Sample) -> float:
        return score_math(sample, final_text(sample, self._renderer))

    async def _random(self, sample: Sample) -> float:
        return score_deterministic_random(sample, self._run_seed)

    async def _reasoning_gym(self, sample: Sample) -> Any:
        if self._warming is not None and not self._warming.done():
            await asyncio.wait((self._warming,), timeout=self._table.timeout_s)
        text = final_text(sample, self._renderer)
        return await self._call(functools.partial(self._gym.score, text=text), "reasoning_gym",
                                sample)  # fmt: skip

    async def _ask(self, judge: str, sample: Sample) -> float:
        assert self._isolated is not None
        answer = answer_of(final_text(sample, self._renderer))
        payload = {"answer": answer, "label": label_text(sample)}
        timeout_s = self._table.timeout_s
        try:
            reward = await self._isolated.call(judge, payload, timeout_s=timeout_s)
        except IsolatedFault as fault:
            raise RewardFault(
                fault.message, retryable=fault.retryable, detail=fault.detail
            ) from fault
        if not _is_number(reward):
            raise RewardFault(f"{judge} gave no number: {reward!r:.80}", detail="invalid")
        return float(reward)

    async def _own(self, function: Callable[[Sample], Any], name: str, sample: Sample) -> Any:
        """Call a user's function, which finds the final text in the metadata."""
        sample.metadata["final_text"] = final_text(sample, self._renderer)
        return await self._call(function, name, sample)

    async def _call(self, function: Callable[[Sample], Any], name: str, sample: Sample) -> Any:
        """Call a function under the deadline of a verdict."""
        timeout_s = self._table.timeout_s
        try:
            return await run_bounded(function, sample, timeout_s=timeout_s)
        except RewardFault:
            raise
        except Overdue:
            raise RewardFault(
                f"the reward {name} did not return within {timeout_s:g} s (reward.timeout_s)",
                retryable=True,
                detail="timeout",
            ) from None
        except LeakedCancel:
            raise RewardFault(
                f"the reward {name} raised CancelledError", retryable=True, detail="cancelled"
            ) from None
        except Exception as error:
            raise RewardFault(
                f"the reward {name} raised {describe(error)}", detail="raised"
            ) from error

    async def aclose(self) -> None:
        """Stop waiting for imports."""
        if self._warming is not None:
            self._warming.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._warming


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _checked(reward: Any, name: str) -> Reward:
    """Return a verdict as plain numbers; NaN stays (the group's judge says `invalid`).

    Raises:
        RewardFault: not a number, a dictionary of plain values, or None.
    """
    if reward is None or (isinstance(reward, float) and type(reward) is float):
        return reward
    if isinstance(reward, dict):
        return {str(key): _plain(value, name) for key, value in reward.items()}
    value = _plain(reward, name)
    if isinstance(value, bool | int | float):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise RewardFault(
        f"the reward {name} returned {type(reward).__name__}; it must return a number, a "
        "dictionary or None",
        detail="invalid",
    )


def _plain(value: Any, name: str) -> Any:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's scalars
        value = value.item()
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int) and abs(value) < 1 << 63:
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, name) for key, item in value.items()}
    raise RewardFault(
        f"the reward {name} returned a value of type {type(value).__name__}, which cannot be "
        "stored; use numbers and text",
        detail="invalid",
    )
