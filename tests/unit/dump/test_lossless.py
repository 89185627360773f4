"""What is read from a dump is what was written, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.batch import Batch
from rollstream.dump import read_batches, read_groups, read_manifest
from rollstream.dump.writer import DumpWriter
from rollstream.errors import Status, StopReason
from rollstream.group import EnvRule, FinishedGroup, Missing, Trajectory
from rollstream.sample import SAMPLE_FIELDS, Sample
from tests.builders import a_group, a_sample
from tests.unit.test_wire import a_full_sample


def wrote(folder: Path, *batches: list[FinishedGroup], **more: Any) -> DumpWriter:
    with DumpWriter.open(folder, run="r", fingerprint="f", **more) as writer:
        for groups in batches:
            writer.write(groups, "taken")
    return writer


def assert_same(one: FinishedGroup, other: FinishedGroup) -> None:
    for name in ("group_index", "env", "missing", "staleness", "spans", "reward_key"):
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name
    assert [isinstance(t, list) for t in one.samples] == [
        isinstance(t, list) for t in other.samples
    ]
    for sample, back in zip(one.flat(), other.flat(), strict=True):
        assert repr(sample.to_dict()) == repr(back.to_dict())
        for name in SAMPLE_FIELDS:
            value, read = getattr(sample, name), getattr(back, name)
            if isinstance(value, np.ndarray):
                assert (value.dtype, value.shape) == (read.dtype, read.shape)
                assert value.tobytes() == read.tobytes(), f"{name}, bit for bit"


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip
rewards = st.none() | st.floats() | st.dictionaries(st.text(max_size=4), st.floats(), max_size=2)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=0, max_size=6)
turns = st.lists(st.tuples(ids, ids), min_size=1, max_size=4)


@st.composite
def samples(draw: st.DrawFn, group_index: int, prompt: Any, label: Any) -> Sample:
    drawn = draw(turns)
    sample = a_sample(
        group_index, draw(st.integers(0, 7)), prompt=prompt, label=label, turns=drawn,
        prompt_ids=draw(ids), versions=draw(st.integers(-1, 2**53)), reward=draw(rewards),
        stop_reason=draw(st.sampled_from(StopReason)), response=draw(st.text(max_size=12)),
        metadata=draw(st.dictionaries(st.text(max_size=4), plain, max_size=3)),
        extra=draw(st.dictionaries(st.sampled_from(["x", "y"]), plain, max_size=2)),
        remove_sample=draw(st.booleans()), attempts=draw(st.integers(0, 9)),
    )  # fmt: skip
    bits = draw(st.binary(min_size=4 * sample.response_length, max_size=4 * sample.response_length))
    if draw(st.booleans()):  # any 32 bits are a float: NaNs keep their payload
        sample.teacher_log_probs = np.frombuffer(bits, dtype=np.float32)
    return sample


@st.composite
def groups(draw: st.DrawFn) -> FinishedGroup:
    group_index = draw(st.integers(0, 2**50))
    prompt = draw(st.text(max_size=8) | st.just([{"role": "user", "content": "hi €"}]))
    one = samples(group_index, prompt, draw(plain))
    members: list[Any] = draw(st.lists(one | st.lists(one, min_size=1, max_size=3), max_size=4))
    missing = [
        Missing(member, draw(st.sampled_from(Status)), draw(st.text(max_size=5)), "why")
        for member in range(draw(st.integers(0, 3)))
    ]
    return a_group(
        group_index, members, missing=missing, staleness=draw(st.integers(0, 9)),
        reward_key=draw(st.none() | st.just("acc")),
        spans={"group_wait": draw(st.lists(st.floats(0, 9), max_size=3))},
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(groups(), min_size=1, max_size=4, unique_by=lambda group: group.group_index))
def test_a_dump_gives_back_every_field_of_every_group(written: list[FinishedGroup]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wrote(Path(folder), written)
        (batch,) = read_batches(folder)
        for one, other in zip(written, batch.groups, strict=True):
            assert_same(one, other)
        if any(group.samples for group in written):
            here, there = Batch(written).to_arrays(), batch.to_arrays()
            for name, mine, read in zip(here, here.values(), there.values(), strict=True):
                assert isinstance(mine, np.ndarray)
                assert isinstance(read, np.ndarray)
                assert mine.tobytes() == read.tobytes(), name


def test_a_sample_with_no_field_at_its_default_comes_back(tmp_path: Path) -> None:
    leaves = [a_full_sample(), a_full_sample(member=1, response="", metadata={"leaf": 2})]
    missing = [Missing(3, Status.FAILED, "crashed", "it ended")]
    members: list[Trajectory] = [a_full_sample(member=2), leaves]
    group = a_group(3, members, missing=missing, staleness=2, reward_key="score")
    wrote(tmp_path, [group])
    (back,) = read_groups(tmp_path)
    assert_same(group, back)


def test_members_may_differ_in_what_a_group_shares(tmp_path: Path) -> None:
    members = [a_sample(3, 0, label=1), a_sample(3, 1, label=True), a_sample(3, 2, prompt="p")]
    members[0].group_index = None
    wrote(tmp_path, [a_group(3, members)])
    (back,) = read_groups(tmp_path)
    assert [repr((s.group_index, s.prompt, s.label)) for s in back.flat()] == [
        repr((s.group_index, s.prompt, s.label)) for s in members
    ]


def test_texts_are_left_out_where_nobody_wants_them(tmp_path: Path) -> None:
    wrote(tmp_path, [a_group(3, [a_full_sample(response="a text")])])
    assert [s.response for g in read_groups(tmp_path, text=False) for s in g.flat()] == [""]
    assert [s.response for g in read_groups(tmp_path) for s in g.flat()] == ["a text"]


def test_the_manifest_says_what_the_dump_is_of(tmp_path: Path) -> None:
    rules = {"default": EnvRule(), "math": EnvRule("acc", on_truncated="mask")}
    wrote(tmp_path, [a_group(3)], rules=rules, weight_version=7, total=40)
    manifest = read_manifest(tmp_path)
    assert (manifest.run, manifest.fingerprint, manifest.weight_version, manifest.total) == (
        "r", "f", 7, 40
    )  # fmt: skip
    assert manifest.rules == rules
    assert (tmp_path / "manifest.json").read_text() == manifest.to_json()


def test_no_file_of_a_dump_is_a_pickle(tmp_path: Path) -> None:
    wrote(tmp_path, [a_group(3)])
    raw = (tmp_path / "batch-00000001.rsd").read_bytes()
    head = msgpack.Unpacker(raw=False)
    head.feed(raw[20 + 16 :])
    assert head.unpack()["groups"][0][0] == 3, "MessagePack behind the start and the frame's header"


@pytest.mark.parametrize("only", [[], [1], [4, 0]])
def test_only_the_groups_that_are_asked_for_are_read(tmp_path: Path, only: list[int]) -> None:
    wrote(tmp_path, [a_group(0), a_group(1)], [a_group(4)])
    assert [g.group_index for g in read_groups(tmp_path, only)] == sorted(only)
