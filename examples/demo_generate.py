"""The demo's generate function: one group in ten returns lists, the others one sample each.

Owns that share. Never generates itself. Invariant: all members of a group have the same shape, and
which groups are lists depends on `group_index` alone.
"""

from __future__ import annotations

from examples.generate_list import generate as generate_list
from worker.generate import multi_turn
from worker.types import GenerateInput, GenerateOutput

LIST_EVERY = 10
"""Groups whose index is a multiple of it return `[draft, revision]`."""


async def generate(given: GenerateInput) -> GenerateOutput:
    """Return a list for one group in ten, else one sample."""
    index = given.sample.group_index
    if index is not None and index % LIST_EVERY == 0:
        return await generate_list(given)
    return await multi_turn(given)
