"""Small builders of valid records; a test names only what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollstream.errors import Status, StopReason
from rollstream.group import PromptGroup, sample_index
from rollstream.queue.calls import Arg
from rollstream.sample import Call, Sample


def budgets(**changes: Arg) -> dict[str, Arg]:
    """Budgets for `calls.open_run`."""
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


def prompt_group(group_index: int = 0, n: int = 2, **changes: Any) -> PromptGroup:
    """A prompt group."""
    fields: dict[str, Any] = {"prompt": "What is 1+7?", "label": "8", **changes}
    return PromptGroup(group_index=group_index, n=n, **fields)


def engine_call(start: int, end: int, **changes: Any) -> Call:
    """A call that sampled tokens[start:end] under version 0."""
    fields: dict[str, Any] = {
        "rid": "0" * 32,
        "engine": "http://engine",
        "finish": "stop",
        "versions": [(0, start, end)],
        "dispatched_version": 0,
        "sampling": {"temperature": 1.0, "sampling_seed": 7},
        **changes,
    }
    return Call(start=start, end=end, **fields)


def sample(
    group_index: int = 0,
    member: int = 0,
    *,
    prompt_ids: Sequence[int] = (3838, 374),
    response_ids: Sequence[int] = (23, 151645),
    observed_ids: Sequence[int] = (),
    reward: Any = 1.0,
    stop_reason: StopReason = StopReason.STOP,
    status: Status = Status.COMPLETED,
    **changes: Any,
) -> Sample:
    """A finished sample of one call, then observed tokens; it validates."""
    num_prompt, num_sampled = len(prompt_ids), len(response_ids)
    length = num_sampled + len(observed_ids)
    mask = np.zeros(length, dtype=np.uint8)
    mask[:num_sampled] = 1
    log_probs = np.zeros(length, dtype=np.float32)
    log_probs[:num_sampled] = -0.5
    index = sample_index(group_index, member)
    fields: dict[str, Any] = {
        "group_index": group_index,
        "member": member,
        "index": index,
        "rollout_id": index,
        "prompt": "What is 1+7?",
        "label": "8",
        "tokens": np.array([*prompt_ids, *response_ids, *observed_ids], dtype=np.int32),
        "response": "8<|im_end|>",
        "response_length": length,
        "loss_mask": mask,
        "rollout_log_probs": log_probs,
        "calls": [engine_call(num_prompt, num_prompt + num_sampled)],
        "weight_versions": [0],
        "status": status,
        "stop_reason": stop_reason,
        "reward": reward,
        **changes,
    }
    return Sample(**fields)
