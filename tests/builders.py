"""Small builders of records for tests; append here, never rewrite what others use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollstream.errors import STATUS_OF, StopReason
from rollstream.group import FinishedGroup, Missing, PromptGroup, Trajectory, sample_index
from rollstream.queue.calls import Arg
from rollstream.sample import Call, Sample


def a_sample(
    group_index: int = 0,
    member: int = 0,
    *,
    prompt_ids: Sequence[int] = (1, 2, 3),
    turns: Sequence[tuple[Sequence[int], Sequence[int]]] = (((4, 5), ()),),
    versions: Sequence[int] | int = 0,
    reward: Any = 1.0,
    stop_reason: StopReason = StopReason.STOP,
    temperature: float = 1.0,
    **fields: Any,
) -> Sample:
    """Return a valid sample: after the prompt, `turns` of (sampled ids, observed ids).

    The log-prob of a sampled id is -id / 1000, so a test can tell which one stands where.
    """
    tokens: list[int] = list(prompt_ids)
    mask: list[int] = []
    log_probs: list[float] = []
    calls: list[Call] = []
    per_turn = [versions] * len(turns) if isinstance(versions, int) else list(versions)
    for turn, (sampled, observed) in enumerate(turns):
        start, end = len(tokens), len(tokens) + len(sampled)
        calls.append(
            Call(
                rid=f"{group_index:08x}{member:08x}{turn:016x}",
                engine="http://engine",
                start=start,
                end=end,
                finish="stop",
                versions=[(per_turn[turn], start, end)],
                dispatched_version=per_turn[turn],
                sampling={"temperature": temperature, "seed": turn},
            )
        )
        tokens += [*sampled, *observed]
        mask += [1] * len(sampled) + [0] * len(observed)
        log_probs += [-i / 1000 for i in sampled] + [0.0] * len(observed)
    index = sample_index(group_index, member)
    known: dict[str, Any] = {
        "group_index": group_index,
        "member": member,
        "index": index,
        "rollout_id": index,
        "prompt": "a prompt",
        "tokens": np.array(tokens, dtype=np.int32),
        "response_length": len(mask),
        "loss_mask": np.array(mask, dtype=np.uint8),
        "rollout_log_probs": np.array(log_probs, dtype=np.float32),
        "calls": calls,
        "status": STATUS_OF[stop_reason],
        "stop_reason": stop_reason,
        "reward": reward,
        "sampling": {"temperature": temperature},
    }
    sample = Sample(**(known | fields))
    sample.derive_weight_versions()
    sample.validate()
    return sample


def a_group(
    group_index: int = 0,
    samples: Sequence[Trajectory] | None = None,
    *,
    missing: Sequence[Missing] = (),
    **fields: Any,
) -> FinishedGroup:
    """Return a finished group; two samples with the rewards 0 and 1 where none are given."""
    if samples is None:
        samples = [a_sample(group_index, member, reward=float(member)) for member in (0, 1)]
    return FinishedGroup(group_index, "default", list(samples), list(missing), **fields)


def a_prompt(group_index: int = 0, n: int = 2, **fields: Any) -> PromptGroup:
    """Return a prompt group as a producer enqueues it."""
    known: dict[str, Any] = {"prompt": "What is 1+7?", "label": "8"}
    return PromptGroup(group_index=group_index, n=n, **(known | fields))


def budgets(**changes: Arg) -> dict[str, Arg]:
    """Return the budgets that `calls.open_run` takes."""
    return {
        "lease_ms": 15_000,
        "cap": 512,
        "W": 65_536,
        "max_attempts": 3,
        "max_crashes": 4,
        "max_requeues": 1,
        "max_stale": -1,
        "max_body": 16 << 20,
        **changes,
    }
