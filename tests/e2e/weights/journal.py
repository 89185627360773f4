"""Lines that several processes write side by side, and that survive a kill.

Owns the format: one JSON object a line, one file a process, appended whole. Never judges.
Invariant: a line without its end was never written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.weights.record import Attempt, EngineCall, Execution, Record


class Journal:
    """What one process writes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, event: str, **fields: Any) -> None:
        """Append one line; it is the kernel's when this returns."""
        self._file.write(json.dumps({"event": event, **fields}).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def lines(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield every whole line of some files."""
    for path in paths:
        for raw in path.read_bytes().split(b"\n")[:-1]:
            line: dict[str, Any] = json.loads(raw)
            yield line


def read_workers(folder: Path, record: Record) -> None:
    """Add what the workers' journals say."""
    for line in lines(sorted(folder.glob("worker-*.jsonl"))):
        event = line.pop("event")
        if event == "begin":
            record.attempts[line["id"]] = Attempt(**line)
        elif event == "tool":
            record.executions.append(Execution(**line))
        elif event == "call":
            record.pid_of[line["rid"]] = line["pid"]
        elif event == "end":
            record.attempts[line["id"]].ended = line["how"]


def read_engines(folder: Path, record: Record) -> None:
    """Add what the engines' journals say."""
    for line in lines(sorted(folder.glob("engine-*.jsonl"))):
        rid = line["rid"]
        if line["event"] == "start":
            record.engine_calls[rid] = EngineCall(rid, line["at_s"])
        elif rid in record.engine_calls:
            call = record.engine_calls[rid]
            call.ended_s = line["at_s"]
            call.num_tokens, call.finish = line.get("num_tokens"), line.get("finish", "")
