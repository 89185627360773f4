"""How long the merge of many turns takes, and how that grows (docs/benchmarks.md).

    python -m benchmarks.merge [--json]

Turns of 750 sampled and 250 observed tokens, 1,000 a turn, so 128 turns hold 128k tokens; the
records' prompts together hold 8.2 million. Without the decoding of the response text, which the
worker does per turn or in a thread. Milliseconds are CPU time, which other processes disturb least;
the exponents are least-squares slopes of log(ms) over log(tokens).

- `shared`: prompts are views of the one array that a session appends to.
- `copied`: a copy of the prompt each, as they come out of a file. Each has to be read once, so
  this grows with the size of the input, not with the length of the trajectory.
- `replay`: as `shared`, with rows of routed experts: a delta a turn, 8 layers x 4 experts in int32
  (128 bytes a token), copied once into one array.
- `keep_prefix`, `fork`: as `shared`, but the client rewrote the history half way; by the policy.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np

from worker.tito.divergence import resolve
from worker.tito.merge import TurnRecord, merge_turns
from worker.types import DivergencePolicy, Replay

SAMPLED, OBSERVED = 750, 250
LAYERS, TOP_K = 8, 4
SIZES = (32, 64, 128, 256)
COPIED_SIZES = (32, 64, 128)


def records(
    turns: int, *, copied: bool = False, replay: bool = False, rewritten: bool = False
) -> list[TurnRecord]:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 151_000, turns * (SAMPLED + OBSERVED), dtype=np.int32)
    made = []
    for turn in range(turns):
        if rewritten and turn == turns // 2:
            tokens = tokens.copy()
            tokens[OBSERVED // 2] ^= 1
        start = turn * (SAMPLED + OBSERVED) + OBSERVED
        prompt = tokens[:start]
        held = 0 if turn == 0 else start - OBSERVED - 1
        made.append(
            TurnRecord(
                prompt_ids=prompt.copy() if copied else prompt,
                output_ids=tokens[start : start + SAMPLED].copy(),
                log_probs=-rng.random(SAMPLED, dtype=np.float32),
                versions=[(turn // 16, 0, SAMPLED)],
                rid=f"{turn:032x}",
                metadata={"lifecycle": {"turn": turn}},
                routed_experts=_rows(held, start + SAMPLED - 1) if replay else None,
            )
        )
    return made


def _rows(start: int, end: int) -> Replay:
    return Replay(start, np.full((end - start, LAYERS, TOP_K), 3, np.int32))


def milliseconds(
    turns: int, policy: DivergencePolicy | None = None, rounds: int = 25, **kind: bool
) -> float:
    """Return the median CPU time of one merge; through `resolve` where a policy is given."""
    made = records(turns, rewritten=policy is not None, **kind)
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        if policy is None:
            num_turns = merge_turns(made).num_turns
        else:
            num_turns = resolve(made, policy).merged[-1].num_turns
        taken.append((time.process_time() - start) * 1e3)
        assert num_turns == (turns if policy is None else turns - turns // 2)
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
    shared = {n: milliseconds(n) for n in SIZES}
    others = {
        "copied": {n: milliseconds(n, rounds=9, copied=True) for n in COPIED_SIZES},
        "replay": {n: milliseconds(n, replay=True) for n in SIZES},
        "keep_prefix": {n: milliseconds(n, DivergencePolicy.KEEP_PREFIX) for n in SIZES},
        "fork": {n: milliseconds(n, DivergencePolicy.FORK) for n in SIZES},
    }
    result = {
        "ms_128_turns": round(shared[128], 3),
        "growth_exponent": round(exponent(shared), 3),
    }
    for name, figures in others.items():
        result[f"ms_128_turns_{name}"] = round(figures[128], 3)
        result[f"growth_exponent_{name}"] = round(exponent(figures), 3)
    if asked.json:
        print(json.dumps({"benchmark": "merge", **result}))
        return
    for turns, ms in shared.items():
        print(f"{turns:4} turns  {turns} k tokens  {ms:7.3f} ms")
    for name, value in result.items():
        print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
