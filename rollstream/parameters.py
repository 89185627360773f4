"""The sampling parameters that a prompt, an environment or an evaluation may set.

Owns their names, the values that each takes, and which of them leave the sampled distribution.
Never applies one. Invariant: this is the only such list: the producer reads rows by it, the worker
its environments and every row once more, and what training may not use is decided here.

A parameter *leaves the distribution* where the engine's log-probs, log softmax(logits / T) of every
token, are not those of the distribution that was drawn from, or are not those that a trainer
computes from the same logits.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_TOKEN_ID = (1 << 31) - 1
_Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Parameter:
    """What one parameter may be."""

    check: _Check
    expected: str
    leaves: _Check = lambda _: False
    """Whether a value leaves the distribution."""


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that a float holds."""
    try:
        return (
            not isinstance(value, bool)
            and isinstance(value, int | float)
            and (math.isfinite(float(value)))
        )
    except OverflowError:
        return False


def _is_list_of(holds: _Check) -> _Check:
    return lambda value: isinstance(value, list | tuple) and all(map(holds, value))


def _is_token_id(value: Any) -> bool:
    return is_whole(value) and 0 <= value <= MAX_TOKEN_ID


def _is_biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(key, int | str) and str(key).isdecimal() and is_number(bias)
        for key, bias in value.items()
    )


def _other_than(plain: Any) -> _Check:
    return lambda value: bool(value != plain)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_GRAMMAR = Parameter(_is_text, "text", bool)
PARAMETERS: dict[str, Parameter] = {
    # At 0 an engine takes the likeliest token and reports its log-prob at T = 1; a trainer that
    # divides logits by the recorded temperature would divide by 0.
    "temperature": Parameter(
        lambda v: is_number(v) and v >= 0, "a number of at least 0", lambda v: bool(v == 0)
    ),
    "max_new_tokens": Parameter(lambda v: is_whole(v) and v >= 1, "a whole number of at least 1"),
    "stop": Parameter(
        _is_list_of(lambda v: isinstance(v, str) and bool(v)), "a list of texts, none of them empty"
    ),
    "stop_token_ids": Parameter(
        _is_list_of(_is_token_id), "a list of whole numbers, 0 or more"
    ),
    "top_p": Parameter(
        lambda v: is_number(v) and 0 < v <= 1, "a number in (0, 1]", _other_than(1.0)
    ),
    "top_k": Parameter(
        lambda v: is_whole(v) and (v == -1 or v >= 1), "-1 or at least 1", _other_than(-1)
    ),
    "min_p": Parameter(
        lambda v: is_number(v) and 0 <= v <= 1, "a number from 0 to 1", _other_than(0.0)
    ),
    "frequency_penalty": Parameter(is_number, "a number", _other_than(0.0)),
    "presence_penalty": Parameter(is_number, "a number", _other_than(0.0)),
    "repetition_penalty": Parameter(
        lambda v: is_number(v) and v > 0, "a number above 0", _other_than(1.0)
    ),
    "min_new_tokens": Parameter(
        lambda v: is_whole(v) and v >= 0, "a whole number, 0 or more", _other_than(0)
    ),
    "logit_bias": Parameter(_is_biases, "an object {token id: number}", bool),
    "json_schema": Parameter(lambda v: isinstance(v, str | Mapping), "a JSON schema", bool),
    "regex": _GRAMMAR,
    "ebnf": _GRAMMAR,
}  # fmt: skip
"""Of training samples T may vary, and where a reply ends (caps, stops): nothing else."""
IMPOSSIBLE = {
    "tool_choice": "a forced tool choice leaves the sampled distribution, and prompts that are "
    "token ids have no such parameter; write what the reply has to be as a grammar (json_schema, "
    "regex, ebnf), for evaluations",
}
"""Parameters of other interfaces that cannot be honoured, and why."""
ASKS_FOR_NOTHING = ("auto", None)
"""Values of those that ask for nothing."""
_SHOWN_CHARS = 80


def problem_of(name: str, value: Any) -> str:
    """Return what is wrong with a parameter, or nothing."""
    rule = PARAMETERS.get(name)
    if rule is None:
        if name in IMPOSSIBLE:
            return (
                "" if value in ASKS_FOR_NOTHING else f"{name} = {_shown(value)}: {IMPOSSIBLE[name]}"
            )
        near = difflib.get_close_matches(name, PARAMETERS, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PARAMETERS)}"
        return f"unknown sampling parameter {_shown(name)}; {hint}"
    if not rule.check(value):
        return f"{name} = {_shown(value)}: expected {rule.expected}"
    return ""


def off_problem(name: str, value: Any) -> str:
    """Return what is said of a parameter that training may not use."""
    return (
        f"{name} = {_shown(value)} leaves the sampled distribution: the engine's log-probs would "
        "not be those of what was sampled, and training on them is wrong (training groups may vary "
        "temperature only, above 0); remove it, or set sampling.allow_off_distribution to train "
        "all the same"
    )


def leaving(values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[str]:
    """Return the parameters that leave the distribution; names that are none are left out."""
    return [
        name
        for name, value in dict(values).items()
        if name in PARAMETERS and PARAMETERS[name].leaves(value)
    ]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
