"""Where the time of one trajectory went, as a drawing that needs no script.

Owns the lanes and their scale. Never says what a span means. Invariant: every span is drawn and can
be read by pointing at it; what took no time is still one unit wide.

Unit: the drawing is 1000 wide; a lane is 14 high.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rollstream.cli.html.escape import attribute, html
from rollstream.sample import Span

LANES = ("queue_wait", "generate", "tool", "reward", "merge", "submit", "group_wait", "judge_wait",
         "ready_wait")  # fmt: skip
"""Known names in the order of a trajectory's life; others come behind."""
WIDTH, LANE, LEFT, RIGHT = 1000, 18, 96, 4
MAX_RECTS = 20_000
"""A trajectory of more spans than that says so."""


def timeline(spans: Sequence[Span]) -> str:
    """Return a drawing with a lane per name, and a sentence with the sums; empty for no spans."""
    drawn = [span for span in spans if _is_sound(span)][:MAX_RECTS]
    if not drawn:
        return ""
    start = min(span.start_unix_s for span in drawn)
    whole = max(max(span.start_unix_s + span.duration_s for span in drawn) - start, 1e-6)
    names = sorted({span.name for span in drawn}, key=_place)
    height = LANE * len(names) + 18
    told = f"spans of {whole:.2f} seconds"
    size = f'viewBox="0 0 {WIDTH} {height}"'
    parts = [f'<svg class="time" {size} role="img" aria-label="{told}">']
    for lane, name in enumerate(names):
        y = lane * LANE
        parts.append(f'<text x="{LEFT - 6}" y="{y + 12}" text-anchor="end">{html(name)}</text>')
        parts.append(f'<rect class="lane" x="{LEFT}" y="{y + 2}" width="{WIDTH - LEFT - RIGHT}" '
                     f'height="{LANE - 4}"/>')  # fmt: skip
    scale = (WIDTH - LEFT - RIGHT) / whole
    for span in drawn:
        x = LEFT + (span.start_unix_s - start) * scale
        width = max(1.0, span.duration_s * scale)
        lane = names.index(span.name)
        kind = f"s{LANES.index(span.name)}" if span.name in LANES else "sx"
        bad = "" if span.outcome == "ok" else " bad"
        parts.append(
            f'<rect class="span {kind}{bad}" x="{min(x, WIDTH - 1):.2f}" y="{lane * LANE + 2}" '
            f'width="{min(width, WIDTH - x):.2f}" height="{LANE - 4}">'
            f"<title>{attribute(_told(span, start))}</title></rect>"
        )
    parts.append(_axis(whole, LANE * len(names) + 14))
    parts.append("</svg>")
    parts.append(f'<p class="dim">{html(where(spans))}</p>')
    if len(drawn) == MAX_RECTS:
        parts.append(f'<p class="note">only the first {MAX_RECTS:,} spans are drawn</p>')
    return "".join(parts)


def where(spans: Sequence[Span]) -> str:
    """Return the sum of each name, the longest first."""
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for span in spans:
        if _is_sound(span):
            sums[span.name] += span.duration_s
            counts[span.name] += 1
    return " · ".join(
        f"{name} {told_s(seconds)}" + (f" ({counts[name]})" if counts[name] > 1 else "")
        for name, seconds in sorted(sums.items(), key=lambda one: -one[1])
    )


def told_s(seconds: float) -> str:
    """Return a duration for people."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _axis(whole: float, y: int) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<text x="{LEFT}" y="{y}">0 s</text>'
        f'<text x="{middle:.0f}" y="{y}" text-anchor="middle">{told_s(whole / 2)}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{y}" text-anchor="end">{told_s(whole)}</text>'
    )


def _told(span: Span, start: float) -> str:
    turn = f", turn {span.turn}" if span.turn >= 0 else ""
    outcome = "" if span.outcome == "ok" else f", {span.outcome}"
    begun = span.start_unix_s - start
    return f"{span.name}{turn}: {told_s(span.duration_s)}, from {told_s(begun)} on{outcome}"


def _place(name: str) -> tuple[int, str]:
    return (LANES.index(name) if name in LANES else len(LANES), name)


def _is_sound(span: Span) -> bool:
    """Whether it can be drawn: clocks jump, and a dump may be anybody's."""
    return 0 <= span.duration_s < 1e9 and 0 < span.start_unix_s < 1e12
