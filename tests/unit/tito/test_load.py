"""From a file and a name to a renderer, or to one clear error; raw prompts; long texts."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError
from tests import toy
from worker import offload
from worker.tito.backend import RenderersBackend
from worker.tito.families import FAMILIES, Proof
from worker.tito.load import load_renderer, render_prompt, resolve_auto


def test_load_lists_the_known_names_when_the_name_is_unknown(vocabulary: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"unknown renderer 'qwen7'.*; known: auto, template, qwen3, "
    ):
        load_renderer(vocabulary, "qwen7")


@pytest.mark.parametrize(
    ("name", "nearest"), [("Qwen3", "qwen3"), ("qwen3.4", "qwen3"), ("gptoss", "gpt-oss")]
)
def test_load_says_the_nearest_name(name: str, nearest: str, vocabulary: Path) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean '{nearest}"):
        load_renderer(vocabulary, name)
    with pytest.raises(ConfigError, match="unknown renderer 'zzzz'; known"):
        load_renderer(vocabulary, "zzzz")


# --- auto ----------------------------------------------------------------------------------------
def _folder(path: Path, vocabulary: Path, **files: Any) -> Path:
    """A model's folder: the real vocabulary, and files of JSON."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").symlink_to(vocabulary)
    for name, said in files.items():
        (path / f"{name}.json").write_text(json.dumps(said))
    return path


def test_auto_takes_the_id_that_the_hubs_cache_says(tmp_path: Path, vocabulary: Path) -> None:
    cache = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc"
    folder = _folder(cache, vocabulary)
    for path in (folder, folder / "tokenizer.json"):
        assert resolve_auto(path) == ("qwen3", "")
    renamed = _folder(tmp_path / "models--Qwen--Qwen3-0.6B" / "copy", vocabulary)
    with pytest.raises(ConfigError, match="does not say which it is"):
        resolve_auto(renamed)


@pytest.mark.parametrize("file", ["tokenizer_config", "config"])
@pytest.mark.parametrize("key", ["name_or_path", "_name_or_path"])
def test_auto_takes_an_exact_id_that_the_models_files_say(
    file: str, key: str, tmp_path: Path, vocabulary: Path
) -> None:
    folder = _folder(tmp_path, vocabulary, **{file: {key: "Qwen/Qwen3-8B"}})
    assert resolve_auto(folder) == ("qwen3", f"{file}.json")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config": {"_name_or_path": "me/Qwen3-8B-tuned"}},
        {"config": {"_name_or_path": "Qwen/Qwen3-8B-"}},
        {"config": {"_name_or_path": ["Qwen/Qwen3-8B"]}},
        {"config": []},
    ],
)
def test_auto_must_be_told_the_renderer_of_an_unknown_model(
    files: dict[str, Any], tmp_path: Path, vocabulary: Path
) -> None:
    with pytest.raises(ConfigError, match=r"must be told: set model\.renderer .*qwen3, .*template"):
        load_renderer(_folder(tmp_path, vocabulary, **files), "auto")


def test_auto_names_the_hub_id_that_it_does_not_know(tmp_path: Path, vocabulary: Path) -> None:
    folder = _folder(tmp_path / "models--me--my--model" / "snapshots" / "1", vocabulary)
    with pytest.raises(ConfigError, match="is 'me/my--model', which is not in the table"):
        load_renderer(folder, "auto")


def test_auto_refuses_a_family_that_was_never_tried(
    tmp_path: Path, vocabulary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path, vocabulary, config={"_name_or_path": "Qwen/Qwen3-8B"})
    untried = dataclasses.replace(FAMILIES["qwen3"], proof=Proof.NOT_RUN)
    monkeypatch.setitem(FAMILIES, "qwen3", untried)
    with pytest.raises(ConfigError, match=r"never tried \(proof: not run\); set .*'qwen3'"):
        load_renderer(folder, "auto")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_auto_refuses_a_known_id_whose_folder_brings_another_template(
    tmp_path: Path, vocabulary: Path
) -> None:
    folder = _folder(
        tmp_path,
        vocabulary,
        tokenizer_config={"chat_template": CHATML, "eos_token": "<|im_end|>"},
        config={"_name_or_path": "Qwen/Qwen3-8B"},
    )
    with pytest.raises(ConfigError, match=r"config\.json says .*own chat template differs"):
        load_renderer(folder, "auto")
    assert load_renderer(folder, "template").name == "template"


def test_auto_loads_the_family_of_the_vocabulary_that_set_up_wrote(vocabulary: Path) -> None:
    assert load_renderer(vocabulary, "auto").name == "qwen3"


def test_models_of_the_table_are_hub_ids_of_one_family_each() -> None:
    ids = [model for family in FAMILIES.values() for model in family.models]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", model) for model in ids)


# --- vocabularies --------------------------------------------------------------------------------
def test_load_names_the_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"no file '/nowhere/tokenizer\.json'"):
        load_renderer("/nowhere/tokenizer.json", "qwen3")


def test_load_names_the_token_that_another_vocabulary_lacks_or_numbers_otherwise(
    tmp_path: Path,
) -> None:
    toy.write_toy_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"<\|endoftext\|> has id 3, expected id 151643"):
        load_renderer(tmp_path, "qwen3")
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
            }
        )
    )
    with pytest.raises(ConfigError, match=r"<\|endoftext\|> is missing, expected id 151643"):
        load_renderer(tmp_path, "qwen3")


def test_load_refuses_a_vocabulary_of_the_family_that_the_self_test_refuses(
    tmp_path: Path, vocabulary: Path
) -> None:
    damaged = json.loads(vocabulary.read_text())
    damaged["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(damaged))
    with pytest.raises(ConfigError, match="does not decode to the text it encoded"):
        load_renderer(tmp_path, "qwen3")


def test_thinking_can_be_switched_off_by_name(vocabulary: Path) -> None:
    renderer = load_renderer(vocabulary, "qwen3-no-thinking")
    text = renderer.decode(renderer.render([{"role": "user", "content": "hi"}], None))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


# --- raw prompts ---------------------------------------------------------------------------------
def test_text_prompt_is_encoded_as_it_is(qwen: RenderersBackend) -> None:
    prompt = render_prompt(qwen, "What is 1+7?")
    assert prompt.ids.tolist() == [3838, 374, 220, 16, 10, 22, 30]
    assert prompt.json == b"3838,374,220,16,10,22,30"


def test_text_prompt_that_was_rendered_already_equals_its_messages(qwen: RenderersBackend) -> None:
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "hi"}]
    rendered = render_prompt(qwen, messages)
    assert render_prompt(qwen, qwen.decode(rendered.ids)).json == rendered.json


# --- long texts ----------------------------------------------------------------------------------
class _Threads(RenderersBackend):
    """The toy, noting in which thread it worked."""

    def __init__(self) -> None:
        tokenizer = toy.toy_tokenizer()
        super().__init__(tokenizer, toy.ToyTemplate(tokenizer), toy.CLOSE)
        self.seen: list[bool] = []

    def _note(self) -> None:
        self.seen.append(threading.current_thread() is threading.main_thread())

    def extend(self, *args: Any) -> Any:
        self._note()
        return super().extend(*args)

    def render(self, *args: Any) -> Any:
        self._note()
        return super().render(*args)

    def decode(self, ids: Any) -> str:
        self._note()
        return super().decode(ids)


async def test_long_texts_leave_the_loop_and_short_ones_do_not() -> None:
    renderer = _Threads()
    window, reply = toy.array([2, 10, 1, 22, 10]), toy.array([30, 2])
    for count in (10, 5000):
        said = [{"role": "tool", "content": [{"type": "text", "text": "ab" * count}]}]
        suffix = await offload.extend(renderer, window, reply, said, None)
        assert (
            suffix.tolist() == RenderersBackend.extend(renderer, window, reply, said, None).tolist()
        )
        prompt = await offload.render(renderer, said, None)
        assert await offload.decode(renderer, prompt.ids) == (
            "<|im_start|>tool\n" + "ab" * count + "<|im_end|>\n<|im_start|>assistant\n"
        )
    assert renderer.seen == [True, True, True, False, False, False]
