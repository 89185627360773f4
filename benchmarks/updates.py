"""The bubble of a weight update: what it costs beyond the time inside the `with` body.

    python -m benchmarks.updates [--json] [--workers 4] [--in-flight 128] [--updates 20]
                                 [--mode keep|abort] [--partial] [--engines 2] [--call-s 5]
                                 [--limit-s 60]

Valkey, a producer, the workers (`python -m worker`) and the simulated engines are processes of
their own; this one is the trainer and does `with stream.updating_weights(…): pass` again and again.
Calls take `--call-s` or so, so every slot is in one when an update comes; 16 workers on two cores
want 30, or calls alone are more than the cores can do. All clocks are the machine's monotonic one.
Of an update, in milliseconds:

* `enter_ms`: from the call of `updating_weights` to the body: control word, confirmation by every
  worker, and with `abort` the end of every call at its engine.
* `first_call_ms`: from the end of the body until an engine has one whole request again from *every*
  worker that the update held up; the slowest worker counts. Seen at the engines' doors
  (`benchmarks.doors`), so it holds the post of the version to all engines, version and resume over
  the control stream, lease, rendering and connection. Held up is, with `abort`, a worker that had a
  call in flight when the update was asked for; with `keep`, where calls in flight go on, one with
  more answers than new requests between then and the end of the body. Where `keep` held up nobody
  it is 0; `workers_held_up_mean` says how many it is about. A worker that was held up and sent
  nothing until the next update is in `silent_workers`, which must be 0.
* `bubble_ms`: the sum of both.
* `exit_ms`: from the end of the body to the return of the `with`; part of `first_call_ms`.
* `refill_ms`: from the end of the body until the engines have 95 % of the calls again that they had
  when the update was asked for. With `abort` that is everything that was stopped, sent anew.

p99 of so few updates is the largest. `calls_in_flight` is what the engines had when updates were
asked for (median); `calls_inside` counts requests that came while every worker had confirmed, 0
with `abort`. `cpu_ms_per_update` is CPU by kind of process, from one update to the next.
`…_wait_share`: how long a process waited for a core while updates went on, the worst of its kind;
`engine_late_ms_max`: how late an engine's own loop was at most. Both are in the times above, which
then say more about the machine than about the product: an update in `abort` is a burst of work for
every process at once. The budget's 16 workers want more cores than two, so the default is 4.

It ends after `--limit-s` with the updates that it has, and everything it started ends with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from examples.demo.cast import to_toml
from examples.demo.children import Child
from examples.devserver import DevServer, free_port
from examples.vocabulary import write
from rollstream.stream import GroupStream

ROOT = Path(__file__).resolve().parents[1]
RUN = "bench"
GROUP = 8
ROWS = 500
TOKEN_SHARE, LATENCY_SHARE = 0.04, 0.4
"""Of `--call-s`, what a token and the time before the first take: few and slow tokens, so that what
a reply costs the *engines* is small beside the rest."""
LATENCY_SIGMA = 0.8
"""So that calls do not end in waves."""
REFILLED = 0.95
START_S = 60.0
SETTLE_S = 10.0
"""For slots to fill again behind an update."""
GAP_S = (0.3, 0.8)
"""Between full slots and the next update, so that updates meet calls of every age."""


@dataclass(frozen=True)
class Update:
    """Times of one update on the monotonic clock."""

    asked_s: float
    entered_s: float
    """The body's first instant."""
    left_s: float
    """Its last one."""
    done_s: float


@dataclass(frozen=True)
class Seen:
    """What the engines saw of one update."""

    in_flight: int
    """Calls when it was asked for."""
    held_up: int
    """Workers."""
    silent: int
    """Of them, those that sent nothing any more."""
    inside: int
    """Requests between the body's first and last instant."""
    first_call_s: float
    """From the body's end until the last of the others had sent one."""
    refill_s: float | None
    """Until they had as many calls again; None where that did not come."""


Note = tuple[float, int, int]
"""When, which worker, 1 (a request came) or -1 (its answer leaves)."""


def look(update: Update, notes: Sequence[Note], until_s: float, mode: str) -> Seen:
    """Return what the engines saw of an update.

    Args:
        update: its times.
        notes: of all engines, in order.
        until_s: when the next update was asked for, or the end.
        mode: `keep` or `abort`.
    """
    at = [note[0] for note in notes]
    asked, left = bisect_right(at, update.asked_s), bisect_left(at, update.left_s)
    before: Counter[int] = Counter()
    for _, worker, step in notes[:asked]:
        before[worker] += step
    meanwhile: Counter[int] = Counter()
    for _, worker, step in notes[asked:left]:
        meanwhile[worker] += step
    if mode == "abort":
        owing = {worker for worker, count in before.items() if count > 0}
    else:
        owing = {worker for worker, count in meanwhile.items() if count < 0}
    first: dict[int, float] = {}
    wanted = REFILLED * before.total()
    count = before.total() + meanwhile.total()
    refill_s = 0.0 if count >= wanted else None
    for at_s, worker, step in notes[left : bisect_left(at, until_s)]:
        if step > 0 and worker in owing:
            first.setdefault(worker, at_s - update.left_s)
        count += step
        if refill_s is None and count >= wanted:
            refill_s = at_s - update.left_s
    inside = notes[bisect_right(at, update.entered_s) : left]
    return Seen(
        in_flight=before.total(),
        held_up=len(owing),
        silent=len(owing) - len(first),
        inside=sum(step > 0 for _, _, step in inside),
        first_call_s=max(first.values(), default=0.0),
        refill_s=refill_s,
    )


def figures(updates: Sequence[Update], seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the figures of all updates."""
    both = list(zip(updates, seen, strict=True))
    times = {
        "enter_ms": [u.entered_s - u.asked_s for u in updates],
        "first_call_ms": [s.first_call_s for s in seen],
        "bubble_ms": [u.entered_s - u.asked_s + s.first_call_s for u, s in both],
        "exit_ms": [u.done_s - u.left_s for u in updates],
        "refill_ms": [s.refill_s for s in seen if s.refill_s is not None],
    }
    found: dict[str, Any] = {}
    for name, seconds in times.items():
        for rank, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            found[f"{name}_{rank}"] = ranked_ms(seconds, share)
    return found | {
        "not_refilled": sum(s.refill_s is None for s in seen),
        "calls_in_flight": median(s.in_flight for s in seen),
        "workers_held_up_mean": round(sum(s.held_up for s in seen) / len(seen), 2),
        "silent_workers": sum(s.silent for s in seen),
        "calls_inside": sum(s.inside for s in seen),
    }


def ranked_ms(seconds: Sequence[float], share: float) -> float | None:
    """Return the value at a share of the sorted ones, in milliseconds; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)


# --- the processes -------------------------------------------------------------------------------
class Cast:
    """Every process but the trainer."""

    def __init__(self, args: argparse.Namespace, redis_url: str, folder: Path) -> None:
        tokenizer = write(ROOT / ".cache" / "qwen3")
        ports = [free_port() for _ in range(args.engines)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        rows = folder / "prompts.jsonl"
        rows.write_text(
            "".join(json.dumps({"prompt": f"What is {i} + {i}?"}) + "\n" for i in range(ROWS))
        )
        config = folder / "rollstream.toml"
        config.write_text(to_toml(tables(args, redis_url, self.urls, tokenizer, rows)))
        # What the shell says about a run must not reach this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLSTREAM_")}

        def child(name: str, *command: str, ready_url: str | None = None) -> Child:
            return Child(
                name, [sys.executable, "-m", *command], folder=folder, environment=environment,
                cwd=ROOT, ready_url=ready_url,
            )  # fmt: skip

        self.engines = [
            child(
                f"engine-{number}", "benchmarks.doors", "--port", str(port),
                *("--tokenizer", str(tokenizer), "--token-s", str(TOKEN_SHARE * args.call_s)),
                *("--latency-median-s", str(LATENCY_SHARE * args.call_s)),
                *("--latency-sigma", str(LATENCY_SIGMA)),
                *("--think-rate", "0", "--max-sentences", "1", "--split-rate", "0"),
                ready_url=f"http://127.0.0.1:{port}/model_info",
            )
            for number, port in enumerate(ports)
        ]  # fmt: skip
        self.producer = child("producer", "producer", "--config", str(config))
        self.workers = [
            child(f"worker-{number}", "worker", "--config", str(config))
            for number in range(args.workers)
        ]

    def start(self) -> None:
        """Start them; engines first, because a worker asks them before it leases."""
        for engine in self.engines:
            engine.start()
        for engine in self.engines:
            engine.wait_ready(START_S)
        for one in (self.producer, *self.workers):
            one.start()

    def check(self) -> None:
        """Raise where one has ended."""
        for one in (*self.engines, self.producer, *self.workers):
            if not one.running:
                raise RuntimeError(f"{one.name} ended with {one.exit_code}:\n{one.tail()}")

    def stop(self) -> None:
        """End them all; nobody needs what they hold."""
        for one in (*self.workers, self.producer, *self.engines):
            one.kill()

    def in_flight(self) -> int:
        """Return how many calls the engines have."""
        return sum(ask(url + "/bench/in_flight") for url in self.urls)


def tables(
    args: argparse.Namespace, redis_url: str, urls: list[str], tokenizer: Path, rows: Path
) -> dict[str, dict[str, Any]]:
    """Return the configuration of every process."""
    # Nobody trains here: what becomes ready stays, and there must be room beside it.
    room = 2 * args.workers * args.in_flight // GROUP + 100 * int(args.limit_s)
    return {
        "run": {"name": RUN},
        "redis": {"url": redis_url},
        "model": {"tokenizer": str(tokenizer), "renderer": "qwen3"},
        "engine": {"kind": "sim", "urls": urls},
        "producer": {
            "source": f"jsonl:{rows}", "n_samples_per_prompt": GROUP, "progress": False,
            "epochs": 1 + room // ROWS, "capacity_groups": room,
        },
        "worker": {"generate": "benchmarks.doors:generate", "concurrency": args.in_flight},
        "weights": {"partial": args.partial, "max_resumes": 1000},
        "reward": {"kind": "deterministic_random"},
        "aggregator": {"filters": []},
        "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": 0, "log_level": "warning"},
    }  # fmt: skip


def ask(url: str) -> Any:
    """Return what a URL answers, as JSON."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.loads(reply.read())


# --- the trainer ---------------------------------------------------------------------------------
class Meter:
    """CPU of some processes since it was made, and how long they waited for a core.

    Of main threads: what the others of a worker do is not on the way of a call.
    """

    def __init__(self, pids: dict[str, list[int]]) -> None:
        self._pids, self._started_s = pids, time.monotonic()
        self._before = {pid: clocks_s(pid) for some in pids.values() for pid in some}

    def figures(self, num_updates: int) -> dict[str, Any]:
        """Return CPU by update and kind of process, and the longest wait of each kind."""
        lasted_s = time.monotonic() - self._started_s
        cpu, waits = {}, {}
        for kind, some in self._pids.items():
            spent = [(clocks_s(pid), self._before[pid]) for pid in some]
            cpu_s = sum(now[0] - then[0] for now, then in spent)
            cpu[kind] = round(1e3 * cpu_s / max(1, num_updates), 1)
            wait_s = max(now[1] - then[1] for now, then in spent)
            waits[f"{kind}_wait_share"] = round(wait_s / lasted_s, 3)
        return {"cpu_ms_per_update": cpu, **waits}


def clocks_s(pid: int) -> tuple[float, float]:
    """Return the CPU of a process's main thread, and how long that waited for a core."""
    words = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(words[0]) / 1e9, int(words[1]) / 1e9


def update_again_and_again(
    args: argparse.Namespace, stream: GroupStream, cast: Cast, end_s: float
) -> list[Update]:
    """Update until there were enough, or time is out."""
    slots, draw = args.workers * args.in_flight, random.Random(3)
    updates: list[Update] = []
    while len(updates) < args.updates and time.monotonic() < end_s:
        asked_s = time.monotonic()
        with stream.updating_weights(stream.version + 1, args.mode):
            entered_s = left_s = time.monotonic()
        updates.append(Update(asked_s, entered_s, left_s, time.monotonic()))
        fill(cast, slots, SETTLE_S)
        time.sleep(draw.uniform(*GAP_S))
    return updates


def fill(cast: Cast, slots: int, timeout_s: float) -> bool:
    """Wait until the engines have nearly as many calls as there are slots; whether they have."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        cast.check()
        if cast.in_flight() >= REFILLED * slots:
            return True
        time.sleep(0.1)
    return False


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, update, and return the figures."""
    started_s = time.monotonic()
    load = [os.getloadavg()[0]]
    with DevServer() as server, tempfile.TemporaryDirectory() as name:
        cast = Cast(args, server.url, Path(name))
        try:
            cast.start()
            with GroupStream.connect(server.url, run=RUN, connect_timeout_s=START_S) as stream:
                slots = args.workers * args.in_flight
                if not fill(cast, slots, START_S):
                    raise RuntimeError(f"{cast.in_flight()} of {slots} slots are in a call")
                for url in cast.urls:
                    ask(url + "/bench")  # what was late until now does not count
                meter = Meter(pids(cast, server))
                updates = update_again_and_again(args, stream, cast, started_s + args.limit_s - 3)
                spent, ended_s = meter.figures(len(updates)), time.monotonic()
            said = [ask(url + "/bench") for url in cast.urls]
        finally:
            cast.stop()
    load.append(os.getloadavg()[0])
    notes = sorted((at_s, pid, step) for one in said for at_s, pid, step in one["notes"])
    until = [*(update.asked_s for update in updates[1:]), ended_s]
    seen = [look(u, notes, end_s, args.mode) for u, end_s in zip(updates, until, strict=True)]
    return {
        "workers": args.workers,
        "mode": args.mode,
        "partial": args.partial,
        "updates": len(updates),
        **figures(updates, seen),
        **spent,
        "engine_late_ms_max": round(max(one["late_ms_max"] for one in said), 1),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(one, 2) for one in load],
        "seconds": round(time.monotonic() - started_s, 1),
    }


def pids(cast: Cast, server: DevServer) -> dict[str, list[int]]:
    """Return the processes whose waiting is measured."""
    assert server.process is not None
    found = {"worker": cast.workers, "engine": cast.engines}
    known = {
        kind: [one.process.pid for one in some if one.process is not None]
        for kind, some in found.items()
    }
    return {**known, "redis": [server.process.pid], "trainer": [os.getpid()]}


def main() -> None:
    cli = argparse.ArgumentParser(
        prog="python -m benchmarks.updates", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cli.add_argument("--json", action="store_true", help="one JSON line")
    cli.add_argument("--workers", type=int, default=4)
    cli.add_argument("--in-flight", type=int, default=128, help="samples of one worker")
    cli.add_argument("--updates", type=int, default=20)
    cli.add_argument("--mode", choices=("keep", "abort"), default="abort")
    cli.add_argument("--partial", action="store_true", help="stopped samples keep their tokens")
    cli.add_argument("--engines", type=int, default=2)
    cli.add_argument("--call-s", type=float, default=5.0, help="about how long one call takes")
    cli.add_argument("--limit-s", type=float, default=60.0, help="for all of it")
    args = cli.parse_args()
    found = measure(args)
    if args.json:
        print(json.dumps({"benchmark": "updates", **found}))
        return
    for name, value in found.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
