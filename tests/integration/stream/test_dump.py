"""A run into a dump, and a trainer from it: the same groups, with no Redis and no engine."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.async_stream import AsyncGroupStream
from rollstream.batch import Batch
from rollstream.dump import read_batches, read_groups
from rollstream.dump.stream import DumpStream
from rollstream.errors import RunMismatch, StreamError, WireError
from rollstream.group import FinishedGroup
from rollstream.stream import GroupStream
from rollstream.trainer.steering import Steering
from tests.backstage import Backstage, Connect
from tests.builders import a_sample


def shown(groups: list[FinishedGroup]) -> list[Any]:
    """Everything of groups, comparable."""
    return [
        (g.group_index, g.env, g.staleness, g.spans, g.missing, g.reward_key,
         [(s.to_dict(), s.tokens.tobytes()) for s in g.flat()])
        for g in groups
    ]  # fmt: skip


def drain(stream: GroupStream, groups: int) -> list[Batch]:
    """Train on all there is."""
    found = []
    for batch in stream.batches(groups=groups, timeout_s=20.0):
        found.append(batch)
        batch.ack()
    return found


def two_turns(group_index: int, member: int) -> Any:
    """One scalar, one trajectory of two leaves."""
    turns = [((4, 5), (6,)), ((7,), ())]
    one = a_sample(group_index, member, turns=turns, reward=0.5, response=f"{group_index}€")
    return [one, a_sample(group_index, member, reward=0.5)] if member else one


def finished(run: Backstage, *group_indexes: int) -> None:
    run.finish(*group_indexes, make=two_turns)
    run.end_of_data()


def test_a_trainer_gets_the_same_batches_from_the_dump_as_from_the_run(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, *range(7))
    with connect(dump_dir=tmp_path, text=True) as live:
        batches = drain(live, 3)
        figures = live.metrics()
    live_shown = [shown(batch.groups) for batch in batches]
    assert [len(one) for one in live_shown] == [3, 3, 1]
    assert [shown(b.groups) for b in read_batches(tmp_path)] == live_shown
    with GroupStream.from_dump(tmp_path) as stream:
        again = drain(stream, 3)
        assert (stream.engines(), stream.info.run) == ([], run.queue.run)
    assert [shown(batch.groups) for batch in again] == live_shown
    assert [b.number for b in again] == [b.number for b in batches]
    for one, other in zip(batches, again, strict=True):
        here, there = one.to_arrays(pad_id=9), other.to_arrays(pad_id=9)
        for mine, read in zip(here.values(), there.values(), strict=True):
            assert isinstance(mine, np.ndarray)
            assert isinstance(read, np.ndarray)
            assert mine.tobytes() == read.tobytes()
    assert figures["stream/dump_failed_groups"] == 0


def test_a_dump_is_batched_anew_as_the_trainer_wishes(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, *range(5))
    with connect(dump_dir=tmp_path) as live:
        drain(live, 2)
    with GroupStream.from_dump(tmp_path) as stream:
        assert [b.group_indexes for b in drain(stream, 4)] == [[0, 1, 2, 3], [4]]
        assert stream.metrics()["stream/acked_here"] == 5
        assert drain(stream, 4) == []


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_dump_is_repeated_as_often_as_asked_and_no_batch_has_two_epochs(
    run: Backstage, connect: Connect, tmp_path: Path, epochs: int
) -> None:
    finished(run, 0, 1, 2)
    with connect(dump_dir=tmp_path) as live:
        drain(live, 8)
    with GroupStream.from_dump(tmp_path, epochs=epochs) as stream:
        assert [b.group_indexes for b in drain(stream, 2)] == [[0, 1], [2]] * epochs


def test_a_state_goes_on_in_the_right_place_whoever_made_it(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, *range(6))
    with connect(dump_dir=tmp_path) as live:
        first = next(live.batches(groups=2, timeout_s=20.0))
        first.ack()
        of_the_run = live.state_dict()
        drain(live, 2)
    with GroupStream.from_dump(tmp_path, state=of_the_run) as stream:
        assert [b.group_indexes for b in drain(stream, 2)] == [[2, 3], [4, 5]]
    with GroupStream.from_dump(tmp_path, epochs=2) as stream:
        states = []
        for batch in stream.batches(groups=4):
            with pytest.raises(StreamError, match="handed out and not acked"):
                stream.state_dict()
            batch.ack()
            states.append(json.loads(json.dumps(stream.state_dict())))
    rest: list[list[list[int]]] = []
    for state in states:
        with GroupStream.from_dump(tmp_path, state=state, epochs=2) as stream:
            rest.append([b.group_indexes for b in drain(stream, 4)])
    whole = [[0, 1, 2, 3], [4, 5]] * 2
    assert rest == [whole[1:], whole[2:], whole[3:], []]
    with pytest.raises(ValueError, match="of pass 2 over a dump"):
        connect(state=states[2])


def test_a_state_of_other_data_is_refused(run: Backstage, connect: Connect, tmp_path: Path) -> None:
    finished(run, 0)
    with connect(dump_dir=tmp_path) as live:
        drain(live, 1)
        state = live.state_dict()
    for change in ({"run": "other"}, {"fingerprint": "other"}):
        with pytest.raises(RunMismatch):
            GroupStream.from_dump(tmp_path, state=state | change)


def test_a_batch_that_is_put_back_comes_first(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, *range(4))
    with connect(dump_dir=tmp_path) as live:
        drain(live, 2)
    with GroupStream.from_dump(tmp_path, epochs=2) as stream:
        one, two, three = (stream.next_batch(2, 1.0) for _ in range(3))
        assert one is not None
        assert two is not None
        assert three is not None
        stream.take_back(two)
        with pytest.raises(ValueError, match="was not handed out"):
            two.ack()
        one.ack()
        three.ack()
        with pytest.raises(StreamError, match="train on them first"):
            stream.state_dict()
        assert [b.group_indexes for b in drain(stream, 2)] == [[2, 3], [2, 3]]


def test_weights_are_noted_and_nobody_is_told(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, 0, 1)
    with connect(dump_dir=tmp_path) as live:
        drain(live, 2)
    with GroupStream.from_dump(tmp_path) as stream:
        batch = next(stream.batches(groups=2))
        with stream.updating_weights(3, ack=batch) as update:
            assert (update.engines, update.version, batch.acked) == ([], 3, False)
            with pytest.raises(RuntimeError, match="only one is under way"):
                stream.updating_weights(4).__enter__()
        assert (batch.acked, stream.version) == (True, 3)
        with pytest.raises(KeyError), stream.updating_weights(9):
            raise KeyError
        assert stream.version == 3
        with pytest.raises(ValueError, match="lower than 3"):
            stream.set_weight_version(2)
        stream.set_weight_version(5, label="five")
        assert stream.state_dict()["weight_version"] == 5
        figures = stream.metrics()
        assert (figures["stream/updates"], figures["stream/updates_failed"]) == (2, 1)


NEEDS_A_RUN: dict[str, Callable[[GroupStream], Any]] = {
    "set_engines": lambda s: s.set_engines(["http://e"]),
    "pause": lambda s: s.pause(),
    "resume": lambda s: s.resume(),
    "drain": lambda s: s.drain(),
    "evaluate": lambda s: s.evaluate("e", ["p"]),
    "withdraw": lambda s: s.withdraw(1),
    "requeue": lambda s: s.requeue(1),
    "abort_run": lambda s: s.abort_run(),
}


@pytest.mark.parametrize("what", NEEDS_A_RUN)
def test_what_needs_a_run_says_that_there_is_none(
    run: Backstage, connect: Connect, tmp_path: Path, what: str
) -> None:
    connect(dump_dir=tmp_path).close()
    with (
        GroupStream.from_dump(tmp_path) as stream,
        pytest.raises(StreamError, match=f"^{what}: .* no run and no engine"),
    ):
        NEEDS_A_RUN[what](stream)


def test_a_stream_of_a_dump_has_the_whole_face_of_a_live_one_and_nothing_of_its_inside() -> None:
    inherited = {"connect", "from_dump", "_iterate", "__enter__", "__exit__"}
    for name, member in (vars(Steering) | vars(GroupStream)).items():
        if name.startswith("_") and name != "_iterate":
            continue
        if name in inherited:
            continue
        assert name in vars(DumpStream), name
        if inspect.isfunction(member):
            mine = inspect.signature(vars(DumpStream)[name])
            assert str(mine) == str(inspect.signature(member)), name


def test_an_asynchronous_trainer_gets_the_same(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, *range(4))
    with connect(dump_dir=tmp_path) as live:
        batches = [shown(b.groups) for b in drain(live, 3)]

    async def train() -> list[Any]:
        found = []
        async with await AsyncGroupStream.from_dump(tmp_path, text=False) as stream:
            async for batch in stream.batches(groups=3):
                found.append(shown(batch.groups))
                async with stream.updating_weights(stream.version + 1, ack=batch) as update:
                    assert update.engines == await stream.engines() == []
            assert (await stream.metrics())["stream/version"] == 2
        return found

    assert asyncio.run(train()) == batches


def test_a_damaged_file_ends_the_stream_with_an_error_again_and_again(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, 0, 1, 2)
    with connect(dump_dir=tmp_path) as live:
        drain(live, 1)
    second = tmp_path / "batch-00000002.rsd"
    raw = bytearray(second.read_bytes())
    raw[-60] ^= 1
    second.write_bytes(raw)
    with GroupStream.from_dump(tmp_path) as stream:
        assert next(stream.batches(groups=1)).group_indexes == [0]
        for _ in range(2):  # it must not look like the end
            with pytest.raises(WireError, match=r"batch-00000002\.rsd at byte"):
                next(stream.batches(groups=1))


# --- the dump beside a training ------------------------------------------------------------------
def test_a_group_that_comes_again_after_a_crash_is_in_the_dump_once(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, *range(4))
    with connect(dump_dir=tmp_path) as first:
        assert next(first.batches(groups=3, timeout_s=20.0)).group_indexes == [0, 1, 2]
    with connect(dump_dir=tmp_path) as second:
        assert [b.group_indexes for b in drain(second, 2)] == [[0, 1], [2, 3]]
        second.close()
        figures = second.metrics()
    assert [b.group_indexes for b in read_batches(tmp_path)] == [[0, 1, 2], [3]]
    assert figures["stream/dumped_groups"] == 4


def test_a_run_that_was_rewound_leaves_what_the_surviving_line_trained_on(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    run.finish(0, 1)
    with connect(dump_dir=tmp_path) as first:
        batches = first.batches(groups=1, timeout_s=20.0)
        next(batches).ack()
        state = first.state_dict()
        next(batches).ack()
    with connect(dump_dir=tmp_path, state=state) as second:
        run.finish(1, make=two_turns)
        (group,) = next(second.batches(groups=1, timeout_s=20.0)).groups
    found = list(read_groups(tmp_path))
    assert [g.group_index for g in found] == [0, 1]
    assert shown(found[1:]) == shown([group])
    assert len(found[1].flat()) == 3, "as it was sampled behind the checkpoint"


def test_a_dump_of_other_data_is_refused_before_the_run_is_taken_over(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "batch-00000001.rsd").write_bytes(b"somebody's")
    owner = connect()
    with pytest.raises(WireError, match="take another folder"):
        connect(dump_dir=tmp_path)
    owner.set_weight_version(1)  # ConsumerTaken where it was


def test_what_the_trainer_does_to_its_batch_is_not_in_the_dump(
    run: Backstage, connect: Connect, tmp_path: Path
) -> None:
    finished(run, 0)
    with connect(dump_dir=tmp_path) as live:
        batch = next(live.batches(groups=1, timeout_s=20.0))
        for sample in batch.flat():
            sample.reward, sample.metadata["mine"] = -9.0, 1
        batch.ack()
    for group in read_groups(tmp_path):
        assert [(s.reward, s.metadata) for s in group.flat()] == [(0.5, {})] * 3
