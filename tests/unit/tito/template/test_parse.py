"""Replies under templates: reasoning and calls, by ids where markers are tokens, by text else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.unit.tito.template.folder import backend
from worker.tito.template import TemplateBackend
from worker.types import AssistantMessage, ProblemKind

GOOD = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def wordy(folder: Path, **options: Any) -> TemplateBackend:
    """Return a backend over a vocabulary in which no marker of calls or reasoning is a token."""
    from tests.unit.tito.template.folder import load, template, write_folder

    write_folder(folder, template("toy"))
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    gone = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    said["added_tokens"] = [t for t in said["added_tokens"] if t["content"] not in gone]
    said["model"]["vocab"] = {
        token: number for token, number in said["model"]["vocab"].items() if token not in gone
    }
    path.write_text(json.dumps(said))
    return load(folder, **options)


def parsed(renderer: TemplateBackend, reply: str, opened: str = "") -> AssistantMessage:
    tail = renderer.encode_raw("<|im_end|>\n<|im_start|>assistant\n" + opened)
    return renderer.parse(renderer.encode_raw(reply), tail)


def test_calls_are_text_where_no_parser_is_named(tmp_path: Path) -> None:
    message = parsed(backend(tmp_path), f"I call. {GOOD}<|im_end|>")
    assert message.tool_calls == []
    assert message.content == f"I call. {GOOD}"


def test_reasoning_markers_of_the_vocabulary_are_seen_without_a_name(tmp_path: Path) -> None:
    renderer = backend(tmp_path)
    assert parsed(renderer, "<think>hm</think>yes<|im_end|>").reasoning == "hm"
    assert parsed(renderer, "hm</think>yes<|im_end|>", "<think>").content == "yes"
    unfinished = parsed(renderer, "hm", "<think>\n")
    assert (unfinished.reasoning, unfinished.content, unfinished.abnormal_end) == ("hm", "", True)
    closed = parsed(renderer, "hm</think>yes", "<think></think>")
    assert closed.reasoning is None


def test_reasoning_of_an_earlier_turn_opens_nothing(tmp_path: Path) -> None:
    renderer = backend(tmp_path)
    tail = renderer.encode_raw("<think>cut<|im_end|>\n<|im_start|>assistant\n")
    assert renderer.parse(renderer.encode_raw("yes"), tail).content == "yes"


def test_reasoning_can_be_switched_off(tmp_path: Path) -> None:
    message = parsed(backend(tmp_path, reasoning_parser="none"), "<think>hm</think>yes<|im_end|>")
    assert (message.reasoning, message.content) == (None, "<think>hm</think>yes")


@pytest.mark.parametrize("make", [backend, wordy], ids=["ids", "text"])
@pytest.mark.parametrize(
    ("reply", "names", "problems", "content"),
    [
        (GOOD, ["f"], [None], ""),
        (f"a {GOOD} b {GOOD} c", ["f", "f"], [None, None], "a"),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', ["f"],
         [None], ""),
        ("<tool_call>{bad</tool_call>" + GOOD, ["", "f"], [ProblemKind.INVALID_JSON, None], ""),
        ("x<tool_call>{}", [""], [ProblemKind.UNCLOSED], "x"),
        ("</tool_call> no opener", [], [], "</tool_call> no opener"),
        (f"<think>{GOOD}", [], [], ""),
        (f"<think>{GOOD}</think>{GOOD}", ["f"], [None], ""),
        (f"<think>a</think>b<think>c {GOOD}", [], [], "b"),
        (f"x <think>c {GOOD}", [], [], "x"),
        (f"x <think>c {GOOD}</think>{GOOD}", ["f"], [None], "x"),
        (f"x<think>c {GOOD}</think>d", [], [], "x\nd"),
        (f"{GOOD}<think>{GOOD}", ["f"], [None], ""),
        (f"x</think>{GOOD}", ["f"], [None], "x</think>"),
        ('<tool_call>{"name": "f", "arguments": {"a": "<think>b</think>c"}}</tool_call>', [""],
         [ProblemKind.UNCLOSED], ""),
        ("", [], [], ""),
    ],
)  # fmt: skip
def test_json_blocks_are_read(
    tmp_path: Path, make: Any, reply: str, names: list[str], problems: list[Any], content: str
) -> None:
    renderer = make(tmp_path, tool_parser="hermes", reasoning_parser="think")
    message = parsed(renderer, reply + "<|im_end|>")
    assert [call.name for call in message.tool_calls] == names
    assert [call.problem for call in message.tool_calls] == problems
    assert message.content == content
    assert not message.abnormal_end


def test_text_that_looks_like_a_marker_is_text_where_markers_are_tokens(tmp_path: Path) -> None:
    renderer = backend(tmp_path, tool_parser="hermes")
    typed = renderer.encode(GOOD + "<think>")  # as characters, as a user would have
    message = renderer.parse(typed, toy.array(toy.P0))
    assert message.tool_calls == []
    assert message.content == GOOD + "<think>"


@pytest.mark.parametrize(
    ("name", "parser", "reply", "wanted"),
    [
        ("glm_like", "glm",
         "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", {"a": 1}),
        ("toy", "qwen3.5",
         "<tool_call>\n<function=f>\n<parameter=a>\nx y\n</parameter>\n</function>\n</tool_call>",
         {"a": "x y"}),
    ],
)  # fmt: skip
def test_spellings_of_the_package_are_read_and_judged(
    tmp_path: Path, name: str, parser: str, reply: str, wanted: dict[str, Any]
) -> None:
    renderer = backend(tmp_path, name, tool_parser=parser)
    (call,) = parsed(renderer, f"so {reply}" + reply).tool_calls[:1]
    assert (call.name, call.arguments, call.problem) == ("f", wanted, None)
    (cut,) = parsed(renderer, reply.removesuffix("</tool_call>")).tool_calls
    assert cut.problem is ProblemKind.UNCLOSED
    for draft in (f"<think>{reply}", f"so <think>{reply}", f"<think>x</think>so <think>{reply}"):
        assert parsed(renderer, draft).tool_calls == []
    assert parsed(renderer, f"<think>x</think>{reply}").tool_calls[0].name == "f"


def test_deepseeks_spelling_is_read(tmp_path: Path) -> None:
    tokens = [f"<｜tool▁{part}｜>" for part in
              ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]  # fmt: skip
    renderer = backend(tmp_path, controls=tokens, tool_parser="deepseek-v3")
    begin, end, call, call_end, sep = tokens
    reply = f'{begin}{call}function{sep}f\n```json\n{{"a": 1}}\n```{call_end}{end}'
    message = parsed(renderer, "so" + reply)
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("f", {"a": 1})]
    assert message.content == "so"


@pytest.mark.parametrize("parser", ["hermes", "qwen3.5"])
def test_nothing_that_a_model_writes_raises(tmp_path: Path, parser: str) -> None:
    renderer = backend(tmp_path, tool_parser=parser)
    for reply in (
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>" * 2000,
        "<tool_call></tool_call>" * 2000,
        "</tool_call><tool_call>\ud800</tool_call>",
        "<tool_call>" + "9" * 10_000 + "</tool_call>",
        "<tool_call><function=><parameter=></tool_call>",
    ):
        message = parsed(renderer, reply)
        assert all(call.problem is not None for call in message.tool_calls)


def test_history_in_the_models_own_markup_keeps_its_markers(tmp_path: Path) -> None:
    renderer = backend(tmp_path, tool_parser="hermes")
    said = {"role": "assistant", "content": f"<think>hm</think>{GOOD}<|im_end|>"}
    ids = renderer.render([*toy.HI, said, *toy.NO], None).tolist()
    inside = ids[len(toy.P0) : -len(toy.U1) - 1]
    assert [number for number in inside if number < 10] == [4, 5, 6, 7]  # but no close of theirs
    plain = backend(tmp_path / "none", reasoning_parser="none")
    ids = plain.render([*toy.HI, said, *toy.NO], None).tolist()
    assert [number for number in ids[len(toy.P0) : -len(toy.U1) - 1] if number < 10] == []


def test_cut_inside_reasoning_is_closed_by_its_marker_before_the_turn_is(tmp_path: Path) -> None:
    renderer = backend(tmp_path)
    window, new = toy.array(toy.P0), toy.NO
    assert renderer.extend(window, toy.array([4, 30]), new, None).tolist() == [5, 2, *toy.U1]
    assert renderer.extend(window, toy.array([4, 30, 5]), new, None).tolist() == [2, *toy.U1]
    assert renderer.extend(window, toy.array([4, 30, 2]), new, None).tolist() == toy.U1
    late = toy.array([30, 4, 30])
    assert renderer.extend(window, late, new, None).tolist() == [5, 2, *toy.U1]
    opened = toy.array([*toy.P0, 4])
    assert renderer.extend(opened, toy.array([30]), new, None).tolist() == [5, 2, *toy.U1]


@pytest.mark.parametrize("make", [backend, wordy], ids=["ids", "text"])
def test_a_later_block_is_reasoning_behind_one_that_the_prompt_opened(
    tmp_path: Path, make: Any
) -> None:
    renderer = make(tmp_path, tool_parser="hermes", reasoning_parser="think")
    message = parsed(renderer, f"a né</think>b é<think>c {GOOD}", "<think>")
    assert (message.content, message.tool_calls) == ("b é", [])
    assert message.reasoning == f"a né\n\nc {GOOD}"
