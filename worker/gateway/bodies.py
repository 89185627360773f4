"""Reading the body of a request: bounded bytes, bounded time, and JSON that is an object.

Owns what is held of bodies. Never knows their fields. Invariant: a body that is too large is
refused before a byte of it is read as JSON; all bodies held at once are bounded; a large one is
read as JSON in a thread, so the loop answers others meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..bounded import in_thread
from .limits import CONNECTION, ClientLeft, HttpLimits, HttpRefusal
from .types import ErrorKind, Refusal

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

T = TypeVar("T")

MAX_DEPTH = 128
"""Objects and lists within each other; deeper ones would end as a RecursionError further on."""
MAX_NODES = 500_000
"""Objects and lists in one body, which are read in one go: the loop waits meanwhile for some 50 ns
each. 8 MB of the shortest messages, parts, calls or tools are 400,000 of them."""
LARGE_BYTES = 64 << 10
"""From here on a body is read as JSON, and translated, in a thread."""
LARGE_AT_ONCE = 2
"""Large bodies that are read as JSON at once: as objects they may be 25 times as large."""
_FRAMING_BYTES = 256 << 10
"""So much may come before it is asked how much of it was the body."""
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_OWN_CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii")


class Bodies:
    """Reads bodies of one server.

    Attributes:
        held_bytes: of bodies now.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.held_bytes = 0
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)

    @contextlib.asynccontextmanager
    async def reading(
        self, scope: Scope, receive: Receive, headers: Mapping[str, str]
    ) -> AsyncIterator[bytearray]:
        """Yield the whole body, and hold it meanwhile.

        Raises:
            Refusal: it is too large, too slow, or not what we read.
            ClientLeft: the client did.
        """
        check_headers(headers, self._limits.max_body_bytes)
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(self._limits.body_s):
                    await self._fill(body, scope, receive)
            except TimeoutError:
                late = f"the request's body did not arrive within {self._limits.body_s:g} s"
                raise HttpRefusal(408, late, again=True, closes=True) from None
            yield body
        finally:
            self.held_bytes -= len(body)

    async def _fill(self, body: bytearray, scope: Scope, receive: Receive) -> None:
        limits = self._limits
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk = message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) + len(chunk) > limits.max_body_bytes:
                raise too_large(limits.max_body_bytes)
            if self.held_bytes + len(chunk) > limits.held_bytes:
                raise Refusal(ErrorKind.BUSY, "too many large requests at once: try again")
            body += chunk
            self.held_bytes += len(chunk)
            wire_bytes = scope[CONNECTION].wire_bytes
            if more and wire_bytes > _FRAMING_BYTES and wire_bytes > 2 * len(body):
                small = "the body's chunks are too small: send larger ones"
                raise HttpRefusal(400, small, closes=True)

    async def parse(self, body: bytearray, then: Callable[[dict[str, Any]], T]) -> T:
        """Return `then(body as JSON)`; both in a thread where the body is large.

        Raises:
            Refusal: it is no JSON object, or `then` refuses it.
        """
        if len(body) < LARGE_BYTES:
            return then(decode(body))
        async with self._large:
            return await in_thread(lambda: then(decode(body)))


def check_headers(headers: Mapping[str, str], max_body_bytes: int) -> None:
    """Refuse what need not be read to be refused.

    Raises:
        Refusal: it is too large, compressed, or in another charset.
    """
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > max_body_bytes:
        raise too_large(max_body_bytes)
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpRefusal(415, f"content-encoding {encoding[:32]!r}: send the body uncompressed")
    _, _, parameters = headers.get("content-type", "").lower().partition(";")
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"')
        if name.strip() == "charset" and charset not in _OWN_CHARSETS:
            raise HttpRefusal(415, f"charset {charset[:32]!r}: send the body as UTF-8")


def too_large(max_body_bytes: int) -> Refusal:
    """Return the refusal of a body over the limit."""
    said = f"the request's body is larger than {max_body_bytes} bytes (gateway.max_body_bytes)"
    return HttpRefusal(413, said)


def decode(body: bytes | bytearray) -> dict[str, Any]:
    """Return a body as an object; of a name that stands there twice the last value counts.

    Half of a surrogate pair, as JavaScript leaves it where it cuts a text, is read as U+FFFD: the
    same text comes with every later request of that agent.

    Raises:
        Refusal: it is none, too deep, or of too many parts.
    """
    _check_nodes(body)
    try:
        try:
            found = msgspec.json.decode(body)
        except msgspec.DecodeError:
            mended = _ESCAPE.sub(_mend, body)
            if mended == body:
                raise
            found = msgspec.json.decode(mended)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Refusal(ErrorKind.INVALID, f"invalid JSON body: {error}") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise Refusal(ErrorKind.INVALID, f"invalid JSON body: expected an object, got {kind}")
    _check_depth(found)
    return found


def _check_nodes(body: bytes | bytearray) -> None:
    """Refuse what opens more objects and lists than anybody means; texts may, in code and JSON."""
    if _num_opened(body) <= MAX_NODES:
        return
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    if _num_opened(b"".join(outside)) > MAX_NODES:
        raise Refusal(
            ErrorKind.INVALID, f"invalid JSON body: more than {MAX_NODES} objects and lists"
        )


def _num_opened(text: bytes | bytearray) -> int:
    return text.count(b"[") + text.count(b"{")


def _mend(escape: re.Match[bytes]) -> bytes:
    return escape[0] if escape["lone"] is None else rb"\ufffd"


def _too_deep() -> Refusal:
    return Refusal(
        ErrorKind.INVALID, f"invalid JSON body: more than {MAX_DEPTH} levels within each other"
    )


def _check_depth(found: dict[str, Any]) -> None:
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for outer in level
            for value in (outer.values() if type(outer) is dict else outer)
            if type(value) in (dict, list)
        ]
        if not level:
            return
    raise _too_deep()
