"""Specs: from signatures, or given."""

from __future__ import annotations

from typing import Any, Literal, Optional

import pytest

from rollstream.errors import ConfigError
from worker.tools import FunctionTool


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
            "must be a JSON schema whose type is 'object'",
        ),
        ({"type": "function", "function": {"name": "f", "x": {1}}}, "is not JSON"),
    ],
)
def test_a_spec_of_another_form_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionTool(lambda: None, spec)
