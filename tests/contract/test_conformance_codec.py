"""Conformance section 8: what the codec keeps, and what it refuses.

The reference's container is another one (float64 log-probs, int64 tokens); here they are float32
and int32 by contract, so 75 speaks of float32(x), and 79 to 81 keep their intent: a lossy,
truncated or malformed record is refused with one kind of error that says what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import WireError
from rollstream.sample import SAMPLE_FIELDS, Sample
from rollstream.wire import decode_body, encode_body
from tests.builders import a_prompt, a_sample
from worker.tito.ids import as_ids
from worker.tito.merge import TurnRecord, merge_turns

GROUP = a_prompt()


def _back(data: bytes) -> Sample:
    sample = decode_body(data, GROUP)
    assert isinstance(sample, Sample)
    return sample


@settings(max_examples=100, deadline=None)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_75_log_prob_survives_bit_for_bit_as_float32(value: float) -> None:
    for exact in (value, -0.1234567891234567):
        sample = a_sample(turns=[((4,), ())])
        sample.rollout_log_probs = np.array([exact], dtype=np.float32)
        back = _back(encode_body(sample)).rollout_log_probs
        assert back is not None
        assert back.tobytes() == np.float32(exact).tobytes()


def test_76_decoded_samples_own_their_metadata_and_the_template_is_left_alone() -> None:
    template = Sample(group_index=0, metadata={"k": 1})
    record = TurnRecord(as_ids([1]), as_ids([2]), np.array([-0.5], np.float32), metadata={"m": 2})
    merged = merge_turns([record], template=template).sample
    assert merged is not None
    assert (template.metadata, merged.metadata) == ({"k": 1}, {"k": 1, "m": 2})
    data = encode_body(merged)
    one, other = _back(data), _back(data)
    one.metadata["mine"] = True
    assert other.metadata == merged.metadata


def test_78_arrays_that_are_not_contiguous_encode_like_their_copies() -> None:
    sample = a_sample(turns=[((4, 5, 6), ())])
    plain = encode_body(sample)
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        setattr(sample, name, np.repeat(getattr(sample, name), 2)[::2])
    assert not sample.tokens.flags.c_contiguous
    assert encode_body(sample) == plain


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("loss_mask", np.array([-1, 1])),
        ("loss_mask", np.array([256, 1])),
        ("tokens", np.array([1, 2, 3, 2**31, 5])),
        ("tokens", np.array([1.5, 2.0, 3.0, 4.0, 5.0])),
        ("loss_mask", np.ones((2, 1), np.uint8)),
    ],
)
def test_79_values_that_the_wire_cannot_hold_are_refused_when_encoded(
    name: str, values: Any
) -> None:
    sample = a_sample(turns=[((4, 5), ())])
    setattr(sample, name, values)
    with pytest.raises(WireError, match=name):
        encode_body(sample)


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight_versions", None), ("sampling", [1]), ("index", "7"), ("remove_sample", 2)],
)
def test_79_what_no_reader_would_take_is_refused_when_encoded(name: str, value: Any) -> None:
    sample = a_sample()
    setattr(sample, name, value)
    with pytest.raises(WireError, match=f"{name} is a {type(value).__name__}"):
        encode_body(sample)


def test_79_replay_arrays_keep_their_type_and_objects_are_refused() -> None:
    sample = a_sample()
    for dtype in (np.int32, np.uint8, ">i4"):
        sample.rollout_routed_experts = np.arange(8).astype(dtype).reshape(4, 2)
        back = _back(encode_body(sample)).rollout_routed_experts
        assert back is not None
        assert (back.tolist(), back.dtype.itemsize) == (
            sample.rollout_routed_experts.tolist(),
            sample.rollout_routed_experts.dtype.itemsize,
        )
    sample.rollout_routed_experts = np.array([[None]] * 4)
    with pytest.raises(WireError, match="array of object has no wire form"):
        encode_body(sample)


@pytest.mark.parametrize(
    "field",
    [
        {"weight_versions": [1]},
        {"teacher_log_probs": np.zeros(1, np.float32)},
        {"opd_reverse_kl": np.zeros(1, np.float32)},
        {"rollout_routed_experts": np.zeros((1, 2, 2), np.int32)},
    ],
    ids=lambda field: next(iter(field)),
)
def test_80_template_that_was_generated_is_refused_by_name_unless_there_is_nothing_to_merge(
    field: dict[str, Any],
) -> None:
    template = Sample(group_index=0, **field)
    record = TurnRecord(as_ids([1]), as_ids([2]), np.array([-0.5], np.float32))
    with pytest.raises(ValueError, match=f"the template has {next(iter(field))} already"):
        merge_turns([record], template=template)
    assert merge_turns([], template=template).empty_reason == "no_records"
    assert merge_turns([record], template=template, max_seq_len=1).sample is None


def _damaged(change: Callable[[dict[str, Any]], object]) -> bytes:
    record = msgpack.unpackb(encode_body(a_sample()), strict_map_key=False)
    change(record)
    packed: bytes = msgpack.packb(record)
    return packed


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["leaves"][0].update({name: value})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda record: record.pop("leaves"), "leaves"),
        (lambda record: record.pop("v"), "no version"),
        (lambda record: record["leaves"][0].pop("tokens"), "does not fit 0 tokens"),
        (lambda record: record["leaves"].append({}), "scalar body with 2 leaves"),
        (_set("tokens", b"123"), "multiple of element size"),
        (_set("tokens", [1, 2]), "bytes-like"),
        (_set("tokens", np.arange(5, dtype=np.int64).tobytes()), "calls span 3..5, .* is 8..10"),
        (_set("tokens", np.arange(5, dtype=np.int32).tobytes()[:-4]), "calls span 3..5"),
        (_set("loss_mask", b"\1"), "loss_mask has 1 entries, response_length is 2"),
        (_set("rollout_log_probs", b"\0" * 12), "rollout_log_probs has 3 entries"),
        (_set("response_length", 6), "6 does not fit 5 tokens"),
        (_set("response_length", -1), "-1 does not fit"),
        (_set("response_length", "2"), "'2' does not fit"),
        (_set("status", "done"), "not a valid Status"),
        (_set("metadata", [1]), "metadata is a list"),
        (_set("index", "7"), "index is a str"),
        (_set("sampling", [1]), "sampling is a list"),
        (_set("calls", [[1]]), "not enough values"),
        (_set("rollout_routed_experts", ["|O", [1], b"12345678"]), "not raw data"),
        (_set("rollout_routed_experts", ["<i4", [7, 2], b"1234"]), "cannot reshape"),
        (_set("rollout_routed_experts", ["<0,4", [1], b"1234"]), "not raw data"),
    ],
)
def test_81_malformed_record_is_refused_and_says_what(
    change: Callable[[dict[str, Any]], object], what: str
) -> None:
    with pytest.raises(WireError, match=what):
        decode_body(_damaged(change), GROUP)


_MAY_BE_NULL = {"index", "rollout_id", "reward", "train_metadata", "generate_function_path",
                "reward_spec", "routing_key", "multimodal_inputs", "multimodal_train_inputs",
                "adapter"}  # fmt: skip
_OF_THE_GROUP = {"group_index", "prompt", "label", "response"}


@pytest.mark.parametrize(
    "name", [n for n in SAMPLE_FIELDS if n not in _MAY_BE_NULL | _OF_THE_GROUP]
)
def test_81_null_is_refused_for_every_field_that_has_a_value(name: str) -> None:
    with pytest.raises(WireError, match="body of group 0"):
        decode_body(_damaged(_set(name, None)), GROUP)


@pytest.mark.parametrize("name", sorted(_MAY_BE_NULL))
def test_81_null_stays_null_where_it_means_nothing_is_known(name: str) -> None:
    sample = decode_body(_damaged(_set(name, None)), GROUP)
    assert getattr(sample, name) is None


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 400), value=st.integers(0, 255), cut=st.booleans())
def test_81_garbage_is_a_wire_error_or_a_whole_sample(place: int, value: int, cut: bool) -> None:
    data = bytearray(encode_body(a_sample()))
    place %= len(data)
    damaged = (
        bytes(data[:place]) if cut else bytes(data[:place]) + bytes([value]) + data[place + 1 :]
    )
    try:
        sample = decode_body(damaged, GROUP)
    except WireError:
        return
    assert not cut
    leaves = sample if isinstance(sample, list) else [sample]
    assert all(0 <= leaf.response_length <= len(leaf.tokens) for leaf in leaves)


def test_every_field_survives_the_wire() -> None:
    sample = a_sample(metadata={"k": [1, {"x": None}]}, extra={"other": 5}, attempts=2)
    back = _back(encode_body(sample))
    back.prompt, back.response = sample.prompt, sample.response
    back.label = sample.label
    assert set(SAMPLE_FIELDS) <= set(back.to_dict())
    assert back.to_dict() == sample.to_dict()
