"""How a tool call ends: the closed set of reasons, and a tool's own word that it failed.

Owns `ToolError`, which is the metric label and the key in `metadata["tool_errors"]`. Never decides
which ending is which: `run` does. Invariant: every member has its row in docs/tools.md.
"""

from __future__ import annotations

from enum import StrEnum

OK = "ok"
"""The label of a call that has a result."""


class ToolError(StrEnum):
    """Why a call has no result."""

    MALFORMED = "malformed"
    TOO_MANY = "too_many"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    RAISED = "raised"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    BAD_RESULT = "bad_result"


class ToolTrouble(Exception):
    """A tool says, in words for the model, why there is no result.

    What another process or server answered has its own text (a program that ran too long, MCP's
    `isError`): the model reads that, not the name of an exception of ours. It is cut like a result.
    What the policy did not bring about is a `rollstream.errors.ToolFault` instead.

    Attributes:
        text: for the model.
        error: what it is counted as.
    """

    def __init__(self, text: str, error: ToolError = ToolError.RAISED) -> None:
        super().__init__(text)
        self.text, self.error = text, error
