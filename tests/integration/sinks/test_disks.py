"""A full disk under `debug.wire_dir`: rollouts go on, and a file that is there is whole."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.integration.sinks.stage import GROUPS, N, Stage, audited, whole_run

pytestmark = pytest.mark.slow
LIMIT = 2500
"""Bytes that a file may have: requests do, longer replies do not."""


def test_a_full_disk_for_the_bytes_of_engines_fails_no_rollout(
    stage: Stage, unbroken: dict[int, list[str]]
) -> None:
    wires = stage.folder / "wires"
    how = {"stderr": subprocess.DEVNULL, "file_bytes": LIMIT}
    flags = ("--debug.wire_dir", str(wires))
    with whole_run(stage, lambda _: how, flags) as (found, worker, _):
        assert found == unbroken
        assert audited(stage) == (GROUPS, GROUPS)
        assert stage.stop(worker) == 0
    kept = {path.name: path.read_bytes() for path in wires.iterdir()}
    requests = {name for name in kept if name.endswith(".req")}
    replies = {name for name in kept if name.endswith(".rep")}
    assert len(requests) >= GROUPS * N
    assert len(replies) < len(requests), "some had no room"
    for raw in kept.values():
        json.loads(raw)
        assert len(raw) <= LIMIT


def test_a_folder_that_cannot_be_made_fails_no_rollout(
    stage: Stage, unbroken: dict[int, list[str]]
) -> None:
    (stage.folder / "file").write_text("no folder")
    flags = ("--debug.wire_dir", str(stage.folder / "file" / "wires"))
    with (
        (stage.folder / "log").open("wb") as log,
        whole_run(stage, lambda _: {"stderr": log}, flags) as (found, worker, _),
    ):
        assert found == unbroken
        assert stage.stop(worker) == 0
    lines = [json.loads(line) for line in (stage.folder / "log").read_text().splitlines()]
    assert [line["event"] for line in lines].count("wire_log_failed") == 1
