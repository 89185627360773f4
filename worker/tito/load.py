"""From a tokenizer file and a name to a renderer that was tried.

Owns which name means which renderer, the checks of a vocabulary, and what `auto` may decide. Reads
files, once (with `template.files`, the only modules here that do). Invariant: a renderer that
`load_renderer` returns extends its own conversations append-only, with the ids of its family.

What `auto` takes: a model whose exact hub id stands in the table of families, said by the hub's
cache (`models--ORG--NAME/snapshots/…`) or by `name_or_path` in the model's own files. Anything
else must be told its renderer: a fine-tune may have another template than its base, and nothing in
its vocabulary would show it.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rollstream.errors import ConfigError
from rollstream.sample import Message, Prompt

from ..types import PromptIds, Renderer
from .backend import RenderersBackend
from .families import FAMILIES, Family, Proof
from .ids import prompt_ids
from .selftest import self_test
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .template import TemplateBackend, TemplateOptions

AUTO = "auto"
TEMPLATE = "template"
NAMES = (AUTO, TEMPLATE, *FAMILIES)
"""What `model.renderer` takes."""
MODELS = {model: name for name, family in FAMILIES.items() for model in family.models}
"""Exact hub ids, with their renderer's name."""

LoadedRenderer: TypeAlias = "RenderersBackend | TemplateBackend"


def load_renderer(
    tokenizer_path: str | Path, renderer_name: str, options: TemplateOptions | None = None
) -> LoadedRenderer:
    """Load a vocabulary and return the family's renderer over it, tried on a conversation.

    Args:
        tokenizer_path: a `tokenizer.json`, or a folder that has one.
        renderer_name: a key of `FAMILIES`, `auto`, or `template`.
        options: for `template`.

    Raises:
        ConfigError: an unknown name, no such file, a model that `auto` does not know, a vocabulary
            that is not the family's, or one under which the template is not append-only.
    """
    name, said_by = renderer_name, ""
    if name == AUTO:
        try:
            name, said_by = resolve_auto(tokenizer_path)
        except ConfigError:
            Tokenizer.load(tokenizer_path)  # what is no tokenizer is said first
            raise
    if name == TEMPLATE:
        return _of_template(tokenizer_path, options)
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"model.renderer: unknown renderer {name!r}{_nearest(name)}; known: {', '.join(NAMES)}"
        )
    tokenizer = Tokenizer.load(tokenizer_path, family.scaffold)
    _check_vocabulary(tokenizer, family, name)
    renderer = RenderersBackend.of_family(tokenizer, family, name)
    self_test(renderer, tokenizer.name_or_path, **family.traits)
    if said_by:
        _check_template(renderer, _folder(tokenizer_path), name, said_by)
    return renderer


def resolve_auto(tokenizer_path: str | Path) -> tuple[str, str]:
    """Return the renderer of a model that says its exact id, and the file that says so.

    The file is empty where the hub's cache says it: those are the published files themselves.

    Raises:
        ConfigError: an unknown model, or one whose family was never tried.
    """
    model, said_by = model_id(_folder(tokenizer_path))
    name = MODELS.get(model)
    if name is None:
        who = f"is {model!r}, which is not in the table" if model else "does not say which it is"
        raise ConfigError(
            f"model.renderer = 'auto': the model of model.tokenizer = {str(tokenizer_path)!r} "
            f"{who}; a fine-tune may have a chat template of its own, so it must be told: set "
            f"model.renderer to the family of its template, one of {', '.join(FAMILIES)}, or to "
            "'template' for the chat template in its folder (docs/tokens.md)"
        )
    proof = FAMILIES[name].proof
    if proof is Proof.NOT_RUN:
        raise ConfigError(
            f"model.renderer = 'auto': {model!r} is of the family {name!r}, which was never tried "
            f"(proof: {proof}); set model.renderer = {name!r} to use it all the same"
        )
    return name, said_by


def model_id(folder: Path) -> tuple[str, str]:
    """Return (the hub id of a model's folder, the file that says it); empty where nothing does.

    The hub's own cache says it by its folders' names; files are believed only where they say an id
    that is in the table exactly.
    """
    for part, below in zip(folder.parts, folder.parts[1:], strict=False):
        if part.startswith("models--") and below == "snapshots":
            return part.removeprefix("models--").replace("--", "/", 1), ""
    for file in ("tokenizer_config.json", "config.json"):
        said = _json(folder / file)
        for key in ("name_or_path", "_name_or_path"):
            model = said.get(key)
            if isinstance(model, str) and model in MODELS:
                return model, file
    return "", ""


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


def _of_template(path: str | Path, options: TemplateOptions | None) -> TemplateBackend:
    from .template import TemplateBackend

    tokenizer = Tokenizer.load(path)
    renderer = TemplateBackend.load(tokenizer, path, options)
    self_test(renderer, tokenizer.name_or_path, **renderer.traits)
    return renderer


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


_ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What does né mean?"},
]
_SPECS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}
]


def _check_template(renderer: RenderersBackend, folder: Path, name: str, said_by: str) -> None:
    """Refuse a folder that says it is a known model and brings another template.

    Trainers write the base model's id into what they save, whatever they trained.
    """
    from .compare import describe
    from .template import TemplateBackend
    from .template.files import read_template

    try:
        source = read_template(folder)
    except ConfigError:
        return  # no template of its own: the family's is the only one
    try:
        own = TemplateBackend.load(renderer.tokenizer, source)
        pairs = [
            (own.render(_ASKED, specs), renderer.render(_ASKED, specs)) for specs in (None, _SPECS)
        ]
        found = [one for pair in pairs for one in own.comparator().compare(*pair)]
        why = describe(found, 1) if found else ""
    except (ConfigError, ValueError) as error:
        why = str(error)
    if why:
        raise ConfigError(
            f"model.renderer = 'auto': {said_by} says that this is a model of {name!r}, but its "
            f"own chat template differs: {why}; set model.renderer = 'template' to use that "
            f"template, or {name!r} if the model was trained with the family's"
        )


def _folder(path: str | Path) -> Path:
    path = Path(path)
    return path.parent if path.is_file() or path.suffix == ".json" else path


def _json(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _nearest(name: str) -> str:
    close = get_close_matches(name.lower(), NAMES, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
