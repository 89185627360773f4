"""How long the merge of many turns takes, and how that grows (docs/benchmarks.md).

    python -m benchmarks.merge [--json]

Turns of 750 sampled and 250 observed tokens, 1,000 a turn, so 128 turns hold 128k tokens; the
records' prompts together hold 8.2 million. Without the decoding of the response text, which the
worker does per turn or in a thread.

`ms_128_turns` and `growth_exponent` are of records whose prompts are views of the one array that a
session appends to. `…_copied` are of records with a copy of the prompt each, as they come out of a
file: every copy has to be read once, so that figure grows with the size of the input, not with the
length of the trajectory. The exponents are least-squares slopes of log(ms) over log(tokens).
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np

from worker.tito.merge import TurnRecord, merge_turns

SAMPLED, OBSERVED = 750, 250
SIZES = (32, 64, 128, 256)
COPIED_SIZES = (32, 64, 128)


def records(turns: int, *, copied: bool) -> list[TurnRecord]:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 151_000, turns * (SAMPLED + OBSERVED), dtype=np.int32)
    made = []
    for turn in range(turns):
        start = turn * (SAMPLED + OBSERVED) + OBSERVED
        prompt = tokens[:start]
        made.append(
            TurnRecord(
                prompt_ids=prompt.copy() if copied else prompt,
                output_ids=tokens[start : start + SAMPLED].copy(),
                log_probs=-rng.random(SAMPLED, dtype=np.float32),
                versions=[(turn // 16, 0, SAMPLED)],
                rid=f"{turn:032x}",
                metadata={"lifecycle": {"turn": turn}},
            )
        )
    return made


def milliseconds(turns: int, *, copied: bool, rounds: int = 25) -> float:
    """Return the median time of one merge."""
    made = records(turns, copied=copied)
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        merged = merge_turns(made)
        taken.append((time.perf_counter() - start) * 1e3)
        assert merged.num_turns == turns
    return sorted(taken)[rounds // 2]


def exponent(figures: dict[int, float]) -> float:
    xs, ys = [math.log(n) for n in figures], [math.log(ms) for ms in figures.values()]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    rise = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return rise / sum((x - x_mean) ** 2 for x in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description="the merge of 128 turns, 128k tokens")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    asked = parser.parse_args()
    shared = {n: milliseconds(n, copied=False) for n in SIZES}
    copied = {n: milliseconds(n, copied=True, rounds=9) for n in COPIED_SIZES}
    result = {
        "ms_128_turns": round(shared[128], 3),
        "growth_exponent": round(exponent(shared), 3),
        "ms_128_turns_copied": round(copied[128], 3),
        "growth_exponent_copied": round(exponent(copied), 3),
    }
    if asked.json:
        print(json.dumps({"benchmark": "merge", **result}))
        return
    for turns, ms in shared.items():
        print(f"{turns:4} turns  {turns} k tokens  {ms:7.3f} ms")
    for name, value in result.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
