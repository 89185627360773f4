"""What the agents and the engines wrote, read back into a record.

Owns the reading. Never judges. Invariant: a line without its end was never written.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.e2e.agents.record import Attempt, EngineCall, Record, Try
from tests.e2e.weights.journal import lines


def read_agents(folder: Path, record: Record) -> None:
    """Add what every attempt wrote."""
    for path in sorted(folder.glob("attempt-*.jsonl")):
        attempt: Attempt | None = None
        tries: dict[int, Try] = {}
        for line in lines([path]):
            event = line.pop("event")
            if event == "begin":
                attempt = Attempt(**line)
                record.attempts[attempt.nonce] = attempt
            assert attempt is not None, path
            if event == "sent":
                one = Try(**line)
                tries[one.n] = one
                attempt.tries.append(one)
            elif event == "step":
                attempt.steps.append(line["kind"])
            elif event == "end":
                attempt.ended_s, attempt.stopped = line["at_s"], line["stopped"]
            elif event in ("got", "lost", "left", "unsent"):
                one = tries[line["n"]]
                one.how, one.status = event, line["status"]
                one.raw, one.at_s = line["raw"], line["at_s"]


def read_engines(folder: Path, record: Record) -> None:
    """Add what the engines' doors saw."""
    for line in lines(sorted(folder.glob("engine-*.jsonl"))):
        rid = line["rid"]
        if line["event"] == "start":
            record.engine_calls[rid] = EngineCall(
                rid, np.array(line["ids"], dtype=np.int32), line["sampling"], line["stream"],
                line["at_s"],
            )  # fmt: skip
        else:
            call = record.engine_calls[rid]
            call.ended_s, call.num_tokens = line["at_s"], line["num_tokens"]
            call.finish = line["finish"]
