"""reasoning-gym as a source: the same problems for the same spec, in every process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from reasoning_gym import get_score_answer_fn

from producer.rows import RowRules
from producer.sources import open_source
from producer.sources.gym import GymSource, make_plain, parse_spec
from rollstream.errors import ConfigError

SPEC = "reasoning_gym:gsm_symbolic?size=20&seed=3"


def test_a_problem_becomes_a_group_that_its_own_scorer_reads() -> None:
    row = open_source(SPEC).row(4)
    group, _ = RowRules({"default": 2}, {}).group(row, 4)
    assert group.metadata["source_dataset"] == "gsm_symbolic"
    assert group.metadata["source_index"] == 4
    question = group.prompt[0]["content"]
    assert group.prompt == [{"role": "user", "content": question}]
    entry = {"question": question, "answer": group.label, "metadata": group.metadata}
    score = get_score_answer_fn("gsm_symbolic")
    assert score(group.label, entry) == 1.0
    assert score("-1", entry) < 1.0


def test_problems_are_the_same_in_another_process_and_in_any_order() -> None:
    code = (
        "from producer.sources import open_source\n"
        f"s = open_source({SPEC!r})\n"
        "print(s.fingerprint, [s.row(k).values for k in reversed(range(5))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    source = open_source(SPEC)
    rows = [source.row(k).values for k in range(5)]
    assert done.stdout.strip() == f"{source.fingerprint} {rows[::-1]}"
    assert len(source) == 20


def test_fingerprint_changes_with_whatever_decides_the_problems() -> None:
    specs = ("?size=20&seed=3", "?size=21&seed=3", "?size=20&seed=4", "?size=20&seed=3&max_terms=4")
    assert len({GymSource(f"chain_sum{spec}").fingerprint for spec in specs}) == 4
    assert GymSource("chain_sum").fingerprint == GymSource("chain_sum?seed=0").fingerprint


def test_a_spec_without_a_seed_has_one() -> None:
    assert parse_spec("x") == ("x", {"size": 500, "seed": 0})
    assert parse_spec('x?size=2&ops=["%2B"]&mode=fast')[1]["ops"] == ["+"]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("gsm_symbolc", "did you mean gsm_symbolic"),
        ("gsm_symbolic?sizes=3", "did you mean size"),
        ("gsm_symbolic?size=3&size=4", "size stands twice"),
        ("gsm_symbolic?size=many", "size = 'many'"),
        ("gsm_symbolic?size=0", "at least 1"),
        ("gsm_symbolic?size=1000000000000", "at most 10000000"),
        ("gsm_symbolic?seed=-1", "at least 0"),
        ("gsm_symbolic?size", "bad query field"),
        ("chain_sum?min_terms=9&max_terms=2", "refuses .*min_terms"),
        ("gsm_symbolic?difficulty=2", r"assert 1\.0 <= self\.difficulty"),
    ],
)
def test_a_spec_that_is_wrong_is_refused_by_name(rest: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_source(f"reasoning_gym:{rest}")


@dataclass
class _Point:
    x: int


def test_make_plain_gives_types_that_the_wire_has() -> None:
    value = {
        1: (1, {2, 1}),
        "a": np.int64(3),
        "b": np.array([1.5]),
        "c": _Point(1),
        "d": Fraction(1, 2),
    }
    assert make_plain(value) == {
        "1": [1, [1, 2]], "a": 3, "b": [1.5], "c": {"x": 1}, "d": "1/2",
    }  # fmt: skip
