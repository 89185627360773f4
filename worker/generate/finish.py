"""What a generate function returned, checked and completed.

Owns the shape of a result (`Sample | list[Sample]`) and what is filled in. Never changes a token,
a log-prob or a mask value. Invariant: what leaves here is valid by `Sample.validate`, holds only
ids of the vocabulary, log-probs that are some and a mask of zeros and ones, has a status that is
the one of its stop reason, and belongs to the member that was asked for; anything else is an
`AgentFault` that says what is wrong. Its arrays are its own: a function that goes on writing into
its memory (a buffer for all members, say) reaches no sample that was returned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgpack
import numpy as np

from rollstream.errors import STATUS_OF, AgentFault, ContractError, Status, StopReason
from rollstream.group import Trajectory
from rollstream.sample import ARRAY_DTYPES, Call, Sample, TokenIds

from ..engines.protocol.checks import LOGPROB_EPSILON
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
_REPLAY = ("rollout_routed_experts", "rollout_indexer_topk")
_SERVED_ROWS = tuple(np.dtype(kind) for kind in ("<u1", "<u2", "<i4"))
"""What engines serve rows in; they stay what they are."""
_INT32 = np.dtype("<i4")


def finish(
    pending: Sample,
    output: GenerateOutput,
    decode: Decode | None = None,
    max_token_id: int = np.iinfo(np.int32).max,
) -> Trajectory:
    """Return the checked trajectory of one member: one sample, or its leaves.

    Filled in: whose it is (group_index, member, index, rollout_id), prompt, label, sampling,
    routing key, path of the function, arrays' types, a missing mask, the versions of a call that
    says none (the one at its dispatch), status or stop reason, the weight versions, and the
    response text where `decode` is given.

    Args:
        pending: the sample that the function was given.
        output: what it returned; nothing is known about it.
        decode: ids to text.
        max_token_id: the highest id of the vocabulary; a trainer looks ids up without a check.

    Raises:
        AgentFault: with what is wrong and what is expected.
    """
    leaves = _leaves_of(output)
    for place, leaf in enumerate(leaves):
        where = "the sample" if len(leaves) == 1 else f"leaf {place}"
        try:
            _complete(leaf, pending, decode)
            leaf.validate()
            _check_values(leaf, max_token_id)
            _freeze(leaf)
        except (ContractError, ValueError, TypeError) as error:
            raise _wrong(f"{where}: {describe(error)}", "invalid_sample") from error
    return output.samples


def check_record(sample: Sample, max_token_id: int) -> None:
    """Check that a sample of unknown origin may be trained on, or gone on from.

    Raises:
        ContractError: its parts do not fit each other.
        ValueError: versions that do not cover their call, or a value that cannot be.
    """
    sample.validate()
    for call in sample.calls:
        _whole(call)
    _check_values(sample, max_token_id)


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
    leaf.response_length = operator.index(leaf.response_length)
    for name, dtype in _DTYPES:
        values = getattr(leaf, name)
        if values is not None and not _is_own(values, dtype):
            setattr(leaf, name, np.array(_cast(name, values, dtype)))
    for name in _REPLAY:
        values = getattr(leaf, name)
        if values is not None:
            setattr(leaf, name, _rows(name, values, max(0, len(leaf.tokens) - 1)))
    if leaf.calls:
        leaf.calls = [_whole(call) for call in leaf.calls]
    if leaf.loss_mask is None:
        leaf.loss_mask = (
            leaf.sampled_mask() if leaf.calls else np.zeros(leaf.response_length, dtype=np.uint8)
        )
    _end(leaf)
    if leaf.calls:
        leaf.derive_weight_versions()
    is_left = leaf.stop_reason is StopReason.ABORT_WEIGHTS  # it goes on, or begins anew: unread
    if decode is not None and leaf.response_length and not leaf.response and not is_left:
        leaf.response = decode(leaf.tokens[-leaf.response_length :])
    if not isinstance(leaf.response, str):
        raise TypeError(f"response is {type(leaf.response).__name__}, expected text")
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


def _is_own(values: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether an array is as the record's should be, and no view of other memory.

    Ours are: they cost one look.
    """
    return (
        type(values) is np.ndarray
        and values.dtype is dtype
        and values.ndim == 1
        and values.base is None
    )


def _cast(name: str, values: Any, wanted: np.dtype[Any]) -> Any:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, expected one dimension")
    if array.dtype == wanted:
        return array
    if array.size and array.dtype.kind not in ("f" if wanted.kind == "f" else "") + "iub":
        raise ValueError(f"{name} holds {array.dtype}, expected {_BASE_OF[wanted.kind]}")
    with np.errstate(over="ignore"):  # what float32 cannot hold is found as not finite
        cast = array.astype(wanted)
    if wanted.kind != "f" and not np.array_equal(cast, array):
        raise ValueError(f"{name} holds values that {wanted.name} cannot")
    return cast


def _rows(name: str, values: Any, count: int) -> Any:
    array = np.asarray(values)
    if array.ndim != 3 or len(array) != count or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} is {array.dtype} of shape {array.shape}; expected whole numbers "
            f"[{count}, layers, top_k], a row for every token but the last"
        )
    if array.dtype in _SERVED_ROWS:
        return array
    cast = array.astype(_INT32)
    if not np.array_equal(cast, array):
        raise ValueError(f"{name} holds values that int32 cannot")
    return cast


def _whole(call: Call) -> Call:
    """Return the call with plain numbers, and with spans of versions that cover it in order."""
    start, end = operator.index(call.start), operator.index(call.end)
    given = call.versions or [(call.dispatched_version, start, end)]
    spans, behind = [], start
    for version, first, last in given:
        if first != behind or last < first:
            _broken_spans(call, given)
        number, behind = operator.index(version), operator.index(last)
        if not -1 <= number < 1 << 63:
            raise ValueError(f"call {call.rid} has the version {number}; unknown is -1")
        spans.append((number, operator.index(first), behind))
    if behind != end:
        _broken_spans(call, given)
    call.start, call.end, call.versions = start, end, spans
    return call


def _broken_spans(call: Call, spans: Sequence[tuple[int, int, int]]) -> NoReturn:
    raise ValueError(
        f"the versions {spans} of call {call.rid} do not cover its tokens "
        f"{call.start}..{call.end}; write [(version, start, end)] over `tokens`"
    )


def _check_values(leaf: Sample, max_token_id: int) -> None:
    """Check what no length shows: each of it would reach the trainer's loss as a number."""
    tokens, mask, log_probs = leaf.tokens, leaf.loss_mask, leaf.rollout_log_probs
    # A negative id is a huge one without its sign: one look for both ends.
    if len(tokens) and int(tokens.view(np.uint32).max()) > max_token_id:
        wrong = next(number for number in tokens.tolist() if not 0 <= number <= max_token_id)
        raise ValueError(f"tokens holds {wrong}, the vocabulary is 0..{max_token_id}")
    if mask is not None and len(mask) and int(mask.max()) > 1:
        raise ValueError(f"loss_mask holds {int(mask.max())}, expected 0 and 1")
    if log_probs is not None and len(log_probs):
        for worst in (float(log_probs.max()), float(log_probs.min())):
            if not -np.inf < worst <= LOGPROB_EPSILON:
                raise ValueError(f"rollout_log_probs holds {worst}, a log-prob is finite and <= 0")


def _freeze(leaf: Sample) -> None:
    """What was sampled is nobody's to change any more: whoever kept an array gets numpy's error."""
    leaf.tokens.flags.writeable = False
    if leaf.rollout_log_probs is not None:
        leaf.rollout_log_probs.flags.writeable = False


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
