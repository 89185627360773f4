"""The page as a whole: its head, the group, the table of members, the members.

Owns the policy that forbids every request, and the files that are put inside. Never lets anything
in that is not escaped (`escape`) or ours. Invariant: the only script and style that may run are
the two whose digests the policy names, so that a hole in the escaping would still run nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from rollstream import __version__
from rollstream.cli.decoding import Decoder
from rollstream.cli.gather import GroupFacts, MemberFacts
from rollstream.cli.html.escape import data, html
from rollstream.cli.html.members import badge, facts_html, member_html, plain
from rollstream.cli.html.strip import pieces_data

OPEN_MEMBERS = 1
"""How many are open at first: what is folded costs a browser nothing."""


def page(group: GroupFacts, decoder: Decoder | None) -> Iterator[str]:
    """Yield the page in pieces.

    Args:
        group: what is shown.
        decoder: of the model's vocabulary; None shows ids where tokens have no text.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src 'sha256-{_digest(style)}'; "
        f"script-src 'sha256-{_digest(script)}'; base-uri 'none'; form-action 'none'"
    )
    title = f"group {group.group_index} · {group.source}"
    yield (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{html(title)}</title><style>{style}</style></head><body>\n"
    )
    yield _head(group)
    yield _table(group.members)
    opened = _first_to_open(group.members)
    decode = None if decoder is None else decoder.decode
    for member in group.members:
        yield member_html(member, decode, is_open=member.member in opened)
        yield "\n"
    told = "no tokenizer was given: tokens are shown as ids (--tokenizer FILE or --config FILE)"
    if decoder is not None:
        told = f"text of tokens: {decoder.file}"
        yield _pieces(group.members, decoder)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    yield (
        f"<footer>rollstream {__version__} · {when} · {html(told)} · this file asks for nothing "
        f"from anywhere</footer>\n<script>{script}</script></body></html>\n"
    )


def _head(group: GroupFacts) -> str:
    title = f"<h1>group {html(group.group_index)}</h1>{badge(group.state)}"
    source = f'<span class="dim">{html(group.source)}</span><span class="buttons"></span>'
    parts = [f'<header class="top">{title}{source}</header>', facts_html(group.rows)]
    if len(group.drops) > 1:
        rows = "".join(f"<li>{html(drop['at'])}: <b>{html(drop['reason'])}</b> "
                       f"{html(drop['detail'])}</li>" for drop in group.drops)  # fmt: skip
        parts.append(
            f"<p>It was dropped {len(group.drops)} times, newest first:</p><ol>{rows}</ol>"
        )
    return "".join(parts)


def _table(members: list[MemberFacts]) -> str:
    if not members:
        return ""
    rows = []
    for one in members:
        reward = "" if one.reward is None else plain(one.reward)
        stop = one.rows.get("stop reason") or one.rows.get("reason") or ""
        turns = sum(len(sample.calls) for sample in one.leaves)
        tokens = sum(len(sample.tokens) for sample in one.leaves)
        counts = f"<td>{turns:,}</td><td>{tokens:,}</td>" if one.leaves else "<td></td><td></td>"
        rows.append(
            f'<tr><td><a href="#m{one.member}">{one.member}</a></td><td>{badge(one.status)}</td>'
            f"<td>{html(reward)}</td><td>{html(str(stop))}</td>{counts}"
            f"<td>{html(one.error[:300])}</td></tr>"
        )
    return (
        "<table><thead><tr><th>member</th><th>status</th><th>reward</th><th>ended by</th>"
        "<th>calls</th><th>tokens</th><th>error</th></tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>\n"
    )


def _first_to_open(members: list[MemberFacts]) -> set[int]:
    told = [one.member for one in members if one.leaves or one.error]
    return set(told[:OPEN_MEMBERS])


def _pieces(members: Iterable[MemberFacts], decoder: Decoder) -> str:
    seen: set[int] = set()
    for one in members:
        for sample in one.leaves:
            seen.update(sample.tokens.tolist())
    packed = data(pieces_data(decoder.pieces(sorted(seen))))
    return f'<script type="application/json" id="pieces">{packed}</script>'


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
