"""Draw the life of a group from `rollstream.states`, and keep README's drawing equal to it.

Owns the part of README.md between the two markers. Never draws a move that the table lacks.

    python -m docs.make_states          # rewrite README.md
    python -m docs.make_states --check  # exit 1 where it differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.pages import between, write_or_check
from rollstream.states import GROUP_TRANSITIONS, TERMINAL_GROUP_STATES, GroupEvent, GroupState

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- states: made by docs/make_states.py -->", "<!-- /states -->"


def diagram() -> str:
    """Return the table of transitions as a Mermaid state diagram.

    Moves that exist from every live state are one note each; drawing them all hides the path.
    """
    live = [state for state in GroupState if state not in TERMINAL_GROUP_STATES]
    everywhere = {
        event: GROUP_TRANSITIONS[live[0], event]
        for event in GroupEvent
        if all((state, event) in GROUP_TRANSITIONS for state in live)
    }
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR", f"    [*] --> {GroupState.OPEN}"]
    lines += [
        f"    {state} --> {target}: {event.replace('_', ' ')}"
        for (state, event), target in GROUP_TRANSITIONS.items()
        if event not in everywhere
        or (state is GroupState.DELIVERED and target in TERMINAL_GROUP_STATES)
    ]
    lines += [f"    {state} --> [*]" for state in GroupState if state in TERMINAL_GROUP_STATES]
    lines.append("```")
    moves = ", ".join(f"{event} → {target}" for event, target in everywhere.items())
    lines += ["", f"From every state before the end: {moves}."]
    return "\n".join(lines)


def updated(text: str) -> str:
    """Return the README with the part between the markers drawn anew."""
    return between(text, BEGIN, END, diagram())


def main(arguments: list[str]) -> None:
    """Rewrite or check README.md."""
    wanted = updated(README.read_text(encoding="utf-8"))
    write_or_check(README, wanted, arguments, "python -m docs.make_states")


if __name__ == "__main__":
    main(sys.argv[1:])
