"""The gateway's paths, headers and bodies, over doubles of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
import socket

import httpx
import pytest

from tests.integration.gateway.doubles import Acts, DoubleBook, a_reply, forever
from tests.integration.gateway.raw import BODY, chunked, connected, double_stage, request
from tests.integration.gateway.stage import HELLO, Stage, gateway_stage, text, wait_until
from tests.toy import toy_renderer
from worker.gateway.bodies import MAX_NODES
from worker.gateway.limits import HttpLimits
from worker.gateway.server import Gateway
from worker.gateway.types import ErrorKind, Refusal

SMALL = HttpLimits(max_body_bytes=4096, linger_s=0.5)
KINDS: dict[ErrorKind, int] = {
    ErrorKind.INVALID: 400, ErrorKind.TOO_LONG: 400, ErrorKind.NOT_FOUND: 404,
    ErrorKind.CONFLICT: 409, ErrorKind.GONE: 410, ErrorKind.TOO_LARGE: 413,
    ErrorKind.BUSY: 429, ErrorKind.ENGINE: 503, ErrorKind.INTERNAL: 500,
}  # fmt: skip


def root(stage: Stage) -> str:
    return f"http://127.0.0.1:{stage.gateway.port}"


# --- health, models, paths -----------------------------------------------------------------------
async def test_100_health_names_the_instance_and_an_unknown_session_is_not_found() -> None:
    async with double_stage() as (stage, _):
        both = [await stage.client.get(f"{root(stage)}/{p}") for p in ("health", "healthz")]
        ids = {answer.json()["instance_id"] for answer in both}
        unknown = await stage.client.post(
            f"{root(stage)}/sessions/nonexistent/v1/chat/completions", json={"messages": HELLO}
        )

    assert [answer.status_code for answer in both] == [200, 200]
    assert len(ids) == 1
    assert re.fullmatch("[0-9a-f]{32}", ids.pop())
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == "session not found: session_id=nonexistent"


@pytest.mark.parametrize("path", ["v1/chat/completions", "messages", "v1/messages", "responses"])
async def test_72_an_unknown_session_is_404_in_json_whatever_the_path(path: str) -> None:
    async with double_stage() as (stage, _):
        answer = await stage.client.post(f"{root(stage)}/sessions/{'0' * 32}/{path}", content=b"{")

    assert answer.status_code == 404
    assert "not found" in json.dumps(answer.json())
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-should-retry"] == "false"


async def test_103_a_response_has_one_date_and_one_server_header() -> None:
    async with double_stage() as (stage, session):
        async with connected(stage) as client:
            client.send(request(session))
            head = (await client.reader.readuntil(b"\r\n\r\n")).lower()
        answer = await stage.chat()
        streamed = await stage.chat(stream=True)

    assert head.count(b"\r\ndate: ") == head.count(b"\r\nserver: ") == 1
    for headers in (answer.headers, streamed.headers):
        assert headers["server"] == "rollstream"
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert answer.headers["x-request-id"] != streamed.headers["x-request-id"]


@pytest.mark.parametrize("prefix", ["", "v1/"])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_every_dialect_is_served_with_and_without_v1(prefix: str, path: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": HELLO}
    if path == "responses":
        body = {"model": "m", "input": "hi"}
    async with double_stage() as (stage, session):
        answer = await stage.post(prefix + path, body)

        assert answer.status_code == 200, answer.text
        assert session.ends == [["commit"]]


async def test_models_are_listed_for_the_clients_of_open_sessions_alone() -> None:
    async with double_stage() as (stage, _):
        listed = await stage.client.get(f"{stage.url}/v1/models")
        one = await stage.client.get(f"{stage.url}/models/Qwen/Qwen3-8B")
        unknown = await stage.client.get(f"{root(stage)}/sessions/x/v1/models")

    assert [entry["id"] for entry in listed.json()["data"]] == ["rollstream"]
    assert one.json()["id"] == "Qwen/Qwen3-8B"
    assert unknown.status_code == 404


async def test_tokens_are_counted_where_the_dialect_can() -> None:
    async with double_stage() as (stage, session):
        body = {"model": "m", "messages": HELLO}
        counted = await stage.post("v1/messages/count_tokens", body)
        chat = await stage.post("v1/chat/completions/count_tokens", body)

    assert counted.json() == {"input_tokens": 7}
    assert chat.status_code == 404
    assert session.records == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "sessions/KEY/v1/chat/completions", 405),
        ("HEAD", "sessions/KEY/v1/chat/completions", 405),
        ("DELETE", "sessions/KEY", 404),
        ("PUT", "sessions/KEY/messages", 405),
        ("POST", "healthz", 405),
        ("HEAD", "healthz", 200),
        ("OPTIONS", "healthz", 204),
        ("OPTIONS", "sessions/KEY/v1/messages", 204),
        ("OPTIONS", "nowhere", 404),
        ("GET", "", 404),
        ("GET", "sessions/KEY/v1/chat/completions/", 404),
        ("POST", "sessions/KEY/v1/../../healthz", 404),
        ("POST", "sessions/KEY/../../../etc/passwd", 404),
        ("POST", "sessions/KEY%2F..%2F/v1/messages", 404),
        ("POST", "sessions/%00%0a%ff/v1/messages", 404),
        ("POST", f"sessions/{'a' * 30_000}/v1/messages", 404),
        ("POST", "sessions//v1/messages", 404),
        ("SPURIOUS", "sessions/KEY/v1/messages", 405),
    ],
)
async def test_wrong_paths_and_methods_are_answered_in_json(
    method: str, path: str, status: int
) -> None:
    async with double_stage() as (stage, session), connected(stage) as client:
        target = path.replace("KEY", session.key)
        client.send(f"{method} /{target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        found, headers = await client.head()
        body = await client.reader.readexactly(
            0 if method == "HEAD" else int(headers["content-length"])
        )
        # The same connection serves on.
        client.send(request(session))
        assert (await client.answer())[0] == 200

    assert found == status
    if status == 405:
        assert "OPTIONS" in headers["allow"]
    if body:
        error = json.loads(body)["error"]
        assert len(error["message"]) < 400
    if method == "OPTIONS" and status == 204:
        assert "OPTIONS" in headers["allow"]


async def test_a_percent_encoded_key_is_the_key() -> None:
    async with double_stage() as (stage, session):
        key = "".join(f"%{ord(c):02x}" for c in session.key)
        url = f"{root(stage)}/sessions/{key}/v1/chat/completions"
        answer = await stage.client.post(url, content=BODY)

    assert answer.status_code == 200


# --- errors ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["refused", "breaks"])
async def test_a_refusal_has_its_status_and_says_whether_to_retry(stream: bool, where: str) -> None:
    for kind, status in KINDS.items():
        acts = Acts(texts=(), **{where: Refusal(kind, "why so", param="messages")})
        async with double_stage(acts) as (stage, session):
            answer = await stage.chat(stream=stream)

            assert answer.status_code == status
            assert answer.json()["error"]["message"] == "why so"
            again = kind in (ErrorKind.BUSY, ErrorKind.ENGINE)
            assert answer.headers["x-should-retry"] == str(again).lower()
            assert ("retry-after" in answer.headers) is again
            left = [end for ends in session.ends for end in ends]
            assert left == ["leave"] * (where == "breaks")
            failed = kind in (ErrorKind.ENGINE, ErrorKind.INTERNAL)
            assert stage.gateway.counters["failed" if failed else "refused"] == 1


@pytest.mark.parametrize("where", ["refused", "breaks", "commits"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_that_is_logged_once_and_not_the_servers_end(
    where: str, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    acts = Acts(texts=(), **{where: ZeroDivisionError("secret text of a prompt")})
    async with double_stage(acts, Acts()) as (stage, session):
        answer = await stage.chat(stream=stream)
        after = await stage.chat()

        assert after.status_code == 200
        assert stage.gateway.counters == {"ok": 1, "failed": 1, "refused": 0, "left": 0}
        assert "commit" not in (session.ends[0] if len(session.ends) > 1 else [])
    assert "secret" not in answer.text
    assert capsys.readouterr().out.count("gateway_bug") == 1
    if not (where == "commits" and stream):  # that one has begun
        assert answer.status_code == 500
        assert "ZeroDivisionError" in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"] in answer.json()["error"]["message"]


async def test_a_closed_session_is_gone_and_a_commit_that_comes_too_late_is_told() -> None:
    gone = Refusal(ErrorKind.GONE, "the session is closed")
    async with double_stage(Acts(commits=gone)) as (stage, session):
        late = await stage.chat()
        assert isinstance(stage.book, DoubleBook)
        stage.book.closed.add(session.key)
        closed = await stage.chat()

    assert late.status_code == closed.status_code == 410
    assert session.ends == [["leave"]]


async def test_pinned_parameters_are_named_in_a_header() -> None:
    async with double_stage() as (stage, _):
        pinned = await stage.chat(temperature=0, top_p=0.1)
        streamed = await stage.chat(temperature=0, stream=True)
        plain = await stage.chat()

    names = set(pinned.headers["x-rollstream-pinned"].split(", "))
    assert names == {"temperature", "top_p"}
    assert streamed.headers["x-rollstream-pinned"] == "temperature"
    assert "x-rollstream-pinned" not in plain.headers


async def test_a_long_reply_with_log_probs_is_written_whole() -> None:
    reply = a_reply("x" * 5000, num_tokens=5000)
    async with double_stage(Acts(reply=reply)) as (stage, _):
        answer = await stage.chat(logprobs=True)

    assert len(answer.json()["choices"][0]["logprobs"]["content"]) == 5000


# --- bodies ---------------------------------------------------------------------------------------
GARBAGE = [
    (b"", "invalid JSON body: "),
    (b"{", "invalid JSON body: "),
    (b"{}x", "invalid JSON body: "),
    (b"[]", "expected an object, got list"),
    (b"null", "expected an object, got NoneType"),
    (b"7", "expected an object, got int"),
    (b'{"messages": NaN}', "invalid JSON body: "),
    (b'{"messages": 1e999}', "invalid JSON body: "),
    (b'{"a": "\xff"}', "invalid JSON body: "),
    (b'{"a": "\xed\xa0\x80"}', "invalid JSON body: "),
    (b"\xef\xbb\xbf{}", "invalid JSON body: "),
    ('{"a": 1}'.encode("utf-16"), "invalid JSON body: "),
    (b"\x1f\x8b\x08\x00\x00", "invalid JSON body: "),
    (b"\x00" * 1000, "invalid JSON body: "),
    (b'{"messages":' + b"[" * 100_000, "levels within each other"),
    (b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}", "levels within each other"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "levels within each other"),
]


@pytest.mark.parametrize(("body", "said"), GARBAGE)
async def test_101_a_body_that_is_no_object_is_refused(body: bytes, said: str) -> None:
    async with double_stage() as (stage, session):
        for path in ("v1/chat/completions", "v1/messages", "v1/responses"):
            answer = await stage.client.post(f"{stage.url}/{path}", content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("invalid JSON body: ")
            assert said in answer.json()["error"]["message"]
        good = await stage.chat()

    assert good.status_code == 200
    assert session.ends == [["commit"]]


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 400)])
async def test_a_body_has_so_many_objects_and_lists_and_texts_may_have_any(
    more: int, status: int
) -> None:
    """What is JSON or code in a text is none of them, however it is escaped."""
    text = json.dumps({"a": [{"b\\": '["'}]}) * 40_000
    known = {"model": "m", "messages": [{"role": "user", "content": text}]}
    held = 3  # the body, the list of messages, the message
    body = json.dumps({**known, "odd": [[]] * (MAX_NODES - held - 1 + more)}).encode()
    assert body.count(b"[") + body.count(b"{") > MAX_NODES + 100_000
    async with double_stage() as (stage, session):
        answer = await stage.client.post(f"{stage.url}/v1/chat/completions", content=body)
        assert answer.status_code == status, answer.text
        assert len(session.records) == (status == 200)
    if more:
        said = answer.json()["error"]["message"]
        assert said == f"invalid JSON body: more than {MAX_NODES} objects and lists"
    else:
        assert session.records[0].request.messages[0]["content"] == text


async def test_of_a_name_that_stands_there_twice_the_last_value_counts() -> None:
    async with double_stage() as (stage, session):
        body = BODY[:-1] + b', "max_tokens": 5, "max_tokens": 3}'
        answer = await stage.client.post(f"{stage.url}/v1/chat/completions", content=body)

    assert answer.status_code == 200
    assert session.records[0].request.max_tokens == 3


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (rb"cut \ud83d", "cut \ufffd"),
        (rb"\ude00 cut", "\ufffd cut"),
        (rb"\ud83d\ude00 whole", "\U0001f600 whole"),
        (rb"\\ud83d text", "\\ud83d text"),
        (rb"\ud83d\n\\\ud83d\ud83d\ude00", "\ufffd\n\\\ufffd\U0001f600"),
    ],
)
async def test_half_of_a_surrogate_pair_is_read_as_a_replacement(sent: bytes, read: str) -> None:
    async with double_stage() as (stage, session):
        body = BODY.replace(b"What is 1+7?", sent)
        for size in (0, 70_000):  # also where it is read in a thread
            padded = body[:-1] + b', "metadata": {"x": "%b"}}' % (b"x" * size)
            answer = await stage.client.post(f"{stage.url}/v1/chat/completions", content=padded)
            assert answer.status_code == 200, answer.text

    assert [r.request.messages[0]["content"] for r in session.records] == [read, read]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "deflate, gzip"}, 415),
        ({"content-encoding": "identity"}, 200),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": 'application/json; charset="UTF-8"'}, 200),
        ({"content-type": "application/json;charset=utf8;x=y"}, 200),
        ({"content-type": "text/plain"}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),
    ],
)
async def test_compressed_bodies_and_other_charsets_are_refused(
    headers: dict[str, str], status: int
) -> None:
    async with double_stage() as (stage, _):
        answer = await stage.client.post(
            f"{stage.url}/v1/chat/completions", content=BODY, headers=headers
        )

    assert answer.status_code == status, answer.text


@pytest.mark.parametrize("size", [4096, 4097])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_unread_and_one_at_the_limit_is_not(
    size: int, is_chunked: bool
) -> None:
    body = BODY[:-1] + b" " * (size - len(BODY)) + b"}"
    async with double_stage(limits=SMALL) as (stage, session), connected(stage) as client:
        if is_chunked:
            client.send(request(session, chunked(body), "transfer-encoding: chunked"))
        else:
            client.send(request(session, body))
        status, headers, said = await client.answer()

        assert status == (200 if size == 4096 else 413)
        if status == 413:
            assert "4096 bytes" in said["error"]["message"]
            assert session.records == []
            # It is small, or was read whole already: the connection serves on.
            assert "connection" not in headers
        client.send(request(session))
        assert (await client.answer())[0] == 200


async def test_a_refused_body_is_thrown_away_so_that_its_sender_reads_the_refusal() -> None:
    """A connection that is closed over unread bytes is reset, and the refusal may go with it."""
    limits = HttpLimits(max_body_bytes=200_000)
    for framing in ("content-length: 300000", "transfer-encoding: chunked"):
        async with double_stage(limits=limits) as (stage, session), connected(stage) as client:
            is_chunked = "chunked" in framing
            whole = chunked(b"x" * 300_000) if is_chunked else b"x" * 300_000
            head = f"POST /sessions/{session.key}/messages HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n"
            client.send(head.encode() + whole[:250_000])
            status, headers, _ = await client.answer()
            assert (status, headers["connection"]) == (413, "close")
            client.send(whole[250_000:])
            async with asyncio.timeout(20):
                assert await client.reader.read() == b""  # its end, and no reset


async def test_what_follows_a_refusal_and_is_no_http_gets_no_second_answer() -> None:
    async with double_stage(limits=SMALL) as (stage, session), connected(stage) as client:
        over = chunked(b"x" * 5000).removesuffix(b"0\r\n\r\n")
        client.send(request(session, over, "transfer-encoding: chunked"))
        assert (await client.answer())[0] == 413
        client.send(b"no chunk\r\n")

        assert await client.rest() == b""


async def test_a_body_is_asked_for_only_where_it_will_be_read() -> None:
    async with double_stage(limits=SMALL) as (stage, session):
        async with connected(stage) as client:
            client.send(request(session, b"", "expect: 100-continue", length=len(BODY)))
            status, _ = await client.head()
            assert status == 100
            client.send(BODY)
            assert (await client.answer())[0] == 200
        async with connected(stage) as client:
            client.send(request(session, b"", "expect: 100-continue", length=100_000))
            status, headers, _ = await client.answer()
            assert status == 413
            assert headers["connection"] == "close"
            assert await client.rest() == b""


async def test_bodies_that_are_held_at_once_are_bounded_and_let_go() -> None:
    limits = HttpLimits(max_body_bytes=4096, bodies_at_once=2)
    async with double_stage(limits=limits) as (stage, session):
        bodies = stage.gateway.bodies
        async with contextlib.AsyncExitStack() as open_ones:
            for number in (1, 2):
                client = await open_ones.enter_async_context(connected(stage))
                client.send(request(session, b"x" * 4000, length=4096))
                await wait_until(lambda n=number: bodies.held_bytes == 4000 * n)
            busy = await stage.client.post(
                f"{stage.url}/v1/chat/completions", content=BODY[:-1] + b" " * 300 + b"}"
            )
            small = await stage.chat()
        await wait_until(lambda: bodies.held_bytes == 0)
        after = await stage.chat()

    assert (busy.status_code, busy.headers["x-should-retry"]) == (429, "true")
    assert small.status_code == after.status_code == 200


async def test_a_body_that_does_not_arrive_is_given_up_and_its_connection_closed() -> None:
    limits = HttpLimits(body_s=0.05, linger_s=0.05)
    async with double_stage(limits=limits) as (stage, session), connected(stage) as client:
        client.send(request(session, BODY[:10], length=len(BODY)))
        status, headers, said = await client.answer()

        assert (status, headers["connection"]) == (408, "close")
        assert headers["x-should-retry"] == "true"
        assert "did not arrive within 0.05 s" in said["error"]["message"]
        assert await client.rest() == b""
        assert stage.gateway.bodies.held_bytes == 0


# --- the server itself ----------------------------------------------------------------------------
async def test_a_port_in_use_takes_the_next_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = taken.getsockname()[1]
        gateway = Gateway(DoubleBook(), [], port=wanted)
        port = await gateway.start()
        try:
            assert wanted < port < wanted + 64
            assert gateway.base_url("k") == f"http://127.0.0.1:{port}/sessions/k"
        finally:
            await gateway.aclose()
    # The port is free again, at once.
    again = Gateway(DoubleBook(), [], port=port)
    assert await again.start() == port
    await again.aclose()
    await again.aclose()


@pytest.mark.parametrize(
    ("host", "public_url", "url"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:{port}"),
        ("0.0.0.0", "", "http://127.0.0.1:{port}"),
        ("::1", "", "http://[::1]:{port}"),
        ("127.0.0.1", "http://10.0.0.7:{port}", "http://10.0.0.7:{port}"),
        ("127.0.0.1", "https://agents.example/w1/", "https://agents.example/w1"),
    ],
)
async def test_the_url_of_a_session_is_where_its_agent_reaches_it(
    host: str, public_url: str, url: str
) -> None:
    async with double_stage(host=host, public_url=public_url) as (stage, session):
        expected = url.replace("{port}", str(stage.gateway.port))
        assert stage.url == f"{expected}/sessions/{session.key}"
        if not public_url:
            assert (await stage.chat()).status_code == 200


async def test_83_a_session_is_served_by_its_own_worker_and_by_no_other() -> None:
    renderer = toy_renderer()
    (reply,) = text(renderer, "hello")
    async with gateway_stage(renderer) as one, gateway_stage(renderer) as two:
        roots = [root(stage) for stage in (one, two)]
        sessions = [(k % 2, (one, two)[k % 2].open(group_index=k)) for k in range(8)]
        for stage in (one, two):
            stage.engine.default = lambda _: reply
        for place, session in sessions:
            own, other = (one, two) if place == 0 else (two, one)
            url = own.gateway.base_url(session.key)
            assert url == f"{roots[place]}/sessions/{session.key}"
            for _ in range(2):
                assert (await own.chat(session=session)).status_code == 200
            answer = await other.chat(session=session)
            assert answer.status_code == 404
            assert session.stats["committed"] == session.stats["requests"] == 2
        assert len(set(roots)) == 2
        assert (len(one.asked), len(two.asked)) == (8, 8)


async def test_a_gateway_leaves_signals_and_logging_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    handlers = list(logging.getLogger().handlers)
    async with double_stage() as (stage, _):
        await stage.chat()
        now = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

        assert now == before
        assert logging.getLogger().handlers == handlers


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_the_gateway_leaves_what_is_under_way_and_nothing_runs_on(
    stream: bool,
) -> None:
    async with double_stage(Acts(waits=forever)) as (stage, session):
        asking = asyncio.ensure_future(stage.chat(stream=stream))
        await wait_until(lambda: len(session.records) == 1)
        before = asyncio.all_tasks()
        await stage.gateway.aclose()
        with pytest.raises(httpx.TransportError):
            await asking

        assert session.ends == [["leave"]]
        assert stage.gateway.num_requests == stage.gateway.num_connections == 0
        assert asyncio.all_tasks() < before
