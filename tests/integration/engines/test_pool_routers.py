"""A router that gives up on a call has not stopped its engine: who retries does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from rollstream.errors import EngineFault
from tests.engine_pool import a_pool, ask, wait_until
from tests.scripted_engine import a_reply, reset
from worker.engines.sim.http import Exchange, port_of, serve

GIVES_UP = [408, 429, 500, 502, 503, 504, 520]
PATIENT = {"abort_wait_s": 60.0, "connect_timeout_s": 60.0}
"""Far longer than any test."""


@dataclass
class Router:
    """In front of one engine, which samples each call until it is aborted.

    It answers the first `gives_up` calls itself, with `status`; the engine never hears of that.
    """

    status: int | Callable[[Exchange], None]
    gives_up: int = 1
    deaf_to: str = ""
    """A path that it does not answer before its end."""
    paused: bool = False
    url: str = ""
    rids: list[str] = field(default_factory=list)
    """Of all calls."""
    sampling: set[str] = field(default_factory=set)
    """What the engine still runs."""
    aborts: list[str] = field(default_factory=list)
    kept: list[Exchange] = field(default_factory=list)

    def handle(self, exchange: Exchange) -> None:
        rid = (json.loads(exchange.body) if exchange.body else {}).get("rid", "")
        if exchange.path == "/generate":
            self.rids.append(rid)
            if len(self.rids) <= self.gives_up:
                self.sampling.add(rid)
                if callable(self.status):
                    self.status(exchange)
                else:
                    exchange.answer(self.status, b"upstream request timeout")
            else:
                exchange.answer(200, a_reply([59]))
        elif exchange.path == "/abort_request":
            self.aborts.append(rid)
            self.sampling.discard(rid)
            self._answer(exchange)
        elif exchange.path == "/ready":
            self._answer(exchange, 503 if self.paused else 200)
        else:
            exchange.answer(200, b'{"weight_version": "default"}')

    def _answer(self, exchange: Exchange, status: int = 200) -> None:
        if exchange.path == self.deaf_to:
            self.kept.append(exchange)
        else:
            exchange.answer(status, b"{}")

    def end(self) -> None:
        """Answer what was kept."""
        self.deaf_to = ""
        for exchange in self.kept:
            exchange.answer(200, b"{}")


@contextlib.asynccontextmanager
async def routed(router: Router) -> AsyncIterator[Router]:
    server = await serve(router.handle, "127.0.0.1", 0)
    router.url = f"http://127.0.0.1:{port_of(server)}"
    yield router
    server.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("status", GIVES_UP)
async def test_call_that_a_router_gave_up_runs_once_only(status: int) -> None:
    async with routed(Router(status)) as router:
        async with a_pool(router.url) as pool:
            assert (await ask(pool)).ids.tolist() == [59]
        assert (router.aborts, router.sampling) == ([router.rids[0]], set())


@pytest.mark.parametrize("status", GIVES_UP)
async def test_call_that_is_given_up_for_good_runs_nowhere(status: int) -> None:
    async with routed(Router(status, gives_up=9)) as router:
        async with a_pool(router.url, max_retries=1) as pool:
            with pytest.raises(EngineFault):
                await ask(pool)
        assert router.aborts == router.rids
        assert (len(router.rids), router.sampling) == (2, set())


async def test_retry_waits_for_no_answer_to_the_abort_of_what_a_router_gave_up() -> None:
    async with (
        routed(Router(504, deaf_to="/abort_request")) as router,
        a_pool(router.url, **PATIENT) as pool,
    ):
        assert (await ask(pool)).ids.tolist() == [59]
        [engine] = pool._fleet.members
        assert (engine.client.aborts, engine.client.failed_aborts) == (1, 0), "nobody waited"
        router.end()


@pytest.mark.parametrize(
    ("step", "path", "detail"),
    [(503, "/ready", "unavailable"), (reset, "/abort_request", "reset")],
)
async def test_deadline_ends_the_wait_for_what_an_engine_is_asked_beside_the_call(
    step: int | Callable[[Exchange], None], path: str, detail: str
) -> None:
    async with (
        routed(Router(step, gives_up=9, deaf_to=path)) as router,
        a_pool(router.url, **PATIENT) as pool,
    ):
        async with asyncio.timeout(10.0):
            with pytest.raises(EngineFault) as caught:
                await ask(pool, deadline_s=0.2)
        router.end()
    assert caught.value.detail in (detail, "timeout", "no_engine")
    assert set(router.rids) <= set(router.aborts), "however short the time was"


async def test_call_that_waits_for_the_end_of_a_pause_is_not_kept_behind_a_router() -> None:
    """A paused SGLang keeps a call; its router does not wait so long and answers 504."""
    async with routed(Router(504, paused=True)) as router:
        async with a_pool(router.url, max_retries=0, probe_interval_s=60.0) as pool:
            task = asyncio.create_task(ask(pool))
            await wait_until(lambda: pool.counters.pauses == 1)
            await wait_until(lambda: bool(router.aborts))
            router.paused = False
            assert (await task).ids.tolist() == [59]
        assert (router.aborts, router.sampling) == ([router.rids[0]], set())
        assert len(router.rids) == 2
