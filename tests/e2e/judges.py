"""Group rewards of the runs in `test_judged.py`."""

from __future__ import annotations

from rollstream.group import Trajectory
from rollstream.sample import Sample


async def ranked(samples: list[Trajectory]) -> list[dict[str, float]]:
    """Compare the samples of a group: the longer a reply, the higher its rank."""
    lengths = [(_one(s).response_length, _one(s).member) for s in samples]
    return [{"rank": float(sorted(lengths).index(length))} for length in lengths]


def alike(samples: list[Trajectory]) -> list[float]:
    """Find all samples of a group equally good."""
    return [0.5] * len(samples)


def _one(trajectory: Trajectory) -> Sample:
    assert isinstance(trajectory, Sample)
    return trajectory
