"""Signs of a bug in what the processes logged, for whoever looks at a run that seems fine.

Owns the list of signs. Never decides success: a run that loses nothing succeeds whatever it logs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

SIGNS = (
    "Traceback (most recent call last)",
    "rollout_bug",
    "unexpected_error",
    "never retrieved",
    "was never awaited",
    "Task was destroyed",
    "result_refused",
)
HARMLESS = ('"logger": "rq.worker"',)
"""RQ logs an outage of Redis with a traceback; the verifier then waits for it."""
SHOWN_CHARS = 300


def signs_in_logs(folder: Path) -> list[str]:
    """Return one line for each kind of sign in each log, with how often and the first of them."""
    found = []
    for path in sorted(folder.glob("*.log")):
        counts: Counter[str] = Counter()
        first: dict[str, str] = {}
        for line in path.read_text(errors="replace").splitlines():
            for sign in SIGNS:
                if sign in line and not any(words in line for words in HARMLESS):
                    counts[sign] += 1
                    first.setdefault(sign, line[:SHOWN_CHARS])
        found += [f"{path.name}: {n} x {sign!r}: {first[sign]}" for sign, n in counts.items()]
    return found
