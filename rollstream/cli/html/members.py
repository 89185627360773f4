"""One member on the page: its facts, where its time went, its turns, and its tokens.

Owns the order of these and their markup. Never fetches. Invariant: all that is said and asked can
be read without the script; only tokens one by one need it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollstream.cli.gather import MemberFacts
from rollstream.cli.html import strip
from rollstream.cli.html.escape import data, html, shortened, visible
from rollstream.cli.html.timeline import timeline, where
from rollstream.cli.turns import ASSISTANT, Decode, Said, Story, Turn, parts_of, tell
from rollstream.sample import UNKNOWN_VERSION, Sample

_OWN_METADATA = ("messages", "tool_calls")
"""Shown as turns already."""
_MAX_FACT, _SHORT_FACT = 2000, 160
_ROLES = ("system", "developer", "user", "assistant", "tool", "context")
_KINDS = {"reasoning": "reasoning", "call": "tool call"}


def member_html(member: MemberFacts, decode: Decode | None, *, is_open: bool) -> str:
    """Return one member as a section that folds."""
    about = [badge(member.status)]
    if member.reward is not None:
        about.append(f"<span>reward {html(plain(member.reward))}</span>")
    turns = sum(len(sample.calls) for sample in member.leaves)
    if member.leaves:
        tokens = sum(len(sample.tokens) for sample in member.leaves)
        about.append(f'<span class="dim">{turns:,} calls · {tokens:,} tokens</span>')
    if stop := member.rows.get("stop reason"):
        about.append(f'<span class="dim">{html(str(stop))}</span>')
    opened = " open" if is_open else ""
    parts = [
        f'<details class="member" id="m{member.member}"{opened}>',
        f"<summary><b>member {member.member}</b>{''.join(about)}</summary>",
    ]
    if member.error:
        parts.append(f'<p class="error">{html(member.error)}</p>')
    parts.append(facts_html(member.rows))
    for place, sample in enumerate(member.leaves):
        name = f"m{member.member}-l{place}"
        if len(member.leaves) > 1:
            parts.append(f'<h3 id="{name}">leaf {place} of {len(member.leaves)}</h3>')
        parts.append(_sample_html(sample, name, decode))
    if not member.leaves:
        parts.append('<p class="note">No tokens of this member are kept here.</p>')
    parts.append("</details>")
    return "".join(parts)


def _sample_html(sample: Sample, name: str, decode: Decode | None) -> str:
    story = tell(sample, decode)
    runs = strip.runs_of(strip.kinds_of(sample))
    parts = [timeline(sample.spans), _strip_html(sample, name, runs, story.turns)]
    parts.append(f'<p class="note">Text of the turns: {html(story.source)}.</p>')
    parts += [said_html(said) for said in story.before]
    parts += _turns_html(story, sample)
    if story.whole:
        parts.append(said_html(Said(ASSISTANT, story.whole), "the whole response"))
    rest = {k: v for k, v in sample.metadata.items() if k not in _OWN_METADATA}
    for title, value in (("metadata", rest), ("sampling", sample.sampling)):
        if value:
            parts.append(folded_html(title, plain(value, 2)))
    return "".join(parts)


# --- turns ---------------------------------------------------------------------------------------
def _turns_html(story: Story, sample: Sample) -> list[str]:
    parts = []
    for turn in story.turns:
        reply = turn.reply or Said(ASSISTANT, "")
        parts.append(said_html(reply, _about(turn, sample), turn))
        parts += [said_html(said) for said in turn.behind]
    return parts


def _about(turn: Turn, sample: Sample) -> str:
    """Return what stands beside a reply's role: tokens, version, time, log-prob."""
    first, last = turn.calls[0], turn.calls[-1]
    versions = sorted({v for call in turn.calls for v, _, _ in call.versions})
    known = [f"v{v}" if v != UNKNOWN_VERSION else "version unknown" for v in versions]
    said = [f"turn {turn.number}", f"{turn.end - turn.start:,} tokens", " → ".join(known)]
    if len(turn.calls) > 1:
        said.append(f"in {len(turn.calls)} calls")
    said += [last.finish, where(turn.spans)]
    if sample.rollout_log_probs is not None and turn.end > turn.start:
        offset = sample.prompt_length
        values = sample.rollout_log_probs[turn.start - offset : turn.end - offset]
        said.append(f"mean log-prob {float(np.mean(values)):.3f}")
    said.append(first.engine)
    return " · ".join(filter(None, said))


def said_html(said: Said, about: str = "", turn: Turn | None = None) -> str:
    """Return one message, its reasoning and calls marked."""
    role = said.role if said.role in _ROLES else "context"
    number = "" if turn is None else f' data-turn="{turn.number}"'
    name = f" {html(shortened(said.name, 200))}" if said.name else ""
    head = f"<b>{html(shortened(said.role, 40))}{name}</b>"
    if about:
        head += f"<span>{html(about)}</span>"
    parts = [f'<article class="say {role}"{number}><header>{head}</header>']
    if role == ASSISTANT:
        for kind, text in parts_of(said.text):
            parts.append(_part_html(kind, text))
        if turn is not None and turn.reply is None:
            parts.append('<p class="note">The text of this reply is not kept.</p>')
    elif said.text:
        parts.append(f"<pre>{html(said.text)}</pre>")
    parts += [_call_html(call) for call in _calls(said, turn)]
    parts.append("</article>")
    return "".join(parts)


def _part_html(kind: str, text: str) -> str:
    if kind == "text":
        return f"<pre>{html(text)}</pre>" if text.strip() else ""
    return f'<div class="part {kind}"><em>{_KINDS[kind]}</em><pre>{html(text)}</pre></div>'


def _calls(said: Said, turn: Turn | None) -> Sequence[Mapping[str, Any]]:
    return turn.tool_calls if turn is not None and turn.tool_calls else said.calls


def _call_html(call: Mapping[str, Any]) -> str:
    arguments = call.get("arguments", "")
    shown = arguments if isinstance(arguments, str) else plain(arguments)
    ran = {True: "ran", False: "not run"}.get(call.get("executed", None), "called")
    return (
        f'<p class="call {"" if ran != "not run" else "not"}"><em>{ran}</em> '
        f"<b>{html(shortened(str(call.get('name', '')), 200))}</b>"
        f"<code>{html(shortened(shown, 8192))}</code></p>"
    )


# --- tokens --------------------------------------------------------------------------------------
def _strip_html(
    sample: Sample, name: str, runs: list[tuple[int, int, int]], turns: Sequence[Turn]
) -> str:
    if not len(sample.tokens):
        return ""
    packed = data(strip.strip_data(sample, runs, turns))
    return (
        f'<details class="tokens" data-strip="{name}"><summary><b>tokens</b>'
        f"<span>{html(strip.counted(runs, sample))}</span></summary>"
        f"{strip.drawing(runs, len(sample.tokens))}"
        '<p class="legend"><i class="k1">sampled</i><i class="k2">sampled, masked</i>'
        '<i class="k0">context</i><span class="dim">point at a token: id, text, log-prob, '
        "version, call and engine</span></p>"
        '<noscript><p class="note">Tokens one by one need the script of this page; the bar above '
        "has their runs.</p></noscript>"
        f'<div class="strip" id="{name}-strip"></div>'
        f'<script type="application/json" id="{name}-data">{packed}</script></details>'
    )


# --- small ---------------------------------------------------------------------------------------
def facts_html(rows: Mapping[str, Any]) -> str:
    """Return names and values, long ones folded; what is empty is left out."""
    parts, folded = [], []
    for name, value in rows.items():
        if value in (None, "", {}, []):
            continue
        shown = value if isinstance(value, str) else plain(value)
        if len(shown) <= _SHORT_FACT or isinstance(value, str):
            shown = shortened(shown, _MAX_FACT)
            parts.append(f"<div><dt>{html(name)}</dt><dd>{html(shown)}</dd></div>")
        else:
            folded.append(folded_html(name, plain(value, 2)))
    grid = f'<dl class="facts">{"".join(parts)}</dl>' if parts else ""
    return grid + "".join(folded)


def folded_html(title: str, text: str) -> str:
    """Return a text that is folded at first."""
    return f"<details><summary>{html(title)}</summary><pre>{html(text)}</pre></details>"


def badge(status: str) -> str:
    """Return a status in its colour."""
    known = status if status.isidentifier() and status.isascii() else "other"
    return f'<span class="badge {known}">{html(status)}</span>'


def plain(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, whatever it is."""
    if isinstance(value, float):
        return f"{value:g}"
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    except (ValueError, TypeError, RecursionError):
        return visible(repr(value)[:_MAX_FACT])
