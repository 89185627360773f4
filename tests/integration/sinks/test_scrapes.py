"""Scrapes that are slow, unread, half or gone: rollouts and the end of the process are as ever."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from tests.backstage import wait_until
from tests.integration.sinks.stage import GROUPS, Stage, audited, figures, whole_run

pytestmark = pytest.mark.slow
SLOW, UNREAD, HALF = 50, 4, 26
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
PIPELINED = 20
"""Requests of a client that reads no answer: together more than the kernel buffers for it."""


def connected(stage: Stage) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.settimeout(20)
    client.connect(("127.0.0.1", stage.metrics_port))
    return client


class Clients:
    """Bad clients of one worker's `/metrics`."""

    def __init__(self, stage: Stage) -> None:
        self.slow = [connected(stage) for _ in range(SLOW)]
        self.unread = [connected(stage) for _ in range(UNREAD)]
        self.half = [connected(stage) for _ in range(HALF)]
        for client in self.slow:
            client.sendall(REQUEST)
        for client in self.unread:
            client.sendall(REQUEST * PIPELINED)
        for client in self.half:
            client.sendall(REQUEST[:17])
        self.num_read = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Read one byte a second of each slow one."""
        while not self._stopped.wait(1.0):
            for client in self.slow:
                with contextlib.suppress(OSError):
                    self.num_read += len(client.recv(1))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)
        for client in [*self.slow, *self.unread, *self.half]:
            client.close()


@contextlib.contextmanager
def bad_clients(stage: Stage) -> Iterator[Clients]:
    clients = Clients(stage)
    try:
        yield clients
    finally:
        clients.stop()


def counted(stage: Stage) -> float:
    """How many samples the worker says have ended."""
    with urllib.request.urlopen(stage.metrics_url, timeout=20) as answer:
        page = figures(answer.read().decode())
    return sum(value for name, value in page.items() if name.startswith("rollout_samples_total"))


def test_a_run_with_eighty_bad_clients_ends_as_any_other(
    stage: Stage, unbroken: dict[int, list[str]]
) -> None:
    how = {"stderr": subprocess.DEVNULL}
    with whole_run(stage, lambda _: how, beside=bad_clients) as (found, worker, clients):
        assert found == unbroken
        assert audited(stage) == (GROUPS, GROUPS)
        assert clients.slow[0].recv(1), "an answer was on its way"
        num_samples = sum(map(len, found.values()))
        wait_until(lambda: counted(stage) == num_samples)  # a good client is served beside them
        assert stage.stop(worker) == 0, "also while they hang on"
