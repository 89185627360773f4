"""What this service must know of a model family, and how far that was proven.

Owns the record and its words. Never renders. Invariant: a family is `VERIFIED` only where golden
ids over its published vocabulary are tests, and `NOT_RUN` is never chosen for anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Proof(StrEnum):
    """How far a family was tried."""

    VERIFIED = "verified"
    """Over its published vocabulary."""
    TOY = "toy only"
    """Over a small vocabulary that has its control tokens; nobody here had the published one."""
    NOT_RUN = "not run"
    """Never tried; may be named, and the self-test at start decides."""


class CallForm(StrEnum):
    """How a family spells tool calls."""

    JSON_BLOCK = "json block"
    """One JSON object with name and arguments between two markers: judged by our own reader."""
    PARSED = "parsed"
    """Anything else: name, arguments and status are the package's."""


@dataclass(frozen=True, slots=True)
class Family:
    """One chat format over one kind of vocabulary."""

    module: str
    """Submodule of `renderers`."""
    renderer: str
    config: str
    """Class names in that submodule and in `renderers.configs`."""
    close: str
    """The token that is written behind a turn that did not close itself (cut by length, ended by
    another stop token); empty where nothing is, because the next message's role token does it."""
    tokens: dict[str, int | None]
    """Control tokens with the ids that the family's vocabulary gives them; None where the id is
    not known here and the token only has to be there."""
    scaffold: tuple[str, ...] = ()
    """Template text that is encoded at every turn."""
    build: Callable[[Any, Family], Any] | None = None
    """Makes what renders, of our tokenizer and this record, where the package's own class is not
    enough; its methods are the package's, and `closing(sampled, held)`, where there is one, returns
    what is written behind a turn that did not close itself."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the config class."""
    reasoning: tuple[str, str] | None = None
    """Markers of a reasoning block, atomic in the vocabulary."""
    closes: tuple[str, ...] = ()
    """Tokens that end a turn as the template means it (`<|call|>`, `<|return|>`); empty is `close`
    alone. Any other end is abnormal: it stays, and `close` is written behind it."""
    stand_in: str = ""
    """The stop token behind which the package writes the whole next message, where that is not
    `close` (GLM: behind `<|user|>` it leaves that role token out)."""
    markup: tuple[str, ...] = ()
    """Control strings that an assistant message may carry in its content (calls in their own
    spelling); the markers of `reasoning` always may."""
    thinking: bool = True
    """A turn may begin with reasoning (not where the generation prompt closed an empty block)."""
    opens_reasoning: bool = False
    """The generation prompt opens the reasoning block, and an empty one in the history has other
    ids than a model would sample: the self-test's conversation has reasoning in every turn."""
    shows_tools: bool = True
    """The template has a place for tool specs."""
    parallel_calls: bool = True
    """The template takes several calls in one turn."""
    rewrites_turns: bool = False
    """The template shows even a turn of the running tool cycle otherwise than it was sampled (a
    block that the generation prompt opened is missing where there was no reasoning)."""
    call_form: CallForm = CallForm.JSON_BLOCK
    models: tuple[str, ...] = ()
    """Exact hub ids that `auto` takes for it."""
    proof: Proof = Proof.NOT_RUN
    note: str = ""
    """For people: what the proof does not cover."""

    @property
    def traits(self) -> dict[str, bool]:
        """What the self-test must know of the template."""
        return {
            "thinking": self.thinking,
            "opens_reasoning": self.opens_reasoning,
            "parallel_calls": self.parallel_calls,
            "rewrites_turns": self.rewrites_turns,
        }
