"""The two tools of the proof: real functions, whose results the checker computes again.

Never anything else: what a tool may do is `worker.tools`' business.
"""

from __future__ import annotations


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


async def sub(a: int, b: int = 0) -> int:
    """Subtract two numbers.

    Args:
        a: the first one.
        b: what is taken away.
    """
    return a - b


PATHS = ("tests.e2e.fidelity.tools:add", "tests.e2e.fidelity.tools:sub")
