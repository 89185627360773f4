"""The worker's HTTP face."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest

from worker.telemetry.metrics import Metrics
from worker.telemetry.server import TelemetryServer


class Face:
    """A server whose checks the test sets."""

    def __init__(self) -> None:
        self.checks = {"redis": True, "engine": True}
        self.server = TelemetryServer(
            Metrics(version="1", wire=1, envs=["default"]), lag_s=lambda: 0.25, ready=self._checks
        )

    async def _checks(self) -> dict[str, bool]:
        return self.checks

    async def get(self, path: str) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{self.server.port}{path}") as answer,
        ):
            return answer.status, await answer.text()


@pytest.fixture
async def face() -> AsyncIterator[Face]:
    made = Face()
    yield made
    await made.server.aclose()


async def test_health_speaks_of_the_process_and_readiness_of_what_it_needs(face: Face) -> None:
    await face.server.start("127.0.0.1", 0)
    face.checks = {"redis": True, "engine": False}

    assert await face.get("/healthz") == (200, json.dumps({"alive": True, "loop_lag_s": 0.25}))
    assert await face.get("/readyz") == (503, json.dumps({"redis": True, "engine": False}))
    face.checks = {"redis": True, "engine": True}
    assert (await face.get("/readyz"))[0] == 200
    status, text = await face.get("/metrics")
    assert status == 200
    assert "rollout_inflight_samples 0.0" in text


async def test_a_port_in_use_takes_the_next_free_one(face: Face) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert await face.server.start("127.0.0.1", port) > port
        assert (await face.get("/healthz"))[0] == 200


async def test_no_free_port_is_one_clear_error(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.telemetry.server.PORTS_TRIED", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"no free port from {port}"):
            await face.server.start("127.0.0.1", port)
