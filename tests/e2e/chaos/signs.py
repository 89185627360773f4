"""Signs of a bug in what the processes logged, for whoever looks at a run that seems fine.

Owns the list of signs. Never decides success: a run that loses nothing succeeds whatever it logs.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

DESTROYED = "Task was destroyed"
SIGNS = (
    "Traceback (most recent call last)",
    "rollout_bug",
    "unexpected_error",
    "never retrieved",
    "was never awaited",
    DESTROYED,
    "result_refused",
)
HARMLESS = ('"logger": "rq.worker"',)
"""RQ logs an outage of Redis with a traceback; the verifier then waits for it."""
STRAY = re.compile(r'"attempt_ignores_cancellation", "lease": "([^"]+)"')
SHOWN_CHARS = 300


def signs_in_logs(folder: Path) -> list[str]:
    """Return one line for each kind of sign in each log, with how often and the first of them."""
    found = []
    for path in sorted(folder.glob("*.log")):
        counts: Counter[str] = Counter()
        first: dict[str, str] = {}
        lines = path.read_text(errors="replace").splitlines()
        # What ignored its cancellation is still there when its process ends.
        strays = set(
            re.findall(r'"attempt_ignores_cancellation", "lease": "([^"]+)"', "\n".join(lines))
        )
        for line in lines:
            if DESTROYED in line and any(f"name='{stray}'" in line for stray in strays):
                continue
            for sign in SIGNS:
                if sign in line and not any(words in line for words in HARMLESS):
                    counts[sign] += 1
                    first.setdefault(sign, line[:SHOWN_CHARS])
        found += [f"{path.name}: {n} x {sign!r}: {first[sign]}" for sign, n in counts.items()]
    return found
