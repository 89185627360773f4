"""A run with its backstage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backstage import Backstage


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """An open run with room for eight groups."""
    with Backstage(valkey_url, run_name, cap=8, lease_ms=2000) as backstage:
        yield backstage.open()
