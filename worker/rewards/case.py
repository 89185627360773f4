"""One sample before its judge: the sample, its last turn as text, and the number of the try.

Owns `Case` and how a reply is read from ids. Never scores. Invariant: a long reply is read in a
thread; the loop goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from rollstream.sample import Sample

from ..bounded import in_thread
from ..types import Renderer
from .answers import final_message, final_turn_ids
from .hub import Reply

LONG_TOKENS = 16_384
"""A turn of more is read in a thread: ten milliseconds of decoding and parsing."""
LONG_CHARS = 65_536
"""A longer text is judged in a thread: some ten milliseconds."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Case:
    """What a judge is given."""

    sample: Sample
    reply: Reply
    attempt: int = 0
    """0 is the first time it is asked."""


Judge: TypeAlias = Callable[[Case], Awaitable[Any]]
"""Returns a reward, checked by nobody yet, or raises a `RewardFault`."""


async def computed(function: Callable[..., T], reply: Reply, *args: Any) -> T:
    """Return what a function of ours makes of a reply, in a thread where that is long."""
    if max(len(reply.text), len(reply.whole)) > LONG_CHARS:
        return await in_thread(function, reply, *args)
    return function(reply, *args)


async def reply_of(sample: Sample, renderer: Renderer, *, whole: bool) -> Reply:
    """Return the last turn of a sample.

    Args:
        sample: whose last turn it is.
        renderer: of the run.
        whole: whether the turn as it was sampled is needed, too; that decodes it once more.
    """
    if len(final_turn_ids(sample)) > LONG_TOKENS:
        return await in_thread(_read, sample, renderer, whole)
    return _read(sample, renderer, whole)


def _read(sample: Sample, renderer: Renderer, whole: bool) -> Reply:
    message = final_message(sample, renderer)
    text = "" if message is None else message.content
    return Reply(
        text=text,
        label=sample.label,
        metadata=sample.metadata,
        whole=renderer.decode(final_turn_ids(sample)) if whole else "",
        reasoned=bool(message is not None and message.reasoning and text.strip()),
    )
