"""MCP servers that are killed, come back, forget, refuse, change, stand still or begin late.

Each test has server processes of its own; both ages of the protocol where they differ: the older
one has sessions that a server forgets, the newer one has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
import structlog

from rollstream.errors import ConfigError, ToolFault
from worker.tools.outcome import ToolError, ToolTrouble

from .mcp_parts import ToyServer, connected, tools_of, toy_server, wait_until

pytestmark = pytest.mark.slow

LONG_S = 60.0
AGES = pytest.mark.parametrize("flags", [("--json",), ("--legacy",)], ids=["new", "old"])


async def test_a_call_that_no_server_took_is_no_timeout_that_a_model_would_read(
    tmp_path: Path,
) -> None:
    with toy_server(tmp_path) as server, contextlib.ExitStack() as closing:
        async with connected(server, connect_timeout_s=30.0) as servers:
            add = tools_of(servers)["add"]
            server.child.kill()
            # Whoever listens there now takes no connection: its queue is full.
            sockets = [closing.enter_context(socket.socket()) for _ in range(4)]
            sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sockets[0].bind(("127.0.0.1", server.port))
            sockets[0].listen(0)
            for waiting in sockets[1:]:
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", server.port))
            with pytest.raises(ToolFault) as caught:
                await add.call_within({"a": 1, "b": 2}, 1.0)
            assert caught.value.detail == "mcp_unreachable"
            closing.close()  # ours are not what a server would leave behind


@AGES
async def test_a_killed_server_loses_the_calls_it_had_and_runs_the_others_once_it_is_back(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with toy_server(tmp_path, *flags) as server:
        async with connected(server, connect_timeout_s=30.0) as servers:
            tools = tools_of(servers)
            running = asyncio.create_task(tools["hang"].call_within({"key": "lost"}, LONG_S))
            await wait_until(lambda: server.lines("began lost"))
            server.child.kill()
            with pytest.raises(ToolFault) as caught:
                await running
            assert (caught.value.detail, caught.value.retryable) == ("mcp_lost", True)

            waiting = [
                asyncio.create_task(tools["tell"].call_within({"key": f"w{i}"}, LONG_S))
                for i in range(20)
            ]
            toys = servers._servers["toys"]
            await wait_until(lambda: toys._is_down)
            server.start()
            assert await asyncio.gather(*waiting) == [f"did w{i}" for i in range(20)]
            assert [server.lines(f"began w{i}") for i in range(20)] == [1] * 20
            assert server.lines("began lost") == 1, "a call that a tool had seen was sent again"


async def test_a_session_that_its_server_forgot_is_made_anew_and_the_call_runs_once(
    tmp_path: Path,
) -> None:
    with toy_server(tmp_path, "--legacy") as server:
        async with connected(server, connections=1, connect_timeout_s=30.0) as servers:
            tell = tools_of(servers)["tell"]
            assert await tell({"key": "before"}) == "did before"
            server.child.kill()
            server.start()
            # Nobody asked meanwhile: the session looks alive until the server says otherwise.
            assert await tell({"key": "after"}) == "did after"
            assert server.lines("began after") == 1


async def test_a_server_that_stays_away_ends_the_sample_within_the_patience(tmp_path: Path) -> None:
    with toy_server(tmp_path) as server:
        async with connected(server, connect_timeout_s=1.0) as servers:
            add = tools_of(servers)["add"]
            server.child.kill()
            calls = [add.call_within({"a": 1, "b": 2}, LONG_S) for _ in range(30)]
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {getattr(end, "detail", end) for end in ends} == {"mcp_unreachable"}
            # A call that has less time than that: the server is to blame all the same.
            with pytest.raises(ToolFault, match="no connection"):
                await add.call_within({"a": 1, "b": 2}, 0.3)
            server.start()
            assert await add.call_within({"a": 1, "b": 2}, LONG_S) == "3"


async def test_a_server_that_stands_still_costs_each_call_its_time_and_no_more(
    tmp_path: Path,
) -> None:
    with toy_server(tmp_path, "--legacy") as server:
        async with connected(server, connections=1, connect_timeout_s=30.0) as servers:
            tools = tools_of(servers)
            assert await tools["add"]({"a": 1, "b": 2}) == "3"
            calls = [
                asyncio.create_task(tools["hang"].call_within({"key": f"f{i}"}, 3.0))
                for i in range(10)
            ]
            await wait_until(lambda: all(server.lines(f"began f{i}") for i in range(10)))
            server.child.freeze()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            errors = [end.error for end in ends if isinstance(end, ToolTrouble)]
            assert errors == [ToolError.TIMEOUT] * 10
            # Nor do the cancellations of those, which it does not take, keep what comes behind.
            late = [tools["add"].call_within({"a": 1, "b": 2}, 2.0) for _ in range(5)]
            ends = await asyncio.gather(*late, return_exceptions=True)
            assert [type(end) for end in ends] == [ToolTrouble] * 5
            server.child.thaw()
            assert await tools["add"].call_within({"a": 3, "b": 4}, LONG_S) == "7"


async def test_a_worker_ends_although_its_server_stands_still(tmp_path: Path) -> None:
    with toy_server(tmp_path, "--legacy") as server:
        async with connected(server) as servers:
            hang = tools_of(servers)["hang"]
            call = asyncio.create_task(hang.call_within({"key": "k"}, LONG_S))
            await wait_until(lambda: server.lines("began k"))
            server.child.freeze()
            await servers.aclose()
            with pytest.raises(ToolFault):
                await call


async def test_a_worker_that_ends_makes_no_session_with_a_server_that_is_back(
    tmp_path: Path,
) -> None:
    with toy_server(tmp_path) as server:
        async with connected(server, connect_timeout_s=30.0) as servers:
            toys, add = servers._servers["toys"], tools_of(servers)["add"]
            server.child.kill()
            call = asyncio.create_task(add.call_within({"a": 1, "b": 2}, LONG_S))
            await wait_until(lambda: toys._is_down)
            server.start()  # the loop stands meanwhile: the next attempt is due now
            await servers.aclose()
            with pytest.raises(ToolFault):
                await call
            assert toys.num_sessions == 0


async def test_a_server_that_begins_late_is_waited_for(tmp_path: Path) -> None:
    server = ToyServer(tmp_path)
    starting = asyncio.create_task(asyncio.sleep(0.5))
    starting.add_done_callback(lambda _: server.child.start())
    try:
        async with connected(server, connect_timeout_s=60.0) as servers:
            assert await tools_of(servers)["add"]({"a": 1, "b": 2}) == "3"
    finally:
        await starting
        server.child.kill()


async def test_a_server_without_tools_is_refused_at_the_start(tmp_path: Path) -> None:
    with toy_server(tmp_path, "--tools", "none") as server:
        async with connected(server) as servers:
            with pytest.raises(ConfigError, match="has no tools"):
                servers.tools("mcp:toys")


async def test_tools_that_change_are_told_once_and_prompts_keep_those_of_the_start(
    tmp_path: Path,
) -> None:
    with toy_server(tmp_path) as server:
        async with connected(server, connections=1, connect_timeout_s=30.0) as servers:
            tools = tools_of(servers)
            server.child.kill()
            server.start("--tools", "other")
            with structlog.testing.capture_logs() as logs:
                # The newer protocol has no session that would end: nothing is listed again.
                with pytest.raises(ToolTrouble, match="add"):
                    await tools["add"]({"a": 1, "b": 2})
                server.child.kill()
                waiting = asyncio.create_task(tools["tell"].call_within({"key": "k"}, LONG_S))
                await wait_until(lambda: servers._servers["toys"]._is_down)
                server.start("--tools", "other")
                assert await waiting == "did k"
            changed = [entry for entry in logs if entry["event"] == "mcp_tools_changed"]
            assert len(changed) == 1
            assert changed[0]["gone"] == ["add", "big", "fail", "hang", "odd", "typed"]
            assert changed[0]["new"] == ["other"]
            assert list(tools_of(servers)) == list(tools)


async def test_a_wrong_token_is_refused_at_once_and_a_new_one_taken_up(tmp_path: Path) -> None:
    wanted, given = tmp_path / "wanted", tmp_path / "given"
    wanted.write_text("first")
    given.write_text("wrong")
    with toy_server(tmp_path, "--token-file", str(wanted)) as server:
        with pytest.raises(ConfigError, match="401"):
            async with connected(server, token_file=given, connect_timeout_s=3600.0):
                pass
        given.write_text("first\n")
        async with connected(server, token_file=given, connect_timeout_s=30.0) as servers:
            tell = tools_of(servers)["tell"]
            assert await tell({"key": "a"}) == "did a"
            wanted.write_text("second")
            with pytest.raises(ToolFault, match="401") as caught:
                await tell({"key": "b"})
            assert caught.value.detail == "mcp_refused"
            given.write_text("second")
            assert await tell({"key": "b"}) == "did b"
            assert server.lines("began b") == 1


async def test_a_server_of_the_older_protocol_is_told_of_cancelled_calls_and_of_the_end(
    tmp_path: Path,
) -> None:
    with toy_server(tmp_path, "--legacy", "--json") as server:
        async with connected(server, connections=2) as servers:
            tools = tools_of(servers)
            with pytest.raises(ToolTrouble, match="did not answer"):
                await tools["hang"].call_within({"key": "o"}, 3.0)
            await wait_until(lambda: server.lines("left o"))
            calls = [tools["add"].call_within({"a": i, "b": 0}, LONG_S) for i in range(60)]
            assert await asyncio.gather(*calls) == [str(i) for i in range(60)]
            toys = servers._servers["toys"]
            await wait_until(lambda: toys.num_sessions == 2)
        assert server.lines("goodbye") == 2
