"""`doctor --logprobs N`: finished samples of a run, scored again by the user's own engine.

Owns which samples are taken and how the engine is asked. Never takes a group from anybody, never
writes to the run: it reads stream entries and bodies that stay where they are. Invariant: at most
one group is held at a time, and what could not be scored is counted and told.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from rollstream import rescore
from rollstream.cli.direct import open_direct
from rollstream.errors import WireError
from rollstream.queue.fetch import weight_of
from rollstream.sample import UNKNOWN_VERSION, Sample
from rollstream.trainer.assemble import assemble

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue
    from rollstream.queue.reads import RunInfo, StreamEntry

STREAMS = ("ready", "full")
"""`ready` first: what the trainer gets or has in hand; then what is not judged yet."""
MAX_ENTRIES = 1000
MAX_GROUP_BYTES = 256 << 20
"""A larger group is left out: it would be held as a whole."""
MAX_ANSWER_BYTES = 64 << 20
ASK_TIMEOUT_S = 120.0
_MAX_ERROR_CHARS = 160


@dataclass(slots=True)
class Chosen:
    """What was read of the run."""

    samples: list[tuple[Sample, int | None]] = field(default_factory=list)
    """With its place among the leaves of its trajectory."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Groups and samples by why they were left out."""


def rescored(queue: BlockingQueue, info: RunInfo, engine: str, limit: int) -> dict[str, Any]:
    """Return what `limit` samples of the run show against a prefill of `engine`.

    The answer is plain data; its `problems` are sentences, empty where all is well.
    """
    chosen = choose(queue, info, limit)
    comparisons: list[rescore.Comparison] = []
    failed = Counter[str]()
    for sample, leaf in chosen.samples:
        try:
            reply = ask(engine, sample)
            scored = rescore.scores_of(sample, reply)
        except (OSError, ValueError) as error:
            failed[str(getattr(error, "reason", error))[:_MAX_ERROR_CHARS]] += 1
            if isinstance(error, OSError) and not comparisons:
                break  # nobody answers: the others would wait as long
            continue
        label = reply["meta_info"].get("weight_version")
        served = rescore.served_version(
            label, current=info.version, current_label=info.version_label
        )
        comparisons.append(rescore.compare(sample, scored, served=served, leaf=leaf))
    summary = rescore.summarise(comparisons, failed)
    versions = sorted({c.served for c in comparisons} - {UNKNOWN_VERSION})
    return {
        "engine": engine, "served_versions": versions, "chosen": len(chosen.samples),
        "skipped": dict(chosen.skipped),
    } | asdict(summary)  # fmt: skip


def choose(queue: BlockingQueue, info: RunInfo, limit: int) -> Chosen:
    """Read finished samples, newest groups first, until there are `limit`."""
    chosen = Chosen()
    for entry in _entries(queue):
        weight = weight_of(entry)
        if weight is None or weight > MAX_GROUP_BYTES:
            chosen.skipped["groups too large to hold"] += 1
            continue
        for sample, leaf in _samples_of(queue, info, entry, chosen.skipped):
            chosen.samples.append((sample, leaf))
            if len(chosen.samples) == limit:
                return chosen
    return chosen


def _entries(queue: BlockingQueue) -> Iterator[StreamEntry]:
    for stream in STREAMS:
        yield from queue.newest(stream, MAX_ENTRIES)


def _samples_of(
    queue: BlockingQueue, info: RunInfo, entry: StreamEntry, skipped: Counter[str]
) -> Iterator[tuple[Sample, int | None]]:
    (stored,) = queue.groups([(entry.group_index, entry.n)])
    try:
        if not stored.state or not stored.group_index.isdecimal():
            skipped["groups gone meanwhile"] += 1
            return
        group, _ = assemble(stored, info.envs)
    except WireError:
        skipped["groups that cannot be read"] += 1
        return
    for trajectory in group.samples:
        leaves = trajectory if isinstance(trajectory, list) else [trajectory]
        for place, sample in enumerate(leaves):
            if rescore.can_score(sample):
                yield sample, place if len(leaves) > 1 else None
            else:
                skipped["samples without log-probs"] += 1


def ask(engine: str, sample: Sample) -> dict[str, Any]:
    """Return the engine's answer to one sample.

    Raises:
        OSError: nobody answers (an HTTP error is one, too).
        ValueError: the answer is no JSON object, or the engine's refusal.
    """
    request = urllib.request.Request(
        f"{engine.rstrip('/')}/generate",
        data=json.dumps(rescore.request_of(sample)).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with open_direct(request, timeout=ASK_TIMEOUT_S) as answer:
            raw = answer.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(4 * _MAX_ERROR_CHARS).decode(errors="replace")
        raise ValueError(f"status {error.code}: {text}") from None
    reply = json.loads(raw)
    if not isinstance(reply, dict):
        raise ValueError(f"the engine answered {str(reply)[:_MAX_ERROR_CHARS]}")
    return reply


def table(found: dict[str, Any]) -> Iterator[str]:
    """Yield what was found as lines for people."""
    served = ", ".join(map(str, found["served_versions"])) or "unknown"
    yield (
        f"log-probs: {found['samples']} samples scored by {found['engine']} "
        f"(weight version {served}), {found['compared']} positions compared"
    )
    yield f"  {'version':>8} {'':8} {'positions':>10} {'p50':>9} {'p99':>9} {'max':>9}"
    for row in found["rows"]:
        version = "unknown" if row["version"] == UNKNOWN_VERSION else row["version"]
        yield (
            f"  {version:>8} {row['relation']:8} {row['positions']:>10} {row['p50']:>9.5f} "
            f"{row['p99']:>9.5f} {row['max']:>9.5f}"
        )
    if any(row["relation"] != "same" for row in found["rows"]):
        yield "  rows of another version than the engine's say nothing about it"
    recorded = ", ".join(found["recorded_modes"]) or "none"
    yield f"  mode: {found['mode']} ({found['mode_why']}); recorded: {recorded}"
    for why, count in found["not_comparable"].items():
        yield f"  not comparable: {count} positions ({why})"
    for why, count in found["skipped"].items():
        yield f"  left out: {count} {why}"
    first = found["first"]
    if first is not None:
        yield (
            f"  first above {rescore.P99_LIMIT}: sample {first['sample']}, token "
            f"{first['position']}, id {first['id']}: sampled {first['sampled']:.5f}, prefill "
            f"{first['scored']:.5f}"
        )
