"""Tools of MCP servers (streamable HTTP): sessions, their pool, and what a server's results say.

Importing this package does not import the protocol's library: a worker without MCP servers starts
without it.
"""

from .servers import MCP, McpServers
from .tool import McpTool

__all__ = ["MCP", "McpServers", "McpTool"]
