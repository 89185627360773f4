"""The prompts of the proof: plain questions, histories with calls, and text that looks like markup.

Owns the rows. Never reads a file. Invariant: the same number and seed give the same rows.
"""

from __future__ import annotations

import random
from typing import Any

from rollstream.sample import Message

_WORDS = ("apples", "né 🙂", "日本語", "<|im_end|>", "</tool_call>", "x\r\n\ty", "…", "naïve")


def prompts(count: int, seed: int) -> list[list[Message]]:
    """Return `count` conversations that end with a user's message or a tool's."""
    draw = random.Random(seed)
    return [_prompt(draw, number) for number in range(count)]


def _prompt(draw: random.Random, number: int) -> list[Message]:
    first, second = draw.randrange(1000), draw.randrange(1000)
    word = _WORDS[number % len(_WORDS)]
    asked = {"role": "user", "content": f"What is {first} + {second} {word}? ({number})"}
    kind = number % 4
    if kind == 0:
        return [asked]
    if kind == 1:
        return [{"role": "system", "content": f"Be brief. {word}"}, asked]
    call = {"name": "add", "arguments": {"a": first, "b": second}}
    told: list[Message] = [
        asked,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": f"{first + second} {word}"},
    ]
    if kind == 2:
        return told
    answered = {"role": "assistant", "content": f"It is {first + second}."}
    return [*told, answered, {"role": "user", "content": f"And without {word}?"}]


def temperature_of(number: int, temperatures: tuple[float, ...]) -> float:
    """Return the temperature of a prompt's samples."""
    return temperatures[(number + number // 4) % len(temperatures)]


def as_rows(
    count: int, seed: int, temperatures: tuple[float, ...], samples: int
) -> list[dict[str, Any]]:
    """Return the same as rows of a producer's file, so many samples of each."""
    return [
        {
            "prompt": prompt,
            "n": samples,
            "sampling": {"temperature": temperature_of(number, temperatures)},
        }
        for number, prompt in enumerate(prompts(count, seed))
    ]
