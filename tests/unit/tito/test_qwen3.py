"""Qwen3 with its real vocabulary: golden prompts, bridges, replies.

`tests/data/tito/qwen3_prompts.json` holds prompts as the model's chat template writes them, with
the ids that the bare vocabulary gives for that text.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import MergeFault
from tests import toy
from worker.tito import renderer as renderer_module
from worker.tito.backend import RenderersBackend
from worker.tito.ids import as_ids, prompt_ids
from worker.tito.load import load_renderer
from worker.tito.trajectory import Trajectory
from worker.types import ProblemKind

pytestmark = pytest.mark.xdist_group("tito")

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = json.loads((ROOT / "tests/data/tito/qwen3_prompts.json").read_text())
NO_THINKING = json.loads((ROOT / "tests/data/tito/qwen3_no_thinking_prompts.json").read_text())
CLOSE, END, NEWLINE = 151645, 151643, 198
WINDOW = [CLOSE, NEWLINE, 151644, 77091, NEWLINE]
QUESTION = [{"role": "user", "content": "What is 42 + year + temperature?"}]
CALLS = (
    '<tool_call>\n{"name": "get_year", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_temperature", "arguments": {"location": "Mars"}}\n</tool_call>'
    "<|im_end|>"
)
RESULTS = [{"role": "tool", "content": "2026"}, {"role": "tool", "content": "-60"}]


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: case["name"])
def test_render_gives_the_golden_ids(
    case: dict[str, Any], qwen: RenderersBackend, bare: tokenizers.Tokenizer
) -> None:
    ids = qwen.render(case["messages"], case["tools"]).tolist()
    assert qwen.decode(toy.array(ids)) == case["text"]
    assert ids == case["ids"]
    assert bare.encode(case["text"], add_special_tokens=False).ids == case["ids"]


@pytest.mark.parametrize("case", NO_THINKING, ids=lambda case: case["name"])
def test_no_thinking_renders_the_golden_ids(
    case: dict[str, Any], vocabulary: Path, bare: tokenizers.Tokenizer
) -> None:
    renderer = load_renderer(vocabulary, case["family"])
    assert renderer.render(case["messages"], case["tools"]).tolist() == case["ids"]
    assert bare.encode(case["text"], add_special_tokens=False).ids == case["ids"]


def test_generation_prompt_appears_once_and_last(qwen: RenderersBackend) -> None:
    for case in PROMPTS:
        ids = qwen.render(case["messages"], case["tools"]).tolist()
        header = [151644, 77091, NEWLINE]
        turns = sum(message["role"] == "assistant" for message in case["messages"])
        assert ids[-3:] == header
        assert sum(ids[i : i + 3] == header for i in range(len(ids))) == turns + 1


# --- extend --------------------------------------------------------------------------------------
def test_two_tool_results_render_as_one_user_turn_with_two_blocks(qwen: RenderersBackend) -> None:
    completion = qwen.encode_raw(CALLS)
    suffix = qwen.extend(toy.array(WINDOW), completion, RESULTS, None)
    assert qwen.decode(suffix) == (
        "\n<|im_start|>user\n<tool_response>\n2026\n</tool_response>\n<tool_response>\n-60\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_closed_reply_gets_exactly_one_newline(qwen: RenderersBackend) -> None:
    window, user = toy.array([100, 200, CLOSE]), [{"role": "user", "content": "no"}]
    turn = [151644, *qwen.encode("user\nno").tolist(), CLOSE, NEWLINE, 151644, 77091, NEWLINE]
    for reply, expected in {
        (59, CLOSE): [NEWLINE, *turn],
        (59, CLOSE, NEWLINE): turn,
        (59,): [CLOSE, NEWLINE, *turn],
        (): [CLOSE, NEWLINE, *turn],
        (59, END): [CLOSE, NEWLINE, *turn],
        (CLOSE,): [NEWLINE, *turn],
        (59, CLOSE, NEWLINE, 59): [CLOSE, NEWLINE, *turn],
    }.items():
        assert qwen.extend(window, toy.array(reply), user, None).tolist() == expected, reply


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_reply_closed_inside_its_reasoning_can_be_followed(
    end: str, qwen: RenderersBackend, library: Any
) -> None:
    reply = qwen.encode_raw("<think>\nI am not " + end)
    assert library.bridge_to_next_turn(WINDOW, reply.tolist(), RESULTS) is None
    suffix = qwen.extend(toy.array(WINDOW), reply, RESULTS, None)
    close = [] if end == "<|im_end|>" else [CLOSE]
    plain = qwen.extend(toy.array(WINDOW), toy.array([CLOSE]), RESULTS, None).tolist()
    assert suffix.tolist() == close + plain


def test_reply_cut_inside_its_reasoning_is_closed_with_both_markers(qwen: RenderersBackend) -> None:
    suffix = qwen.extend(toy.array(WINDOW), qwen.encode_raw("<think>\nI am not"), RESULTS, None)
    assert suffix.tolist()[:3] == [151668, CLOSE, NEWLINE]


CONVERSATIONS: list[tuple[str, list[tuple[str, list[dict[str, str]]]]]] = [
    (
        "tools",
        [(CALLS, RESULTS), ("It is 2008.<|im_end|>", [{"role": "user", "content": "Sure?"}])],
    ),
    (
        "reasoning",
        [
            ("<think>\nHm 日本.\n</think>\n\n" + CALLS, RESULTS),
            ("<think>\n\n</think>\n\nYes 🙂<|im_end|>", [{"role": "user", "content": "né?"}]),
        ],
    ),
    (
        "mixed",
        [
            (CALLS, [*RESULTS, {"role": "user", "content": "And Venus?"}]),
            ("HAVING<|im_end|>", [{"role": "system", "content": "Be brief."}]),
            ("cut off", [{"role": "user", "content": "go on"}]),
            ("", [{"role": "tool", "content": ""}]),
        ],
    ),
]


@pytest.mark.parametrize("turns", [c[1] for c in CONVERSATIONS], ids=[c[0] for c in CONVERSATIONS])
@pytest.mark.parametrize("tools", [None, PROMPTS[2]["tools"]], ids=["no tools", "tools"])
def test_windowed_bridge_equals_the_library_over_everything_held(
    turns: list[tuple[str, list[dict[str, str]]]], tools: Any, qwen: RenderersBackend, library: Any
) -> None:
    trajectory = Trajectory(prompt_ids(qwen.render(QUESTION, tools)), qwen.stop_token_ids)
    for text, messages in turns:
        held = toy.sent_ids(trajectory)
        reply = qwen.encode_raw(text)
        trajectory.add_completion(
            toy.a_completion(reply.tolist()), dispatched_version=1, sampling={}
        )
        assert trajectory.window().tolist() == WINDOW
        suffix = qwen.extend(trajectory.window(), trajectory.last_completion(), messages, tools)
        full = library.bridge_to_next_turn(held, reply.tolist(), messages, tools=tools)
        assert [*held, *reply.tolist(), *suffix.tolist()] == full.token_ids
        trajectory.add_observation(suffix)


@settings(max_examples=60, deadline=None)
@given(
    turns=st.lists(
        st.tuples(
            st.lists(st.integers(0, 151642), max_size=6),
            st.sampled_from([[], [CLOSE], [CLOSE, NEWLINE], [END]]),
            st.lists(
                st.tuples(st.sampled_from(["tool", "user"]), st.text(max_size=6)),
                min_size=1,
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_window_and_whole_give_the_same_suffix_for_any_reply(
    turns: list[tuple[list[int], list[int], list[tuple[str, str]]]], qwen: RenderersBackend
) -> None:
    trajectory = Trajectory(prompt_ids(qwen.render(QUESTION, None)), qwen.stop_token_ids)
    for sampled, end, said in turns:
        whole = toy.array(toy.sent_ids(trajectory))
        trajectory.add_completion(
            toy.a_completion([*sampled, *end]), dispatched_version=1, sampling={}
        )
        messages = [{"role": role, "content": text} for role, text in said]
        reply = trajectory.last_completion()
        suffix = qwen.extend(trajectory.window(), reply, messages, None)
        assert suffix.tolist() == qwen.extend(whole, reply, messages, None).tolist()
        assert suffix.tolist()[-3:] == [151644, 77091, NEWLINE]
        trajectory.add_observation(suffix)


@pytest.mark.parametrize(
    ("messages", "detail"),
    [
        ([], "no_messages"),
        ([{"role": "assistant", "content": "I"}], "assistant_message"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "bad_message"),
    ],
)
def test_extend_refuses_what_cannot_follow(
    messages: list[dict[str, Any]], detail: str, qwen: RenderersBackend
) -> None:
    with pytest.raises(MergeFault) as caught:
        qwen.extend(toy.array(WINDOW), toy.array([CLOSE]), messages, None)
    assert caught.value.detail == detail


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda ids: [9, *ids[1:]], "id 9 instead of 2 at 0 of 7"),
        (lambda ids: [*ids[:5], 30, *ids[7:]], "id 30 instead of 31 at 5 of 7"),
        (lambda ids: ids[:3], "it ends at 3 of 7 ids"),
    ],
)
def test_extend_faults_when_a_bridge_changed_what_was_held(damage: Any, what: str) -> None:
    renderer = toy.toy_renderer(damage=damage)
    window = toy.array([2, 10, 1, 22, 10])
    with pytest.raises(MergeFault, match=what) as caught:
        renderer.extend(window, toy.array([31, 2]), toy.OK, None)
    assert caught.value.detail == "prefix"


# --- parse ---------------------------------------------------------------------------------------
def _parse(
    qwen: RenderersBackend, text: str, tail: str = "<|im_end|>\n<|im_start|>assistant\n"
) -> Any:
    return qwen.parse(qwen.encode_raw(text), qwen.encode_raw(tail))


def test_parse_finds_parallel_calls_in_order(qwen: RenderersBackend) -> None:
    message = _parse(qwen, "<think>\nI ask.\n</think>\n\nLet me see.\n" + CALLS)
    assert (message.reasoning, message.content) == ("I ask.", "Let me see.")
    assert [(c.name, c.arguments, c.problem) for c in message.tool_calls] == [
        ("get_year", {}, None),
        ("get_temperature", {"location": "Mars"}, None),
    ]
    assert message.tool_calls[0].raw == '{"name": "get_year", "arguments": {}}'
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in message.tool_calls)
    assert message.abnormal_end is False


@pytest.mark.parametrize(
    ("text", "abnormal"),
    [("ok<|im_end|>", False), ("ok<|im_end|>\n", False), ("ok<|endoftext|>", True), ("ok", True)],
)
def test_parse_says_whether_the_end_was_abnormal(
    text: str, abnormal: bool, qwen: RenderersBackend
) -> None:
    message = _parse(qwen, text)
    assert (message.content, message.abnormal_end) == ("ok", abnormal)


def test_parse_takes_a_rehearsed_call_for_reasoning(qwen: RenderersBackend) -> None:
    call = '<tool_call>{"name":"a","arguments":{}}</tool_call>'
    message = _parse(qwen, f"<think>I will do {call}</think>{call}<|im_end|>")
    assert [c.name for c in message.tool_calls] == ["a"]
    assert message.reasoning == f"I will do {call}"


@pytest.mark.parametrize("prefilled", [True, False])
def test_parse_executes_nothing_inside_unfinished_reasoning(
    prefilled: bool, qwen: RenderersBackend
) -> None:
    opener = "<think>\n"
    tail = "<|im_end|>\n<|im_start|>assistant\n" + (opener if prefilled else "")
    text = 'I will\n<tool_call>\n{"name":"a","arguments":{}}\n</tool_call><|im_end|>'
    message = _parse(qwen, text if prefilled else opener + text, tail)
    assert message.tool_calls == []
    assert message.content == ""
    assert message.reasoning.startswith("I will")


CALL_F = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("end", ["", "<|im_end|>", "</think>d<|im_end|>"])
@pytest.mark.parametrize(
    ("text", "content"),
    [(f"<think>a</think>b<think>c {CALL_F}", "b"), (f"x <think>c {CALL_F}", "x")],
)
def test_parse_executes_nothing_inside_a_later_block(
    text: str, content: str, end: str, qwen: RenderersBackend
) -> None:
    message = _parse(qwen, text + end)
    assert message.tool_calls == []
    assert message.content == (f"{content}\nd" if end.startswith("</think>") else content)
    assert message.reasoning.endswith(f"c {CALL_F}")
    behind = _parse(qwen, f"{text}</think>{CALL_F}<|im_end|>")
    assert [(call.name, call.problem) for call in behind.tool_calls] == [("f", None)]


def test_parse_continues_reasoning_that_the_prompt_opened(qwen: RenderersBackend) -> None:
    message = _parse(qwen, "so\n</think>\n\n8<|im_end|>", "<|im_start|>assistant\n<think>\n")
    assert (message.reasoning, message.content) == ("so", "8")


def test_parse_takes_bare_json_for_text(qwen: RenderersBackend) -> None:
    text = 'Example: {"name":"rm","arguments":{"path":"/"}}'
    message = _parse(qwen, text + "<|im_end|>")
    assert (message.tool_calls, message.content) == ([], text)


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ('{"name":"calc","arguments":{"x": 1,}</tool_call>', ProblemKind.INVALID_JSON),
        ("{}</tool_call>", ProblemKind.NO_NAME),
        ('{"name":"f","arguments":[1]}</tool_call>', ProblemKind.BAD_ARGUMENTS),
        ('{"name":"f","arguments":{"path":"/srv/a', ProblemKind.UNCLOSED),
        ('{"name":"f","arguments":{"n":' + "9" * 5000 + "}}</tool_call>", ProblemKind.INVALID_JSON),
        ("[" * 20_000 + "</tool_call>", ProblemKind.INVALID_JSON),
    ],
)
def test_parse_gives_a_broken_call_as_a_problem(
    block: str, kind: ProblemKind, qwen: RenderersBackend
) -> None:
    message = _parse(qwen, f"<tool_call>{block}<|im_end|>")
    assert [call.problem for call in message.tool_calls] == [kind]


def test_parse_takes_markers_inside_a_string_for_text_and_finds_the_call_behind(
    qwen: RenderersBackend,
) -> None:
    block = '<tool_call>\n{"name":"%s","arguments":{"text":"%s"}}\n</tool_call>'
    inside = "close by </tool_call>, or <tool_call>{}</tool_call> }"
    message = _parse(qwen, block % ("write", inside) + block % ("next", "x") + "<|im_end|>")
    assert [(c.name, c.arguments["text"], c.problem) for c in message.tool_calls] == [
        ("write", inside, None),
        ("next", "x", None),
    ]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 151668), st.integers(151643, 151668)), max_size=30))
def test_parse_never_raises_for_any_ids(ids: list[int], qwen: RenderersBackend) -> None:
    message = qwen.parse(toy.array(ids), toy.array(WINDOW))
    assert message.content == message.content.strip()


# --- imports -------------------------------------------------------------------------------------
_PROBE = """
import pathlib, sys
{first}
from worker.tito.load import load_renderer
def threads():
    return len(list(pathlib.Path("/proc/self/task").glob("*")))  # 0 where there is no /proc
before = threads()
renderer = load_renderer({path!r}, "qwen3")
print([n for n in ("openai", "transformers", "jinja2", "httpx") if n in sys.modules])
print(renderer.render([{{"role": "user", "content": "What is 1+7?"}}], None).tolist())
print(threads() - before)
{last}
"""


def _probe(path: Path, *, first: str = "", last: str = "") -> list[str]:
    code = _PROBE.format(path=str(path), first=first, last=last)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_loading_imports_neither_openai_nor_transformers_and_starts_no_thread(
    vocabulary: Path,
) -> None:
    last = "import renderers; print(renderers.Qwen3Renderer is type(renderer._inner))"
    loaded, ids, threads, same = _probe(vocabulary, last=last)
    assert loaded == "[]"
    assert ids == str(PROMPTS[0]["ids"])
    assert threads == "0"
    assert same == "True"  # whoever imports the package later gets it whole, with the same classes


def test_loading_equals_the_plain_import_of_the_package(vocabulary: Path) -> None:
    loaded, ids, _ = _probe(vocabulary, first="import renderers; assert renderers.Qwen3Renderer")
    assert "openai" in loaded
    assert ids == str(PROMPTS[0]["ids"])


def test_specs_of_an_environment_are_normalized_once_and_not_once_a_turn(
    qwen: RenderersBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = renderer_module.normalize_tools

    def counted(tools: Any, escaper: Any) -> Any:
        made.append(len(tools))
        return plain(tools, escaper)

    monkeypatch.setattr(renderer_module, "normalize_tools", counted)
    tools = [{"type": "function", "function": {"name": "once", "parameters": {"type": "object"}}}]
    held = qwen.render([{"role": "user", "content": "hi"}], tools)
    end = as_ids([qwen.stop_token_ids[0]])
    first = qwen.extend(held, end, [{"role": "tool", "content": "a"}], tools)
    for _ in range(3):  # each trajectory lists the same specs anew
        again = qwen.extend(held, end, [{"role": "tool", "content": "a"}], list(tools))
        assert again.tolist() == first.tolist()
    assert made == [1]
