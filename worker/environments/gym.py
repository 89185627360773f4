"""`reasoning_gym?tries=N`: the data set's own scorer judges each answer of the model.

Owns the episode. Never makes problems: they are rows of the source `reasoning_gym:NAME`. Invariant:
a step's reward is what the try adds to the best score so far, so their sum is the best score, which
with one try is what the reward `reasoning_gym` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollstream.errors import EnvFault, RewardFault
from rollstream.sample import Message, Sample

from .types import EnvSample, StepResult

if TYPE_CHECKING:
    from ..rewards.gym import ReasoningGym

SOLVED = 1.0
TRY_AGAIN = "That is not correct. Try again."


class GymFactory:
    """Makes the environments of rows of reasoning-gym.

    Attributes:
        resumable: what an episode is beside its tokens is two numbers.
    """

    resumable = True

    def __init__(self, tries: int = 1) -> None:
        """Prepare; imports nothing.

        Args:
            tries: answers that the model may give to one problem.
        """
        self.tries = tries
        self._gym: ReasoningGym | None = None

    def start(self) -> None:
        """Import the package, which takes a second, before the first sample waits for it.

        Raises:
            RewardFault: it is not installed.
        """
        self._scorers().warm()

    def __call__(self, sample: EnvSample) -> GymEnv:
        """Return the environment of one row."""
        return GymEnv(sample, self._scorers(), self.tries)

    def _scorers(self) -> ReasoningGym:
        if self._gym is None:
            from ..rewards.gym import ReasoningGym

            self._gym = ReasoningGym()
        return self._gym


class GymEnv:
    """One problem; its methods are ordinary ones, since a scorer may compute for a while."""

    def __init__(self, sample: EnvSample, scorers: ReasoningGym, tries: int) -> None:
        self._sample, self._scorers, self._tries = sample, scorers, tries
        self._num_tries, self._best = 0, 0.0

    def reset(self, sample: EnvSample) -> None:
        """Begin, or take up what an earlier attempt had: the question is the row's prompt."""
        if sample.state is not None:
            self._num_tries, self._best = int(sample.state["tries"]), float(sample.state["best"])

    def step(self, message: Message) -> StepResult:
        """Score an answer.

        Raises:
            EnvFault: the row is not of reasoning-gym, or the scorer broke.
        """
        sample = self._sample
        row = Sample(
            group_index=sample.group_index,
            prompt=sample.prompt,
            label=sample.label,
            metadata=sample.metadata,
        )
        try:
            score = self._scorers.score(row, message["content"])
        except RewardFault as fault:
            raise EnvFault(fault.message, retryable=fault.retryable, detail=fault.detail) from fault
        self._num_tries += 1
        gained, self._best = max(0.0, score - self._best), max(score, self._best)
        done = score >= SOLVED or self._num_tries >= self._tries
        return StepResult(TRY_AGAIN, gained, done, {"score": score})

    def state(self) -> dict[str, Any]:
        """Return what a later attempt goes on from."""
        return {"tries": self._num_tries, "best": self._best}

    def close(self) -> None:
        """Do nothing: a problem holds nothing."""
