"""A real gateway over the toy vocabulary: real HTTP to the client, exact ids at the engine.

The engine is a list of replies in this process; it honours a sink as the clients of real engines
do, so a stream is one, and it cuts what is longer than the cap.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pytest
from openai import AsyncOpenAI

from rollstream.errors import EngineFault
from rollstream.sample import PrefixCacheInfo, Sample
from tests.generate_stage import given
from tests.toy import HI, toy_renderer
from worker.gateway.book import Book
from worker.gateway.dialects.openai_chat import OpenAIChat
from worker.gateway.matchers import resolve_matcher
from worker.gateway.picker import resolve_picker
from worker.gateway.prompting import Prompter
from worker.gateway.server import Gateway
from worker.gateway.session import SessionRules
from worker.sampling import Sampling
from worker.tito.ids import as_ids, ids_json
from worker.types import Completion, DivergencePolicy, Finish, RequestIds

RENDERER = toy_renderer()
WAIT_S = 20.0


def said(text: str, *, closed: bool = True) -> list[int]:
    """Return the ids of a reply, its markers as the control ids they are."""
    ids: list[int] = RENDERER.encode_raw(text).tolist()
    return [*ids, 2] if closed else ids


def call_text(name: str, arguments: Any) -> str:
    """Return a call as the model writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


@dataclass
class Says:
    """One reply of the engine."""

    ids: Sequence[int]
    log_probs: Sequence[float] | None = None
    """-(i + 1) / 128 where none are given."""
    finish: str = "stop"
    held: asyncio.Event | None = None
    """Nothing comes before it is set."""
    slow: asyncio.Event | None = None
    """All but the first id wait for it."""
    piece: int = 1
    """Ids that a sink gets at once."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)


Step: TypeAlias = "Says | Sequence[int] | Exception"


@dataclass
class Asked:
    """One request as the engine got it."""

    ids: list[int]
    sampling: Sampling
    streams: bool
    routing_key: str


class ToyEngine:
    """An engine that is a list of replies."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self.asked: list[Asked] = []
        self.stopped: list[int] = []
        """Which requests were cancelled before they were answered."""
        self._rids = itertools.count(1)

    @property
    def prompts(self) -> list[list[int]]:
        """The ids of every request."""
        return [asked.ids for asked in self.asked]

    async def generate(
        self,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        routing_key: str,
        version: int,
        deadline_s: float | None = None,
        salt: int | None = None,
    ) -> Completion:
        del version, deadline_s, salt
        assert sampling.max_new_tokens >= 1
        ids = json.loads(b"[" + b",".join(prompt.pieces) + b"]")
        assert len(ids) == prompt.num_tokens
        number = len(self.asked)
        self.asked.append(Asked(ids, sampling, prompt.sink is not None, routing_key))
        step = self.steps.pop(0) if self.steps else AssertionError("no more replies")
        if isinstance(step, Exception):
            raise step
        try:
            return await self._say(step if isinstance(step, Says) else Says(step), prompt, sampling)
        except asyncio.CancelledError:
            self.stopped.append(number)
            raise

    async def _say(self, says: Says, prompt: RequestIds, sampling: Sampling) -> Completion:
        rid = f"{next(self._rids):032x}"
        says.begun.set()
        if says.held is not None:
            async with asyncio.timeout(WAIT_S):
                await says.held.wait()
        ids, finish = list(says.ids), Finish(says.finish)
        if len(ids) > sampling.max_new_tokens:
            ids, finish = ids[: sampling.max_new_tokens], Finish.LENGTH
        if prompt.sink is not None:
            assert prompt.sink.begin(rid)
            for at in range(0, len(ids), says.piece):
                prompt.sink.add(as_ids(ids[at : at + says.piece]))
                await asyncio.sleep(0)
                if says.slow is not None:
                    async with asyncio.timeout(WAIT_S):
                        await says.slow.wait()
        log_probs = says.log_probs or [-(i + 1) / 128 for i in range(len(ids))]
        return Completion(
            ids=as_ids(ids),
            log_probs=np.array(log_probs[: len(ids)], dtype=np.float32),
            json=ids_json(as_ids(ids)),
            finish=finish,
            versions=[(0, 0, len(ids))] if ids else [],
            engine="http://toy",
            rid=rid,
            cache=PrefixCacheInfo(4, prompt.num_tokens),
            dispatched_version=0,
        )

    async def probe(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is open."""


@dataclass
class Toy:
    """One session of a gateway, and what stands on both sides of it."""

    engine: ToyEngine
    session: Any
    book: Book
    gateway: Gateway
    clients: list[AsyncOpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The base URL that an agent gets."""
        return self.gateway.base_url(self.session.key)

    def client(self, *, retries: int = 0, timeout_s: float = WAIT_S, **more: Any) -> AsyncOpenAI:
        """Return an SDK's client, closed with the stage."""
        client = AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=retries,
            timeout=timeout_s,
            **more,
        )
        self.clients.append(client)
        return client

    async def chat(self, messages: Sequence[Any] = HI, **fields: Any) -> Any:
        """Return what the SDK makes of one request."""
        client = self.clients[0] if self.clients else self.client()
        return await client.chat.completions.create(model="m", messages=list(messages), **fields)

    async def collected(self) -> list[Sample]:
        """Close the session and return its samples, each checked."""
        await self.session.close()
        found = await self.session.collect()
        samples = found if isinstance(found, list) else [found]
        for sample in samples:
            sample.validate()
        return samples

    async def sample(self) -> Sample:
        """Close the session and return its one sample."""
        (sample,) = await self.collected()
        return sample


def spans_of(sample: Sample) -> list[tuple[list[int], int]]:
    """Return the response as (ids, mask value) of every stretch of one mask value."""
    assert sample.loss_mask is not None
    tokens = sample.tokens[sample.prompt_length :].tolist()
    pairs = zip(tokens, sample.loss_mask.tolist(), strict=True)
    return [
        ([number for number, _ in run], int(mask))
        for mask, run in itertools.groupby(pairs, key=lambda pair: pair[1])
    ]


@asynccontextmanager
async def toy_gateway(
    *steps: Step,
    prompt: Any = HI,
    renderer: Any = RENDERER,
    kind: str = "linear",
    on_divergence: DivergencePolicy = DivergencePolicy.KEEP_PREFIX,
    matcher: str = "rendered",
    picker: str = "drop_retries",
    max_turns: int = 1024,
    max_in_flight: int = 32,
    limits: dict[str, Any] | None = None,
    sampling: Sampling | None = None,
    dialects: Sequence[Any] | None = None,
    **more: Any,
) -> AsyncIterator[Toy]:
    """Yield a session of a gateway whose engine gives these replies in order."""
    engine = ToyEngine(steps)
    book = Book()
    gateway = Gateway(book, dialects or [OpenAIChat()], port=0)
    await gateway.start()
    rules = SessionRules(
        kind=kind,
        on_divergence=on_divergence,
        matcher=resolve_matcher(matcher),
        picker=resolve_picker(picker),
        prompter=Prompter(renderer),
        max_turns=max_turns,
        max_in_flight=max_in_flight,
    )
    pinned = sampling or Sampling(temperature=0.7, max_new_tokens=3000)
    session = book.open(
        given(engine, renderer, prompt, limits=limits, sampling=pinned, **more), rules
    )
    toy = Toy(engine, session, book, gateway)
    try:
        yield toy
    finally:
        for client in toy.clients:
            await client.close()
        await session.close()
        await gateway.aclose()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something to become true."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.002)
    except TimeoutError:
        pytest.fail(f"timed out waiting for {what}")


def engine_fault(message: str = "no engine answered") -> EngineFault:
    """Return what the pool raises once its own retries are used up."""
    return EngineFault(message, retryable=True, detail="unreachable")
