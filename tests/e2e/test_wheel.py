"""The built wheel, as a trainer and as a deployment install it: nothing of the checkout helps."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import die_with_parent, free_port

ROOT = Path(__file__).parents[2]
CLIENT_PACKAGES = ("redis", "hiredis", "msgpack", "numpy")
_OURS = ("PYTHON", "VIRTUAL_ENV", "ROLLSTREAM_")
_CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def run(*command: str | Path, cwd: Path, timeout_s: float = 300) -> str:
    """Run to its end and return what it printed; a failure shows both streams."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
        env=_CLEAN,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def new_environment(folder: Path) -> Path:
    """Return the Python of an empty virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def locked(names: tuple[str, ...]) -> str:
    """Return these packages' entries of the lock, hashes included."""
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text())
    wanted = [e for e in entries if re.match(rf"({'|'.join(names)})==", e)]
    assert {re.match(r"[\w-]+", e)[0] for e in wanted} == set(names)  # type: ignore[index]  # every entry begins with a name
    return "\n".join(wanted) + "\n"


@pytest.fixture(scope="module")
def client(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel and what the client library needs, no more."""
    folder = tmp_path_factory.mktemp("client")
    python = new_environment(folder / "venv")
    (folder / "lock").write_text(locked(CLIENT_PACKAGES))
    run(python, "-m", "pip", "install", "-q", "--require-hashes", "-r", "lock", cwd=folder)
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


@pytest.fixture(scope="module")
def service(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel and the extra `service`, as the image has it."""
    folder = tmp_path_factory.mktemp("service")
    python = new_environment(folder / "venv")
    lock = ROOT / "ops" / "requirements.lock"
    run(python, "-m", "pip", "install", "-q", "--require-hashes", "-r", lock, cwd=folder)
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    return python


def test_wheel_has_one_top_level_name(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"rollstream"}


def test_wheel_carries_every_script_marker_and_module_of_the_checkout(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    for app in ("rollstream", "producer", "worker"):
        prefix = "" if app == "rollstream" else "rollstream/apps/"
        files = [
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / app).rglob("*")
            if path.suffix in {".py", ".lua", ".typed"}
        ]
        assert f"{app}/py.typed" in files
        assert [name for name in files if prefix + name not in packed] == []
    assert any(name.endswith(".lua") for name in packed)


def test_source_distribution_builds_the_same_wheel(built: Path, wheel: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    source = built / "source"
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    (unpacked,) = source.iterdir()
    run(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        built / "again",
        cwd=unpacked,
    )
    (again,) = (built / "again").glob("*.whl")
    first, second = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert sorted(first.namelist()) == sorted(second.namelist())


def test_client_imports_without_any_service_dependency(client: Path, tmp_path: Path) -> None:
    program = (
        "import sys, rollstream\n"
        "from rollstream import AsyncGroupStream, GroupStream, Sample\n"
        "print(' '.join(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    loaded = set(run(client, "-c", program, cwd=tmp_path).split())
    assert "rollstream" in loaded
    service_only = {"pydantic", "httpx", "aiohttp", "msgspec", "rich", "structlog", "rq"}
    assert loaded & service_only == set()


def test_client_environment_reads_a_run_through_its_command(client: Path, tmp_path: Path) -> None:
    command = client.parent / "rollstream"
    assert "audit" in run(command, "--help", cwd=tmp_path)


@pytest.mark.parametrize("app", ["worker", "producer"])
def test_service_starts_the_apps_by_name(service: Path, tmp_path: Path, app: str) -> None:
    command = service.parent / "rollstream"
    assert "--redis.url" in run(command, app, "--help", cwd=tmp_path)


TRAIN = """\
import sys
from rollstream import GroupStream
with GroupStream.connect(sys.argv[1], run=sys.argv[2], connect_timeout_s=60) as stream:
    for batch in stream.batches(groups=2, timeout_s=60):
        arrays = batch.to_arrays(pad_id=0)
        batch.ack()
        print(len(batch), arrays["tokens"].shape[0])
"""


def test_installed_apps_bring_groups_to_an_installed_client(
    service: Path, client: Path, valkey_url: str, run_name: str, tmp_path: Path, vocabulary: Path
) -> None:
    rows = [{"prompt": f"What is {i} + {i}?", "label": str(2 * i)} for i in range(1, 5)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    port, command = free_port(), service.parent / "rollstream"
    common = [
        *("--redis.url", valkey_url, "--run.name", run_name),
        *("--model.tokenizer", vocabulary, "--engine.urls", f"http://127.0.0.1:{port}"),
        *("--producer.source", f"jsonl:{source}", "--producer.stay", "false"),
        *("--telemetry.metrics_port", "0", "--aggregator.filters", "no_aborted"),
    ]
    sim = [service, "-m", "rollstream.apps.worker.engines.sim", "--port", port]
    started = [
        start([*sim, "--tokenizer", vocabulary, "--answers", f"jsonl:{source}"], tmp_path),
        start([command, "producer", *common], tmp_path),
        start([command, "worker", *common], tmp_path),
    ]
    try:
        printed = run(client, "-c", TRAIN, valkey_url, run_name, cwd=tmp_path, timeout_s=120)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert printed.split() == ["2", "16"] * 2
    audit = run(
        client.parent / "rollstream",
        "audit",
        "--run",
        run_name,
        "--redis",
        valkey_url,
        cwd=tmp_path,
    )
    assert "4" in audit


def start(command: list[Any], cwd: Path) -> subprocess.Popen[bytes]:
    with (cwd / "log").open("ab") as log:
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=_CLEAN,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
