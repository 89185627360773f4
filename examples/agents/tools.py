"""The one tool of the examples, and the task out of a prompt.

Owns what the agents beside it share. Never talks to a model.
"""

from __future__ import annotations

import json
from typing import Any

from worker.tools.calculator import calculate

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def compute(arguments: str | dict[str, Any]) -> str:
    """Run one call of the calculator; what is wrong with it is a text for the model."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return calculate(str(given["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def as_messages(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row's prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def task_of(prompt: str | list[dict[str, Any]]) -> str:
    """Return a row's prompt as one text."""
    return str(as_messages(prompt)[-1]["content"])
