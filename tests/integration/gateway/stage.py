"""The stage of the gateway's tests: a real gateway, real sessions, the real Qwen3 renderer.

The engine is a script in process (`Script`, which streams), the same replies as an engine's bytes
over HTTP, or the simulated engine; whichever it is, `stage.asked` is what it was asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from rollstream.errors import EngineFault
from rollstream.sample import PrefixCacheInfo, SpecInfo
from tests.generate_stage import Asked, Says, engine_of, given
from tests.sim_server import sim_server
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.sim.policy import Policy
from worker.gateway.dialects.anthropic import AnthropicMessages
from worker.gateway.dialects.openai_chat import OpenAIChat
from worker.gateway.limits import HttpLimits
from worker.gateway.prompting import Prompter
from worker.gateway.server import Gateway
from worker.sampling import Sampling
from worker.tito.ids import as_ids, ids_json
from worker.types import Completion, Finish, GenerateInput, RequestIds

MAX_TOKEN_ID = 151668
HELLO = [{"role": "user", "content": "What is 1+7?"}]


async def wait_until(true: Callable[[], bool]) -> None:
    """Wait for something of this loop to become true."""
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.002)


@dataclass
class Held:
    """A reply whose engine goes on only when it is told to."""

    says: Says
    after: int = 1
    """Ids that are sampled before it waits."""
    go: asyncio.Event = field(default_factory=asyncio.Event)


def text(renderer: Any, *texts: str, finish: str = "stop") -> list[Says]:
    """Return replies of these texts, each with the end of its turn (unless it was cut)."""
    ends = renderer.stop_token_ids[:1] if finish == "stop" else ()
    return [
        Says([*renderer.encode_raw(t).tolist(), *ends], finish, matched=ends[0] if ends else None)
        for t in texts
    ]


class Script:
    """An engine in process: replies in order, then `default`'s, streamed in pieces to a sink."""

    def __init__(self, *steps: Any, default: Callable[[Asked], Says] | None = None) -> None:
        self.steps, self.default = list(steps), default
        self.asked: list[Asked] = []
        self.in_flight = self.cancelled = 0
        self.piece = 3

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
        ids = json.loads(b"[" + b",".join(prompt.pieces) + b"]")
        assert len(ids) == prompt.num_tokens
        asked = Asked(
            ids, sampling.max_new_tokens, sampling.temperature, sampling.seed, routing_key
        )
        rid = f"{len(self.asked):032x}"
        self.asked.append(asked)
        self.in_flight += 1
        try:
            return await self._say(prompt, rid, asked)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _say(self, prompt: RequestIds, rid: str, asked: Asked) -> Completion:
        if self.steps:
            step = self.steps.pop(0)
        else:
            assert self.default is not None, "the engine was asked once too often"
            step = self.default(asked)
        if callable(step):
            step = await step()
        if isinstance(step, BaseException):
            raise step
        held = step if isinstance(step, Held) else None
        says: Says = step if held is None else held.says
        sink = prompt.sink
        if sink is not None and not sink.begin(rid):
            raise EngineFault("something of an earlier try was passed on", retryable=False)
        passed = 0
        while passed < len(says.ids):
            if held is not None and passed >= held.after:
                await held.go.wait()
            upto = held.after if held is not None and passed < held.after else passed + self.piece
            piece = says.ids[passed:upto]
            if sink is not None:
                sink.add(as_ids(piece))
            passed += len(piece)
            await asyncio.sleep(0)
        if held is not None:
            await held.go.wait()
        return _completion(says, rid, len(asked.ids))

    async def probe(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is open."""


def _completion(says: Says, rid: str, num_prompt: int) -> Completion:
    num = len(says.ids)
    return Completion(
        ids=as_ids(says.ids),
        log_probs=np.array([-i / 128 for i in range(num)], dtype=np.float32),
        json=ids_json(as_ids(says.ids)),
        finish=Finish(says.finish),
        versions=[(says.version, 0, num)] if num else [],
        engine="http://in-process",
        rid=rid,
        matched=says.matched,
        cache=PrefixCacheInfo(says.cached, num_prompt),
        spec=SpecInfo(says.accepted, says.drafted, says.verified, num),
        dispatched_version=says.dispatched,
    )


@dataclass
class Stage:
    """What a test of the gateway has."""

    gateway: Gateway
    book: Any
    engine: Any
    renderer: Any
    client: httpx.AsyncClient
    """Without a base URL; it keeps its connections."""
    rules: dict[str, Any]
    session: Any = None
    """The first one that was opened, and its input and key."""
    given: GenerateInput | None = None
    sim: Any = None
    opened: list[Any] = field(default_factory=list)

    @property
    def asked(self) -> list[Asked]:
        """Return what the engine was asked."""
        asked: list[Asked] = self.engine.asked
        return asked

    @property
    def url(self) -> str:
        """Return the first session's URL, as its agent gets it."""
        return self.gateway.base_url(self.session.key)

    def open(self, *, rules: dict[str, Any] | None = None, **changes: Any) -> Any:
        """Open a session; `changes` are `generate_stage.given`'s."""
        from worker.gateway.session import SessionRules

        leased = given(self.engine, self.renderer, **changes)
        session = self.book.open(leased, SessionRules(**self.rules | (rules or {})))
        self.opened.append(session)
        if self.session is None:
            self.session, self.given = session, leased
        return session

    async def post(
        self, path: str, body: Any, *, session: Any = None, **headers: str
    ) -> httpx.Response:
        """Post JSON below a session's URL."""
        url = self.url if session is None else self.gateway.base_url(session.key)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(f"{url}/{path}", json=body, headers=headers)

    async def chat(
        self, messages: Any = HELLO, *, session: Any = None, headers: Any = None, **fields: Any
    ) -> httpx.Response:
        """Ask for a chat completion."""
        body = {"model": "m", "messages": messages, **fields}
        return await self.post("v1/chat/completions", body, session=session, **(headers or {}))

    async def turn(self, messages: list[Any], **fields: Any) -> Any:
        """Ask, and return the reply's message, which is appended to `messages`."""
        answer = await self.chat(messages, **fields)
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        messages.append(message)
        return message


def dialects() -> list[Any]:
    """Return one of each."""
    found: list[Any] = [OpenAIChat(), AnthropicMessages()]
    with contextlib.suppress(ImportError):
        from worker.gateway.dialects.responses import OpenAIResponses

        found.append(OpenAIResponses())
    return found


@contextlib.asynccontextmanager
async def an_engine(
    over: str, steps: Sequence[Any], vocabulary: str, sim: dict[str, Any]
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield an engine and, where there is one, the simulated server behind it."""
    if over == "process":
        yield Script(*steps), None
    elif over == "http":
        async with engine_of("http", *steps) as engine:
            yield engine, None
    else:
        from tests.vocabulary_once import tokenizer_of

        policy = sim.pop("policy", None) or Policy(tokenizer_of(vocabulary), {})
        async with sim_server(policy, **sim) as server:
            pool = EnginePool(
                [server.url], max_token_id=MAX_TOKEN_ID, policy=RetryPolicy(max_retries=0)
            )
            try:
                yield pool, server
            finally:
                await pool.aclose()


@contextlib.asynccontextmanager
async def gateway_stage(
    renderer: Any,
    *steps: Any,
    over: str = "process",
    engine: Any = None,
    rules: dict[str, Any] | None = None,
    limits: HttpLimits | None = None,
    served: Sequence[Any] | None = None,
    book: Any = None,
    sim: dict[str, Any] | None = None,
    vocabulary: str = "",
    host: str = "127.0.0.1",
    public_url: str = "",
    **changes: Any,
) -> AsyncIterator[Stage]:
    """Yield a gateway with one open session.

    Args:
        renderer: the fixture `qwen3`.
        steps: replies of the engine: `Says`, `Held`, an `EngineFault`, a coroutine function.
        over: `process`, `http` or `sim` (which needs `vocabulary`, the fixture's path).
        engine: one in place of `over`'s.
        rules: of every session, in place of the defaults.
        limits: of HTTP.
        served: dialects, in place of all.
        book: of sessions, in place of a real one; nothing is opened.
        sim: arguments of `sim_server`.
        vocabulary: path of the tokenizer, for `sim`.
        host: to listen on.
        public_url: as in the settings.
        changes: of the first session's input (`generate_stage.given`).
    """
    async with contextlib.AsyncExitStack() as ends:
        server = None
        if engine is None:
            engine, server = await ends.enter_async_context(
                an_engine(over, steps, vocabulary, dict(sim or {}))
            )
        known: dict[str, Any] = {}
        if book is None:
            known = {"prompter": Prompter(renderer)}
        sessions = book if book is not None else _book()
        gateway = Gateway(
            sessions,
            dialects() if served is None else served,
            host=host,
            public_url=public_url,
            limits=limits,
        )
        await gateway.start()
        ends.push_async_callback(gateway.aclose)
        client = await ends.enter_async_context(
            httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None), verify=False)
        )
        stage = Stage(
            gateway, sessions, engine, renderer, client, known | (rules or {}), sim=server
        )
        if book is None:
            stage.open(**changes)
            ends.push_async_callback(_close_all, stage)
        yield stage


def _book() -> Any:
    from worker.gateway.book import Book

    return Book()


async def _close_all(stage: Stage) -> None:
    for session in stage.opened:
        await session.close()
