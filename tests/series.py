"""How many series a scrape has, counted in what is served."""

from __future__ import annotations

from typing import Protocol


class Served(Protocol):
    """What `/metrics` is answered with."""

    def render(self) -> bytes: ...


def num_series(served: Served) -> int:
    """Return the number of samples in an exposition."""
    return sum(not line.startswith(b"#") for line in served.render().splitlines() if line)
