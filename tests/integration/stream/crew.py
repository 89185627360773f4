"""Workers that only obey: what an update of the weights needs of them, played with raw calls."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.runs import OUTAGES
from tests.backstage import Backstage, wait_until


class Hand:
    """One worker in a thread: it hears control words, and confirms them as a test wants.

    Attributes:
        name: of the worker.
        in_flight: its calls to engines; a test changes it.
        obeys: False: it beats, and confirms nothing.
        heard: states of the run, as it saw them.
    """

    def __init__(
        self,
        url: str,
        run: str,
        *,
        engines: Sequence[dict[str, Any]] = (),
        in_flight: int = 0,
        obeys: bool = True,
    ) -> None:
        self.name = uuid.uuid4().hex[:12]
        self.in_flight, self.obeys, self.engines = in_flight, obeys, list(engines)
        self.heard: list[str] = []
        self.confirmed = threading.Event()
        self._queue = BlockingQueue.connect(url, run)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hand-{self.name}")

    def __enter__(self) -> Hand:
        self._queue.call(calls.beat(self.name, []))
        self._thread.start()
        wait_until(self.confirmed.is_set if self.obeys else lambda: True)
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Do nothing any more, without a word."""
        self._stop.set()
        self._thread.join()
        self._queue.close()

    def _run(self) -> None:
        last = "0"
        while not self._stop.is_set():
            try:
                last, _ = self._queue.read_control(last, block_s=0.02)
                info = self._queue.info()
                if info is None:
                    continue
                if not self.heard or self.heard[-1] != info.state:
                    self.heard.append(info.state)
                self._queue.call(calls.beat(self.name, []))
                if self.obeys:
                    engines = json.dumps(self.engines).encode()
                    seq = info.control_seq
                    self._queue.call(calls.confirm(self.name, seq, self.in_flight, engines))
                    self.confirmed.set()
            except OUTAGES:
                last = "0"
                time.sleep(0.02)


def an_engine(url: str, state: str = "up", version: int | None = 0) -> dict[str, Any]:
    """Return what a worker says of one engine."""
    return {"url": url, "kind": "sglang", "state": state, "version": version, "in_flight": 1,
            "limit": 0}  # fmt: skip


def info_of(run: Backstage) -> Any:
    info = run.queue.info()
    assert info is not None
    return info


def ops(run: Backstage) -> list[str]:
    _, entries = run.queue.read_control("0", block_s=0)
    return [f"{e['op']} {e['arg']}".strip() for e in entries if e["op"] != "connect"]


def told(label: str) -> tuple[str, object]:
    """Return what an engine gets that is told its label."""
    return "/update_weight_version", {"new_version": label, "abort_all_requests": False}


def finish(run: Backstage, *group_indexes: int) -> None:
    """Finish groups by a worker that then leaves: it would have to obey pauses, too."""
    run.finish(*group_indexes)
    run.queue.call(calls.present("worker", run.worker, leaving=True))


def audited(run: Backstage) -> None:
    assert run.queue.call(calls.audit(deep=True)).problems == []
