"""What an environment is: the other side of a conversation, which answers the model and judges it.

Owns the protocol that users implement and the records that cross it. Never calls one. Invariant:
what an environment is given is its own: nothing that it does to it reaches a sample or a sibling.

Example:
    >>> class Guess:
    ...     def __init__(self, sample: EnvSample) -> None:
    ...         self.number = int(sample.label)
    ...
    ...     async def reset(self, sample):
    ...         return None  # the row's prompt says it all
    ...
    ...     async def step(self, message):
    ...         is_right = message["content"].strip() == str(self.number)
    ...         return StepResult("No, try again.", reward=float(is_right), done=is_right)
    ...
    ...     async def close(self):
    ...         pass
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from rollstream.sample import Message, Prompt

Observation: TypeAlias = "str | Message | list[Message] | list[str] | None"
"""What the model reads next: a text, a message, or several; None is an empty text."""


@dataclass(frozen=True, slots=True)
class EnvSample:
    """What an environment knows of the sample that it is made for."""

    group_index: int
    member: int
    prompt: Prompt
    """Of the row, as the model gets it."""
    label: Any
    metadata: dict[str, Any]
    """Of the row."""
    seed: int
    """The same for all members of a group and all attempts of each, so that they have one task.

    Unit: 31 bits.
    """
    max_turns: int
    evaluation: bool
    """Nobody trains on it."""
    state: Any = None
    """What `state` of an earlier environment of this sample gave, where the sample goes on; `reset`
    then takes it up, and what it returns is not shown to the model."""


class StepResult(NamedTuple):
    """What came of one reply; a plain tuple of these four will do."""

    observation: Observation = None
    """What the model reads next; of the last step nothing is read."""
    reward: float | None = None
    """Of this step alone; None where it has none."""
    done: bool = False
    """The episode is over."""
    info: Mapping[str, Any] | None = None
    """For people: kept in the sample's metadata."""


class Env(Protocol):
    """An environment of one sample.

    Its methods are `async def`, or ordinary ones, which run in threads: one call after the other,
    and not always in the same thread. `state` is optional: with `resumable = True` on its factory,
    a sample that new weights stopped goes on from it.
    """

    def reset(self, sample: EnvSample) -> Observation | Awaitable[Observation]:
        """Begin; what is returned is shown to the model behind the row's prompt."""
        ...

    def step(self, message: Message) -> StepResult | Awaitable[StepResult]:
        """Take the model's reply.

        Args:
            message: `role` (assistant), `content`, `reasoning_content` where there is some; and
                `tool_calls` in OpenAI's form, of an environment with `takes_calls = True`.
        """
        ...

    def close(self) -> Awaitable[None] | None:
        """Let go of everything; called once, however the sample ended."""
        ...


Factory: TypeAlias = "Callable[[EnvSample], Env | Awaitable[Env]]"
"""A class, or a function (async or not), that makes the environment of one sample."""
