"""The scenes of the proof, and the sizes that they share. Never starts anything."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = ROOT / ".cache" / "qwen3" / "tokenizer.json"
NUM_WORKERS, NUM_ENGINES = 2, 2
CONCURRENCY = 12
"""Samples in flight at each worker."""
SAMPLES_A_GROUP = 2
GROUPS_A_BATCH = 6
CAPACITY = 24
"""Groups that may be live at once: four batches, so a group may see several updates."""
LEASE_S = 3.0
MAX_NEW_TOKENS, MAX_RESPONSE, MAX_CONTEXT = 80, 400, 4096
MAX_TURNS = 4
TOKEN_S = 0.004
"""An engine samples no token faster."""
STALL_S = 60.0
UPDATES_A_MODE = 50
"""What the full proof makes at least, in each mode."""

Mode = Literal["keep", "abort"]


class Protocol(StrEnum):
    """What the workers speak to the engines."""

    SGLANG = "sglang"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Scene:
    """One run of the service, and what its trainer does to it."""

    name: str
    protocol: Protocol
    partial: bool
    updates: dict[Mode, int]
    """How many updates of each mode, the first mode first."""
    weights_mode: Literal["async", "on_policy", "colocated"] = "async"
    max_staleness: int = -1
    """As configured; `bound` is what holds."""
    on_stale: Literal["drop", "requeue", "deliver"] = "drop"
    mask_offpolicy: bool = False
    labels: bool = False
    """The engines have names of their own for the versions, as `step-7`."""
    kills: int = 0
    """How often a worker is killed."""
    stops: int = 0
    """How often a worker is asked to end (SIGTERM), and started again."""
    restarts: int = 0
    """How often an engine begins anew, with the weights that it had at first."""
    submission: Literal["sample", "group"] = "sample"
    moves: bool = False
    """Once the trainer names one engine alone, and later all of them again."""
    evaluations: int = 2

    @property
    def num_updates(self) -> int:
        """Of both modes."""
        return sum(self.updates.values())

    @property
    def bound(self) -> int | None:
        """How stale a group may be when it is handed out; None is unbounded."""
        if self.weights_mode != "async":
            return 0
        if self.max_staleness < 0 or self.on_stale == "deliver":
            return None
        return self.max_staleness

    @property
    def rows(self) -> int:
        """Prompts in the source: a batch an update, two more, and what may be dropped as stale."""
        spare = self.num_updates // 2 if self.on_stale == "drop" else 0
        return (self.num_updates + 2 + spare) * GROUPS_A_BATCH

    @property
    def modes(self) -> list[Mode]:
        """The mode of each update."""
        return [mode for mode, count in self.updates.items() for _ in range(count)]

    def label_of(self, version: int) -> str:
        """Return what the engines call a version; before their first update none has a name."""
        if version == 0:
            return "default"
        return f"step-{version}" if self.labels else str(version)


def full_scenes(updates: int) -> list[Scene]:
    """Return protocol x partial, each with both modes, and the two modes without staleness.

    `updates` is of each mode, over the four large scenes together.
    """
    share = -(-updates // 4)
    both: dict[Mode, int] = {"keep": share, "abort": share}
    few: dict[Mode, int] = {"abort": max(2, share // 3)}
    return [
        Scene("sglang", Protocol.SGLANG, False, both, max_staleness=2, on_stale="drop", kills=1,
              restarts=1),
        Scene("sglang-partial", Protocol.SGLANG, True, both, max_staleness=3, on_stale="requeue",
              stops=1, restarts=1),
        Scene("vllm", Protocol.VLLM, False, both, max_staleness=2, on_stale="requeue",
              labels=True, stops=1, moves=True),
        Scene("vllm-partial", Protocol.VLLM, True, both, on_stale="deliver", max_staleness=1,
              mask_offpolicy=True, kills=1, restarts=1),
        Scene("on-policy", Protocol.SGLANG, True, few, weights_mode="on_policy",
              on_stale="requeue", labels=True),
        Scene("colocated", Protocol.VLLM, False, few, weights_mode="colocated",
              on_stale="requeue", evaluations=1, submission="group", kills=1),
    ]  # fmt: skip


def quick_scenes() -> list[Scene]:
    """Return one short run, with everything in it that a short run can have."""
    both: dict[Mode, int] = {"keep": 2, "abort": 3}
    return [
        Scene("vllm-partial", Protocol.VLLM, True, both, max_staleness=3, on_stale="requeue",
              mask_offpolicy=True, labels=True, evaluations=1)
    ]  # fmt: skip
