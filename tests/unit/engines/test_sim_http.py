"""The simulated engine's connections, without a network and without waiting."""

from __future__ import annotations

import asyncio

import pytest

from worker.engines.sim.http import Exchange, _Connection

ASK = b"GET /x?mode=keep&a=1 HTTP/1.1\r\nX-One: two \r\n\r\n"


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def seen() -> list[Exchange]:
    return []


def a_connection(seen: list[Exchange], keepalive_s: float) -> tuple[_Connection, FakeTransport]:
    connection, transport = _Connection(seen.append, keepalive_s), FakeTransport()
    connection.connection_made(transport)
    return connection, transport


async def test_exchange_has_path_query_and_headers_apart(seen: list[Exchange]) -> None:
    connection, _ = a_connection(seen, 0.0)
    connection.data_received(ASK)
    [exchange] = seen
    assert (exchange.path, exchange.query) == ("/x", "mode=keep&a=1")
    assert exchange.header(b"x-one") == "two"
    assert exchange.header(b"x-two") is None


async def test_connection_that_was_used_meanwhile_is_looked_at_again_and_not_closed(
    seen: list[Exchange],
) -> None:
    connection, transport = a_connection(seen, 5.0)
    connection.data_received(ASK)
    seen[0].answer(200, b"{}")
    now_s = asyncio.get_running_loop().time()
    connection._idle_since_s = now_s - 4.0
    connection._reap()
    assert not transport.is_closed
    assert connection._reaper is not None
    assert 0.5 < connection._reaper.when() - now_s < 1.5
    connection._idle_since_s = now_s - 6.0
    connection._reap()
    assert transport.is_closed


async def test_connection_with_half_a_request_or_an_open_one_is_not_idle(
    seen: list[Exchange],
) -> None:
    connection, transport = a_connection(seen, 5.0)
    connection.data_received(ASK)
    seen[0].answer(200, b"{}")
    connection._idle_since_s -= 60.0
    connection.data_received(ASK[:9])
    connection._reap()
    assert not transport.is_closed
    connection.data_received(ASK[9:])
    connection._reap()
    assert not transport.is_closed
    seen[1].answer(200, b"{}")
    assert connection._reaper is not None  # from here on it is idle again
    connection._idle_since_s -= 60.0
    connection._reap()
    assert transport.is_closed


async def test_without_keepalive_no_timer_is_made(seen: list[Exchange]) -> None:
    connection, _ = a_connection(seen, 0.0)
    connection.data_received(ASK)
    seen[0].answer(200, b"{}")
    assert connection._reaper is None
