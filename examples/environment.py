"""`python -m examples.environment`: a small run in which an environment answers the model, offline.

The environment is `Quiz` below: it asks one question after the other and judges each answer by
itself, so a sample has a reward for every turn. Starts Valkey, the simulated engine (a stand-in for
a model), the producer and one worker, and plays the trainer: each sample is printed with its turns.
Exit code 0 where every sample came and every turn of each has its reward.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.small_run import EXIT_WRONG, SmallRun, play, samples_of
from rollstream.group import FinishedGroup
from rollstream.sample import Sample
from worker.environments import EnvSample, StepResult

QUESTIONS = 3
SYSTEM = f"You are asked {QUESTIONS} questions, one after the other. Answer each in \\boxed{{}}."
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class Quiz:
    """Asks the questions of its row; 1.0 for each right answer.

    An environment is any class with these methods, `async def` or not; a plain tuple
    `(observation, reward, done, info)` will do in place of `StepResult`.
    """

    def __init__(self, sample: EnvSample) -> None:
        self._left: list[tuple[str, str]] = [tuple(pair) for pair in sample.metadata["questions"]]

    async def reset(self, sample: EnvSample) -> str:
        """Ask the first question: it stands behind the row's prompt."""
        return self._left[0][0]

    async def step(self, message: dict[str, Any]) -> StepResult:
        """Judge an answer and ask the next question."""
        _, expected = self._left.pop(0)
        boxes = _BOXED.findall(message["content"])
        said = boxes[-1].strip() if boxes else ""
        following = self._left[0][0] if self._left else None
        return StepResult(
            following,
            reward=float(said == expected),
            done=not self._left,
            info={"said": said, "expected": expected},
        )

    async def close(self) -> None:
        """Let go of everything: a quiz holds nothing."""


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.environment", description=__doc__)
    parser.add_argument("--groups", type=int, default=4, metavar="N", help="prompts (default 4)")
    parser.add_argument("--n", type=int, default=4, metavar="N", help="samples of each (default 4)")
    options = parser.parse_args()
    complete: list[bool] = []

    def show(group: FinishedGroup) -> None:
        complete.extend(map(show_sample, samples_of(group)))

    with tempfile.TemporaryDirectory(prefix="rollstream-quiz-") as folder:
        source, answers = write_rows(Path(folder), options.groups)
        tables: dict[str, dict[str, Any]] = {
            "producer": {"source": source},
            "worker": {
                "generate": "env",
                "environment": "examples.environment:Quiz",
                "max_turns": QUESTIONS,
            },
            "reward": {"kind": "none"},  # the sum of the steps' rewards is the sample's
        }
        run = SmallRun("environment", tables, answers, options.groups, options.n)
        code = play(run, show)
    return code if complete and all(complete) else EXIT_WRONG


def write_rows(folder: Path, count: int) -> tuple[str, str]:
    """Write the prompts, and what the simulated engine knows; return both as sources."""
    draw = random.Random(1)
    rows, known = [], []
    for number in range(count):
        questions = []
        for place in range(QUESTIONS):
            a, b = draw.randrange(10, 100), draw.randrange(10, 100)
            questions.append([f"Question {number}.{place}: What is {a} + {b}?", str(a + b)])
        rows.append(
            {
                "prompt": [{"role": "system", "content": SYSTEM}],
                "metadata": {"questions": questions},
            }
        )
        known += [{"prompt": question, "label": answer} for question, answer in questions]
    for name, lines in (("prompts", rows), ("answers", known)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"jsonl:{folder / 'prompts.jsonl'}", f"jsonl:{folder / 'answers.jsonl'}"


def show_sample(sample: Sample) -> bool:
    """Print a sample and its turns; return whether each turn has its reward."""
    episode = sample.metadata["env"]
    print(
        f"group {sample.group_index}, member {sample.member}: {sample.status.value} "
        f"({sample.stop_reason}), reward {sample.reward}, {sample.num_sampled} tokens sampled of "
        f"{len(sample.tokens)}"
    )
    for turn, reward, end, info in zip(
        *(episode[key] for key in ("turns", "rewards", "ends", "infos")), strict=True
    ):
        print(
            f"    turn {turn}: reward {reward} at token {end - 1}, said {info['said']!r}, "
            f"expected {info['expected']!r}"
        )
    return len(episode["rewards"]) == len(sample.calls) and sample.reward is not None


if __name__ == "__main__":
    sys.exit(main())
