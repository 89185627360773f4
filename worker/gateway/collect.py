"""From the tree of a session to its samples.

Owns what each sample holds and which of its tokens train. Never picks leaves, never decides how an
agent ended: a sample ends as its last reply did, or for a picker that broke. Invariant: a sample is
the path of one leaf, token for token what the engine saw and sampled there (`Trajectory`); every
kept reply trains in exactly one sample, the first that has it, and its mask is 0 in the others,
where its calls and log-probs stay.

Axes: L all tokens of a path.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollstream.errors import STATUS_OF, StopReason
from rollstream.sample import Sample, empty_ids

from ..bounded import in_thread
from ..offload import decode
from ..telemetry.spans import timed
from ..tito.trajectory import Trajectory
from ..tools.text import clean
from ..types import GenerateInput
from .picker import Picked
from .tree import Node, Tree

LONG_TOKENS = 1 << 18
"""Tokens of all samples together beyond which they are put together in a thread."""
_INT64 = range(-(1 << 63), 1 << 63)


async def assemble(
    given: GenerateInput, tree: Tree, picked: Picked, *, is_list: bool
) -> list[Sample]:
    """Return the samples of picked leaves, in their order; one without tokens where there is none.

    Args:
        given: its sample lends every field that is not about tokens.
        tree: all that was committed.
        picked: what becomes samples.
        is_list: the result is a list, and says in `metadata["tree"]` how its leaves hang together.

    Raises:
        MergeFault: rows of routed experts do not join.
    """
    if not picked.leaves:
        return [_empty(given)]
    with timed(given.spans, "merge"):
        size = sum(leaf.context.num_tokens for leaf in picked.leaves)
        if size > LONG_TOKENS:
            samples = await in_thread(_write_all, given, picked.leaves)
        else:
            samples = _write_all(given, picked.leaves)
        for sample in samples:
            sample.response = await decode(given.renderer, sample.tokens[sample.prompt_length :])
    owned: set[int] = set()
    for leaf, sample in zip(picked.leaves, samples, strict=True):
        path = leaf.path()
        own = [node.id for node in path if node.id not in owned]
        owned.update(own)
        reason = leaf.cut or StopReason.STOP
        if picked.error:  # whoever reads them did not choose these leaves
            reason = StopReason.AGENT_ERROR
            sample.metadata |= {"error": picked.error, "error_detail": "picker"}
        sample.finish(reason, STATUS_OF[reason])
        if is_list:
            sample.metadata["tree"] = {"leaf": leaf.id, "path": [n.id for n in path], "owns": own}
        if given.debug_messages:
            sample.metadata["messages"] = [_plain(message) for message in leaf.conversation()]
    if is_list:
        samples[0].metadata["tree"] |= {
            "parents": [None if n.parent is None else n.parent.id for n in tree.nodes],
            "num_leaves": len(tree.leaves()),
            "warnings": picked.warnings,
        }
    return samples


def _write_all(given: GenerateInput, leaves: Sequence[Node]) -> list[Sample]:
    owned: set[int] = set()
    samples = []
    for leaf in leaves:
        path = leaf.path()
        sample = _write(given, path)
        assert sample.loss_mask is not None
        for node in path:
            if node.id in owned:  # an earlier sample trains it
                start = node.context.num_prompt - sample.prompt_length
                sample.loss_mask[start : start + node.num_sampled] = 0
        owned.update(node.id for node in path)
        samples.append(sample)
    return samples


def _write(given: GenerateInput, path: Sequence[Node]) -> Sample:
    root = path[0].context
    trajectory = Trajectory(root.observed, given.renderer.stop_token_ids, given.replay)
    for node in path:
        context = node.context
        if context is not root:
            trajectory.add_observation(context.observed.ids, context.observed.json)
        for answer in context.answers:
            trajectory.add_completion(
                answer.completion,
                dispatched_version=answer.dispatched,
                sampling=answer.sampling.to_dict(),
                current_version=answer.current,
            )
    return trajectory.write_to(_copy(given))


def _copy(given: GenerateInput) -> Sample:
    sample = copy.copy(given.sample)
    sample.metadata = dict(given.sample.metadata)
    sample.spans = list(given.sample.spans)
    return sample


def _empty(given: GenerateInput) -> Sample:
    sample = _copy(given)
    sample.tokens, sample.response_length = empty_ids(), 0
    sample.loss_mask = np.zeros(0, np.uint8)
    sample.rollout_log_probs = np.zeros(0, np.float32)
    sample.finish(StopReason.NO_MODEL_CALL, STATUS_OF[StopReason.NO_MODEL_CALL])
    return sample


def _plain(value: Any) -> Any:
    """Return what a client sent as values that can be stored: for people, not for training."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int) and value not in _INT64:
        return str(value)
    return value
