"""The generate function `multi_turn`: call, run the tools it asked for, call again.

Owns the order of turns and what is recorded about them. Never runs a call out of a turn that was
cut or aborted, and never changes a sampled token. Invariant: the prompt of call k+1 is exactly the
tokens of call k plus the ids of the observations, which are added whole or not at all.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from rollstream.errors import StopReason
from rollstream.sample import Message

from ..bounded import in_thread
from ..offload import extend
from ..tito.calls import limit_calls
from ..tito.tokenizer import LONG_IDS
from ..tools import run_calls, tool_specs
from ..tools.text import clean
from ..types import AssistantMessage, GenerateInput, GenerateOutput, ProblemKind, ToolCall
from .resumable import resumable
from .rollout import LinearRollout, Reply

_MAX_RECORDED_CHARS = 4096


@resumable
async def multi_turn(given: GenerateInput) -> GenerateOutput:
    """Sample turn after turn until the model answers without a call, or a limit is met.

    Raises:
        EngineFault: no engine answered sensibly.
        MergeFault: the family's template cannot be extended.
        ToolFault: what runs a tool broke.
    """
    return await Turns(given).run()


class Turns:
    """The turns of one trajectory.

    `environment.py` has others in place of `_call` and `_answer`.
    """

    takes_calls = False
    """Whether `_answer` answers replies with calls too."""

    def __init__(self, given: GenerateInput) -> None:
        self.given = given
        self.rollout = LinearRollout(given)
        self.specs = tool_specs(given.tools)
        noted = self.rollout.noted
        self.calls: list[dict[str, Any]] = noted("tool_calls", list)
        self.problems: Counter[str] = Counter(noted("malformed_calls", dict))
        self.errors: Counter[str] = Counter(noted("tool_errors", dict))
        self.num_answered = noted("tool_calls_ok", int)
        self.abnormal_ends = noted("abnormal_ends", int)

    async def run(self) -> GenerateOutput:
        """Run turns until one ends the trajectory; return it with its notes."""
        reason = await self._turns()
        note = self.rollout.note
        if self.calls:
            note("tool_calls", self.calls)
        if self.num_answered:
            note("tool_calls_ok", self.num_answered)
        if self.errors:
            note("tool_errors", dict(self.errors))
        if self.problems:
            note("malformed_calls", dict(self.problems))
        if self.abnormal_ends:
            note("abnormal_ends", self.abnormal_ends)
        return await self.rollout.finish(reason)

    async def _turns(self) -> StopReason:
        """Run turns until one ends the trajectory, and return why."""
        limits = self.given.limits
        is_held = self.rollout.holds_whole_reply
        while True:
            if not is_held:
                reply = await self._call()
                if reply.completion is not None:
                    self.rollout.keep_reply()
                if reply.ended is not None or reply.completion is None:
                    return reply.ended or StopReason.STOP
            is_held = False
            message = await self._parse()
            if not message.tool_calls or self.takes_calls:
                ended = await self._answer(message)
                if ended is not None:
                    return ended
                continue
            is_last = self.rollout.turn >= limits.max_turns
            if is_last and not limits.execute_last_turn:
                self._record(message.tool_calls, executed=False)
                return StopReason.MAX_TURNS
            self._record(message.tool_calls, executed=True)
            ended = await self._observe(message.tool_calls)
            if ended is not None:
                return ended
            if is_last:
                return StopReason.MAX_TURNS

    async def _call(self) -> Reply:
        return await self.rollout.call()

    async def _answer(self, message: AssistantMessage) -> StopReason | None:
        """Answer a reply that no tool answers; returns why the trajectory ends, if it does."""
        del message
        return StopReason.STOP

    async def _parse(self) -> AssistantMessage:
        trajectory, parse = self.rollout.trajectory, self.given.renderer.parse
        ids, window = trajectory.last_completion(), trajectory.window()
        if len(ids) > LONG_IDS:
            message = await in_thread(parse, ids, window, self.specs)
        else:
            message = parse(ids, window, self.specs)
        self.abnormal_ends += message.abnormal_end
        if message.tool_calls and not self.given.tools:
            # Nothing was offered, so nothing was called: it is text.
            written = [call.as_written for call in message.tool_calls]
            message.content = "\n".join(filter(None, [message.content, *written]))
            message.tool_calls = []
        limit_calls(message.tool_calls, self.given.limits.max_parallel_calls)
        for call in message.tool_calls:
            if call.problem is not None and call.problem is not ProblemKind.TOO_MANY:
                self.problems[call.problem] += 1
        return message

    def _record(self, calls: list[ToolCall], *, executed: bool) -> None:
        """Record calls as plain text: a model writes numbers and characters no codec takes."""
        for call in calls:
            arguments = json.dumps(call.arguments)
            self.calls.append(
                {
                    "turn": self.rollout.turn - 1,
                    "id": call.id,
                    "name": clean(call.name[:64]),
                    "arguments": arguments
                    if len(arguments) <= _MAX_RECORDED_CHARS
                    else arguments[:_MAX_RECORDED_CHARS] + "…",
                    "executed": executed and call.problem is None,
                }
            )

    async def _observe(self, calls: list[ToolCall]) -> StopReason | None:
        """Run the calls and add what they gave; returns why the trajectory ends, if it does."""
        given, rollout = self.given, self.rollout
        turn, start_mono_s = rollout.turn - 1, time.monotonic()
        try:
            observations = await run_calls(
                calls,
                given.tools,
                timeout_s=given.limits.tool_timeout_s,
                max_chars=given.limits.tool_output_chars,
                max_tokens=given.limits.tool_output_tokens,
                renderer=given.renderer,
                side=given.limits.tool_output_side,
            )
        except BaseException as error:
            spent_s = given.spans.ended("tool", turn, start_mono_s, error)
            rollout.sample.non_generation_time += spent_s
            raise
        rollout.sample.non_generation_time += given.spans.ended("tool", turn, start_mono_s)
        for observation in observations:
            if observation.error is None:
                self.num_answered += 1
            else:
                self.errors[observation.error] += 1
        return await self._append([observation.message for observation in observations])

    async def _append(self, messages: list[Message]) -> StopReason | None:
        """Add what the model reads next whole, or end the trajectory without it."""
        rollout, renderer = self.rollout, self.given.renderer
        trajectory = rollout.trajectory
        ids = await extend(
            renderer, trajectory.window(), trajectory.last_completion(), messages, self.specs
        )
        room = rollout.room()
        if len(ids) > room.fits:
            rollout.note("dropped_observation", {"turn": rollout.turn - 1, "num_tokens": len(ids)})
            return room.fits_bound
        trajectory.add_observation(ids)
        if self.given.debug_messages:
            rollout.messages.extend(messages)
        return None
