"""What a generate function returned, checked and completed.

Owns the shape of a result (`Sample | list[Sample]`) and what is filled in. Never changes a token,
a log-prob or a mask value. Invariant: what leaves here is valid by `Sample.validate`, has a status
that is the one of its stop reason, and belongs to the member that was asked for; anything else is
an `AgentFault` that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from rollstream.errors import STATUS_OF, AgentFault, ContractError, Status, StopReason
from rollstream.group import Trajectory
from rollstream.sample import ARRAY_DTYPES, Sample, TokenIds

from ..functions import describe
from ..types import Finish, GenerateOutput

Decode = Callable[[TokenIds], str]

_REASON_OF_STATUS: dict[Status, StopReason] = {
    Status.COMPLETED: StopReason.STOP,
    Status.TRUNCATED: StopReason.RESPONSE_LENGTH,
    Status.ABORTED: StopReason.ABORT_REQUESTED,
    Status.FAILED: StopReason.AGENT_ERROR,
}
_REASON_OF_FINISH: dict[str, StopReason] = {
    Finish.STOP: StopReason.STOP,
    Finish.LENGTH: StopReason.TURN_LENGTH,
    Finish.ABORT: StopReason.ABORT_WEIGHTS,
}
_DTYPES = [(name, np.dtype(dtype)) for name, dtype in ARRAY_DTYPES.items()]
_BASE_OF = {"i": "integers", "u": "integers", "f": "numbers"}


def finish(pending: Sample, output: GenerateOutput, decode: Decode | None = None) -> Trajectory:
    """Return the checked trajectory of one member: one sample, or its leaves.

    Filled in: whose it is (group_index, member, index, rollout_id), prompt, label, sampling,
    routing key, path of the function, arrays' types, a missing mask, status or stop reason,
    the weight versions, and the response text where `decode` is given.

    Args:
        pending: the sample that the function was given.
        output: what it returned; nothing is known about it.
        decode: ids to text.

    Raises:
        AgentFault: with what is wrong and what is expected.
    """
    leaves = _leaves_of(output)
    for place, leaf in enumerate(leaves):
        where = "the sample" if len(leaves) == 1 else f"leaf {place}"
        try:
            _complete(leaf, pending, decode)
            leaf.validate()
        except (ContractError, ValueError, TypeError) as error:
            raise _wrong(f"{where}: {describe(error)}", "invalid_sample") from error
    return output.samples


def _wrong(what: str, detail: str) -> AgentFault:
    return AgentFault(f"the generate function returned {what}", detail=detail)


def _leaves_of(output: Any) -> list[Sample]:
    if not isinstance(output, GenerateOutput):
        raise _wrong(
            f"{type(output).__name__}; it must return GenerateOutput(sample) or "
            "GenerateOutput([sample, ...])",
            "invalid_output",
        )
    samples: Any = output.samples
    leaves = samples if isinstance(samples, list) else [samples]
    if not leaves:
        raise _wrong("an empty list; a trajectory has at least one sample", "invalid_output")
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Sample):
            raise _wrong(f"{type(leaf).__name__} as sample {place}", "invalid_output")
    if len({id(leaf) for leaf in leaves}) != len(leaves):
        raise _wrong("one sample twice; each leaf is a record of its own", "invalid_output")
    return leaves


def _complete(leaf: Sample, pending: Sample, decode: Decode | None) -> None:
    _claim(leaf, pending)
    for name, dtype in _DTYPES:
        values = getattr(leaf, name)
        # Arrays that are what they should be, as all of ours are, cost one look.
        if values is not None and getattr(values, "dtype", None) is not dtype:
            setattr(leaf, name, _cast(name, values, dtype))
    if leaf.loss_mask is None:
        leaf.loss_mask = (
            leaf.sampled_mask() if leaf.calls else np.zeros(leaf.response_length, dtype=np.uint8)
        )
    _end(leaf)
    if leaf.calls:
        leaf.derive_weight_versions()
    if decode is not None and leaf.response_length and not leaf.response:
        leaf.response = decode(leaf.tokens[-leaf.response_length :])
    if leaf.metadata is not pending.metadata:
        _check_metadata(leaf.metadata)


def _claim(leaf: Sample, pending: Sample) -> None:
    """Make the leaf the asked member's own."""
    for name in ("group_index", "index", "rollout_id"):
        value = getattr(leaf, name)
        if value is not None and value != getattr(pending, name):
            raise ValueError(
                f"{name} is {value}, but sample {pending.group_index}:{pending.member} was asked "
                f"for ({name} {getattr(pending, name)}); leave it unset"
            )
        setattr(leaf, name, getattr(pending, name))
    leaf.member, leaf.attempts = pending.member, pending.attempts
    if not leaf.prompt:
        leaf.prompt = pending.prompt
    for name in ("label", "routing_key", "generate_function_path", "reward_spec"):
        if getattr(leaf, name) is None:
            setattr(leaf, name, getattr(pending, name))
    if not leaf.sampling:
        leaf.sampling = dict(pending.sampling)


def _cast(name: str, values: Any, wanted: np.dtype[Any]) -> Any:
    array = np.asarray(values)
    if array.dtype == wanted:
        return array
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, expected one dimension")
    if array.size and array.dtype.kind not in ("f" if wanted.kind == "f" else "") + "iub":
        raise ValueError(f"{name} holds {array.dtype}, expected {_BASE_OF[wanted.kind]}")
    cast = array.astype(wanted)
    if wanted.kind != "f" and not np.array_equal(cast, array):
        raise ValueError(f"{name} holds values that {wanted.name} cannot")
    return cast


def _end(leaf: Sample) -> None:
    """Give the leaf both a stop reason and the status of it."""
    if leaf.stop_reason is None:
        if leaf.status is not Status.PENDING:
            leaf.stop_reason = _REASON_OF_STATUS[Status(leaf.status)]
        elif leaf.calls:
            leaf.stop_reason = _REASON_OF_FINISH.get(leaf.calls[-1].finish, StopReason.STOP)
        else:
            leaf.stop_reason = StopReason.NO_MODEL_CALL
    status = STATUS_OF[StopReason(leaf.stop_reason)]
    if leaf.status not in (Status.PENDING, status):
        raise ValueError(
            f"status {leaf.status} does not fit stop_reason {leaf.stop_reason}, which is {status}; "
            "set the stop reason alone"
        )
    leaf.stop_reason, leaf.status = StopReason(leaf.stop_reason), status


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict):
        raise TypeError(f"metadata is {type(metadata).__name__}, expected a dictionary")
    try:
        msgpack.packb(metadata)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"metadata cannot be stored: {describe(error)}") from None
