"""From what a configuration names (URLs, a DNS name, a router) to the URLs of engines.

Owns the three kinds of an address and what their answers mean. Never keeps a set and never probes
an engine. Invariant: an address that gives no answer, or an empty one, raises, so that whoever asks
keeps the engines it has: a resolver or a router that fails for a moment removes nobody.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

import aiohttp
import httpx
import msgspec

from rollstream.errors import ConfigError
from rollstream.urls import NO_NAME_WITH_TLS, is_name_with_tls

DNS, ROUTER = "dns+", "router+"
_RANK = re.compile(r"@\d+$")
"""Routers name a data-parallel rank of a worker so; it is not part of the address."""
_PATHS = ("/workers", "/list_workers")
"""Of SGLang's router: today's, and the older one."""
MAX_ENGINES = 1024
MAX_LIST_BYTES = 4 << 20

Ask: TypeAlias = Callable[[str], Awaitable[tuple[int, bytes]]]
"""GET a URL, bounded; (status, body), or NoAnswer."""
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Name and port to addresses; raises OSError."""


class NoAnswer(Exception):
    """An address named no engine just now; says which and why."""


async def http_get(
    transport: httpx.AsyncBaseTransport, url: str, *, limit_s: float
) -> tuple[int, bytes]:
    """Return status and body of a URL.

    Raises:
        NoAnswer: nothing within `limit_s`, or more than any list of engines.
    """
    extensions = {"timeout": {"connect": limit_s, "read": limit_s, "pool": None}}
    try:
        async with asyncio.timeout(limit_s):
            request = httpx.Request("GET", url, extensions=extensions)
            response = await transport.handle_async_request(request)
            try:
                assert isinstance(response.stream, httpx.AsyncByteStream)
                raw = b""
                async for chunk in response.stream:
                    raw += chunk
                    if len(raw) > MAX_LIST_BYTES:
                        raise NoAnswer(f"{url}: more than {MAX_LIST_BYTES} bytes")
            finally:
                await response.aclose()
    except TimeoutError:
        raise NoAnswer(f"{url}: no answer in {limit_s:g} s") from None
    except (httpx.TransportError, aiohttp.ClientError, OSError) as error:
        raise NoAnswer(f"{url}: {type(error).__name__}: {error}") from None
    return response.status_code, raw


def is_moving(spec: str) -> bool:
    """Return whether the engines behind an address may change by themselves."""
    return spec.startswith((DNS, ROUTER))


def plain_url(url: str) -> str:
    """Return the URL of an engine in its one form.

    Raises:
        ConfigError: it is none.
    """
    plain = url.strip().rstrip("/")
    try:
        parsed = httpx.URL(plain)
        parsed.host.encode("idna")  # as the resolver will: it raises for a label that none can be
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"engine.urls: {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"engine.urls: {url!r} is not http://host:port or https://host:port")
    if parsed.query or parsed.fragment:
        raise ConfigError(f"engine.urls: {url!r}: paths are put behind it, so it has no ? and no #")
    return plain


def check_spec(spec: str) -> str:
    """Return an address in its one form.

    Raises:
        ConfigError: it is none, or a name behind which TLS would be used.
    """
    if is_name_with_tls(spec.strip()):
        raise ConfigError(f"engine.urls: {spec!r}: expected {NO_NAME_WITH_TLS}")
    for kind in (DNS, ROUTER):
        if spec.startswith(kind):
            return kind + plain_url(spec.removeprefix(kind))
    return plain_url(spec)


async def resolve(name: str, port: int) -> list[str]:
    """Return every address of a name, sorted: two workers then agree on the order."""
    infos = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted({str(info[4][0]) for info in infos})


async def engines_of(spec: str, ask: Ask, resolve: Resolve = resolve) -> list[str]:
    """Return the URLs of the engines that an address stands for now.

    Raises:
        NoAnswer: a name without addresses, a router that cannot be read or has no workers.
    """
    if spec.startswith(DNS):
        return await _of_name(httpx.URL(spec.removeprefix(DNS)), spec, resolve)
    if spec.startswith(ROUTER):
        return await _of_router(spec.removeprefix(ROUTER), ask)
    return [spec]


async def _of_name(url: httpx.URL, spec: str, resolve: Resolve) -> list[str]:
    port = url.port or 80
    try:
        addresses = await resolve(url.host, port)
    except (OSError, UnicodeError) as error:
        raise NoAnswer(f"{spec}: {url.host} cannot be resolved: {error}") from None
    if not addresses:
        raise NoAnswer(f"{spec}: {url.host} has no address")
    return [str(url.copy_with(host=address, port=port)).rstrip("/") for address in addresses]


async def _of_router(router: str, ask: Ask) -> list[str]:
    heard: list[str] = []
    for path in _PATHS:
        status, raw = await ask(router + path)
        if status != 200:
            heard.append(f"{path} answered {status}")
            continue
        try:
            urls = workers_in(msgspec.json.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            heard.append(f"{path} is not JSON: {error}")
            continue
        if urls:
            return urls
        heard.append(f"{path} names no worker")
    raise NoAnswer(f"{router}: {'; '.join(heard)}")


def workers_in(answer: Any) -> list[str]:
    """Return the URLs in a router's answer of either form; what is no HTTP address is left out."""
    if not isinstance(answer, dict):
        return []
    workers, older = answer.get("workers"), answer.get("urls")
    found: list[Any] = [
        worker.get("url") if isinstance(worker, dict) else worker
        for worker in (workers if isinstance(workers, list) else ())
    ]
    found += older if isinstance(older, list) else []
    urls = []
    for url in found[:MAX_ENGINES]:
        if isinstance(url, str):
            try:
                urls.append(plain_url(_RANK.sub("", url.strip().rstrip("/"))))
            except ConfigError:
                continue
    return unique(urls)


def unique(urls: Iterable[str]) -> list[str]:
    """Return each URL once, in the order of its first place."""
    return list(dict.fromkeys(urls))
