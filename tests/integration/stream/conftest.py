"""A run with its backstage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.backstage import Backstage
from tests.integration.stream.crew import Hand


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    """An open run with room for eight groups and short leases."""
    with Backstage(valkey_url, run_name, cap=8, lease_ms=1000) as backstage:
        yield backstage.open()


@pytest.fixture
def hire(run: Backstage, valkey_url: str) -> Iterator[Callable[..., Hand]]:
    """Start workers that only obey."""
    with ExitStack() as stack:

        def make(**how: Any) -> Hand:
            return stack.enter_context(Hand(valkey_url, run.queue.run, **how))

        yield make
