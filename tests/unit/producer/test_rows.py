"""Rows become groups, or are refused with the place and the reason."""

from __future__ import annotations

from typing import Any

import pytest

from producer.rows import RowRules, texts_of
from producer.sources import BadRow, Row
from rollstream.errors import ConfigError
from rollstream.group import PromptGroup
from rollstream.wire import decode_prompt

USER = [{"role": "user", "content": "hi"}]


def rules(**fields: Any) -> RowRules:
    known: dict[str, Any] = {"samples_per_prompt": {"default": 8}, "keys": {}}
    return RowRules(**({"clock": lambda: 0.0} | known | fields))


def group_of(values: dict[str, Any], group_index: int = 3, **fields: Any) -> PromptGroup:
    group, record = rules(**fields).group(Row("p.jsonl:1", values), group_index)
    assert decode_prompt(record, group_index, group.n) == group
    return group


def reason(values: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(BadRow) as caught:
        rules(**fields).group(Row("p.jsonl:7", values), 0)
    assert caught.value.where == "p.jsonl:7"
    return caught.value.reason


def test_a_full_row_becomes_its_group() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    group = group_of(
        {
            "prompt": [{"role": "system", "content": "s"}, *USER],
            "label": {"answer": 8},
            "metadata": {"level": [1, None, 2.5]},
            "tools": [tool],
            "n": 4,
            "sampling": {"temperature": 0.5, "stop": ["\n"], "max_new_tokens": 7},
            "env": "math",
            "difficulty": "ignored",
        },
        samples_per_prompt={"default": 8, "math": 2},
        timeout_s=9.0,
    )
    assert group == PromptGroup(
        3, 4, [{"role": "system", "content": "s"}, *USER], {"answer": 8}, [tool],
        {"level": [1, None, 2.5]}, {"temperature": 0.5, "stop": ["\n"], "max_new_tokens": 7},
        "math", timeout_s=9.0,
    )  # fmt: skip


def test_a_bare_prompt_takes_n_from_its_environment() -> None:
    assert group_of({"prompt": "hi"}) == PromptGroup(3, 8, "hi")
    assert group_of({"prompt": "hi"}, samples_per_prompt={"only": 5}).env == "only"
    assert group_of({"prompt": "hi"}, samples_per_prompt={"only": 5}).n == 5


def test_null_columns_count_as_absent() -> None:
    names = ("label", "metadata", "tools", "n", "sampling", "env")
    assert group_of({"prompt": "hi", **dict.fromkeys(names)}) == PromptGroup(3, 8, "hi")


@pytest.mark.parametrize(
    "prompt",
    [
        " ",
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("h", "i")]}],
        [*USER, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
         {"role": "tool", "content": "8", "tool_call_id": "1"}],
        [*USER, {"role": "assistant", "content": "few-shot"}, *USER],
    ],
)  # fmt: skip
def test_prompts_that_look_odd_but_are_valid_pass(prompt: Any) -> None:
    assert group_of({"prompt": prompt}).prompt == prompt


def test_texts_of_a_prompt_are_what_its_messages_say() -> None:
    parts = [{"type": "text", "text": t} for t in ("h", "i")]
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [{}]},
                {"role": "user", "content": parts}]  # fmt: skip
    assert texts_of(messages) == [USER[0]["content"], "", "hi"]
    assert texts_of("raw") == ["raw"]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({}, "prompt: missing; the row has none"),
        ({"question": "hi", "answer": "8"}, "the row has question, answer"),
        ({"prompt": None}, "prompt: missing"),
        ({"prompt": ""}, "prompt: empty"),
        ({"prompt": []}, "prompt: an empty list of messages"),
        ({"prompt": 5}, "expected text or a list of messages"),
        ({"prompt": {"role": "user"}}, "expected text or a list of messages"),
        ({"prompt": [*USER, "hi"]}, "message 1: expected an object"),
        ({"prompt": [{"content": "hi"}]}, "role None is not one of"),
        ({"prompt": [{"role": "human", "content": "hi"}]}, "role 'human' is not one of"),
        ({"prompt": [{"role": "user"}]}, "message 0: content is missing"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not text"),
        ({"prompt": [{"role": "user", "content": []}]}, "content is not text"),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "content is not text"),
        ({"prompt": [{"role": "user", "content": ["hi"]}]}, "content is not text"),
        ({"prompt": "hi", "n": 0}, "n: 0: expected a whole number from 1 to 4096"),
        ({"prompt": "hi", "n": 4097}, "n: 4097"),
        ({"prompt": "hi", "n": "8"}, "n: '8'"),
        ({"prompt": "hi", "n": True}, "n: True"),
        ({"prompt": "hi", "n": 2.0}, "n: 2.0"),
        ({"prompt": "hi", "env": "code"}, "env: 'code' is not configured; there is default"),
        ({"prompt": "hi", "env": 3}, "env: 3 is not configured"),
        ({"prompt": "hi", "metadata": [1]}, "metadata: expected an object"),
        ({"prompt": "hi", "metadata": {"x": 1 << 70}}, "no wire form"),
        ({"prompt": "hi\ud800"}, "no wire form"),
        ({"prompt": "hi", "tools": {"name": "add"}}, "tools: expected a list"),
        ({"prompt": "hi", "tools": [{"name": "add"}]}, "tools: tool 0: expected"),
        ({"prompt": "hi", "sampling": {"temprature": 1}}, "did you mean temperature?"),
        ({"prompt": "hi", "sampling": {"seed": 1}}, "unknown sampling parameter 'seed'"),
        ({"prompt": "hi", "sampling": {"temperature": "hot"}}, "temperature = 'hot': expected"),
        ({"prompt": "hi", "sampling": {"temperature": -1}}, "expected a number of at least 0"),
        ({"prompt": "hi", "sampling": {"max_new_tokens": 0}}, "expected a whole number"),
        ({"prompt": "hi", "sampling": {"stop": "x"}}, "expected a list of texts"),
        ({"prompt": "hi", "sampling": {"stop_token_ids": [True]}}, "a list of whole numbers"),
        ({"prompt": "hi", "sampling": {"top_p": 0.9}}, "training groups may vary temperature only"),
        ({"prompt": "hi", "sampling": {"top_k": 5}}, "allow_off_distribution"),
        ({"prompt": "hi", "sampling": {"min_new_tokens": 1}}, "leaves the sampled distribution"),
    ],
)
def test_a_bad_row_says_what_is_wrong(values: dict[str, Any], part: str) -> None:
    assert part in reason(values)


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "hi", "env": "e" * 1_000_000},
        {"prompt": [{"role": "r" * 1_000_000, "content": ""}]},
        {"prompt": "hi", "sampling": {"s" * 1_000_000: 1}},
        {"k" * 1_000_000: 1},
    ],
)
def test_a_bad_row_repeats_no_more_of_it_than_a_person_reads(values: dict[str, Any]) -> None:
    assert len(reason(values)) < 600


def test_plain_values_of_parameters_that_leave_the_distribution_are_allowed() -> None:
    plain = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1}
    assert group_of({"prompt": "hi", "sampling": plain}).sampling == plain


def test_a_record_that_no_result_could_be_as_large_as_is_refused() -> None:
    large = {"prompt": "hi", "metadata": {"page": "x" * 2000}}
    assert group_of(large, max_record_bytes=4096).n == 8
    text = reason(large, max_record_bytes=2048)
    assert text.startswith("its record (prompt, label, metadata and tools) takes 2")
    assert text.endswith("allowed are 2048 (worker.max_body_bytes)")


def test_off_distribution_parameters_pass_where_they_are_permitted() -> None:
    sampling = {"top_p": 0.9}
    assert group_of({"prompt": "hi", "sampling": sampling}, allow_off_distribution=True).sampling
    assert "top_p = 2" in reason(
        {"prompt": "hi", "sampling": {"top_p": 2}}, allow_off_distribution=True
    )


def test_a_row_must_name_its_environment_where_none_is_the_default() -> None:
    part = reason({"prompt": "hi"}, samples_per_prompt={"math": 1, "code": 1})
    assert part == "env: missing; the configured ones are math, code"


def test_renamed_columns_are_read_by_the_files_names() -> None:
    keys = {"prompt": "question", "label": "answer"}
    group = group_of({"question": "hi", "answer": "8", "label": "not this"}, keys=keys)
    assert (group.prompt, group.label) == ("hi", "8")
    assert reason({"prompt": "hi"}, keys=keys).startswith("question (prompt): missing")


def test_a_renamed_column_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean prompt"):
        rules(keys={"promt": "question"})


def test_columns_that_nothing_reads_are_named() -> None:
    rows = [Row("a", {"question": "", "lable": 1}), Row("b", {"prompt": "", "id": 1})]
    assert rules(keys={"prompt": "question"}).unused(rows) == ["id", "lable", "prompt"]
