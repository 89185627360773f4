"""What may run in isolation: the closed table of jobs.

Owns `JOBS` and the run of one entry. Never imports what a message names: entries are built in, or
functions that the operator's own configuration names. Invariant: `perform` returns a message
whatever the job does, short of not returning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..functions import describe, is_path, resolve, unknown_name
from . import code, maths, python
from .messages import JobBroken, failure, result


@dataclass(frozen=True, slots=True)
class Job:
    """One entry.

    Attributes:
        run: takes a JSON object and returns a JSON value; what it raises is "no result".
        warm: imports and uses what `run` needs, once, before the processes of jobs are forked.
        shares_process: one process may run several of them, one after another, because `run`
            leaves nothing behind; a function of the operator's gets a process of its own.
    """

    run: Callable[[dict[str, Any]], Any]
    warm: Callable[[], None] | None = None
    shares_process: bool = False


JOBS: Mapping[str, Job] = {
    "math_verify": Job(maths.math_verify, maths.warm, shares_process=True),
    "code": Job(code.run, code.warm, shares_process=True),
    "python": Job(python.run, shares_process=True),
}
"""Name in a message → job. Functions of the operator come beside them (`table_of`)."""
BUILT_IN = tuple(sorted(JOBS))


def table_of(paths: Iterable[str]) -> dict[str, Job]:
    """Return all jobs of a verifier: the built-in ones, and functions by the paths given.

    Raises:
        ConfigError: a name that is no job; or a path that names no ordinary function of one
            argument.
    """
    paths = list(paths)
    for name in paths:
        if not is_path(name) and name not in JOBS:
            raise unknown_name(name, "job in reward.isolated", list(BUILT_IN))
    own = {path for path in paths if is_path(path)}
    given = {
        path: Job(resolve(path, "reward.isolated", kind="sync", num_args=1)) for path in sorted(own)
    }
    return {**JOBS, **given}


def warm(table: Mapping[str, Job]) -> None:
    """Warm every job of the table."""
    for job in table.values():
        if job.warm is not None:
            job.warm()


def perform(job: Job, token: str, payload: Any) -> bytes:
    """Run one job and return its message."""
    if not isinstance(payload, dict):
        return failure(token, "the payload of a job is a JSON object", "invalid")
    try:
        value = job.run(payload)
    except JobBroken as error:
        return failure(token, describe(error), "crashed")
    except Exception as error:  # noqa: BLE001 - what is judged can make it raise anything
        return failure(token, describe(error), "raised")
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        value = value.item()  # numpy's scalars
    return result(token, value)
