"""A generate function whose client rewrites its history: it compacts the conversation.

The model is asked to check its answer several times; after every second turn the conversation so
far is replaced by the question and the last answer, as an agent does that runs out of context. What
is trained then is the policy's choice: `worker.on_divergence = "reject" | "fork" | "keep_prefix"`
(docs/generate.md). Invariant: between two compactions ids are extended, never rendered anew, so
only a compaction is another history.

In the configuration: `worker.generate = "examples.generate_compacting:generate"`.
"""

from __future__ import annotations

import numpy as np

from rollstream.sample import Message, TokenIds
from worker.generate.records import merge_records, record_call
from worker.generate.rollout import as_messages
from worker.tito.merge import TurnRecord
from worker.types import GenerateInput, GenerateOutput

COMPACT_AFTER = 2
CHECK: Message = {"role": "user", "content": "Check your answer once more."}


async def generate(given: GenerateInput) -> GenerateOutput:
    """Return one sample, or under `fork` one per history."""
    turns: list[TurnRecord] = []
    prompt: TokenIds = given.prompt.ids
    while len(turns) < given.limits.max_turns:
        turn = await record_call(given, turns, prompt)
        if turn is None or turn.finish != "stop":
            break
        if len(turns) % COMPACT_AFTER == 0:
            prompt = _compacted(given, turn, prompt)
        else:
            suffix = given.renderer.extend(prompt, turn.output_ids, [CHECK], None)
            prompt = np.concatenate([prompt, turn.output_ids, suffix])
    return await merge_records(given, turns)


def _compacted(given: GenerateInput, turn: TurnRecord, prompt: TokenIds) -> TokenIds:
    """Return the prompt of a history that holds the question and the last answer alone."""
    answer = given.renderer.parse(turn.output_ids, prompt).content
    question = as_messages(given.sample.prompt)
    review: Message = {"role": "user", "content": f"You answered:\n{answer}\n{CHECK['content']}"}
    return given.renderer.render([*question, review], None)
