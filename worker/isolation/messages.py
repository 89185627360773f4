"""How a job and its result look, and where the result goes: both ends' format.

Owns the names and the limits. Never runs a job, never sends anything. Invariant: a message names a
job, never code; a result is JSON of at most `MAX_RESULT_BYTES`.

A job is the name of an entry of the verifier's table with keywords `run`, `inbox`, `token`,
`payload` (an object) and `timeout_s`. A result is {"token": str, "value": any} or {"token": str,
"error": str, "detail": str}.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rollstream.queue.keys import prefix

QUEUE = "verify"
MAX_PAYLOAD_BYTES = 1 << 20
MAX_RESULT_BYTES = 64 << 10
MAX_TIMEOUT_S = 600.0
"""No job runs longer, whatever it asks for."""
_MAX_ERROR_CHARS = 2000
_RUN = re.compile(r"[A-Za-z0-9._-]{1,64}")
_INBOX = re.compile(r"[0-9A-Za-z._-]{1,80}")


class JobBroken(RuntimeError):
    """The machine failed a job (a full disk, no CPU), not its input: another try may succeed."""


def inbox_key(run: str, inbox: str) -> str:
    """Return the list that results for one worker are pushed to.

    Raises:
        ValueError: one of the names is not such a name.
    """
    if not _RUN.fullmatch(run) or not _INBOX.fullmatch(inbox):
        raise ValueError("not a run and an inbox")
    return f"{prefix(run)}r:{inbox}"


def result(token: str, value: Any) -> bytes:
    """Return the message for what a job returned; a failure where that cannot be sent.

    Lone surrogates are escaped, so any text can be.
    """
    try:
        message = json.dumps({"token": token, "value": value}, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        text = f"what it returned is no JSON: {type(error).__name__}: {error}"
        return failure(token, text, "invalid")
    if len(message) > MAX_RESULT_BYTES:
        text = f"its result of {len(message)} bytes is above the limit of {MAX_RESULT_BYTES}"
        return failure(token, text, "too_large")
    return message


def failure(token: str, error: str, detail: str) -> bytes:
    """Return the message for no result.

    Args:
        token: of the request.
        error: what happened, for people.
        detail: `raised`, `timeout`, `crashed`, `too_large` or `invalid`.
    """
    text = error[:_MAX_ERROR_CHARS]
    return json.dumps({"token": token, "error": text, "detail": detail}).encode()
