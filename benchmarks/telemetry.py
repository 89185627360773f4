"""What telemetry costs a worker for each sample (docs/benchmarks.md).

    python -m benchmarks.telemetry [--json]

A sample of 8 turns (260 sampled and 200 observed tokens each, seven of them answered by a tool) has
18 spans in its record and two that are metrics only; a sample of one turn has 4 and two. They are
timed around nothing as a worker times them (`ended` for calls and tools, `timed` for the rest),
counted when the sample ended and with its group of 8, and flushed with the samples of one second:
64 of 8 turns or 512 of one, which is a core at 512 turns a second. Microseconds of CPU time (other
processes disturb it least), the median of the rounds; `quietest_us` is the best of them. Figures
of the sample of one turn begin with `one_turn_`.

- `us_a_sample`: all of it; `counted_us`: without the recording of its spans.
- `spans_us`: timing and keeping its spans, which the sample carries to the trainer.
- `ended_us`: counting it when it ended: status, turns, tokens, tools, staleness, its spans.
- `judged_us`: its share of counting its group's verdict, rewards, lengths and staleness.
- `flush_us`: its share of the flush, once a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from time import monotonic

import numpy as np

from rollstream.errors import Status, StopReason
from rollstream.group import Leaf, MemberHeader, MemberView
from rollstream.sample import Call, Sample, Span
from worker.telemetry.metrics import Metrics
from worker.telemetry.spans import SpanList, timed

TURNS, SAMPLED, OBSERVED, PROMPT = 8, 260, 200, 400
GROUP = 8
A_SECOND = 512
"""Turns between two flushes."""
SECONDS, ROUNDS = 8, 41
VERSION = 7
ATTEMPT = {"attempt_start": 1e9, "gen_start": 1e9, "attempt_end": 1e9 + 60}
PARTS = ("spans", "ended", "judged", "flush")
BUDGET_US = 8.0


def a_sample(turns: int = TURNS) -> Sample:
    """Return a sample as multi_turn leaves it."""
    sample = Sample(group_index=3, member=0, index=3 << 12, rollout_id=3 << 12, prompt="")
    length = turns * SAMPLED + (turns - 1) * OBSERVED
    sample.tokens = np.arange(PROMPT + length, dtype=np.int32)
    sample.response_length = length
    sample.loss_mask = np.zeros(length, np.uint8)
    for turn in range(turns):
        start = PROMPT + turn * (SAMPLED + OBSERVED)
        end = start + SAMPLED
        sample.loss_mask[start - PROMPT : end - PROMPT] = 1
        versions = [(VERSION - 1, start, end)]
        sample.calls.append(Call(f"{turn:032x}", "http://e", start, end, "stop", versions))
    sample.metadata |= {"tool_calls_ok": turns - 1, "attempt": ATTEMPT, "final_text": "7"}
    sample.prefix_cache_info.total_prompt_tokens = 9000
    sample.prefix_cache_info.cached_tokens = 7000
    sample.finish(StopReason.STOP, Status.COMPLETED)
    return sample


def its_spans(turns: int = TURNS) -> list[Span]:
    """Time nothing, as often as a sample's parts are timed, and as those are."""
    spans = SpanList()
    spans.record("queue_wait", -1, 1.0e9, 0.25)
    for turn in range(turns):
        start_mono_s = monotonic()
        try:
            pass  # the call
        except BaseException as error:
            spans.ended("generate", turn, start_mono_s, error)
            raise
        spans.ended("generate", turn, start_mono_s)
        if turn == turns - 1:
            break
        start_mono_s = monotonic()
        try:
            pass  # its tools
        except BaseException as error:
            spans.ended("tool", turn, start_mono_s, error)
            raise
        spans.ended("tool", turn, start_mono_s)
    with timed(spans, "merge"):
        pass
    with timed(spans, "reward"):
        pass
    return spans.spans


def its_view(member: int, turns: int = TURNS) -> MemberView:
    length = turns * SAMPLED
    leaf = Leaf(
        Status.COMPLETED, StopReason.STOP, 1.0, length, length, length, length,
        (VERSION - 1, VERSION - 1),
    )  # fmt: skip
    return MemberView(member, MemberHeader(False, [leaf], turns), 1.0, True)


def cpu_us(work: Callable[[], object]) -> float:
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / 1e3


def a_round(metrics: Metrics, samples: list[Sample], turns: int) -> dict[str, float]:
    """Return microseconds a sample, by part."""
    taken = dict.fromkeys(PARTS, 0.0)
    views = [its_view(member, turns) for member in range(GROUP)]

    def recorded() -> None:
        for sample in samples:
            sample.spans = its_spans(turns)

    def ended() -> None:
        for sample in samples:
            metrics.sample_ended(
                "default", StopReason.STOP, [sample], delivered=True, version=VERSION
            )
            metrics.span("submit", 0.002)

    def judged() -> None:
        for _ in range(0, len(samples), GROUP):
            metrics.group_judged("default", None)
            for _ in range(GROUP):
                metrics.span("group_wait", 1.5)
            metrics.outcomes.members_judged("default", views, is_kept=True, version=VERSION)

    works = (recorded, ended, judged, metrics.flush)
    for _ in range(SECONDS):
        for part, work in zip(PARTS, works, strict=True):
            taken[part] += cpu_us(work)
    return {part: us / (SECONDS * len(samples)) for part, us in taken.items()}


def measured(turns: int) -> dict[str, float]:
    """Return the figures of one kind of sample."""
    metrics = Metrics(version="0", wire=1, envs=["default"])
    samples = [a_sample(turns) for _ in range(A_SECOND // turns)]
    rounds = [a_round(metrics, samples, turns) for _ in range(ROUNDS)]
    totals = [sum(found.values()) for found in rounds]
    counted = [total - found["spans"] for total, found in zip(totals, rounds, strict=True)]
    assert metrics.guard.num_failures == 0
    return {
        "us_a_sample": round(statistics.median(totals), 2),
        "quietest_us": round(min(totals), 2),
        "counted_us": round(statistics.median(counted), 2),
        **{f"{p}_us": round(statistics.median(r[p] for r in rounds), 2) for p in PARTS},
        "spans": len(samples[0].spans) + 2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="telemetry of one sample")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    asked = parser.parse_args()
    result: dict[str, float] = {"budget_us": BUDGET_US}
    result |= measured(TURNS)
    result |= {f"one_turn_{name}": value for name, value in measured(1).items()}
    if asked.json:
        print(json.dumps({"benchmark": "telemetry", **result}))
        return
    for name, value in result.items():
        print(f"{name:22} {value}")


if __name__ == "__main__":
    main()
