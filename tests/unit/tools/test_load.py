"""Tools by name: built in, of users, of servers; settings of single ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from worker.tools import load_tools, tool_label, tool_specs

MINE = Path(__file__).resolve().parents[2] / "data" / "functions" / "mine.py"


def test_tools_are_loaded_by_name_and_by_path_in_order() -> None:
    tools = load_tools(["calculator", f"{MINE}:lookup"])
    assert list(tools) == ["calculator", "lookup"]
    specs = tool_specs(tools)
    assert specs is not None
    assert [spec["function"]["name"] for spec in specs] == ["calculator", "lookup"]
    assert tool_specs({}) is None


async def test_a_loaded_function_is_called_with_its_arguments() -> None:
    tool = load_tools([f"{MINE}:lookup"])["lookup"]
    assert await tool({"word": "né"}) == "né:3"


def test_a_tool_of_ones_own_class_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "    name = 'own'\n"
        "    spec = {'type': 'function', 'function': {'name': 'own'}}\n"
        "    async def __call__(self, arguments): return arguments\n"
        "tool = Own()\n"
    )
    tools = load_tools([f"{tmp_path / 'own.py'}:tool"])
    assert list(tools) == ["own"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["calculater"], "unknown tool 'calculater'; did you mean 'calculator'?"),
        (["calculator", "calculator"], "two tools are called 'calculator'"),
        ([f"{MINE}:absent"], "has no 'absent'"),
    ],
)
def test_a_tool_that_cannot_be_loaded_is_one_error(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tools(names)


def test_a_metric_label_is_a_registered_name_or_other() -> None:
    tools = load_tools(["calculator"])
    assert tool_label("calculator", tools) == "calculator"
    assert {tool_label(f"invented_{i}", tools) for i in range(500)} == {"other"}
