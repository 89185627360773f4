"""The year and the temperature: two tools and the replies of conversations about them."""

from __future__ import annotations

from typing import Any

from tests.generate_stage import Says
from worker.tools import FunctionTool
from worker.types import Tool

QUESTION = [{"role": "user", "content": "What is 42 + year + temperature?"}]
TURN_1 = (
    "Let me get the year and the temperature first.\n"
    '<tool_call>\n{"name": "get_year", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_temperature", "arguments": {"location": "Mars"}}\n</tool_call>'
    "<|im_end|>"
)
TURN_2_OF_3 = (
    "And on Earth?\n"
    '<tool_call>\n{"name": "get_temperature", "arguments": {"location": "Earth"}}\n</tool_call>'
    "<|im_end|>"
)
FINAL = "The answer is: 42 + 2026 + -60 = 2008.<|im_end|>"
FINAL_OF_3 = "The answer is: 42 + 2026 + -60 + 15 = 2023.<|im_end|>"
OBSERVED_1 = (
    "\n<|im_start|>user\n"
    '<tool_response>\n{"year": 2026}\n</tool_response>\n'
    '<tool_response>\n{"temperature": -60}\n</tool_response><|im_end|>\n'
    "<|im_start|>assistant\n"
)
OBSERVED_2 = (
    "\n<|im_start|>user\n"
    '<tool_response>\n{"temperature": 15}\n</tool_response><|im_end|>\n'
    "<|im_start|>assistant\n"
)


async def get_year() -> dict[str, int]:
    """Return the current year."""
    return {"year": 2026}


async def get_temperature(location: str) -> dict[str, int]:
    """Return the temperature.

    Args:
        location: Mars or Earth.
    """
    return {"temperature": {"Mars": -60, "Earth": 15}[location]}


def tools() -> dict[str, Tool]:
    """Return both tools."""
    return {f.__name__: FunctionTool(f) for f in (get_year, get_temperature)}


def says(renderer: Any, text: str, **fields: Any) -> Says:
    """Return a reply of this text, whose control strings are their ids."""
    ids = renderer.encode_raw(text).tolist()
    return Says(ids, matched=ids[-1] if text.endswith("<|im_end|>") else None, **fields)
