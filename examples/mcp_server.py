"""A small MCP server: one tool that evaluates arithmetic, over streamable HTTP.

    python -m examples.mcp_server --port 8000        # http://127.0.0.1:8000/mcp

Any server of the protocol will do in its place, in any language; this one is what the official
Python library makes of a function.
"""

from __future__ import annotations

import argparse

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from worker.tools.calculator import calculate

server: MCPServer[None] = MCPServer("arithmetic")


@server.tool(structured_output=False)
async def evaluate(expression: str) -> str:
    """Evaluate an arithmetic expression, for example 3*(4+5)/2."""
    try:
        return calculate(expression)
    except ValueError as error:
        raise ToolError(str(error)) from None


async def health(request: Request) -> Response:
    """Say that it serves."""
    return PlainTextResponse("ok")


server.custom_route("/health", methods=["GET"])(health)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.mcp_server", description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    server.run("streamable-http", port=parser.parse_args().port)
