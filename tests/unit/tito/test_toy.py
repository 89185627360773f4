"""The toy vocabulary has the ids that the cases spell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests import toy
from worker.tito.tokenizer import Tokenizer


def test_toy_vocabulary_has_the_fixed_ids() -> None:
    inner = toy.toy_inner()
    for text, number in (toy.CONTROLS | toy.WORDS).items():
        assert inner.encode(text, add_special_tokens=False).ids == [number]
    encoded = inner.encode("hellohe llox\u00e9", add_special_tokens=False).ids
    assert encoded == [30, 31, 1032, 32, 1120, 1195, 1169]
    raw = bytes(range(256))
    assert inner.decode([1000 + b for b in "🙂".encode()]) == "🙂"
    assert len({inner.id_to_token(1000 + b) for b in raw if b != 10}) == 255


def test_toy_file_loads_as_the_same_vocabulary(tmp_path: Path) -> None:
    path = toy.write_toy_tokenizer(tmp_path)
    loaded = tokenizers.Tokenizer.from_file(str(path))
    assert loaded.encode("hello<|im_end|>\n").ids == [30, 2, 10]
    assert Tokenizer.load(path).max_token_id == 1255


@pytest.mark.parametrize(
    ("messages", "ids"),
    [
        (toy.HI, toy.P0),
        (
            [{"role": "developer", "content": "be kind"}, *toy.HI],
            [1, 20, 10, 1098, 1101, 1032, 1107, 1105, 1110, 1100, 2, 10, *toy.P0],
        ),
    ],
)
def test_toy_template_renders_the_fixed_prompts(
    messages: list[dict[str, Any]], ids: list[int]
) -> None:
    assert toy.toy_renderer().render(messages, None).tolist() == ids
