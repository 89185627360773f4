"""Addresses of servers: what is wrong with one, and how one is shown.

Owns the check of a Redis URL and the hiding of secrets in whatever is printed. Never connects,
imports the standard library only. Invariant: no answer of this module holds a password, however
malformed the URL is that it was given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_ENCODED = "/ # ? @ of a user or password are written %2F %23 %3F %40"
_OPTIONS: dict[str, Callable[[str], object]] = {
    "db": int, "max_connections": int, "health_check_interval": int,
    "socket_timeout": float, "socket_connect_timeout": float,
    "username": str, "password": str, "client_name": str,
    "ssl_cert_reqs": str, "ssl_ca_certs": str, "ssl_certfile": str, "ssl_keyfile": str,
}  # fmt: skip
"""What may stand behind the `?`: others would change what we read, or are none of redis-py's."""

_CREDENTIALS = re.compile(r"://([^\s\"'<>]*)@")
"""Up to the last `@`: a password that was not encoded may hold any character of a URL."""
_WHOLE_CREDENTIALS = re.compile(r"://(.*)@", re.DOTALL)
_QUERY_SECRET = re.compile(r"(?i)([?&](?:password|token|secret|api_key|key)=)[^&#\s\"']*")
_PLAIN_NAME = re.compile(r"[\w.-]*")


def redis_url_problem(url: str) -> str:
    """Return what was expected of a Redis URL that is none, without its secrets; else nothing."""
    if not url.startswith(REDIS_SCHEMES):
        return f"a URL that starts with one of {', '.join(REDIS_SCHEMES)}"
    if not url.isprintable() or " " in url:
        return "a URL without blanks, line breaks and control characters"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return f"a URL whose port is a number up to 65535; {_ENCODED}"
    if parts.fragment or "@" in parts.path:
        return f"a URL without # and with one @; {_ENCODED}"
    if parts.scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path):
        return "a URL whose path is the number of a database (redis://host:port/0)"
    return _query_problem(parts.scheme, parts.query)


def _query_problem(scheme: str, query: str) -> str:
    for name, value in parse_qsl(query, keep_blank_values=True):
        read = _OPTIONS.get(name)
        if read is None or (name.startswith("ssl_") and scheme != "rediss"):
            known = [n for n in _OPTIONS if scheme == "rediss" or not n.startswith("ssl_")]
            return f"a URL with no other options behind ? than {', '.join(known)}; {_ENCODED}"
        try:
            read(value)
        except ValueError:
            return f"a URL whose option {name} is a number"
    return ""


def shown_url(url: str) -> str:
    """Return a URL without its secrets, for messages."""
    return _QUERY_SECRET.sub(r"\1***", _WHOLE_CREDENTIALS.sub(_hidden, url))


def scrub(text: str) -> str:
    """Return a text without the secrets of the URLs in it."""
    return _QUERY_SECRET.sub(r"\1***", _CREDENTIALS.sub(_hidden, text))


def _hidden(found: re.Match[str]) -> str:
    name, colon, _ = found[1].partition(":")
    # A name without a password may itself be the secret (redis://secret@host).
    return f"://{name}:***@" if colon and _PLAIN_NAME.fullmatch(name) else "://***@"
