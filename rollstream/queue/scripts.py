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
    "open", "enqueue", "lease", "beat", "complete", "fail", "park", "confirm", "sweep", "verdict",
    "deliver", "ack", "retire", "requeue", "withdraw", "control", "end", "state", "rewind",
    "present", "attend", "measure", "audit",
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
    lazily: tuple[str, ...]
    """Pieces that few calls need, each by the one function that it gives."""


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
            lazily=_words(lines.get("lazily", "-")),
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
    header = parse_header(name, text)
    pieces: list[str] = []
    for piece in (_PRELUDE, *header.uses):
        _add_piece(piece, pieces)
    lazy = [_lazy(piece, pieces) for piece in header.lazily]
    return make_script(name, "".join([*map(_piece, pieces), *lazy, text]))


def _lazy(piece: str, before: list[str]) -> str:
    """Return a function that makes `piece`, and what it uses beside `before`, where it is called.

    Making the functions of a piece costs every call of a script, whether it calls them or not.
    """
    pieces = list(before)
    _add_piece(piece, pieces)
    (name,) = _line(piece, "gives")
    body = "".join(map(_piece, pieces[len(before) :]))
    return f"local function {name}(...)\n{body}return {name}(...)\nend\n"


def _add_piece(piece: str, pieces: list[str]) -> None:
    """Append `piece` behind the pieces that it uses itself, each once."""
    if piece in pieces:
        return
    for used in _line(piece, "uses"):
        _add_piece(used, pieces)
    pieces.append(piece)


def _piece(piece: str) -> str:
    return _read(f"shared/{piece}.lua")


def _line(piece: str, word: str) -> tuple[str, ...]:
    """Return the words of one line of a piece's header; none where it has no such line."""
    start = f"-- {word}: "
    found = (line for line in _piece(piece).splitlines() if line.startswith(start))
    return _words(next(found, "-").removeprefix(start))


@functools.cache
def _read(path: str) -> str:
    return (files("rollstream.queue") / "scripts" / path).read_text(encoding="utf-8")
