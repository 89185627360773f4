"""How both executors reach the server: URL, timeouts, retries, TLS, and what to send for a call.

Owns the settings of every connection to a run's Redis. Never sends anything. Invariant: redis-py
repeats a command whose reply was lost, so only scripts and reads that may be repeated are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from rollstream.queue.calls import ScriptCall
from rollstream.queue.reads import Command
from rollstream.queue.scripts import Script

RETRIES = 2
"""Repeats of one command or one connect; longer outages are the caller's to wait for."""
BACKOFF = ExponentialWithJitterBackoff(base=0.02, cap=0.5)
SOCKET_TIMEOUT_S = 10.0
"""A reply that takes longer is an error; above `MAX_BLOCK_S`, so no blocking read trips it."""
MAX_BLOCK_S = 5.0
MAX_WAKE_S = 0.5
"""Bound of one wait for a wake-up token: what a lost token costs."""
_PASSING = ("BUSY ", "MISCONF ", "NOREPLICAS ", "TRYAGAIN ")
"""Refusals that are about the server and not about the command: somebody's slow script, a full
disk, a replica that is away, a slot on the move. redis-py has no class of its own for them."""
_READ_BYTES = 1 << 16
"""Bodies are large; fewer, larger reads of the socket."""


def connection_options(url: str, ca: str | None, connect_timeout_s: float) -> dict[str, Any]:
    """Return the options that both clients of redis-py share.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        ca: file of the CA that signed the server's certificate, for `rediss://`.
        connect_timeout_s: bound of connecting, all tries together.
    """
    options: dict[str, Any] = {
        # RESP 2: with RESP 3 redis-py does not look for a leftover reply on a pooled connection.
        "protocol": 2,
        "socket_connect_timeout": connect_timeout_s / (RETRIES + 1),
        "socket_timeout": SOCKET_TIMEOUT_S,
        "socket_read_size": _READ_BYTES,
    }
    if not url.startswith("unix://"):
        options["socket_keepalive"] = True
    if ca is not None and url.startswith("rediss://"):
        options["ssl_ca_certs"] = ca
    return options


def evalsha(script: Script, prefix: str, call: ScriptCall[Any]) -> Command:
    """Return the command of one call."""
    return ("EVALSHA", script.sha, 1, prefix, *call.args)


def unknown_scripts(replies: Sequence[Any]) -> list[int]:
    """Return which replies say that the server does not know the script (it restarted)."""
    return [j for j, reply in enumerate(replies) if isinstance(reply, NoScriptError)]


def raise_first(replies: Iterable[Any]) -> None:
    """Raise the first error of a round trip, once all replies were read.

    A server that refuses for a reason of its own is away like one that cannot be reached: it is
    waited for, and what was refused is asked for again.
    """
    for reply in replies:
        if isinstance(reply, ResponseError) and str(reply).startswith(_PASSING):
            raise RedisConnectionError(str(reply)) from reply
        if isinstance(reply, Exception):
            raise reply


def block_ms(block_s: float) -> int:
    """Return a bounded wait in whole milliseconds; 0 is no wait."""
    return int(max(0.0, min(block_s, MAX_BLOCK_S)) * 1000)


def wake_s(timeout_s: float) -> float:
    """Return a bounded wait for a wake-up token (0 would be for ever)."""
    return round(max(0.01, min(timeout_s, MAX_WAKE_S)), 3)
