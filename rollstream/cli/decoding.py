"""From token ids to text on the command line, where a `tokenizer.json` is at hand.

Owns which tokenizer that is and how one id is shown. Never asks a network; `tokenizers` is
imported when a tokenizer was named. Invariant: an id without a text is shown as what it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollstream.cli.exits import USAGE, CommandError


class Decoder:
    """A vocabulary, for reading only."""

    def __init__(self, inner: Any, file: str) -> None:
        self._inner = inner
        self.file = file
        self._bytes = _byte_of_char()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens kept."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def pieces(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each id for itself; half a character is its bytes, `⟨e2 80⟩`."""
        return {number: self._piece(number) for number in ids}

    def _piece(self, number: int) -> str:
        token = self._inner.id_to_token(number) if number >= 0 else None
        if token is None:
            return f"⟨no id {number}⟩"
        text = self.decode([number])
        if "�" in text:
            raw = bytes(self._bytes[c] for c in token if c in self._bytes)
            return f"⟨{raw.hex(' ')}⟩" if len(raw) == len(token) else text
        if token.startswith("▁") and not text.startswith(" "):
            return " " + text  # a decoder leaves it out at the beginning
        return text or token


def load_decoder(args: argparse.Namespace) -> Decoder | None:
    """Return what `--tokenizer`, else `--config`, names; None where neither was given.

    Raises:
        CommandError: there is no such tokenizer on this machine, or nothing to read it with.
    """
    if args.tokenizer:
        return _load(_local(args.tokenizer, "--tokenizer"), "--tokenizer")
    if not args.config:
        return None
    from rollstream.config import load_settings

    loaded = load_settings(["--config", args.config], prog="rollstream show")
    named = loaded.settings.model.tokenizer
    if not named:
        raise CommandError(f"--config {args.config}: it names no model.tokenizer", USAGE)
    return _load(_local(named, "model.tokenizer"), "model.tokenizer")


def _local(named: str, of: str) -> Path:
    """Return the file of a path, a folder, or a hub id whose files are on this machine."""
    path = Path(named).expanduser()
    if not path.exists() and named.count("/") == 1:
        path = _in_cache(*named.partition("@")[::2]) or path
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CommandError(
            f"{of} {named}: there is no such file here (nothing is downloaded); give --tokenizer "
            "with the path of the model's tokenizer.json",
            USAGE,
        )
    return file


def _in_cache(repo: str, revision: str) -> Path | None:
    try:
        from huggingface_hub import snapshot_download

        held = snapshot_download(
            repo, revision=revision or None, allow_patterns="tokenizer.json", local_files_only=True
        )
    except (ImportError, OSError, ValueError):
        return None
    return Path(held)


def _load(file: Path, of: str) -> Decoder:
    try:
        import tokenizers
    except ImportError:
        raise CommandError(
            "decoding needs 'tokenizers', which is not installed: pip install "
            "'rollstream[service]', or leave --tokenizer and --config out",
            USAGE,
        ) from None
    try:
        return Decoder(tokenizers.Tokenizer.from_file(str(file)), str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise CommandError(f"{of} {file}: it is no tokenizer: {error}", USAGE) from None


def _byte_of_char() -> dict[str, int]:
    """Return how byte-level vocabularies spell bytes: printable ones as they are, others moved."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + place): b for place, b in enumerate(moved)}
