"""What an environment returned, checked: from any Python value to a step, and to chat messages.

Owns the rules of observations, rewards and infos. Never calls an environment, never cuts a text.
Invariant: whatever it returned is either plain data that can be rendered and stored, or an
`EnvFault` that says what is wrong with it; never another exception. What is not small
(`tools.text.is_small`) is read in a thread, by whoever calls these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from rollstream.errors import EnvFault
from rollstream.sample import Message

from ..functions import describe
from ..tools.text import clean, text_of
from ..types import AssistantMessage, ToolCall

T = TypeVar("T")
MAX_INFO_CHARS = 4096
"""A larger `info` is left out."""
MAX_STATE_CHARS = 1 << 20
"""A larger `state` is refused: it lies in Redis while its sample is parked."""
MAX_MESSAGES = 1024
"""Of one observation."""
_KEPT = ("tool_call_id", "name")


@dataclass(frozen=True, slots=True)
class Step:
    """A step, its observation and its info not looked at yet."""

    observation: Any
    """Of the last step nothing is read."""
    reward: float | None
    done: bool
    info: Any


def step_of(result: Any) -> Step:
    """Return what `step` returned.

    Raises:
        EnvFault: it is no step (`invalid`).
    """
    return _guarded(_step_of, result)


def messages_of(observation: Any, calls: Sequence[ToolCall] = ()) -> list[Message]:
    """Return an observation as the messages that the model reads next, as long as they are.

    Args:
        observation: what the environment gave.
        calls: those that the environment was to answer. Texts become their answers in order; one
            text for several is that of the last.

    Raises:
        EnvFault: it is none (`invalid`).
    """
    return _guarded(_messages_of, observation, calls)


def info_of(info: Any) -> dict[str, Any]:
    """Return an info as it is stored; what cannot be is said in its place.

    Raises:
        EnvFault: it is no dictionary (`invalid`).
    """
    return _guarded(_info_of, info)


def assistant_message(parsed: AssistantMessage) -> Message:
    """Return a reply as an environment gets it; calls with a problem are not in it."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    calls = [call for call in parsed.tool_calls if call.problem is None]
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ]
    return message


def state_of(state: Any) -> Any:
    """Return a state as plain data that a sample can carry.

    Raises:
        EnvFault: it cannot be stored (`invalid`).
    """
    return _guarded(_plain, state, MAX_STATE_CHARS)


def _guarded(function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, which looks at values whose own methods may raise anything."""
    try:
        return function(*args)
    except EnvFault:
        raise
    except Exception as error:
        raise wrong(f"what cannot be read: {describe(error)}") from error


def wrong(what: str) -> EnvFault:
    """Return the fault of an environment that returned what it must not."""
    return EnvFault(f"the environment returned {what}", detail="invalid")


def _step_of(result: Any) -> Step:
    if not isinstance(result, tuple) or len(result) != 4:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise wrong(
            f"{type(result).__name__}{size} from step; it must be StepResult(observation, reward, "
            "done, info), or a tuple of these four"
        )
    observation, reward, done, info = result
    is_done = _scalar(done)
    if not isinstance(is_done, bool):
        raise wrong(f"{type(done).__name__} as done; it must be True or False")
    return Step(observation, _reward(reward), is_done, info)


def _reward(given: Any) -> float | None:
    if given is None:
        return None
    value = _scalar(given)
    if not isinstance(value, bool | int | float):
        raise wrong(f"{type(given).__name__} as reward; it must be a number or None")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise wrong(f"the reward {number}; it must be finite")
    return number


def _scalar(value: Any) -> Any:
    """Return numpy's scalars as Python's."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _info_of(info: Any) -> dict[str, Any]:
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise wrong(f"{type(info).__name__} as info; it must be a dictionary")
    try:
        stored: dict[str, Any] = _plain(dict(info), MAX_INFO_CHARS)
    except Exception as error:  # noqa: BLE001 - its values' own methods may raise anything
        return {"left_out": describe(error)}
    return stored


def _plain(value: Any, most_chars: int) -> Any:
    """Return a copy of `value` of plain values alone."""
    text = text_of({"it": value})
    if len(text) > most_chars:
        raise ValueError(f"{len(text)} characters; {most_chars} are the most")
    plain = json.loads(text)["it"]
    msgpack.packb(plain)  # which takes no number of more than 64 bits
    return plain


def _messages_of(observation: Any, calls: Sequence[ToolCall]) -> list[Message]:
    parts = _parts_of(observation)
    if not calls:
        return [_message(part) for part in parts]
    if all(isinstance(part, str) for part in parts):
        texts = parts if len(parts) > 1 else [""] * (len(calls) - 1) + parts
        parts = [{"role": "tool", "content": text} for text in texts]
    answers = [part for part in parts if isinstance(part, dict) and part.get("role") == "tool"]
    if len(answers) != len(calls):
        raise wrong(f"{len(answers)} answers to {len(calls)} tool calls")
    for answer, call in zip(answers, calls, strict=True):
        answer.setdefault("tool_call_id", call.id)
        answer.setdefault("name", call.name)
    return [_message(part, with_calls=True) for part in parts]


def _parts_of(observation: Any) -> list[Any]:
    """Return an observation as a list of texts and messages."""
    if observation is None or isinstance(observation, str):
        return [observation or ""]
    if isinstance(observation, dict):
        return [dict(observation)]
    if not isinstance(observation, list | tuple):
        raise wrong(
            f"{type(observation).__name__} as observation; it must be text, a message, a list of "
            "them, or None"
        )
    if len(observation) > MAX_MESSAGES:
        raise wrong(f"{len(observation)} messages as one observation")
    for part in observation:
        if not isinstance(part, str | dict):
            raise wrong(f"{type(part).__name__} in an observation; messages and texts may be there")
    return [dict(part) if isinstance(part, dict) else part for part in observation] or [""]


def _message(part: Any, *, with_calls: bool = False) -> Message:
    if isinstance(part, str):
        return {"role": "user", "content": text_of(part)}
    role, roles = part.get("role"), ("user", "system", "tool") if with_calls else ("user", "system")
    if role not in roles:
        raise wrong(f"a message with the role {str(role)[:64]!r}; it may be {' or '.join(roles)}")
    message: Message = {"role": role, "content": text_of(part.get("content"))}
    for name in _KEPT:
        if role == "tool" and isinstance(part.get(name), str):
            message[name] = clean(part[name][:256])
    return message
