"""Following control words: where the gate belongs, what is told of engines, and how it ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from rollstream.errors import RunMismatch
from rollstream.link import Link
from rollstream.queue.keys import MAX_ENGINES_BYTES
from rollstream.sample import UNKNOWN_VERSION
from worker.engines.fleet.states import EngineState, State
from worker.members.gate import Gate, Position
from worker.members.view import RunView
from worker.process.following import Follower, engines_json, position_of


@pytest.mark.parametrize(
    ("state", "mode", "position"),
    [
        ("running", "", Position.OPEN),
        ("running", "abort", Position.OPEN),  # of a pause that is over
        ("paused", "keep", Position.KEEP),
        ("paused", "abort", Position.ABORT),
        ("paused", "", Position.KEEP),
        ("aborting", "abort", Position.OPEN),  # its members are cancelled instead
        ("ended", "keep", Position.OPEN),
        ("lost", "abort", Position.OPEN),
        ("unknown", "", Position.OPEN),
    ],
)
def test_only_a_pause_shuts_the_gate(state: str, mode: str, position: Position) -> None:
    assert position_of(RunView(state=state, pause_mode=mode)) is position


def an_engine(number: int, size: int = 0) -> EngineState:
    url = f"http://engine-{number}{'x' * size}"
    return EngineState(url, "sglang", State.BEHIND, UNKNOWN_VERSION, 3, 0)


def test_engines_are_told_as_json_that_others_read() -> None:
    assert json.loads(engines_json([an_engine(1)])) == [
        {
            "url": "http://engine-1", "kind": "sglang", "state": "behind", "version": -1,
            "in_flight": 3, "limit": 0, "problem": "",
        }
    ]  # fmt: skip


@pytest.mark.parametrize(("count", "size"), [(1000, 0), (3, 8000), (1, 20_000)])
def test_engines_that_are_too_many_are_left_out_and_never_refused(count: int, size: int) -> None:
    text = engines_json([an_engine(number, size) for number in range(count)])
    assert len(text) <= MAX_ENGINES_BYTES
    assert len(json.loads(text)) < count


def test_engines_are_told_without_their_problems_before_one_is_left_out() -> None:
    states = [replace(an_engine(number), problem="p" * 200) for number in range(40)]
    assert len(json.loads(engines_json(states))[0]["problem"]) == 200
    states = [replace(an_engine(number), problem="p" * 200) for number in range(100)]
    told = json.loads(engines_json(states))
    assert len(told) == 100
    assert {row["problem"] for row in told} == {""}


class Reopened:
    """A queue whose run another version opened anew."""

    async def read_control(self, last_id: str, *, block_s: float) -> Any:
        return "0-0", []

    async def info(self) -> Any:
        raise RunMismatch("written by another version")


async def test_a_run_of_another_version_ends_the_worker_with_its_own_error() -> None:
    nothing: Any = None
    queue: Any = Reopened()
    follower = Follower(
        queue, Link(), RunView(), name="w", gate=Gate(), fleet=nothing, let_go_s=0.0
    )
    with pytest.raises(RunMismatch):
        await asyncio.wait_for(follower.run(), 5)


async def test_a_worker_that_obeyed_nothing_confirms_nothing() -> None:
    class Fleet:
        def states(self) -> list[EngineState]:
            return []

    nothing: Any = None
    fleet: Any = Fleet()
    follower = Follower(nothing, Link(), RunView(), name="w", gate=Gate(), fleet=fleet)
    assert (follower.obeyed, follower.confirmations()) == (-1, [])
