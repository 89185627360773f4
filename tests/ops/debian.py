"""Debian's Prometheus, Alertmanager and Redis exporter, unpacked into `.cache/debian` once.

Owns the programs that tests of rules, dashboards and the whole stack call. Never installs: packages
are downloaded and unpacked, with package lists of its own where the machine's are empty or old, so
it needs no root and changes nothing outside the cache. Invariant: the folder of the programs
appears at once and complete, each of them having answered `--version`; of several processes one
downloads and the others wait for it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache" / "debian"
PACKAGES = ("prometheus", "prometheus-alertmanager", "prometheus-redis-exporter")
PROGRAMS = {
    "prometheus": ("prometheus",),
    "promtool": ("promtool",),
    "alertmanager": ("prometheus-alertmanager", "alertmanager"),
    "amtool": ("amtool",),
    "redis_exporter": ("prometheus-redis-exporter", "redis_exporter"),
}
"""Of each program the name that Debian gives it, and that of its authors."""
UPDATE_S, DOWNLOAD_S, UNPACK_S = 180.0, 240.0, 60.0
WAIT_S = UPDATE_S + 2 * DOWNLOAD_S + UNPACK_S
"""As long as one process may take, the others wait for it."""
_APT_OPTIONS = (
    "-o", "Acquire::Retries=3", "-o", "Acquire::http::Timeout=30", "-o",
    "Acquire::https::Timeout=30", "-o", "APT::Sandbox::User=", "-qq",
)  # fmt: skip


class ToolsMissing(RuntimeError):
    """The programs are not here and could not be fetched; says why and what to do."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the programs."""

    prometheus: Path
    promtool: Path
    alertmanager: Path
    amtool: Path
    redis_exporter: Path


@functools.cache
def tools() -> Tools:
    """Return the programs, fetched first where they are not in the cache.

    Raises:
        ToolsMissing: without apt-get and without the programs on PATH, or without a network.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return _on_path()
    folder = CACHE / _release()
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with alone(CACHE / "lock"):
            if not folder.is_dir():  # another process may have fetched them while this one waited
                _fetch(folder)
    return _of(folder)


def _release() -> str:
    """Return what the packages depend on: the distribution's release and the architecture."""
    lines = Path("/etc/os-release").read_text().splitlines()
    said = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    architecture = _run(["dpkg", "--print-architecture"], 10).strip()
    return f"{said.get('ID', 'linux')}-{said.get('VERSION_ID', 'rolling')}-{architecture}"


def _on_path() -> Tools:
    found = {}
    for program, names in PROGRAMS.items():
        paths = [path for name in names if (path := shutil.which(name))]
        if not paths:
            raise ToolsMissing(
                f"{program} is not on PATH, and there is no apt-get to fetch Debian's: install "
                "Prometheus (with promtool), Alertmanager (with amtool) and redis_exporter and put "
                'them on PATH, or leave these tests out (pytest -m "not slow")'
            )
        found[program] = Path(paths[0])
    return Tools(**found)


def _of(folder: Path) -> Tools:
    found = {program: folder / "usr" / "bin" / names[0] for program, names in PROGRAMS.items()}
    missing = [str(path) for path in found.values() if not path.is_file()]
    if missing:
        raise ToolsMissing(f"{', '.join(missing)} is gone: remove {folder} and run again")
    return Tools(**found)


def _fetch(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unpacking-") as made:
        work = Path(made)
        try:
            _download(work)
            root = work / "root"
            for package in sorted(work.glob("*.deb")):
                _run(["dpkg", "-x", str(package), str(root)], UNPACK_S)
            for path in (root / "usr" / "bin" / names[0] for names in PROGRAMS.values()):
                _run([str(path), "--version"], UNPACK_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise ToolsMissing(
                f"Debian's {', '.join(PACKAGES)} could not be fetched: {_told(error)}\n"
                "These tests need them once, from the mirrors of /etc/apt/sources.list (a proxy: "
                "http_proxy or Acquire::http::Proxy); afterwards they are in "
                f"{CACHE}. Try: apt-get download {' '.join(PACKAGES)}"
            ) from error
        root.rename(folder)


def _download(work: Path) -> None:
    command = ["apt-get", *_APT_OPTIONS, "download", *PACKAGES]
    try:
        _run(command, DOWNLOAD_S, cwd=work)
    except subprocess.SubprocessError:
        # No package lists here, as in a fresh container, or so old that the mirrors have moved on.
        for name in ("lists/partial", "cache/archives/partial"):
            (work / name).mkdir(parents=True)
        own = ["-o", f"Dir::State::Lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]
        # That of one mirror suffices; `update` says what it could not read, and ends well.
        warned = _run(["apt-get", *_APT_OPTIONS, *own, "update"], UPDATE_S, cwd=work)
        try:
            _run([*command[:1], *own, *command[1:]], DOWNLOAD_S, cwd=work)
        except subprocess.CalledProcessError as error:
            error.output = f"{warned}{error.output}"
            raise


def _run(command: Sequence[str], timeout_s: float, cwd: Path | None = None) -> str:
    """Return what a command said, or end it and what it started when its time is up."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said)
    return said


def _told(error: Exception) -> str:
    said = error.output if isinstance(error, subprocess.CalledProcessError) else ""
    return f"{error}\n{said}".strip()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock that ends with its process, however that ends.

    Raises:
        ToolsMissing: somebody else holds it for longer than a fetch may take.
    """
    deadline = time.monotonic() + WAIT_S
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ToolsMissing(f"another process holds {path} for {WAIT_S:.0f} s") from None
                time.sleep(0.1)
        yield
