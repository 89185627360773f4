"""The agent of the proof, one function: `worker.agent = "…/tests/e2e/agents/agent.py:run"`.

Owns the conversations of one attempt, as its plan has them. Never judges, and knows nothing of who
answers. Invariant: what it echoes is what it was told.

It is told where to write, and by which seed to act, by the environment.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.agents.asking import Client, Left, Plain, Refused, Sdk
from tests.e2e.agents.line import Line
from tests.e2e.agents.plan import Fate, Kind, Plan, Step, plan_of
from tests.e2e.agents.scenes import FOLDER, MAX_NEW_TOKENS, SEED, TREE, WENT_ON
from tests.e2e.agents.words import DIALECTS, Item, Said
from tests.e2e.weights.journal import Journal

TOOL: Item = {
    "name": "calculator",
    "description": "Compute an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
_ODD = ("", " naïve 🤔 →", " </tool_call> in a text", " 日本語\tと\r\n改行", " <|im_end|> as text")


@dataclass
class Talk:
    """One conversation."""

    system: str
    tool: Item | None
    items: list[Item] = field(default_factory=list)
    past: list[tuple[list[Item], list[Item], Said]] = field(default_factory=list)
    """(what stood before, what was new, the reply) of every turn that it went on from."""


class Player:
    """Plays one plan."""

    def __init__(self, base_url: str, plan: Plan, marker: str, task: str, journal: Journal) -> None:
        self._base_url, self._plan, self._marker, self._task = base_url, plan, marker, task
        self._journal = journal
        self._dialect = DIALECTS[plan.dialect]
        self._numbers, self._lines = itertools.count(), itertools.count()
        self._texts = itertools.count(1)
        self._clients: list[Client] = []
        self._line, self._client = self._new_client()

    def _new_client(self) -> tuple[Line, Client]:
        line = Line(self._journal, self._numbers, number := next(self._lines))
        client: Client
        if self._plan.sdk:
            client = Sdk(self._base_url, self._dialect, line)
        else:
            # Some clients name their requests; a name is the same for all tries of one.
            keyed = f"{self._marker}-{number}" if self._plan.by_id else ""
            client = Plain(self._base_url, self._dialect, line, keyed=keyed)
        self._clients.append(client)
        return line, client

    async def play(self) -> None:
        """Play it to its end.

        Raises:
            Refused: somebody would not go on.
        """
        main = Talk(f"You are agent {self._marker}.", TOOL if self._plan.tools else None)
        for step in self._plan.steps:
            main = await self._step(main, step)
            self._journal.write("step", kind=step.kind.value)

    async def aclose(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.aclose()

    async def _step(self, main: Talk, step: Step) -> Talk:
        kind = step.kind
        last = main.past[-1][2] if main.past else None
        if kind in (Kind.RESEND, Kind.RESEND_OLD) and last is not None:
            before, new, old = main.past.pop()
            said = await self._ask(main, step, before, new)
            self._keep(main, before, new, said if kind is Kind.RESEND else old)
        elif kind is Kind.EDIT and last is not None:
            before, _, _ = main.past.pop()
            new = self._next(main.past[-1][2] if main.past else None, step, edited=True)
            self._keep(main, before, new, await self._ask(main, step, before, new))
        elif kind is Kind.BACK and len(main.past) > step.count:
            del main.past[-step.count :]
            before, _, _ = main.past.pop()
            new = self._next(main.past[-1][2] if main.past else None, step, edited=True)
            self._keep(main, before, new, await self._ask(main, step, before, new))
        elif kind is Kind.COMPACT:
            main = Talk(main.system, main.tool)
            text = f"{self._task} [{self._marker}] So far: {len(self._plan.steps)} steps were done."
            new = self._dialect.user(f"{text} Go on with part {next(self._texts)}.")
            self._keep(main, [], new, await self._ask(main, step, [], new))
        elif kind is Kind.SUB:
            await self._sub(step, step.count, self._line, self._client)
        elif kind is Kind.SUBS:
            async with asyncio.TaskGroup() as group:
                for _ in range(2):
                    group.create_task(self._sub(step, step.count, *self._new_client()))
        else:
            await self._turn(main, step)
        return main

    async def _sub(self, step: Step, turns: int, line: Line, client: Client) -> None:
        """Run a sub-agent: a short conversation of its own."""
        talk = Talk(f"You help another agent, in matter {next(self._texts)}.", None)
        for number in range(turns):
            first = Step(step.kind, step.stream, step.fates if number == 0 else (), draw=step.draw)
            await self._turn(talk, first, line, client)

    async def _turn(
        self, talk: Talk, step: Step, line: Line | None = None, client: Client | None = None
    ) -> None:
        before = list(talk.items)
        new = self._next(talk.past[-1][2] if talk.past else None, step)
        said = await self._ask(talk, step, before, new, line, client)
        self._keep(talk, before, new, said)

    @staticmethod
    def _keep(talk: Talk, before: list[Item], new: list[Item], said: Said) -> None:
        talk.past.append((before, new, said))
        talk.items = [*before, *new, *said.items]

    def _next(self, last: Said | None, step: Step, *, edited: bool = False) -> list[Item]:
        """Return what an agent says next: results of the calls, else something of a user's."""
        number = next(self._texts)
        extra = f" (another try, {number})" if edited else ""
        if last is not None and last.calls:
            results = [
                (call_id, f"{value_of(arguments)}{extra}") for call_id, _, arguments in last.calls
            ]
            return self._dialect.results(results)
        odd = _ODD[step.draw % len(_ODD)]
        if last is None:
            return self._dialect.user(f"{self._task} [{self._marker}]{odd}{extra}")
        return self._dialect.user(f"Part {number}: and with {step.draw % 97} more?{odd}{extra}")

    async def _ask(
        self, talk: Talk, step: Step, before: list[Item], new: list[Item],
        line: Line | None = None, client: Client | None = None,
    ) -> Said:  # fmt: skip
        """Ask until there is a reply, whatever happens on the way."""
        line, client = line or self._line, client or self._client
        previous = ""
        if self._plan.dialect == "responses" and self._plan.by_id and before:
            previous = talk.past[-1][2].id
        body = self._dialect.body(
            talk.system, new if previous else [*before, *new], tool=talk.tool,
            most=MAX_NEW_TOKENS, stream=step.stream, previous=previous,
        )  # fmt: skip
        line.fates[:] = [f for f in step.fates if f is not Fate.PASS]
        try:
            reply = await client.ask(body)
        except Left:
            line.fates.clear()
            reply = await client.ask(body)
        said = self._dialect.said(reply, thinks=self._plan.echoes_reasoning)
        if said.finish == "length":
            await self._go_on(talk, [*before, *new, *said.items], client)
        return said

    async def _go_on(self, talk: Talk, items: list[Item], client: Client) -> None:
        """Try to go on from a reply that was cut, as an agent does that does not look.

        Raises:
            Refused: so it should be.
        """
        body = self._dialect.body(
            talk.system, [*items, *self._dialect.user("Go on.")], tool=talk.tool,
            most=MAX_NEW_TOKENS, stream=False, previous="",
        )  # fmt: skip
        await client.ask(body)
        raise Refused(WENT_ON)


def value_of(arguments: str) -> str:
    """Return what the tool gives."""
    words = [word for word in arguments.replace('"', " ").replace("}", " ").split() if word]
    numbers = [int(word) for word in words if word.lstrip("-").isdigit()]
    return f"value {sum(numbers)}"


async def run(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kw: Any
) -> dict[str, Any]:
    """Be one agent."""
    group, member = str(metadata["row"]), kw["sample_index"] % 4096
    nonce = secrets.token_hex(6)
    plan = plan_of(int(os.environ[SEED]), int(group), member, tree=bool(os.environ[TREE]))
    journal = Journal(Path(os.environ[FOLDER]) / f"attempt-{nonce}.jsonl")
    journal.write(
        "begin", nonce=nonce, group=group, member=member, pid=os.getpid(), dialect=plan.dialect,
        sdk=plan.sdk,
    )  # fmt: skip
    player = Player(base_url, plan, f"session {nonce}", prompt[-1]["content"], journal)
    stopped = ""
    try:
        await player.play()
    except* Refused as errors:
        stopped = str(errors.exceptions[0])
    finally:
        await player.aclose()
    journal.write("end", stopped=stopped, at_s=time.time())
    journal.close()
    return {"nonce": nonce, "reward": float(member)}
