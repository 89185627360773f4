"""The benchmark of weight updates: what it takes for the bubble is what the engines saw."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.doors import Door
from benchmarks.updates import Note, Seen, Update, figures, look, ranked_ms
from examples.devserver import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
A, B, C = 101, 102, 103
UPDATE = Update(asked_s=10.0, entered_s=10.25, left_s=10.5, done_s=10.625)
RUNNING: list[Note] = [(1.0, A, 1), (2.0, B, 1), (3.0, A, 1), (4.0, C, 1), (5.0, C, -1)]
"""Two calls of A, one of B, none of C any more."""
STOPPED: list[Note] = [(10.125, A, -1), (10.1875, A, -1), (10.25, B, -1)]


def test_abort_holds_up_whoever_had_a_call_and_the_slowest_of_them_counts() -> None:
    behind = [(10.5625, C, 1), (10.625, A, 1), (10.75, B, 1), (10.875, A, 1)]
    seen = look(UPDATE, [*RUNNING, *STOPPED, *behind], 20.0, "abort")
    assert seen == Seen(
        in_flight=3, held_up=2, silent=0, inside=0, first_call_s=0.25, refill_s=0.25
    )


def test_a_worker_that_sends_nothing_until_the_next_update_is_silent() -> None:
    notes = [*RUNNING, *STOPPED, (10.625, A, 1), (12.0, B, 1)]
    seen = look(UPDATE, notes, 11.0, "abort")
    assert (seen.held_up, seen.silent, seen.first_call_s) == (2, 1, 0.125)
    assert seen.refill_s is None


def test_requests_inside_the_body_are_counted() -> None:
    notes = sorted([*RUNNING, *STOPPED, (10.375, A, 1), (10.4375, B, 1)])
    assert look(UPDATE, notes, 20.0, "abort").inside == 2


def test_keep_holds_up_whoever_had_more_answers_than_new_requests() -> None:
    answered = [(10.125, A, -1), (10.1875, A, 1), (10.375, B, -1)]
    behind = [(10.5625, A, 1), (10.75, B, 1)]
    seen = look(UPDATE, [*RUNNING, *answered, *behind], 20.0, "keep")
    assert (seen.in_flight, seen.held_up, seen.silent, seen.first_call_s) == (3, 1, 0, 0.25)
    nobody = look(UPDATE, [*RUNNING, *behind], 20.0, "keep")
    assert (nobody.held_up, nobody.first_call_s, nobody.refill_s) == (0, 0.0, 0.0)


def test_figures_add_what_entering_took_to_the_first_call() -> None:
    seen = Seen(in_flight=3, held_up=2, silent=0, inside=0, first_call_s=0.25, refill_s=0.5)
    late = dataclasses.replace(seen, first_call_s=0.75, silent=1, refill_s=None)
    found = figures([UPDATE, UPDATE, UPDATE], [seen, seen, late])
    assert (found["enter_ms_p50"], found["exit_ms_max"]) == (250.0, 125.0)
    assert (found["bubble_ms_p50"], found["bubble_ms_p99"], found["bubble_ms_max"]) == (
        500.0, 1000.0, 1000.0,
    )  # fmt: skip
    assert (found["not_refilled"], found["silent_workers"], found["refill_ms_max"]) == (1, 1, 500.0)


@pytest.mark.parametrize(("share", "value"), [(0.5, 51.0), (0.99, 100.0), (1.0, 100.0)])
def test_ranks_are_values_that_were_measured(share: float, value: float) -> None:
    assert ranked_ms([n / 1000 for n in range(100, 0, -1)], share) == value
    assert ranked_ms([], share) is None


class _Exchange:
    """A request, and what became of it."""

    on_close: Any = None

    def __init__(self, path: str, body: bytes) -> None:
        self.path, self.body = path, body
        self.said: list[object] = []

    def answer(self, status: int, body: bytes, *more: Any) -> None:
        self.said.append(status)

    def drop(self) -> None:
        self.said.append("dropped")


@pytest.mark.parametrize("ending", ["answered", "dropped", "left"])
def test_the_door_notes_a_call_of_a_worker_once_at_each_end(ending: str) -> None:
    taken: list[Any] = []
    door: Any = Door(taken.append)
    call = _Exchange("/generate", b'{"rid":"0","routing_key":"w17-ab","input_ids":[1]}')
    door(call)
    assert [note[1:] for note in door.notes] == [(17, 1)]
    assert door.in_flight == 1
    taken[0].on_close = lambda: None
    if ending == "answered":
        taken[0].answer(200, b"{}")
    elif ending == "dropped":
        taken[0].drop()
    call.on_close()  # the connection closes at last, whatever came before
    assert [note[1:] for note in door.notes] == [(17, 1), (17, -1)]
    assert door.in_flight == 0
    assert call.said == {"answered": [200], "dropped": ["dropped"], "left": []}[ending]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/generate", b'{"input_ids":[1]}'), ("/pause", b'{"routing_key":"w17-ab"}')],
)
def test_the_door_passes_what_is_no_call_of_a_worker(path: str, body: bytes) -> None:
    taken: list[Any] = []
    door: Any = Door(taken.append)
    exchange = _Exchange(path, body)
    door(exchange)
    assert taken == [exchange]
    assert door.notes == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_short_run_updates_real_workers_and_says_so(mode: str) -> None:
    options = f"--mode {mode} --workers 2 --in-flight 8 --updates 3 --engines 1".split()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.updates", "--json", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=True,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["updates"], said["silent_workers"]) == (3, 0)
    assert said["calls_in_flight"] >= 12
    if mode == "abort":
        assert (said["calls_inside"], said["workers_held_up_mean"]) == (0, 2.0)
