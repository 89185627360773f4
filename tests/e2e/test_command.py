"""What the commands of proofs share: which folders stay, and how a run ends."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.command import EXIT_WRONG, conclude, new_folder


@pytest.mark.parametrize(
    ("older", "kept", "left"), [(0, 5, 0), (3, 5, 3), (4, 5, 4), (7, 5, 4), (2, 1, 0)]
)
def test_new_folder_keeps_the_latest_and_no_more(
    tmp_path: Path, older: int, kept: int, left: int
) -> None:
    for number in range(older):
        (tmp_path / str(number)).mkdir()
        os.utime(tmp_path / str(number), (number, number))
    made = new_folder(tmp_path, kept=kept)
    stayed = sorted(path.name for path in tmp_path.iterdir() if path != made)
    assert stayed == [str(number) for number in range(older - left, older)]


@dataclass
class Figures:
    broken: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return "{}"


@pytest.mark.parametrize(
    ("figures", "code"),
    [(Figures(), 0), (Figures(broken=["a"]), EXIT_WRONG), (Figures(missing=["b"]), EXIT_WRONG)],
)
def test_conclude_is_wrong_where_a_promise_is_broken_or_too_little_happened(
    figures: Figures, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude("proof", figures, ["found"], tmp_path) == code
    out, said = capsys.readouterr()
    assert out == "{}\n"
    assert "found" in said
    assert (str(tmp_path) in said) is bool(code)
