"""From a tokenizer file and a name to a renderer that was tried.

Owns the table of known names, the checks of a vocabulary, and the self-test at start. The only
place here that reads a file, once. Invariant: a renderer that `load_renderer` returns extends its
own conversations append-only, with the ids of its family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError, MergeFault
from rollstream.sample import Message, Prompt

from ..types import PromptIds, Renderer
from .backend import RenderersBackend
from .families import FAMILIES, Family
from .ids import as_ids, prompt_ids
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
    renderer = RenderersBackend.of_family(tokenizer, family)
    self_test(renderer, tokenizer.name_or_path)
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


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
_CALL = {"type": "function", "function": {"name": "look", "arguments": {"word": "né"}}}
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What does né mean? 🙂"},
    {"role": "assistant", "content": "I look.", "tool_calls": [_CALL, _CALL]},
    {"role": "tool", "content": "born\n"},
    {"role": "tool", "content": " (male)"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": ""},
]
_TEXT = "naïve \t x = 12_345;\r\n\r\n日本語 🙂 it's"


def self_test(renderer: Renderer, name: str) -> None:
    """Refuse a vocabulary and template that do not extend a conversation append-only.

    Every assistant turn of a short conversation with tools is taken from the full rendering, given
    back as if an engine had sampled it, and extended by what follows; that must give the full
    rendering again.

    Raises:
        ConfigError: names the message behind which it does not.
    """
    if renderer.decode(renderer.encode(_TEXT)) != _TEXT:
        raise ConfigError(f"model.tokenizer: {name!r} does not decode to the text it encoded")
    turns = [i for i, message in enumerate(_CONVERSATION) if message["role"] == "assistant"]
    for place, following in zip(turns, [*turns[1:], len(_CONVERSATION)], strict=True):
        held = renderer.render(_CONVERSATION[:place], _TOOLS)
        full = renderer.render(_CONVERSATION[:following], _TOOLS)
        reason = _refusal(renderer, held.tolist(), full.tolist(), place, following)
        if reason:
            raise ConfigError(
                f"model.tokenizer: {name!r} cannot extend a conversation behind message {place}: "
                f"{reason}; is it the tokenizer.json of the model that the engines serve?"
            )


def _refusal(
    renderer: Renderer, held: list[int], full: list[int], place: int, following: int
) -> str:
    if full[: len(held)] != held:
        return "the rendering of an earlier part is not a prefix of a later one"
    rest = full[len(held) :]
    close = next((i for i, number in enumerate(rest) if number in renderer.stop_token_ids), None)
    if close is None:
        return "the assistant turn is not closed"
    try:
        suffix = renderer.extend(
            as_ids(held), as_ids(rest[: close + 1]), _CONVERSATION[place + 1 : following], _TOOLS
        )
    except MergeFault as fault:
        return fault.message
    if suffix.tolist() != rest[close + 1 :]:
        return "extending it gives other ids than rendering it whole"
    return ""
