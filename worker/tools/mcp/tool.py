"""A tool of an MCP server, as the model may call it.

Owns its spec and its name. Never talks to the server itself. Invariant: the spec is what the server
said at the start, to the letter, whatever it says later: a group's prompts are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..schema import check_spec

if TYPE_CHECKING:
    from .server import McpServer


class McpTool:
    """One tool of one server.

    Attributes:
        name: as the model writes it.
        served_name: as its server does, which is the same unless two tools have it.
        spec: OpenAI's JSON, from the server's own description and input schema.
    """

    def __init__(
        self,
        server: McpServer,
        tool: str,
        description: str,
        parameters: dict[str, Any],
        name: str = "",
    ) -> None:
        self.name, self.served_name = name or tool, tool
        self._server, self._tool = server, tool
        function = {"name": self.name, "description": description, "parameters": parameters}
        self.spec: dict[str, Any] = {"type": "function", "function": function}
        check_spec(self.spec, f"tool {tool!r} of MCP server {server.name!r}")

    def with_server_name(self) -> McpTool:
        """Return the same tool under a name that no other server's tool has."""
        function = self.spec["function"]
        return McpTool(
            self._server,
            self._tool,
            function["description"],
            function["parameters"],
            f"{self._server.name}_{self._tool}",
        )

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """Call it for at most half a minute; `call_within` is told another time."""
        return await self.call_within(arguments, 30.0)

    async def call_within(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Call it at its server.

        Raises:
            ToolFault: the server is not there, refuses, or was lost with the call.
            ToolTrouble: the tool failed, or did not answer in time; the model reads why.
        """
        return await self._server.call(self._tool, arguments, timeout_s)
