"""A headless Chromium for tests: what a page is once a browser has read it, and how it looks.

Owns where the program is and the life of every browser that is started: each has an empty profile
of its own, is ended with all its children, and its wait is bounded. Never uses a profile of the
machine. Where there is none and this is root on Debian, the package is installed, once: several
processes wait for the one that does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from examples.devserver import die_with_parent

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
UPDATE_S, INSTALL_S, PAGE_S = 120.0, 300.0, 60.0
LOCK = Path(__file__).parents[2] / ".cache" / "chromium.lock"
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip
_APT = ("-qq", "-o", "Acquire::Retries=3", "-o", "Acquire::http::Timeout=30",
        "-o", "DPkg::Lock::Timeout=120")  # fmt: skip


class ChromiumMissing(RuntimeError):
    """There is no browser, and none could be installed; says why and what to do."""


def chromium() -> str:
    """Return the path of a Chromium, installed first where there is none.

    Raises:
        ChromiumMissing: not root, no Debian, or no network.
    """
    if found := _found():
        return found
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise ChromiumMissing(
            "no chromium on PATH, and it can be installed by root on Debian only; install the "
            "package chromium (or google-chrome) and run again"
        )
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _found() or _install()


def _found() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def _install() -> str:
    install = ("install", "-y", "--no-install-recommends", "chromium")
    said = _apt(INSTALL_S, *install)
    if _found() is None:  # a fresh machine has no lists of packages, and an old one old ones
        said = _apt(UPDATE_S, "update") + _apt(INSTALL_S, *install)
    found = _found()
    if found is None:
        raise ChromiumMissing(f"apt-get install chromium did not work:\n{said[-2000:]}")
    return found


def _apt(timeout_s: float, *argv: str) -> str:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", *_APT, *argv], env=environment, stdin=subprocess.DEVNULL, text=True,
            capture_output=True, timeout=timeout_s, check=False, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"apt-get {argv[0]}: no end within {timeout_s:g} s\n"
    return done.stdout + done.stderr


def read_page(url: str) -> tuple[str, list[str]]:
    """Return a page's document as it stands once its scripts have run, and what its console says.

    A refused script, style or request is a line of the console.
    """
    out, err = _run(url, "--dump-dom")
    return out, [line for line in err.splitlines() if "CONSOLE" in line]


def take_picture(url: str, file: Path, *, width: int, height: int, dark: bool = False) -> None:
    """Write a picture (PNG) of the upper part of a page."""
    scheme = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if dark else ()
    _run(url, f"--screenshot={file}", f"--window-size={width},{height}", *scheme)
    if not file.is_file():
        raise RuntimeError(f"chromium made no picture of {url}")


def _run(url: str, *options: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(
        prefix="rollstream-chromium-", ignore_cleanup_errors=True
    ) as profile:
        command = [chromium(), *_OPTIONS, f"--user-data-dir={profile}", *options, url]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=PAGE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"chromium ended with {process.returncode}:\n{err[-2000:]}")
    return out, err
