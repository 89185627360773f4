"""Tools of a real MCP server: what a model may call, what it reads, and what ends a sample instead.

One server process for all of them; `test_mcp_outages.py` has the ones that kill theirs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.errors import ConfigError, ToolFault
from rollstream.settings import McpTable
from worker.tools import ToolLoader, run_calls
from worker.tools.mcp import McpServers, McpTool
from worker.tools.outcome import ToolError, ToolTrouble
from worker.types import ToolCall

from .mcp_parts import ToyServer, connected, tools_of, toy_server, wait_until

LONG_S = 30.0
SHORT_S = 3.0
"""Enough for a call to begin, however much else the machine does."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    """One for this module: nothing here ends it."""
    with toy_server(tmp_path_factory.mktemp("mcp")) as server:
        yield server


@pytest.fixture(autouse=True)
def _whole_again(server: ToyServer) -> Iterator[None]:
    """What a test broke is whole for the next one."""
    yield
    server.breaks("")


async def trouble_of(tool: McpTool, arguments: dict[str, object], timeout_s: float) -> ToolTrouble:
    """What the model reads instead of a result."""
    with pytest.raises(ToolTrouble) as caught:
        await tool.call_within(arguments, timeout_s)
    return caught.value


async def test_a_tool_has_the_spec_that_its_server_lists(server: ToyServer) -> None:
    async with connected(server) as servers:
        tools = tools_of(servers)
        one = servers.tools("mcp:toys/add")
    assert list(tools) == ["add", "tell", "hang", "fail", "big", "odd", "typed"]
    assert tools["add"].spec == one[0].spec
    function = tools["add"].spec["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["properties"]["a"]["type"] == "integer"
    assert function["parameters"]["required"] == ["a", "b"]


async def test_every_part_of_a_result_becomes_text(server: ToyServer) -> None:
    texts = {
        "image": "before\n[image/png, 1000 bytes]",
        "audio": "[audio/wav, 1000 bytes]",
        "link": "[notes: file:///notes.txt]",
        "resource": "within",
        "blob": "[application/octet-stream, 1000 bytes]",
        "texts": "before\nafter",
        "structured": '{"k": [1, null, {"é": true}]}',
        "nothing": "",
    }
    async with connected(server) as servers:
        tools = tools_of(servers)
        read = {kind: await tools["odd"]({"kind": kind}) for kind in texts}
        assert await tools["add"]({"a": 2, "b": 3}) == "5"
    assert read == texts


async def test_what_a_tool_says_of_its_failure_is_what_the_model_reads(server: ToyServer) -> None:
    async with connected(server) as servers:
        tools = tools_of(servers)
        failed = await trouble_of(tools["fail"], {"text": "no such row"}, LONG_S)
        wrong = await trouble_of(tools["add"], {"a": "x"}, LONG_S)
        gone = McpTool(servers._servers["toys"], "gone", "", {"type": "object"})
        unknown = await trouble_of(gone, {}, LONG_S)
    assert failed.text == "Error executing tool fail: no such row"
    assert failed.error is ToolError.RAISED
    assert "valid integer" in wrong.text
    assert "gone" in unknown.text


async def test_calls_of_one_turn_run_side_by_side_and_are_read_in_order(
    server: ToyServer,
) -> None:
    calls = [
        ToolCall("1", "tell", {"key": "t", "seconds": 0.2}),
        ToolCall("2", "add", {"a": 1, "b": "x"}),
        ToolCall("3", "fail", {"text": "no"}),
        ToolCall("4", "odd", {"kind": "nul"}),
    ]
    async with connected(server) as servers:
        tools = ToolLoader(servers=servers.tools).load(["mcp:toys", "calculator"])
        observations = await run_calls(calls, tools, timeout_s=LONG_S, max_chars=100)
        server.breaks("500")
        with pytest.raises(ToolFault, match="HTTP 500"):
            await run_calls(calls, tools, timeout_s=LONG_S, max_chars=100)
    assert [(o.text, o.error) for o in observations[::2]] == [
        ("did t", None),
        ("Error: Error executing tool fail: no", ToolError.RAISED),
    ]
    assert observations[1].error is ToolError.BAD_ARGUMENTS  # our own check: it was never sent
    assert observations[3].text == "a\ufffdb"


@pytest.mark.slow
async def test_a_call_that_is_overdue_is_cancelled_at_the_server(server: ToyServer) -> None:
    async with connected(server, connections=1) as servers:
        tools = tools_of(servers)
        trouble = await trouble_of(tools["hang"], {"key": "overdue"}, SHORT_S)
        assert trouble.error is ToolError.TIMEOUT
        await wait_until(lambda: server.lines("left overdue"))
        assert await tools["add"]({"a": 1, "b": 1}) == "2"


async def test_a_call_whose_sample_ends_is_cancelled_at_the_server(server: ToyServer) -> None:
    async with connected(server) as servers:
        call = asyncio.create_task(tools_of(servers)["hang"].call_within({"key": "own"}, LONG_S))
        await wait_until(lambda: server.lines("began own"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wait_until(lambda: server.lines("left own"))


async def test_a_result_without_end_costs_only_its_own_call(server: ToyServer) -> None:
    async with connected(server, connections=1) as servers:
        tools = tools_of(servers)
        beside = asyncio.create_task(tools["hang"].call_within({"key": "b"}, LONG_S))
        await wait_until(lambda: server.lines("began b"))
        trouble = await trouble_of(tools["big"], {"characters": 5 * 1024 * 1024}, LONG_S)
        assert trouble.error is ToolError.BAD_RESULT
        assert "larger than 4 MB" in trouble.text
        assert not beside.done(), "another call of the session was hit"
        beside.cancel()
        assert len(await tools["big"]({"characters": 1024 * 1024})) == 1024 * 1024


async def test_many_calls_share_few_sessions_and_none_gets_anothers_result(
    server: ToyServer,
) -> None:
    async with connected(server, connections=2) as servers:
        add = tools_of(servers)["add"]
        calls = [add.call_within({"a": i, "b": 1000}, LONG_S) for i in range(150)]
        assert await asyncio.gather(*calls) == [str(i + 1000) for i in range(150)]
        await wait_until(lambda: servers._servers["toys"].num_sessions == 2)


async def test_the_end_of_the_worker_ends_calls_that_run(server: ToyServer) -> None:
    async with connected(server) as servers:
        hang = tools_of(servers)["hang"]
        calls = [
            asyncio.create_task(hang.call_within({"key": f"end{i}"}, LONG_S)) for i in range(5)
        ]
        await wait_until(lambda: all(server.lines(f"began end{i}") for i in range(5)))
        await servers.aclose()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [ToolFault] * 5
        with pytest.raises(ToolFault, match="stopping"):
            await hang({"key": "late"})
        await wait_until(lambda: all(server.lines(f"left end{i}") for i in range(5)))


FAULTS = {
    "html": "text/html",
    "empty": "",
    "not-json": "",
    "not-rpc": "",
    "deep": "",
    "no-result": "",
    "202": "HTTP 202",
    "500": "HTTP 500",
    "redirect": "HTTP 302",
    "gzip": "compressed",
    "cut": "connection broke",
    "cut-stream": "connection broke",
    "no-answer": "",
}


async def test_what_is_no_answer_ends_its_sample_and_is_not_asked_again(
    server: ToyServer,
) -> None:
    async with connected(server, connections=1) as servers:
        tools = tools_of(servers)
        beside = asyncio.create_task(tools["hang"].call_within({"key": "beside"}, LONG_S))
        await wait_until(lambda: server.lines("began beside"))
        num_broken = {fault: server.broken(fault) for fault in FAULTS}
        for fault, said in FAULTS.items():
            server.breaks(fault)
            with pytest.raises(ToolFault) as caught:
                await tools["add"]({"a": 1, "b": 2})
            assert caught.value.detail == "mcp_lost", fault
            assert caught.value.retryable
            assert said in str(caught.value), fault
            assert server.broken(fault) == num_broken[fault] + 1, fault
        server.breaks("")
        assert await tools["add"]({"a": 1, "b": 2}) == "3"
        assert not beside.done(), "another call of the session was hit"
        assert servers._servers["toys"].num_sessions == 1
        beside.cancel()
        await asyncio.wait((beside,))


async def test_an_error_of_the_protocol_and_an_untrue_result_are_read_by_the_model(
    server: ToyServer,
) -> None:
    async with connected(server) as servers:
        tools = tools_of(servers)
        assert json.loads(await tools["typed"]({})) == {"k": 1}
        server.breaks("own-error")
        error = await trouble_of(tools["add"], {"a": 1, "b": 2}, LONG_S)
        server.breaks("untrue")
        untrue = await trouble_of(tools["typed"], {}, LONG_S)
    assert (error.text, error.error) == ("no such row", ToolError.RAISED)
    assert "Invalid structured content" in untrue.text


async def test_a_busy_server_is_asked_again_until_it_takes_the_call(server: ToyServer) -> None:
    async with connected(server) as servers:
        add = tools_of(servers)["add"]
        server.breaks("503")
        call = asyncio.create_task(add.call_within({"a": 1, "b": 2}, LONG_S))
        await wait_until(lambda: server.broken("503") >= 2)
        server.breaks("")
        assert await call == "3"


async def test_tools_of_one_name_are_told_apart_by_their_servers(server: ToyServer) -> None:
    tables = {name: McpTable(url=server.url) for name in ("docs", "web")}
    both, apart = ["mcp:docs", "mcp:web/add"], ["mcp:docs/tell", "calculator"]
    beside = ["mcp:docs/odd", "my_tools:odd"]
    servers = McpServers(tables, [both, apart, beside])
    try:
        await servers.start()
        docs = list(tools_of(servers, "mcp:docs"))
        web = servers.tools("mcp:web/add")[0]
        assert await web({"a": 1, "b": 2}) == "3"
    finally:
        await servers.aclose()
    assert docs == ["docs_add", "tell", "hang", "fail", "big", "docs_odd", "typed"]
    assert (web.name, web.spec["function"]["name"]) == ("web_add", "web_add")


async def test_a_name_that_no_server_has_is_refused_with_the_nearest(server: ToyServer) -> None:
    tables = {"toys": McpTable(url=server.url)}
    with pytest.raises(ConfigError, match=r"no MCP server 'toy' .did you mean 'toys'"):
        McpServers(tables, [["mcp:toy"]])
    with pytest.raises(ConfigError, match="names no tool"):
        McpServers(tables, [["mcp:toys/"]])
    async with connected(server) as servers:
        with pytest.raises(ConfigError, match=r"has no 'ad' .did you mean 'add'"):
            servers.tools("mcp:toys/ad")


async def test_a_server_that_nothing_names_is_never_reached() -> None:
    servers = McpServers({"toys": McpTable(url="http://127.0.0.1:1/mcp")}, [["calculator"]])
    await servers.start()
    assert not servers
    await servers.aclose()


NO_SERVERS = {
    "nobody": "no connection",
    "silent": "no answer within",
    "html": "text/html",
    "line-noise": "connection broke",
}


@pytest.mark.slow
async def test_what_is_no_server_is_refused_at_the_start() -> None:
    said = await asyncio.gather(*map(_refusal_of, NO_SERVERS))
    assert all(words in text for words, text in zip(NO_SERVERS.values(), said, strict=True)), said


async def _refusal_of(kind: str) -> str:
    answers = {
        "html": b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi",
        "line-noise": b"\x00\xff SSH-2.0\r\n\r\n",
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        if kind in answers:
            writer.write(answers[kind])
        else:
            await reader.read()
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    if kind == "nobody":
        listener.close()
        await listener.wait_closed()
    table = McpTable(url=f"http://127.0.0.1:{port}/mcp", connect_timeout_s=SHORT_S)
    servers = McpServers({"toys": table}, [["mcp:toys"]])
    with pytest.raises(ConfigError, match=r"mcp\.toys.*cannot be used") as caught:
        await servers.start()
    await servers.aclose()
    listener.close()
    return str(caught.value)


async def test_no_message_shows_the_keys_in_an_address() -> None:
    with pytest.raises(ConfigError) as caught:
        async with connected(
            "http://me:hunter2@127.0.0.1:1/mcp?apiKey=hunter2", connect_timeout_s=0.1
        ):
            pass
    assert "http://me:***@127.0.0.1:1/mcp cannot" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "two words"])
async def test_a_token_file_without_a_token_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="token_file"):
        async with connected("http://127.0.0.1:1/mcp", token_file=path):
            pass
