"""`show --text`: the turns of a group on a terminal, each role in its colour.

Owns standard output for turns. Never interprets what it prints: no markup, and no control character
of anybody else reaches the terminal. Invariant: without a terminal, with NO_COLOR set, or without
rich, the same words come as plain text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from rollstream.cli.gather import GroupFacts, MemberFacts
from rollstream.cli.html.escape import shortened, visible
from rollstream.cli.html.members import plain
from rollstream.cli.turns import ASSISTANT, Decode, Said, Story, parts_of, tell
from rollstream.cli.view import in_colour

MAX_CHARS = 8000
"""Of one message; a page (`--html`) has more of it."""
COLOURS = {"system": "magenta", "developer": "magenta", "user": "blue", "assistant": "green",
           "tool": "yellow", "context": "dim", "reasoning": "dim italic", "call": "cyan",
           "head": "bold", "error": "red", "note": "dim"}  # fmt: skip
Line = tuple[str, str]
"""(what it is, text without a line end)"""


def print_turns(group: GroupFacts, decode: Decode | None) -> None:
    """Print every member's turns."""
    write = _writer()
    for member in group.members:
        for kind, text in _member(member, decode):
            write(kind, text)


def _member(member: MemberFacts, decode: Decode | None) -> Iterator[Line]:
    reward = "" if member.reward is None else f", reward {plain(member.reward)}"
    yield "head", f"\nmember {member.member}: {member.status}{reward}"
    if member.error:
        yield "error", f"  {member.error}"
    for place, sample in enumerate(member.leaves):
        if len(member.leaves) > 1:
            yield "head", f"leaf {place} of {len(member.leaves)}"
        story = tell(sample, decode)
        yield "note", f"  text: {story.source}"
        yield from _story(story)


def _story(story: Story) -> Iterator[Line]:
    for said in story.before:
        yield from _said(said)
    for turn in story.turns:
        reply = turn.reply or Said(ASSISTANT, "(the text of this reply is not kept)")
        tokens = f"turn {turn.number}, {turn.end - turn.start} tokens, {turn.calls[-1].finish}"
        yield from _said(reply, tokens)
        for call in turn.tool_calls or reply.calls:
            ran = "" if call.get("executed", True) else " (not run)"
            yield "call", f"  -> {call.get('name', '')}{ran} {call.get('arguments', '')}"
        for said in turn.behind:
            yield from _said(said)
    if story.whole:
        yield from _said(Said(ASSISTANT, story.whole), "the whole response")


def _said(said: Said, about: str = "") -> Iterator[Line]:
    name = f" {said.name}" if said.name else ""
    role = said.role if said.role in COLOURS else "context"
    yield role, f"[{said.role}{name}]" + (f" {about}" if about else "")
    parts = parts_of(said.text) if said.role == ASSISTANT else [("text", said.text)]
    for kind, text in parts:
        yield role if kind == "text" else kind, shortened(text.strip("\n"), MAX_CHARS)


def _writer() -> Callable[[str, str], None]:
    if not in_colour():
        return lambda _, text: print(_printable(text))
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    return lambda kind, text: console.print(Text(_printable(text), style=COLOURS[kind]))


def _printable(text: str) -> str:
    """Return text that every terminal of any encoding takes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return visible(text).encode(encoding, "replace").decode(encoding)
