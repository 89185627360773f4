"""What all sessions of one environment share, and the seam to what makes prompts.

Owns the records. Never resolves a name: settings do that at start-up (`matchers.resolve_matcher`,
`picker.resolve_picker`). Invariant: one object for all sessions of an environment, never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rollstream.sample import Message, TokenIds

from ..types import DivergencePolicy, PromptIds
from .matchers import Matcher, rendered
from .picker import DROP_RETRIES, Picker

REJOIN_S = 5.0
"""How long a request without a stream, whose client is gone, goes on for its retry."""


class Prompting(Protocol):
    """What makes prompts of messages (`prompting.Prompter`)."""

    def tools_key(self, tools: Sequence[Message] | None) -> bytes:
        """Return what is the same for tools that mean the same."""
        ...

    async def first(
        self, messages: Sequence[Message], tools: Sequence[Message] | None
    ) -> PromptIds:
        """Return the ids of a conversation that begins."""
        ...

    async def append(
        self,
        window: TokenIds,
        completion: TokenIds,
        new_messages: Sequence[Message],
        tools: Sequence[Message] | None,
        *,
        reply: Message | None = None,
        first_place: int = 0,
    ) -> TokenIds:
        """Return only the ids to append behind `completion`."""
        ...


@dataclass(frozen=True, slots=True)
class SessionRules:
    """What all sessions of one environment share."""

    prompter: Prompting
    kind: Literal["linear", "tree"] = "linear"
    on_divergence: DivergencePolicy = DivergencePolicy.KEEP_PREFIX
    """Of linear ones."""
    matcher: Matcher = rendered
    picker: Picker = field(default_factory=lambda: Picker(DROP_RETRIES))
    """Of trees."""
    max_turns: int = 1024
    """Replies of one line."""
    max_tokens: int = 4 << 20
    """Held by a session, of all its lines."""
    max_in_flight: int = 32
    """Requests at once."""
    rejoin_s: float = REJOIN_S
