"""`rollstream dump` against a real server: killed at any instant, on a full disk, and peeking."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.cli.__main__ import main
from rollstream.dump import read_groups
from rollstream.dump.reader import DumpIndex
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage, Connect

NUM_GROUPS = 5


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """Five groups that are ready, and nothing more to come."""
    with Backstage(valkey_url, run_name) as backstage:
        backstage.open().finish(*range(NUM_GROUPS))
        backstage.end_of_data()
        yield backstage


def argv(valkey_url: str, run: Backstage, folder: Path, *more: str) -> list[str]:
    return ["dump", str(folder), "--redis", valkey_url, "--run", run.queue.run, *more]


def acked(run: Backstage) -> int:
    answer = run.queue.call(calls.audit(deep=True))
    assert answer.problems == []
    return answer.acked


def on_disk(folder: Path) -> list[int]:
    """Every record of every file: a group that is there twice is there twice."""
    return [gid for head in DumpIndex(folder).heads.values() for gid, _ in head.groups]


def test_a_run_is_written_and_acked_to_its_end(
    run: Backstage, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv(valkey_url, run, tmp_path, "--groups", "2", "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["batches"], said["groups"], said["taken"], said["ended"]) == (3, 5, True, True)
    assert on_disk(tmp_path) == list(range(NUM_GROUPS))
    assert acked(run) == NUM_GROUPS
    with GroupStream.from_dump(tmp_path) as stream:
        assert [len(b) for b in stream.batches(groups=4)] == [4, 1]
    assert main(["dump", str(tmp_path), "--check"]) == 0
    assert "3 files, 5 groups, 10 samples" in capsys.readouterr().out


def test_a_dump_ends_after_as_many_batches_as_asked_and_goes_on_later(
    run: Backstage, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv(valkey_url, run, tmp_path, "--groups", "2", "--batches", "1")) == 0
    assert (on_disk(tmp_path), acked(run)) == ([0, 1], 2)
    assert main(argv(valkey_url, run, tmp_path, "--groups", "2")) == 0
    assert on_disk(tmp_path) == list(range(NUM_GROUPS))
    assert "3 groups of run" in capsys.readouterr().out


KILLED = """
import os, pathlib, signal, sys
from rollstream.cli.__main__ import main
from rollstream.stream import GroupStream

what, number = sys.argv[1], int(sys.argv[2])
owner, name = {
    "rename": (pathlib.Path, "rename"), "fsync": (os, "fsync"), "ack": (GroupStream, "ack"),
    "acked": (GroupStream, "ack"),
}[what]
real = getattr(owner, name)

def dies(*args, **named):
    global number
    number -= 1
    if number == 0 and what == "acked":
        real(*args, **named)
    if number == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **named)

setattr(owner, name, dies)
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize(
    "instant",
    [
        "rename 2",
        "ack 1",
        "acked 1",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("fsync 1", "rename 1", "fsync 3", "fsync 5", "ack 2")
        ),
    ],
)
def test_killed_at_any_instant_nothing_is_lost_and_nothing_there_twice(
    run: Backstage, valkey_url: str, tmp_path: Path, instant: str
) -> None:
    command = argv(valkey_url, run, tmp_path, "--groups", "2")
    died = subprocess.run(
        [sys.executable, "-c", KILLED, *instant.split(), *command], timeout=60, check=False
    )
    assert died.returncode == -signal.SIGKILL
    if (tmp_path / "manifest.json").exists():
        assert acked(run) <= len(on_disk(tmp_path)), "acked is only what is on the disk"
    assert main(command) == 0
    assert on_disk(tmp_path) == list(range(NUM_GROUPS))
    assert acked(run) == NUM_GROUPS
    assert not list(tmp_path.glob(".tmp-*"))


FULL = """
import resource, sys
from rollstream.cli.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (3500, 3500))
sys.exit(main(sys.argv[1:]))
"""


def test_on_a_full_disk_nothing_is_acked_that_is_not_there(
    run: Backstage, valkey_url: str, tmp_path: Path
) -> None:
    command = argv(valkey_url, run, tmp_path, "--groups", "2")
    done = subprocess.run(
        [sys.executable, "-c", FULL, *command[:-1], "4"], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("rollstream: error: ")
    assert "File too large; what is acked is on the disk, and all else comes again" in said
    assert "Traceback" not in done.stderr
    assert (on_disk(tmp_path), acked(run)) == ([], 0)
    assert main(command) == 0
    assert on_disk(tmp_path) == list(range(NUM_GROUPS))


def test_a_peek_copies_what_is_ready_and_what_is_with_the_trainer_and_takes_nothing(
    run: Backstage,
    connect: Connect,
    valkey_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = connect()
    batch = next(live.batches(groups=2, timeout_s=20.0))
    command = argv(valkey_url, run, tmp_path, "--peek", "--groups", "3")
    for more in ([], ["--json"]):
        assert main([*command, *more]) == 0
    said = json.loads(capsys.readouterr().out.partition("{")[2].join("{ "))
    assert (said["groups"], said["recognised"], said["taken"]) == (0, NUM_GROUPS, False)
    assert on_disk(tmp_path) == list(range(NUM_GROUPS))
    assert acked(run) == 0
    batch.ack()  # ConsumerTaken where the peek had taken the run over
    copied = {g.group_index: g for g in read_groups(tmp_path)}
    for group in batch:
        mine = copied[group.group_index]
        assert [s.to_dict() for s in mine.flat()] == [s.to_dict() for s in group.flat()]


def test_the_dump_of_another_run_is_refused_and_the_run_not_taken(
    run: Backstage,
    connect: Connect,
    valkey_url: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    owner = connect()
    with Backstage(valkey_url, f"{run.queue.run}-other") as other:
        other.open()
        assert main(argv(valkey_url, other, tmp_path, "--peek")) == 0
    assert main(argv(valkey_url, run, tmp_path)) == 2
    assert "take another folder" in capsys.readouterr().err
    owner.set_weight_version(1)


@pytest.mark.parametrize("more", [[], ["--peek"]])
def test_a_run_that_does_not_exist_is_said_to_be_none(
    valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    command = ["dump", str(tmp_path), "--redis", valkey_url, "--run", "nobody", *more]
    assert main(command) == 3
    assert "no run 'nobody'" in capsys.readouterr().err


def test_a_check_names_what_is_damaged(
    run: Backstage, valkey_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv(valkey_url, run, tmp_path)) == 0
    path = tmp_path / "batch-00000001.rsd"
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["dump", str(tmp_path), "--check"]) == 1
    assert "batch-00000001.rsd at byte" in capsys.readouterr().err
