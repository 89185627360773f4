"""Recorded turns: for generate functions whose client renders every request itself.

Owns one recorded call, and the way from records to what a generate function returns. Never decides
what the next request holds. Invariant: what is returned says of every sampled token which call
sampled it, after exactly the ids that call was sent; a history that was rewritten between two turns
is counted in `metadata["divergences"]` and treated as `worker.on_divergence` says.

Example:
    >>> turns: list[TurnRecord] = []
    >>> while (turn := await record_call(given, turns, prompt_ids)) is not None:
    ...     prompt_ids = the_clients_next_request(turn.output_ids)
    >>> return await merge_records(given, turns)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rollstream.errors import STATUS_OF, StopReason
from rollstream.sample import UNKNOWN_VERSION, Sample, empty_ids

from ..bounded import in_thread
from ..offload import decode
from ..telemetry.spans import timed
from ..tito.divergence import METADATA_KEY, Resolved, resolve
from ..tito.ids import as_ids, first_difference, ids_json
from ..tito.turns import TurnRecord
from ..types import Finish, GenerateInput, GenerateOutput, RequestIds
from .budget import effective, room_left

LONG_RECORDS = 1 << 18
"""Ids of all prompts together beyond which records are merged in a thread: prompts in memory of
their own are read once each (2 s for 512 turns of 512 ids), and numpy lets the loop run meanwhile.
"""
_EMPTY = {
    "no_records": StopReason.NO_MODEL_CALL,
    "all_truncated": StopReason.CONTEXT_LENGTH,
    "replay_gap": StopReason.MERGE_ERROR,
}


async def record_call(
    given: GenerateInput,
    turns: list[TurnRecord],
    prompt_ids: Sequence[int] | npt.NDArray[np.integer],
    *,
    turn: int | None = None,
) -> TurnRecord | None:
    """Call the engine with `prompt_ids` and append the record of its reply to `turns`.

    Args:
        given: as the generate function got it.
        turns: the calls so far; the next one's cache salt comes from them.
        prompt_ids: all that the engine is to see. Extend the ids of the turn before where you can:
            ids that are rendered anew are another history as soon as one of them differs. An array
            is kept as it is: append to its memory, and never write into what was sent.
        turn: gives the call its seed; None is the number of calls before it. Calls that run side by
            side need one each: of one seed and one prompt comes one text.

    Returns:
        The record; None, without a call, where the context has no room for a token.

    Raises:
        EngineFault: no engine answered sensibly.
        ValueError: no prompt, ids that are no ids, or calls side by side without their turns.
    """
    ids = as_ids(prompt_ids)
    if len(ids) == 0:
        raise ValueError("the prompt is empty: it has no token to go on from")
    room = room_left(given.limits, given.sampling, held=len(ids), response=0)
    if room.tokens <= 0:
        return None
    number, version = len(turns), given.version()
    turn_of_seed = number if turn is None else turn
    sampling = effective(given.sampling, room, given.turn_seed(turn_of_seed))
    sample = given.sample
    with timed(given.spans, "generate", turn_of_seed):
        completion = await given.engine.generate(
            RequestIds((ids_json(ids),), len(ids), _replay_start(given, turns, ids)),
            sampling,
            routing_key=sample.routing_key or f"g{sample.group_index}",
            version=version,
            deadline_s=max(given.deadline - time.monotonic(), 0.001),
            salt=_salt_of(turns),
        )
    # A call may wait for a pause to end, or be tried again: the version is that of its try.
    dispatched = completion.dispatched_version
    record = TurnRecord.of(
        ids,
        completion,
        dispatched_version=version if dispatched == UNKNOWN_VERSION else dispatched,
        current_version=given.version(),
        sampling=sampling.to_dict(),
    )
    if turn is None and len(turns) != number:
        raise ValueError(
            f"another call was recorded while call {number} ran, under the same seed; give calls "
            "that run side by side a number each: record_call(given, turns, prompt_ids, turn=k)"
        )
    turns.append(record)
    return record


def _salt_of(turns: Sequence[TurnRecord]) -> int | None:
    """Return the version at the first call; None has the call salted by its own."""
    first = turns[0].dispatched_version if turns else UNKNOWN_VERSION
    return None if first == UNKNOWN_VERSION else first


def _replay_start(
    given: GenerateInput, turns: Sequence[TurnRecord], ids: npt.NDArray[np.int32]
) -> int | None:
    """Return from which row the engine is asked: what the turn before fed is known already."""
    if not given.replay:
        return None
    before = turns[-1] if turns else None
    if before is None or before.prompt_ids is None or before.routed_experts is None:
        return 0
    held = np.concatenate([as_ids(before.prompt_ids), as_ids(before.output_ids)])
    return len(held) - 1 if first_difference(held, ids) < 0 else 0


async def merge_records(given: GenerateInput, turns: Sequence[TurnRecord]) -> GenerateOutput:
    """Return the trajectory that recorded turns make, by `given.limits.on_divergence`.

    Args:
        given: as the generate function got it; its sample gives every field that turns do not.
        turns: in the order of their calls; one that stands there twice counts once.

    Raises:
        MergeFault: history was rewritten and the policy is `reject`, or records that contradict
            themselves (`detail` as of `merge_turns`).
        EngineFault: an unknown finish word.
    """
    pending, turns = given.sample, _each_once(turns)
    template = replace(pending, metadata=dict(pending.metadata))
    with timed(given.spans, "merge"):
        merge = functools.partial(
            resolve,
            turns,
            given.limits.on_divergence,
            template=template,
            max_seq_len=given.limits.max_seq_len,
        )
        resolved = await in_thread(merge) if _is_long(turns) else merge()
        if resolved.fault is not None:
            # The pending sample is what the fault will be recorded on.
            pending.metadata[METADATA_KEY] = _plain(resolved)
            raise resolved.fault
        leaves = [one.sample for one in resolved.merged if one.sample is not None]
        for leaf in leaves:
            leaf.response = await decode(given.renderer, leaf.tokens[leaf.prompt_length :])
    if not leaves:
        leaves = [_empty_sample(template, resolved)]
    for leaf in leaves:
        if leaf.calls and leaf.calls[-1].finish == Finish.ABORT:
            # Whoever asked for it: no function's doing, and its member begins anew.
            leaf.finish(StopReason.ABORT_WEIGHTS, STATUS_OF[StopReason.ABORT_WEIGHTS])
    if resolved.left_out:
        leaves[-1].metadata["left_out_turns"] = resolved.left_out
    gap = next((one.gap for one in resolved.merged if one.gap), "")
    if gap:
        leaves[-1].metadata["replay_gap"] = gap
    return GenerateOutput(leaves[0] if len(leaves) == 1 else leaves)


def _is_long(turns: Sequence[TurnRecord]) -> bool:
    held = sum(0 if turn.prompt_ids is None else len(turn.prompt_ids) for turn in turns)
    return held > LONG_RECORDS


def _each_once(turns: Sequence[TurnRecord]) -> list[TurnRecord]:
    """Return the records without repeated ones, which would train what was sampled once twice."""
    first: dict[str | int, TurnRecord] = {}
    for turn in turns:
        first.setdefault(turn.rid or id(turn), turn)
    return list(first.values())


def _empty_sample(template: Sample, resolved: Resolved) -> Sample:
    sample = replace(
        template,
        tokens=empty_ids(),
        response_length=0,
        loss_mask=np.zeros(0, np.uint8),
        rollout_log_probs=np.zeros(0, np.float32),
    )
    reason = _EMPTY[resolved.merged[0].empty_reason or "no_records"]
    sample.finish(reason, STATUS_OF[reason])
    if resolved.divergences:
        sample.metadata[METADATA_KEY] = _plain(resolved)
    return sample


def _plain(resolved: Resolved) -> list[dict[str, object]]:
    return [one.to_dict() for one in resolved.divergences]
