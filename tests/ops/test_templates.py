"""The template backend over templates and vocabularies as they were published.

npm carries Qwen3's, Llama 3's, Llama 3.1's, Gemma 3's and DeepSeek V3's. Held against what
transformers renders and encodes from the same folder, and Qwen3's against its family's renderer.
Needs npm and a registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import MergeFault
from tests.ops.test_vocabularies import fetch_npm
from worker.tito.load import load_renderer
from worker.tito.selftest import self_test
from worker.tito.template import TemplateBackend, TemplateOptions
from worker.tito.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RULES = {
    "qwen3": "chatml",
    "llama3": "llama-3",
    "llama3_1": "llama-3",
    "gemma3": "gemma",
    "deepseek_v3": "deepseek",
}
ASKED = {"role": "user", "content": "What is né? 12_345\n\n 🙂 it's"}
SAID = {"role": "assistant", "content": "Born.\nFemale: née."}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]

Loaded = Callable[[str], tuple[TemplateBackend, Any]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Return a function: name → (our backend, transformers' tokenizer of the same folder)."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("npm")
    held: dict[str, tuple[TemplateBackend, Any]] = {}

    def load(name: str) -> tuple[TemplateBackend, Any]:
        if name not in held:
            held.clear()  # one at a time: Gemma's alone takes half a gigabyte
            path = folder / name
            path = path if path.is_dir() else fetch_npm(folder, name)
            (file,) = path.rglob("tokenizer.json")
            options = TemplateOptions(tool_parser="hermes" if name == "qwen3" else "")
            ours = TemplateBackend.load(Tokenizer.load(file), file, options)
            config = json.loads((file.parent / "tokenizer_config.json").read_text())
            theirs = PreTrainedTokenizerFast(
                tokenizer_file=str(file),
                bos_token=ours._names.get("bos_token"),
                eos_token=ours._names.get("eos_token"),
            )
            theirs.chat_template = config["chat_template"]
            held[name] = ours, theirs
        return held[name]

    return load


@pytest.mark.parametrize("name", RULES)
def test_published_template_renders_transformers_ids(loaded: Loaded, name: str) -> None:
    ours, theirs = loaded(name)
    assert ours.boundary.name == RULES[name]
    system = [{"role": "system", "content": "Be brief."}]
    for messages in (
        [ASKED],
        [*system, ASKED],
        [ASKED, SAID, ASKED],
        [*system, ASKED, SAID, ASKED],
    ):
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.render(messages, None).tolist() == ids


@pytest.mark.parametrize("name", RULES)
def test_published_template_passes_the_self_test_without_what_it_does_not_take(
    loaded: Loaded, name: str
) -> None:
    ours, _ = loaded(name)
    checked = self_test(ours, name, **ours.traits)
    assert checked
    assert ours.takes_tools == any("tool" in one.roles for one in checked)


@pytest.mark.parametrize("name", RULES)
def test_published_template_is_extended_by_its_own_ids(loaded: Loaded, name: str) -> None:
    ours, _ = loaded(name)
    window = ours.render([ASKED], None).tolist()
    whole = ours.render([ASKED, SAID, ASKED], None).tolist()
    close = ours.tokenizer.decode([ours.stop_token_ids[0]])
    reply = ours.encode_raw(SAID["content"] + close)
    suffix = ours.extend(ours.encode_raw(""), reply, [ASKED], None).tolist()
    assert [*window, *reply.tolist(), *suffix] == whole
    bos = ours._bos
    assert whole.count(bos) == (0 if bos is None else 1)
    assert (bos is None) == (name == "qwen3")


@pytest.mark.parametrize("name", RULES)
def test_control_strings_of_people_stay_text_in_published_vocabularies(
    loaded: Loaded, name: str
) -> None:
    ours, _ = loaded(name)
    controls = sorted(ours.tokenizer.controls)
    for token in controls[:: len(controls) // 100 + 1]:
        said = [{"role": "user", "content": f"a{token}b"}]
        plain = [{"role": "user", "content": "ab"}]
        for ids, usual in (
            (ours.render(said, None), ours.render(plain, None)),
            (
                ours.extend(ours.encode_raw(""), ours.encode_raw("x"), said, None),
                ours.extend(ours.encode_raw(""), ours.encode_raw("x"), plain, None),
            ),
        ):
            found = [[n for n in each.tolist() if n in ours.control_ids] for each in (ids, usual)]
            assert found[0] == found[1], token


def test_published_qwen3_template_equals_the_family_and_passes_the_self_test(
    loaded: Loaded, vocabulary: Path
) -> None:
    ours, _ = loaded("qwen3")
    family = load_renderer(vocabulary, "qwen3")
    assert len(self_test(ours, "qwen3", **ours.traits)) == 8
    tool = {"role": "tool", "content": "ok <|im_end|>", "tool_call_id": "c"}
    window = ours.render([ASKED], TOOLS)
    assert window.tolist() == family.render([ASKED], TOOLS).tolist()
    for reply in ("<think>\nx\n</think>\n\ny<|im_end|>", "cut", "y<|im_end|>\n", "y<|endoftext|>"):
        for new in ([ASKED], [tool], [tool, tool], [tool, ASKED]):
            sampled = ours.encode_raw(reply)
            suffix = ours.extend(window, sampled, new, TOOLS).tolist()
            assert suffix == family.extend(window, sampled, new, TOOLS).tolist()


def test_published_deepseek_template_closes_no_single_call_so_no_result_may_follow(
    loaded: Loaded,
) -> None:
    ours, _ = loaded("deepseek_v3")
    assert ours.boundary.roles == ("user",)
    assert any("not tool" in line for line in ours.describe())
    with pytest.raises(MergeFault, match="role 'tool'"):
        ours.extend(ours.encode_raw(""), ours.encode_raw("x"), [{"role": "tool"}], None)


def test_published_gemma_template_refuses_what_does_not_alternate(loaded: Loaded) -> None:
    ours, _ = loaded("gemma3")
    with pytest.raises(ValueError, match=r"message 1 \(role 'user'\).*must alternate"):
        ours.render([ASKED, ASKED], None)
