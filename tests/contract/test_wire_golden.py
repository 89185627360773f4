"""The bytes of wire version 1: what was written once is read for ever, and written the same.

`tests/data/wire_v1.json` holds records as hex. A change that fails here means another version on
the wire (`WIRE_VERSION`, CHANGELOG's Wire section), or a field that an old reader would miss.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rollstream.errors import StopReason
from rollstream.group import PromptGroup, Trajectory
from rollstream.sample import Sample
from rollstream.wire import (
    WIRE_VERSION,
    decode_body,
    decode_header,
    decode_prompt,
    encode_body,
    encode_header,
    encode_prompt,
    encode_text,
)
from tests.builders import a_prompt, a_sample

GOLDEN = {
    name: bytes.fromhex(text)
    for name, text in json.loads(
        (Path(__file__).parents[1] / "data" / "wire_v1.json").read_text()
    ).items()
}
PROMPT = {"metadata": {"level": 1}, "env": "math", "sampling": {"temperature": 0.5}}


def group() -> PromptGroup:
    return a_prompt(7, 2, enqueued_unix_s=1.5, **PROMPT)


def one() -> Sample:
    turns = (((4, 5), (6,)), ((7, 8), ()))
    sample = a_sample(7, 1, turns=turns, versions=(3, 4), reward={"acc": 0.5})
    sample.response = "four five"
    return sample


def leaves() -> list[Sample]:
    first = a_sample(7, 0, stop_reason=StopReason.TURN_LENGTH, reward=None)
    return [first, a_sample(7, 0, turns=(((9,), ()),))]


def records() -> dict[str, bytes]:
    """Return what today's code writes."""
    made = {"prompt": encode_prompt(group())}
    samples: dict[str, Trajectory] = {"one": one(), "leaves": leaves()}
    for name, trajectory in samples.items():
        header = encode_header(trajectory, num_turns=2, done_unix_s=2.5)
        made |= {f"{name} header": header, f"{name} body": encode_body(trajectory)}
    return made


def same(got: Trajectory, wanted: Trajectory) -> bool:
    """Return whether what was read is what was written, arrays and calls bit for bit."""
    pairs = zip(
        got if isinstance(got, list) else [got],
        wanted if isinstance(wanted, list) else [wanted],
        strict=True,
    )
    return all(
        np.array_equal(a.tokens, b.tokens)
        and np.array_equal(a.loss_mask, b.loss_mask)
        and np.array_equal(a.rollout_log_probs, b.rollout_log_probs)
        and a.calls == b.calls
        and (a.status, a.stop_reason, a.reward, a.index, a.rollout_id, a.member)
        == (b.status, b.stop_reason, b.reward, b.index, b.rollout_id, b.member)
        for a, b in pairs
    )


def test_wire_is_of_the_version_that_these_bytes_are_of() -> None:
    assert WIRE_VERSION == 1


def test_wire_writes_the_bytes_of_version_1() -> None:
    assert records() == {name: data for name, data in GOLDEN.items() if name != "one text"}


def test_wire_reads_the_bytes_of_version_1() -> None:
    read = decode_prompt(GOLDEN["prompt"], 7, 2)
    assert read == group()
    assert same(decode_body(GOLDEN["one body"], read, GOLDEN["one text"]), one())
    assert same(decode_body(GOLDEN["leaves body"], read), leaves())
    header = decode_header(GOLDEN["leaves header"])
    assert [leaf.reward for leaf in header.leaves] == [None, 1.0]


def test_wire_reads_the_text_of_version_1() -> None:
    # Its bytes are zlib's, whose versions differ; what they say does not.
    for data in (GOLDEN["one text"], encode_text(one())):
        body = decode_body(GOLDEN["one body"], group(), data)
        assert isinstance(body, Sample)
        assert body.response == "four five"
