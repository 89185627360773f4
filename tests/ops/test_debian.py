"""Fetching Debian's programs: once, complete or not at all, and with an error that helps.

The packages are made here and `apt-get` is a script, so no test needs a mirror; `dpkg` is real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops import debian

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="packages are Debian's"),
]
ASK = """
import sys
from pathlib import Path
from tests.ops import debian
debian.CACHE = Path(sys.argv[1])
try:
    print(debian.tools().promtool)
except debian.ToolsMissing as error:
    sys.exit(f"missing: {error}")
"""
APT = """#!/bin/sh
echo "$*" >> "{folder}/asked"
case "$*" in
*" update"*) {update} ;;
*" download "*) {download} ;;
esac
"""
TAKE = 'sleep 0.3; cp "{folder}"/*.deb .'


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packages that have programs of the right names."""
    folder = tmp_path_factory.mktemp("packages")
    names = {
        "prometheus": ("prometheus", "promtool"),
        "prometheus-alertmanager": ("prometheus-alertmanager", "amtool"),
        "prometheus-redis-exporter": ("prometheus-redis-exporter",),
    }
    for package, programs in names.items():
        root = folder / package
        (root / "DEBIAN").mkdir(parents=True)
        (root / "DEBIAN" / "control").write_text(
            f"Package: {package}\nVersion: 1\nArchitecture: all\nMaintainer: nobody\n"
            "Description: for a test\n"
        )
        (root / "usr" / "bin").mkdir(parents=True)
        for program in programs:
            path = root / "usr" / "bin" / program
            path.write_text("#!/bin/sh\necho 1\n")
            path.chmod(0o755)
        subprocess.run(
            ["dpkg-deb", "--build", root, folder / f"{package}_1.deb"],
            check=True,
            capture_output=True,
            timeout=30,
        )
        shutil.rmtree(root)
    return folder


class Machine:
    """A machine whose `apt-get` is a script."""

    def __init__(self, folder: Path, packages: Path) -> None:
        self.folder, self.packages = folder, packages
        self.cache = folder / "cache"
        (folder / "bin").mkdir()

    def apt(self, *, download: str = TAKE, update: str = "true") -> None:
        script = self.folder / "bin" / "apt-get"
        text = APT.format(folder=self.folder, update=update, download=download)
        script.write_text(text.replace("{folder}", str(self.packages)))
        script.chmod(0o755)

    def ask(self, path: str | None = None) -> subprocess.Popen[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}" if path is None else path
        return subprocess.Popen(
            [sys.executable, "-c", ASK, self.cache],
            cwd=debian.CACHE.parents[1],
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def asked(self) -> list[str]:
        """What `apt-get` was told, without its options."""
        lines = (self.folder / "asked").read_text().splitlines()
        return [
            next(word for word in line.split() if word in ("update", "download")) for line in lines
        ]

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir() if path.name != "lock")


@pytest.fixture
def machine(tmp_path: Path, packages: Path) -> Machine:
    return Machine(tmp_path, packages)


def test_tools_are_fetched_once_by_processes_that_ask_at_the_same_time(machine: Machine) -> None:
    machine.apt()
    asking = [machine.ask() for _ in range(4)]
    said = {process.communicate(timeout=60)[0].strip() for process in asking}
    assert [process.returncode for process in asking] == [0] * 4
    (path,) = said
    assert Path(path).name == "promtool"
    assert machine.asked == ["download"]
    assert machine.ask().communicate(timeout=60)[0].strip() == path
    assert machine.asked == ["download"]
    assert len(machine.left) == 1


def test_tools_are_found_with_lists_of_their_own_where_the_machine_has_none(
    machine: Machine,
) -> None:
    taken = TAKE.replace("{folder}", str(machine.packages))
    machine.apt(download=f'case "$*" in *Dir::State::Lists=*) {taken} ;; *) exit 100 ;; esac')
    process = machine.ask()
    said, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert machine.asked == ["download", "update", "download"]
    assert Path(said.strip()).is_file()


def test_tools_that_cannot_be_fetched_say_why_and_what_to_do_and_leave_nothing(
    machine: Machine,
) -> None:
    machine.apt(download="echo E: no such package; exit 100", update="echo W: no mirror answers")
    process = machine.ask()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    for part in ("W: no mirror answers", "E: no such package", "http_proxy", "apt-get download"):
        assert part in error
    assert machine.left == []


def test_tools_that_do_not_run_here_are_not_kept(machine: Machine) -> None:
    machine.apt(download=TAKE + "; rm prometheus-alertmanager_1.deb")
    process = machine.ask()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "prometheus-alertmanager" in error
    assert machine.left == []


def test_tools_of_path_are_taken_where_there_is_no_apt_under_either_name(machine: Machine) -> None:
    for name in ("prometheus", "promtool", "alertmanager", "amtool", "redis_exporter"):
        (machine.folder / "bin" / name).write_text("#!/bin/sh\n")
        (machine.folder / "bin" / name).chmod(0o755)
    process = machine.ask(str(machine.folder / "bin"))
    said, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert Path(said.strip()).parent == machine.folder / "bin"
    (machine.folder / "bin" / "amtool").unlink()
    _, error = machine.ask(str(machine.folder / "bin")).communicate(timeout=60)
    assert "amtool is not on PATH" in error
    assert "install Prometheus" in error
