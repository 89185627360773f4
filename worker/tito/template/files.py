"""The chat template that comes with a model, as its files say it.

Owns where templates and special tokens are written in a model's folder; with `load`, the only
reader of files in this package. Never renders. Invariant: what is read is what
`AutoTokenizer.from_pretrained` would take from the same folder.

In a folder: `chat_template.jinja` wins over `chat_template` in `tokenizer_config.json`, which is a
text, or a list of named ones: `default`, and `tool_use` for prompts with tools;
`additional_chat_templates/NAME.jinja` adds more names. Special tokens are in
`tokenizer_config.json` or `special_tokens_map.json`; which ids end a generation is in
`generation_config.json` or `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError

TOOL_USE = "tool_use"
_MAX_FILE_BYTES = 32_000_000


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """What a template needs that is not in a `tokenizer.json`."""

    default: str
    """Jinja."""
    tool_use: str | None = None
    """For prompts with tools, where the model has another one."""
    special: Mapping[str, Any] = field(default_factory=dict)
    """Special tokens by the names that templates know them under: `bos_token`, `eos_token`."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a generation, as the model's own configuration says."""
    origin: str = "chat template"
    """For messages."""


def read_template(folder: str | Path, chat_template: str = "") -> TemplateSource:
    """Return the template of a model's folder.

    Args:
        folder: of the model, or its `tokenizer.json`.
        chat_template: path of another template (a Jinja file, or a JSON file like
            `tokenizer_config.json`); empty takes the folder's own.

    Raises:
        ConfigError: there is none, or a file is not what its name says.
    """
    folder = Path(folder)
    if folder.is_file():
        folder = folder.parent
    config = _json(folder / "tokenizer_config.json")
    templates, origin = _templates(folder, config, chat_template)
    default = templates.get("default")
    if default is None:
        known = ", ".join(templates)
        raise ConfigError(
            f"model.chat_template: {origin} has no default template (it has {known}); give the "
            "path of the one to use"
        )
    special = {**_special(_json(folder / "special_tokens_map.json")), **_special(config)}
    return TemplateSource(default, templates.get(TOOL_USE), special, _stop_ids(folder), origin)


def _templates(
    folder: Path, config: Mapping[str, Any], chat_template: str
) -> tuple[dict[str, str], str]:
    if chat_template:
        path = Path(chat_template)
        if path.suffix == ".json":
            return _named(_json(path, required=True).get("chat_template"), path), str(path)
        return {"default": _text(path)}, str(path)
    templates = _named(config.get("chat_template"), folder / "tokenizer_config.json", missing={})
    origin = folder / "tokenizer_config.json"
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    if (folder / "chat_template.jinja").is_file():
        origin = folder / "chat_template.jinja"
        templates["default"] = _text(origin)
    elif not templates and (folder / "chat_template.json").is_file():
        origin = folder / "chat_template.json"
        templates = _named(_json(origin).get("chat_template"), origin)
    if not templates:
        raise ConfigError(
            f"model.chat_template: {str(folder)!r} has no chat template (no chat_template.jinja, "
            "none in tokenizer_config.json); set the path of one, or model.renderer to a family"
        )
    return templates, str(origin)


def _named(found: Any, origin: Path, *, missing: dict[str, str] | None = None) -> dict[str, str]:
    """Return name → template of what `chat_template` holds."""
    if found is None and missing is not None:
        return dict(missing)
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, Mapping):
        found = [{"name": name, "template": text} for name, text in found.items()]
    if isinstance(found, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in found
    ):
        return {entry["name"]: entry["template"] for entry in found}
    raise ConfigError(
        f"model.chat_template: `chat_template` in {str(origin)!r} is neither a text nor a list of "
        '{"name": …, "template": …}'
    )


def _special(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            found[name] = token
    more = config.get("additional_special_tokens")
    if isinstance(more, list):
        tokens = [token.get("content") if isinstance(token, dict) else token for token in more]
        found["additional_special_tokens"] = [token for token in tokens if isinstance(token, str)]
    return found


def _stop_ids(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        config = _json(folder / name)
        text = config.get("text_config")
        found = config.get("eos_token_id")
        if found is None and isinstance(text, dict):
            found = text.get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        numbers = [number for number in ids if type(number) is int]
        if numbers:
            return tuple(numbers)
    return ()


def _json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        found = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model.tokenizer: {str(path)!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"model.tokenizer: {str(path)!r} is no JSON object")
    return found


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"model.chat_template: {str(path)!r} is too big for a template")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"model.chat_template: {str(path)!r} cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"model.chat_template: {str(path)!r} is no UTF-8 text") from None
