"""Two runs in one Redis, and what an old run, another layout and a vanished run do to newcomers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.cli.__main__ import main
from rollstream.errors import RunLost, RunMismatch
from rollstream.queue import calls
from rollstream.queue.queue import Queue
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.integration.producer.scene import producing, rows_file, settings_of
from tests.integration.worker.parts import Parts
from tests.integration.worker.processes import start


@pytest.fixture
def names(run_name: str) -> tuple[str, str]:
    """Two names, one of which is the beginning of the other."""
    return run_name, f"{run_name}-b"


def trained_of(url: str, run: str) -> list[tuple[int, str]]:
    with GroupStream.connect(url, run=run) as stream:
        trained = []
        for batch in stream.batches(groups=3, timeout_s=45):
            trained += [(group.group_index, str(group.flat()[0].prompt)) for group in batch]
            batch.ack()
        return trained


async def test_producers_workers_and_trainers_of_two_runs_do_not_see_each_other(
    valkey_url: str, names: tuple[str, str], tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    files = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        rows = [{"prompt": f"run {number} row {k}"} for k in range(9)]
        files.append(rows_file(folder, rows))
    queues = [Queue.connect(valkey_url, name) for name in names]
    parts = [Parts(queue) for queue in queues]
    async with (
        producing(settings_of(valkey_url, names[0], files[0])),
        producing(settings_of(valkey_url, names[1], files[1])),
    ):
        for part in parts:
            part.start()
        found = await asyncio.gather(
            *(asyncio.to_thread(trained_of, valkey_url, name) for name in names)
        )
        for part in parts:
            await part.stop()
    for number, (queue, trained) in enumerate(zip(queues, found, strict=True)):
        assert sorted(g for g, _ in trained) == list(range(9))
        assert all(f"run {number} row" in prompt for _, prompt in trained)
        counters = await queue.counters()
        assert (counters["enqueued"], counters["completed"], counters["acked"]) == (9, 18, 9)
        assert (await queue.call(calls.audit(deep=True))).problems == []
        await queue.aclose()


def test_what_is_done_to_one_run_leaves_the_other_as_it_is(
    valkey_url: str, names: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Backstage(valkey_url, names[0]) as one, Backstage(valkey_url, names[1]) as other:
        for run in (one, other):
            run.open().finish(0, 1)
            run.enqueue(2)
        before = other.keys()
        lease = one.lease()[0]
        one.queue.call(calls.pause())
        one.queue.call(calls.set_version(7))
        one.queue.call(calls.sweep())
        # A lease of one run is none of the other.
        done = calls.Completion(lease, b"h", b"b")
        assert [a.outcome for a in other.queue.call(calls.complete([done]))] == ["fenced"]
        assert other.queue.call(calls.beat("w", [lease.id])).lost == [lease.id]
        assert main(["runs", "--redis", valkey_url, "--remove", names[0], "--yes", "--force"]) == 0
        capsys.readouterr()
        assert one.keys() == {}
        changed = {name for name, value in other.keys().items() if before.get(name) != value}
        # Presence of the worker that beat, and the count of what was fenced; no group, no member.
        assert {name.decode().rsplit(":", 1)[1] for name in changed} <= {"w", "c", "m"}
        assert other.queue.depths()["live"] == 3
        assert other.queue.call(calls.audit(deep=True)).problems == []
        info = other.queue.info()
        assert info is not None
        assert (info.state, info.version) == ("running", 0)


# --- an old run of that name ----------------------------------------------------------------------
class Old:
    """A run with data of another producer, left behind with groups in every state."""

    def __init__(self, backstage: Backstage) -> None:
        self.backstage, self.queue = backstage, backstage.queue

    def leave(self) -> None:
        self.queue.call(calls.present("producer", "p", leaving=True))
        self.queue.call(calls.present("worker", self.backstage.worker, leaving=True))


@pytest.fixture
def old(valkey_url: str, run_name: str) -> Iterator[Old]:
    with Backstage(valkey_url, run_name) as backstage:
        backstage.open("old data").finish(0, 1)
        backstage.enqueue(2, 3)
        backstage.lease(1)
        yield Old(backstage)


def produce(folder: Path, url: str, run: str, *argv: str) -> tuple[int, str]:
    """Run a producer to the end of its data; its exit code and what it said."""
    log = folder / "producer.log"
    log.unlink(missing_ok=True)
    process = start(
        "producer", "--redis.url", url, "--run.name", run, "--producer.source",
        f"jsonl:{rows_file(folder, 5)}", "--producer.stay", "false", *argv, log=log,
    )  # fmt: skip
    try:
        return process.wait(45), log.read_text()
    finally:
        process.kill()


@pytest.mark.slow
def test_other_data_under_an_old_name_is_refused_unless_the_producer_begins_fresh(
    old: Old, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    old.leave()
    before = old.backstage.keys()
    code, said = produce(tmp_path, valkey_url, run_name)
    assert code == 4
    assert "exists already with other data" in said
    assert "python -m producer --fresh" in said
    assert old.backstage.keys() == before

    code, said = produce(tmp_path, valkey_url, run_name, "--fresh")
    assert code == 0, said
    removed = [json.loads(line) for line in said.splitlines() if "run_removed" in line]
    assert removed[0]["live"] == 4
    info = old.queue.info()
    assert info is not None
    assert info.fingerprint != "old data"
    assert (old.queue.counters(), old.queue.depths()["live"]) == ({"enqueued": 5}, 5)
    assert old.queue.call(calls.audit(deep=True)).problems == []


@pytest.mark.slow
def test_fresh_leaves_a_run_in_use_unless_it_is_forced(
    old: Old, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    before = old.backstage.keys()
    code, said = produce(tmp_path, valkey_url, run_name, "--fresh")
    assert code == 4
    assert f"is in use: producer p; worker {old.backstage.worker}" in said
    assert "--fresh=force" in said
    assert old.backstage.keys() == before
    code, said = produce(tmp_path, valkey_url, run_name, "--fresh=force")
    assert code == 0, said
    assert old.queue.depths()["live"] == 5


def test_fresh_with_another_word_than_force_is_refused_by_name(
    old: Old, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    before = old.backstage.keys()
    code, said = produce(tmp_path, valkey_url, run_name, "--fresh=yes")
    assert code == 2
    assert "--fresh=yes: expected --fresh or --fresh=force" in said
    assert old.backstage.keys() == before


def test_a_wrong_row_leaves_the_old_run_as_it_is(
    old: Old, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    old.leave()
    before = old.backstage.keys()
    log = tmp_path / "log"
    process = start(
        "producer", "--fresh", "--redis.url", valkey_url, "--run.name", run_name,
        "--producer.source", f"jsonl:{rows_file(tmp_path, ['no json'])}", log=log,
    )  # fmt: skip
    assert process.wait(45) == 2
    assert old.backstage.keys() == before


def test_a_trainer_of_the_old_data_tells_nothing_to_a_run_that_was_begun_anew(
    old: Old, valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    with GroupStream.connect(valkey_url, run=run_name) as stream:
        batch = stream.next_batch(2, 5)
        assert batch is not None
        stream.set_weight_version(9)
        old.leave()
        code, said = produce(tmp_path, valkey_url, run_name, "--fresh")
        assert code == 0, said
        with pytest.raises(RunMismatch, match="begun anew with other data"):
            batch.ack()
        with pytest.raises(RunMismatch, match="begun anew with other data"):
            stream.next_batch(1, 5)
    state = old.queue.call(calls.state())
    assert (state.frontier, state.bitmap) == (0, b"")
    info = old.queue.info()
    assert info is not None
    assert (info.version, info.connects) == (0, 0)


@pytest.mark.slow
def test_a_removal_that_was_interrupted_is_refused_by_name_and_can_be_repeated(
    old: Old, valkey_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old.leave()

    def dies(queue: object, leave: bytes = b"") -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rollstream.removal._unlink", dies)
        command = ["runs", "--redis", valkey_url, "--remove", run_name, "--yes"]
        assert main(command) == 130
    assert old.backstage.enqueue(9) == ["aborting"]
    assert produce(tmp_path, valkey_url, run_name)[0] == 4
    assert produce(tmp_path, valkey_url, run_name, "--fresh")[0] == 0
    assert old.queue.call(calls.audit(deep=True)).problems == []


# --- another layout -------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_run_of_another_layout_is_refused_by_everybody_and_left_as_it_is(
    old: Old, valkey_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old.leave()
    old.queue.client.hset(f"{old.queue.prefix}m", "schema", 99)
    old.queue.client.hdel(f"{old.queue.prefix}m", "frontier")  # it has other fields, too
    before = old.backstage.keys()
    code, said = produce(tmp_path, valkey_url, run_name)
    assert code == 4
    assert "layout 99" in said

    log = tmp_path / "worker.log"
    worker = start(
        "worker", "--redis.url", valkey_url, "--run.name", run_name, "--worker.role", "aggregator",
        "--telemetry.metrics_port", "0", log=log,
    )  # fmt: skip
    try:
        assert worker.wait(45) == 4
    finally:
        worker.kill()
    assert "layout 99, this one has 1" in log.read_text()

    with pytest.raises(RunMismatch, match="layout 99, this one has 1"):
        GroupStream.connect(valkey_url, run=run_name, connect_timeout_s=5)
    for command in (["stats"], ["audit"]):
        assert main([*command, "--redis", valkey_url, "--run", run_name]) == 1
        assert "layout 99, this one has 1" in capsys.readouterr().err
    assert old.backstage.keys() == before
    assert produce(tmp_path, valkey_url, run_name, "--fresh")[0] == 0


# --- a run that vanished --------------------------------------------------------------------------
async def test_a_run_that_vanished_is_run_lost_to_the_trainer_and_waited_for_by_the_worker(
    valkey_url: str, run_name: str
) -> None:
    with Backstage(valkey_url, run_name) as backstage:
        backstage.open().enqueue(0)
        queue = Queue.connect(valkey_url, run_name)
        parts = Parts(queue)
        parts.start()
        with GroupStream.connect(valkey_url, run=run_name, connect_timeout_s=1) as stream:
            first = await asyncio.to_thread(stream.next_batch, 1, 10)
            assert first is not None
            backstage.queue.client.delete(*backstage.keys())
            with pytest.raises(RunLost, match=f"no run '{run_name}'"):
                await asyncio.to_thread(stream.next_batch, 1, 10)
            assert parts.view.state == "lost"
            assert parts.working is not None
            assert not parts.working.done()
            # A producer opens it again: the worker goes on, and so does the trainer.
            backstage.open().enqueue(1)
            second = await asyncio.to_thread(stream.next_batch, 1, 10)
            assert second is not None
            assert second.group_indexes == [1]
            await asyncio.to_thread(first.ack)
            await asyncio.to_thread(second.ack)
        await asyncio.to_thread(wait_until, lambda: parts.view.state == "running")
        assert (await queue.call(calls.audit(deep=True))).problems == []
        await parts.stop()
        await queue.aclose()
