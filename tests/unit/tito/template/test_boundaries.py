"""Boundary rules: conformance 130 and 132, the table, and what is put behind unusual ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError, MergeFault
from tests import toy
from tests.unit.tito.template.folder import backend, template
from worker.tito.backend import RenderersBackend
from worker.tito.template import TemplateBackend
from worker.tito.template.boundaries import (
    BOUNDARIES,
    appended_messages,
    choose_rule,
    declared,
)
from worker.tito.template.files import TemplateSource
from worker.tito.tokenizer import Tokenizer

IM_END, NEWLINE = 151645, 198


@pytest.fixture(scope="module")
def tokenizer(qwen: RenderersBackend) -> Tokenizer:
    return qwen.tokenizer


def test_130_newline_is_inserted_only_behind_the_close(tokenizer: Tokenizer) -> None:
    boundary = declared("chatml", tokenizer, ())
    assert boundary.separator([100, 200, IM_END]) == [NEWLINE]
    assert boundary.separator([100, 200]) == []
    assert boundary.separator([100, 200, IM_END, NEWLINE]) == []
    assert boundary.separator([]) == []


def test_130_suffix_behind_a_closed_turn_begins_with_the_newline_and_a_cut_turn_is_closed_too(
    tokenizer: Tokenizer,
) -> None:
    """Behind a reply without a close the reference appends nothing; here the turn is closed."""
    renderer = TemplateBackend.load(tokenizer, TemplateSource(template("qwen_like")))
    window = renderer.render(toy.HI, None)
    suffix = renderer.extend(window, toy.array([100, 200, IM_END]), toy.NO, None).tolist()
    assert suffix[:2] == [NEWLINE, 151644]
    cut = renderer.extend(window, toy.array([100, 200]), toy.NO, None).tolist()
    assert cut == [IM_END, *suffix]


@pytest.mark.parametrize("name", ["toy", "strip", "qwen_like", "glm_like", "llama_like", "items"])
def test_132_generation_prompt_is_once_and_at_the_end(tmp_path: Path, name: str) -> None:
    renderer = backend(tmp_path, name)
    header = renderer.tokenizer.encode(renderer.boundary.assistant)
    assert header
    new = [*toy.OK, *toy.OK, *toy.NO]
    for messages in (new, new[:2], new[2:], [{"role": "system", "content": "be"}]):
        ids = renderer.extend(
            renderer.render(toy.HI, None), renderer.encode_raw("x"), messages, None
        ).tolist()
        places = [i for i in range(len(ids)) if ids[i : i + len(header)] == header]
        assert len(places) == 1
        # What stands behind the header is template, the same for all: a newline, in GLM's format.
        assert ids[places[0] + len(header) :] in ([], [10])


HELD = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]},
]  # fmt: skip


def test_132_appended_messages_are_what_stands_behind_the_held_ones() -> None:
    echoed: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
        ]},
    ]  # fmt: skip
    new = {"role": "tool", "content": "ok"}
    assert appended_messages(HELD, [*echoed, new]) == [new]
    assert appended_messages(HELD, echoed) == []


@pytest.mark.parametrize(
    ("given", "what", "detail"),
    [
        ([HELD[0]], "message 1 .*: the messages end before it", "history"),
        ([{"role": "user", "content": "ho"}, HELD[1]], "message 0 .*: its content", "history"),
        ([*HELD, {"role": "assistant", "content": "x"}], "message 2 has role 'assist", "role"),
        ([*HELD, {"role": "tool", "content": "x"}, {"role": "robot"}], "message 3 has", "role"),
    ],
)
def test_132_history_that_changed_or_role_that_may_not_follow_is_a_fault(
    given: list[dict[str, Any]], what: str, detail: str
) -> None:
    with pytest.raises(MergeFault, match=what) as caught:
        appended_messages(HELD, given)
    assert caught.value.detail == detail


def test_132_developer_may_follow_where_system_may() -> None:
    assert appended_messages([], [{"role": "developer", "content": "x"}], ("system",))
    with pytest.raises(MergeFault, match=r"takes tool, user"):
        appended_messages([], [{"role": "developer", "content": "x"}], ("tool", "user"))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("toy", "chatml"), ("qwen_like", "chatml"), ("glm_like", "glm"),
        ("llama_like", "llama-3"), ("mistral_like", "mistral"),
    ],
)  # fmt: skip
def test_declared_and_derived_rules_give_the_same_suffixes(
    tmp_path: Path, name: str, rule: str
) -> None:
    by_table = backend(tmp_path / "a", name)
    derived = backend(tmp_path / "b", name, boundaries="derived")
    assert by_table.boundary.name == rule
    assert derived.boundary.name == "derived"
    assert set(derived.boundary.close_ids) <= set(by_table.boundary.close_ids)
    assert derived.boundary.behind == by_table.boundary.behind
    window = by_table.render(toy.HI, None)
    for reply in ("x", "x" + "".join(by_table.decode(toy.array(by_table.stop_token_ids[:1])))):
        for role in by_table.boundary.roles:
            new = [{"role": role, "content": "ok"}]
            sampled = by_table.encode_raw(reply)
            assert (
                by_table.extend(window, sampled, new, None).tolist()
                == derived.extend(window, sampled, new, None).tolist()
            )


def test_rule_is_chosen_by_vocabulary_and_template_together(tokenizer: Tokenizer) -> None:
    assert choose_rule("auto", tokenizer, [template("qwen_like")]) == "chatml"
    assert choose_rule("auto", tokenizer, [template("glm_like")]) == "derived"
    assert choose_rule("chatml", tokenizer, [""]) == "chatml"
    with pytest.raises(ConfigError, match=r"'glm' needs <\|system\|>"):
        choose_rule("glm", tokenizer, [""])


def test_every_rule_of_the_table_is_complete() -> None:
    for name, rule in BOUNDARIES.items():
        assert rule.openers, name
        assert rule.assistant, name
        assert rule.closes or set(rule.stops) & set(rule.openers), name


# --- where the next role token closes ------------------------------------------------------------
@pytest.mark.parametrize(
    ("ended", "role", "begins"),
    [
        ("<|user|>", "user", "\n"),  # the model wrote the next turn's role token itself
        ("<|observation|>", "tool", "\n<tool_response>"),
        ("<|observation|>", "user", "<|user|>\n"),  # stays; what comes is another turn
        ("<|endoftext|>", "user", "<|user|>\n"),
        ("", "tool", "<|observation|>\n<tool_response>"),
        ("<|user|> and on", "user", "<|user|>\n"),
    ],
)
def test_role_token_that_was_sampled_is_not_written_twice(
    tmp_path: Path, ended: str, role: str, begins: str
) -> None:
    renderer = backend(tmp_path, "glm_like", tool_parser="glm")
    window = renderer.render(toy.HI, None)
    sampled = renderer.encode_raw("yes" + ended)
    suffix = renderer.extend(window, sampled, [{"role": role, "content": "ok"}], None)
    text = renderer.decode(suffix)
    assert text.startswith(begins)
    assert text.endswith("<|assistant|>\n")
    assert text.count("<|assistant|>") == 1


def test_abnormal_ends_are_those_that_close_no_turn(tmp_path: Path) -> None:
    renderer = backend(tmp_path, "glm_like")
    tail = renderer.render(toy.HI, None)
    for ended, abnormal in (("<|user|>", False), ("<|endoftext|>", True), ("", True)):
        assert renderer.parse(renderer.encode_raw("yes" + ended), tail).abnormal_end is abnormal


def test_end_of_message_token_closes_a_llama_turn(tmp_path: Path) -> None:
    """`<|eom_id|>` ends a turn that waits for a result: kept, and no `<|eot_id|>` behind it."""
    renderer = backend(tmp_path, "llama_like")
    window = renderer.render(toy.HI, None)
    for ended, begins in (("<|eom_id|>", "<|start_"), ("<|end_of_text|>", "<|eot_id|><|start_")):
        suffix = renderer.extend(window, renderer.encode_raw("x" + ended), toy.OK, None)
        assert renderer.decode(suffix).startswith(begins)


def test_comparator_of_a_template_knows_its_turns(tmp_path: Path) -> None:
    renderer = backend(tmp_path)
    compare = renderer.comparator().compare
    ids = [*toy.P0, *toy.A1, *toy.U1, 30, 2, 10]
    assert compare(ids, ids[:-1]) == []  # the newline behind a close may be missing
    said = [*toy.P0, 30, 2, *toy.U1, 30, 2]
    assert [d.kind for d in compare(ids, said)] == ["assistant_text"]
    assert compare(ids, [*toy.P0, *toy.A1, *toy.O1, 30, 2])[0].kind == "non_assistant_text"
