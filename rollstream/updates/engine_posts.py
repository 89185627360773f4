"""One request to many engines at once, from a process that has no HTTP library.

Owns the threads and their bounds. Never tries again and never raises for an engine: what it did
not take stands in its `Posted`. Invariant: the call returns within its time, whatever the engines
do; a thread that an engine still holds then dies with the process.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import IO

from rollstream.urls import scrub

MAX_THREADS = 32
MAX_REPLY_BYTES = 1 << 16
"""Of a reply that is read; only what an error says is shown, and not all of it."""
MAX_SAID = 200
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Posted:
    """What became of one request."""

    url: str
    error: str = ""
    """Empty where the engine answered 2xx."""
    reply: bytes = field(default=b"", compare=False)
    """What it answered then, cut at `MAX_REPLY_BYTES`."""

    @property
    def is_answered(self) -> bool:
        """Whether it answered at all, with whatever status."""
        return not self.error or self.error.startswith("HTTP ")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that was redirected would arrive as a GET."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        return None


# Engines are asked as workers ask them: directly, whatever proxies the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())


def post_all(
    urls: Sequence[str], path: str, body: Mapping[str, object], *, timeout_s: float
) -> list[Posted]:
    """POST `body` as JSON to `path` of every engine, side by side.

    Args:
        urls: root URLs; one that stands there twice is asked once.
        path: begins with a slash.
        body: the same for all.
        timeout_s: for all of them together.

    Returns:
        One entry per different URL, in order.
    """
    return _ask_all(urls, path, json.dumps(body).encode(), timeout_s)


def get_all(urls: Sequence[str], path: str, *, timeout_s: float) -> list[Posted]:
    """GET `path` of every engine, side by side; else as `post_all`."""
    return _ask_all(urls, path, None, timeout_s)


def _ask_all(urls: Sequence[str], path: str, data: bytes | None, timeout_s: float) -> list[Posted]:
    unique, limit = list(dict.fromkeys(urls)), time.monotonic() + timeout_s
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[Posted] = queue.SimpleQueue()
    for url in unique:
        waiting.put(url)

    def work() -> None:
        while (left_s := limit - time.monotonic()) > 0:
            try:
                url = waiting.get_nowait()
            except queue.Empty:
                return
            done.put(Posted(url, *_ask(url.rstrip("/") + path, data, left_s)))

    for number in range(min(MAX_THREADS, len(unique))):
        # Daemons: `timeout_s` bounds single reads, and an engine may trickle for ever.
        threading.Thread(target=work, name=f"rollstream-post-{number}", daemon=True).start()
    found: dict[str, Posted] = {}
    while len(found) < len(unique):
        try:
            one = done.get(timeout=max(0.0, limit - time.monotonic()) or 0.001)
        except queue.Empty:
            break
        found[one.url] = one
    late = f"no answer within {timeout_s:g} s"
    return [found.get(url) or Posted(url, late) for url in unique]


def _ask(url: str, data: bytes | None, timeout_s: float) -> tuple[str, bytes]:
    """Return (what went wrong, empty where nothing did; what was answered)."""
    method, headers = ("GET", {}) if data is None else ("POST", {"content-type": JSON})
    try:
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        with _OPENER.open(request, timeout=timeout_s) as reply:
            return "", reply.read(MAX_REPLY_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return f"HTTP {error.code}{_said(error)}", b""
    except (OSError, ValueError, http.client.HTTPException) as error:
        # URLError is an OSError; a URL that is none is a ValueError.
        return scrub(f"{type(error).__name__}: {error}")[:MAX_SAID], b""


def _said(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(MAX_REPLY_BYTES).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f": {line[:MAX_SAID]}" if line else ""
