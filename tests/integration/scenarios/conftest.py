"""A run with its backstage on a real server, and streams that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollstream.stream import GroupStream
from tests.backstage import Backstage

Connect = Callable[..., GroupStream]


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """An open run with room for 64 groups and leases of a second."""
    with Backstage(valkey_url, run_name, cap=64, lease_ms=1000) as backstage:
        yield backstage.open()


@pytest.fixture
def connect(valkey_url: str, run_name: str) -> Iterator[Connect]:
    """Connect a trainer to the run of this test."""
    streams: list[GroupStream] = []

    def make(**options: Any) -> GroupStream:
        given = {"run": run_name, "connect_timeout_s": 3.0} | options
        stream = GroupStream.connect(valkey_url, **given)
        streams.append(stream)
        return stream

    yield make
    for stream in streams:
        stream.close()
