"""The built-in `python`: a program of the model's, run by the verifier in a process of its own.

Owns what the model gives and reads. Never runs anything here. Invariant: what the program does
(exits, hangs, prints without end, eats memory) is a text for the model; a verifier that is away or
a job that is lost ends the sample as `tool_error`, to be tried again.
"""

from __future__ import annotations

from typing import Any, Protocol

from rollstream.errors import ToolFault

from .outcome import ToolError, ToolTrouble

JOB = "python"
MAX_CODE_CHARS = 65536
GRACE_S = 5.0
"""How much later than the program's own time its job is killed: what ends it in time is the job."""


class Jobs(Protocol):
    """Runs jobs elsewhere (`worker.isolation.client.Isolated`)."""

    async def call(self, job: str, payload: dict[str, Any], *, timeout_s: float) -> Any:
        """Return what the job returns."""
        ...


class PythonTool:
    """The tool."""

    name = "python"
    spec: dict[str, Any] = {  # noqa: RUF012 - one spec, never changed
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program and return what it prints. Every call is a new "
            "process with no memory of earlier ones.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {
                        "type": "string",
                        "description": "The program; print what you want to see.",
                        "maxLength": MAX_CODE_CHARS,
                    }
                },
                "required": ["code"],
                "additionalProperties": False,
            },
        },
    }

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def __call__(self, arguments: dict[str, Any]) -> str:
        """Run the program for at most ten seconds; `call_within` is told another time."""
        return await self.call_within(arguments, 10.0)

    async def call_within(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """Return what the program of `arguments["code"]` printed.

        Raises:
            ToolTrouble: it did not end in time.
            ToolFault: there is nobody who ran it.
        """
        from ..isolation.client import IsolatedFault

        payload = {"code": arguments["code"], "timeout_s": timeout_s}
        try:
            ran = await self._jobs.call(JOB, payload, timeout_s=timeout_s + GRACE_S)
        except IsolatedFault as fault:
            if fault.detail == "timeout":
                raise ToolTrouble(_overdue(timeout_s), ToolError.TIMEOUT) from None
            # No program makes its job raise: a disk is full, or no process can be had.
            again = fault.retryable or fault.detail == "raised"
            raise ToolFault(
                f"the tool python: {fault}", retryable=again, detail=fault.detail
            ) from None
        return _shown(ran, timeout_s)


def _shown(ran: dict[str, Any], timeout_s: float) -> str:
    printed, complained = str(ran.get("stdout", "")), str(ran.get("stderr", ""))
    if ran.get("timed_out"):
        before = "".join(part for part in (printed, complained) if part)
        said = f"; it had printed:\n{before}" if before else ""
        raise ToolTrouble(_overdue(timeout_s) + said, ToolError.TIMEOUT)
    code = ran.get("exit_code")
    if code == 0:
        return printed
    ending = ran.get("ending") or f"exit code {code}"
    parts = [printed, "[stderr]\n" + complained if complained else "", f"[{ending}]"]
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _overdue(timeout_s: float) -> str:
    return f"the program did not end within {timeout_s:.3g} s"
