"""What isolated jobs cost, and whether hostile programs get anything but their end.

    python -m benchmarks.verify [--json] [--runs 320] [--as-user]

A real Valkey and a real verifier; 4 slots of one worker ask for jobs `code`, `python` and
`math_verify`, honest ones and hostile ones mixed. Meanwhile processes of jobs are killed (SIGKILL),
and the server dies once and comes back. A job without a verdict that another try may have is asked
for again, as a sample's is.

* `runs`: jobs that ended; `hostile` of them are of the kinds below.
* `ms_p50`, `ms_p95`: of one job, from the question to the answer, over the honest ones in which no
  process and no server was killed. Two verifier processes, 4 slots: half of it is waiting.
* `ms_hostile_p95`: of the others; those that hang have 1 s.
* `killed_at_timeout`: programs and jobs that were ended because their time was over.
* `wrong_verdicts`: a right program that did not pass, a wrong or hostile one that did, or an end
  that says something else than what happened.
* `leftover_processes`: what still runs of any program once nothing is asked for any more, and what
  still runs at all once the verifier has ended. `leftover_folders`: the same of files.
* `stuck_slots`: questions without an answer within twice their time and 10 s.

`--as-user` runs the verifier as an ordinary user, where this is root: what a container does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo.children import Child
from examples.devserver import DevServer
from worker.isolation import Isolated, IsolatedFault, leftovers

SLOTS = 4
PROCESSES = 2
HANGS_S = 1.0
"""What programs that hang may take."""
TIMEOUT_S = 15.0
MAX_TRIES = 4
GRACE_S = 10.0
READY_S = 60.0
AWAY_S = 1.5
KILL_EVERY_S = 3.0
NOBODY = 65534
ROOT = Path(__file__).resolve().parents[1]

READS = "a, b = map(int, input().split())\nprint(a + b)"
ADDS = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b if a == 3 else a + b\n"
STDIN = {"stdin": [{"input": f"{i} 2", "output": f"{i + 2}\n"} for i in range(4)]}
CASES = {"entry": "add", "cases": [{"args": [i, 2], "expected": i + 2} for i in range(8)]}
ASSERTS = {"asserts": "\n".join(f"assert add({i}, 2) == {i + 2}" for i in range(8))}
WRONG_READS = READS.replace("a + b)", "a + b + (a == 3))")
FORGES = {
    "exit 0": "import os; print('passed', flush=True); os._exit(0)",
    "equals all": "class Yes:\n    def __eq__(self, other): return True\n"
    "def add(a, b): return Yes()",
    "patches": "import builtins, operator\nbuiltins.all = builtins.bool = lambda *_: True\n"
    "operator.eq = lambda *_: True\ndef add(a, b): return None",
    "writes": "import os\nfor fd in range(3, 64):\n    try:\n"
    '        os.write(fd, b\'{"loaded": true}\\n\' + b\'{"value": true, "ok": true}\\n\' * 9)\n'
    "    except OSError:\n        pass\ndef add(a, b): return None",
}
FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
SETSID = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        time.sleep(600)
    os._exit(0)
print("gone")
"""
SWALLOWS = """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, lambda *_: None)
    except (OSError, ValueError):
        pass
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""
MANY_FILES = "for i in range(10 ** 9): open(str(i), 'wb').write(b'x' * (1 << 20))"
HUGE_FILE = "with open('x', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))"
NETWORK = """
import socket
try:
    socket.create_connection(("127.0.0.1", PORT), timeout=1)
    print("connected")
except OSError:
    print("refused")
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One question and what its answer must be."""

    kind: str
    job: str
    payload: dict[str, Any]
    right: Callable[[Any], bool]
    timeout_s: float = TIMEOUT_S
    honest: bool = False


@dataclass(slots=True)
class Seen:
    """What became of all of them."""

    honest_ms: list[float] = field(default_factory=list)
    hostile_ms: list[float] = field(default_factory=list)
    killed_at_timeout: int = 0
    wrong: list[str] = field(default_factory=list)
    stuck: int = 0
    retried: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)


def code(kind: str, program: str, tests: dict[str, Any], reward: float, **more: Any) -> Run:
    """Return a question whose answer is a reward."""
    limit_s = more.pop("limit_s", TIMEOUT_S * 0.8)
    payload = {"program": program, "tests": tests, "timeout_s": limit_s, "stop_early": True}
    return Run(kind, "code", payload, lambda value: value["reward"] == reward, **more)


def ran(kind: str, source: str, right: Callable[[Any], bool], limit_s: float = HANGS_S) -> Run:
    """Return a question whose answer is what a program printed, and how it ended."""
    return Run(kind, "python", {"code": source, "timeout_s": limit_s}, right)


def honest() -> list[Run]:
    """Return what is asked for most."""
    maths = {"answer": "\\frac{2}{4}", "label": "0.5"}
    wrong = {"answer": "\\frac{2}{5}", "label": "0.5"}
    return [
        code("stdin", READS, STDIN, 1.0, honest=True),
        code("stdin, wrong", WRONG_READS, STDIN, 0.0, honest=True),
        code("cases", ADDS, CASES, 1.0, honest=True),
        code("cases, wrong", WRONG, CASES, 0.0, honest=True),
        code("asserts", ADDS, ASSERTS, 1.0, honest=True),
        code("asserts, wrong", WRONG, ASSERTS, 0.0, honest=True),
        Run("python", "python", {"code": "print(6 * 7)", "timeout_s": TIMEOUT_S - 2},
            lambda told: told["stdout"] == "42\n" and told["exit_code"] == 0, honest=True),
        Run("maths", "math_verify", maths, lambda reward: reward == 1.0, honest=True),
        Run("maths, wrong", "math_verify", wrong, lambda reward: reward == 0.0, honest=True),
    ]  # fmt: skip


def hostile(port: int) -> list[Run]:
    """Return the others; as programs, and as functions that tests call."""

    def overdue(told: Any) -> bool:
        return bool(told["timed_out"])

    def stopped(*causes: str) -> Callable[[Any], bool]:
        return lambda told: any(cause in told["ending"] + told["stderr"] for cause in causes)

    hangs = "def add(a, b):\n    while True: pass"
    tower = {"answer": "9^{9^{9^{9}}}", "label": "8"}
    forged = [
        code(f"forge: {how}", program, tests, 0.0)
        for how, program in FORGES.items()
        for tests in (STDIN, CASES, ASSERTS)
    ]
    return [
        ran("fork bomb", FORK_BOMB, lambda told: overdue(told) or stopped("processes")(told)),
        ran("infinite loop", "while True: pass", overdue),
        ran("swallowed timeout", SWALLOWS, overdue),
        ran("10 GB", "x = bytearray(10 << 30)", stopped("MemoryError"), TIMEOUT_S - 2),
        ran("segfault", "import ctypes; ctypes.string_at(0)", stopped("SIGSEGV"), TIMEOUT_S - 2),
        ran("endless output", "while True: print('x' * 65536)", stopped("output"), TIMEOUT_S - 2),
        ran("huge file", HUGE_FILE, stopped("File too large"), TIMEOUT_S - 2),
        ran("many files", MANY_FILES, stopped("files"), TIMEOUT_S - 2),
        ran("network", NETWORK.replace("PORT", str(port)),
            lambda told: told["stdout"] == "refused\n", TIMEOUT_S - 2),
        ran("setsid", SETSID, lambda told: told["stdout"] == "gone\n", TIMEOUT_S - 2),
        ran("kills", "import os\nfor p in (os.getppid(), 1):\n    try:\n        os.kill(p, 9)\n"
            "    except OSError:\n        print('refused')",
            lambda told: told["stdout"] == "refused\n" * 2, TIMEOUT_S - 2),
        code("hangs in cases", hangs, CASES, 0.0, limit_s=HANGS_S),
        code("hangs in asserts", hangs, ASSERTS, 0.0, limit_s=HANGS_S),
        code("forks in cases", f"{FORK_BOMB}\n", CASES, 0.0, limit_s=HANGS_S),
        Run("job that hangs", "math_verify", tower, lambda fault: fault == "timeout", HANGS_S),
        *forged,
    ]  # fmt: skip


async def ask(isolated: Isolated, run: Run, seen: Seen) -> Any:
    """Return the answer of one question; a fault is its detail."""
    for _ in range(MAX_TRIES):
        try:
            return await isolated.call(run.job, run.payload, timeout_s=run.timeout_s)
        except IsolatedFault as fault:
            if not fault.retryable:
                return fault.detail
            seen.retried[fault.detail] += 1
    return "no verdict"


class Bench:
    """The processes, and what disturbs them."""

    def __init__(self, folder: Path, as_user: bool) -> None:
        self.server = DevServer(aof=True)
        self.outages = 0
        self.killed = 0
        self.disturbed_mono_s = 0.0
        command = [
            sys.executable, "-m", "worker.isolation.verifier",
            "--redis.url", self.server.url, "--verifier.memory_mb", "512",
            "--verifier.processes", str(PROCESSES), "--verifier.max_processes", str(PROCESSES),
        ]  # fmt: skip
        if as_user:
            command = [sys.executable, "-m", "benchmarks.verify", "--become-user", *command]
        self.verifier = Child(
            "verifier", command, folder=folder, environment=dict(os.environ), cwd=ROOT
        )

    def start(self) -> None:
        """Start both, and wait until jobs are taken."""
        self.server.start()
        self.verifier.start()
        limit = time.monotonic() + READY_S
        while "verifier_ready" not in self.verifier.log.read_text():
            if not self.verifier.running or time.monotonic() > limit:
                raise self.verifier.failure()
            time.sleep(0.05)

    @property
    def pid(self) -> int:
        """Of the verifier."""
        assert self.verifier.process is not None
        return self.verifier.process.pid

    def programs(self) -> list[int]:
        """Return what runs of any program at this moment."""
        return [pid for pid in leftovers.descendants(self.pid) if _is_program(pid)]

    def kill_a_job(self) -> None:
        """Kill a process that jobs run in, or a program's parent at any rate."""
        parents = {
            parent
            for pid in self.programs()
            if (parent := _parent(pid)) and not _is_program(parent) and parent != self.pid
        }
        for pid in sorted(parents)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
                self.disturbed_mono_s = time.monotonic()

    def lose_the_server(self) -> None:
        """Kill Valkey, and start it again with what it had written."""
        self.outages += 1
        self.server.kill()
        time.sleep(AWAY_S)
        self.server.start()
        self.disturbed_mono_s = time.monotonic()

    def stop(self) -> None:
        """End what still runs."""
        self.verifier.ask_to_stop()
        self.verifier.wait_or_kill(45.0)
        self.server.stop()


def _is_program(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0-I\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _folders() -> list[str]:
    return [str(path) for path in Path(tempfile.gettempdir()).glob("rollstream-programs-*/*-*-*")]


async def slot(bench: Bench, isolated: Isolated, runs: Iterator[Run], seen: Seen) -> None:
    """Ask one question after the other."""
    for run in runs:
        start = time.monotonic()
        bound_s = MAX_TRIES * (2 * run.timeout_s + GRACE_S)
        try:
            async with asyncio.timeout(bound_s):
                told = await ask(isolated, run, seen)
        except TimeoutError:
            seen.stuck += 1
            continue
        took_ms = 1000 * (time.monotonic() - start)
        seen.kinds[run.kind] += 1
        if not run.honest:
            seen.hostile_ms.append(took_ms)
        elif start > bench.disturbed_mono_s or time.monotonic() < bench.disturbed_mono_s:
            seen.honest_ms.append(took_ms)
        is_overdue = told == "timeout" or (isinstance(told, dict) and told.get("timed_out"))
        said = str(told.get("problems", "")) if isinstance(told, dict) else ""
        seen.killed_at_timeout += bool(is_overdue or "timed out" in said)
        if not is_right(run, told):
            seen.wrong.append(f"{run.kind}: {str(told)[:300]}")


def is_right(run: Run, told: Any) -> bool:
    """Return whether an answer is what it must be."""
    with contextlib.suppress(TypeError, KeyError):
        return run.right(told)
    return False


async def disturb(bench: Bench, seen: Seen, num_runs: int) -> None:
    """Kill processes of jobs all the time, and the server in the middle."""
    while True:
        await asyncio.sleep(KILL_EVERY_S)
        await asyncio.to_thread(bench.kill_a_job)
        if bench.outages == 0 and seen.kinds.total() > num_runs // 2:
            await asyncio.to_thread(bench.lose_the_server)


async def measure(bench: Bench, num_runs: int) -> dict[str, Any]:
    """Run everything; return the figures."""
    kinds = hostile(bench.server.port)
    easy = honest()
    chosen = [kinds[i % len(kinds)] for i in range(num_runs * 3 // 8)]
    chosen += [easy[i % len(easy)] for i in range(num_runs - len(chosen))]
    random.Random(7).shuffle(chosen)
    seen, runs = Seen(), iter(chosen)
    isolated = Isolated(
        redis_url=bench.server.url, rq_url=None, run="bench", incarnation="0123456789ab"
    )
    disturbing = asyncio.create_task(disturb(bench, seen, num_runs))
    start = time.monotonic()
    try:
        await asyncio.gather(*(slot(bench, isolated, runs, seen) for _ in range(SLOTS)))
    finally:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        await isolated.aclose()
    took_s = time.monotonic() - start
    await asyncio.sleep(1.0)  # the job that was answered ends
    left = bench.programs()
    return {
        "runs": seen.kinds.total(),
        "hostile": len(seen.hostile_ms),
        "ms_p50": round(statistics.median(seen.honest_ms), 1),
        "ms_p95": round(statistics.quantiles(seen.honest_ms, n=20)[-1], 1),
        "ms_hostile_p95": round(statistics.quantiles(seen.hostile_ms, n=20)[-1], 1),
        "runs_per_s": round(seen.kinds.total() / took_s, 1),
        "killed_at_timeout": seen.killed_at_timeout,
        "killed_processes": bench.killed,
        "outages": bench.outages,
        "retried": dict(seen.retried),
        "wrong_verdicts": len(seen.wrong),
        "leftover_processes": len(left),
        "leftover_folders": 0,
        "stuck_slots": seen.stuck,
        "wrong": seen.wrong[:5],
    }


def become_user(command: list[str]) -> None:
    """Be an ordinary user that can read this Python, and run the command."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(8, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    capabilities = struct.pack("=6I", 4, 4, 4, 0, 0, 0)  # to read alone
    if libc.capset(struct.pack("=Ii", 0x20080522, 0), capabilities) or libc.prctl(47, 2, 2, 0, 0):
        raise OSError(ctypes.get_errno(), "capabilities")
    os.execv(command[0], command)


def main() -> int:
    """Run once; return the exit code."""
    cli = argparse.ArgumentParser(prog="python -m benchmarks.verify")
    cli.add_argument("--json", action="store_true", help="print one line of JSON only")
    cli.add_argument("--runs", type=int, default=320)
    cli.add_argument("--as-user", action="store_true", help="the verifier is no root")
    cli.add_argument("--become-user", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.become_user:
        become_user(args.become_user)
    leftovers.adopt_orphans()  # what outlives the verifier is ours to count
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.as_user)
        try:
            bench.start()
            figures = asyncio.run(measure(bench, args.runs))
        finally:
            bench.stop()
        time.sleep(0.5)
        figures["leftover_processes"] += len(leftovers.descendants(os.getpid()))
        figures["leftover_folders"] = len(_folders())
    wrong = figures.pop("wrong")
    if args.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        for name, value in figures.items():
            sys.stdout.write(f"{name:20} {value}\n")
    for line in wrong:
        sys.stderr.write(f"wrong: {line}\n")
    bad = ("wrong_verdicts", "leftover_processes", "leftover_folders", "stuck_slots")
    return int(any(figures[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main())
