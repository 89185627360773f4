"""A member that goes from worker to worker, without a queue: attempts, and what is parked between.

Replies come from a list (`tests.generate_stage.InProcess`), each attempt runs on a `Rollout` of its
own behind a gate of its own, and what one parks the next one finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rollstream.errors import Report
from rollstream.queue.answers import Lease
from rollstream.sample import Sample
from tests.generate_stage import InProcess, Step
from tests.toy import A1, HI, toy_renderer
from tests.unit.worker.works import a_book, a_work, an_env, leased
from worker.engines.protocol.request import new_rid
from worker.generate import multi_turn
from worker.generate.finish import finish
from worker.generate.resumable import is_resumable
from worker.members.fidelity import Fidelity
from worker.members.gate import Gate, GatedEngine
from worker.members.parked import Parking, parked_body
from worker.members.rollout import Rollout
from worker.members.work import Ending, Work, leaves_of
from worker.sampling import Sampling
from worker.tito.load import render_prompt
from worker.types import AssistantMessage, Completion, Limits, RequestIds, ToolCall


class CallsInA1:
    """The toy renderer, reading a call of `f` in A1, and an answer in everything else."""

    def __init__(self) -> None:
        self._inner = toy_renderer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def parse(self, completion: Any, prompt_tail: Any, tools: Any = None) -> AssistantMessage:
        message: AssistantMessage = self._inner.parse(completion, prompt_tail, tools)
        if completion.tolist() == A1:
            message.tool_calls = [ToolCall("call_1", "f", {})]
        return message


class Witnessed(InProcess):
    """An engine whose calls are witnessed and named as a client's are."""

    def __init__(self, steps: Sequence[Step], salts: list[int | None]) -> None:
        super().__init__(steps)
        self._salts = salts

    async def generate(self, prompt: RequestIds, sampling: Any, **fields: Any) -> Completion:
        self._salts.append(fields["salt"])
        completion = await super().generate(prompt, sampling, **fields)
        completion.rid = new_rid()
        if prompt.witness is not None:
            prompt.witness.add(tuple(prompt.pieces), completion)
        return completion


class Member:
    """One member of group 0, as the queue would keep it."""

    def __init__(
        self,
        *,
        generate: Any = multi_turn,
        tools: Sequence[Any] = (),
        limits: dict[str, Any] | None = None,
        sampling: Sampling | None = None,
        partial: bool = True,
        max_resumes: int = 16,
        version: Callable[[], int] = lambda: 0,
        key: str = "0",
        **options: Any,
    ) -> None:
        self.body: bytes | None = None
        self.parked_bytes: int | None = None
        """What a lease's answer says; None is the body's size."""
        self.renderer: Any = CallsInA1()
        self.limits = Limits(**({"max_turns": 4, "max_context": 64} | (limits or {})))
        self.env = an_env(
            generate, tools={tool.name: tool for tool in tools}, limits=self.limits,
            sampling=sampling or Sampling(max_new_tokens=32), resumable=is_resumable(generate),
            **{k: options.pop(k) for k in ("scorer", "generate_path") if k in options},
        )  # fmt: skip
        self.partial, self.max_resumes, self.version = partial, max_resumes, version
        self.options, self.key, self.group_fields = options, key, dict[str, Any]()
        self.works: list[Work] = []
        self.gate = Gate()
        self.fidelity = Fidelity()
        self.asked: list[Any] = []
        self.salts: list[int | None] = []
        """Of every call, over all attempts."""

    async def fetch(self, lease: Lease) -> bytes | None:
        return self.body

    async def attempt(self, *steps: Step) -> Ending:
        """Run one attempt on a worker of its own; what it parks is kept."""
        book = a_book(self.env, render=lambda *_: render_prompt(self.renderer, HI, None))
        self.gate, self.fidelity, engine = Gate(), Fidelity(), Witnessed(steps, self.salts)
        parking = Parking(self.fetch, max_token_id=151_668, max_resumes=self.max_resumes)
        rollout = Rollout(
            engine=GatedEngine(engine, self.gate), renderer=self.renderer, book=book,
            finish=finish, version=self.version, run_seed=7, fidelity=self.fidelity,
            parking=parking if self.partial else None, **self.options,
        )  # fmt: skip
        group = leased(prompt=HI, **self.group_fields)
        if self.key != "0":
            members = [
                dataclasses.replace(m, lease=Lease(self.key, m.lease.member, m.lease.token))
                for m in group.members
            ]
            group = dataclasses.replace(group, group_index=self.key, members=members)
        work = a_work(book, group)
        size, self.parked_bytes = self.parked_bytes, None
        work.parked_bytes = len(self.body or b"") if size is None else size
        self.works.append(work)
        ending = await rollout.run(work)
        self.asked = engine.asked
        if ending.report is Report.PARK:
            assert isinstance(ending.trajectory, Sample)
            self.body = parked_body(ending.trajectory, work.resumes)
        elif ending.forget:
            self.body = None
        return ending


def sample_of(ending: Ending) -> Sample:
    """Return the one sample of an ending."""
    assert ending.trajectory is not None, ending.error
    (sample,) = leaves_of(ending.trajectory)
    return sample
