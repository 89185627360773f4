"""`python -m tests.integration.environments.openenv_server PORT SESSIONS`: a real server of a game.

Guess a number: `boom` breaks the server's environment, `hang` never answers, and what is neither a
number nor one of these is no valid action.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    """What the model does."""

    guess: str = Field(pattern=r"^(\d+|boom|hang)$")


class Seen(Observation):
    """What it sees."""

    text: str = ""
    left: int = 3


class Game(Environment):  # type: ignore[misc]  # the package has no types
    """Three guesses; 1.0 for the right one, 0.1 for one that is near."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._left = 7, 3

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Seen:
        self._number, self._left = int(given.get("number", 7)), 3
        return Seen(text=f"Guess. The seed is {seed}.", left=self._left)

    def step(self, action: Guess, timeout_s: float | None = None, **given: Any) -> Seen:
        if action.guess == "boom":
            raise ValueError("boom")
        if action.guess == "hang":
            time.sleep(3600)
        self._left -= 1
        away = abs(int(action.guess) - self._number)
        reward = 1.0 if away == 0 else 0.1 if away == 1 else 0.0
        return Seen(
            text="Right." if away == 0 else f"No, {self._left} left.", left=self._left,
            reward=reward, done=away == 0 or self._left == 0,
        )  # fmt: skip

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    port, sessions = map(int, sys.argv[1:])
    app = create_fastapi_app(Game, Guess, Seen, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")
