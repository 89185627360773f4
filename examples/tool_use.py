"""`python -m examples.tool_use`: a small run whose model calls three kinds of tools, offline.

    calculator                              built in: arithmetic, in the worker
    python                                  built in: a program, in the verifier
    examples.tool_use:as_fraction           a function of ours: its specification for the model is
                                            its signature and docstring

Starts Valkey, the simulated engine (a stand-in for a model), a verifier, the producer and one
worker, and plays the trainer: each sample is printed with what its tools were asked and what the
model read. Exit code 0 where every sample came and every tool was called.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from fractions import Fraction
from typing import Any

from examples.small_run import EXIT_WRONG, SmallRun, play, samples_of
from rollstream.group import FinishedGroup
from rollstream.sample import Sample
from worker.tools.calculator import calculate

TOOLS = {
    "calculator": "calculator",
    "python": "python",
    "as_fraction": "examples.tool_use:as_fraction",
}
"""{the name that the model writes: how `worker.tools` names it}."""
SHOWN_CHARS = 60


def as_fraction(expression: str) -> str:
    """Return the value of an arithmetic expression as a fraction.

    Args:
        expression: numbers with + - * /, for example "3 / 12".
    """
    return str(Fraction(calculate(expression)).limit_denominator(10**6))


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.tool_use", description=__doc__)
    parser.add_argument("--groups", type=int, default=6, metavar="N", help="prompts (default 6)")
    parser.add_argument("--n", type=int, default=4, metavar="N", help="samples of each (default 4)")
    options = parser.parse_args()
    source = f"reasoning_gym:gsm_symbolic?size={options.groups}&seed=1"
    called: Counter[str] = Counter()

    def show(group: FinishedGroup) -> None:
        for sample in samples_of(group):
            called.update(show_sample(sample))

    tables: dict[str, dict[str, Any]] = {
        "producer": {"source": source},
        "worker": {"generate": "multi_turn", "tools": list(TOOLS.values()), "max_turns": 4},
        "tool.python": {"timeout_s": 10.0, "output_chars": 1024},
        "reward": {"kind": "math"},
        "debug": {"messages": True},
    }
    run = SmallRun("tool_use", tables, source, options.groups, options.n, verifier=True)
    code = play(run, show)
    print("calls:", ", ".join(f"{name} {called[name]}" for name in TOOLS))
    return code if all(called[name] for name in TOOLS) else EXIT_WRONG


def show_sample(sample: Sample) -> list[str]:
    """Print a sample and its calls; return the names of the tools that answered."""
    print(
        f"group {sample.group_index}, member {sample.member}: {sample.status.value} "
        f"({sample.stop_reason}), reward {sample.reward}, {len(sample.calls)} turns, errors "
        f"{sample.metadata.get('tool_errors', {})}"
    )
    names = []
    for call in sample.metadata.get("tool_calls", []):
        names += [call["name"]] if call["executed"] else []
        print(f"    {'ran' if call['executed'] else 'not run'}: {call['name']}")
    for message in sample.metadata.get("messages", []):
        if message["role"] == "tool":
            print(f"    read: {str(message['content'])[:SHOWN_CHARS]!r}")
    return names


if __name__ == "__main__":
    sys.exit(main())
