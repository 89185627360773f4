"""The prompts of the chaos run: sums, each of them another one, as a file of JSON lines.

Owns the text of every row. Never random: row i is the same in every process, so an auditor knows
what group i was asked.
"""

from __future__ import annotations

import json
from pathlib import Path


def question_of(row: int) -> str:
    """Return the problem of a row."""
    return (
        f"Problem {row}: a box holds {row + 3} pens, and {row % 89 + 2} more are put in. How many?"
    )


def answer_of(row: int) -> str:
    """Return its answer."""
    return str(row + 3 + row % 89 + 2)


def write_rows(path: Path, num_rows: int) -> None:
    """Write the file that the producer reads and the engine answers from."""
    with path.open("w") as file:
        for row in range(num_rows):
            prompt = [{"role": "user", "content": question_of(row)}]
            file.write(json.dumps({"prompt": prompt, "label": answer_of(row)}) + "\n")
