"""Fixtures that every test may use: a real server, a run name of its own, the real vocabulary."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples import vocabulary as vocabulary_file
from examples.devserver import DevServer
from rollstream.stream import GroupStream
from tests.backstage import Connect

if TYPE_CHECKING:
    from worker.tito.backend import RenderersBackend

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A real Valkey of this test process alone; tests keep apart by their run names."""
    with DevServer() as server:
        yield server.url


@pytest.fixture
def run_name() -> str:
    """A run that no other test has."""
    return f"t-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def vocabulary() -> Path:
    """The real Qwen3 `tokenizer.json`, made where it is missing."""
    return vocabulary_file.write(ROOT / ".cache" / "qwen3")


@pytest.fixture(scope="session")
def qwen3(vocabulary: Path) -> RenderersBackend:
    """The real Qwen3 renderer, loaded once per test process."""
    from worker.tito.load import load_renderer

    return load_renderer(vocabulary, "qwen3")


@pytest.fixture
def connect(valkey_url: str, run_name: str) -> Iterator[Connect]:
    """Connect a trainer to the run of this test; its streams are closed at the end."""
    streams: list[GroupStream] = []

    def make(**options: Any) -> GroupStream:
        given: dict[str, Any] = {"run": run_name, "connect_timeout_s": 3.0} | options
        stream = GroupStream.connect(valkey_url, **given)
        streams.append(stream)
        return stream

    yield make
    for stream in streams:
        stream.close()
