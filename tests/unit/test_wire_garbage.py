"""Whatever Redis holds under a group's keys: a record that is read can be used, else `WireError`.

A record that decodes but cannot be computed with would stop every trainer that meets its group.
"""

from __future__ import annotations

import contextlib
import copy
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from rollstream import call_columns, wire
from rollstream.batch import Batch
from rollstream.errors import WireError
from rollstream.group import EnvRule
from rollstream.queue.reads import StoredGroup
from rollstream.sample import Sample, Span
from rollstream.trainer.assemble import assemble
from tests.builders import a_prompt, a_sample

GROUP = a_prompt(3)
JUNK = [
    None, True, -1, 2**64 - 1, float("nan"), float("inf"), "", "abc", b"", b"\xff", [], [[]], {},
    {"v": 1}, msgpack.Timestamp(1), msgpack.ExtType(5, b"x"),
]  # fmt: skip


def a_rich_sample(member: int) -> Sample:
    sample = a_sample(3, member, turns=[((1, 2, 3), (4,)), ((5, 6), ())])
    sample.response = "text"
    sample.spans = [Span("tool", 0, 1.0, 0.5)]
    return sample


RECORDS = {
    "prompt": wire.encode_prompt(GROUP),
    "header": wire.encode_header(a_rich_sample(0), num_turns=2, done_unix_s=1.0),
    "body": wire.encode_body(a_rich_sample(0)),
    "text": zlib.decompress(wire.encode_text(a_rich_sample(0))),
}


def use(prompt: bytes, header: bytes, body: bytes, text: bytes) -> None:
    """Do all that a trainer does with a group."""
    twin = a_rich_sample(1)
    stored = StoredGroup(
        "3", 2, "ready", prompt, [header, wire.encode_header(twin)], [None, None],
        [body, wire.encode_body(twin)], [zlib.compress(text), None],
    )  # fmt: skip
    group, _ = assemble(stored, {"default": EnvRule()})
    batch = Batch([group], 1)
    batch.to_arrays(pad_id=0)
    batch.metrics()


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a record, as the keys that lead there."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inside:
        yield (*above, key)
        if isinstance(item, dict | list):
            yield from places(item, (*above, key))


def put(record: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(record)
    inside = changed
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return changed


def test_the_records_themselves_are_usable() -> None:
    use(**RECORDS)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("name", RECORDS)
def test_junk_at_any_place_of_a_record_is_refused_or_usable(name: str) -> None:
    record = msgpack.unpackb(RECORDS[name])
    refused = 0
    for place in places(record):
        for junk in JUNK:
            data = msgpack.packb(put(record, place, junk))
            try:
                use(**{**RECORDS, name: data})
            except WireError:
                refused += 1
    assert refused > len(JUNK)


@pytest.mark.parametrize("name", RECORDS)
def test_bytes_that_changed_are_refused_or_usable(name: str) -> None:
    chance = random.Random(7)
    for _ in range(400):
        data = bytearray(RECORDS[name])
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(WireError):
            use(**{**RECORDS, name: bytes(data)})


# --- little that claims to be much ---------------------------------------------------------------
def many_calls() -> bytes:
    record = msgpack.unpackb(RECORDS["body"])
    columns = record["leaves"][0]["calls"]
    columns[:3] = [[4] * 20_000, [4] * 20_000, [0] * 20_000]
    columns[3] = {name: column[:1] for name, column in columns[3].items() if name != "sampling"}
    columns[3]["sampling"] = {f"k{j}": [1] for j in range(1000)}
    return msgpack.packb(record)


def many_texts(item: bytes) -> bytes:
    count = 4_000_000
    head = b"\x82\xa1v\x01\xa5texts\xdd" + count.to_bytes(4, "big")
    return zlib.compress(head + item * count, 1)


def many_objects() -> bytes:
    count = 4_000_000
    head = b"\x82\xa1v\x01\xa8tomorrow\xdd" + count.to_bytes(4, "big")
    return zlib.compress(head + b"\x90" * count, 1)


BOMBS: dict[str, Callable[[], object]] = {
    "calls": lambda: wire.decode_body(many_calls(), GROUP),
    "empty texts": lambda: wire.decode_text(many_texts(b"\xa0")),
    "lists for texts": lambda: wire.decode_text(many_texts(b"\x90")),
    "an unknown field": lambda: wire.decode_text(many_objects()),
}


@pytest.mark.parametrize("what", BOMBS)
def test_little_that_claims_to_be_much_is_refused_without_building_it(what: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            BOMBS[what]()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20


def test_calls_of_the_longest_trajectories_are_within_the_bound() -> None:
    assert call_columns.MAX_CALL_VALUES >= 4096 * 32


def test_fields_of_a_text_that_are_not_known_are_passed_over() -> None:
    record = {"tomorrow": [[1], {"x": 2}], "v": 1, "texts": ["a", "é" * 300], 5: 6}
    assert wire.decode_text(zlib.compress(msgpack.packb(record))) == ["a", "é" * 300]
