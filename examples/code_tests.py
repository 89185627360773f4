"""`python -m examples.code_tests`: programs of a model, run against tests in the verifier, offline.

Rows have their tests in `metadata.tests`, in one of three ways: what the program reads and prints
(`stdin`), a function and its cases (`entry`), or lines of Python (`asserts`). The simulated engine
(a stand-in for a model) writes the program that is asked for, or one that ends never, at once, or
wants all memory: those are wrong answers, reward 0, and nothing of them is left running. With
`"partial": true` a row's reward is the share of tests that passed.

Starts Valkey, the engine, a verifier, the producer and one worker, and plays the trainer. Exit code
0 where every sample came with the reward that its program deserves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from examples.small_run import EXIT_WRONG, SmallRun, play, samples_of
from rollstream.group import FinishedGroup
from rollstream.sample import Sample

PROBLEMS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "Read one line with two whole numbers and print their sum.",
        "a, b = map(int, input().split())\nprint(a + b)",
        {"stdin": [{"input": "1 7\n", "output": "8\n"}, {"input": "-3 3\n", "output": "0\n"}]},
    ),
    (
        "Write a function is_palindrome(text) that ignores case.",
        "def is_palindrome(text):\n    text = text.lower()\n    return text == text[::-1]",
        {
            "entry": "is_palindrome",
            "cases": [
                {"args": ["Level"], "expected": True},
                {"args": ["ab"], "expected": False},
                {"args": [""], "expected": True},
            ],
        },
    ),
    (
        "Write a function f(n) that returns the n-th Fibonacci number; f(0) is 0.",
        "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        {"asserts": "assert f(0) == 0\nassert f(10) == 55\nassert f(90) > 10**18"},
    ),
    (
        "Read whole numbers, one a line, and print the largest.",
        "import sys\nprint(max(map(int, sys.stdin.read().split())))",
        {"stdin": [{"input": "3\n9\n4\n", "output": "9"}, {"input": "-5\n", "output": "-5"}]},
    ),
    (
        "Write a function flat(items) for lists of lists of any depth.",
        "def flat(x):\n    return sum(map(flat, x), []) if isinstance(x, list) else [x]",
        {"entry": "flat", "cases": [{"args": [[1, [2, [3]], []]], "expected": [1, 2, 3]}]},
    ),
    (
        "Write a function words(text) that returns how often each word occurs, as a dictionary.",
        "def words(text):\n    return {w: text.split().count(w) for w in text.split()}",
        {"asserts": "assert words('a b a') == {'a': 2, 'b': 1}\nassert words('') == {}"},
    ),
]


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.code_tests", description=__doc__)
    parser.add_argument("--n", type=int, default=4, metavar="N", help="samples of each (default 4)")
    options = parser.parse_args()
    seen: Counter[str] = Counter()

    def show(group: FinishedGroup) -> None:
        for sample in samples_of(group):
            seen[show_sample(sample)] += 1

    with tempfile.TemporaryDirectory(prefix="rollstream-rows-") as folder:
        rows = Path(folder) / "problems.jsonl"
        rows.write_text("".join(json.dumps(a_row(*problem)) + "\n" for problem in PROBLEMS))
        tables: dict[str, dict[str, Any]] = {
            "producer": {"source": f"jsonl:{rows}"},
            "worker": {"generate": "single_turn"},
            "reward": {"kind": "code", "timeout_s": 10.0},
            "verifier": {"memory_mb": 256},
        }
        answers = f"jsonl:{rows}?label=solution"
        run = SmallRun("code_tests", tables, answers, len(PROBLEMS), options.n, verifier=True)
        code = play(run, show)
    print("programs:", ", ".join(f"{what} {count}" for what, count in sorted(seen.items())))
    return code if not seen["judged wrongly"] and seen["right"] and seen["wrong"] else EXIT_WRONG


def a_row(question: str, solution: str, tests: dict[str, Any]) -> dict[str, Any]:
    """Return a row; `solution` is what the stand-in answers with, and nothing else reads it."""
    return {
        "prompt": [{"role": "user", "content": question}],
        "metadata": {"tests": tests, "timeout_s": 2.0},
        "solution": f"```python\n{solution}\n```",
    }


def show_sample(sample: Sample) -> str:
    """Print a sample with its verdict; return what is to be said of it."""
    program = sample.response.rpartition("```python\n")[2].partition("\n```")[0]
    is_right = any(program == solution for _, solution, _ in PROBLEMS)
    line = program.splitlines()[0] if program else "(none)"
    print(
        f"group {sample.group_index}, member {sample.member}: reward {sample.reward}, "
        f"{sample.metadata.get('code', {})}, a program that begins {line!r}"
    )
    if sample.reward != float(is_right):
        return "judged wrongly"
    return "right" if is_right else "wrong"


if __name__ == "__main__":
    sys.exit(main())
