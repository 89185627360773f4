"""`show --text` and the arguments of `show`: colours where they help, plain text elsewhere."""

from __future__ import annotations

import argparse
import io
import sys
from typing import Any

import pytest

from rollstream.cli.gather import of_finished
from rollstream.cli.reasons import MEANS
from rollstream.cli.show_options import add_show_options
from rollstream.cli.transcript import print_turns
from rollstream.errors import DropReason
from tests.builders import a_group, a_sample


class Terminal(io.StringIO):
    """A standard output that says it is a terminal."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def printed(out: Any, monkeypatch: pytest.MonkeyPatch, **settings: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color"} | settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out)
    said = "[red]markup[/red] \x1b[2J </x> \u202e"
    messages = [{"role": "user", "content": said},
                {"role": "assistant", "content": "<think>hm</think>It is 8."}]  # fmt: skip
    calls = [{"turn": 0, "name": "add", "arguments": '{"a": 1}', "executed": False}]
    sample = a_sample(7, 0, metadata={"messages": messages, "tool_calls": calls})
    print_turns(of_finished(a_group(7, [sample]), "d"), None)
    return str(out.getvalue())


def test_turns_are_coloured_on_a_terminal_and_the_words_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = printed(Terminal(), monkeypatch)
    assert "\x1b[32mIt is 8." in text  # the assistant's green
    assert "\x1b[34m[user]" in text
    assert "[red]markup[/red] ⟨U+001B⟩[2J </x> ⟨U+202E⟩" in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    ("out", "settings"), [(Terminal(), {"NO_COLOR": "1"}), (io.StringIO(), {})]
)
def test_turns_are_plain_without_a_terminal_and_with_no_color(
    monkeypatch: pytest.MonkeyPatch, out: Any, settings: dict[str, str]
) -> None:
    text = printed(out, monkeypatch, **settings)
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line]
    assert lines == [
        "member 0: completed, reward 1",
        "  text: the messages that [debug] messages kept",
        "[user]",
        "[red]markup[/red] ⟨U+001B⟩[2J </x> ⟨U+202E⟩",
        "[assistant] turn 0, 2 tokens, stop",
        "<think>hm</think>",
        "It is 8.",
        '  -> add (not run) {"a": 1}',
    ]


def test_turns_are_printed_on_a_terminal_of_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    out.getvalue = lambda: raw.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "?U+001B?[2J" in printed(out, monkeypatch)


@pytest.mark.parametrize(
    ("text", "members"), [("0", {0}), ("0,3", {0, 3}), ("8-11, 2", {2, 8, 9, 10, 11})]
)
def test_members_are_named_by_numbers_and_ranges(text: str, members: set[int]) -> None:
    assert parsed("--members", text).members == members


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "4096", "0-99999", "¹", "1,,2"])
def test_members_that_are_none_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(f"--members={text}")
    assert "--members" in capsys.readouterr().err


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_show_options(parser)
    return parser.parse_args(argv)


def test_every_reason_of_a_drop_is_explained() -> None:
    assert set(MEANS) == {reason.value for reason in DropReason}
    assert all(MEANS.values())
