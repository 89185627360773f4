"""The generate function `single_turn`: one call, and the sample is what it sampled.

Owns nothing but the order of the steps. Never parses the reply: a tool call in it is text.
Invariant: exactly one request, or none where there is no room for one or the reply is there.
"""

from __future__ import annotations

import dataclasses

from rollstream.errors import StopReason
from rollstream.sample import empty_ids

from ..types import GenerateInput, GenerateOutput
from .resumable import resumable
from .rollout import LinearRollout


@resumable
async def single_turn(given: GenerateInput) -> GenerateOutput:
    """Sample one reply to the prompt.

    Raises:
        EngineFault: no engine answered sensibly.
    """
    rollout = LinearRollout(given)
    if rollout.holds_whole_reply:
        return await rollout.finish(StopReason.STOP)
    reply = await rollout.call()
    if reply.completion is not None:
        rollout.keep_reply()
    output = await rollout.finish(reply.ended or StopReason.STOP)
    if reply.ended is StopReason.PROMPT_TOO_LONG:
        # As in the reference: a prompt that was never sent is no trajectory.
        sample = output.samples
        assert not isinstance(sample, list)
        return GenerateOutput(dataclasses.replace(sample, tokens=empty_ids()))
    return output
