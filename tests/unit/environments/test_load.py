"""Environments by name: whatever is wrong with one is said before anything is leased."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError
from rollstream.settings import Settings
from worker.environments.gym import GymFactory
from worker.environments.load import load_environment
from worker.environments.openenv import ActionForm, OpenEnvFactory, form_of
from worker.generate.loader import resolve_generate
from worker.generate.resumable import is_resumable
from worker.process.environments import surroundings

SOURCE = """
class Good:
    resumable = True
    def __init__(self, sample): pass
    async def reset(self, sample): pass
    async def step(self, message): pass
    async def state(self): pass
    async def close(self): pass

class NoStep:
    def __init__(self, sample): pass
    async def reset(self, sample): pass

class NoState:
    resumable = True
    def __init__(self, sample): pass
    async def reset(self, sample): pass
    async def step(self, message): pass

async def make(sample): return Good(sample)

def two(sample, other): return Good(sample)

number = 7
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "games.py"
    path.write_text(SOURCE)
    return str(path)


def test_classes_and_functions_are_environments(module: str) -> None:
    good = load_environment(f"{module}:Good", timeout_s=1)
    assert (good.name, good.resumable, good.start) == (f"{module}:Good", True, None)
    assert not load_environment(f"{module}:make", timeout_s=1).resumable


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NoStep", "the class NoStep has no step"),
        ("NoState", "says resumable = True and has no `state` method"),
        ("two", "called with 1 argument"),
        ("number", "number is int, not a function"),
        ("Goood", "did you mean 'Good'"),
    ],
)
def test_what_is_no_environment_is_one_error(name: str, says: str, module: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_environment(f"{module}:{name}", timeout_s=1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("reasoning_gim", "did you mean 'reasoning_gym'"),
        ("reasoning_gym?tries=0", "reasoning_gym\\?tries=N with N from 1"),
        ("reasoning_gym?trys=2", "reasoning_gym\\?tries=N with N from 1"),
        ("reasoning_gym?tries=²", "reasoning_gym\\?tries=N with N from 1"),
        ("openenv:localhost:8000", "no http URL"),
        ("openenv:ws://localhost:8000", "no http URL"),
        ("openenv:http://localhost:8000?acton=x", "unknown parameter 'acton'"),
        ("", "unknown environment"),
    ],
)
def test_a_wrong_name_says_what_to_write(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_environment(name, timeout_s=1)


def test_adapters_have_names() -> None:
    gym = load_environment("reasoning_gym?tries=3", timeout_s=1)
    assert isinstance(gym.make, GymFactory)
    assert (gym.make.tries, gym.resumable) == (3, True)
    openenv = load_environment("openenv:http://h:8000/?action=a&observation=b", timeout_s=1)
    assert isinstance(openenv.make, OpenEnvFactory)
    assert (openenv.make.url, openenv.resumable) == ("http://h:8000", False)


@pytest.mark.parametrize(
    ("schema", "asked", "text", "action"),
    [
        ({"properties": {"guess": {"type": "string"}, "metadata": {}}}, "", "7", {"guess": "7"}),
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, "", "7", {"a": 7}),
        ({"properties": {"a": {"type": "integer"}}}, "", '{"a": 7}', {"a": 7}),
        ({"properties": {"a": {"type": "integer"}}}, "", "seven", None),
        (
            {"properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]},
            "", "x", {"a": "x"},
        ),
        ({"properties": {"a": {}, "b": {}}}, "", '{"a": 1}', {"a": 1}),
        ({"properties": {"a": {}, "b": {}}}, "", 'So:\n```json\n{"a": 2}\n```', {"a": 2}),
        ({"properties": {"a": {}, "b": {}}}, "", "[1]", None),
        ({"properties": {"a": {}, "b": {}}}, "", "[" * 100_000, None),
        ({"properties": {"a": {}, "b": {}}}, "b", "text", {"b": "text"}),
        (None, "b", "text", {"b": "text"}),
    ],
)  # fmt: skip
def test_a_reply_becomes_an_action_by_the_servers_schema(
    schema: Any, asked: str, text: str, action: Any
) -> None:
    assert form_of(schema, asked, "here").action_of(text) == action


def test_an_action_field_that_is_not_there_is_an_error() -> None:
    schema = {"properties": {"guess": {"type": "string"}, "metadata": {}}}
    with pytest.raises(ConfigError, match="no field 'gess'; they have guess"):
        form_of(schema, "gess", "environment openenv:x")
    assert ActionForm(None, ("a", "b")).wanted == "one JSON object with the fields a, b"


# --- the configuration ---------------------------------------------------------------------------
def settings(**tables: Any) -> Settings:
    return Settings.model_validate(tables)


def test_the_configuration_names_environments_per_table_and_for_all(module: str) -> None:
    found = surroundings(
        settings(
            worker={"generate": "env", "environment": f"{module}:make", "max_environments": 3},
            env={"a": {}, "b": {"environment": f"{module}:Good"}, "c": {"generate": "multi_turn"}},
        )
    )
    assert found is not None
    assert sorted(found.generates) == ["a", "b"]
    assert [is_resumable(found.generates[name]) for name in "ab"] == [False, True]
    assert found.environments.most == 3


def test_no_environment_is_none() -> None:
    assert surroundings(settings()) is None


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"worker": {"generate": "env"}}, "name it in worker.environment"),
        ({"worker": {"environment": "reasoning_gym"}}, 'no environment has generate = "env"'),
        ({"env": {"a": {"environment": "reasoning_gym"}}}, "its generate is 'multi_turn'"),
        ({"env": {"a": {"generate": "env", "environment": "gim"}}}, "environment 'a': unknown"),
    ],
)
def test_what_does_not_fit_is_one_error(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        surroundings(settings(**tables))


@pytest.mark.parametrize(
    ("tables", "is_scored"),
    [
        ({"worker": {}}, False),
        ({"reward": {"kind": "math"}}, True),
        ({"reward": {"kind": "none"}}, False),
        ({"reward": {"kind": "math"}, "env": {"a": {}}}, False),
        ({"env": {"a": {"reward": {"kind": "f1"}}}}, True),
        ({"env": {"a": {"reward": {"kind": "none"}}}, "reward": {"kind": "math"}}, False),
        ({"env": {"a": {"reward": {"timeout_s": 3.0}}}}, False),
    ],
)
def test_a_reward_that_was_asked_for_goes_before_those_of_the_steps(
    tables: dict[str, Any], is_scored: bool
) -> None:
    from worker.process.environments import _is_scored

    assert _is_scored(settings(**tables), "a" if "env" in tables else "default") is is_scored


def test_env_is_among_the_names_of_generate_functions() -> None:
    with pytest.raises(ConfigError, match="did you mean 'env'"):
        resolve_generate("enf")


@pytest.mark.slow
def test_a_worker_without_environments_imports_nothing_of_theirs() -> None:
    script = (
        "import sys\n"
        "import worker.process.app\n"
        "from rollstream.settings import Settings\n"
        "from worker.process.environments import surroundings\n"
        "assert surroundings(Settings()) is None\n"
        "heavy = ('openenv', 'worker.environments', 'reasoning_gym', 'fastapi', 'fastmcp')\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.strip() == "[]"
