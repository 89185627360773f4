"""The job `python`: runs what a model wrote, and returns what it printed.

    {"code": str, "timeout_s": float}
    → {"stdout": str, "stderr": str, "exit_code": int, "timed_out": bool, "ending": str}

Owns the cut that lets a result be sent. Never judges. Invariant: whatever the program does is a
result; only what the machine did to it raises.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from typing import Any

from .confine import CannotConfine
from .leftovers import Unkillable
from .messages import MAX_RESULT_BYTES, MAX_TIMEOUT_S, JobBroken
from .place import here
from .program import ProgramLimits, ProgramResult
from .sandbox import SandboxBroken, run_here

_ROOM_BYTES = MAX_RESULT_BYTES - 2048
_STDERR_SHARE = 4
"""The other part of the room is the stdout's."""


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """Run the program of the payload.

    Raises:
        ValueError: a payload that is none.
        JobBroken: the machine failed it: no CPU, no memory, a full disk.
    """
    code, timeout_s = payload.get("code"), seconds_of(payload, "timeout_s")
    if not isinstance(code, str):
        raise ValueError("'code' is a text")
    limits = ProgramLimits.of(here().limits)
    with blaming_the_machine():
        ran = run_here(code, limits=limits, timeout_s=timeout_s)
        refuse_starved(ran)
    stderr = _shown(ran.stderr, ran.stderr_bytes, _ROOM_BYTES // _STDERR_SHARE)
    return {
        "stdout": _shown(ran.stdout, ran.stdout_bytes, _ROOM_BYTES - len(json.dumps(stderr))),
        "stderr": stderr,
        "exit_code": ran.exit_code if ran.signal is None else -ran.signal,
        "timed_out": ran.timed_out,
        "ending": ran.ending(),
    }


@contextlib.contextmanager
def blaming_the_machine() -> Iterator[None]:
    """Make what no program is to blame for what may be tried again.

    Raises:
        JobBroken: in place of it.
    """
    try:
        yield
    except (OSError, subprocess.SubprocessError, SandboxBroken, CannotConfine, Unkillable) as error:
        raise JobBroken(f"{type(error).__name__}: {error}") from error


def refuse_starved(ran: ProgramResult) -> None:
    """Refuse to judge a program by an end that the machine gave it.

    Raises:
        JobBroken: it had less CPU or memory than its limits allow.
    """
    if ran.starved is not None:
        raise JobBroken(ran.ending())


def seconds_of(payload: dict[str, Any], name: str) -> float:
    """Return a time of the payload.

    Raises:
        ValueError: it is none.
    """
    value = payload.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return min(float(value), MAX_TIMEOUT_S)
    raise ValueError(f"{name!r} is a number of seconds above 0")


def _shown(kept: bytes, num_bytes: int, room_bytes: int) -> str:
    """Return the text of an output, with a word about what is missing."""
    text = kept.decode(errors="replace")
    while len(json.dumps(text)) > room_bytes:  # one that is escaped is six times as long
        text = text[: len(text) * room_bytes // len(json.dumps(text)) - 1]
    if len(text.encode(errors="replace")) < num_bytes:
        text += f"\n[cut; {num_bytes} bytes in all]"
    return text
