"""docs/trainer.md names what there is: every array, every end."""

from __future__ import annotations

from pathlib import Path

from rollstream import errors
from rollstream.arrays import TrainArrays

PAGE = (Path(__file__).parents[3] / "docs" / "trainer.md").read_text(encoding="utf-8")


def test_trainer_page_describes_every_array() -> None:
    missing = [name for name in TrainArrays.__annotations__ if f"`{name}`" not in PAGE]
    assert missing == []


def test_trainer_page_describes_every_end() -> None:
    ends = [kind.__name__ for kind in errors.StreamError.__subclasses__()]
    assert "StreamStalled" in ends
    assert [name for name in ends if f"`{name}`" not in PAGE] == []
