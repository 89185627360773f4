"""Which sampling parameters there are, what they take, and which of them training may not use."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from rollstream.errors import ConfigError
from rollstream.parameters import PARAMETERS, leaving, off_problem, problem_of
from worker.sampling import Sampling

OFF: dict[str, Any] = {
    "temperature": 0, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "frequency_penalty": 0.5,
    "presence_penalty": -0.5, "repetition_penalty": 1.1, "min_new_tokens": 1,
    "logit_bias": {"17": -100}, "json_schema": {"type": "object"}, "regex": "[0-9]+", "ebnf": "x",
}  # fmt: skip
"""Each parameter that leaves the distribution, with a value that does."""
ON: dict[str, Any] = {
    "temperature": 0.5, "top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0,
    "presence_penalty": 0.0, "repetition_penalty": 1, "min_new_tokens": 0, "logit_bias": {},
    "json_schema": "", "regex": "", "ebnf": "", "max_new_tokens": 7, "stop": ["\n"],
    "stop_token_ids": [5],
}  # fmt: skip
"""Each parameter, with a value that leaves it as it is."""


def test_every_parameter_is_one_of_the_samplings_and_the_other_way_round() -> None:
    names = {field.name for field in fields(Sampling)} - {"seed"}
    assert set(PARAMETERS) == names == set(ON)


@pytest.mark.parametrize("name", OFF)
def test_a_parameter_that_leaves_the_distribution_is_known_by_its_value(name: str) -> None:
    assert problem_of(name, OFF[name]) == problem_of(name, ON[name]) == ""
    assert leaving({name: OFF[name], "max_new_tokens": 3}) == [name]
    assert Sampling().with_overrides({name: OFF[name]}).off_distribution() == [name]
    assert f"{name} = {OFF[name]!r} leaves the sampled distribution" in off_problem(name, OFF[name])


def test_values_that_leave_the_distribution_as_it_is_are_none_of_them() -> None:
    assert leaving(ON) == []
    assert Sampling().with_overrides(ON).off_distribution() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("inf")), ("temperature", float("nan")), ("temperature", 10**400),
        ("temperature", True), ("temperature", -0.1), ("max_new_tokens", 0),
        ("max_new_tokens", 1.0), ("stop", [""]), ("stop", "x"), ("stop_token_ids", [-1]),
        ("stop_token_ids", [1 << 31]), ("top_p", 0), ("top_k", 0), ("min_p", 1.5),
        ("repetition_penalty", 0), ("min_new_tokens", -1), ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": "much"}), ("logit_bias", [1]), ("json_schema", 3), ("regex", 3),
        ("tool_choice", "required"), ("tool_choice", {"function": {"name": "f"}}), ("seed", 3),
    ],
)  # fmt: skip
def test_a_value_that_no_engine_takes_is_refused_by_name(name: str, value: Any) -> None:
    assert name in problem_of(name, value)
    with pytest.raises(ConfigError, match=name):
        Sampling().with_overrides({name: value})


def test_a_forced_tool_choice_is_refused_with_what_to_do_and_a_free_one_is_nothing() -> None:
    assert "grammar" in problem_of("tool_choice", "required")
    assert problem_of("tool_choice", "auto") == ""
    assert Sampling().with_overrides({"tool_choice": "auto"}) == Sampling()


def test_a_problem_repeats_no_more_of_a_value_than_a_person_reads() -> None:
    assert len(problem_of("regex", ["x" * 10_000])) < 200
    assert len(off_problem("json_schema", "x" * 10_000)) < 500


def test_overrides_add_to_the_ids_that_end_a_turn_and_never_take_them_away() -> None:
    base = Sampling(stop_token_ids=(2, 3))
    assert base.with_overrides({"stop_token_ids": [7, 3, 7]}).stop_token_ids == (2, 3, 7)
    assert base.with_overrides({"stop": ["a"]}).stop_token_ids == (2, 3)


def test_what_a_call_records_names_biases_and_grammars_only_where_there_are_some() -> None:
    plain = Sampling().to_dict()
    assert not {"logit_bias", "json_schema", "regex", "ebnf"} & set(plain)
    own = Sampling().with_overrides(
        {"logit_bias": {"9": 1, "3": -2.5, "4": 0}, "json_schema": {"type": "object"}}
    )
    assert own.to_dict() == plain | {
        "logit_bias": {"3": -2.5, "9": 1.0}, "json_schema": '{"type":"object"}',
    }  # fmt: skip


def test_a_reply_is_of_one_grammar_only() -> None:
    base = Sampling().with_overrides({"regex": "a"})
    with pytest.raises(ConfigError, match="json_schema and regex: a reply can be of one grammar"):
        base.with_overrides({"json_schema": "{}"})
    assert base.with_overrides({"regex": "", "ebnf": "b"}).ebnf == "b"
