"""Addresses of servers: what is wrong with one, what one with sentinels says, how one is shown.

Owns the checks of a Redis URL and of an engine's, and the hiding of secrets in whatever is printed.
Never connects, imports the standard library only. Invariant: no answer of this module that is for
people holds a password, however malformed the URL is that it was given.

    redis://[user:password@]host[:port][/db]            one server, or any node of a cluster
    unix://[user:password@]/path[?db=N]                 the same machine
    redis+sentinel://[user:password@]host[:port],host[:port]/master[/db]
                                                        the master that sentinels watch
    rediss://, rediss+sentinel://                       with TLS, to the sentinels too
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

SENTINEL_SCHEMES = ("redis+sentinel://", "rediss+sentinel://")
REDIS_SCHEMES = ("redis://", "rediss://", "unix://", *SENTINEL_SCHEMES)
SENTINEL_PORT = 26379
MASTER_NAME = r"[\w.-]+"
NO_NAME_WITH_TLS = (
    "no dns+https://, since its engines are called by address and no certificate names that: "
    "dns+http://, router+https://, or every engine's own https:// URL"
)
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
_QUERY_SECRET = re.compile(
    r"(?i)([?&](?:(?:sentinel_)?password|token|secret|api_key|key)=)[^&#\s\"']*"
)
_PLAIN_NAME = re.compile(r"[\w.-]*")


def redis_url_problem(url: str) -> str:
    """Return what was expected of a Redis URL that is none, without its secrets; else nothing."""
    if not url.startswith(REDIS_SCHEMES):
        return f"a URL that starts with one of {', '.join(REDIS_SCHEMES)}"
    if not url.isprintable() or " " in url:
        return "a URL without blanks, line breaks and control characters"
    if url.startswith(SENTINEL_SCHEMES):
        return _sentinel_problem(url)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return f"a URL whose port is a number up to 65535; {_ENCODED}"
    if not _is_host(parts.hostname):
        return f"a URL whose host is a name or an address; {_ENCODED}"
    if parts.fragment or "@" in parts.path:
        return f"a URL without # and with one @; {_ENCODED}"
    if parts.scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path):
        return "a URL whose path is the number of a database (redis://host:port/0)"
    return _query_problem(parts.scheme, parts.query)


def is_name_with_tls(url: str) -> bool:
    """Return whether an address is a name whose engines would be called over TLS by address."""
    return url.lower().startswith("dns+https://")


def engine_url_problem(url: str) -> str:
    """Return what was expected of an engine's root URL that is none, else nothing."""
    if is_name_with_tls(url):
        return NO_NAME_WITH_TLS
    plain = url.removeprefix("dns+").removeprefix("router+")
    if not plain.startswith(("http://", "https://")):
        return "a URL that starts with http:// or https://, or with dns+ or router+ before that"
    if not url.isprintable() or " " in url:
        return "a URL without blanks, line breaks and control characters"
    try:
        parts = urlsplit(plain)
        _ = parts.port
    except ValueError:
        return "a URL whose port is a number up to 65535"
    if not parts.hostname or not _is_host(parts.hostname):
        return "a URL with a host: a name or an address"
    return "a URL without ? and #" if parts.query or parts.fragment else ""


def checked_engines(urls: Sequence[str]) -> list[str]:
    """Return root URLs of engines, without the slash at their end.

    Raises:
        ValueError: one is none, or there is none at all.
        TypeError: not a list of strings.
    """
    if isinstance(urls, str):
        raise TypeError(f"engines: expected a list of URLs, got the string {urls[:80]!r}")
    checked = [url.rstrip("/") for url in urls]
    for url in checked:
        if problem := engine_url_problem(url):
            raise ValueError(f"engine {url!r}: expected {problem}")
    if not checked:
        raise ValueError("engines: an empty list stops every worker; None is their configuration")
    return list(dict.fromkeys(checked))


def _is_host(host: str | None) -> bool:
    """Return whether a name can be looked up: no part of it is empty or longer than 63."""
    try:
        return (host or "").encode("idna") is not None
    except UnicodeError:
        return False


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """What a URL with sentinels says."""

    sentinels: tuple[tuple[str, int], ...]
    """(host, port) of each."""
    master: str
    """The name they know the master by."""
    server_url: str = field(repr=False)
    """URL of the master itself, with its user, password and options; the host is a stand-in."""
    username: str | None = None
    """Of the sentinels themselves."""
    password: str | None = field(default=None, repr=False)
    """Of the sentinels themselves."""


_SENTINEL_URL = re.compile(
    r"(?P<scheme>rediss?)\+sentinel://(?:(?P<user>[^@/?#]*)@)?(?P<hosts>[^@/?#]+)"
    rf"/(?P<master>{MASTER_NAME})(?:/(?P<db>\d*))?(?:\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s,:\[\]]+)(?::(?P<port>\d{1,5}))?")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")


def read_sentinel_url(url: str) -> SentinelUrl | None:
    """Return what a `redis+sentinel://` URL says; None for every other one.

    Raises:
        ValueError: it is none that `redis_url_problem` would let pass.
    """
    if not url.startswith(SENTINEL_SCHEMES):
        return None
    found = _SENTINEL_URL.fullmatch(url)
    hosts = [] if found is None else [_HOST.fullmatch(part) for part in found["hosts"].split(",")]
    if found is None or None in hosts:
        raise ValueError("not a URL with sentinels")
    query = parse_qsl(found["query"] or "", keep_blank_values=True)
    own = {name: value for name, value in query if name in _SENTINEL_OPTIONS}
    rest = urlencode([item for item in query if item[0] not in _SENTINEL_OPTIONS])
    user = "" if found["user"] is None else f"{found['user']}@"
    return SentinelUrl(
        sentinels=tuple(
            (host["host"].strip("[]"), int(host["port"] or SENTINEL_PORT)) for host in hosts if host
        ),
        master=unquote(found["master"]),
        server_url=f"{found['scheme']}://{user}{found['master']}/{found['db'] or 0}"
        + (f"?{rest}" if rest else ""),
        username=own.get("sentinel_username"),
        password=own.get("sentinel_password"),
    )


def with_sentinels(url: str, sentinels: str) -> str:
    """Return `url` with `host:port,host:port/master` in place of its host (`redis.sentinel`)."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    db = parts.path.strip("/")
    return (
        f"{parts.scheme}+sentinel://{user}{at}{sentinels}"
        + (f"/{db}" if db else "")
        + (f"?{parts.query}" if parts.query else "")
    )


def _sentinel_problem(url: str) -> str:
    try:
        read = read_sentinel_url(url)
        if read is None or not all(
            0 < port < 65536 and _is_host(host) for host, port in read.sentinels
        ):
            raise ValueError
        _ = urlsplit(read.server_url).port
    except ValueError:
        return (
            "a URL like redis+sentinel://user:password@host:port,host:port/master/0 with one @; "
            f"{_ENCODED}"
        )
    parts = urlsplit(read.server_url)
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
