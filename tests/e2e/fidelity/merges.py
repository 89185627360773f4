"""The other way to the same sample: per-turn records, made of what went over HTTP, and merged.

Owns the records and the comparison. Never looks at how a trajectory was grown. Invariant: both
merge paths give the sample of the append-only trajectory bit for bit, or there is a finding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rollstream.errors import EngineFault, MergeFault
from rollstream.sample import Call, PrefixCacheInfo, Sample, SpecInfo, TokenIds
from tests.e2e.fidelity.check import Find, Finding, Kind
from tests.e2e.fidelity.wire import WireCall
from worker.tito.merge import Decode, TurnRecord, fold_samples, merge_turns

_COMPARED = ("tokens", "loss_mask", "rollout_log_probs")


def check_merges(sample: Sample, find: Find, decode: Decode) -> list[Finding]:
    """Assemble a sample again by `merge_turns` and `fold_samples`, and compare."""
    where = f"sample {sample.group_index}:{sample.member}"
    wires = [find(call.rid) for call in sample.calls]
    if not wires or any(wire is None for wire in wires):
        return [Finding(Kind.MERGE, where, "no records to merge")]
    known = [wire for wire in wires if wire is not None]
    turns = [_record(call, wire) for call, wire in zip(sample.calls, known, strict=True)]
    for turn in turns[:-1]:
        turn.finish = "stop"  # an aborted call that was gone on from is no end
    kept = _up_to_last_call(sample)
    findings = []
    for name in ("merge_turns", "fold_samples"):
        try:
            merged = _merged(name, turns, decode)
        except (MergeFault, EngineFault, ValueError) as error:
            findings.append(Finding(Kind.MERGE, where, f"{name} refuses the records: {error}"))
            continue
        if merged is None:
            findings.append(Finding(Kind.MERGE, where, f"{name} gives nothing"))
            continue
        differing = _differing(kept, merged, with_text=name == "merge_turns", decode=decode)
        findings += [
            Finding(Kind.MERGE, where, f"{name} gives another {field}") for field in differing
        ]
    return findings


def _merged(name: str, turns: Sequence[TurnRecord], decode: Decode) -> Sample | None:
    if name == "merge_turns":
        return merge_turns(turns, decode=decode).sample
    # A turn's own sample begins with all that the engine saw, as a per-turn client has it.
    singles = [merge_turns([turn], decode=decode).sample for turn in turns]
    return fold_samples([single for single in singles if single is not None], decode)


def _record(call: Call, wire: WireCall) -> TurnRecord:
    """Return the record of one call: ids and log-probs of the wire, names of the call."""
    num = len(wire.output_ids)
    return TurnRecord(
        prompt_ids=wire.input_ids,
        output_ids=wire.output_ids,
        log_probs=wire.log_probs,
        finish=wire.finish,
        # Spans of no token say what was current later; a call keeps them, the wire has none.
        versions=[*wire.versions, *((v, num, num) for v, a, b in call.versions if a == b)],
        rid=wire.rid,
        engine=call.engine,
        dispatched_version=call.dispatched_version,
        sampling=dict(call.sampling),
        cache=PrefixCacheInfo(wire.cached_tokens, len(wire.input_ids)),
        spec=SpecInfo(completion_token_num=num),
    )


def _up_to_last_call(sample: Sample) -> Sample:
    """Return the sample without an observation that no call read: no record knows of it."""
    end = sample.calls[-1].end
    cut = copy.copy(sample)
    length = end - sample.prompt_length
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    cut.tokens, cut.response_length = sample.tokens[:end], length
    cut.loss_mask = sample.loss_mask[:length]
    cut.rollout_log_probs = sample.rollout_log_probs[:length]
    return cut


def _differing(held: Sample, merged: Sample, *, with_text: bool, decode: Decode) -> list[str]:
    names = [name for name in _COMPARED if not _same(getattr(held, name), getattr(merged, name))]
    if held.response_length != merged.response_length:
        names.append("response_length")
    if [_plain(c) for c in held.calls] != [_plain(c) for c in merged.calls]:
        names.append("calls")
    plain = ("weight_versions", "spec_info", "prefix_cache_info", "logprob_mode")
    names += [name for name in plain if getattr(held, name) != getattr(merged, name)]
    response: TokenIds = held.tokens[held.prompt_length :]
    if with_text and merged.response != decode(response):
        names.append("response")
    return names


def _same(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    if first is None or second is None:
        return False
    return first.dtype == second.dtype and first.tobytes() == second.tobytes()


def _plain(call: Call) -> Call:
    return replace(call, finish="", versions=[(v, a, b) for v, a, b in call.versions])
