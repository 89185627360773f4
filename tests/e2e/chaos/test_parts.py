"""The parts of the chaos harness do what they say: its schedule, its links, its failures."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.backstage import wait_until
from tests.e2e.chaos.faults import Failure, failure_of
from tests.e2e.chaos.links import Links
from tests.e2e.chaos.schedule import BAG, Act, schedule


def test_schedule_is_the_same_for_a_seed_and_another_for_another() -> None:
    assert list(schedule(7, 60)) == list(schedule(7, 60))
    assert list(schedule(7, 60)) != list(schedule(8, 60))


def test_schedule_of_a_minute_beats_the_prototype_and_meets_every_kind() -> None:
    events = list(schedule(1, 60))
    done = Counter((event.act, event.role) for event in events)
    kinds = Counter(event.act for event in events)
    assert set(done) == set(BAG)
    # 18 kills, 17 freezes, 8 of the trainer, 4 of aggregators, Redis twice, in 40 s.
    assert kinds[Act.KILL] + kinds[Act.AMNESIA] >= 27
    assert kinds[Act.FREEZE] + kinds[Act.USURP] >= 26
    assert done[Act.KILL, "trainer"] >= 12
    assert done[Act.KILL, "aggregator"] >= 6
    assert done[Act.KILL, "redis"] + done[Act.AMNESIA, "redis"] >= 3


def test_failures_depend_on_the_attempt_and_a_poison_does_not() -> None:
    members = [(group, member) for group in range(2500) for member in range(4)]
    first = {m: failure_of(*m, 0) for m in members}
    again = {m: failure_of(*m, 1) for m in members}
    poisons = {m for m, failure in first.items() if failure is Failure.POISON}
    assert {*first.values()} == {None, *Failure}
    assert {m for m, failure in again.items() if failure is Failure.POISON} == poisons != set()
    both = sum(first[m] is not None and again[m] is not None for m in members if m not in poisons)
    assert 0 < both < 0.1 * len(members)


class Echo:
    """A server that says everything again, and remembers it."""

    def __init__(self) -> None:
        self.heard = b""
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._server.accept()
                threading.Thread(target=self._answer, args=[peer], daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            while data := peer.recv(65536):
                self.heard += data
                peer.sendall(data)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def is_closed(peer: socket.socket) -> bool:
    try:
        return peer.recv(100) == b""
    except ConnectionResetError:
        return True


def test_links_carry_bytes_and_a_cut_reaches_one_process_alone(echo: Echo) -> None:
    with (
        Links(echo.port, ["a", "b"]) as links,
        dial(links.ports["a"]) as a,
        dial(links.ports["b"]) as b,
    ):
        a.sendall(b"one")
        assert a.recv(100) == b"one"
        b.sendall(b"two")
        assert b.recv(100) == b"two"
        links.cut("a")
        assert is_closed(a)
        b.sendall(b"three")
        assert b.recv(100) == b"three"


def test_links_lose_a_reply_with_its_connection_and_no_later_one(echo: Echo) -> None:
    with Links(echo.port, ["a"]) as links:
        links.lose("a", 1)
        with dial(links.ports["a"]) as peer:
            peer.sendall(b"one")
            assert is_closed(peer)
        with dial(links.ports["a"]) as peer:
            peer.sendall(b"two")
            assert peer.recv(100) == b"two"


def test_links_let_nothing_pass_while_they_stall(echo: Echo) -> None:
    with Links(echo.port, ["a"]) as links, dial(links.ports["a"]) as peer:
        links.stall("a")
        peer.sendall(b"one")
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            peer.recv(100)
        links.heal("a")
        peer.settimeout(5)
        assert peer.recv(100) == b"one"


def test_links_tear_a_request_in_two(echo: Echo) -> None:
    with Links(echo.port, ["a"]) as links, dial(links.ports["a"]) as peer:
        links.tear("a")
        peer.sendall(b"12345678")
        wait_until(lambda: is_closed(peer), 5)
        wait_until(lambda: echo.heard, 5)
    assert echo.heard == b"1234"


def test_links_close_where_the_server_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Links(port, ["a"]) as links, dial(links.ports["a"]) as peer:
        assert is_closed(peer)
