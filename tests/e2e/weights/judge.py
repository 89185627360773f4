"""What became of every prompt, group and tool call of a scene, from its record alone.

Owns the meaning of every figure but the tokens' (`truth`). Never talks to anybody. Invariant: a
prompt that is neither acked nor dropped for a reason is lost, whatever counters say.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from rollstream.sample import LossMask, Sample
from tests.e2e.weights.findings import Finding, Kind
from tests.e2e.weights.record import Execution, HandedGroup, Record
from tests.e2e.weights.truth import Truth, least_at, turns_of

FREE_REASONS = frozenset({"seen", "run_aborted"})
"""Drops that leave their id free to come again: they end a group, and explain nothing."""
EXPECTED_REASONS = frozenset({"stale"})
"""No filter, deadline or budget of this configuration ends a group."""
SLOW_S = 0.25
"""How long an engine may take to take in what was sent before a pause."""
_RUN = re.compile(r"\(run ([0-9a-f]{12})\)")

Decode = Callable[[np.ndarray], str]


def judge(record: Record, truth: Truth, question_of: Callable[[int], str],
          decode: Decode) -> list[Finding]:  # fmt: skip
    """Return everything that is wrong with a scene."""
    truth.num_tokens_of = {
        rid: call.num_tokens
        for rid, call in record.engine_calls.items()
        if call.num_tokens is not None
    }
    truth.hidden = [update for update in (*record.updates, *record.failed) if update.hides]
    truth.flights = {
        rid: (call.started_s, call.ended_s)
        for rid, call in record.engine_calls.items()
        if call.ended_s is not None
    }
    findings = [*_lost(record), *_twice(record), *_drops(record), *_accounts(record)]
    findings += _pauses(record)
    for batch in record.handed:
        for group in batch.groups:
            findings += _staleness(record, batch.version, group)
            for sample in group.samples:
                name = str(sample.group_index)
                findings += truth.check(sample, question_of(group.group), group=name)
                findings += _mask(record, sample)
    findings += _evaluations(record, truth, question_of)
    findings += _tools(record, decode)
    return findings


# --- groups --------------------------------------------------------------------------------------
def _lost(record: Record) -> Iterator[Finding]:
    acked = {group for batch in record.acked for group in batch}
    dropped = {d.group for d in record.drops if d.reason not in FREE_REASONS}
    for group in range(record.scene.rows):
        if group not in acked and str(group) not in dropped:
            yield Finding(Kind.LOST, str(group), "neither acked nor dropped for a reason")
    for what, count in record.left.items():
        yield Finding(Kind.LOST, what, f"{count} left when the run was over", count)
    for evaluation in record.evaluations:
        unexplained = evaluation.asked - len(evaluation.samples) - len(evaluation.missing)
        if unexplained > 0:
            text = f"{unexplained} samples neither came nor are named missing"
            yield Finding(Kind.LOST, evaluation.name, text, unexplained)


def _twice(record: Record) -> Iterator[Finding]:
    handed = [group.group for batch in record.handed for group in batch.groups]
    acked = [group for batch in record.acked for group in batch]
    for what, groups in (("handed out", handed), ("acked", acked)):
        for group, count in Counter(groups).items():
            if count > 1:
                yield Finding(Kind.TWICE, str(group), f"{what} {count} times", count - 1)
    for group in sorted(set(acked) - set(handed)):
        yield Finding(Kind.TWICE, str(group), "acked, and never handed out")
    for index, count in Counter(sample.index for sample in record.samples()).items():
        if count > 1:
            yield Finding(Kind.TWICE, f"index {index}", f"{count} samples have it", count - 1)
    for batch in record.handed:
        for one in batch.groups:
            members = [sample.member for sample in one.samples]
            if len(set(members)) < len(members):
                yield Finding(Kind.TWICE, str(one.group), f"its members are {members}")
    rids = Counter(call.rid for sample in record.samples() for call in sample.calls)
    for rid, count in rids.items():
        if count > 1:
            yield Finding(Kind.TWICE, rid, f"the call stands in {count} places", count - 1)


def _drops(record: Record) -> Iterator[Finding]:
    expected = EXPECTED_REASONS if record.scene.on_stale != "deliver" else frozenset()
    for drop in record.drops:
        if drop.group.isdecimal() and drop.reason not in expected:
            yield Finding(Kind.DROP, drop.group, f"dropped: {drop.reason} {drop.detail}")
    for batch in record.handed:
        for group in batch.groups:
            for reason in group.missing:
                yield Finding(Kind.DROP, str(group.group), f"a member is missing: {reason}")


def _accounts(record: Record) -> Iterator[Finding]:
    if record.accounting_difference:
        text = "enqueued is not acked + dropped + live"
        yield Finding(Kind.ACCOUNT, "audit", text, record.accounting_difference)
    for problem in record.audit_problems:
        yield Finding(Kind.ACCOUNT, "audit", problem)
    for finding in record.findings:
        yield Finding(Kind.ODD, record.scene.name, finding)


def _pauses(record: Record) -> Iterator[Finding]:
    """Find calls that an engine got, or still had, while everybody had confirmed that none is made.

    `keep` permits those that were sent before, which an engine may be slow to take in.
    """
    # Without those of nobody: the questions about log-probs, and what a killed worker left. Where
    # the GPUs are the trainer's, those too.
    is_shared = record.scene.weights_mode == "colocated"
    calls = [call for rid, call in record.engine_calls.items() if is_shared or rid in record.pid_of]
    for update in record.updates:
        stops = update.mode == "abort"
        since = update.entered_s + (0.0 if stops else SLOW_S)
        for call in calls:
            if since < call.started_s < update.left_s:
                text = f"came {1000 * (call.started_s - update.entered_s):.0f} ms into it"
            elif stops and call.started_s <= since < (call.ended_s or 0.0):
                text = "was in flight when it began"
            else:
                continue
            yield Finding(Kind.PAUSE, f"update {update.version}", f"call {call.rid} {text}")


def oldest(samples: list[Sample]) -> int | None:
    """Return the oldest version that a token of some samples is at least of."""
    found = (version for s in samples for call in s.calls for version in least_at(call))
    return min((version for version in found if version >= 0), default=None)


def _staleness(record: Record, version: int, group: HandedGroup) -> Iterator[Finding]:
    since = oldest(group.samples)
    if since is None:
        return
    where, age, bound = str(group.group), version - since, record.scene.bound
    if bound is not None and age > bound:
        text = f"handed out {age} versions old at version {version}, {bound} are permitted"
        yield Finding(Kind.STALE, where, text)
    if group.staleness != age:
        text = f"says that it is {group.staleness} versions old, it is {age}"
        yield Finding(Kind.STALE, where, text)


def _mask(record: Record, sample: Sample) -> Iterator[Finding]:
    wanted = expected_mask(sample, only_newest=record.scene.mask_offpolicy)
    if sample.loss_mask is None or not np.array_equal(sample.loss_mask, wanted):
        where = f"{sample.group_index}:{sample.member}"
        yield Finding(Kind.MASK, where, "the loss mask is not what its versions give")


def expected_mask(sample: Sample, *, only_newest: bool) -> LossMask:
    """Return 1 where a call sampled: everywhere, or only what the newest version sampled.

    Shape: [response_length]
    """
    mask = np.zeros(sample.response_length, dtype=np.uint8)
    spans = [span for call in sample.calls for span in call.versions if span[2] > span[1]]
    newest = max((version for version, _, _ in spans), default=-1)
    for version, start, end in spans:
        if version == newest >= 0 or not only_newest:
            mask[start - sample.prompt_length : end - sample.prompt_length] = 1
    return mask


# --- evaluations ---------------------------------------------------------------------------------
def _evaluations(
    record: Record, truth: Truth, question_of: Callable[[int], str]
) -> Iterator[Finding]:
    trained = {call.rid for sample in record.samples() for call in sample.calls}
    for batch in record.handed:
        for group in batch.groups:
            if not 0 <= group.group < record.scene.rows:
                text = "no row of the source; it stands in a training batch"
                yield Finding(Kind.EVALUATION, str(group.group), text)
    for evaluation in record.evaluations:
        for sample in evaluation.samples:
            where = f"{evaluation.name} {sample.metadata.get('row')}:{sample.member}"
            if any(call.rid in trained for call in sample.calls):
                yield Finding(Kind.EVALUATION, where, "it stands in a training batch too")
            question = question_of(int(sample.metadata["row"]))
            name = str(sample.metadata["group_id"]).removeprefix(f"{record.scene.name}-")
            yield from truth.check(sample, question, group=name)
        for index, count in Counter(sample.index for sample in evaluation.samples).items():
            if count > 1:
                yield Finding(
                    Kind.TWICE,
                    evaluation.name,
                    f"{count} samples have the index {index}",
                    count - 1,
                )
        for reason in evaluation.missing:
            yield Finding(Kind.DROP, evaluation.name, f"a sample is missing: {reason}")


# --- tools ---------------------------------------------------------------------------------------
def _tools(record: Record, decode: Decode) -> list[Finding]:
    """Find executions of one call beyond the first, and observations without one.

    A worker that was killed may have run a tool whose result died with it: what it ran is no
    evidence against the worker that ran it again.
    """
    findings: list[Finding] = []
    by_place: dict[tuple[str, int, str, int], list[Execution]] = defaultdict(list)
    for execution in record.executions:
        key = (execution.group, execution.member, execution.rid, execution.place)
        by_place[key].append(execution)
    for (group, member, rid, place), found in by_place.items():
        held = [one for one in found if one.pid not in record.killed]
        extra = max(0, len(held) - 1)
        if extra:
            turn = found[0].turn
            text = f"call {place} of turn {turn} ({rid}) ran {len(held)} times"
            findings.append(Finding(Kind.TOOL, f"{group}:{member}", text, extra))
    by_nonce = {execution.nonce: execution for execution in record.executions}
    samples = record.samples() + [s for e in record.evaluations for s in e.samples]
    seen: Counter[str] = Counter()
    for sample in samples:
        findings += _observations(sample, by_nonce, by_place, seen, decode)
    return findings


def _observations(
    sample: Sample,
    by_nonce: dict[str, Execution],
    by_place: dict[tuple[str, int, str, int], list[Execution]],
    seen: Counter[str],
    decode: Decode,
) -> Iterator[Finding]:
    """Hold what stands behind each reply against the executions that its calls had."""
    turns = list(turns_of(sample))
    ends = [*(turn.start for turn in turns[1:]), len(sample.tokens)]
    for turn, end in zip(turns, ends, strict=True):
        where = f"{sample.group_index}:{sample.member} turn {turn.number}"
        asked = decode(sample.tokens[turn.start : turn.end]).count("<tool_call>")
        shown = _RUN.findall(decode(sample.tokens[turn.end : end]))
        rids = {call.rid for call in turn.calls}
        if turn.observed and len(shown) != asked:
            text = f"{asked} calls were made, {len(shown)} results stand behind them"
            yield Finding(Kind.TOKEN, where, text)
        for nonce in shown:
            seen[nonce] += 1
            execution = by_nonce.get(nonce)
            if execution is None or execution.rid not in rids:
                yield Finding(Kind.TOKEN, where, f"no tool gave the result {nonce} here")
            elif execution.turn != turn.number or execution.member != sample.member:
                text = f"ran for turn {execution.turn} of member {execution.member}"
                yield Finding(Kind.TOKEN, where, text)
            if seen[nonce] > 1:
                yield Finding(Kind.TOOL, where, f"the result {nonce} stands in two samples")
        ran = {
            place for (_, member, rid, place) in by_place if rid in rids and member == sample.member
        }
        if len(ran) > asked:
            text = f"{asked} calls were made, {len(ran)} ran"
            yield Finding(Kind.TOOL, where, text, len(ran) - asked)
