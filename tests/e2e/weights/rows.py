"""The prompts: sums, each of them another one. Row i is the same in every process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.chaos.rows import answer_of, question_of
from tests.e2e.weights.scenes import Scene

TEMPERATURES = (1.0, 0.7)
HELD_OUT = 100_000
"""Evaluations ask rows from here on."""

__all__ = ["HELD_OUT", "evaluation_rows", "question_of", "write_rows"]


def write_rows(folder: Path, scene: Scene, evaluated: int) -> tuple[Path, Path]:
    """Write what the producer reads, and what the engines answer from; return both paths."""
    trained = [_row(row) for row in range(scene.rows)]
    held_out = [_row(HELD_OUT + row) for row in range(scene.evaluations * evaluated)]
    source, answers = folder / "rows.jsonl", folder / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in trained))
    answers.write_text("".join(json.dumps(row) + "\n" for row in (*trained, *held_out)))
    return source, answers


def _row(row: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question_of(row)}],
        "label": answer_of(row),
        "metadata": {"row": row},
        "sampling": {"temperature": TEMPERATURES[row % len(TEMPERATURES)]},
    }


def evaluation_rows(scene: Scene, number: int, count: int) -> list[dict[str, Any]]:
    """Return the prompts of one evaluation."""
    first = HELD_OUT + number * count
    return [{**_row(row), "sampling": {}} for row in range(first, first + count)]
