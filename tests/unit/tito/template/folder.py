"""Model folders for tests: the toy vocabulary with more control tokens, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors

from tests import toy
from worker.tito.template import TemplateBackend, TemplateOptions
from worker.tito.tokenizer import Tokenizer

TEMPLATES = Path(__file__).resolve().parents[3] / "data" / "tito" / "templates"
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
       "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>",
       "</tool_response>")  # fmt: skip
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>", "<|eom_id|>")  # fmt: skip
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]")
CONFIGS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "glm_like": (GLM, {"eos_token": "<|endoftext|>"}),
    "llama_like": (LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral_like": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>"}),
}
"""Template → what its vocabulary has, what its configuration says."""


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def write_folder(
    folder: Path,
    chat_template: Any = None,
    *,
    controls: Sequence[str] = (),
    config: dict[str, Any] | None = None,
    post_bos: str = "",
) -> Path:
    """Write a model's folder; `post_bos` is a token that the post-processor puts in front."""
    inner = toy.toy_inner()
    inner.add_special_tokens([AddedToken(text, special=True) for text in controls])
    if post_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{post_bos} $A", special_tokens=[(post_bos, inner.token_to_id(post_bos))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    given = {"eos_token": "<|im_end|>"} | (config or {})
    if chat_template is not None:
        given["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder


def load(folder: Path, **options: Any) -> TemplateBackend:
    return TemplateBackend.load(Tokenizer.load(folder), folder, TemplateOptions(**options))


def backend(
    folder: Path, name: str = "toy", *, text: str | None = None, **given: Any
) -> TemplateBackend:
    """Return the backend of one of our templates, or of `text`, over the toy vocabulary.

    `given` goes to `write_folder` where it has such a parameter, else to the options.
    """
    controls, config = CONFIGS.get(name, ((), {}))
    written = {
        "controls": given.pop("controls", controls),
        "config": config | given.pop("config", {}),
        "post_bos": given.pop("post_bos", ""),
    }
    write_folder(folder, template(name) if text is None else text, **written)
    return load(folder, **given)
