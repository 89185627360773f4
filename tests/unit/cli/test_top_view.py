"""The page and the line of `top`: what they show, at every width, and of whatever text."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from rollstream.cli.top.diagnosis import diagnose, unreachable
from rollstream.cli.top.figures import figures, line, unread
from rollstream.cli.top.snapshot import Window
from rollstream.cli.top.view import Page

from .looks import a_look, an_engine, looks

BUSY = looks(
    each={"acked": 4, "dropped:zero_std": 2, "completed": 48}, depths={"q": 40, "live": 64}
)


def record() -> dict[str, Any]:
    return figures(Window(BUSY), diagnose(BUSY))


def drawn(shown: dict[str, Any], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Page(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 83, 84, 100, 200])
def test_page_fits_the_terminal_and_names_the_cause_at_every_width(width: int) -> None:
    lines = drawn(record(), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "what holds it up" in text
    assert "nothing" in text
    assert "64/64" in text
    assert "zero_std" in text


def test_page_of_a_run_that_cannot_be_read_says_only_why() -> None:
    lines = drawn(unread("r", "unreachable", unreachable("refused")), 80)
    text = "\n".join(lines)
    assert "redis_down" in text
    assert "groups/min" not in text


def test_line_is_one_line_with_rates_places_and_the_cause() -> None:
    said = line(record())
    assert "\n" not in said
    for part in ("180 groups/min", "queued 40", "live 64/64", "nothing:"):
        assert part in said


def test_rates_are_of_the_looks_and_there_are_none_of_one_look() -> None:
    known = figures(Window(BUSY), diagnose(BUSY))
    # Nine steps of two seconds: 6 groups and 48 samples each.
    assert (known["groups_per_min"], known["samples_per_min"]) == (180.0, 1440.0)
    assert known["acked_per_min"] == 120.0
    one = [a_look()]
    assert figures(Window(one), diagnose(one))["groups_per_min"] is None
    assert "- groups/min" in line(figures(Window(one), diagnose(one)))


def test_what_a_worker_wrote_cannot_write_on_the_terminal() -> None:
    evil = an_engine("down")
    evil.problem = "no\x1b[2Jtoken\nx"
    found = looks(engines=(evil,), state="failed", error="bad\x1b[31m\nthing")
    shown = figures(Window(found), diagnose(found))
    for text in (line(shown), str(shown["evidence"])):
        assert text.isprintable()
