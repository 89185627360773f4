"""The reward of a whole group: a function of the user's over all samples of it.

Owns the call, its retries, and what each member gets of its answer. Never writes a reward anywhere,
and is never asked about a group in part. Invariant: whatever the function does (raises, hangs,
exits, answers too few or something odd), each trajectory gets a reward, None, or a fault that says
why; a fault is never a 0, and an odd value costs its own member only.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from rollstream.errors import RewardFault
from rollstream.group import Trajectory
from rollstream.sample import Reward
from rollstream.settings import RewardTable

from ..functions import resolve
from ..rewards.details import Detail, no_verdict
from ..rewards.own import called
from ..rewards.retries import Sleep, asked_again
from ..rewards.verdicts import checked, with_its_key

Scored: TypeAlias = Reward | RewardFault
GroupFunction: TypeAlias = Callable[[list[Trajectory]], Any]


class GroupReward:
    """Scores all members of a group at once.

    Attributes:
        name: as the configuration says it.
    """

    def __init__(
        self,
        name: str,
        function: GroupFunction,
        *,
        key: str | None = None,
        timeout_s: float = 30.0,
        max_retries: int = 0,
        backoff_s: float = 0.5,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.name = name
        self._function, self._key, self._timeout_s = function, key, timeout_s
        self._ask_again = functools.partial(
            asked_again, max_retries=max_retries, backoff_s=backoff_s, sleep=sleep
        )

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Scored]:
        """Return the reward of each trajectory, or why there is none.

        Shape: [len(trajectories)], in their order.
        """
        try:
            answered: list[Any] = await self._ask_again(lambda _: self._ask(trajectories))
        except RewardFault as fault:
            return [fault] * len(trajectories)
        scored: list[Scored] = []
        for value in answered:
            if issubclass(type(value), dict):
                await asyncio.sleep(0)  # one of 64 KB takes milliseconds, and a group has thousands
            scored.append(self._one(value))
        return scored

    async def _ask(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        """Call the function once, with a list of its own.

        Raises:
            RewardFault: it has no answer, or one that cannot be told apart by member.
        """
        answer = await called(
            self._function, self.name, self._timeout_s, list(trajectories), may_pass=True
        )
        if type(answer) not in (list, tuple):  # one of its own kind may do anything as it is read
            answer = await called(_listed, self.name, self._timeout_s, answer, may_pass=True)
        if isinstance(answer, str):
            what = f"{answer}; it must return a list with a reward for each sample"
        elif len(answer) != len(trajectories):
            what = f"{len(answer)} rewards for {len(trajectories)} samples"
        else:
            return list(answer)
        raise no_verdict(Detail.INVALID, f"the reward {self.name} returned {what}", retryable=True)

    def _one(self, value: Any) -> Scored:
        """Return one value as what can be stored, or why it cannot."""
        try:
            return with_its_key(checked(value, self.name), self._key, self.name)
        except RewardFault as fault:
            return fault


def _listed(answer: Any) -> list[Any] | str:
    """Return what a function answered as a list; where it is no row of values, its type."""
    is_row = isinstance(answer, list | tuple)
    if is_row or (isinstance(answer, np.ndarray) and answer.ndim == 1):
        return list(answer)
    return type(answer).__name__


def load_group_reward(table: RewardTable) -> GroupReward | None:
    """Return the group's reward of an environment; None where it has none.

    Raises:
        ConfigError: the function cannot be found.
    """
    if not table.group:
        return None
    return GroupReward(
        table.group,
        resolve(table.group, "group reward", num_args=1),
        key=table.key,
        timeout_s=table.timeout_s,
        max_retries=table.max_retries,
        backoff_s=table.retry_backoff_s,
    )
