"""The file by whose age a health check sees that a producer or verifier is alive."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollstream import heartbeat
from rollstream.heartbeat import Heartbeat


def test_heartbeat_renews_its_files_time_at_most_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    beating, file = Heartbeat(tmp_path / "alive"), tmp_path / "alive"
    beating.beat()
    assert file.exists()
    os.utime(file, (1.0, 1.0))
    now += heartbeat.BEAT_S / 2
    beating.beat()
    assert file.stat().st_mtime == 1.0
    now += heartbeat.BEAT_S
    beating.beat()
    assert file.stat().st_mtime > 1.0


def test_heartbeat_that_cannot_be_written_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    beating = Heartbeat(tmp_path / "gone" / "alive")
    beating.beat()
    beating.beat()
    assert [record.message for record in caplog.records] == ["heartbeat_not_written"]
    (tmp_path / "gone").mkdir()
    beating.beat()
    assert (tmp_path / "gone" / "alive").exists()


async def test_heartbeat_beats_for_as_long_as_the_loop_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    beats = 0

    def count(path: Path) -> None:
        nonlocal beats
        beats += 1

    monkeypatch.setattr(Path, "touch", count)
    running = asyncio.create_task(Heartbeat(tmp_path / "alive").run())
    while beats < 3:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_heartbeat_does_nothing_where_no_file_is_asked_for() -> None:
    Heartbeat(None).beat()
