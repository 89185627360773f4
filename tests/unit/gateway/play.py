"""A session over a scripted engine in process: what an agent asks, and what comes of it.

The toy renderer unless told otherwise; every sample that `end` returns was held against what the
engine really saw and sampled, by the worker's own watch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.errors import EngineFault
from rollstream.sample import PrefixCacheInfo, Sample
from tests.generate_stage import Asked, Says, given
from tests.toy import HI, toy_renderer
from worker.gateway.book import Book
from worker.gateway.exchange import SessionExchange
from worker.gateway.prompting import Prompter
from worker.gateway.session import SessionRules
from worker.gateway.types import ChatReply, ChatRequest, Delta, Refusal
from worker.members.fidelity import Watch, WatchedEngine
from worker.tito.ids import as_ids, ids_json
from worker.types import Completion, Finish, RequestIds

USER, TOOL = "user", "tool"


async def wait_until(true: Callable[[], object]) -> None:
    """Wait for something of this loop to become true."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


@dataclass
class Held:
    """A reply whose engine goes on only when it is told to."""

    then: Any
    streamed: Sequence[int] = ()
    """Ids that its sink is told before."""
    go: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """Replies in order, then `default`'s; told to a reader as they are, piece by piece."""

    def __init__(self, steps: Sequence[Any], default: Callable[[Asked], Says] | None) -> None:
        self._steps, self._default = list(steps), default
        self.asked: list[Asked] = []
        self.salts: list[int | None] = []
        self.starts: list[int | None] = []
        self.versions: list[int] = []
        self.in_flight = self.cancelled = 0
        self.said: list[Says] = []
        """What it answered, in the order of its answers."""
        self.piece = 2

    async def generate(
        self,
        prompt: RequestIds,
        sampling: Any,
        *,
        routing_key: str,
        version: int,
        deadline_s: float | None = None,
        salt: int | None = None,
    ) -> Completion:
        ids = json.loads(b"[" + b",".join(prompt.pieces) + b"]")
        assert len(ids) == prompt.num_tokens
        assert deadline_s is not None
        assert deadline_s > 0
        number = len(self.asked)
        asked = Asked(
            ids, sampling.max_new_tokens, sampling.temperature, sampling.seed, routing_key
        )
        self.asked.append(asked)
        self.salts.append(salt)
        self.starts.append(prompt.replay_start)
        self.versions.append(version)
        self.in_flight += 1
        try:
            says = await self._says(prompt, f"{number:032x}", asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        self.said.append(says)
        completion = completion_of(says, f"{number:032x}", len(ids))
        if prompt.witness is not None and (says.ids or says.finish != "abort"):
            prompt.witness.add(tuple(prompt.pieces), completion)
        return completion

    async def _says(self, prompt: RequestIds, rid: str, asked: Asked) -> Says:
        if self._steps:
            step = self._steps.pop(0)
        else:
            assert self._default is not None, "the engine was asked once too often"
            step = self._default(asked)
        sink = prompt.sink
        if isinstance(step, Held):
            if sink is not None and step.streamed:
                assert sink.begin(rid)
                sink.add(as_ids(step.streamed))
            await step.go.wait()
            streamed, step = list(step.streamed), step.then
        else:
            streamed = []
        if callable(step):  # which tells the sink itself
            says: Says = await step(prompt)
            return says
        if isinstance(step, BaseException):
            raise step
        assert isinstance(step, Says)
        if sink is not None:
            if not streamed and not sink.begin(rid):
                raise EngineFault("something was passed on", retryable=True, detail="reset")
            for at in range(len(streamed), len(step.ids), self.piece):
                sink.add(as_ids(step.ids[at : at + self.piece]))
                await asyncio.sleep(0)
        return step

    async def probe(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is open."""


class LightEngine(Engine):
    """Always says the same, and does not read what it is asked, which is quadratic."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__([], None)
        self._ids = ids
        self.pieces: list[tuple[bytes, ...]] = []
        """Of every request."""

    async def generate(self, prompt: RequestIds, sampling: Any, **rest: Any) -> Completion:
        """Answer."""
        del sampling, rest
        self.pieces.append(tuple(prompt.pieces))
        number = len(self.pieces)
        return completion_of(Says(self._ids), f"{number:032x}", prompt.num_tokens)


def completion_of(says: Says, rid: str, num_prompt: int) -> Completion:
    """Return a reply as a client of an engine makes it."""
    num = len(says.ids)
    return Completion(
        ids=as_ids(says.ids),
        log_probs=np.array([-(i + 1) / 128 for i in range(num)], dtype=np.float32),
        json=ids_json(as_ids(says.ids)),
        finish=Finish(says.finish),
        versions=[(says.version, 0, num)] if num else [],
        engine="http://in-process",
        rid=rid,
        matched=says.matched,
        cache=PrefixCacheInfo(says.cached, num_prompt),
        dispatched_version=says.dispatched,
    )


class Play:
    """One session and its engine."""

    def __init__(
        self,
        *steps: Any,
        default: Callable[[Asked], Says] | None = None,
        renderer: Any = None,
        rules: dict[str, Any] | None = None,
        prompt: Any = HI,
        engine: Any = None,
        **changes: Any,
    ) -> None:
        self.renderer = renderer or toy_renderer()
        self.engine = engine or Engine(steps, default)
        self.given = given(self.engine, self.renderer, prompt, **changes)
        self.watch = Watch(self.given.prompt)
        self.given.engine = WatchedEngine(self.engine, self.watch)
        self.book = Book()
        self.rules = SessionRules(**{"prompter": Prompter(self.renderer)} | (rules or {}))
        self.session = self.book.open(self.given, self.rules)

    async def begin(self, messages: Sequence[Any], **fields: Any) -> SessionExchange:
        """Begin a request."""
        return await self.session.begin(ChatRequest(list(messages), **fields))

    async def ask(self, messages: Sequence[Any], **fields: Any) -> ChatReply:
        """Ask, read along where it is a stream, and take the reply."""
        exchange = await self.begin(messages, **fields)
        return await take(exchange, stream=bool(fields.get("stream")))

    async def go_on(self, history: list[Any], *new: Any, **fields: Any) -> ChatReply:
        """Ask behind a history with new messages; both and the reply are appended to it."""
        history += new
        reply = await self.ask(history, **fields)
        history.append(echo(reply))
        return reply

    async def end(self) -> list[Sample]:
        """Close and collect; every sample is checked."""
        await self.session.close()
        found = await self.session.collect()
        samples = found if isinstance(found, list) else [found]
        for sample in samples:
            check(sample, self)
        check_counts(samples, self)
        assert self.engine.in_flight == 0
        return samples

    async def the_sample(self) -> Sample:
        """Close and collect what must be one scalar sample."""
        samples = await self.end()
        assert await self.session.collect() is samples[0]
        return samples[0]


async def take(exchange: SessionExchange, *, stream: bool = False) -> ChatReply:
    """Read a reply to its end, and commit it."""
    deltas = [delta async for delta in exchange.deltas()] if stream else None
    reply = await exchange.reply()
    if deltas is not None:
        assert joined(deltas) == whole(reply.message)
    exchange.commit()
    return reply


def echo(reply: ChatReply) -> dict[str, Any]:
    """Return a reply as a client sends it back: a copy through JSON."""
    copy: dict[str, Any] = json.loads(json.dumps(reply.message))
    return copy


def user(text: str) -> dict[str, str]:
    """Return a message of the user."""
    return {"role": USER, "content": text}


def system(text: str) -> dict[str, str]:
    """Return a system message."""
    return {"role": "system", "content": text}


def request_of(messages: Any) -> Any:
    """Return a request that asks for nothing but a reply."""
    from worker.gateway.types import ChatRequest

    return ChatRequest(list(messages))


def joined(deltas: Sequence[Delta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return what the deltas of one reply come to."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for entry in delta.get("tool_calls", ()):
            call = calls.setdefault(entry["index"], ["", "", ""])
            call[0] += entry.get("id", "")
            call[1] += entry["function"].get("name", "")
            call[2] += entry["function"].get("arguments", "")
    return content, reasoning, [(a, b, c) for a, b, c in calls.values()]


def whole(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return a message in the form of `joined`."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message["content"], message.get("reasoning_content", ""), calls


def check(sample: Sample, play: Play) -> None:
    """Assert what every sample must fulfil."""
    sample.validate()
    assert play.watch.check(sample) is None
    assert play.watch.num_unknown == 0
    asked = {f"{n:032x}": one for n, one in enumerate(play.engine.asked)}
    said = dict(zip(asked, play.engine.said, strict=False)) if play.engine.cancelled == 0 else {}
    tokens = sample.tokens.tolist()
    for call in sample.calls:
        assert tokens[: call.start] == asked[call.rid].ids
        assert call.sampling["seed"] == asked[call.rid].seed
        assert call.sampling["max_new_tokens"] == asked[call.rid].max_new_tokens
    del said
    assert sample.loss_mask is not None
    assert bool((sample.loss_mask <= sample.sampled_mask()).all())
    text = play.renderer.decode(sample.tokens[sample.prompt_length :])
    assert sample.response == text


def check_counts(samples: Sequence[Sample], play: Play) -> None:
    """Assert that every sampled token trains once, or is counted as dropped."""
    stats = play.session.stats
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)  # type: ignore[union-attr]
    assert stats["sampled_tokens"] == trained + stats["dropped_tokens"], stats
    rids = [
        call.rid
        for sample in samples
        for call in sample.calls
        if sample.loss_mask is not None
        and sample.loss_mask[
            call.start - sample.prompt_length : call.end - sample.prompt_length
        ].any()
    ]
    assert len(rids) == len(set(rids))
    assert all(sample.rollout_id == samples[0].rollout_id for sample in samples)


async def refused(coming: Any) -> Refusal:
    """Return what a request is refused with."""
    try:
        await coming
    except Refusal as refusal:
        return refusal
    raise AssertionError("it was answered")


def later(play: Play, seconds: float) -> None:
    """Give the sample so much more time."""
    play.given.deadline = time.monotonic() + seconds


def changed(request: ChatRequest, **fields: Any) -> ChatRequest:
    """Return a request with other fields."""
    return dataclasses.replace(request, **fields)
