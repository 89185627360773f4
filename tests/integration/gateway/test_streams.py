"""Streams of events: when they open, what keeps them alive, when they commit, who left them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rollstream.errors import StopReason
from tests.integration.gateway.doubles import Acts, DoubleExchange, a_reply, forever
from tests.integration.gateway.raw import BODY, STREAM, connected, double_stage, request
from tests.integration.gateway.stage import (
    HELLO,
    Held,
    gateway_stage,
    text,
    wait_until,
)
from worker.gateway import routes
from worker.gateway.dialects.openai_chat import ChatStreamer
from worker.gateway.limits import HttpLimits
from worker.gateway.sse import encode
from worker.gateway.types import ChatReply, ErrorKind, Event, Refusal

PATHS = ("v1/chat/completions", "v1/messages", "v1/responses")
LAST = {
    "v1/chat/completions": "data: [DONE]",
    "v1/messages": "event: message_stop",
    "v1/responses": "event: response.completed",
}


def body_of(path: str, *, stream: bool = True) -> dict[str, Any]:
    said = {"input": "hi"} if path.endswith("responses") else {"messages": HELLO, "max_tokens": 9}
    return {"model": "m", "stream": stream, **said}


def events(answer: str) -> list[tuple[str, Any]]:
    """Return the events of a stream as (name, data); comments are left out."""
    found = []
    for block in answer.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        fields = dict(line.split(": ", 1) for line in lines)
        data = fields["data"]
        found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


class Gate:
    """Lets a double pass one text after another."""

    def __init__(self) -> None:
        self.reached = -1
        self._open = asyncio.Semaphore(0)

    async def __call__(self, number: int) -> None:
        self.reached = number
        await self._open.acquire()

    def pass_on(self, count: int = 1) -> None:
        for _ in range(count):
            self._open.release()


# --- the bytes ------------------------------------------------------------------------------------
def test_an_event_is_its_name_its_data_and_an_empty_line() -> None:
    written = encode([("a", {"x": "1\n2"}), ("", "[DONE]"), ("", "two\nlines")])

    assert written == (
        b'event: a\ndata: {"x":"1\\n2"}\n\ndata: [DONE]\n\ndata: two\ndata: lines\n\n'
    )
    assert encode([]) == b""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("texts", [("a", "b"), ()])
async def test_a_stream_is_events_that_no_proxy_keeps_back(
    path: str, texts: tuple[str, ...]
) -> None:
    async with double_stage(Acts(texts=texts)) as (stage, session):
        answer = await stage.post(path, body_of(path))

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert LAST[path] in answer.text
    assert answer.text.endswith("\n\n")
    assert session.ends == [["commit"]]
    assert stage.gateway.counters["ok"] == 1


# --- when it opens --------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
async def test_what_breaks_before_the_first_event_has_a_status_and_behind_it_is_an_event(
    path: str,
) -> None:
    fault = Refusal(ErrorKind.ENGINE, "no engine answered")
    async with double_stage(Acts(texts=(), breaks=fault), Acts(texts=("a",), breaks=fault)) as (
        stage,
        session,
    ):
        early = await stage.post(path, body_of(path))
        late = await stage.post(path, body_of(path))

        assert early.status_code == 503
        assert early.headers["content-type"] == "application/json"
        assert late.status_code == 200
        assert "no engine answered" in late.text
        assert LAST[path] not in late.text
        assert session.ends == [["leave"], ["leave"]]
        assert stage.gateway.counters == {"failed": 2, "ok": 0, "refused": 0, "left": 0}


@pytest.mark.parametrize("path", PATHS)
async def test_a_silent_stream_opens_and_says_that_it_is_alive(path: str) -> None:
    gate = Gate()
    limits = HttpLimits(keepalive_s=0.01)
    async with double_stage(Acts(texts=("a",), waits=gate), limits=limits) as (stage, session):
        got = ""
        async with stage.client.stream("POST", f"{stage.url}/{path}", json=body_of(path)) as answer:
            pieces = answer.aiter_text()
            signs = 0
            while signs < 3:  # before anything was sampled
                piece = await anext(pieces)
                got += piece
                signs += piece.count(": alive\n\n") + piece.count("event: ping")
            assert gate.reached == 0
            gate.pass_on(2)
            got += "".join([piece async for piece in pieces])

    assert LAST[path] in got
    assert events(got)
    assert session.ends == [["commit"]]


async def test_a_stream_is_committed_before_its_last_events_and_not_earlier() -> None:
    gate = Gate()
    gate.pass_on(2)
    async with (
        double_stage(Acts(texts=("a", "b"), waits=gate)) as (stage, session),
        stage.client.stream("POST", f"{stage.url}/chat/completions", content=STREAM) as answer,
    ):
        lines = answer.aiter_lines()
        while '"b"' not in await anext(lines):
            pass
        assert session.ends == [[]]
        gate.pass_on()
        while "[DONE]" not in await anext(lines):
            pass
        assert session.ends == [["commit"]]


async def test_a_commit_that_is_refused_ends_its_stream_as_an_error() -> None:
    late = Refusal(ErrorKind.GONE, "the session is closed")
    async with double_stage(Acts(commits=late)) as (stage, session):
        answer = await stage.chat(stream=True)

    assert "the session is closed" in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    assert session.ends == [["leave"]]


# --- who left -------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("passed", [0, 1, 2])
async def test_a_client_that_leaves_a_stream_is_noticed_and_nothing_is_committed(
    path: str, passed: int
) -> None:
    gate = Gate()
    acts = Acts(texts=("a", "b"), waits=gate)
    async with double_stage(acts) as (stage, session), connected(stage) as client:
        gate.pass_on(passed)
        client.send(request(session, json.dumps(body_of(path)).encode(), path=path))
        await wait_until(lambda: gate.reached == passed)
        if passed:
            assert (await client.head())[0] == 200
        client.leave()
        await wait_until(lambda: stage.gateway.num_requests == 0)

        assert session.ends == [["leave"]]
        assert gate.reached == passed
        assert stage.gateway.counters["left"] == 1


@pytest.mark.parametrize("closing", ["reset", "half"])
async def test_a_client_that_leaves_without_a_stream_is_noticed(closing: str) -> None:
    async with double_stage(Acts(waits=forever)) as (stage, session):
        async with connected(stage) as client:
            client.send(request(session))
            await wait_until(lambda: len(session.records) == 1)
            if closing == "half":
                client.writer.write_eof()
            else:
                client.leave()
            await wait_until(lambda: stage.gateway.num_requests == 0)

        assert session.ends == [["leave"]]
        assert stage.gateway.counters["left"] == 1


async def test_a_client_that_leaves_before_its_request_began_is_taken_back() -> None:
    """Its request is being looked at; where that cannot be stopped, what came of it is left."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        begun.set()
        try:
            await go.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # swallowed: an exchange comes all the same

    for begins in (lambda: _noted(begun), stubborn):
        begun.clear()
        async with double_stage(Acts(begins=begins)) as (stage, session):
            async with connected(stage) as client:
                client.send(request(session))
                await begun.wait()
                client.leave()
                await wait_until(lambda: stage.gateway.num_requests == 0)
            await wait_until(lambda: all(session.ends))

            assert session.ends == ([["leave"]] if begins is stubborn else [])
            assert stage.gateway.counters["left"] == 1


async def _noted(begun: asyncio.Event) -> None:
    begun.set()
    await forever()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_reply_comes_commits_nothing(stream: bool) -> None:
    """Its connection ends in the very turn of the loop that brings the reply."""
    with socket.socket() as client:

        async def leave(number: int) -> None:
            if number == 1:
                client.close()

        async with double_stage(Acts(texts=("a",), waits=leave)) as (stage, session):
            client.connect(("127.0.0.1", stage.gateway.port))
            client.send(request(session, STREAM if stream else BODY))
            await wait_until(lambda: len(session.records) == 1)
            await wait_until(lambda: stage.gateway.num_requests == 0)

            assert session.ends == [["leave"]]


class Flood(DoubleExchange):
    """Yields large pieces for as long as somebody takes them."""

    PIECES = 2000
    pulled = 0
    closed = 0

    async def deltas(self) -> AsyncIterator[dict[str, Any]]:
        try:
            for _ in range(self.PIECES):
                type(self).pulled += 1
                yield {"content": "x" * 20_000}
        finally:
            type(self).closed += 1

    async def reply(self) -> Any:
        return a_reply("y")


async def test_a_reader_that_takes_nothing_is_left_and_nothing_piles_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.integration.gateway.doubles.DoubleExchange", Flood)
    Flood.pulled = Flood.closed = 0
    limits = HttpLimits(stall_s=0.2)
    async with double_stage(limits=limits) as (stage, session), connected(stage) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(request(session, STREAM))
        await wait_until(lambda: session.ends == [["leave"]])
        await wait_until(lambda: stage.gateway.num_connections == 0)

        # What the kernel holds for it, and no more: 40 MB were to be sent.
        assert Flood.pulled < 700
        assert Flood.closed == 1
        assert stage.gateway.counters["left"] == 1


async def test_a_reply_whose_pieces_nobody_takes_is_not_committed() -> None:
    limits = HttpLimits(stall_s=0.1)
    acts = Acts(texts=("x" * 20_000_000,))
    async with double_stage(acts, limits=limits) as (stage, session), connected(stage) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(request(session, STREAM))
        await wait_until(lambda: session.ends not in ([], [[]]))
        await wait_until(lambda: stage.gateway.num_connections == 0)

        assert session.ends == [["leave"]]


async def test_a_slow_reader_that_reads_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.integration.gateway.doubles.DoubleExchange", Flood)
    monkeypatch.setattr(Flood, "PIECES", 400)
    async with double_stage() as (stage, session):
        got = 0
        async with stage.client.stream(
            "POST", f"{stage.url}/v1/chat/completions", content=STREAM
        ) as answer:
            async for piece in answer.aiter_bytes():
                got += piece.count(b"x")
                await asyncio.sleep(0)

    assert got >= 400 * 20_000
    assert session.ends == [["commit"]]


# --- with real sessions ---------------------------------------------------------------------------
async def test_case_120_a_stream_has_the_ids_of_the_reply_without_one(qwen3: Any) -> None:
    replies = text(qwen3, "The answer is 8. " * 9)
    samples, contents = [], []
    for stream in (False, True):
        async with gateway_stage(qwen3, *replies) as stage:
            options = {"stream_options": {"include_usage": True}} if stream else {}
            answer = await stage.chat(stream=stream, **options)
            assert answer.status_code == 200, answer.text
            if stream:
                found = events(answer.text)
                assert found[-1] == ("", "[DONE]")
                assert found[-2][1]["usage"]["completion_tokens"] == len(replies[0].ids)
                deltas = [e["choices"][0]["delta"] for _, e in found[:-1] if e["choices"]]
                pieces = [delta.get("content") or "" for delta in deltas]
                assert len([piece for piece in pieces if piece]) > 1
                contents.append("".join(pieces))
            else:
                contents.append(answer.json()["choices"][0]["message"]["content"])
            await stage.session.close()
            samples.append(await stage.session.collect())

    assert contents[0] == contents[1]
    one, two = samples
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.rollout_log_probs.tolist() == two.rollout_log_probs.tolist()
    assert one.loss_mask.tolist() == two.loss_mask.tolist()


async def test_case_120_a_client_that_leaves_after_one_chunk_commits_nothing(qwen3: Any) -> None:
    held = Held(text(qwen3, "The answer is 8, I think.")[0], after=4)
    async with gateway_stage(qwen3, held) as stage:
        async with stage.client.stream(
            "POST", f"{stage.url}/v1/chat/completions", content=STREAM
        ) as answer:
            lines = answer.aiter_lines()
            while '"content":"' not in await anext(lines):
                pass
            assert stage.engine.in_flight == 1
        await wait_until(lambda: stage.engine.in_flight == 0)
        await wait_until(lambda: stage.gateway.num_requests == 0)

        assert stage.engine.cancelled == 1
        assert stage.gateway.counters["left"] == 1
        await stage.session.close()
        sample = await stage.session.collect()

    assert sample.stop_reason is StopReason.NO_MODEL_CALL
    assert sample.calls == []


async def test_105_a_stream_whose_engine_refuses_is_an_error_in_json_and_records_nothing(
    qwen3: Any,
) -> None:
    good = text(qwen3, "8")[0]
    refused = (400, b'{"error":{"message":"bad request"}}')
    async with gateway_stage(qwen3, refused, good, over="http") as stage:
        broken = await stage.chat(stream=True)
        assert broken.status_code >= 400
        assert broken.headers["content-type"] == "application/json"
        assert broken.json()["error"]["message"]

        answer = await stage.chat(stream=True)
        assert events(answer.text)[-1] == ("", "[DONE]")
        await stage.session.close()
        sample = await stage.session.collect()

    assert len(sample.calls) == 1
    assert sample.tokens.tolist()[-len(good.ids) :] == list(good.ids)


async def test_105_calls_that_come_back_without_their_index_are_the_same_turn(qwen3: Any) -> None:
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 7}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with gateway_stage(qwen3, *text(qwen3, said, "8")) as stage:
        answer = await stage.chat(stream=True, tools=tools)
        calls: dict[int, Any] = {}
        for _, event in events(answer.text)[:-1]:
            for piece in event["choices"][0]["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"function": {"arguments": ""}})
                call.update({k: v for k, v in piece.items() if k in ("id", "type")})
                function = piece["function"]
                call["function"]["arguments"] += function.get("arguments") or ""
                if function.get("name"):
                    call["function"]["name"] = function["name"]
        assert len(calls) == 1
        echo = {"role": "assistant", "content": None, "tool_calls": list(calls.values())}
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "8"}
        again = await stage.chat([*HELLO, echo, result], tools=tools)
        assert again.status_code == 200, again.text
        first, second = stage.asked
        await stage.session.close()
        sample = await stage.session.collect()

    assert second.ids[: len(first.ids)] == first.ids
    assert len(sample.calls) == 2


async def test_an_sdk_reads_a_stream_through_its_signs_of_life(qwen3: Any) -> None:
    openai = pytest.importorskip("openai")
    held = Held(text(qwen3, "The answer is 8.")[0], after=0)
    limits = HttpLimits(keepalive_s=0.01)
    async with gateway_stage(qwen3, held, limits=limits) as stage:
        client = openai.AsyncOpenAI(
            base_url=f"{stage.url}/v1",
            api_key="x",
            http_client=httpx.AsyncClient(verify=False, timeout=30),
        )
        async with client:
            stream = await client.chat.completions.create(
                model="m", messages=HELLO, stream=True
            )  # the headers came before anything was sampled
            held.go.set()
            said = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert "".join(said) == "The answer is 8."


async def test_the_log_probs_of_a_long_stream_are_written_in_a_thread(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_THREADED_TOKENS", 8)
    on_the_loop: list[bool] = []
    told = ChatStreamer.end

    def end(self: ChatStreamer, reply: ChatReply) -> list[Event]:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return told(self, reply)

    monkeypatch.setattr(ChatStreamer, "end", end)
    says = text(qwen3, "ok", "a reply of more than eight tokens, which is long today")
    async with gateway_stage(qwen3, *says) as stage:
        for number, said in enumerate(says):
            messages = [{"role": "user", "content": f"question {number}"}]
            answer = await stage.chat(messages, stream=True, logprobs=True)
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            choices = [json.loads(event)["choices"][0] for event in events[:-1]]
            entries = [e for one in choices for e in (one["logprobs"] or {}).get("content", ())]
            assert [e["logprob"] for e in entries] == [-i / 128 for i in range(len(said.ids))]
            assert choices[0]["delta"].get("role") == "assistant"
            assert choices[-1]["finish_reason"] == "stop"
    assert on_the_loop == [True, False]
