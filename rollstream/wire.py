"""The one codec between processes: prompt records, and a member's header, body and text.

Owns the version and the layout of everything that Redis holds. Never pickles, never does I/O.
Invariant: unknown fields survive or are ignored, a newer major version is refused, and garbage
of any kind is a `WireError`, nothing else.

Header, body and text are apart because they have different readers: filters read headers (a few
hundred bytes), the trainer reads bodies (raw little-endian arrays in MessagePack), and text is
compressed and read by people and by trainers that ask for it.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import product
from typing import Any, TypeAlias, get_args

import msgpack
import numpy as np

from rollstream.call_columns import decode_calls, encode_calls
from rollstream.errors import Status, StopReason, WireError, WireTooNew
from rollstream.group import (
    EnvRule,
    Leaf,
    MemberHeader,
    OnTruncated,
    PromptGroup,
    Trajectory,
)
from rollstream.plain import BEYOND_INT64, NUMBER, check_ints, check_kinds, read_texts
from rollstream.sample import (
    ARRAY_DTYPES,
    SAMPLE_FIELDS,
    PrefixCacheInfo,
    Reward,
    Sample,
    Span,
    SpecInfo,
)

WIRE_VERSION = 1
MAX_TEXT_BYTES = 256 << 20
"""A text field that says it is larger than this when inflated is refused."""

_GROUP_FIELDS = frozenset({"group_index", "prompt", "label"})
"""Known from the group's own record, so not repeated by its members' bodies."""
_TEXT_FIELDS = frozenset({"response"})
_DEFAULTS = Sample()
_BODY_FIELDS = tuple(f for f in SAMPLE_FIELDS if f not in _GROUP_FIELDS | _TEXT_FIELDS)
_RULE_FIELDS = tuple(f.name for f in fields(EnvRule))
_PER_RESPONSE = tuple(name for name in ARRAY_DTYPES if name != "tokens")
_BLOCK_DTYPES = frozenset(np.dtype(kind).newbyteorder("<").str for kind in "?bBhHiIqQefd")
"""What an array of several dimensions may hold, read from any writer."""
_REPLAY_DTYPES = frozenset(np.dtype(kind).newbyteorder("<").str for kind in "bBhHi")
"""What engines serve rows in, and what holds our -1; wider ones are a mistake of somebody's, and
would be most of a sample."""
_Codec: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any], Any]]


# --- prompts -------------------------------------------------------------------------------------
_PROMPT_KINDS: dict[str, tuple[type, ...]] = {
    "prompt": (str, list), "tools": (list, type(None)), "metadata": (dict,), "sampling": (dict,),
    "env": (str,), "priority": (int,), "timeout_s": NUMBER, "enqueued_unix_s": NUMBER,
}  # fmt: skip
_PROMPT_FIELDS = tuple(f.name for f in fields(PromptGroup) if f.name not in ("group_index", "n"))


def encode_prompt(group: PromptGroup) -> bytes:
    """Return the record that `enqueue` stores once per group (the id and n are the queue's own)."""
    record = {"v": WIRE_VERSION, **{name: getattr(group, name) for name in _PROMPT_FIELDS}}
    return _pack(record, f"group {group.group_index}")


def decode_prompt(data: bytes, group_index: int, n: int) -> PromptGroup:
    """Return the group that `encode_prompt` was given.

    Raises:
        WireError: not a record of ours, or a newer one.
    """
    record = _open(data, f"prompt of group {group_index}")
    known = {name: record[name] for name in _PROMPT_FIELDS if name in record}
    if "prompt" not in known:
        raise WireError(f"prompt of group {group_index}: the field 'prompt' is missing")
    try:
        check_kinds(known, _PROMPT_KINDS)
    except ValueError as error:
        raise WireError(f"prompt of group {group_index}: {error}") from None
    return PromptGroup(group_index=group_index, n=n, **known)


def encode_envs(rules: Mapping[str, EnvRule]) -> bytes:
    """Return the record of every environment's rule, which the producer stores with the run."""
    envs = {name: {n: getattr(rule, n) for n in _RULE_FIELDS} for name, rule in rules.items()}
    return _pack({"v": WIRE_VERSION, "envs": envs}, "envs")


def decode_envs(data: bytes | None) -> dict[str, EnvRule]:
    """Return what `encode_envs` was given; a run without the record has no rules.

    Raises:
        WireError: not a record of ours, or a newer one.
    """
    if not data:
        return {}
    record = _open(data, "envs")
    try:
        return {name: _decode_rule(rule) for name, rule in record["envs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"envs: {error!r}") from None


_RULE_KINDS: dict[str, tuple[type, ...]] = {
    "reward_key": (str, type(None)), "needs_reward": (bool,), "group_reward": (bool,),
}  # fmt: skip
_ON_TRUNCATED = frozenset(get_args(OnTruncated))


def _decode_rule(record: dict[str, Any]) -> EnvRule:
    check_kinds(record, _RULE_KINDS)
    rule = EnvRule(**{name: record[name] for name in _RULE_FIELDS if name in record})
    if rule.on_truncated not in _ON_TRUNCATED:
        raise ValueError(f"on_truncated is {rule.on_truncated!r}")
    return rule


# --- one member's result -------------------------------------------------------------------------
def encode_header(
    trajectory: Trajectory, *, num_turns: int = 0, done_unix_s: float = 0.0, attempts: int = 0
) -> bytes:
    """Return the header of one member: one entry per leaf."""
    is_list = isinstance(trajectory, list)
    leaves = [
        _leaf_record(s) for s in (trajectory if isinstance(trajectory, list) else (trajectory,))
    ]
    return _pack(
        {"v": WIRE_VERSION, "list": is_list, "leaves": leaves, "num_turns": num_turns,
         "done_unix_s": done_unix_s, "attempts": attempts},
        "header",
    )  # fmt: skip


def _leaf_record(sample: Sample) -> dict[str, Any]:
    return {
        "status": sample.status.value,
        "stop_reason": None if sample.stop_reason is None else sample.stop_reason.value,
        "reward": sample.reward,
        "response_length": sample.response_length,
        "num_tokens": len(sample.tokens),
        "num_sampled": sample.num_sampled,
        "num_trainable": 0 if sample.remove_sample else sample.effective_response_length,
        "versions": sample.version_range(),
        "removed": sample.remove_sample,
    }


_HEADER_KINDS: dict[str, tuple[type, ...]] = {
    "list": (bool,), "leaves": (list,), "num_turns": (int,), "done_unix_s": NUMBER,
    "attempts": (int,), "reward_error": (str,),
}  # fmt: skip
_leaf_counts = operator.itemgetter("response_length", "num_tokens", "num_sampled", "num_trainable")


def decode_header(data: bytes) -> MemberHeader:
    """Return the header that `encode_header` made.

    Raises:
        WireError: not a record of ours, or a newer one.
    """
    record = _open(data, "header")
    try:
        check_kinds(record, _HEADER_KINDS)
        return MemberHeader(
            is_list=record["list"],
            leaves=[_decode_leaf(leaf) for leaf in record["leaves"]],
            num_turns=record.get("num_turns", 0),
            done_unix_s=record.get("done_unix_s", 0.0),
            attempts=record.get("attempts", 0),
            reward_error=record.get("reward_error", ""),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise WireError(f"header: {error!r}") from None


def rewarded_header(data: bytes, reward: Reward, error: str = "") -> bytes:
    """Return a header with the reward in every leaf that had none; all else of it stays.

    Args:
        data: what `encode_header` returned.
        reward: of the whole trajectory; None is no verdict.
        error: why there is none.

    Raises:
        WireError: not a record of ours, a newer one, or a reward without a wire form.
    """
    record = _open(data, "header")
    try:
        for leaf in record["leaves"]:
            if leaf["reward"] is None:
                leaf["reward"] = reward
    except (LookupError, TypeError) as wrong:
        raise WireError(f"header: {wrong!r}") from None
    if error:
        record["reward_error"] = error
    return _pack(record, "header")


def _decode_leaf(record: dict[str, Any]) -> Leaf:
    reason, versions = record["stop_reason"], record["versions"]
    check_ints((*_leaf_counts(record), *(versions or ())), "a leaf's counts")
    return Leaf(
        status=Status(record["status"]),
        stop_reason=None if reason is None else StopReason(reason),
        reward=record["reward"],
        response_length=record["response_length"],
        num_tokens=record["num_tokens"],
        num_sampled=record["num_sampled"],
        num_trainable=record["num_trainable"],
        versions=None if versions is None else (versions[0], versions[1]),
        removed=record.get("removed", False),
    )


def encode_body(trajectory: Trajectory) -> bytes:
    """Return the body of one member: all fields of all leaves but the group's own and the text.

    Raises:
        WireError: an array whose values its wire type cannot hold, or a value without a wire form.
    """
    if isinstance(trajectory, list):
        record = {
            "v": WIRE_VERSION,
            "list": True,
            "leaves": [_sample_record(s) for s in trajectory],
        }
    else:
        record = {"v": WIRE_VERSION, "list": False, "leaves": [_sample_record(trajectory)]}
    return _pack(record, "body")


def decode_body(data: bytes, group: PromptGroup, text: bytes | None = None) -> Trajectory:
    """Return one member's trajectory; its arrays are read-only views of `data`.

    Args:
        data: what `encode_body` returned.
        group: the record that gives the group's id, prompt and label.
        text: what `encode_text` returned, where the reader wants it.

    Raises:
        WireError: garbage, truncated, inconsistent, or newer than this library.
    """
    record = _open(data, "body")
    texts = decode_text(text) if text else []
    try:
        leaves = [_decode_sample(leaf, group) for leaf in record["leaves"]]
        is_list = record["list"]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise WireError(f"body of group {group.group_index}: {error!r}") from None
    if texts and len(texts) != len(leaves):
        raise WireError(f"text of {len(texts)} leaves for a body of {len(leaves)}")
    for leaf, response in zip(leaves, texts, strict=False):
        leaf.response = response
    if not is_list and len(leaves) != 1:
        raise WireError(f"a scalar body with {len(leaves)} leaves")
    return leaves if is_list else leaves[0]


def encode_text(trajectory: Trajectory) -> bytes:
    """Return the response texts of one member, compressed; empty where there is no text."""
    leaves = trajectory if isinstance(trajectory, list) else [trajectory]
    if not any(leaf.response for leaf in leaves):
        return b""
    packed = _pack({"v": WIRE_VERSION, "texts": [leaf.response for leaf in leaves]}, "text")
    return zlib.compress(packed, 1)


def decode_text(data: bytes) -> list[str]:
    """Return the response text of every leaf.

    Raises:
        WireError: garbage, or a text that inflates beyond `MAX_TEXT_BYTES`.
    """
    inflate = zlib.decompressobj()
    try:
        packed = inflate.decompress(data, MAX_TEXT_BYTES)
    except zlib.error as error:
        raise WireError(f"text: {error}") from None
    if inflate.unconsumed_tail or not inflate.eof:
        raise WireError("text: truncated, or larger than allowed")
    try:
        version, texts = read_texts(packed)
    except ValueError as error:
        raise WireError(f"text: not a record: {error}") from None
    _check_version(version, "text")
    if texts is None or None in texts:
        raise WireError("text: the field 'texts' is not a list of strings")
    return list(texts)


def _sample_record(sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for (name, default, encode, always), value in zip(_PLAN, _body_values(sample), strict=True):
        if encode is None:
            if value is not default and value != default:
                if not isinstance(value, _KINDS[name]):
                    raise WireError(_wrong_kind(name, value))
                record[name] = value
        elif value is not None and (always or value != default):
            record[name] = encode(value)
    if sample.extra:
        record["extra"] = sample.extra
    return record


def _decode_sample(record: dict[str, Any], group: PromptGroup) -> Sample:
    known: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in record.items():
        codec = _CODECS.get(name)
        if codec is not None:
            known[name] = codec[1](value)
        elif (kinds := _KINDS.get(name)) is not None:
            if not isinstance(value, kinds):
                raise ValueError(_wrong_kind(name, value))
            known[name] = value
        elif name == "extra":
            extra.update(value)
        else:
            extra[name] = value
    sample = Sample(
        group_index=group.group_index,
        prompt=group.prompt,
        label=group.label,
        extra=extra,
        **known,
    )
    _check_fit(sample)
    return sample


def _check_fit(sample: Sample) -> None:
    """Refuse a record whose parts cannot belong together (the whole proof is `validate`)."""
    length, count = sample.response_length, len(sample.tokens)
    if not isinstance(length, int) or not 0 <= length <= count:
        raise ValueError(f"response_length {length!r} does not fit {count} tokens")
    for name in _PER_RESPONSE:
        values = getattr(sample, name)
        if values is not None and len(values) != length:
            raise ValueError(f"{name} has {len(values)} entries, response_length is {length}")
    if (sample.index or 0) >= BEYOND_INT64 or (sample.rollout_id or 0) >= BEYOND_INT64:
        raise ValueError(f"index {sample.index} or rollout_id {sample.rollout_id} is no int64")
    calls = sample.calls
    if calls and not count - length <= calls[0].start <= calls[-1].end <= count:
        # Ids of another width have another count: they are told by where the calls stand.
        raise ValueError(
            f"calls span {calls[0].start}..{calls[-1].end}, the response is "
            f"{count - length}..{count}"
        )


def _array_codec(name: str) -> _Codec:
    dtype = np.dtype(ARRAY_DTYPES[name])

    def encode(value: Any) -> bytes | memoryview:
        array = np.asarray(value)
        if array.ndim != 1:
            raise WireError(f"{name} has {array.ndim} dimensions, expected 1")
        if array.dtype != dtype:
            cast = array.astype(dtype)
            if array.size and dtype.kind != "f" and not np.array_equal(cast, array):
                raise WireError(f"{name} holds values that {dtype.name} cannot")
            array = cast
        # MessagePack takes the memory as it lies; a strided view has to be copied first.
        return array.data if array.flags.c_contiguous else array.tobytes()

    return encode, lambda raw: np.frombuffer(raw, dtype=dtype)


def _encode_block(value: Any) -> list[Any]:
    array = value if isinstance(value, np.ndarray) else _from_lists(value)
    dtype = array.dtype.newbyteorder("<")
    if dtype.str not in _REPLAY_DTYPES:
        raise WireError(
            f"an array of {array.dtype} has no wire form: replay rows are what the engine served "
            "(uint8, uint16 or int32)"
        )
    return [dtype.str, list(array.shape), np.ascontiguousarray(array, dtype=dtype).tobytes()]


def _from_lists(value: Any) -> Any:
    array = np.asarray(value)
    if (
        array.dtype == np.int64
        and array.size
        and np.array_equal(cast := array.astype("<i4"), array)
    ):
        return cast
    return array


def _decode_block(value: list[Any]) -> Any:
    dtype, shape, raw = value
    if dtype not in _BLOCK_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not raw data")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _row_codec(kind: type) -> _Codec:
    """Return a codec that keeps a small record as the row of its fields, in order."""
    names = tuple(f.name for f in fields(kind))
    # Every combination that is right, so that a row costs one look.
    right = frozenset(product(*(_ROW_KINDS[str(f.type)] for f in fields(kind))))

    def decode(row: list[Any]) -> Any:
        values = row[: len(names)]
        if tuple(map(type, values)) not in right:
            raise ValueError(f"a {kind.__name__} of other types than {', '.join(names)}")
        return kind(*values)

    return operator.attrgetter(*names), decode  # of two fields and more: a tuple, packed as a list


_ROW_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": NUMBER}


def _rows(codec: _Codec) -> _Codec:
    encode, decode = codec
    return lambda records: list(map(encode, records)), lambda rows: list(map(decode, rows))


_CODECS: dict[str, _Codec] = {
    **{name: _array_codec(name) for name in ARRAY_DTYPES},
    "rollout_routed_experts": (_encode_block, _decode_block),
    "rollout_indexer_topk": (_encode_block, _decode_block),
    "calls": (encode_calls, decode_calls),
    "spans": _rows(_row_codec(Span)),
    "spec_info": _row_codec(SpecInfo),
    "prefix_cache_info": _row_codec(PrefixCacheInfo),
    "status": (lambda status: status.value, Status),
    "stop_reason": (lambda reason: reason.value, StopReason),
}
"""Fields that are not plain MessagePack values: (to the wire, from the wire)."""


def _kinds_of(name: str) -> tuple[type, ...]:
    default = getattr(_DEFAULTS, name)
    if name in ("index", "rollout_id"):
        return (int, type(None))
    if default is None or name == "response_length":  # which `_check_fit` looks at
        return (object,)
    return {float: (float, int), list: (list, tuple)}.get(type(default), (type(default),))


def _wrong_kind(name: str, value: Any) -> str:
    return f"{name} is a {type(value).__name__}, not {_KINDS[name][0].__name__}"


_KINDS = {name: _kinds_of(name) for name in _BODY_FIELDS if name not in _CODECS}
"""What each plain field may be, the one to name first."""


def _plan_of(name: str) -> tuple[str, Any, Callable[[Any], Any] | None, bool]:
    default, codec = getattr(_DEFAULTS, name), _CODECS.get(name)
    # Arrays have no truth value to compare by, and None is told apart before.
    always = default is None or name in ARRAY_DTYPES
    return name, default, None if codec is None else codec[0], always


_PLAN = tuple(_plan_of(name) for name in _BODY_FIELDS)
"""How each body field is written: (name, default that is left out, codec, whether always)."""
_body_values = operator.attrgetter(*_BODY_FIELDS)


# --- framing -------------------------------------------------------------------------------------
def _pack(record: dict[str, Any], what: str) -> bytes:
    try:
        packed = msgpack.packb(record, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{what}: a value has no wire form: {error}") from None
    assert isinstance(packed, bytes)
    return packed


def _open(data: bytes, what: str) -> dict[str, Any]:
    try:
        record = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"{what}: not a record: {type(error).__name__} {error}") from None
    _check_version(record.get("v") if isinstance(record, dict) else None, what)
    return record  # type: ignore[no-any-return]  # msgpack


def _check_version(version: Any, what: str) -> None:
    if not isinstance(version, int):
        raise WireError(f"{what}: not a record of Rollstream (no version)")
    if version > WIRE_VERSION:
        raise WireTooNew(
            f"{what}: wire version {version} is newer than {WIRE_VERSION}; upgrade this side"
        )
