"""Tools from the configuration: files, options and their way to what runs the calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollstream.config import load_settings
from rollstream.errors import ConfigError
from rollstream.settings import Settings
from tests.toy import toy_renderer
from worker.process.startup import build_isolated, env_runtimes, tool_loader
from worker.tools import BoundTool

MINE = Path(__file__).resolve().parents[2] / "data" / "functions" / "mine.py"


def settings_of(folder: Path, text: str, *argv: str) -> Settings:
    (folder / "rollstream.toml").write_text(text)
    return load_settings(argv, prog="test", environ={}, folder=folder).settings


def runtimes(settings: Settings) -> dict[str, Any]:
    renderer: Any = toy_renderer()
    return env_runtimes(settings, renderer, dict.fromkeys(settings.envs()))


def test_settings_of_one_tool_come_from_files_and_options_and_reach_every_environment(
    tmp_path: Path,
) -> None:
    text = f"""
    [worker]
    tools = ["calculator", "{MINE}:lookup"]
    tool_output_tokens = 64
    tool_concurrency = 5
    [tool.calculator]
    timeout_s = 2.0
    [tool."{MINE}:lookup"]
    output_chars = 100
    [env.a]
    [env.b]
    tools = ["calculator"]
    """
    envs = runtimes(settings_of(tmp_path, text, "--tool.calculator.concurrency", "3"))
    assert envs["a"].limits.tool_output_tokens == 64
    calculator, lookup = envs["a"].tools["calculator"], envs["a"].tools["lookup"]
    assert isinstance(calculator, BoundTool)
    assert calculator is envs["b"].tools["calculator"]
    assert (calculator.rules.timeout_s, calculator.slots.limit) == (2.0, 3)
    assert (lookup.rules.output_chars, lookup.slots.limit) == (100, 5)


def test_settings_of_a_tool_that_no_environment_has_are_one_error(tmp_path: Path) -> None:
    text = '[worker]\ntools = ["calculator"]\n[tool.calculatr]\ntimeout_s = 2.0\n'
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        runtimes(settings_of(tmp_path, text))


async def test_python_is_asked_of_verifiers_and_of_nobody_where_no_environment_has_it(
    tmp_path: Path,
) -> None:
    without = settings_of(tmp_path, '[worker]\ntools = ["calculator"]\n[reward]\nkind = "none"\n')
    assert build_isolated(without, "0123456789ab") is None
    text = '[reward]\nkind = "none"\n[env.a]\n[env.b]\ntools = ["python"]\n'
    settings = settings_of(tmp_path, text)
    isolated = build_isolated(settings, "0123456789ab")
    assert isolated is not None
    try:
        loader = tool_loader(settings, isolated)
        assert list(loader.load(["python"])) == ["python"]
    finally:
        await isolated.aclose()
