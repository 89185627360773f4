"""Long texts in a thread, short ones on the spot.

Owns that one decision for the event loop. Never renders or decodes by itself.
Invariant: the loop is held for a few milliseconds at most. A thread for every bridge would cost
14 to 20 % of a worker; the tokenizer's long calls release the GIL, so only those go to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rollstream.sample import Message, Prompt, TokenIds

from .bounded import in_thread
from .tito.load import render_prompt
from .tito.tokenizer import LONG_IDS, LONG_TEXT_CHARS
from .types import PromptIds, Renderer

T = TypeVar("T")

MESSAGE_CHARS = 64
"""A message costs as much as so many characters, whatever is in it."""


async def extend(
    renderer: Renderer,
    window: TokenIds,
    completion: TokenIds,
    new_messages: Sequence[Message],
    tools: Sequence[Message] | None,
) -> TokenIds:
    """Return `renderer.extend(...)`.

    Raises:
        MergeFault: as `Renderer.extend`.
    """
    return await call(
        is_long(new_messages), renderer.extend, window, completion, new_messages, tools
    )


async def render(renderer: Renderer, prompt: Prompt, tools: list[Message] | None) -> PromptIds:
    """Return `render_prompt(...)`.

    Raises:
        ValueError: as `render_prompt`.
    """
    long = len(prompt) > LONG_TEXT_CHARS if isinstance(prompt, str) else is_long(prompt)
    return await call(long, render_prompt, renderer, prompt, tools)


async def decode(renderer: Renderer, ids: TokenIds) -> str:
    """Return `renderer.decode(ids)`; give it to `Trajectory.write_to(response=…)`."""
    if len(ids) <= LONG_IDS:
        return renderer.decode(ids)
    return await in_thread(renderer.decode, ids)


async def call(long: bool, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, called in a thread where it takes `long`."""
    return await in_thread(function, *args) if long else function(*args)


def is_long(messages: Sequence[Message], more_chars: int = 0) -> bool:
    """Return whether a renderer has so much to do for `messages` that it belongs in a thread.

    It looks at no more of them than it takes to know.

    Args:
        messages: content, reasoning and the arguments of calls count, and each by itself.
        more_chars: of what else is rendered: tool specs.
    """
    left = LONG_TEXT_CHARS - more_chars
    for message in messages:
        left -= MESSAGE_CHARS + (_num_chars(message) if isinstance(message, dict) else 0)
        if left < 0:
            return True
    return left < 0


def _num_chars(message: Message) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else (content,)
    total = 0
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        total += len(text) if isinstance(text, str) else 0
    if message.get("role") != "assistant":
        return total
    for name in ("reasoning_content", "reasoning"):
        text = message.get(name)
        total += len(text) if isinstance(text, str) else 0
    calls = message.get("tool_calls")
    for entry in calls if isinstance(calls, list) else ():
        function = entry.get("function") if isinstance(entry, dict) else None
        given = function.get("arguments") if isinstance(function, dict) else None
        total += len(given) if isinstance(given, str) else LONG_TEXT_CHARS * isinstance(given, dict)
    return total
