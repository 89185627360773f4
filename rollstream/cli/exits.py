"""Exit codes of the command line, and the error that carries one."""

from __future__ import annotations

OK = 0
PROBLEM = 1
"""Audit or doctor found something, the run is in use, or an unexpected error."""
USAGE = 2
"""Wrong arguments or configuration; nothing was done."""
UNREACHABLE = 3
"""Redis cannot be reached, or there is no such run."""
INTERRUPTED = 130

EXPLAINED = """exit codes:
  0  it did what it was asked to do
  1  audit or doctor found a problem, the run to remove is in use, the group to show is unknown,
     there was nothing to withdraw, requeue, pause or resume, a drain was not over in time, or
     something unexpected happened
  2  wrong arguments or configuration; nothing was done
  3  Redis cannot be reached, or there is no such run
  130  interrupted
the services have their own: rollstream worker --help"""


class CommandError(Exception):
    """Ends a command with one line for people.

    Attributes:
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
