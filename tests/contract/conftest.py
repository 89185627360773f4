"""The renderers of the hard cases: the toy vocabulary, whose ids can be spelled, and Qwen3."""

from __future__ import annotations

from typing import Any

import pytest

from tests.toy import toy_renderer


@pytest.fixture(params=["toy", "qwen3"])
def renderer(request: pytest.FixtureRequest) -> Any:
    """Both renderers, one after the other."""
    if request.param == "toy":
        return toy_renderer()
    return request.getfixturevalue("qwen3")
