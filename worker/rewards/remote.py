"""Rewards that a server of the user's computes: samples out by POST, verdicts in as JSON.

Owns the connections, the gathering of samples into one request, and the format at both ends. Never
tries again (the scorer does) and never reads more than a bounded answer. Invariant: each sample
has its own verdict or its own fault, whatever became of the others in its request.

    one sample (batch_size = 1):   POST {sample}       →  number | null | {"score" or "reward": …}
    several:                       POST [{sample}, …]  →  a list of these, in order
    {sample} = prompt, response, final_text, label, metadata, index, group_index
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import reprlib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from rollstream.errors import ConfigError, RewardFault
from rollstream.settings import RewardTable

from ..bounded import in_thread
from ..functions import describe
from . import verdicts
from .case import Case
from .details import Detail, later, no_verdict

MAX_CONNECTIONS = 256
MAX_ANSWER_BYTES = 1 << 20
"""Of one sample's answer; a batch may have so much for each."""
_LONG_CHARS = 1 << 18
"""A longer response is encoded in a thread."""
_BUSY = frozenset({408, 425, 429})
_NAMES = ("reward", "score")
_SHOWN = reprlib.Repr()
"""Shows the beginning of an answer without a walk through all of it."""
_ONES_DOING = frozenset({Detail.RAISED, Detail.REFUSED, Detail.INVALID, Detail.TOO_LARGE})
"""What one sample may have done to a request that it shared."""


class _Shared(Exception):
    """A request of several samples ended as one of them alone may have ended it."""


def open_remote(table: RewardTable) -> Remote:
    """Return the client of a table, without any I/O on the network.

    Raises:
        ConfigError: no URL, or a token that cannot be read.
    """
    parts = urlsplit(table.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"reward.url {table.url!r}: the reward 'remote' posts samples to an http:// or "
            "https:// URL; set it"
        )
    return Remote(
        table.url,
        token=_token_of(table),
        timeout_s=table.timeout_s,
        key=table.key,
        batch_size=table.batch_size,
        batch_wait_s=table.batch_wait_s,
    )


def _token_of(table: RewardTable) -> str | None:
    path = table.token_file
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward.token_file {path}: {describe(error)}") from None
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"reward.token_file {path} holds no token")
    return token


@dataclass(slots=True, eq=False)
class _Asked:
    """One sample that waits for its verdict."""

    record: bytes
    answer: asyncio.Future[Any]


class Remote:
    """Posts samples, one by one or several at once.

    Args:
        url: where to.
        token: sent as a bearer token.
        timeout_s: of one request.
        key: `reward.key`.
        batch_size: samples of one request, at most; 1 posts a sample by itself.
        batch_wait_s: how long a request waits for more of them.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout_s: float,
        key: str | None,
        batch_size: int,
        batch_wait_s: float,
    ) -> None:
        self._url, self._timeout_s, self._key = url, timeout_s, key
        self._batch_size, self._batch_wait_s = batch_size, batch_wait_s
        self._headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",  # nothing here would unpack it
        }
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._transport = AiohttpTransport(
            # The session has a context of its own; this one is never used and quick to make.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            client=lambda: aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            ),
        )
        self._gathered: list[_Asked] = []
        self._timer: asyncio.TimerHandle | None = None
        self._requests: set[asyncio.Task[None]] = set()

    async def judge(self, case: Case) -> Any:
        """Return the server's reward of a sample.

        The first time it may go with others. Where that ended as one of them alone could end it, it
        goes by itself at once; where it is asked again later, too. So a sample that a server cannot
        digest costs nobody else a verdict.

        Raises:
            RewardFault: no verdict.
        """
        record = await _encoded(case)
        if self._batch_size > 1 and case.attempt == 0:
            with contextlib.suppress(_Shared):
                return self._reward_in(await self._answer(record, self._gather))
        return self._reward_in(await self._answer(record, self._send_one))

    async def _answer(self, record: bytes, send: Callable[[_Asked], None]) -> Any:
        asked = _Asked(record, asyncio.get_running_loop().create_future())
        send(asked)
        return await asked.answer

    def _send_one(self, asked: _Asked) -> None:
        self._send([asked])

    def _gather(self, asked: _Asked) -> None:
        self._gathered.append(asked)
        if len(self._gathered) >= self._batch_size:
            self._send_gathered()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._batch_wait_s, self._send_gathered)

    def _send_gathered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered = self._gathered, []
        waiting = [asked for asked in gathered if not asked.answer.done()]
        if waiting:
            self._send(waiting)

    def _send(self, batch: Sequence[_Asked]) -> None:
        task = asyncio.get_running_loop().create_task(self._exchange(batch))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

        def given_up(_: object) -> None:
            if all(asked.answer.done() for asked in batch):
                task.cancel()  # nothing, where it has just answered

        for asked in batch:
            asked.answer.add_done_callback(given_up)

    async def _exchange(self, batch: Sequence[_Asked]) -> None:
        """Send one request and hand every sample its part of the answer."""
        answers: list[Any]
        try:
            answers = self._parts_of(await self._posted(batch), len(batch))
        except asyncio.CancelledError:
            for asked in batch:
                asked.answer.cancel()
            raise
        except RewardFault as fault:
            answers = [fault] * len(batch)
        except Exception as error:  # noqa: BLE001 - a task has nobody to raise to
            answers = [no_verdict(Detail.RAISED, f"{self._url}: {describe(error)}")] * len(batch)
        for asked, answer in zip(batch, answers, strict=True):
            if asked.answer.done():
                continue
            if isinstance(answer, RewardFault):
                is_shared = len(batch) > 1 and answer.detail in _ONES_DOING
                asked.answer.set_exception(_Shared() if is_shared else _copied(answer))
            else:
                asked.answer.set_result(answer)

    def _parts_of(self, body: bytes, size: int) -> list[Any]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise no_verdict(
                Detail.INVALID, f"{self._url} answered no JSON: {body[:200]!r}", retryable=True
            ) from None
        if self._batch_size == 1:
            return [answer]
        if not isinstance(answer, list) or len(answer) != size:
            what = f"{len(answer)}" if isinstance(answer, list) else type(answer).__name__
            raise no_verdict(
                Detail.INVALID, f"{self._url} was sent a list of {size} samples and answered {what}"
            )
        return answer

    async def _posted(self, batch: Sequence[_Asked]) -> bytes:
        """Return the body of a successful answer.

        Raises:
            RewardFault: there was none.
        """
        body = batch[0].record
        if self._batch_size > 1:
            body = b"[" + b",".join(asked.record for asked in batch) + b"]"
        request = httpx.Request("POST", self._url, headers=self._headers, content=body)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._transport.handle_async_request(request)
                try:
                    answer = await self._read(response, MAX_ANSWER_BYTES * len(batch))
                finally:
                    await response.aclose()
        except TimeoutError:
            raise no_verdict(
                Detail.TIMEOUT,
                f"{self._url} did not answer within {self._timeout_s:g} s (reward.timeout_s)",
                retryable=True,
            ) from None
        except (httpx.HTTPError, aiohttp.ClientError, OSError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise no_verdict(
                Detail.UNREACHABLE, f"{self._url}: {describe(cause)}", retryable=True
            ) from None
        _check_status(self._url, response, answer)
        return answer

    async def _read(self, response: httpx.Response, limit: int) -> bytes:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        chunks, num_bytes = [], 0
        async for chunk in response.stream:
            chunks.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > limit:
                raise no_verdict(Detail.TOO_LARGE, f"{self._url} answered more than {limit} bytes")
        return b"".join(chunks)

    def _reward_in(self, answer: Any) -> Any:
        """Return the reward in one answer.

        Raises:
            RewardFault: there is none in it.
        """
        if answer is None:
            return None
        if isinstance(answer, dict) and answer.get("error"):
            raise no_verdict(
                Detail.UNAVAILABLE,
                f"{self._url} could not judge: {str(answer['error'])[:500]}",
                retryable=True,
            )
        reward = answer
        if isinstance(answer, dict):
            with contextlib.suppress(KeyError):
                reward = verdicts.one_of(answer, self._key, _NAMES)
        number = reward.get(self._key) if isinstance(reward, dict) and self._key else reward
        if isinstance(number, bool) or verdicts.is_number(number):
            return reward
        raise no_verdict(
            Detail.INVALID,
            f"{self._url} answered {_SHOWN.repr(answer)}; a number, null, or an object with "
            "'reward', 'score' or reward.key was expected",
        )

    async def aclose(self) -> None:
        """End what is on its way, and close the connections."""
        if self._timer is not None:
            self._timer.cancel()
        for asked in self._gathered:
            asked.answer.cancel()
        for task in tuple(self._requests):
            task.cancel()
        if self._requests:
            await asyncio.wait(self._requests, timeout=5.0)
        await self._transport.aclose()


async def _encoded(case: Case) -> bytes:
    if len(case.sample.response) > _LONG_CHARS:
        return await in_thread(_encode, case)
    return _encode(case)


def _encode(case: Case) -> bytes:
    sample = case.sample
    record = {
        "prompt": sample.prompt,
        "response": sample.response,
        "final_text": case.reply.text,
        "label": sample.label,
        "metadata": sample.metadata,
        "index": sample.index,
        "group_index": sample.group_index,
    }
    try:
        return json.dumps(record, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise no_verdict(
            Detail.INVALID,
            f"the sample cannot be posted: its columns are no JSON: {describe(error)}",
        ) from None


def _copied(fault: RewardFault) -> RewardFault:
    """Return a fault of its own for each sample: an exception that is raised twice grows."""
    after_s = getattr(fault, "after_s", 0.0)
    if after_s:
        return later(fault.message, after_s)
    return RewardFault(fault.message, retryable=fault.retryable, detail=fault.detail)


def _check_status(url: str, response: httpx.Response, body: bytes) -> None:
    status = response.status_code
    if 200 <= status < 300:
        return
    text = f"{url} answered {status}: {body[:300].decode('utf-8', 'replace')}"
    if status in _BUSY or status > 500:
        raise later(text, _after_s(response.headers.get("retry-after", "")))
    if status == 500:
        raise no_verdict(Detail.RAISED, text, retryable=True)
    raise no_verdict(Detail.REFUSED, text)


def _after_s(header: str) -> float:
    """Return what `Retry-After` says in seconds; a date is left to the back-off."""
    with contextlib.suppress(ValueError):
        seconds = float(header)
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    return 0.0
