"""A generate function that returns a list: a draft and a revision of the same prompt.

Both are leaves of one trajectory: they share the prompt, the
rollout id and, once scored, the reward (that of the last leaf). Invariant: every call of either
leaf has a seed of its own, so an auditor can recompute both.

In the configuration: `worker.generate = "examples.generate_list:generate"`.
"""

from __future__ import annotations

import dataclasses

from worker.generate import multi_turn, single_turn
from worker.types import GenerateInput, GenerateOutput

DRAFT_TURNS = 1


async def generate(given: GenerateInput) -> GenerateOutput:
    """Return `[draft, revision]`."""
    draft = await single_turn(given)
    seed = given.turn_seed
    # The draft used the seed of turn 0; the revision must not be the draft again.
    revising = dataclasses.replace(given, turn_seed=lambda turn: seed(turn + DRAFT_TURNS))
    revision = await multi_turn(revising)
    leaves = [draft.samples, revision.samples]
    for leaf, part in zip(leaves, ("draft", "revision"), strict=True):
        leaf.metadata["part"] = part
    return GenerateOutput(leaves)
