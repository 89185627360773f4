"""The reserve of a process that runs out of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from worker.memory import Memory, is_short

ROOT = Path(__file__).parents[3]
LIMITED = """
import resource
from worker.memory import Memory, is_short

told = []
memory = Memory()
memory.keep(lambda: told.append(bytearray(8 << 20)))  # what a giving back needs, and more
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
hoard = []
try:
    while True:
        hoard.append(bytearray(1 << 20))
except MemoryError:
    memory.ran_out()
print(len(told), is_short())
memory.ran_out()
print(len(told), memory.num_errors)
"""


def test_memory_that_is_used_up_leaves_what_was_kept_and_tells_once() -> None:
    said = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (said.returncode, said.stdout) == (0, "1 True\n1 2\n"), said.stderr


def test_memory_error_of_a_process_that_has_memory_is_counted_and_told_nobody() -> None:
    memory, told = Memory(), list[int]()
    memory.keep(lambda: told.append(1))
    memory.ran_out()
    assert (told, memory.num_errors) == ([], 1)
    assert not is_short()
    memory.release()
    memory.ran_out()
    assert told == []
