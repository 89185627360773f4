"""What is broken on purpose, which alerts that must raise, and what is only to be seen then.

Owns the faults and their groups, in which they are broken side by side. Never waits for an alert:
that is the tests'. Invariant: `end` makes good what `begin` and `meanwhile` did, so that the stack
is well again behind every group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .processes import Stack
from .trainer import Pace


def nothing(_: Stack) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that breaks."""

    name: str
    alerts: frozenset[str]
    """That must fire, reach Alertmanager, and end."""
    begin: Callable[[Stack], None]
    end: Callable[[Stack], None]
    meanwhile: Callable[[Stack], None] = nothing
    """Called again and again while the alerts are waited for."""
    panels: tuple[str, ...] = ()
    """Beginnings of names of expressions that have no answer without it."""


# --- workers -------------------------------------------------------------------------------------
KILLED, FROZEN = "worker-3", "worker-2"
FREEZE_S, THAW_S = 4.0, 0.5
"""Longer than a lease, so that what it leased expires; and time to lease again."""


def freeze_again(stack: Stack) -> None:
    """Stop a worker for longer than a lease, and let it live for a moment."""
    stack.freeze(FROZEN)
    time.sleep(FREEZE_S)
    stack.thaw(FROZEN)
    time.sleep(THAW_S)


def kill_workers(stack: Stack) -> None:
    """Kill all of them."""
    for number in stack.numbers("worker"):
        stack.kill(f"worker-{number}")


def workers_again(stack: Stack) -> None:
    """Start all of them."""
    for number in stack.numbers("worker"):
        stack.again(f"worker-{number}")


# --- engines -------------------------------------------------------------------------------------
STOPPED = "sim-2"
NO_GOOD = {"nan": 0.6, "logprobs_wrong": 0.4}
"""Most samples fail, and none that does not says the truth about its log-probs."""


def heal_engines(stack: Stack) -> None:
    """Have nothing go wrong from here on, and lose what hangs."""
    stack.engines({})
    stack.restart_engines()


# --- the server ----------------------------------------------------------------------------------
ENOUGH = "6gb"
JUNK, JUNK_BYTES, JUNK_S = 64, 1 << 20, 600


def little_memory(stack: Stack) -> None:
    """Leave the server a tenth more than it has used."""
    with stack.operator() as server:
        used = int(server.info("memory")["used_memory"])
        server.config_set("maxmemory", str(int(used * 1.08)))


def enough_memory(stack: Stack) -> None:
    """Give the server back what the compose file gives it."""
    with stack.operator() as server:
        server.config_set("maxmemory", ENOUGH)
        server.config_set("maxmemory-policy", "noeviction")


def evict(stack: Stack) -> None:
    """Have the server throw away keys that end by themselves: some of ours, none of the run's."""
    with stack.operator() as server:
        for number in range(JUNK):
            server.set(f"junk:{number}", b"x" * JUNK_BYTES, ex=JUNK_S)
        used = int(server.info("memory")["used_memory"])
        server.config_set("maxmemory-policy", "volatile-lru")
        server.config_set("maxmemory", str(used - JUNK * JUNK_BYTES // 2))


def no_junk(stack: Stack) -> None:
    """Give memory back, and remove what is left."""
    enough_memory(stack)
    with stack.operator() as server:
        server.delete(*(f"junk:{number}" for number in range(JUNK)))


def miscount(stack: Stack, by: int) -> None:
    """Change a count of the run by hand."""
    with stack.operator() as server:
        server.hincrby(f"rs:{{{stack.run}}}:c", "enqueued", by)


# --- the table -----------------------------------------------------------------------------------
BESIDE_LOAD = (
    Fault(
        "a trainer takes nothing",
        frozenset({"OldestPendingTooOld"}),
        lambda stack: stack.pace(Pace(groups=0)),
        lambda stack: stack.pace(Pace()),
    ),
    Fault(
        "engines fail most samples and lie about the rest",
        frozenset({"AbortRatioHigh", "FilterDropRatioHigh", "TokenMismatch"}),
        lambda stack: stack.engines(NO_GOOD),
        heal_engines,
    ),
    Fault(
        "an engine is stopped",
        frozenset({"EngineUnreachable"}),
        lambda stack: stack.kill(STOPPED),
        lambda stack: stack.again(STOPPED),
    ),
    Fault(
        "a worker is killed and stays down",
        frozenset({"WorkerDown"}),
        lambda stack: stack.kill(KILLED),
        lambda stack: stack.again(KILLED),
    ),
    Fault(
        "a worker freezes again and again",
        frozenset({"EventLoopLag", "LeasesExpiring"}),
        nothing,
        nothing,
        meanwhile=freeze_again,
    ),
    Fault(
        "somebody changes a count by hand",
        frozenset({"AccountingDifference"}),
        lambda stack: miscount(stack, 3),
        lambda stack: miscount(stack, -3),
    ),
    Fault(
        "the server has little memory",
        frozenset({"RedisMemoryHigh"}),
        little_memory,
        enough_memory,
    ),
)
OLD = (
    Fault(
        "weights change faster than samples end",
        frozenset({"StalenessHigh"}),
        lambda stack: (stack.engines({"slow": 1.0}), stack.pace(Pace(version_s=0.05)))[0],
        lambda stack: (heal_engines(stack), stack.pace(Pace()))[0],
    ),
)
HUNG = (
    Fault(
        "engines answer nothing any more",
        frozenset({"Stalled", "TrainerStarved"}),
        lambda stack: (stack.engines({"hang": 1.0}), stack.pace(Pace(step_s=0.0)))[0],
        lambda stack: (heal_engines(stack), stack.pace(Pace()))[0],
    ),
)
GONE = (
    Fault(
        "no worker is left",
        frozenset({"WorkersAbsent"}),
        kill_workers,
        workers_again,
    ),
    Fault(
        "Redis is not measured",
        frozenset({"MeasurementAbsent"}),
        lambda stack: stack.kill("redis_exporter-1"),
        lambda stack: stack.again("redis_exporter-1"),
    ),
    Fault(
        "the server evicts",
        frozenset({"RedisEvicting"}),
        evict,
        no_junk,
    ),
)
