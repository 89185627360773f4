"""Memory that is kept back, so that a process without any can still give back what it runs.

Owns the reserve and the look at whether memory is short. Never ends anything: it tells whoever
asked. Invariant: the reserve is address space that nobody touched, so it costs no memory, and it is
let go at the first MemoryError in a process that has none left, before anything else is tried:
without it the event loop cannot even read a reply (it asks for 256 KiB at a time), and members that
did nothing would be charged with the expiry of their leases.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

RESERVE_BYTES = 32 << 20
PROBE_BYTES = 64 << 20
"""More than the reserve, so that memory stays short when that was let go."""


class Memory:
    """The reserve of this process.

    Attributes:
        num_errors: MemoryErrors of user functions so far.
    """

    def __init__(self) -> None:
        self.num_errors = 0
        self._reserve: mmap.mmap | None = None
        self._tell: Callable[[], None] | None = None

    def keep(self, tell: Callable[[], None]) -> None:
        """Keep a reserve; `tell` is called once it had to be let go."""
        self.release()
        self._reserve = mmap.mmap(-1, RESERVE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._tell = tell

    def release(self) -> None:
        """Let the reserve go, and tell nobody."""
        if self._reserve is not None:
            self._reserve.close()
        self._reserve = self._tell = None

    def ran_out(self) -> None:
        """Hear of a MemoryError."""
        self.num_errors += 1
        tell = self._tell
        if tell is not None and is_short():
            self.release()
            tell()


def is_short() -> bool:
    """Whether this process cannot get even a little memory any more (it has a limit)."""
    try:
        bytearray(PROBE_BYTES)
    except MemoryError:
        return True
    return False


MEMORY = Memory()
"""Of this process; memory is the process's, whatever runs in it."""
