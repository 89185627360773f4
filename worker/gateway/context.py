"""The tokens held at a point of a conversation, sharing everything with the point before it.

Owns the ids in front of a reply, the calls that sampled it, and the request that continues them.
Never renders, never changes or drops an id. Invariant: append-only and shared: an id is stored
once as int32 and written as JSON once, however many branches and requests have it in front, and
`num_prompt` ids of a context are exactly what its first call was sent.

A context grows by `add` until its reply is complete, and is never touched behind that. The parts of
`Trajectory` that a tree needs stand here; samples are assembled by `Trajectory` itself (`collect`).

Axes: C sampled tokens of one reply.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from rollstream.sample import TokenIds, empty_ids

from ..sampling import Sampling
from ..tito.ids import ids_json
from ..tito.trajectory import last_of
from ..tito.turns import REPLAY
from ..types import Completion, PromptIds, RequestIds


@dataclass(frozen=True, slots=True)
class Answer:
    """What one engine call brought, with what the record of the call needs beside it."""

    completion: Completion
    dispatched: int
    """The weight version at the try that brought it."""
    current: int
    """The one known when it came."""
    sampling: Sampling
    """The effective parameters, with the seed."""


class Context:
    """What an engine saw and sampled up to one reply.

    Attributes:
        parent: the reply before it; None begins with a rendered prompt.
        observed: what stands between: the whole prompt of a root, else what was appended.
        answers: the calls of this reply, in order: more than one where it was aborted and went on.
        num_prompt: tokens in front of its own sampled ones.
        num_tokens: all tokens.
        num_root: tokens of the root's prompt.
    """

    __slots__ = (
        "_known", "_pieces", "answers", "num_prompt", "num_root", "num_tokens", "observed",
        "parent",
    )  # fmt: skip

    def __init__(self, parent: Context | None, observed: PromptIds) -> None:
        self.parent, self.observed = parent, observed
        self.answers: list[Answer] = []
        self._pieces = [observed.json] if observed.json else []
        count = len(observed.ids)
        self.num_root: int = count if parent is None else parent.num_root
        self.num_prompt: int = count if parent is None else parent.num_tokens + count
        self.num_tokens: int = self.num_prompt
        self._known: tuple[int | None, ...] = (
            (None,) * len(REPLAY) if parent is None else parent._known
        )
        """Of each replay field, the rows that are there; None where no reply brought any."""

    @classmethod
    def behind(cls, parent: Context, appended: TokenIds) -> Context:
        """Return what goes on behind a reply with ids that were appended to it."""
        return cls(parent, PromptIds(appended, ids_json(appended)))

    @property
    def num_sampled(self) -> int:
        """How many tokens its own calls brought."""
        return self.num_tokens - self.num_prompt

    @property
    def num_own(self) -> int:
        """How many tokens it holds beside its parent's."""
        return self.num_tokens - (0 if self.parent is None else self.parent.num_tokens)

    def add(self, answer: Answer) -> None:
        """Append what one engine call sampled."""
        completion = answer.completion
        if not completion.json and len(completion.ids):
            completion.json = ids_json(completion.ids)
        self.answers.append(answer)
        if completion.json:
            self._pieces.append(completion.json)
        self.num_tokens += len(completion.ids)
        self._known = tuple(
            known if getattr(completion, of) is None else self.num_tokens - 1
            for known, of in zip(self._known, REPLAY.values(), strict=True)
        )

    def sampled(self) -> TokenIds:
        """Return what its own calls sampled.

        Shape: [C]
        """
        parts = [answer.completion.ids for answer in self.answers]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else empty_ids()

    def window(self, stop_ids: Sequence[int]) -> TokenIds:
        """Return the tail of what the engine saw before `sampled`, as `Trajectory.window` does.

        It begins at the last id that closes a turn, or is everything where there is none.
        """
        parts: list[TokenIds] = []
        for ids in self._back():
            at = last_of(ids, stop_ids)
            if at >= 0:
                parts.append(ids[at:])
                break
            parts.append(ids)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts[::-1]) if parts else empty_ids()

    def request(self, replay: bool = False) -> RequestIds:
        """Return the ids of the next call: the JSON of every part, none encoded again.

        Args:
            replay: ask for routed experts, from the first row that is not there yet.
        """
        parts = [context._pieces for context in self._up()]
        start = None
        if replay:
            start = next((known for known in self._known if known is not None), 0)
        pieces = tuple(chain.from_iterable(reversed(parts)))
        return RequestIds(pieces, self.num_tokens, start)

    def _up(self) -> Iterator[Context]:
        """Yield this context and all in front of it, the root's last."""
        held: Context | None = self
        while held is not None:
            yield held
            held = held.parent

    def _back(self) -> Iterator[TokenIds]:
        """Yield the parts of ids in front of the sampled ones, the last one first."""
        for context in self._up():
            if context is not self:
                for answer in reversed(context.answers):
                    yield answer.completion.ids
            yield context.observed.ids
