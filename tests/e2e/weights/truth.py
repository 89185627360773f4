"""What the stand-in must have sampled, computed again: ids, log-probs, versions, seeds, budgets.

Owns a policy of its own. Never asks an engine, a worker or a trainer, and takes nothing that a
sample says of itself for granted but two things that it tests: a call's seed, which must be the one
that run, group, member and turn give; and a token's weight version, under which alone its log-prob
is what was delivered. Invariant: a token that is wrong in any way is a finding.

A *turn* here is a run of calls without an observation between them: one reply, however often it was
stopped. Axes: L tokens of a sample, C sampled tokens of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from examples.demo.auditor import contradiction
from rollstream.sample import UNKNOWN_VERSION, Call, Sample, TokenIds
from tests.e2e.weights.findings import Finding, Kind
from tests.e2e.weights.record import Update
from tests.e2e.weights.scenes import MAX_NEW_TOKENS, MAX_RESPONSE, TOKEN_S
from worker.engines.sim.answers import load_answers
from worker.engines.sim.policy import Policy, expected_log_probs, sampled_by
from worker.engines.sim.script import PolicyConfig
from worker.sampling import call_seed

POLICY = PolicyConfig(
    tool_rate=0.9, again_rate=0.5, malformed_rate=0.0, max_sentences=3, split_rate=0.05
)
"""Of the engines too: most samples have several turns."""
UNLIMITED = 1 << 20


@dataclass(slots=True)
class Turn:
    """One reply of a sample."""

    number: int
    calls: list[Call]
    observed: bool
    """An observation stands behind it."""

    @property
    def start(self) -> int:
        return self.calls[0].start

    @property
    def end(self) -> int:
        return self.calls[-1].end


def turns_of(sample: Sample) -> Iterator[Turn]:
    """Yield the turns of a sample, in order."""
    held: list[Call] = []
    number = 0
    for call in sample.calls:
        if held and call.start > held[-1].end:
            yield Turn(number, held, True)
            number, held = number + 1, []
        held.append(call)
    if held:
        yield Turn(number, held, held[-1].end < len(sample.tokens))


def versions_at(call: Call) -> list[int]:
    """Return the recorded version of every sampled token of a call; -2 where none is recorded."""
    found = [-2] * (call.end - call.start)
    for version, start, end in call.versions:
        for at in range(max(start, call.start), min(end, call.end)):
            found[at - call.start] = version
    return found


def least_at(call: Call) -> list[int]:
    """Return which version every sampled token of a call is at least of; -1 where nobody knows.

    A token of no version is of the one before it or of a later one, for the weights of an engine
    only move on while it has a call; where a call begins so, that is the one at its dispatch.
    """
    least, found = call.dispatched_version, []
    for version in versions_at(call):
        least = version if version >= 0 else least
        found.append(least)
    return found


@dataclass(slots=True)
class Truth:
    """Computes samples of one run again."""

    policy: Policy
    run_seed: int
    label_of: Callable[[int], str]
    """Of a version, as the engines call it."""
    newest: int
    """The last version that there was."""
    num_tokens_of: Mapping[str, int] = field(default_factory=dict)
    """rid → how many tokens the engine's own answer had."""
    hidden: Sequence[Update] = ()
    """Updates within which nobody can know which weights sampled a token."""
    flights: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """rid → from when to when an engine had it, on the wall clock."""
    checked: int = 0
    """Tokens."""
    unknown: int = 0
    """Of those, rightly recorded as of no version."""

    @classmethod
    def load(cls, tokenizer: Path, answers: str, run_seed: int,
             label_of: Callable[[int], str], newest: int) -> Truth:  # fmt: skip
        """Read a vocabulary and a table of answers."""
        policy = Policy.load(str(tokenizer), load_answers(answers), POLICY)
        return cls(policy, run_seed, label_of, newest)

    def check(self, sample: Sample, question: str, *, group: str) -> list[Finding]:
        """Return everything that is wrong with one sample.

        Args:
            sample: as it was delivered.
            question: what its row asks.
            group: its group, as Redis names it: seeds depend on it.
        """
        where = f"{group}:{sample.member}"
        broken = contradiction(sample)
        if broken is not None:
            return [Finding(Kind.TOKEN, where, broken)]
        findings: list[Finding] = []
        head = sample.tokens[: sample.prompt_length]
        asked, _, _ = self.policy.vocabulary.read_prompt(head)
        if asked != question:
            findings.append(Finding(Kind.TOKEN, where, f"its tokens ask {asked[:60]!r}"))
        for turn in turns_of(sample):
            place = f"{where} turn {turn.number}"
            findings += self._check_ids(sample, turn, place, group)
            for call in turn.calls:
                findings += self._check_log_probs(sample, call, f"{where} call {call.rid}")
        findings += _over_budget(sample, where)
        return findings

    def _check_ids(self, sample: Sample, turn: Turn, place: str, group: str) -> list[Finding]:
        """Compare a whole reply, over all its calls, with what the policy writes."""

        def wrong(text: str) -> list[Finding]:
            return [Finding(Kind.TOKEN, place, text)]

        head, said = sample.tokens[: turn.start], sample.tokens[turn.start : turn.end]
        if self.policy.vocabulary.opener_end(head) != len(head):
            return wrong("it does not begin right behind a generation prompt")
        seed = call_seed(self.run_seed, _as_redis_names(group), sample.member, turn.number)
        seeds = {call.sampling.get("seed") for call in turn.calls}
        if seeds != {seed}:
            return wrong(f"sampled under the seeds {seeds}, its place gives {seed}")
        script = self._script(head, turn.calls[-1], seed)
        if len(said) > len(script):
            return wrong(f"{len(said)} ids where {len(script)} can have been sampled")
        differs = np.flatnonzero(said != script[: len(said)])
        if len(differs):
            at = int(differs[0])
            return wrong(f"id {at} is {int(said[at])}, {int(script[at])} was sampled")
        ended = turn.observed or turn.calls[-1].finish == "stop"
        if ended and len(said) < len(script):
            return wrong(f"it ends after {len(said)} of {len(script)} ids")
        return []

    def _script(self, head: TokenIds, call: Call, seed: int) -> TokenIds:
        asked = call.sampling | {"seed": seed, "max_new_tokens": UNLIMITED}
        return self.policy.reply(head, asked).ids

    def _check_log_probs(self, sample: Sample, call: Call, place: str) -> list[Finding]:
        """Compare every log-prob with that of the recorded version, bit for bit."""
        count = call.end - call.start
        self.checked += count
        findings: list[Finding] = []
        answered = self.num_tokens_of.get(call.rid)
        if answered is not None and answered != count:
            text = f"{count} of the {answered} ids that the engine answered"
            findings.append(Finding(Kind.TOKEN, place, text, abs(answered - count)))
        if count == 0:
            return findings
        assert sample.rollout_log_probs is not None
        first = call.start - sample.prompt_length
        held = sample.rollout_log_probs[first : first + count]
        heat = float(call.sampling["temperature"])
        recorded, ids = versions_at(call), sample.tokens[: call.end]
        labels = [self.label_of(version) for version in recorded]
        said = expected_log_probs(ids, call.start, temperature=heat, version=labels)
        wrong = np.flatnonzero(said.view("<u4") != np.ascontiguousarray(held).view("<u4"))
        if not len(wrong):
            return findings
        known = [self.label_of(version) for version in range(self.newest + 1)]
        really = sampled_by(ids, call.start, held, known, temperature=heat)
        excused = self._excused(call, recorded, really)
        self.unknown += len(excused)
        wrong = np.array([at for at in wrong.tolist() if at not in excused], dtype=np.int64)
        misnamed = [at for at in wrong.tolist() if really[at] is not None]
        if misnamed:
            at = misnamed[0]
            text = f"id {at} is said to be of {recorded[at]}, it is of {really[at]}"
            findings.append(Finding(Kind.VERSION, place, text, len(misnamed)))
        if len(wrong) > len(misnamed):
            text = "log-probs that no version gives"
            findings.append(Finding(Kind.TOKEN, place, text, len(wrong) - len(misnamed)))
        return findings

    def _excused(
        self, call: Call, recorded: Sequence[int], really: Sequence[str | int | None]
    ) -> frozenset[int]:
        """Return which tokens may have no version: sampled between a push and its name.

        They are of the weights before or behind an update that the engine had this call in, of none
        older than `least_at` says, and no more of them than an engine samples in so long.
        """
        since_s, until_s = self.flights.get(call.rid, (0.0, 0.0))
        met = [one for one in self.hidden if one.asked_s < until_s and since_s < one.done_s]
        shared_s = sum(min(until_s, one.done_s) - max(since_s, one.asked_s) for one in met)
        most = int(shared_s / TOKEN_S) + len(met)
        both = {version for one in met for version in (one.version - 1, one.version)}
        tokens = enumerate(zip(recorded, least_at(call), really, strict=True))
        found = [
            at
            for at, (version, least, label) in tokens
            if version == UNKNOWN_VERSION
            and label in {self.label_of(one) for one in both if one >= least}
        ]
        return frozenset(found[:most])


def _as_redis_names(group: str) -> int | str:
    return int(group) if group.isdecimal() else group


def _over_budget(sample: Sample, where: str) -> list[Finding]:
    """Compare what was asked of the engine with what was left to ask."""
    findings = []
    for turn in turns_of(sample):
        for call in turn.calls:
            left = min(
                MAX_NEW_TOKENS - (call.start - turn.start),
                MAX_RESPONSE - (call.start - sample.prompt_length),
            )
            asked = call.sampling["max_new_tokens"]
            if not 0 < asked <= left:
                text = f"call {call.rid} was asked for {asked} tokens, {left} were left"
                findings.append(Finding(Kind.BUDGET, where, text))
    if sample.response_length > MAX_RESPONSE:
        text = f"{sample.response_length} response tokens"
        findings.append(Finding(Kind.BUDGET, where, text))
    return findings
