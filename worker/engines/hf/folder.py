"""What a model's folder says before PyTorch is there: whether it is one, and where replies end.

Owns the reading of its small files. Never loads weights. Invariant: what is wrong with a folder is
one sentence that names it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigError

from .task import Decoder


def check_folder(path: Path) -> None:
    """Refuse what is no model folder.

    Raises:
        ConfigError: no folder, no config.json, or no safetensors.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give the folder of a model in HF's layout")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; give the folder of a model in HF's layout")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{path} has no *.safetensors; other formats of weights are not read")


def read_json(path: Path) -> dict[str, Any]:
    """Return an object of the folder, empty where there is no such file.

    Raises:
        ConfigError: it is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return read


def eos_ids(folder: Path, configured: Any) -> frozenset[int]:
    """Return the ids that end a reply: the configuration's and those of generation_config.json."""
    found: set[int] = set()
    for ids in (configured, read_json(folder / "generation_config.json").get("eos_token_id")):
        several = ids if isinstance(ids, Sequence) else [ids]
        found.update(int(token) for token in several if token is not None)
    return frozenset(found)


def load_decoder(folder: Path) -> Decoder | None:
    """Return the tokenizer, or None where there is none: ids need none, stop strings do.

    Raises:
        ConfigError: there is one that cannot be read.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        decoder: Decoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ConfigError(f"{path}: {error}") from None
    return decoder
