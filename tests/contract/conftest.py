"""What the hard cases run with: renderers of two vocabularies, and an engine process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import generate_stage
from tests.contract.sim_process import KINDS, SimProcess, sim_process
from tests.toy import toy_renderer


@pytest.fixture(params=["toy", "qwen3"])
def renderer(request: pytest.FixtureRequest) -> Any:
    """Both renderers, one after the other."""
    if request.param == "toy":
        return toy_renderer()
    return request.getfixturevalue("qwen3")


CALL_THEN_ANSWER = (
    "--tool-rate=1", "--again-rate=0", "--malformed-rate=0", "--think-rate=0", "--split-rate=0.2",
    "--max-sentences=1", "--replay-layers=2", "--replay-top-k=2", "--logprobs-mode=processed",
)  # fmt: skip


@pytest.fixture(scope="session")
def sim(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[SimProcess]:
    """One engine process, which calls a tool once and then answers; in both protocols."""
    folder = tmp_path_factory.mktemp("sim")
    with sim_process(folder, vocabulary, *CALL_THEN_ANSWER) as running:
        yield running


@pytest.fixture(params=KINDS)
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both protocols, one after the other, for what goes over HTTP."""
    kind: str = request.param
    monkeypatch.setattr(generate_stage, "PROTOCOL", kind)
    return kind
