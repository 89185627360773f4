"""Specs from signatures, and arguments held against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from rollstream.errors import ConfigError
from worker.tools import FunctionTool, load_tools, tool_label, tool_specs
from worker.tools.schema import complaint

MINE = Path(__file__).resolve().parents[2] / "data" / "functions" / "mine.py"


def test_a_spec_is_read_from_signature_and_docstring() -> None:
    def search(
        query: str,
        pages: list[int],
        limit: int = 3,
        score: float | None = None,
        lang: Literal["en", "de"] = "en",
        options: Optional[dict] = None,  # noqa: UP045 - the older spelling works too
        exact: bool = False,
    ) -> str:
        """Search the web.

        Returns the best hits.

        Args:
            query: what to look for,
                in any language.
            pages (list): which ones.
            limit: how many.

        Returns:
            Text.
        """
        return ""

    assert FunctionTool(search).spec == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.\n\nReturns the best hits.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "description": "what to look for, in any language.",
                    },
                    "pages": {
                        "type": "array",
                        "items": {"type": "integer"},
                        "description": "which ones.",
                    },
                    "limit": {"type": "integer", "description": "how many."},
                    "score": {"type": ["number", "null"]},
                    "lang": {"type": "string", "enum": ["en", "de"]},
                    "options": {"type": ["object", "null"]},
                    "exact": {"type": "boolean"},
                },
                "required": ["query", "pages"],
                "additionalProperties": False,
            },
        },
    }


def test_a_given_spec_wins_over_the_signature() -> None:
    def f(anything):  # type: ignore[no-untyped-def]  # the case
        return anything

    spec = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    f.spec = spec  # type: ignore[attr-defined]  # as users do
    tool = FunctionTool(f)
    assert (tool.name, tool.spec) == ("g", spec)


def _untyped(x):  # type: ignore[no-untyped-def]  # the case
    """Do."""


def _complex(x: complex) -> None:
    """Do."""


def _star(*words: str) -> None:
    """Do."""


def _positional(x: str, /) -> None:
    """Do."""


def _unknown(x: NoSuchType) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_untyped, "parameter 'x' has no annotation; use str, int"),
        (_complex, "parameter 'x' has the type <class 'complex'>"),
        (_star, "the parameter 'words' has no name that a call could give"),
        (_positional, "the parameter 'x' has no name"),
        (_unknown, "its signature cannot be read: NameError"),
    ],
)
def test_a_parameter_that_a_model_cannot_give_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionTool(function)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "a spec is a dictionary"),
        ({"name": "f"}, 'a spec is {"type": "function"'),
        ({"type": "function", "function": {}}, "has no function.name"),
        (
            {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
            "must be a JSON schema object",
        ),
        ({"type": "function", "function": {"name": "f", "x": {1}}}, "is not JSON"),
    ],
)
def test_a_spec_of_another_form_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionTool(lambda: None, spec)


NESTED = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "x": {"type": ["number", "null"]},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "points": {"type": "array", "items": {"type": "object", "required": ["lat"]}},
        "either": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    },
    "required": ["n"],
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"n": 1}, None),
        ({"n": 1.0}, None),
        ({"n": 1, "free": "additional names are allowed unless the schema says no"}, None),
        ({"n": 1, "x": None, "kind": "b", "points": [{"lat": 1}], "either": ["s"]}, None),
        ({}, "the argument n is missing"),
        ({"n": True}, "n must be integer, got true"),
        ({"n": 1.5}, "n must be integer, got 1.5"),
        ({"n": 10**400}, "n must be integer"),
        ({"n": 1, "x": "1"}, 'x must be number or null, got "1"'),
        ({"n": 1, "kind": "c"}, 'kind must be one of ["a", "b"], got "c"'),
        ({"n": 1, "points": [{"lat": 1}, {}]}, "the argument points[1].lat is missing"),
        ({"n": 1, "either": [1]}, "either must be one of the allowed types, got [1]"),
    ],
)
def test_a_complaint_says_what_is_wrong_with_arguments(
    arguments: dict[str, Any], expected: str | None
) -> None:
    found = complaint(NESTED, arguments)
    assert (found is None) is (expected is None)
    assert (found or "").startswith(expected or "")


def test_a_complaint_stays_short_whatever_was_given() -> None:
    wrong = {"n": "x" * 10**6} | {f"k{i}": i for i in range(1000)}
    found = complaint(NESTED | {"additionalProperties": False}, wrong)
    assert found is not None
    assert len(found) < 1000


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
