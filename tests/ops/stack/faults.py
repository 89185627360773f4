"""What is broken on purpose, and which alerts that must raise.

Owns the faults and their groups (`PHASES`), in which they are broken side by side; every other
expression must have an answer without any of them. Never waits for an alert: that is the tests'.
Invariant: `end` makes good what `begin` and `meanwhile` did, so that the stack is well again behind
every group.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.ops.composed import ROOT

from .processes import REPLICAS, Stack
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
    """Done again and again, in a thread of its own, while the alerts are waited for."""


# --- workers -------------------------------------------------------------------------------------
KILLED, FROZEN = "worker-3", "worker-2"
FREEZE_S, THAW_S = 2.6, 1.4
"""Longer than a lease, so that what it leased expires; and time to lease again, and to be seen."""


def freeze_once(stack: Stack) -> None:
    """Stop a worker for longer than a lease, and let it live for a moment."""
    stack.freeze(FROZEN)
    time.sleep(FREEZE_S)
    stack.thaw(FROZEN)
    time.sleep(THAW_S)


def kill_workers(stack: Stack) -> None:
    """Kill all of them; their name goes, as that of a service without a container does."""
    for number in stack.numbers("worker"):
        stack.kill(f"worker-{number}")
    stack.name_workers(0)


def workers_again(stack: Stack) -> None:
    """Start all of them."""
    stack.name_workers(REPLICAS["worker"])
    stack.again(*(f"worker-{number}" for number in stack.numbers("worker")))


# --- engines -------------------------------------------------------------------------------------
STOPPED = "sim-2"
NO_GOOD = {"nan": 0.6, "logprobs_wrong": 0.4}
"""Most samples fail, and none that does not says the truth about its log-probs."""


def hang_engines(stack: Stack) -> None:
    """Have no request answered any more."""
    stack.engines({"hang": 1.0})


def race(stack: Stack) -> None:
    """Change weights many times while a sample runs."""
    stack.engines({"slow": 1.0})
    stack.pace(Pace(version_s=0.05))


def walk(stack: Stack) -> None:
    """Do as usual again."""
    heal_engines(stack)
    stack.pace(Pace())


MANY, FEW = 16, 12
"""Groups that are ready: enough that some are left, and few enough that most places are free."""


def spoil_and_hold(stack: Stack) -> None:
    """Leave a few groups that nobody takes, and work for all workers, of which nothing comes."""
    stack.pace(Pace(groups=0))
    stack.wait(lambda: stack.num_ready() >= MANY, "groups are ready")
    stack.engines(NO_GOOD)
    stack.pace(Pace(groups=2, step_s=0.3))
    stack.wait(lambda: stack.num_ready() <= FEW, "most groups are taken")
    stack.pace(Pace(groups=0))


def heal_engines(stack: Stack) -> None:
    """Have nothing go wrong from here on, and lose what hangs."""
    stack.engines({})
    stack.restart_engines()


# --- the server ----------------------------------------------------------------------------------
JUNK, JUNK_BYTES, JUNK_S = 64, 1 << 20, 600


def evict(stack: Stack) -> None:
    """Have the server throw away keys that end by themselves: some of ours, none of the run's."""
    with stack.operator() as server:
        for number in range(JUNK):
            server.set(f"junk:{number}", b"x" * JUNK_BYTES, ex=JUNK_S)
        used = int(server.info("memory")["used_memory"])
        server.config_set("maxmemory-policy", "volatile-lru")
        server.config_set("maxmemory", str(used - JUNK * JUNK_BYTES // 2))


def no_junk(stack: Stack) -> None:
    """Give the server back what its configuration gives it, and remove what is left."""
    given = re.search(r"^maxmemory (\S+)", (ROOT / "ops" / "redis.conf").read_text(), re.MULTILINE)
    assert given
    with stack.operator() as server:
        server.config_set("maxmemory", given[1])
        server.config_set("maxmemory-policy", "noeviction")
        server.delete(*(f"junk:{number}" for number in range(JUNK)))


def miscount(stack: Stack, by: int) -> None:
    """Change a count of the run by hand."""
    with stack.operator() as server:
        server.hincrby(f"rs:{{{stack.run}}}:c", "enqueued", by)


# --- the table -----------------------------------------------------------------------------------
BESIDE_LOAD = (
    Fault(
        "engines fail most samples and lie about the rest, and a trainer takes nothing",
        frozenset(
            {"AbortRatioHigh", "FilterDropRatioHigh", "TokenMismatch", "OldestPendingTooOld"}
        ),
        spoil_and_hold,
        walk,
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
        meanwhile=freeze_once,
    ),
    Fault(
        "somebody changes a count by hand",
        frozenset({"AccountingDifference"}),
        lambda stack: miscount(stack, 3),
        lambda stack: miscount(stack, -3),
    ),
)
OLD = (
    Fault(
        "weights change faster than samples end",
        frozenset({"StalenessHigh"}),
        race,
        walk,
    ),
)
HUNG = (
    Fault(
        "engines answer nothing any more",
        frozenset({"Stalled"}),
        hang_engines,
        heal_engines,
    ),
    Fault(
        "a trainer takes more than there is",
        frozenset({"TrainerStarved"}),
        lambda stack: stack.pace(Pace(step_s=0.0)),
        lambda stack: stack.pace(Pace()),
    ),
    Fault(
        "the server has little memory, and is told to evict",
        frozenset({"RedisMemoryHigh", "RedisEvicting"}),
        evict,
        no_junk,
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
)
PHASES = {"beside load": BESIDE_LOAD, "old": OLD, "hung": HUNG, "gone": GONE}
FAULTS = tuple(fault for phase in PHASES.values() for fault in phase)
