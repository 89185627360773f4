"""Long texts in a thread, short ones on the spot.

Owns that one decision for the event loop. Never renders or decodes by itself.
Invariant: the loop is held for a few milliseconds at most. A thread for every bridge would cost
14 to 20 % of a worker; the tokenizer's long calls release the GIL, so only those go to one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollstream.sample import Message, Prompt, TokenIds

from .bounded import in_thread
from .tito.load import render_prompt
from .tito.tokenizer import LONG_IDS, LONG_TEXT_CHARS
from .types import PromptIds, Renderer


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
    if num_chars(new_messages) <= LONG_TEXT_CHARS:
        return renderer.extend(window, completion, new_messages, tools)
    return await in_thread(renderer.extend, window, completion, new_messages, tools)


async def render(renderer: Renderer, prompt: Prompt, tools: list[Message] | None) -> PromptIds:
    """Return `render_prompt(...)`.

    Raises:
        ValueError: as `render_prompt`.
    """
    length = len(prompt) if isinstance(prompt, str) else num_chars(prompt)
    if length <= LONG_TEXT_CHARS:
        return render_prompt(renderer, prompt, tools)
    return await in_thread(render_prompt, renderer, prompt, tools)


async def decode(renderer: Renderer, ids: TokenIds) -> str:
    """Return `renderer.decode(ids)`; give it to `Trajectory.write_to(response=…)`."""
    if len(ids) <= LONG_IDS:
        return renderer.decode(ids)
    return await in_thread(renderer.decode, ids)


def num_chars(messages: Sequence[Message]) -> int:
    """Return how much text a renderer would have to encode for `messages`, roughly."""
    total = 0
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            total += len(text) if isinstance(text, str) else 0
    return total
