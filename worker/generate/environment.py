"""The generate function `env`: an environment answers the model, turn after turn, and judges it.

Owns the order of an episode, what of it stands in the sample, and its reward. Never calls an
environment outside of its time (`environments.life` does), never changes a sampled token. Calls of
tools are run as in `multi_turn`, unless the environment takes them. Invariants: as there, the
prompt of call k+1 is exactly the tokens of call k plus the ids of what was observed, with mask 0;
what an environment breaks is an `EnvFault`, never a reward.

An episode holds what nobody else knows. So a sample that new weights stopped is parked where its
environment says that it can be resumed, waits and goes on in the same worker where it cannot (both
under `weights.partial`), and else is given back uncharged and begins anew.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rollstream.errors import EnvFault, StopReason
from rollstream.sample import Message, Sample

from ..environments.life import Environments, Running
from ..environments.load import LoadedEnvironment
from ..environments.types import EnvSample
from ..environments.values import Step, assistant_message
from ..offload import render
from ..sampling import call_seed
from ..tito.ids import prompt_ids
from ..tools import ToolError, tool_specs
from ..tools.caps import Cap
from ..types import (
    AssistantMessage,
    GenerateFunction,
    GenerateInput,
    GenerateOutput,
    ProblemKind,
    ToolCall,
)
from .multi_turn import Turns
from .resumable import resumable
from .rollout import Reply

NOTES = "env"
"""Key of the metadata under which an episode stands."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
"""Between calls that an engine stops at once although nobody here is paused."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """What is the same for all episodes of one environment."""

    run_seed: int
    is_scored: bool = False
    """`reward.kind` was asked for by name: rewards of steps are recorded, and do not become the
    sample's."""


def episodes(
    environments: Environments, environment: LoadedEnvironment, rules: EpisodeRules
) -> GenerateFunction:
    """Return the generate function of one environment."""

    async def generate(given: GenerateInput) -> GenerateOutput:
        notes = _earlier(given.sample)
        about = _about(given, rules.run_seed, notes.pop("state", None))
        async with AsyncExitStack() as stack:
            # The wait for a slot and the making are its time, too.
            with _outside(given, -1) as spent:
                opened = environments.opened(environment.name, environment.make, about)
                running = await stack.enter_async_context(opened)
                first = await running.reset(about)
            episode = await _begun(given, running, rules, first)
            episode.spent_s += spent.seconds
            return await episode.run()

    return resumable(generate) if environment.resumable else generate


class Episode(Turns):
    """The turns of one trajectory, answered by an environment."""

    def __init__(
        self, given: GenerateInput, running: Running, rules: EpisodeRules, first: list[Message]
    ) -> None:
        super().__init__(given)
        self.spent_s = 0.0
        """In the environment, not counted in the sample yet."""
        self._running, self._rules, self._first = running, rules, first
        self.takes_calls = running.takes_calls
        self._cap = _cap_of(given)
        earlier = _earlier(self.rollout.sample)
        self._notes: dict[str, Any] = {
            "rewards": list(earlier.get("rewards", ())),
            "infos": list(earlier.get("infos", ())),
            "turns": list(earlier.get("turns", ())),
            "ends": list(earlier.get("ends", ())),
            "num_steps": earlier.get("num_steps", 0),
            "done": False,
        }
        if first:
            self._notes["reset"] = first
            self.rollout.messages.extend(first)

    async def run(self) -> GenerateOutput:
        """Run the episode to its end; return it with its notes and its reward."""
        self.rollout.note(NOTES, self._notes)
        output = await super().run()
        sample = output.samples
        assert isinstance(sample, Sample)
        sample.non_generation_time += self.spent_s
        if sample.stop_reason is StopReason.ABORT_WEIGHTS:
            if self._may_park:
                self._notes["state"] = await self._running.state()
            return output
        given = [reward for reward in self._notes["rewards"] if reward is not None]
        if given and not self._rules.is_scored:
            sample.reward = float(sum(given))
        return output

    @property
    def _may_park(self) -> bool:
        """Whether what is stopped is stored: of prompts, the group's alone is known elsewhere."""
        return self.given.parks and not self._first

    async def _call(self) -> Reply:
        """Make the next call, and go on with it behind every stop that is no end."""
        idle = 0
        while True:
            reply = await self.rollout.call()
            if reply.ended is not StopReason.ABORT_WEIGHTS:
                return reply
            opened = self.given.opened
            if opened is None or self._may_park:
                return reply
            await opened()
            if self.rollout.take_up(reply):
                return Reply(reply.completion, None)
            idle = idle + 1 if reply.completion is None else 0
            if idle > 1:
                await asyncio.sleep(min(_FIRST_WAIT_S * 2**idle, _LONGEST_WAIT_S))

    async def _answer(self, message: AssistantMessage) -> StopReason | None:
        """Have the environment answer a reply; returns why the trajectory ends, if it does."""
        rollout, turn = self.rollout, self.rollout.turn - 1
        calls = [call for call in message.tool_calls if call.problem is None]
        if message.tool_calls:
            self._record(message.tool_calls, executed=True)
        step: Step | None = None
        if calls or not message.tool_calls:
            with _outside(self.given, turn) as spent:
                step = await self._running.step(assistant_message(message))
            self.spent_s += spent.seconds
            self.num_answered += len(calls)
            self._note(step, turn)
            if step.done:
                return StopReason.STOP
        if rollout.turn >= self.given.limits.max_turns:
            return StopReason.MAX_TURNS
        observed = [] if step is None else await self._running.shown(step.observation, calls)
        return await self._append(await self._capped(self._in_order(message.tool_calls, observed)))

    def _note(self, step: Step, turn: int) -> None:
        notes = self._notes
        notes["rewards"].append(step.reward)
        notes["infos"].append(step.info)
        notes["turns"].append(turn)
        notes["ends"].append(self.rollout.trajectory.num_tokens)
        notes["num_steps"] += 1
        notes["done"] = step.done

    def _in_order(self, calls: list[ToolCall], observed: list[Message]) -> list[Message]:
        """Return the answers with those to malformed calls in their places."""
        if all(call.problem is None for call in calls):
            return observed
        answers = iter([one for one in observed if one["role"] == "tool"])
        found: list[Message] = []
        for call in calls:
            if call.problem is None:
                found.append(next(answers))
                continue
            is_over = call.problem is ProblemKind.TOO_MANY
            self.errors[ToolError.TOO_MANY if is_over else ToolError.MALFORMED] += 1
            text = f"Error: {call.problem_text or f'malformed tool call ({call.problem})'}"
            found.append(
                {"role": "tool", "tool_call_id": call.id, "name": call.name[:64], "content": text}
            )
        return [*found, *(one for one in observed if one["role"] != "tool")]

    async def _capped(self, messages: list[Message]) -> list[Message]:
        return [one | {"content": await self._cap.of(one["content"])} for one in messages]


async def _begun(
    given: GenerateInput, running: Running, rules: EpisodeRules, first: list[Message]
) -> Episode:
    """Return the episode behind its reset.

    Raises:
        EnvFault: what the environment showed cannot follow the row's prompt.
    """
    resumed = given.sample
    if len(resumed.tokens):
        # What it began with is the prompt, whatever an environment would say today.
        own = resumed.tokens[: resumed.prompt_length]
        return Episode(replace(given, prompt=prompt_ids(own)), running, rules, [])
    if not first:
        return Episode(given, running, rules, [])
    prompt = given.sample.prompt
    if isinstance(prompt, str):
        raise EnvFault(
            "the environment's reset returned something to show, and the row's prompt is raw text, "
            "which no message can follow; give the prompt as messages",
            detail="invalid",
        )
    cap = _cap_of(given)
    shown = [one | {"content": await cap.of(one["content"])} for one in first]
    try:
        ids = await render(given.renderer, [*prompt, *shown], tool_specs(given.tools))
    except ValueError as error:
        raise EnvFault(
            f"the prompt with what the environment's reset returned cannot be rendered: {error}",
            detail="invalid",
        ) from error
    return Episode(replace(given, prompt=ids), running, rules, shown)


def _cap_of(given: GenerateInput) -> Cap:
    """Return the cap of what an environment says: that of tools."""
    limits = given.limits
    return Cap(
        limits.tool_output_chars, limits.tool_output_tokens, limits.tool_output_side, given.renderer
    )


def _about(given: GenerateInput, run_seed: int, state: Any) -> EnvSample:
    sample = given.sample
    group_index = sample.group_index or 0
    return EnvSample(
        group_index=group_index,
        member=sample.member,
        prompt=copy.deepcopy(sample.prompt),
        label=copy.deepcopy(sample.label),
        metadata=copy.deepcopy(sample.metadata),
        seed=call_seed(run_seed, group_index, -1, 0),
        max_turns=given.limits.max_turns,
        evaluation=given.evaluation,
        state=state,
    )


def _earlier(sample: Sample) -> dict[str, Any]:
    """Return a copy of what an earlier attempt noted of its episode."""
    notes = sample.metadata.get(NOTES) if len(sample.tokens) else None
    return dict(notes) if isinstance(notes, dict) else {}


class _Spent:
    """How long something took."""

    seconds = 0.0


@contextmanager
def _outside(given: GenerateInput, turn: int) -> Iterator[_Spent]:
    """Record the time of an environment as that of a tool."""
    spent, start_mono_s = _Spent(), time.monotonic()
    try:
        yield spent
    except BaseException as error:
        spent.seconds = given.spans.ended("tool", turn, start_mono_s, error)
        raise
    spent.seconds = given.spans.ended("tool", turn, start_mono_s)
