"""The Qwen3 renderer, loaded once per test process, and the bare library beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from worker.tito.backend import RenderersBackend, import_renderers
from worker.tito.load import load_renderer


@pytest.fixture(scope="session")
def qwen(vocabulary: Path) -> RenderersBackend:
    """What a worker uses."""
    return load_renderer(vocabulary, "qwen3")


@pytest.fixture(scope="session")
def bare(vocabulary: Path) -> tokenizers.Tokenizer:
    """The vocabulary as the library loads it: control strings in any text become control ids."""
    return tokenizers.Tokenizer.from_file(str(vocabulary))


class BareTokenizer:
    """The least that the package `renderers` asks of a tokenizer; nothing of ours."""

    name_or_path = "bare"
    unk_token_id = None
    eos_token_id = None

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._inner.token_to_id(token)


@pytest.fixture(scope="session")
def library(bare: tokenizers.Tokenizer) -> Any:
    """The package's own Qwen3 renderer over the bare vocabulary, to compare with."""
    config = import_renderers("configs").Qwen3RendererConfig(thinking_retention="all")
    return import_renderers("qwen3").Qwen3Renderer(BareTokenizer(bare), config)
