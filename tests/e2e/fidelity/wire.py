"""What went over HTTP, read back from the bytes that `debug.wire_dir` keeps.

Owns a reading of its own: the standard library's JSON and nothing of the worker. Never judges.
Invariant: a call that this returns was answered with HTTP 200's frame, whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.sample import LogProbs, TokenIds


@dataclass(frozen=True, slots=True)
class WireCall:
    """One request and its reply."""

    rid: str
    input_ids: TokenIds
    """What the engine was sent."""
    sampling: dict[str, Any]
    """`sampling_params` of the request."""
    output_ids: TokenIds
    log_probs: LogProbs
    finish: str
    versions: list[tuple[int, int, int]]
    """[(version, start, end)] over the output."""
    cached_tokens: int
    prompt_tokens: int | None
    """How many the engine says it saw."""


class WireFolder:
    """A folder of `<rid>.req` and `<rid>.rep`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, rid: str) -> WireCall | None:
        """Return a call, None where it has no answer with tokens."""
        try:
            request = json.loads((self.folder / f"{rid}.req").read_bytes())
            reply = json.loads((self.folder / f"{rid}.rep").read_bytes())
            meta = reply["meta_info"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        entries = meta["output_token_logprobs"]
        return WireCall(
            rid=request["rid"],
            input_ids=np.array(request["input_ids"], dtype=np.int32),
            sampling=request["sampling_params"],
            output_ids=np.array([entry[1] for entry in entries], dtype=np.int32),
            log_probs=np.array([entry[0] for entry in entries], dtype=np.float64).astype(
                np.float32
            ),
            finish=meta["finish_reason"]["type"],
            versions=[
                (int(span["version"]), span["start"], span["end"])
                for span in meta["weight_versions"]
            ],
            cached_tokens=meta.get("cached_tokens") or 0,
            prompt_tokens=meta.get("prompt_tokens"),
        )

    def rids(self, kind: str = ".rep") -> set[str]:
        """Return the ids of which there is a file of a kind."""
        if not self.folder.is_dir():
            return set()
        return {e.name.removesuffix(kind) for e in os.scandir(self.folder) if e.name.endswith(kind)}

    def in_flight(self) -> list[str]:
        """Return the ids of requests without an answer yet."""
        return sorted(self.rids(".req") - self.rids(".rep"))

    def aborted(self) -> int:
        """Return how many answers were aborted."""
        found = (self.call(rid) for rid in self.rids())
        return sum(call is not None and call.finish == "abort" for call in found)
