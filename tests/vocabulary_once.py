"""The real tokenizer, read once per test process: it takes a second."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer


@lru_cache(maxsize=1)
def tokenizer_of(path: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`; never change it."""
    return Tokenizer.from_file(path)
