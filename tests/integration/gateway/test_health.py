"""Health is answered within a second whatever real sessions are sent: the issue's own number.

Real sessions, the real Qwen3 renderer, and somebody who asks from outside the process. A product
that does its work beside the loop is far below a second in each of these.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.sample import Message
from tests.integration.gateway.raw import health_asked
from tests.integration.gateway.stage import HELLO, Stage, gateway_stage, text
from worker.tito.ids import as_ids

WORDS = "The quick brown fox jumps over the lazy dog, 42 times. "
WIDE = {"max_context": 10_000_000}
BOMBS = {
    "deep": b'{"messages":' + b"[" * 7_000_000,
    "lists": b'{"messages":[' + b"[]," * 2_700_000 + b"[]]}",
    "lists of lists": b'{"messages":[' + (b"[" * 100 + b"]" * 100 + b",") * 40_000 + b"[]]}",
    "messages": b'{"messages":[' + b"{}," * 300_000 + b"{}]}",
    "surrogates": b'{"messages":"' + b"\\ud800" * 300_000 + b'"}',
    "names": b"{" + b'"a":{},' * 1_100_000 + b'"b":1}',
}


def words(num_bytes: int) -> list[Message]:
    """Return one message of so many bytes."""
    return [{"role": "user", "content": WORDS * (num_bytes // len(WORDS))}]


def tools(num_bytes: int) -> list[Message]:
    """Return specs of so many bytes, none like another."""
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{n}",
                "description": WORDS * 12,
                "parameters": {
                    "type": "object",
                    "properties": {f"p{k}": {"type": "string"} for k in range(12)},
                },
            },
        }
        for n in range(num_bytes // 1000)
    ]


def history(count: int) -> list[Message]:
    """Return so many messages, the last one a user's."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": f"{n} of many"} for n in range(count - 1 + count % 2)]


async def asked(stage: Stage, session: Any, messages: list[Message], **fields: Any) -> list[int]:
    """Return the ids that the engine was asked with for a request, which is answered."""
    answer = await stage.chat(messages, session=session, **fields)
    assert answer.status_code == 200, answer.text
    ids = stage.asked[-1].ids
    stage.asked.clear()
    return ids


def opened(stage: Stage) -> Any:
    session = stage.open(limits=WIDE)
    stage.engine.default = lambda _: text(stage.renderer, "8")[0]
    return session


@pytest.mark.parametrize("num_bytes", [600_000, pytest.param(8_000_000, marks=pytest.mark.slow)])
async def test_health_is_answered_within_a_second_while_a_huge_message_is_rendered(
    qwen3: Any, num_bytes: int
) -> None:
    async with gateway_stage(qwen3) as stage, health_asked(stage) as health:

        async def attack() -> None:
            session = opened(stage)
            assert len(await asked(stage, session, words(num_bytes))) > num_bytes // 8
            await session.close()

        await health.during(attack)


async def test_health_is_answered_within_a_second_while_a_megabyte_of_tools_is_rendered(
    qwen3: Any,
) -> None:
    specs = tools(1_000_000)
    assert len(json.dumps(specs)) > 1_000_000
    async with gateway_stage(qwen3) as stage, health_asked(stage) as health:

        async def attack() -> None:
            session = opened(stage)
            first = await asked(stage, session, HELLO, tools=specs)
            messages = [*HELLO, {"role": "assistant", "content": "8"}, *HELLO]
            second = await asked(stage, session, messages, tools=specs)
            assert second[: len(first)] == first
            await session.close()

        await health.during(attack)


async def test_health_is_answered_within_a_second_while_5000_messages_go_on_or_are_edited(
    qwen3: Any,
) -> None:
    """Goes on twice, is edited at its beginning, in its midst, and in its last turn."""
    begun = history(5001)
    reply = {"role": "assistant", "content": "8"}
    edit = {"role": "user", "content": "edited"}
    longer = [*begun, reply, *HELLO]
    async with gateway_stage(qwen3) as stage, health_asked(stage) as health:

        async def attack() -> None:
            session = opened(stage)
            held = await asked(stage, session, begun)
            for going_on in (longer, [*longer, reply, *HELLO]):
                before, held = held, await asked(stage, session, going_on)
                assert held[: len(before)] == before
            for place in (0, 2500, 5000, -1):
                edited = list(longer)
                edited[place] = edit
                held = await asked(stage, session, edited)
                assert qwen3.decode(as_ids(held)).count("edited") == 1
            assert session.stats["calls"] == 7
            await session.close()

        await health.during(attack)


async def test_health_is_answered_within_a_second_while_bombs_of_json_are_read(qwen3: Any) -> None:
    async with gateway_stage(qwen3) as stage, health_asked(stage) as health:

        async def attack() -> None:
            for name, bomb in BOMBS.items():
                answer = await stage.client.post(f"{stage.url}/v1/chat/completions", content=bomb)
                assert answer.status_code == 400, (name, answer.text)

        await health.during(attack)
        assert stage.session.stats["requests"] == 0


@pytest.mark.parametrize("arguments", ["[" * 500_000, '{"a":[' + "{}," * 150_000 + "{}]}"])
async def test_health_is_answered_within_a_second_while_arguments_are_bombs(
    qwen3: Any, arguments: str
) -> None:
    """They are JSON in a text of the JSON: a family's template reads them once more."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    messages: list[Message] = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    async with gateway_stage(qwen3) as stage, health_asked(stage) as health:

        async def attack() -> None:
            session = opened(stage)
            assert len(await asked(stage, session, messages)) > 100_000
            await session.close()

        await health.during(attack)


class Slow:
    """A renderer that is slow with whatever is long, as one of the largest prompts would be."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.slept = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render(self, messages: Any, tools: Any = None) -> Any:
        return self._slowly([messages, tools], self._inner.render, messages, tools)

    def extend(self, window: Any, completion: Any, messages: Any, tools: Any = None) -> Any:
        return self._slowly([messages], self._inner.extend, window, completion, messages, tools)

    def parse(self, ids: Any, *given: Any) -> Any:
        return self._slowly(ids, self._inner.parse, ids, *given)

    def _slowly(self, what: Any, call: Callable[..., Any], *given: Any) -> Any:
        if len(str(what)) > 20_000 or len(what) > 10_000:
            self.slept += 1
            time.sleep(1.5)
        return call(*given)


async def test_health_is_answered_within_a_second_however_slow_a_renderer_is(qwen3: Any) -> None:
    """The first prompt, what is appended, and a long reply; all lines at once."""
    slow = Slow(qwen3)
    long = words(30_000)
    reply = text(qwen3, WORDS * 1000)[0]
    short = [*HELLO, {"role": "assistant", "content": "8"}]
    async with gateway_stage(slow) as stage:
        sessions = [opened(stage) for _ in range(3)]
        await asked(stage, sessions[1], HELLO)
        stage.engine.default = lambda a: reply if a.routing_key == "run-9" else text(qwen3, "8")[0]
        talker = stage.open(limits=WIDE, group_index=9)
        assert slow.slept == 0
        async with health_asked(stage) as health:

            async def attack() -> None:
                answers = await asyncio.gather(
                    stage.chat(long, session=sessions[0]),
                    stage.chat([*short, *long], session=sessions[1]),
                    stage.chat(HELLO, session=sessions[2], tools=tools(30_000)),
                    stage.chat(HELLO, session=talker, max_tokens=60_000),
                )
                assert {a.status_code for a in answers} == {200}, [a.text for a in answers]
                assert slow.slept == 4

            await health.during(attack)
