"""Arguments held against a JSON schema, and the words for a model."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import ConfigError
from worker.tools.arguments import ArgumentCheck, check_of
from worker.tools.schema import check_spec

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
        ({"n": 1, "either": 3}, "either must be array or null, got 3"),
        (
            {"n": 1, "either": [1]},
            "either must be one of the allowed forms (either[0] must be string, got 1), got [1]",
        ),
    ],
)
def test_a_complaint_says_what_is_wrong_with_arguments(
    arguments: dict[str, Any], expected: str | None
) -> None:
    found = ArgumentCheck(NESTED, "f").complaint(arguments)
    assert (found is None) is (expected is None)
    assert (found or "").startswith(expected or "")


def test_a_complaint_stays_short_whatever_was_given() -> None:
    wrong = {"n": "x" * 10**6} | {f"k{i}": i for i in range(1000)}
    found = ArgumentCheck(NESTED | {"additionalProperties": False}, "f").complaint(wrong)
    assert found is not None
    assert len(found) < 1000


KEYWORDS = {
    "type": "object",
    "properties": {
        "low": {"type": "integer", "minimum": 3, "multipleOf": 2},
        "high": {"exclusiveMaximum": 1.5},
        "word": {"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 4},
        "items": {"type": "array", "uniqueItems": True, "maxItems": 3, "minItems": 1},
        "pair": {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        "fixed": {"const": {"a": 1}},
        "one": {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
        "never": False,
        "no": {"not": {"type": "null"}},
        "tree": {"$ref": "#/$defs/tree"},
        "either": {"type": "object", "dependentRequired": {"a": ["b"]}},
    },
    "patternProperties": {"^x_": {"type": "boolean"}},
    "additionalProperties": False,
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/tree"}, "value": {"type": "number"}},
            "unevaluatedProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"low": 4, "high": 1, "word": "aaa", "items": [1], "pair": ["s", 1], "x_y": True}, None),
        ({"low": 1}, "low must be at least 3, got 1; low must be a multiple of 2, got 1"),
        ({"high": 1.5}, "high must be less than 1.5, got 1.5"),
        ({"word": "b" * 500}, 'word must match "^a+$", got "bbb'),
        ({"word": "a"}, "word must have at least 2 characters, got 1"),
        ({"items": [1, 1]}, "items must not have one item twice, got [1, 1]"),
        ({"items": []}, "items must have at least 1 items, got 0"),
        ({"items": [1, 2, 3, 4]}, "items must have at most 3 items, got 4"),
        ({"pair": [1, "s"]}, 'pair[0] must be string, got 1; pair[1] must be integer, got "s"'),
        ({"pair": ["s", 1, 2]}, "pair: Expected at most 2 items"),
        ({"fixed": {"a": 2}}, 'fixed must be {"a": 1}, got {"a": 2}'),
        ({"one": 3}, "one fits more than one of the allowed forms, got 3"),
        ({"one": 1}, None),
        ({"never": 1}, "arguments: 1 is not allowed"),
        ({"no": None}, "no must be something else, got null"),
        ({"x_y": 1}, "x_y must be boolean, got 1"),
        ({"tree": {"left": {"left": {"value": "1"}}}}, "tree.left.left.value must be number"),
        ({"tree": {"right": 1}}, 'there is no argument "tree.right" (arguments: left, value)'),
        ({"either": {"a": 1}}, "either: 'b' is a dependency of 'a'"),
        ({"z": 1, "y": 1}, 'there is no argument "z" (arguments: low, high, word'),
    ],
)
def test_every_keyword_has_words_that_say_path_and_what_was_expected(
    arguments: dict[str, Any], expected: str | None
) -> None:
    found = ArgumentCheck(KEYWORDS, "f").complaint(arguments)
    assert (found is None) is (expected is None)
    assert (found or "").startswith(expected or "")
    assert len(found or "") < 500


def test_at_most_three_problems_are_said() -> None:
    found = ArgumentCheck(KEYWORDS, "f").complaint({f"k{i}": i for i in range(50)})
    assert found is not None
    assert found.count("there is no argument") == 3


def test_arguments_that_a_recursive_schema_never_ends_on_are_one_complaint() -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"left": deep}
    assert ArgumentCheck(KEYWORDS, "f").complaint({"tree": deep}) == "nested too deep"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": 5}, "is no JSON schema: at properties: 5 is not"),
        ({"properties": {"a": {"type": "strin"}}}, "is no JSON schema: at properties.a.type"),
        ({"properties": {"a": {"pattern": "("}}}, r"properties.a.pattern: '\(' is not a 'regex'"),
        ({"patternProperties": {"[": {}}}, "is no JSON schema|cannot be read"),
        ({"$ref": "#"}, "refers to itself without an end"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "refers to '#/\\$defs/no', which is not"),
        ({"$schema": 5}, "is no JSON schema"),
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/a.json"}}}, "nothing is fetched"),
        ({"items": {"anyOf": [{"$dynamicRef": "file:///etc/passwd"}]}}, "nothing is fetched"),
    ],
)
def test_a_schema_that_is_none_or_refers_elsewhere_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ArgumentCheck(schema, "tool 'f'")
    assert str(caught.value).startswith("tool 'f'")


def test_what_only_looks_like_a_reference_is_an_argument() -> None:
    check = ArgumentCheck({"properties": {"$ref": {"type": "string"}, "pattern": {}}}, "f")
    assert check.complaint({"$ref": "http://x.test", "pattern": "("}) is None
    assert check.complaint({"$ref": 1}) == "$ref must be string, got 1"


def test_references_inside_the_schema_hold_also_by_anchor_and_id() -> None:
    schema = {
        "$id": "http://x.test/root",
        "properties": {"a": {"$ref": "/other"}, "b": {"$id": "other", "type": "string"},
                       "c": {"$ref": "#word"}},
        "$defs": {"w": {"$anchor": "word", "enum": ["x"]}},
    }  # fmt: skip
    check = ArgumentCheck(schema, "f")
    assert check.complaint({"a": 1}) == "a must be string, got 1"
    assert check.complaint({"c": "y"}) == 'c must be one of ["x"], got "y"'


def test_a_schema_of_an_earlier_draft_is_read_as_one() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"items": [{"type": "string"}]}},
    }
    assert ArgumentCheck(schema, "f").complaint({"a": [1]}) == "a[0] must be string, got 1"


def test_the_check_of_a_tool_without_its_own_is_made_once() -> None:
    assert check_of({"type": "object"}) is check_of({"type": "object"})


def test_a_schema_that_cannot_be_walked_is_one_clear_error() -> None:
    draft_3 = {"$schema": "http://json-schema.org/draft-03/schema#", "type": "object"}
    with pytest.raises(ConfigError, match="references of its schema cannot be read"):
        ArgumentCheck({**draft_3, "properties": {"x": {"extends": {"$ref": "#"}}}}, "tool 'x'")
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(3000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(ConfigError, match="is not JSON"):
        check_spec({"type": "function", "function": {"name": "x", "parameters": deep}}, "tool 'x'")
