"""Rollstream: a rollout service for reinforcement learning of language models.

What producer, worker and trainer share; this module names what users may rely on. Imports nothing
by itself: a name is loaded when it is first used, and then needs redis, msgpack and numpy only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.arrays import TrainArrays
    from rollstream.async_stream import AsyncGroupStream
    from rollstream.batch import Batch
    from rollstream.errors import (
        AgentFault,
        CapacityTooSmall,
        ConfigError,
        ConsumerTaken,
        ContractError,
        DropReason,
        EngineFault,
        EnvFault,
        MemberReason,
        MergeFault,
        PauseNotConfirmed,
        ProducerGone,
        RewardFault,
        RolloutFault,
        RollstreamError,
        RunFailed,
        RunLost,
        RunMismatch,
        Status,
        StopReason,
        StreamError,
        StreamStalled,
        ToolFault,
        WireError,
        WireTooNew,
    )
    from rollstream.evaluation.eval_result import EvalResult
    from rollstream.group import Drop, FinishedGroup, GroupView, Keep, Missing, PromptGroup
    from rollstream.sample import Call, Sample, Span
    from rollstream.stream import GroupStream
    from rollstream.updates.weights import WeightUpdate

__version__ = "0.1.0"

_HOME = {
    "arrays": ("TrainArrays",),
    "async_stream": ("AsyncGroupStream",),
    "batch": ("Batch",),
    "errors": (
        "AgentFault", "CapacityTooSmall", "ConfigError", "ConsumerTaken", "ContractError",
        "DropReason", "EngineFault", "EnvFault", "MemberReason", "MergeFault",
        "PauseNotConfirmed", "ProducerGone", "RewardFault", "RollstreamError", "RolloutFault",
        "RunFailed", "RunLost", "RunMismatch", "Status", "StopReason", "StreamError",
        "StreamStalled", "ToolFault", "WireError", "WireTooNew",
    ),
    "evaluation.eval_result": ("EvalResult",),
    "group": ("Drop", "FinishedGroup", "GroupView", "Keep", "Missing", "PromptGroup"),
    "sample": ("Call", "Sample", "Span"),
    "stream": ("GroupStream",),
    "updates.weights": ("WeightUpdate",),
}  # fmt: skip
"""Public names by the module that has them."""
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AgentFault",
    "AsyncGroupStream",
    "Batch",
    "Call",
    "CapacityTooSmall",
    "ConfigError",
    "ConsumerTaken",
    "ContractError",
    "Drop",
    "DropReason",
    "EngineFault",
    "EnvFault",
    "EvalResult",
    "FinishedGroup",
    "GroupStream",
    "GroupView",
    "Keep",
    "MemberReason",
    "MergeFault",
    "Missing",
    "PauseNotConfirmed",
    "ProducerGone",
    "PromptGroup",
    "RewardFault",
    "RolloutFault",
    "RollstreamError",
    "RunFailed",
    "RunLost",
    "RunMismatch",
    "Sample",
    "Span",
    "Status",
    "StopReason",
    "StreamError",
    "StreamStalled",
    "ToolFault",
    "TrainArrays",
    "WeightUpdate",
    "WireError",
    "WireTooNew",
    "__version__",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'rollstream' has no attribute {name!r}")
    value = getattr(import_module(f"rollstream.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
