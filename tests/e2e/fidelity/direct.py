"""The second half: the worker's own generate functions and client, interrupted at random.

Owns the disturbances and the resumes. Never a queue: an aborted sample goes through the wire codec,
as a parked one does, and is generated on. Invariant: a sample comes out only when it ended by
itself, however often it was interrupted before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.errors import STATUS_OF, StopReason
from rollstream.group import PromptGroup
from rollstream.sample import Message, Sample
from rollstream.wire import decode_body, encode_body, encode_text
from tests.e2e.fidelity import tools
from tests.e2e.fidelity.options import (
    CONCURRENCY,
    MAX_CONTEXT,
    MAX_NEW_TOKENS,
    MAX_RESPONSE,
    MAX_TURNS,
    SAMPLES_A_GROUP,
    TEMPERATURES,
)
from tests.e2e.fidelity.rows import temperature_of
from tests.e2e.fidelity.stage import EngineControl
from tests.e2e.fidelity.wire import WireFolder
from worker.engines.fleet.pool import EnginePool
from worker.generate.multi_turn import multi_turn
from worker.generate.single_turn import single_turn
from worker.sampling import Sampling, call_seed
from worker.telemetry.spans import SpanList
from worker.tito.load import LoadedRenderer, render_prompt
from worker.tools import load_tools, tool_specs
from worker.types import GenerateInput, Limits, PromptIds

FIRST_GROUP = 100_000
"""Groups of this half are numbered apart from the service's."""
SAMPLE_S = 600.0
DISTURB_S = 0.35
"""Mean time between two disturbances."""
SINGLE_EVERY = 16
"""Of the groups, one in so many is of single turns."""


@dataclass
class Interrupted:
    """What this half gave."""

    samples: list[Sample] = field(default_factory=list)
    aborts: int = 0
    resumed: int = 0
    """Samples that were generated on after an abort."""
    resumes: int = 0


class Direct:
    """Runs groups side by side while somebody disturbs the engine."""

    def __init__(
        self,
        renderer: LoadedRenderer,
        control: EngineControl,
        wire_dir: Path,
        seed: int,
    ) -> None:
        self._renderer, self._control, self._wire_dir = renderer, control, wire_dir
        self._seed, self._draw = seed, random.Random(seed)
        self._tools = load_tools(tools.PATHS)
        self._found = Interrupted()
        self._updates: list[float] = [0.25, 0.5, 0.75]
        """Shares of the samples behind which new weights come."""

    async def run(self, prompts: Sequence[Sequence[Message]]) -> Interrupted:
        """Return the samples of all prompts, in the order in which they ended."""
        self._engine = EnginePool(
            [self._control.url],
            max_token_id=self._renderer.max_token_id,
            wire_dir=self._wire_dir,
        )
        room = asyncio.Semaphore(CONCURRENCY)
        self._total = len(prompts) * SAMPLES_A_GROUP
        try:
            async with asyncio.TaskGroup() as both:
                disturbing = both.create_task(self._disturb())
                async with asyncio.TaskGroup() as group:
                    for number, prompt in enumerate(prompts):
                        rendered = render_prompt(
                            self._renderer, list(prompt), tool_specs(self._tools)
                        )
                        for member in range(SAMPLES_A_GROUP):
                            group.create_task(self._sample(number, member, prompt, rendered, room))
                disturbing.cancel()
        finally:
            await self._engine.aclose()
        return self._found

    async def _sample(
        self,
        number: int,
        member: int,
        prompt: Sequence[Message],
        rendered: PromptIds,
        room: asyncio.Semaphore,
    ) -> None:
        group = PromptGroup(FIRST_GROUP + number, SAMPLES_A_GROUP, list(prompt))
        sample = Sample(
            group_index=group.group_index, member=member, index=group.group_index * 4096 + member,
            rollout_id=group.group_index * 4096 + member, prompt=list(prompt),
            routing_key=f"direct-{number}",
        )  # fmt: skip
        generate = single_turn if number % SINGLE_EVERY == SINGLE_EVERY - 1 else multi_turn
        async with room:
            for attempt in range(1000):
                given = self._given(sample, number, rendered)
                output = (await generate(given)).samples
                assert isinstance(output, Sample)
                sample = output
                if sample.stop_reason is not StopReason.ABORT_WEIGHTS:
                    break
                self._found.resumes += 1
                self._found.resumed += attempt == 0
                sample = _parked(sample, group)
        self._found.samples.append(sample)

    def _given(self, sample: Sample, number: int, rendered: PromptIds) -> GenerateInput:
        group_index, member = FIRST_GROUP + number, sample.member
        return GenerateInput(
            sample=sample,
            sampling=Sampling(
                temperature=temperature_of(number, TEMPERATURES),
                max_new_tokens=MAX_NEW_TOKENS,
                stop_token_ids=self._renderer.stop_token_ids,
            ),
            engine=self._engine,
            renderer=self._renderer,
            tools=self._tools,
            spans=SpanList(),
            deadline=time.monotonic() + SAMPLE_S,
            prompt=rendered,
            limits=Limits(max_turns=MAX_TURNS, max_context=MAX_CONTEXT, max_response=MAX_RESPONSE),
            version=lambda: self._control.version,
            turn_seed=lambda turn: call_seed(self._seed, group_index, member, turn),
        )

    async def _disturb(self) -> None:
        """Abort one call or all at random moments, and bring new weights three times."""
        wire = WireFolder(self._wire_dir)
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / DISTURB_S))
            done = len(self._found.samples) / self._total
            if self._updates and done >= self._updates[0]:
                self._updates.pop(0)
                aborting = len(self._updates) == 1
                await asyncio.to_thread(self._control.update, abort_all=aborting)
                self._found.aborts += aborting
                continue
            running = wire.in_flight()
            if not running:
                continue
            chosen = None if self._draw.random() < 0.15 else self._draw.choice(running)
            await asyncio.to_thread(self._control.abort, chosen)
            self._found.aborts += 1


def _parked(sample: Sample, group: PromptGroup) -> Sample:
    """Return a sample as it comes back from the queue's body, with its ending."""
    back = decode_body(encode_body(sample), group, encode_text(sample))
    assert isinstance(back, Sample)
    assert sample.stop_reason is not None
    back.group_index, back.member = sample.group_index, sample.member
    back.finish(sample.stop_reason, STATUS_OF[sample.stop_reason])
    return back
