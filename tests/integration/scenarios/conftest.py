"""A run with its backstage on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backstage import Backstage


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """An open run with room for 64 groups and leases of a second."""
    with Backstage(valkey_url, run_name, cap=64, lease_ms=1000) as backstage:
        yield backstage.open()
