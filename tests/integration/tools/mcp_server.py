"""`python -m tests.integration.tools.mcp_server --port N --journal FILE`: a real MCP server.

The official library's own server over streamable HTTP, of either of the protocol's two ages, with
tools that behave as tools do. What ran is told by its journal: one line when a call of `tell` or
`hang` begins, one when it ends or is cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gzip
import json
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def main() -> None:
    """Serve until told to stop."""
    options = _options()
    server = _server(options.journal, options.tools)
    app: ASGIApp = server.streamable_http_app(json_response=options.json)
    if options.legacy:
        app = _Legacy(app, options.journal)
    if options.fault_file is not None:
        app = _Faulty(app, options.fault_file)
    if options.token_file is not None:
        app = _Guarded(app, options.token_file)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=options.port, log_level="warning", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--tools", default="all", choices=("all", "none", "other"))
    parser.add_argument("--json", action="store_true", help="answer with JSON, not with a stream")
    parser.add_argument("--legacy", action="store_true", help="know only sessions (2025-11-25)")
    parser.add_argument("--token-file", type=Path, help="want this bearer token")
    parser.add_argument("--fault-file", type=Path, help="what calls get while it says something")
    return parser.parse_args()


def _server(journal: Path, tools: str) -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer("toys")

    def note(what: str) -> None:
        with journal.open("a") as file:
            file.write(what + "\n")

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def other(text: str) -> str:
        """Say it."""
        return text

    async def tell(key: str, seconds: float = 0.0) -> str:
        """Do something once."""
        note(f"began {key}")
        await asyncio.sleep(seconds)
        note(f"ended {key}")
        return f"did {key}"

    async def hang(key: str) -> str:
        """Never answer."""
        note(f"began {key}")
        try:
            await asyncio.sleep(3600)
        finally:
            note(f"left {key}")
        return ""

    async def fail(text: str) -> str:
        """Fail as a tool does."""
        raise ToolError(text)

    async def big(characters: int) -> str:
        """Return so many characters."""
        return "x" * characters

    async def odd(kind: str) -> CallToolResult:
        """Return parts that are no text."""
        return _odd(kind)

    async def typed() -> dict[str, int]:
        """Return what its output schema allows."""
        return {"k": 1}

    server.custom_route("/health", methods=["GET"])(_health)
    mine = {"all": (add, tell, hang, fail, big, odd), "none": (), "other": (tell, other)}
    for tool in mine[tools]:
        server.tool(structured_output=False)(tool)
    if tools == "all":
        server.tool()(typed)
    return server


async def _health(request: Request) -> Response:
    return PlainTextResponse("ok")


def _odd(kind: str) -> CallToolResult:
    data = base64.b64encode(bytes(1000)).decode()
    text = TextContent(text="before")
    parts: dict[str, list[Any]] = {
        "image": [text, ImageContent(data=data, mime_type="image/png")],
        "audio": [AudioContent(data=data, mime_type="audio/wav")],
        "link": [ResourceLink(name="notes", uri="file:///notes.txt")],
        "resource": [
            EmbeddedResource(resource=TextResourceContents(uri="file:///a.txt", text="within"))
        ],
        "blob": [EmbeddedResource(resource=BlobResourceContents(uri="file:///a.bin", blob=data))],
        "texts": [text, TextContent(text="after")],
        "nothing": [],
        "nul": [TextContent(text="a\x00b")],
    }
    if kind == "structured":
        return CallToolResult(content=[], structured_content={"k": [1, None, {"é": True}]})
    return CallToolResult(content=parts[kind])


class _Legacy:
    """Makes it a server that has never heard of the newer protocol."""

    def __init__(self, app: ASGIApp, journal: Path) -> None:
        self._app, self._journal = app, journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "DELETE":
            with self._journal.open("a") as file:
                file.write("goodbye\n")
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        if json.loads(body).get("method") == "server/discover":
            error = {"code": -32601, "message": "Method not found"}
            answer = JSONResponse({"jsonrpc": "2.0", "id": json.loads(body)["id"], "error": error})
            await answer(scope, receive, send)
            return
        rest = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return rest.pop() if rest else await receive()

        await self._app(scope, again, send)


class _Faulty:
    """Answers calls of tools as broken servers and proxies do."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._path.read_text() if self._path.exists() else ""
        headers = dict(scope.get("headers", ()))
        if not fault or headers.get(b"mcp-method") != b"tools/call":
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        with self._path.with_suffix(".seen").open("a") as seen:
            seen.write(fault + "\n")
        if fault in ("cut", "cut-stream"):
            kind = b"application/json" if fault == "cut" else b"text/event-stream"
            head = [(b"content-type", kind), (b"content-length", b"1000")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": b'{"jsonrpc"', "more_body": True})
            raise ConnectionResetError("on purpose")
        answers = {
            "html": Response("<h1>hello</h1>", media_type="text/html"),
            "empty": Response(b"", media_type="application/json"),
            "not-json": Response(b"\xff{", media_type="application/json"),
            "not-rpc": JSONResponse({"hello": 1}),
            "deep": Response(b"[" * 100_000, media_type="application/json"),
            "no-result": JSONResponse(
                {"jsonrpc": "2.0", "id": json.loads(body)["id"], "result": {"content": 3}}
            ),
            "own-error": JSONResponse(
                {
                    "jsonrpc": "2.0",
                    "id": json.loads(body)["id"],
                    "error": {"code": -32000, "message": "no such row"},
                }
            ),
            "untrue": JSONResponse(
                {
                    "jsonrpc": "2.0",
                    "id": json.loads(body)["id"],
                    "result": {
                        "content": [],
                        "structuredContent": {"k": "x"},
                        "resultType": "complete",
                    },
                }
            ),
            "202": Response(status_code=202),
            "500": JSONResponse({"detail": "oops"}, 500),
            "503": Response(status_code=503),
            "redirect": Response(status_code=302, headers={"location": "http://127.0.0.1:1/"}),
            "gzip": Response(
                gzip.compress(bytes(1000)),
                media_type="application/json",
                headers={"content-encoding": "gzip"},
            ),
            "endless": Response(
                b'"' + b"x" * (5 * 1024 * 1024) + b'"', media_type="application/json"
            ),
            "no-answer": Response(b"event: ping\ndata: 1\n\n", media_type="text/event-stream"),
        }
        await answers[fault](scope, receive, send)


class _Guarded:
    """Refuses who does not have the token that the file has now."""

    def __init__(self, app: ASGIApp, path: Path) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            if given != f"Bearer {self._path.read_text().strip()}":
                await JSONResponse({"error": "invalid_token"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


if __name__ == "__main__":
    main()
