"""From a file and a name to a renderer, or to one clear error; raw prompts; long texts."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError
from tests import toy
from worker import offload
from worker.tito.backend import RenderersBackend
from worker.tito.load import load_renderer, render_prompt


def test_load_lists_the_known_names_when_the_name_is_unknown(vocabulary: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown renderer 'qwen7'; known: qwen3, qwen3-no-"):
        load_renderer(vocabulary, "qwen7")


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
