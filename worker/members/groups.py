"""What the members of a group share: the decoded prompt, its rendered ids, one routing key.

Owns the book of groups that this worker holds members of. Never talks to Redis or an engine.
Invariant: a group's prompt is rendered once while any of its members is here, and a prompt that
cannot be used is a fault of each member, never of the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from rollstream.errors import ConfigError, EnvFault, RolloutFault, WireError
from rollstream.group import PromptGroup, sample_index
from rollstream.parameters import off_problem
from rollstream.queue.answers import LeasedGroup
from rollstream.sample import Message, Prompt, Sample
from rollstream.wire import decode_prompt

from ..bounded import in_thread
from ..sampling import Sampling
from ..tools import tool_specs
from ..types import PromptIds, Tool
from .work import EnvRuntime, GroupWork, Work, is_evaluation, place_of

LONG_PROMPT_CHARS = 8192
"""Longer prompts are rendered in a thread: rendering 40k characters stalls the loop for 10 ms."""

RenderPrompt = Callable[[Prompt, list[Message] | None], PromptIds]


class GroupBook:
    """The groups that this worker holds members of."""

    def __init__(
        self,
        *,
        run: str,
        envs: Mapping[str, EnvRuntime],
        render: RenderPrompt,
        allow_off_distribution: bool = False,
    ) -> None:
        self._run, self._envs, self._render = run, envs, render
        self._allow_off_distribution = allow_off_distribution
        self._groups: dict[str, GroupWork] = {}

    def join(self, leased: LeasedGroup) -> GroupWork:
        """Return the group's shared part, with its new members counted in."""
        group = self._groups.get(leased.group_index)
        if group is None:
            group = self._groups[leased.group_index] = self._open(leased)
        group.members += len(leased.members)
        return group

    def leave(self, group: GroupWork) -> None:
        """Count one member out; with the last one the group is forgotten."""
        group.members -= 1
        if group.members <= 0:
            self._groups.pop(group.key, None)

    def _open(self, leased: LeasedGroup) -> GroupWork:
        key = leased.group_index
        empty = PromptGroup(group_index=-1, n=leased.n, prompt="")
        work = GroupWork(key, empty, f"{self._run}-{key}", None, Sampling())
        try:
            empty.group_index = place = place_of(key)
            work.group = decode_prompt(leased.prompt, place, leased.n)
            work.env = self._env_of(work.group)
            work.sampling = self._sampling_of(key, work.group, work.env)
            work.tools = _tools_of(work.group, work.env)
        except (
            WireError,
            ConfigError,
            TypeError,
            AttributeError,
            LookupError,
            ValueError,
        ) as error:
            work.problem = f"group {key}: {error}"
        return work

    def _env_of(self, group: PromptGroup) -> EnvRuntime:
        env = self._envs.get(group.env)
        if env is None:
            raise ConfigError(
                f"environment {group.env!r} is not configured here; known: {sorted(self._envs)}"
            )
        return env

    def _sampling_of(self, key: str, group: PromptGroup, env: EnvRuntime) -> Sampling:
        if not group.sampling:
            return env.sampling
        sampling = env.sampling.with_overrides(group.sampling)
        off = [] if self._allow_off_distribution else sampling.off_distribution()
        if off and not is_evaluation(key):  # nobody trains on it
            raise ConfigError(
                f"the row's sampling.{off_problem(off[0], getattr(sampling, off[0]))}"
            )
        return sampling

    async def prompt_of(self, work: GroupWork) -> PromptIds:
        """Return the rendered prompt, rendering it for the first member that asks.

        Raises:
            RolloutFault: it cannot be rendered; the same for every member.
        """
        rendered = work.rendered
        if isinstance(rendered, PromptIds):
            return rendered
        if rendered is None:
            if _num_chars(work.group.prompt) <= LONG_PROMPT_CHARS:
                work.rendered = rendered = self._rendered(work)
            else:
                work.rendered = rendered = asyncio.ensure_future(in_thread(self._rendered, work))
        if isinstance(rendered, asyncio.Future):
            # One member's cancellation must not take the others' prompt away.
            rendered = await asyncio.shield(rendered)
            work.rendered = rendered
        if isinstance(rendered, PromptIds):
            return rendered
        raise _again(rendered)

    def _rendered(self, work: GroupWork) -> PromptIds | RolloutFault:
        """Return the ids, or the fault as a value: it is raised once per member."""
        try:
            rendered = self._render(work.group.prompt, tool_specs(work.tools))
        except RolloutFault as fault:
            return fault
        except Exception as error:  # noqa: BLE001 - a template's own error is this prompt's fault
            return EnvFault(f"the prompt cannot be rendered: {type(error).__name__}: {error}")
        if len(rendered.ids) == 0:  # engines refuse it in their own words, or end
            return EnvFault(
                f"group {work.key}: the prompt is empty: it has no token to go on from",
                detail="empty_prompt",
            )
        return rendered


def _tools_of(group: PromptGroup, env: EnvRuntime) -> Mapping[str, Tool]:
    """Return the tools that the row names, all of the environment's where it names none.

    Functions come from the configuration only: a row chooses among them, by name.
    """
    if group.tools is None:
        return env.tools
    names = [str(spec.get("function", spec)["name"]) for spec in group.tools]
    unknown = sorted(set(names) - set(env.tools))
    if unknown:
        raise ConfigError(
            f"the row names the tool {unknown[0]!r}, which environment {env.name!r} does not have; "
            f"known: {sorted(env.tools)}"
        )
    return {name: env.tools[name] for name in names}


def _again(fault: Any) -> RolloutFault:
    again: RolloutFault = type(fault)(fault.message, retryable=fault.retryable, detail=fault.detail)
    return again


def _num_chars(prompt: Prompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content", ""))) for message in prompt)


def new_sample(work: Work) -> Sample:
    """Return the pending sample of one member; nothing mutable in it is shared with a sibling."""
    group, lease = work.group.group, work.lease
    index = sample_index(group.group_index, lease.member)
    env = work.group.env
    sample = Sample(
        group_index=group.group_index,
        member=lease.member,
        index=index,
        rollout_id=index,
        prompt=own_copy(group.prompt),
        label=own_copy(group.label),
        metadata=own_copy(group.metadata),
        sampling=own_copy(group.sampling),
        routing_key=work.group.routing_key,
        attempts=work.attempts,
    )
    if env is not None:
        sample.generate_function_path = env.generate_path
        sampling = work.group.sampling
        marks = env.marks if sampling is env.sampling else sampling.off_distribution()
        if marks:
            sample.metadata["off_distribution"] = list(marks)
    return sample


def own_copy(value: Any) -> Any:
    """Return `value` with every list and dictionary in it copied (records are plain data)."""
    if not value:  # an empty list or dictionary may still be filled by whoever has it
        return type(value)() if isinstance(value, list | dict) else value
    if isinstance(value, dict):
        return {
            key: item if isinstance(item, _ATOMS) else own_copy(item) for key, item in value.items()
        }
    if isinstance(value, list):
        return [item if isinstance(item, _ATOMS) else own_copy(item) for item in value]
    return value


_ATOMS = (str, int, float, bytes, type(None))
