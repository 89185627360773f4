"""A small vocabulary for any family: all bytes, a few merges, and the family's control tokens.

A real `tokenizers.Tokenizer`. The merges join what templates write beside what people write
(`\\n\\n`, `:\\n`, `>\\n`, ` a`), so that a text which is encoded in two pieces where the template
has one gives other ids. Control tokens have the family's ids where those are known, and are special
or ordinary by turns, since no rule of ours may depend on it.
"""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from examples.vocabulary import byte_level_spelling
from worker.tito.backend import RenderersBackend
from worker.tito.families import FAMILIES
from worker.tito.tokenizer import Tokenizer

_MERGES = [
    ("\n", "\n"), ("\n\n", "\n"), (">", "\n"), (":", "\n"), (".", "\n"), (" ", "a"), ("\n", "<"),
    ("t", "h"), ("th", "e"), (" ", "t"), ("u", "s"), ("us", "e"), ("use", "r"), ("a", "i"),
    ("<", "/"), ('"', ":"), ("}", "\n"), (">", "<"), ("?", "\n"),
]  # fmt: skip
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THINK, _RESPONSE = ("<think>", "</think>"), ("<tool_response>", "</tool_response>")
_EXTRA = {
    "kimi-k2.5": _THINK,
    "kimi-k2.5-no-thinking": _THINK,
    **dict.fromkeys(
        [name for name in FAMILIES if name.startswith(("qwen3.5", "qwen3.6", "qwen3.8"))],
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    ),
    "glm-4.5": _RESPONSE,
    "glm-4.5-no-thinking": _RESPONSE,
}
"""Tokens that such vocabularies have, and that the family does not insist on."""


def control_tokens(name: str) -> list[str]:
    """Return every control string of a family's vocabulary here."""
    return [*FAMILIES[name].tokens, *_EXTRA.get(name, ())]


def vocabulary(name: str) -> tokenizers.Tokenizer:
    """Return the vocabulary of a family."""
    family = FAMILIES[name]
    spell = byte_level_spelling()

    def spelled(text: str) -> str:
        return "".join(spell[byte] for byte in text.encode())

    vocab = {spell[byte]: 300 + byte for byte in range(256)}
    merges = [(spelled(left), spelled(right)) for left, right in _MERGES]
    for place, (left, right) in enumerate(merges):
        vocab[left + right] = 600 + place
    tokens = control_tokens(name)
    for place, token in enumerate(tokens):
        known = family.tokens.get(token)
        vocab[token] = 900 + place if known is None else known
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    for place, token in enumerate(tokens):
        special = place % 2 == 0
        added = AddedToken(token, special=special, normalized=False)
        (inner.add_special_tokens if special else inner.add_tokens)([added])
    assert all(inner.token_to_id(token) == vocab[token] for token in tokens)
    return inner


@cache
def renderer(name: str) -> RenderersBackend:
    """Return the renderer of a family over its toy vocabulary."""
    family = FAMILIES[name]
    tokenizer = Tokenizer(vocabulary(name), f"toy {name}", family.scaffold)
    return RenderersBackend.of_family(tokenizer, family, name)
