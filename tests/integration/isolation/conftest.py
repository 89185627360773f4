"""A place of its own for the programs of each module and test process.

Whoever runs a program removes the folders of killed ones meanwhile: in one place for all, tests
that look at folders would see those of tests beside them come and go.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _own_place() -> Iterator[None]:
    place = tempfile.mkdtemp(prefix="isolation-")
    Path(place).chmod(0o1777)  # programs run as other users
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", place)
        patch.setattr(tempfile, "tempdir", place)
        yield
    shutil.rmtree(place, ignore_errors=True)
