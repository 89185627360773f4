"""What one run of a model's program may use, and what became of it.

Owns the two records. Never runs anything. Invariant: what the machine did not give a program
(`starved`) is told apart from what the program did.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Literal

from rollstream.settings import VerifierTable

Cause = Literal["memory", "cpu", "output", "files", "processes"]
"""Which limit a program was ended for, beside its time."""

Starvation = Literal["cpu", "memory"]
"""What a program did not get of its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramLimits:
    """Limits of one program, all of its processes together where nothing else is said."""

    memory_bytes: int = 1 << 30
    """Address space of each process, and memory that all of them hold."""
    max_processes: int = 32
    """Processes and threads."""
    file_bytes: int = 32 << 20
    """One file; all files of its folder may be four times that."""
    output_bytes: int = 16384
    """Kept of what it prints to each of stdout and stderr, the rest is read and thrown away."""
    network: bool = False

    @classmethod
    def of(cls, table: VerifierTable) -> ProgramLimits:
        """Return what `[verifier]` says."""
        return cls(
            memory_bytes=table.memory_mb << 20,
            max_processes=table.max_programs,
            file_bytes=table.file_mb << 20,
            output_bytes=table.output_chars,
            network=table.network,
        )

    @property
    def folder_bytes(self) -> int:
        """Of all files in its folder."""
        return 4 * self.file_bytes

    @property
    def printed_bytes(self) -> int:
        """What prints more is ended: reading it is work of ours."""
        return max(16 << 20, 16 * self.output_bytes)

    @staticmethod
    def cpu_s(timeout_s: float) -> int:
        """Return the CPU seconds of each process; its time is over before them."""
        return math.ceil(timeout_s) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How one program ended."""

    exit_code: int | None
    """None where a signal ended it."""
    signal: int | None
    stdout: bytes
    """Its beginning, as much as the limits keep."""
    stderr: bytes
    stdout_bytes: int
    """Of all that it printed."""
    stderr_bytes: int
    timed_out: bool
    starved: Starvation | None
    """What the machine did not give it: CPU, so that it was ended before it had its time, or memory
    within its limits (the kernel ended processes for it). Its end says nothing about the program.
    """
    killed_for: Cause | None
    seconds: float
    """That it had: without the time it waited for a CPU."""
    layers: tuple[str, ...]
    """What confined it, of `confine.LAYERS`."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and says that all went well."""
        return self.exit_code == 0 and not self.timed_out and self.killed_for is None

    def ending(self) -> str:
        """Return how it ended, for people and models."""
        if self.starved is not None:
            return f"stopped: the machine had no {self.starved} for it"
        if self.timed_out:
            return f"timed out after {self.seconds:.1f} s"
        if self.killed_for is not None:
            return f"stopped: over its limit of {self.killed_for}"
        if self.signal is not None:
            try:
                name = signal.Signals(self.signal).name
            except ValueError:
                name = str(self.signal)
            return f"ended by signal {name}"
        return f"exit code {self.exit_code}"
