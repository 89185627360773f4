"""The scenes of the proof, and the sizes that they share. Never starts anything."""

from __future__ import annotations

import dataclasses
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
LEASE_S = 3.0
MAX_NEW_TOKENS, MAX_RESPONSE, MAX_CONTEXT = 320, 20_000, 24_000
MAX_TURNS = 12
LATENCY_S, TOKEN_S = 0.02, 0.001
"""Of the engines: a reply takes some 80 ms, so that clients can leave in its middle."""
STALL_S = 60.0
SESSIONS = 500
WENT_ON = "a reply that was cut was gone on from"
FOLDER, SEED, TREE = "AGENTS_FOLDER", "AGENTS_SEED", "AGENTS_TREE"
"""What agents are told by the environment."""


class Protocol(StrEnum):
    """What the workers speak to the engines."""

    SGLANG = "sglang"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Scene:
    """One run of the service, and the policies of its sessions."""

    name: str
    protocol: Protocol
    kind: Literal["linear", "tree"]
    policy: str
    """`gateway.on_divergence` of linear sessions, `gateway.picker` of trees."""
    partial: bool
    """`weights.partial`: whether a stopped reply goes on."""
    groups: int
    kills: int = 1

    @property
    def sessions(self) -> int:
        """Samples that are asked for."""
        return self.groups * SAMPLES_A_GROUP


SCENES = (
    Scene("sglang-linear", Protocol.SGLANG, "linear", "keep_prefix", False, 0),
    Scene("vllm-fork", Protocol.VLLM, "linear", "fork", True, 0),
    Scene("sglang-tree", Protocol.SGLANG, "tree", "drop_retries", True, 0),
    Scene("vllm-tree-all", Protocol.VLLM, "tree", "all", False, 0),
)


def full_scenes(sessions: int) -> list[Scene]:
    """Return a linear and a tree scene of each protocol; `sessions` are of all together."""
    groups = -(-sessions // (len(SCENES) * SAMPLES_A_GROUP))
    return [dataclasses.replace(scene, groups=groups) for scene in SCENES]


def quick_scenes(sessions: int = 48) -> list[Scene]:
    """Return one linear and one tree scene, with both protocols between them."""
    groups = -(-sessions // (2 * SAMPLES_A_GROUP))
    linear, _, tree, _ = SCENES
    return [
        dataclasses.replace(linear, groups=groups),
        dataclasses.replace(tree, name="vllm-tree", protocol=Protocol.VLLM, groups=groups, kills=0),
    ]
