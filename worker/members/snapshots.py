"""`debug.messages`: the conversation of every sample, for people, whichever function generated it.

Owns `metadata["messages"]` once a generate function has returned: where the function kept none they
are made of the calls, and whatever is kept is bounded and has a wire form. Never touches a token,
never runs unless `debug.messages` is on. Invariant: a conversation takes at most `MAX_BYTES` or so,
its messages stand in order, and what was left out says how much it was.

Roles: those of the chat; `context` where only the tokens are known and nobody said whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollstream.sample import Call, Message, Sample, TokenIds

from ..bounded import in_thread
from ..generate.rollout import as_messages
from ..offload import decode
from ..tools.text import clean
from ..types import Renderer

KEY = "messages"
MAX_BYTES = 1 << 20
"""Of one sample's conversation; `worker.max_body_bytes` is for all of a result."""
MAX_CHARS = 1 << 16
"""Of one text in it, as long as the whole fits."""
MIN_CHARS = 64
MAX_MESSAGES = 16384
_LONG_MESSAGES = 512
_VALUE_BYTES = 8
_MAX_DEPTH = 32
_INT64 = range(-(1 << 63), 1 << 64)


async def keep_messages(samples: Sequence[Sample], renderer: Renderer) -> None:
    """Give every sample its conversation, bounded.

    Args:
        samples: the leaves of a trajectory, with their prompts and tokens.
        renderer: decodes tokens where a generate function kept no messages.
    """
    for sample in samples:
        messages = sample.metadata.get(KEY)
        if not isinstance(messages, list):
            messages = await _of_calls(sample, renderer)
        if len(messages) > _LONG_MESSAGES:
            messages = await in_thread(bounded, messages)
        else:
            messages = bounded(messages)
        sample.metadata = {**sample.metadata, KEY: messages}


async def _of_calls(sample: Sample, renderer: Renderer) -> list[Message]:
    """Return the prompt, and behind it what was sampled and what was not, as it lies in tokens."""
    messages = as_messages(sample.prompt)
    at = sample.prompt_length
    for start, end in turns_of(sample.calls):
        if start > at:
            messages.append(await _said("context", sample.tokens[at:start], renderer))
        messages.append(await _said("assistant", sample.tokens[start:end], renderer))
        at = end
    if at < len(sample.tokens):
        messages.append(await _said("context", sample.tokens[at:], renderer))
    return messages


def turns_of(calls: Sequence[Call]) -> list[tuple[int, int]]:
    """Return [(start, end)] of the replies; one that was stopped and gone on with is one."""
    turns: list[tuple[int, int]] = []
    for place, call in enumerate(calls):
        if place and calls[place - 1].finish == "abort" and calls[place - 1].end == call.start:
            turns[-1] = (turns[-1][0], call.end)
        else:
            turns.append((call.start, call.end))
    return turns


async def _said(role: str, ids: TokenIds, renderer: Renderer) -> Message:
    if role == "assistant" and len(ids) and int(ids[-1]) in renderer.stop_token_ids:
        ids = ids[:-1]
    return {"role": role, "content": await decode(renderer, ids)}


# --- bounds --------------------------------------------------------------------------------------
def bounded(messages: Sequence[Any]) -> list[Message]:
    """Return messages that fit, as values with a wire form.

    Long texts lose their middle, all by the same rule, until the whole fits; messages at the end go
    only where there are too many for that.
    """
    held, most = messages[:MAX_MESSAGES], MAX_CHARS
    while True:
        cutter = _Cutter(most)
        plain = [cutter.message(message) for message in held]
        sizes = [size for _, size in plain]
        if sum(sizes) <= MAX_BYTES or most <= MIN_CHARS:
            break
        most //= 2
    total, kept = 0, []
    for message, size in plain:
        total += size
        if total > MAX_BYTES:
            break
        kept.append(message)
    if len(kept) < len(messages):
        note = f"… {len(messages) - len(kept)} more messages are not kept"
        kept.append({"role": "context", "content": note})
    return kept


class _Cutter:
    """Makes values plain and short, and adds up what they take."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0

    def message(self, message: Any) -> tuple[Message, int]:
        """Return one message, and about how many bytes it takes."""
        self._size = 0
        plain = self._plain(message, 0)
        if not isinstance(plain, dict):
            plain = {"role": "context", "content": plain}
        return plain, self._size

    def _plain(self, value: Any, depth: int) -> Any:
        self._size += _VALUE_BYTES
        if isinstance(value, str):
            return self._text(value)
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int):
            return value if value in _INT64 else self._text(hex(value))
        if depth < _MAX_DEPTH and (known := self._inner(value, depth + 1)) is not None:
            return known
        return self._text(_repr_of(value))

    def _inner(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {self._text(str(k)): self._plain(v, depth) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item, depth) for item in value]
        return None

    def _text(self, text: str) -> str:
        if len(text) > self._most:
            half, out = self._most // 2, len(text) - self._most // 2 * 2
            text = f"{text[:half]} … {out} characters are not kept … {text[-half:]}"
        text = clean(text)
        self._size += len(text.encode())
        return text


def _repr_of(value: Any) -> str:
    describe: Callable[[Any], str] = repr
    return describe(value) if isinstance(value, bytes) else f"<{type(value).__name__}>"
