"""Proves that what the trainer got is what the engine sampled, without asking either of them.

Owns the comparison: every call of every delivered sample, id for id and log-prob for log-prob.
Never uses anything that the engine or a worker holds in memory: `Recomputed` has a policy and an
answer table of its own, `Recorded` reads the bytes that the workers kept.
Invariant: a finding is counted once per call or sample that is wrong; nothing is repaired.

Axes: L tokens of a sample, P prompt of a call (`tokens[:call.start]`), C its sampled tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rollstream import Call, FinishedGroup, Sample
from rollstream.errors import ContractError
from rollstream.sample import LogProbs, TokenIds
from worker.engines.sim.answers import load_answers
from worker.engines.sim.policy import Policy
from worker.engines.sim.script import PolicyConfig

KEPT_FINDINGS = 20
"""How many findings keep their text; all are counted."""


class Evidence(Protocol):
    """Where the auditor knows from what an engine sampled."""

    name: Literal["recomputed", "wire"]

    def disagreement(
        self,
        call: Call,
        prompt: TokenIds,
        ids: TokenIds,
        log_probs: LogProbs,
        *,
        resumed: bool,
    ) -> str | None:
        """Return how a delivered call differs from what was sampled, None if it does not.

        `resumed`: it begins where the call before it ended, so it continues that one's text.
        """
        ...


@dataclass
class Auditor:
    """Counts what does not agree with the evidence, or contradicts itself."""

    evidence: Evidence
    questions: Mapping[int, str] = field(default_factory=dict)
    """{group_index: the problem's text}, where the auditor can rebuild it."""
    calls: int = 0
    samples: int = 0
    mismatches: int = 0
    findings: list[str] = field(default_factory=list)

    def check(self, groups: Iterable[FinishedGroup]) -> None:
        """Audit every sample of these groups, every leaf of a list included."""
        for group in groups:
            for sample in group.flat():
                self.check_sample(sample)

    def check_sample(self, sample: Sample) -> None:
        """Audit one sample."""
        self.samples += 1
        where = f"{sample.group_index}:{sample.member}"
        found = contradiction(sample)
        asked = self.questions.get(-1 if sample.group_index is None else sample.group_index, "")
        if found is None and asked not in _text(sample.prompt):
            found = "the prompt is another problem than its group's"
        if found is not None:
            self._count(where, found)
            return
        assert sample.rollout_log_probs is not None
        first = behind = sample.prompt_length
        for call in sample.calls:
            self.calls += 1
            found = self.evidence.disagreement(
                call,
                sample.tokens[: call.start],
                sample.tokens[call.start : call.end],
                sample.rollout_log_probs[call.start - first : call.end - first],
                resumed=call.start == behind > first,
            )
            behind = call.end
            if found is not None:
                self._count(f"{where} call {call.rid}", found)

    def _count(self, where: str, what: str) -> None:
        self.mismatches += 1
        if len(self.findings) < KEPT_FINDINGS:
            self.findings.append(f"{where}: {what}")


def contradiction(sample: Sample) -> str | None:
    """Return what within a sample contradicts its own calls, None if nothing does."""
    if not sample.calls or sample.rollout_log_probs is None or sample.loss_mask is None:
        return "no calls, no log-probs or no loss mask"
    try:
        # Lengths and order; mask within the sampled positions; log-probs 0.0 outside of them.
        sample.validate()
    except ContractError as error:
        return str(error)
    if len({call.rid for call in sample.calls}) != len(sample.calls):
        return "a request id occurs twice"
    for call in sample.calls:
        behind = call.start
        for _, start, end in call.versions:
            if start != behind or end < start:
                break
            behind = end
        if behind != call.end:
            return f"versions {call.versions} do not cover call {call.start}..{call.end}"
    return None


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt)


# --- the stand-in: computed again ----------------------------------------------------------------
class Recomputed:
    """Computes again what the stand-in must have sampled: a pure function of seed and prompt."""

    name: Literal["recomputed", "wire"] = "recomputed"

    def __init__(self, tokenizer: Path, answers: str, config: PolicyConfig | None = None) -> None:
        self.policy = Policy.load(str(tokenizer), load_answers(answers), config)

    def disagreement(
        self,
        call: Call,
        prompt: TokenIds,
        ids: TokenIds,
        log_probs: LogProbs,
        *,
        resumed: bool,
    ) -> str | None:
        """Compare; a reply that a fault cut short must be a prefix.

        A reply that says it stopped by itself must be whole, up to an end token that was lost.
        """
        if not resumed and self.policy.vocabulary.opener_end(prompt) != len(prompt):
            return f"its start {call.start} is not right behind a generation prompt"
        said = self.policy.reply(prompt, call.sampling)
        num, whole = len(ids), len(said.ids)
        if num > whole:
            return f"{num} ids where {whole} can have been sampled"
        if call.finish == "stop" and num < whole - 1:
            return f"it stopped after {num} ids, the whole reply has {whole}"
        return _difference(ids, log_probs, said.ids[:num], said.log_probs[:num])


def questions_of(dataset: str, size: int, seed: int, num_groups: int) -> dict[int, str]:
    """Return the problem of every group of an unshuffled reasoning-gym source.

    The rule for `group_index`: epoch x rows + row.
    """
    rows = [str(row["question"]).strip() for row in _dataset(dataset, size, seed)]
    return {index: rows[index % size] for index in range(num_groups)}


def _dataset(name: str, size: int, seed: int) -> Iterable[dict[str, Any]]:
    import reasoning_gym

    data: Iterable[dict[str, Any]] = reasoning_gym.create_dataset(name, size=size, seed=seed)
    return data


# --- any engine: the recorded bytes --------------------------------------------------------------
class Recorded:
    """Reads what the workers recorded: `<rid>.req` and `<rid>.rep` in `debug.wire_dir`."""

    name: Literal["recomputed", "wire"] = "wire"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def disagreement(
        self,
        call: Call,
        prompt: TokenIds,
        ids: TokenIds,
        log_probs: LogProbs,
        *,
        resumed: bool,
    ) -> str | None:
        """Compare with the request's ids and seed, and the reply's ids and log-probs."""
        try:
            request = json.loads((self.folder / f"{call.rid}.req").read_bytes())
            reply = json.loads((self.folder / f"{call.rid}.rep").read_bytes())
            entries = reply["meta_info"].get("output_token_logprobs") or []
            sent = np.array(request["input_ids"], dtype=np.int64)
            seed = request["sampling_params"]["sampling_seed"]
            said = np.array([entry[1] for entry in entries], dtype=np.int64)
            exact = np.array([entry[0] for entry in entries], dtype=np.float64)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            return f"its record cannot be read: {type(error).__name__} {error}"
        if not np.array_equal(sent, prompt):
            return f"{len(sent)} ids were sent, which are not tokens[:{call.start}]"
        if seed != call.sampling.get("seed"):
            return f"the seed {seed} was sent, {call.sampling.get('seed')} is recorded"
        if len(said) != len(ids):
            return f"{len(said)} ids were sampled, {len(ids)} delivered"
        return _difference(ids, log_probs, said, exact.astype(np.float32))


def _difference(ids: Any, log_probs: LogProbs, want_ids: Any, want_probs: LogProbs) -> str | None:
    """Return the first place in which two equally long replies differ, bit for bit.

    Shape: all [C].
    """
    if len(log_probs) != len(ids):
        return f"{len(ids)} ids, {len(log_probs)} log-probs"
    wrong = np.flatnonzero(np.asarray(ids) != want_ids)
    if len(wrong):
        at = int(wrong[0])
        return f"id {at} is {int(ids[at])}, {int(want_ids[at])} was sampled"
    # As bits: -0.0 is not 0.0, and a NaN that was delivered is compared too.
    got_bits = np.ascontiguousarray(log_probs, dtype="<f4").view("<u4")
    wrong = np.flatnonzero(got_bits != np.ascontiguousarray(want_probs, dtype="<f4").view("<u4"))
    if len(wrong):
        at = int(wrong[0])
        return f"log-prob {at} is {log_probs[at]!r}, {want_probs[at]!r} was sampled"
    return None
