"""The auditor of the chaos run: recomputes every token of every group that a trainer was handed.

    python -m tests.e2e.chaos.auditing FOLDER TOKENIZER ANSWERS

Owns the reading of `handed-out-*.bin` while trainers write them, and `audit.json` at the end (once
the file `over` exists). Never talks to Redis, an engine or a trainer: `examples.demo.auditor` has
a policy of its own. Invariant: a record that a kill cut in half is no record.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from examples.demo.auditor import Auditor, Recomputed
from rollstream.group import PromptGroup
from rollstream.sample import Prompt
from rollstream.wire import decode_body
from tests.e2e.chaos.options import MAX_SENTENCES
from tests.e2e.chaos.rows import question_of
from worker.engines.sim.script import PolicyConfig

POLL_S = 0.2
NICE = 10
"""The auditor must not take time from what it audits."""


@dataclass
class _Tail:
    """One file that grows."""

    path: Path
    offset: int = 0
    unpacker: Any = field(default_factory=lambda: msgpack.Unpacker(raw=False))

    def new_records(self) -> list[Any]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        self.offset += len(data)
        self.unpacker.feed(data)
        return list(self.unpacker)


class Audit:
    """Audits one folder."""

    def __init__(self, folder: Path, tokenizer: Path, answers: str) -> None:
        self.folder = folder
        evidence = Recomputed(tokenizer, answers, PolicyConfig(max_sentences=MAX_SENTENCES))
        self.auditor, self._policy = Auditor(evidence), evidence.policy
        self.groups: set[int] = set()
        self._tails: dict[Path, _Tail] = {}

    def step(self) -> int:
        """Audit what came since the last step; return how many groups that were."""
        num = 0
        for path in sorted(self.folder.glob("handed-out-*.bin")):
            tail = self._tails.setdefault(path, _Tail(path))
            for group_index, trajectories in tail.new_records():
                self._check(group_index, trajectories)
                num += 1
        return num

    def _check(self, group_index: int, trajectories: list[tuple[Prompt, bytes]]) -> None:
        question = question_of(group_index)
        self.auditor.questions = {group_index: question}
        for prompt, body in trajectories:
            trajectory = decode_body(body, PromptGroup(group_index, len(trajectories), prompt))
            for leaf in trajectory if isinstance(trajectory, list) else [trajectory]:
                self.auditor.check_sample(leaf)
                asked, _, _ = self._policy.vocabulary.read_prompt(leaf.tokens[: leaf.prompt_length])
                if asked != question:
                    self.auditor.mismatches += 1
                    self.auditor.findings.append(f"{group_index}: its tokens ask {asked[:80]!r}")
        self.groups.add(group_index)

    def report(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "groups": sorted(self.groups),
            "samples": self.auditor.samples,
            "calls": self.auditor.calls,
            "mismatches": self.auditor.mismatches,
            "findings": self.auditor.findings,
        }


def main(folder: Path, tokenizer: Path, answers: str) -> int:
    """Audit until the run is over."""
    os.nice(NICE)
    audit = Audit(folder, tokenizer, answers)
    while True:
        over = (folder / "over").exists()
        if not audit.step():
            if over:
                break
            time.sleep(POLL_S)
    partial = folder / "audit.partial"
    partial.write_text(json.dumps(audit.report()))
    partial.replace(folder / "audit.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
