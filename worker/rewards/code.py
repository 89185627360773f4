"""A program in a reply, and the tests in its row: the payload of the job `code`.

Owns where both are found. Never runs anything. Invariant: what the policy wrote badly is an empty
or a wrong program; a row without usable tests is a `RewardFault`.

    tests    metadata.tests, else label; as JSON text or as it is
    {"stdin": [{"input": str, "output": str}, ...]}      the program reads and prints
    {"entry": str, "cases": [{"args": [...], "expected": ...}, ...]}      a function is called
    {"asserts": str}      Python text that runs behind the program
    [{"input", "output"}, ...], {"inputs": [...], "outputs": [...]}      are stdin
    {"fn_name": str, "inputs": [...], "outputs": [...]}      are cases
    ["assert f(1) == 2", ...], any other text      are asserts
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .details import Detail, no_verdict

MAX_PROGRAM_CHARS = 200_000
"""A longer program is a wrong one."""
PYTHON = frozenset({"python", "python3", "py"})
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^\n]*)$", re.MULTILINE)


def program_of(text: str) -> str:
    """Return the last fenced block that is marked as Python, else the last without a mark.

    The last block may be open: it goes on to the end. A text without any block is a program as a
    whole. Blocks in other languages are none.
    """
    marked = unmarked = None
    opened: tuple[str, str, int] | None = None  # fence, language, where its text begins
    num_blocks = 0
    for found in _FENCE.finditer(text):
        fence, info = found[1], found[2].strip()
        if opened is None:
            language = info.split(maxsplit=1)[0].lower() if info else ""
            opened = (fence, language, found.end() + 1)
            num_blocks += 1
        elif fence.startswith(opened[0]) and not info:
            marked, unmarked = _kept(opened, text[opened[2] : found.start()], marked, unmarked)
            opened = None
    if opened is not None:
        marked, unmarked = _kept(opened, text[opened[2] :], marked, unmarked)
    if num_blocks == 0:
        return text
    return marked if marked is not None else unmarked or ""


def _kept(
    opened: tuple[str, str, int], block: str, marked: str | None, unmarked: str | None
) -> tuple[str | None, str | None]:
    if opened[1] in PYTHON:
        return block, unmarked
    return marked, unmarked if opened[1] else block


def read_tests(label: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tests of a row in the words of the job.

    Args:
        label: of the row.
        metadata: `tests` wins over the label; `entry_point` is the function that a `check` in the
            asserts is called with.

    Raises:
        RewardFault: there are none, or they are written in none of the ways.
    """
    given = metadata.get("tests")
    given = label if given is None else given
    if isinstance(given, str):
        given = _parsed(given)
    tests = _asserts_of(given, metadata) or _stdin_of(given) or _cases_of(given)
    if tests is None:
        raise no_verdict(
            Detail.NO_LABEL,
            "the row has no tests that the reward 'code' can read in metadata.tests or label "
            f"({type(given).__name__}); docs/rewards.md says how they are written",
        )
    return tests


def _parsed(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # Python may begin so, too


def _asserts_of(given: Any, metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    if isinstance(given, Mapping):
        given = given.get("asserts")
    if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        given = "\n".join(given)
    if not isinstance(given, str) or not given.strip():
        return None
    entry = metadata.get("entry_point")
    if isinstance(entry, str) and entry.isidentifier() and "def check(" in given:
        given = f"{given}\n\ncheck({entry})\n"
    return {"asserts": given}


def _stdin_of(given: Any) -> dict[str, Any] | None:
    pairs = given
    if isinstance(given, Mapping):
        pairs = given.get("stdin")
        if pairs is None and "fn_name" not in given:
            pairs = [{"input": i, "output": o} for i, o in _in_and_out(given)]
    if not isinstance(pairs, list) or not pairs:
        return None
    tests = []
    for pair in pairs:
        if not isinstance(pair, Mapping):
            return None
        given_in, given_out = _lines(pair.get("input")), _lines(pair.get("output"))
        if given_in is None or given_out is None:
            return None
        tests.append({"input": given_in, "output": given_out})
    return {"stdin": tests}


def _in_and_out(given: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs):
        return list(zip(inputs, outputs, strict=True))
    return []


def _lines(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value if isinstance(value, str) else None


def _cases_of(given: Any) -> dict[str, Any] | None:
    if not isinstance(given, Mapping):
        return None
    entry, cases = given.get("entry"), given.get("cases")
    if isinstance(given.get("fn_name"), str):
        entry = given["fn_name"]
        cases = [_called_with(i, o) for i, o in _in_and_out(given)]
    if not isinstance(entry, str) or not isinstance(cases, list) or not cases:
        return None
    tests = []
    for case in cases:
        if not isinstance(case, Mapping) or not isinstance(case.get("args"), list):
            return None
        if "expected" not in case:
            return None
        tests.append({"args": case["args"], "expected": case["expected"]})
    return {"entry": entry, "cases": tests}


def _called_with(arguments: Any, expected: Any) -> dict[str, Any]:
    """Return a case; as text, each line is one argument in JSON, and the result is JSON too."""
    if isinstance(arguments, str) and isinstance(expected, str):
        try:
            args = [json.loads(line) for line in arguments.splitlines() if line.strip()]
            return {"args": args, "expected": json.loads(expected)}
        except (ValueError, RecursionError):
            return {}
    return {"args": arguments, "expected": expected}


def payload_of(
    text: str, label: Any, metadata: Mapping[str, Any], timeout_s: float
) -> dict[str, Any] | None:
    """Return the payload of the job; None where the reply holds no program that could be right.

    Args:
        text: of the reply.
        label: of the row.
        metadata: of the row; `partial` asks for the share of tests that passed, `timeout_s` is
            what one test may take.
        timeout_s: for all tests together.

    Raises:
        RewardFault: the row has no usable tests.
    """
    tests = read_tests(label, metadata)
    program = program_of(text)
    if not program.strip() or len(json.dumps(program)) > MAX_PROGRAM_CHARS:
        return None
    partial = metadata.get("partial") is True
    payload = {
        "program": program,
        "tests": tests,
        "timeout_s": timeout_s,
        "stop_early": not partial,
        "partial": partial,
    }
    one_s = metadata.get("timeout_s")
    if isinstance(one_s, int | float) and not isinstance(one_s, bool) and one_s > 0:
        payload["test_timeout_s"] = min(float(one_s), timeout_s)
    return payload
