"""What people are shown: values with origins, help, the page, exit codes; never a secret."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis import exceptions as redis_errors

from rollstream import config_help
from rollstream.config import Loaded, load_settings, run_app, show
from rollstream.config_keys import all_keys
from rollstream.errors import ConfigError, RunFailed, RunMismatch
from rollstream.masking import mask
from rollstream.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
SECRET = "hunter2"


def load(*argv: str) -> Loaded:
    return load_settings(argv, prog="test", environ={}, folder=Path("/nonexistent"))


def test_show_gives_every_key_with_its_origin() -> None:
    named = ("--tool.calc.concurrency=2", "--mcp.docs.url=http://localhost/mcp")
    shown = json.loads(show(load("--run.seed=5", "--env.math.max_turns=3", *named), as_json=True))
    names = {"env": "math", "tool": "calc", "mcp": "docs"}
    keys = {".".join(key).replace("NAME", names.get(key[0], "NAME")) for key in all_keys()}
    assert set(shown) == keys
    assert shown["run.seed"] == {"value": 5, "origin": "--run.seed"}
    assert shown["run.name"] == {"value": "demo", "origin": "default"}
    assert shown["env.math.max_turns"]["origin"] == "--env.math.max_turns"


@pytest.mark.parametrize(
    "argv",
    [
        f"--redis.url=redis://user:{SECRET}@host:6379/0",
        f"--redis.url=redis://:{SECRET}@host",
        f"--redis.url=redis://{SECRET}@host",
        f"--redis.url=redis://host?password={SECRET}&db=1",
        f"--rq.url=redis://u:{SECRET}@host",
        f"--engine.urls=http://u:{SECRET}@host:1,http://b",
        f"--engine.urls=http://host?token={SECRET}",
    ],
)
def test_show_masks_secrets_and_keeps_the_host(argv: str) -> None:
    loaded = load(argv)
    for text in (show(loaded), show(loaded, as_json=True)):
        assert SECRET not in text
        assert "host" in text
        assert "***" in text


def test_a_bad_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"--redis.url=http://:{SECRET}@host")
    assert SECRET not in str(caught.value)


def test_mask_leaves_addresses_without_secrets_alone() -> None:
    assert mask("http://host:30000/v1") == "http://host:30000/v1"


def test_help_and_page_name_every_key_with_a_meaning() -> None:
    described = [doc for _, docs in config_help.describe().values() for doc in docs]
    assert [doc.key for doc in described] == list(all_keys())
    assert [".".join(doc.key) for doc in described if not doc.doc] == []
    text = config_help.help_text("python -m test")
    for doc in described:
        assert f"--{'.'.join(doc.key)}" in text


def test_configuration_page_says_what_the_settings_are() -> None:
    written = (ROOT / config_help.PAGE).read_text(encoding="utf-8")
    assert config_help.page(written.partition(config_help.MARK)[0]) == written


def test_every_key_is_read_by_something() -> None:
    own = {"config.py", "config_keys.py", "config_help.py"}
    sources = [
        path.read_text(encoding="utf-8")
        for room in ("rollstream", "worker", "producer")
        for path in (ROOT / room).rglob("*.py")
        if path.name not in own and path.parent.name != "settings"
    ]
    methods = inspect.getsource(Settings.envs) + inspect.getsource(Settings.redis_url)
    read = set(re.findall(r"\.([a-z_]+)\b", "\n".join([*sources, methods])))
    assert [".".join(key) for key in all_keys() if key[-1] not in read] == []


@pytest.mark.parametrize("module", ["producer", "worker"])
def test_help_answers_without_importing_what_is_heavy(module: str) -> None:
    code = (
        f"import sys, runpy; sys.argv = ['{module}', '--help']\n"
        "try: runpy.run_module(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'reasoning_gym', 'tokenizers', 'transformers', 'rich', 'structlog', 'httpx',\n"
        "         'aiohttp', 'renderers', 'rq', 'sympy', 'torch'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--producer.capacity_groups" in done.stdout
    assert done.stdout.rstrip().endswith("HEAVY []")


# --- run_app -------------------------------------------------------------------------------------
def _raiser(error: BaseException) -> Callable[[Loaded], int]:
    def main(_: Loaded) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (ConfigError("worker.x is wrong"), 2, "worker.x is wrong"),
        (RunMismatch("run 'a' exists"), 4, "run 'a' exists"),
        (redis_errors.ConnectionError("Error 111"), 3, "Redis cannot be reached: Error 111"),
        (redis_errors.TimeoutError("too slow"), 3, "too slow"),
        (redis_errors.AuthenticationError("invalid username"), 2, "invalid username"),
        (redis_errors.NoPermissionError("no permission"), 2, "no permission"),
        (ConnectionRefusedError("engine http://e"), 3, "engine http://e"),
        (TimeoutError("no engine in 8 s"), 3, "no engine in 8 s"),
        (redis_errors.InvalidResponse("got H"), 3, "not Redis: got H"),
        (redis_errors.ResponseError("WRONGTYPE Operation"), 4, "take another run.name"),
        (redis_errors.ResponseError("DB index is out of range"), 2, "a database that Redis has"),
        (redis_errors.ResponseError("ACL failure in script"), 2, "lacks a right"),
        (redis_errors.ReadOnlyError("against a read only replica."), 3, "is a replica"),
        (redis_errors.OutOfMemoryError("used memory > 'maxmemory'."), 3, "memory of Redis is full"),
        (ConfigError(f"'redis://:{SECRET}@h'"), 2, "'redis://:***@h'"),
        (RunFailed("engine refused"), 1, "the run failed: engine refused"),
        (KeyError("gone"), 1, "unexpected KeyError"),
        (ExceptionGroup("g", [ExceptionGroup("h", [ConfigError("deep")])]), 2, "deep"),
        (redis_errors.ConnectionError("two\nlines"), 3, "two lines"),
    ],
)
def test_run_app_turns_an_error_into_one_line_and_its_code(
    error: BaseException, code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(_raiser(error), "the-app", []) == code
    written = capsys.readouterr().err
    assert written.startswith("the-app: error: ")
    assert part in written
    assert written.count("\n") == 1
    assert "Traceback" not in written
    assert SECRET not in written
    assert code in config_help.EXIT_CODES


def test_run_app_runs_where_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert run_app(lambda _: sys.stderr.write("a line") and 7, "app", []) == 7
    assert run_app(_raiser(ConfigError("x")), "app", []) == 2
    sys.stderr.close()


def test_run_app_returns_what_main_returns_and_refuses_a_wrong_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_app(lambda _: None, "app", []) == 0
    assert run_app(lambda loaded: loaded.settings.run.seed, "app", ["--run.seed=7"]) == 7
    assert run_app(lambda _: 0, "app", ["--run.sed=7"]) == 2
    assert "did you mean --run.seed?" in capsys.readouterr().err
