"""Functions of a user, as the configuration names them."""

from __future__ import annotations

import asyncio
from typing import Any

LIMIT = 3


async def generate(given: Any) -> Any:
    return given


def not_async(given: Any) -> Any:
    return given


async def two(first: Any, second: Any) -> Any:
    return first, second


async def reward(sample: Any) -> float:
    await asyncio.sleep(0)
    return float(len(sample.metadata["final_text"]))


def reward_of_both(sample: Any) -> dict[str, Any]:
    return {"accuracy": True, "length": sample.response_length, "note": "fine"}


def lookup(word: str, limit: int = LIMIT) -> str:
    """Look a word up.

    Args:
        word: to look up.
        limit: how many entries.
    """
    return f"{word}:{limit}"
