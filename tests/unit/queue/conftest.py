"""A bench on fakeredis for every test here."""

from __future__ import annotations

import pytest

from tests.queue_bench import Bench, fake_bench


@pytest.fixture
def bench() -> Bench:
    return fake_bench()
