"""Does anything notice a broken script? Every mutation against the walk, then the unit tests.

Owns the tool that runs the list (`mutation_list`) and prints which of it survives. Invariant: a
mutation that nothing can notice says in the list why it changes nothing.

    python -m tests.integration.queue.mutations [--json] [--walks N] [--steps N] [--only WORD]
        [--part K/N] [--no-units]
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from rollstream.queue.scripts import load_scripts
from tests.integration.queue.mutation_list import MUTATIONS, Mutation
from tests.integration.queue.walk import SMALL_REBASE, take_walk
from tests.queue_bench import clocked_scripts

ROOT = Path(__file__).resolve().parents[3]
VARIABLE = "ROLLSTREAM_MUTATION"
"""Names the mutation to `mutated`, the plugin of the unit tests' process."""


@dataclass(frozen=True, slots=True)
class Finding:
    """How one mutation was noticed; `by` is empty where it was not."""

    mutation: Mutation
    by: str
    how: str

    @property
    def survived(self) -> bool:
        return not self.by and not self.mutation.equivalent


def fits(mutation: Mutation) -> bool:
    """Return whether some script has the text that the mutation changes."""
    return any(
        mutation.where in ("*", name) and mutation.old in script.source
        for name, script in load_scripts().items()
    )


def walk_notices(
    client: redis.Redis, mutation: Mutation, walks: int, steps: int, sizes: Sequence[int] = (14, 40)
) -> str:
    """Return what the walk said of a mutation; empty where it noticed nothing."""
    broken = clocked_scripts(SMALL_REBASE, (mutation.where, mutation.old, mutation.new))
    for seed in range(1, walks + 1):
        try:
            take_walk(client, seed, steps, broken, sizes=sizes)
        except (AssertionError, redis.RedisError, LookupError, TypeError, ValueError) as error:
            text = str(error).split("\n")[0][:90]
            return f"seed {seed}: {type(error).__name__}: {text}"
    return ""


def units_notice(mutation: Mutation) -> str:
    """Return the first unit test of the queue that only a mutation lets fail."""
    failed = _failing_units(mutation.name, "-x", *_broken_units())
    return failed[0] if failed else ""


@functools.cache
def _broken_units() -> tuple[str, ...]:
    """Leave out what fails without a mutation: it would notice everything."""
    return tuple(part for name in _failing_units("") for part in ("--deselect", name))


def _failing_units(name: str, *options: str) -> list[str]:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tests.integration.queue.mutated",
        "-p", "no:cacheprovider", "tests/unit/queue",
        "--deselect", "tests/unit/queue/test_headers.py",
        "--deselect", "tests/unit/queue/test_docs.py", *options,
    ]  # fmt: skip
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ | {VARIABLE: name}, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    lines = [x.split() for x in found.stdout.splitlines() if x.startswith(("FAILED ", "ERROR "))]
    return [words[1] for words in lines] or (
        [f"exit code {found.returncode}"] if found.returncode else []
    )


def try_mutation(
    client: redis.Redis, mutation: Mutation, walks: int, steps: int, *, units: bool = True
) -> Finding:
    """Run one mutation until something notices it."""
    if not fits(mutation):
        return Finding(mutation, "", "DOES NOT FIT: the script was written anew")
    how = walk_notices(client, mutation, walks, steps)
    if how:
        return Finding(mutation, "walk", how)
    how = units_notice(mutation) if units else ""
    return Finding(mutation, "unit" if how else "", how)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the list and print what survived."""
    from examples.devserver import DevServer

    parser = argparse.ArgumentParser(prog="python -m tests.integration.queue.mutations")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--walks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="those whose name has this word")
    parser.add_argument("--part", default="1/1", help="K/N: every Nth of them, from the Kth on")
    parser.add_argument("--no-units", action="store_true")
    given = parser.parse_args(arguments)
    part, parts = map(int, given.part.split("/"))
    logging.disable()
    findings, begun = [], time.monotonic()
    with DevServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        for seed in range(1, given.walks + 1):
            take_walk(client, seed, given.steps)  # what breaks without a mutation proves nothing
        for mutation in MUTATIONS[part - 1 :: parts]:
            if given.only not in mutation.name:
                continue
            finding = try_mutation(
                client, mutation, given.walks, given.steps, units=not given.no_units
            )
            findings.append(finding)
            if not given.json:
                how = finding.how or mutation.equivalent or "SURVIVED"
                print(f"{mutation.name:52} {finding.by or '-':5} {how}", flush=True)  # noqa: T201 - the report
    survived = [f.mutation.name for f in findings if f.survived]
    report = {
        "mutations": len(findings),
        "noticed_by_walk": sum(f.by == "walk" for f in findings),
        "noticed_by_unit": sum(f.by == "unit" for f in findings),
        "equivalent": sum(not f.by and bool(f.mutation.equivalent) for f in findings),
        "survived": survived,
        "seconds": round(time.monotonic() - begun),
    }
    print(json.dumps(report))  # noqa: T201 - the report
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
