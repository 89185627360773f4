"""A client of the real server, and a bench on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.queue_bench import Bench


@pytest.fixture
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url, protocol=2) as client:
        yield client


@pytest.fixture
def bench(client: redis.Redis, run_name: str) -> Bench:
    return Bench(client, run_name)
