"""What the scripted policy writes: templates, a tool call, an answer that is right or wrong.

Owns the words. Never touches ids. Invariant: the text is a function of the situation, the rates and
the draws, which all come from one key.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

V = TypeVar("V")
_MASK = (1 << 64) - 1

_SENTENCES = (
    "Let me restate what is asked before computing anything.",
    "We are given {n} here, which matters for the total.",
    "First I list the quantities → then I combine them step by step.",
    "The units agree, so the numbers can be added directly.",
    "Careful: {n} is counted once, not twice.",
    "Half of that is handled separately, as the question says.",
    "That leaves {n}, and the rest follows by subtraction.",
    "Check: doing it in another order gives the same value ✓.",
    "So far so good; one more step remains.",
    "It is tempting to stop at {n}, but the last condition still applies.",
    "A naïve reading would overcount 🤔 by one.",
    "Multiplying first keeps every intermediate value whole.",
)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent hands in; what else the command writes is the answer."""
FENCE = "```"
"""An answer that begins with it is a program, and written as it is."""
WRONG_PROGRAMS = {
    1: "while True:\n    pass",
    2: "raise SystemExit(0)",
    3: "held = []\nwhile True:\n    held.append(bytes(10**8))",
    4: "print('passed')",
}
"""What stands in place of a right one, by a draw from 1 to 9."""
MAX_COMMANDS = 5
"""An agent that goes on behind these is answered in words."""
_LEADS = ("I will compute this exactly.", "Let me use the tool for the arithmetic.", "")


class Draw:
    """A stream of draws from one key (splitmix64): the same on every machine and version."""

    def __init__(self, key: int) -> None:
        self._state = key

    def bits(self) -> int:
        """Return 64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def unit(self) -> float:
        """Return a number in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        """Return a whole number in 0..count-1."""
        return self.bits() % count

    def pick(self, values: Sequence[V]) -> V:
        """Return one of the values."""
        return values[self.below(len(values))]


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What the policy does how often; an auditor needs the same values."""

    think_rate: float = 0.5
    """Share of replies that begin with a reasoning block."""
    tool_rate: float = 0.6
    """Share of first replies that call a tool, where the prompt lists one."""
    again_rate: float = 0.15
    """Share of later replies that call it once more."""
    malformed_rate: float = 0.02
    """Share of tool calls that are not valid JSON."""
    never_rate: float = 0.1
    """Share of problems that no member solves."""
    always_rate: float = 0.1
    """Share of problems that every member solves; the others are solved in 20-80 % of the cases."""
    split_rate: float = 0.03
    """Share of tokens that are sampled as two that spell the same: not the canonical encoding."""
    max_sentences: int = 8
    """Of reasoning, and of explanation before an answer."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Situation:
    """What the policy knows when it begins a reply."""

    question: str
    answer: str | None
    """None where the table has none: the policy guesses."""
    tools: tuple[str, ...]
    """Functions that take an `expression`."""
    num_results: int
    """Tool results since the question."""
    shells: tuple[str, ...] = ()
    """Functions that take a shell's `command`; only where there is no other."""
    pythons: tuple[str, ...] = ()
    """Functions that take a Python program as `code`."""


def write_text(situation: Situation, config: PolicyConfig, draw: Draw) -> str:
    """Return one whole reply, without the turn's end."""
    numbers = re.findall(r"\d+", situation.question) or ["7"]
    parts = []
    if draw.unit() < config.think_rate:
        parts.append(f"<think>\n{_sentences(numbers, config, draw)}\n</think>\n\n")
    rate = config.tool_rate if situation.num_results == 0 else config.again_rate
    listed = situation.tools + situation.pythons
    if situation.shells and not listed and situation.num_results < MAX_COMMANDS:
        parts.append(_command(situation, numbers, config, draw))
    elif listed and situation.num_results < 4 and draw.unit() < rate:
        parts.append(_calls(situation, numbers, config, draw))
    else:
        if draw.unit() < 0.7:
            parts.append(_sentences(numbers, config, draw) + "\n\n")
        answer = _answer(situation, config, draw)
        is_program = answer.startswith(FENCE)
        parts.append(answer if is_program else f"The answer is \\boxed{{{answer}}}.")
    return "".join(parts)


def _sentences(numbers: Sequence[str], config: PolicyConfig, draw: Draw) -> str:
    count = 1 + draw.below(max(1, config.max_sentences))
    return " ".join(draw.pick(_SENTENCES).format(n=draw.pick(numbers)) for _ in range(count))


def _calls(situation: Situation, numbers: Sequence[str], config: PolicyConfig, draw: Draw) -> str:
    lead = draw.pick(_LEADS)
    blocks = [lead] if lead else []
    for _ in range(1 + (draw.unit() < 0.15)):
        a, b = draw.pick(numbers), draw.pick(numbers)
        expression = f"{a} {draw.pick('+-*')} {b}"
        name = draw.pick(situation.tools + situation.pythons)
        arguments = {"expression": expression}
        if name in situation.pythons:
            arguments = {"code": f"print({expression})"}
        call = {"name": name, "arguments": arguments}
        text = json.dumps(call)
        if draw.unit() < config.malformed_rate:
            text = text[:-2]
        blocks.append(f"<tool_call>\n{text}\n</tool_call>")
    return "\n".join(blocks)


def _command(situation: Situation, numbers: Sequence[str], config: PolicyConfig, draw: Draw) -> str:
    """Return a call of a shell: arithmetic first, and then how a coding agent hands in."""
    if situation.num_results == 0 or draw.unit() < config.again_rate:
        a, b = draw.pick(numbers), draw.pick(numbers)
        command = f"echo $(({a} {draw.pick('+-*')} {b})) | tee -a notes.txt"
    else:
        command = f"{SUBMIT} && echo {shlex.quote(_answer(situation, config, draw))}"
    text = json.dumps({"name": draw.pick(situation.shells), "arguments": {"command": command}})
    if draw.unit() < config.malformed_rate:
        text = text[:-2]
    lead = draw.pick(_LEADS)
    block = f"<tool_call>\n{text}\n</tool_call>"
    return f"{lead}\n{block}" if lead else block


def _answer(situation: Situation, config: PolicyConfig, draw: Draw) -> str:
    if situation.answer is not None and draw.unit() < solve_rate(situation.question, config):
        return situation.answer
    wrong = 1 + draw.below(9)
    if situation.answer is not None and situation.answer.startswith(FENCE):
        return f"{FENCE}python\n{WRONG_PROGRAMS.get(wrong, 'raise NotImplementedError')}\n{FENCE}"
    try:
        return str(int(situation.answer or "0") + wrong)
    except ValueError:
        return f"unknown ({wrong})"


def solve_rate(question: str, config: PolicyConfig) -> float:
    """Return how often a problem is solved: some never, some always, the others in between."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    unit = (int.from_bytes(digest, "little") >> 11) * 2.0**-53
    if unit < config.never_rate:
        return 0.0
    if unit < config.never_rate + config.always_rate:
        return 1.0
    rest = (unit - config.never_rate - config.always_rate) / (
        1.0 - config.never_rate - config.always_rate
    )
    return 0.2 + 0.6 * rest
