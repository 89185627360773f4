"""The order of the proof: roll out twice, then hold every sample against its three witnesses.

Owns the order and what belongs together. Never prints. Invariant: what is judged is what a trainer
got; a damage is done between the two, and to the samples alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from examples.devserver import DevServer
from rollstream.sample import Sample, TokenIds
from tests.e2e.fidelity.breaks import BREAKS, OF_ENGINE, Text
from tests.e2e.fidelity.check import Finding, check_log_probs, check_sample
from tests.e2e.fidelity.cut import cut_findings, refusal
from tests.e2e.fidelity.direct import Direct
from tests.e2e.fidelity.merges import check_merges
from tests.e2e.fidelity.options import (
    SAMPLES_A_GROUP,
    TEMPERATURES,
    TOLERANCE,
    TOP_P,
    VOCABULARY,
    Options,
)
from tests.e2e.fidelity.report import Report
from tests.e2e.fidelity.rows import as_rows, prompts
from tests.e2e.fidelity.service import run_service
from tests.e2e.fidelity.stage import EngineControl, Service, Weights, engine
from tests.e2e.fidelity.teacher import Teacher, exam_of
from tests.e2e.fidelity.wire import WireCall, WireFolder

CUT_GROUPS, CUT_SAMPLES, CUT_TURNS = 4, 1, 2
"""Few: a cut over 152k ids costs the engine a sort of them a token."""
ENGINE_READY_S = 90.0
Say = Callable[[str], None]


@dataclass(slots=True)
class Rollouts:
    """What there is to be judged."""

    weights: Weights
    samples: list[Sample] = field(default_factory=list)
    cut: list[Sample] = field(default_factory=list)
    """Of top_p = 0.9."""
    wires: list[WireFolder] = field(default_factory=list)

    def find(self, rid: str) -> WireCall | None:
        """Return what went over HTTP for one call."""
        return next((call for wire in self.wires if (call := wire.call(rid)) is not None), None)


def roll_out(options: Options, folder: Path, report: Report, say: Say) -> Rollouts:
    """Run both halves over one engine, and count what happened to them."""
    with _timed("models", report, say):
        rollouts = Rollouts(Weights(folder, options.seed))
    stage = _Stage(options, folder, rollouts, report, say)
    mode = "raw" if options.damage in OF_ENGINE else "temperature"
    process, url = engine(folder, rollouts.weights, seed=options.seed, logprob_mode=mode)
    control = EngineControl(url, rollouts.weights)
    with DevServer(aof=True) as server:
        try:
            process.start()
            process.wait_ready(ENGINE_READY_S)
            # First the cut, under the first weights, before anything is disturbed.
            for name, run in (("top_p", stage.cut), ("service", stage.service)):
                with _timed(name, report, say):
                    run(server.url, control)
            with _timed("direct", report, say):
                stage.direct(control)
        finally:
            process.ask_to_stop()
            process.wait_or_kill(10.0)
    report.versions = control.version + 1
    report.aborted = sum(wire.aborted() for wire in rollouts.wires)
    return rollouts


@dataclass(slots=True)
class _Stage:
    """The three runs over one engine."""

    options: Options
    folder: Path
    rollouts: Rollouts
    report: Report
    say: Say

    def cut(self, redis_url: str, control: EngineControl) -> None:
        """Be refused, then be permitted and marked."""
        cut = {"top_p": TOP_P}
        refused = refusal(self._service("refused", redis_url, control, (1, 1), sampling=cut))
        self.report.top_p_refused = refused.is_one
        self.say(f"top_p = {TOP_P}: a worker ends with exit code {refused.exit_code}:")
        self.say(refused.sentence)
        permitted = cut | {"allow_off_distribution": True}
        allowed = self._service(
            "cut", redis_url, control, (CUT_GROUPS, CUT_SAMPLES), workers=1, max_turns=CUT_TURNS,
            sampling=permitted,
        )  # fmt: skip
        self.rollouts.cut = run_service(allowed, redis_url, None, CUT_GROUPS).samples

    def service(self, redis_url: str, control: EngineControl) -> None:
        """The first half."""
        groups = self.options.groups
        service = self._service("service", redis_url, control, (groups, SAMPLES_A_GROUP))
        delivered = run_service(service, redis_url, control, groups)
        self.rollouts.samples += delivered.samples
        self.rollouts.wires.append(WireFolder(service.wire_dir))
        self.report.service_samples = len(delivered.samples)
        self.report.service_token_mismatches = delivered.token_mismatches

    def direct(self, control: EngineControl) -> None:
        """The second half."""
        from worker.tito.load import load_renderer

        wire_dir, seed = self.folder / "direct-wire", self.options.seed
        direct = Direct(load_renderer(VOCABULARY, "qwen3"), control, wire_dir, seed)
        found = asyncio.run(direct.run(prompts(self.options.groups, seed + 1)))
        self.rollouts.samples += found.samples
        self.rollouts.wires.append(WireFolder(wire_dir))

    def _service(
        self, name: str, redis_url: str, control: EngineControl, size: tuple[int, int], **how: Any
    ) -> Service:
        seed = self.options.seed
        rows = as_rows(size[0], seed, TEMPERATURES, size[1])
        return Service(
            self.folder / name, run=name, redis_url=redis_url, engine_url=control.url, rows=rows,
            seed=seed, **how,
        )  # fmt: skip


def judge(rollouts: Rollouts, report: Report, damage: str | None, say: Say) -> list[Finding]:
    """Compare every sample with its witnesses, and return what differs.

    Args:
        rollouts: left as they are.
        report: gets the counts.
        damage: is done to each sample first.
        say: for people.
    """
    samples = rollouts.samples
    if damage in BREAKS:
        samples = [BREAKS[damage](sample, Text(encode, decode)) for sample in samples]
    findings: list[Finding] = []
    with _timed("checks", report, say):
        for sample in samples:
            report.count(sample, encode, decode)
            wires = {call.rid: rollouts.find(call.rid) for call in sample.calls}
            findings += check_sample(sample, wires.get, decode)
            findings += check_merges(sample, wires.get, decode)
            report.merged += 2
    with _timed("teacher", report, say):
        teacher = Teacher(rollouts.weights.of)
        findings += _taught(samples, teacher, report)
        found = cut_findings(rollouts.cut, teacher)
    report.add(findings)
    report.top_p_samples, report.top_p_unmarked = found.samples, found.unmarked
    report.top_p_max_difference, report.top_p_wrong = found.max_difference, found.wrong
    return findings


def _taught(samples: Sequence[Sample], teacher: Teacher, report: Report) -> list[Finding]:
    exams = [exam_of(sample) for sample in samples]
    findings: list[Finding] = []
    for sample, exam, said in zip(samples, exams, teacher.log_probs(exams), strict=True):
        distance = check_log_probs(sample, exam.positions, said, TOLERANCE)
        report.checked_tokens += distance.checked
        report.max_abs_difference = max(report.max_abs_difference, distance.largest)
        findings += distance.findings
    return findings


@lru_cache(maxsize=1)
def _tokenizer() -> Any:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(VOCABULARY))


def encode(text: str) -> list[int]:
    """Return the ids of a text, control strings as their ids."""
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: Sequence[int] | TokenIds) -> str:
    """Return the text of ids, special tokens kept."""
    text: str = _tokenizer().decode(list(ids), skip_special_tokens=False)
    return text


@contextmanager
def _timed(name: str, report: Report, say: Say) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        report.seconds[name] = time.monotonic() - start
        say(f"{name}: {report.seconds[name]:.1f} s")
