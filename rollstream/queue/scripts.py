"""The Lua scripts: read from their files, joined with the shared pieces they use.

Owns how a script's text comes together and what its header says. Never talks to a server.
Invariant: what stands in a header (keys, transitions, answers, what a repeat does) is the contract
of that script, and tests hold the script against it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

SCRIPT_NAMES = (
    "open", "enqueue", "lease", "beat", "complete", "fail", "park", "sweep", "verdict", "deliver",
    "ack", "retire", "requeue", "withdraw", "control", "end", "state", "rewind", "present", "audit",
)  # fmt: skip
_PRELUDE = "prelude"


@dataclass(frozen=True, slots=True)
class Header:
    """What a script says of itself in its first lines."""

    purpose: str
    keys: tuple[tuple[str, str], ...]
    """(name below the run's prefix, type) of every key that it may touch."""
    group_events: tuple[str, ...]
    """`GroupEvent` values of the moves it makes."""
    member_events: tuple[str, ...]
    """`MemberEvent` values of the moves it makes."""
    creates: tuple[str, ...]
    """States in which it creates a group and its members."""
    argv: str
    answer: str
    repeat: str
    uses: tuple[str, ...]
    """Shared pieces, in order."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    name: str
    source: str
    sha: str
    header: Header


@functools.cache
def load_scripts() -> Mapping[str, Script]:
    """Return every script by name; the files are read once a process."""
    return MappingProxyType({name: _load(name) for name in SCRIPT_NAMES})


def make_script(name: str, source: str) -> Script:
    """Return a script of the given text, named `name` (tests change a text with it)."""
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, source, sha, parse_header(name, _read(f"{name}.lua")))


def parse_header(name: str, text: str) -> Header:
    """Return the header of a script file.

    Raises:
        ValueError: a line of the header is missing.
    """
    lines: dict[str, str] = {}
    for line in text.splitlines():
        if not line.startswith("-- "):
            break
        word, _, rest = line[3:].partition(": ")
        lines[word] = rest.strip()
    try:
        return Header(
            purpose=lines[name],
            keys=tuple(_key(item) for item in lines["keys"].split(", ")),
            group_events=_words(lines["group"]),
            member_events=_words(lines["member"]),
            creates=_words(lines.get("creates", "-")),
            argv=lines["argv"],
            answer=lines["answer"],
            repeat=lines["repeat"],
            uses=_words(lines.get("uses", "-")),
        )
    except KeyError as error:
        raise ValueError(f"scripts/{name}.lua: the header has no line {error}") from None


def _key(item: str) -> tuple[str, str]:
    name, kind = item.split(" ")
    return name, kind


def _words(text: str) -> tuple[str, ...]:
    return () if text == "-" else tuple(text.split())


def _load(name: str) -> Script:
    text = _read(f"{name}.lua")
    pieces: list[str] = []
    for piece in (_PRELUDE, *parse_header(name, text).uses):
        _add_piece(piece, pieces)
    return make_script(name, "".join(_read(f"shared/{piece}.lua") for piece in pieces) + text)


def _add_piece(piece: str, pieces: list[str]) -> None:
    """Append `piece` behind the pieces that it uses itself, each once."""
    if piece in pieces:
        return
    for line in _read(f"shared/{piece}.lua").splitlines():
        if line.startswith("-- uses: "):
            for used in _words(line.removeprefix("-- uses: ")):
                _add_piece(used, pieces)
    pieces.append(piece)


@functools.cache
def _read(path: str) -> str:
    return (files("rollstream.queue") / "scripts" / path).read_text(encoding="utf-8")
