"""What a verifier's processes show each other: one page of shared memory per slot.

Owns the layout. Never blocks. Invariant: what a slot says of its job is complete whenever it says
that it is busy, also where its process was killed in the middle of a write.
"""

from __future__ import annotations

import contextlib
import json
import mmap

_SLOT_BYTES = 4096
_BUSY, _RETIRED, _SIZE, _TEXT = 0, 1, 2, 4


class Desk:
    """Made by the supervisor before it forks; a slot is written by its one server."""

    def __init__(self, num_slots: int) -> None:
        self._memory = mmap.mmap(-1, num_slots * _SLOT_BYTES)

    def begin(self, slot: int, address: dict[str, str]) -> None:
        """Say that a job runs, and who waits for it: `run`, `inbox`, `token`, `job`."""
        text = json.dumps(address).encode()[: _SLOT_BYTES - _TEXT]
        at = slot * _SLOT_BYTES
        self._memory[at + _TEXT : at + _TEXT + len(text)] = text
        self._memory[at + _SIZE : at + _TEXT] = len(text).to_bytes(2, "little")
        self._memory[at + _BUSY] = 1

    def end(self, slot: int) -> None:
        """Say that its end was told."""
        self._memory[slot * _SLOT_BYTES + _BUSY] = 0

    def is_busy(self, slot: int) -> bool:
        """Return whether a job runs there."""
        return bool(self._memory[slot * _SLOT_BYTES + _BUSY])

    def address(self, slot: int) -> dict[str, str]:
        """Return who waits for the job that runs there; empty without one."""
        at = slot * _SLOT_BYTES
        if self._memory[at + _BUSY]:
            size = int.from_bytes(self._memory[at + _SIZE : at + _TEXT], "little")
            with contextlib.suppress(ValueError):  # longer than a slot: nobody of ours
                found = json.loads(self._memory[at + _TEXT : at + _TEXT + size])
                return {str(key): str(value) for key, value in found.items()}
        return {}

    def retire(self, slot: int) -> None:
        """Ask its server to end before its next job."""
        self._memory[slot * _SLOT_BYTES + _RETIRED] = 1

    def is_retired(self, slot: int) -> bool:
        """Return whether it was asked to."""
        return bool(self._memory[slot * _SLOT_BYTES + _RETIRED])

    def clear(self, slot: int) -> None:
        """Make the slot ready for another server."""
        at = slot * _SLOT_BYTES
        self._memory[at + _BUSY] = self._memory[at + _RETIRED] = 0
