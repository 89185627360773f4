"""From a tokenizer file and a name to a renderer that was tried.

Owns the table of known names, the checks of a vocabulary, and the self-test at start. The only
place here that reads a file, once. Invariant: a renderer that `load_renderer` returns extends its
own conversations append-only, with the ids of its family.
"""

from __future__ import annotations

from pathlib import Path

from rollstream.errors import ConfigError
from rollstream.sample import Message, Prompt

from ..types import PromptIds, Renderer
from .backend import RenderersBackend
from .families import FAMILIES, Family
from .ids import prompt_ids
from .selftest import self_test
from .tokenizer import Tokenizer


def load_renderer(tokenizer_path: str | Path, renderer_name: str) -> RenderersBackend:
    """Load a vocabulary and return the family's renderer over it, tried on a conversation.

    Args:
        tokenizer_path: a `tokenizer.json`, or a folder that has one.
        renderer_name: a key of `FAMILIES`.

    Raises:
        ConfigError: an unknown name, no such file, a vocabulary that is not the family's, or one
            under which the family's template is not append-only.
    """
    family = FAMILIES.get(renderer_name)
    if family is None:
        raise ConfigError(
            f"model.renderer: unknown renderer {renderer_name!r}; known: {', '.join(FAMILIES)}"
        )
    tokenizer = Tokenizer.load(tokenizer_path, family.scaffold)
    _check_vocabulary(tokenizer, family, renderer_name)
    renderer = RenderersBackend.of_family(tokenizer, family, renderer_name)
    self_test(renderer, tokenizer.name_or_path, **family.traits)
    return renderer


def render_prompt(
    renderer: Renderer, prompt: Prompt, tools: list[Message] | None = None
) -> PromptIds:
    """Return the ids of a group's prompt, with their JSON.

    A list of messages goes through the family's chat template. A `str` is raw text, for
    completion: it is encoded as it is, with no template around it and no token added; a control
    string in it becomes its id, so that a prompt which was rendered already stays what it is.
    `tools` say nothing about raw text and are not rendered into it.

    Raises:
        ValueError: messages without a text form.
    """
    if isinstance(prompt, str):
        return prompt_ids(renderer.encode_raw(prompt))
    return prompt_ids(renderer.render(prompt, tools))


def _check_vocabulary(tokenizer: Tokenizer, family: Family, name: str) -> None:
    for token, expected in family.tokens.items():
        found = tokenizer.token_id(token)
        if found is None or (expected is not None and found != expected):
            what = "is missing" if found is None else f"has id {found}"
            what += "" if expected is None else f", expected id {expected}"
            raise ConfigError(
                f"model.tokenizer: {tokenizer.name_or_path!r} is not a vocabulary of "
                f"{name!r}: {token} {what}; give the tokenizer.json of the model that the engines "
                "serve, or the name of its renderer"
            )
