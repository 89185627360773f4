"""A router that gives up on a call has not stopped its engine: who retries does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from rollstream.errors import EngineFault
from tests.engine_pool import a_pool, ask, wait_until
from tests.scripted_engine import a_reply
from worker.engines.sim.http import Exchange, port_of, serve

GIVES_UP = [408, 429, 500, 502, 503, 504, 520]


@dataclass
class Router:
    """In front of one engine, which samples each call until it is aborted.

    It answers the first `gives_up` calls itself, with `status`; the engine never hears of that.
    """

    status: int
    gives_up: int = 1
    is_deaf: bool = False
    """It keeps aborts without an answer."""
    paused: bool = False
    url: str = ""
    rids: list[str] = field(default_factory=list)
    """Of all calls."""
    sampling: set[str] = field(default_factory=set)
    """What the engine still runs."""
    aborts: list[str] = field(default_factory=list)

    def handle(self, exchange: Exchange) -> None:
        rid = (json.loads(exchange.body) if exchange.body else {}).get("rid", "")
        if exchange.path == "/generate":
            self.rids.append(rid)
            if len(self.rids) <= self.gives_up:
                self.sampling.add(rid)
                exchange.answer(self.status, b"upstream request timeout")
            else:
                exchange.answer(200, a_reply([59]))
        elif exchange.path == "/abort_request":
            self.aborts.append(rid)
            self.sampling.discard(rid)
            if not self.is_deaf:
                exchange.answer(200, b"{}")
        elif exchange.path == "/ready":
            exchange.answer(503 if self.paused else 200, b"{}")
        else:
            exchange.answer(200, b'{"weight_version": "default"}')


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
    times = {"abort_wait_s": 0.5, "connect_timeout_s": 0.5}
    async with routed(Router(504, is_deaf=True)) as router, a_pool(router.url, **times) as pool:
        assert (await ask(pool)).ids.tolist() == [59]
        [engine] = pool._fleet.members
        assert (engine.client.aborts, engine.client.failed_aborts) == (1, 0), "nobody waited"


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
