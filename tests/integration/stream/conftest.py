"""A run with its backstage, and streams that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollstream.stream import GroupStream
from tests.backstage import Backstage

Connect = Callable[..., GroupStream]


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """An open run with room for eight groups and short leases."""
    with Backstage(valkey_url, run_name, cap=8, lease_ms=1000) as backstage:
        yield backstage.open()


@pytest.fixture
def connect(valkey_url: str, run_name: str) -> Iterator[Connect]:
    """Connect a trainer to the run of this test."""
    streams: list[GroupStream] = []

    def make(**options: Any) -> GroupStream:
        options = {"run": run_name, "connect_timeout_s": 2.0} | options
        stream = GroupStream.connect(valkey_url, **options)
        streams.append(stream)
        return stream

    yield make
    for stream in streams:
        stream.close()
