"""Where `model.tokenizer` is: a path, or the files of a hub id.

Owns the one place that may use the network for a model: a value of the form `org/name[@revision]`
that no path has. Only the small files are fetched, never weights. Invariant: a path that exists
wins and nothing is asked; what the hub's cache already holds is taken from there, so that replicas
start without a network; every wait is bounded.
"""

from __future__ import annotations

import re
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from threading import Thread

from rollstream.errors import ConfigError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "additional_chat_templates/*",
)
HUB_TIMEOUT_S = 60.0
"""All of a download together."""
_HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def locate(tokenizer: str) -> Path:
    """Return the path of a tokenizer: a folder, or a `tokenizer.json`.

    Args:
        tokenizer: a path, or a hub id `org/name[@revision]`.

    Raises:
        ConfigError: a hub id whose files are neither in the hub's cache nor to be had.
    """
    path = Path(tokenizer).expanduser()
    if path.exists() or not is_hub_id(tokenizer):
        return path
    found = _HUB_ID.fullmatch(tokenizer)
    assert found is not None
    return _fetched(found["id"], found["revision"])


def is_hub_id(tokenizer: str) -> bool:
    """Return whether a value that is no path would be looked up in the hub."""
    return _HUB_ID.fullmatch(tokenizer) is not None and not tokenizer.endswith(".json")


def _fetched(repo: str, revision: str | None) -> Path:
    folder = _snapshot(repo, revision, local=True)
    if isinstance(folder, Path) and (folder / "tokenizer.json").exists():
        return folder
    waiting: Future[Path | Exception] = Future()
    # A daemon: a lookup that hangs (no route, no name server) must not keep the process.
    Thread(
        target=lambda: waiting.set_result(_snapshot(repo, revision, local=False)),
        name="fetch-tokenizer",
        daemon=True,
    ).start()
    try:
        folder = waiting.result(HUB_TIMEOUT_S)
    except FutureTimeout:
        folder = TimeoutError(f"no answer within {HUB_TIMEOUT_S:g} s")
    if isinstance(folder, Path) and (folder / "tokenizer.json").exists():
        return folder
    why = "it has no tokenizer.json" if isinstance(folder, Path) else _reason(folder)
    at = f" at revision {revision!r}" if revision else ""
    raise ConfigError(
        f"model.tokenizer: there is no path {repo!r}, and the hub gave no tokenizer of that id"
        f"{at}: {why}; give a folder that holds the model's tokenizer.json, or fetch it once where "
        "there is a network (HF_HOME says where the hub's cache is)"
    )


def _snapshot(repo: str, revision: str | None, *, local: bool) -> Path | Exception:
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(FILES),
                local_files_only=local,
                etag_timeout=5,
                max_workers=2,
            )
        )
    except Exception as error:  # noqa: BLE001 - whatever the hub's client raises is one refusal
        return error


def _reason(error: Exception) -> str:
    """Return the first line of what the hub's client said."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
