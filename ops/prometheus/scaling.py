"""The rules with all their durations made shorter, so that a test sees in seconds what takes hours.

Owns what of a rule file is a duration: `for`, `keep_firing_for`, the intervals of groups, the
windows, steps and offsets of expressions, and the ages that they are held against, each followed by
`# s` at the end of its line. Never changes a ratio, a quantile, a count or a name. Invariant: what
is tested is the rule file that people run; a factor of 1 gives it back as it was.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_UNITS_MS["y"] = 365 * _UNITS_MS["d"]
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
_PART = re.compile(r"(\d+)(ms|[smhdwy])")
_WINDOW = re.compile(rf"\[\s*({_DURATION})\s*(?::\s*({_DURATION})?\s*)?\]")
_OFFSET = re.compile(rf"(\boffset\s+)({_DURATION})")
_AGE = re.compile(r"(\d+(?:\.\d+)?)([ \t]*# s[ \t]*)$", re.MULTILINE)
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"' + r"|'(?:\\.|[^'\\])*'")


def scaled(rules: Mapping[str, Any], factor: float, *, shortest_s: float = 0.0) -> dict[str, Any]:
    """Return the content of a rule file with all its durations multiplied by a factor.

    Args:
        rules: a rule file as it was parsed; is left as it is.
        factor: above 0; 1/60 makes ten minutes ten seconds.
        shortest_s: windows and offsets become no shorter: a window below four scrapes would be
            empty now and then, and an offset goes with the window that it is written beside.

    Raises:
        ValueError: for a factor that is not above 0, or a duration that is none.
    """
    if factor <= 0:
        raise ValueError(f"a factor is above 0: {factor}")
    made: dict[str, Any] = copy.deepcopy(dict(rules))
    for group in made.get("groups") or ():
        _scale_keys(group, ("interval",), factor)
        for rule in group.get("rules") or ():
            _scale_keys(rule, ("for", "keep_firing_for"), factor)
            rule["expr"] = _expression(str(rule["expr"]), factor, shortest_s)
    return made


def _scale_keys(of: dict[str, Any], keys: tuple[str, ...], factor: float) -> None:
    for key in keys:
        if key in of:
            of[key] = _duration(str(of[key]), factor, 0.0)


def _expression(text: str, factor: float, shortest_s: float) -> str:
    if factor == 1:
        return text
    texts: list[str] = []

    def put_aside(found: re.Match[str]) -> str:
        texts.append(found[0])
        return f'"{len(texts) - 1}"'

    def window(found: re.Match[str]) -> str:
        made = _duration(found[1], factor, shortest_s)
        if ":" not in found[0]:
            return f"[{made}]"
        return f"[{made}:{_duration(found[2], factor, 0.0) if found[2] else ''}]"

    # What stands in quotes is a label's value, and may look like anything.
    text = _TEXT.sub(put_aside, text)
    text = _WINDOW.sub(window, text)
    text = _OFFSET.sub(lambda found: found[1] + _duration(found[2], factor, shortest_s), text)
    text = _AGE.sub(lambda found: f"{float(found[1]) * factor:g}{found[2]}", text)
    return re.sub(r'"(\d+)"', lambda found: texts[int(found[1])], text)


def _duration(text: str, factor: float, shortest_s: float) -> str:
    """Return a duration times a factor, in whole milliseconds; 0 stays 0, nothing else becomes it.

    Raises:
        ValueError: it is no duration as Prometheus writes them.
    """
    if text == "0":
        return text
    if not re.fullmatch(_DURATION, text):
        raise ValueError(f"{text!r} is no duration: write 90s, 10m, 1h30m")
    if factor == 1 and not shortest_s:
        return text
    whole = sum(int(number) * _UNITS_MS[unit] for number, unit in _PART.findall(text))
    made = max(whole * factor, shortest_s * 1000)
    return f"{max(1, round(made))}ms" if whole else text
