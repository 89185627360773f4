"""Tools by name: built in, of users, of servers; settings of single ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from rollstream.settings import ToolTable
from worker.tools import BoundTool, FunctionTool, ToolLoader, load_tools, tool_label, tool_specs

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
        (["python"], "the tool 'python' runs in a verifier"),
        (["mcp:nobody"], "no MCP server is configured; add \\[mcp.NAME\\]"),
    ],
)
def test_a_tool_that_cannot_be_loaded_is_one_error(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tools(names)


def test_a_metric_label_is_a_registered_name_or_other() -> None:
    tools = load_tools(["calculator"])
    assert tool_label("calculator", tools) == "calculator"
    assert {tool_label(f"invented_{i}", tools) for i in range(500)} == {"other"}


def rules_of(loader: ToolLoader, names: list[str], tool: str) -> ToolTable:
    found = loader.load(names)[tool]
    assert isinstance(found, BoundTool)
    return found.rules


def test_settings_are_found_by_either_name_and_the_models_goes_first() -> None:
    path = f"{MINE}:lookup"
    tables = {
        path: ToolTable(timeout_s=1, output_chars=100),
        "lookup": ToolTable(timeout_s=2, concurrency=3),
    }
    loader = ToolLoader(tables, concurrency=9)
    rules = rules_of(loader, [path, "calculator"], "lookup")
    assert rules == ToolTable(timeout_s=2, output_chars=100, concurrency=3)
    assert rules_of(loader, ["calculator"], "calculator") == ToolTable()
    loader.check()


def test_the_limit_of_calls_at_once_is_the_tools_in_the_whole_process() -> None:
    loader = ToolLoader({"calculator": ToolTable(concurrency=3)}, concurrency=9)
    one, two = loader.load(["calculator"]), loader.load([f"{MINE}:lookup", "calculator"])
    assert one["calculator"] is two["calculator"]
    limits = {name: tool.slots.limit for name, tool in two.items() if isinstance(tool, BoundTool)}
    assert limits == {"lookup": 9, "calculator": 3}


def test_settings_of_a_tool_that_no_environment_has_are_refused_with_the_nearest() -> None:
    loader = ToolLoader({"calculater": ToolTable(timeout_s=1)})
    loader.load(["calculator"])
    loader.load([f"{MINE}:lookup"])
    with pytest.raises(ConfigError) as caught:
        loader.check()
    assert str(caught.value).startswith(
        "[tool.calculater] is of no tool that an environment has; did you mean 'calculator'? "
    )
    assert "lookup" in str(caught.value)


def test_tools_of_a_server_have_settings_by_server_by_tool_and_by_their_own_name() -> None:
    def weather(city: str) -> str:
        """Say it."""
        return city

    def tides(port: str) -> str:
        """Say them."""
        return port

    made = {"weather": FunctionTool(weather), "tides": FunctionTool(tides)}

    def served(name: str) -> list[FunctionTool]:
        _, slash, tool = name.partition("/")
        return [made[tool]] if slash else list(made.values())

    tables = {
        "mcp:sea": ToolTable(timeout_s=1, output_chars=100),
        "mcp:sea/weather": ToolTable(timeout_s=2),
        "tides": ToolTable(output_chars=200),
    }
    loader = ToolLoader(tables, servers=served)
    assert list(loader.load(["mcp:sea"])) == ["weather", "tides"]
    assert rules_of(loader, ["mcp:sea"], "weather") == ToolTable(timeout_s=2, output_chars=100)
    assert rules_of(loader, ["mcp:sea"], "tides") == ToolTable(timeout_s=1, output_chars=200)
    loader.check()
    alone = ToolLoader(tables, servers=served)
    assert rules_of(alone, ["mcp:sea/weather"], "weather") == ToolTable(timeout_s=2)
    with pytest.raises(ConfigError, match=r"\[tool.mcp:sea\] is of no tool"):
        alone.check()
    with pytest.raises(ConfigError, match="two tools are called 'weather'"):
        ToolLoader(servers=served).load(["mcp:sea", "mcp:sea/weather"])


def test_settings_of_a_servers_tool_are_found_by_its_own_name_where_the_model_has_another() -> None:
    def search(query: str) -> str:
        """Find."""
        return query

    tool = FunctionTool(search, {"type": "function", "function": {"name": "sea_search"}})
    tool.served_name = "search"  # type: ignore[attr-defined]  # as `McpTool` has it
    loader = ToolLoader({"mcp:sea/search": ToolTable(timeout_s=2)}, servers=lambda _: [tool])
    assert rules_of(loader, ["mcp:sea"], "sea_search") == ToolTable(timeout_s=2)
    loader.check()


def test_a_bad_schema_stops_the_worker_before_anything_is_leased(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "def f(**anything): return ''\n"
        "f.spec = {'type': 'function', 'function': {'name': 'f', 'parameters': "
        "{'type': 'object', 'properties': {'a': {'type': 'text'}}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"tool 'f': function\.parameters of its spec is"):
        load_tools([f"{tmp_path / 'bad.py'}:f"])
