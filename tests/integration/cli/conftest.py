"""What the command line's tests share: no setting of whoever runs them is heard."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ROLLSTREAM_")]:
        monkeypatch.delenv(name)
