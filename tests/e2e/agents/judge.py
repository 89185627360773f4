"""What became of every prompt, session, reply and token of a scene, from its record alone.

Owns the meaning of every figure. Never talks to anybody. Invariant: the agents' journals, the
engines' doors and the trainer's samples are three witnesses; what two of them say and the third
does not is a finding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rollstream.sample import Call, Sample
from tests.e2e.agents.findings import Finding, Wrong
from tests.e2e.agents.model import Seen, Session, must_train, read_session
from tests.e2e.agents.record import Attempt, EngineCall, HandedMember, Record
from tests.e2e.agents.scenes import SAMPLES_A_GROUP, WENT_ON
from tests.e2e.agents.truth import OPENER, Reply, Truth

FREE_REASONS = frozenset({"seen", "run_aborted"})
"""Drops that leave their id free to come again: they end a group, and explain nothing."""
LATE_S = 1.0
"""How long behind the end of its agent a call may begin at an engine that is slow to take it."""


def judge(record: Record, truth: Truth) -> list[Finding]:
    """Return everything that is wrong with a scene."""
    truth.attribute(record)
    calls: dict[str, list[EngineCall]] = defaultdict(list)
    for call in record.engine_calls.values():
        calls[call.nonce].append(call)
    findings = [*_groups(record), *_twice(record), *_accounts(record)]
    for attempt in record.attempts.values():
        findings += _after_end(attempt, calls[attempt.nonce])
    for group, member in record.members():
        where = f"{group}:{member.member}"
        attempt = record.attempts.get(str(member.samples[0].metadata.get("nonce")))
        if attempt is None or (attempt.group, attempt.member) != (group, member.member):
            findings.append(Finding(Wrong.ODD, where, "nobody knows which attempt it is of"))
            continue
        trial = Trial(record, truth, where, member, attempt, calls[attempt.nonce])
        findings += trial.findings()
    return findings


# --- groups --------------------------------------------------------------------------------------
def _groups(record: Record) -> Iterator[Finding]:
    acked = set(record.acked)
    dropped = {drop.group for drop in record.drops if drop.reason not in FREE_REASONS}
    for number in range(record.scene.groups):
        if str(number) not in acked | dropped:
            yield Finding(Wrong.LOST, str(number), "neither acked nor dropped for a reason")
    for what, count in record.left.items():
        yield Finding(Wrong.LOST, what, f"{count} left when the run was over", count)
    for drop in record.drops:
        yield Finding(Wrong.DROP, drop.group, f"dropped: {drop.reason} {drop.detail}")
    for group in record.handed:
        for missing in group.missing:
            yield Finding(Wrong.DROP, group.group, f"a member is missing: {missing}")


def _twice(record: Record) -> Iterator[Finding]:
    handed = Counter(group.group for group in record.handed)
    for what, counts in (("handed out", handed), ("acked", Counter(record.acked))):
        for group, count in counts.items():
            if count > 1:
                yield Finding(Wrong.TWICE, group, f"{what} {count} times", count - 1)
    for group in record.handed:
        members = Counter(one.member for one in group.members)
        for member, count in members.items():
            if count > 1 or not 0 <= member < SAMPLES_A_GROUP:
                text = f"member {member} is in it {count} times"
                yield Finding(Wrong.TWICE, group.group, text)
    trained: Counter[str] = Counter()
    for _, one in record.members():
        for sample in one.samples:
            trained.update(call.rid for call in sample.calls if trains(sample, call))
    for rid, count in trained.items():
        if count > 1:
            yield Finding(Wrong.TWICE, rid, f"it trains in {count} samples", count - 1)


def trains(sample: Sample, call: Call) -> bool:
    """Return whether a loss is taken on any token of a call."""
    assert sample.loss_mask is not None
    first = sample.prompt_length
    return bool(sample.loss_mask[call.start - first : call.end - first].any())


def _accounts(record: Record) -> Iterator[Finding]:
    if record.accounting_difference:
        text = "enqueued is not acked + dropped + live"
        yield Finding(Wrong.ACCOUNT, "audit", text, record.accounting_difference)
    for problem in record.audit_problems:
        yield Finding(Wrong.ACCOUNT, "audit", problem)
    for finding in record.findings:
        yield Finding(Wrong.ODD, record.scene.name, finding)


def _after_end(attempt: Attempt, calls: Iterable[EngineCall]) -> Iterator[Finding]:
    """Find calls that were made for an agent that had ended, or that none may be made for."""
    if attempt.stopped == WENT_ON:
        yield Finding(Wrong.ODD, attempt.nonce, WENT_ON)
    if attempt.ended_s is None:
        return
    for call in calls:
        if call.started_s > attempt.ended_s + LATE_S:
            late_s = call.started_s - attempt.ended_s
            text = f"call {call.rid} began {late_s:.2f} s behind its agent's end"
            yield Finding(Wrong.ODD, attempt.nonce, text)


# --- one trajectory ------------------------------------------------------------------------------
@dataclass
class Trial:
    """One trajectory that was handed out, held against its agent's journal and its engines."""

    record: Record
    truth: Truth
    where: str
    member: HandedMember
    attempt: Attempt
    calls: list[EngineCall]
    session: Session = field(init=False)
    replies: list[Reply] = field(init=False)

    def findings(self) -> Iterator[Finding]:
        """Yield everything that is wrong with it."""
        self.session = read_session(self.attempt)
        self.replies = self.truth.replies(self.calls)
        yield from self._shape()
        yield from self._tokens()
        for text in self.session.problems:
            yield self._wrong(Wrong.TOKEN, text)
        for text in self.session.lost_retries:
            yield self._wrong(Wrong.RETRY, text)
        told = {node.id: list(self._sampled_for(node)) for node in self.session.nodes}
        for node in self.session.nodes:
            if not told[node.id]:
                text = f"reply {node.said.id}: no engine sampled what its client read"
                yield self._wrong(Wrong.TOKEN, text)
        yield from self._kept(told)
        yield from self._accounts()

    def _wrong(self, kind: Wrong, text: str, count: int = 1) -> Finding:
        return Finding(kind, f"{self.where} ({self.attempt.nonce})", text, count)

    def _shape(self) -> Iterator[Finding]:
        scene, samples = self.record.scene, self.member.samples
        is_list = scene.kind == "tree" or len(samples) > 1
        if self.member.is_list != is_list:
            yield self._wrong(Wrong.POLICY, "a list where one sample belongs, or the other way")
        if len({sample.rollout_id for sample in samples}) != 1:
            yield self._wrong(Wrong.POLICY, "its leaves have several rollout ids")
        if len({sample.metadata.get("nonce") for sample in samples}) != 1:
            yield self._wrong(Wrong.POLICY, "its leaves are of several attempts")
        order = [len(sample.calls) for sample in samples]
        tree = [sample.metadata.get("tree", {}) for sample in samples]
        paths = [len(one["path"]) for one in tree if "path" in one]
        if len(paths) == len(order) and paths != sorted(paths, reverse=True):
            yield self._wrong(Wrong.POLICY, f"paths of {paths} replies are not in order")

    # --- tokens ----------------------------------------------------------------------------------
    def _tokens(self) -> Iterator[Finding]:
        """Hold every call of its samples against what an engine was sent and sampled."""
        known = {call.rid: call for call in self.calls}
        for number, sample in enumerate(self.member.samples):
            for call in sample.calls:
                seen = known.get(call.rid)
                place = f"sample {number} call {call.rid}"
                if seen is None or not seen.is_whole:
                    yield self._wrong(Wrong.TOKEN, f"{place}: no engine answered it for this agent")
                    continue
                text = self.truth.contradiction(sample, call, seen)
                if text is not None:
                    yield self._wrong(Wrong.TOKEN, f"{place}: {text}")
            if sample.calls and sample.calls[-1].end != len(sample.tokens):
                yield self._wrong(Wrong.TOKEN, f"sample {number} goes on behind its last reply")

    def _sampled_for(self, node: Seen) -> Iterator[Reply]:
        """Yield the replies of engines that can be what a client read for one request."""
        for reply in self.replies:
            if reply.words == node.words and shows(reply.prompt_text, node):
                yield reply

    # --- what is kept ----------------------------------------------------------------------------
    def _kept(self, told: dict[int, list[Reply]]) -> Iterator[Finding]:
        """Hold what is trained against what its client went on with, and the session's policy."""
        scene, samples = self.record.scene, self.member.samples
        held = [{call.rid for call in sample.calls} for sample in samples]
        trained = {c.rid for s in samples for c in s.calls if trains(s, c)}
        kept = set().union(*held)
        must = must_train(self.session, scene)
        explained: set[str] = set()
        for node in must:
            rids = [reply.rids for reply in told[node.id]]
            explained.update(rid for one in rids for rid in one)
            if rids and not any(set(one) <= mine for one in rids for mine in held):
                yield self._wrong(Wrong.LOST, f"reply {node.said.id} is in none of its samples")
        empty = {c.rid for sample in samples for c in sample.calls if c.end == c.start}
        for rid in sorted(kept - trained - empty):
            yield self._wrong(Wrong.LOST, f"call {rid} is in a sample and trains nowhere")
        seen = {rid for one in told.values() for reply in one for rid in reply.rids}
        beyond = kept - explained
        for rid in sorted(beyond & seen):
            yield self._wrong(Wrong.POLICY, f"call {rid} is trained, its policy drops it")
        unseen = [r for r in self.replies if set(r.rids) <= beyond - seen]
        unread = sum(t.how == "left" for t in self.attempt.tries)
        if len(unseen) > unread:
            text = f"{len(unseen)} replies are trained that no client read, {unread} were left"
            yield self._wrong(Wrong.POLICY, text)

    # --- accounts --------------------------------------------------------------------------------
    def _accounts(self) -> Iterator[Finding]:
        """Hold the session's own counts against the journal and the engines."""
        stats = self.member.samples[0].metadata.get("agent")
        if not isinstance(stats, dict):
            yield self._wrong(Wrong.ACCOUNT, "the session left no counts")
            return
        tries = self.attempt.tries
        left = sum(t.how in ("left", "") for t in tries)
        lengths = {c.rid: c.end - c.start for sample in self.member.samples for c in sample.calls}
        kept = sum(lengths.values())
        whole = [call for call in self.calls if call.is_whole]
        sampled = sum(call.num_tokens for call in whole)
        committed = sum(1 for _ in self.session.nodes)
        sent = sum(t.how != "unsent" for t in tries)
        # (what, the session says, at least, at most): a client that left saw no end of its request.
        broken = max((call.num_tokens for call in whole), default=0) * left
        claims = [
            ("sampled tokens = kept + dropped", stats["sampled_tokens"],
             kept + stats["dropped_tokens"], kept + stats["dropped_tokens"]),
            ("tokens that engines sent", stats["sampled_tokens"], sampled - broken, sampled),
            ("engine calls", stats["calls"], len(whole) - left, len(whole)),
            ("replies given out", stats["committed"], committed, committed + left),
            ("requests", stats["requests"], sent - left, sent),
            ("requests refused and broken", stats["refused"] + stats["failed"],
             sum(t.how == "got" and t.status >= 400 for t in tries), sent),
        ]  # fmt: skip
        for what, says, least, most in claims:
            if not least <= says <= most:
                off = least - says if says < least else says - most
                text = f"{what}: it says {says}, {least}..{most} happened"
                yield self._wrong(Wrong.ACCOUNT, text, off)


def shows(prompt: str, node: Seen) -> bool:
    """Return whether a prompt shows a request's turns, in order, and no other reply."""
    at = 0
    for turn in node.turns:
        # Line by line: a client reads the model's calls behind its text, wherever they stood.
        for line in turn.text.strip().split("\n" if turn.role == "assistant" else "\0"):
            found = prompt.find(line, at)
            if found < 0:
                return False
            at = found + len(line)
    replies = sum(turn.role == "assistant" for turn in node.turns)
    return prompt.count(OPENER) == replies + 1


def spans(sample: Sample) -> np.ndarray:
    """Return the positions of the response that its calls cover."""
    return np.flatnonzero(sample.sampled_mask())
