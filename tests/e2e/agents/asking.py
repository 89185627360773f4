"""How an agent asks: a client of its own over plain HTTP, or the real SDKs.

Owns retries of the plain client, which are those of SDKs: the same body again, with a header that
counts. Never decides what is asked. Invariant: `ask` returns a whole reply, or raises why there is
none; a client that left in mid-reply asks again without a word of the first time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import anthropic
import httpx
import httpx2
import openai

# What SDKs import only when it is used; in a worker's loop that would hold up everybody.
import openai.resources.chat
import openai.resources.responses

from tests.e2e.agents.line import TIMEOUT_S, Line
from tests.e2e.agents.words import Dialect, reply_in

MAX_RETRIES = 6
API_KEY = "none"
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})


class Refused(Exception):
    """No reply, and asking again would not help."""


class Left(Exception):
    """The client left."""


class Client(Protocol):
    """Asks for one reply."""

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the reply, put together where it came as a stream.

        Raises:
            Refused: there is none.
            Left: it went before it had all of it.
        """
        ...

    async def aclose(self) -> None:
        """Close it."""
        ...


class Plain:
    """Plain HTTP."""

    def __init__(self, base_url: str, dialect: Dialect, line: Line, *, keyed: str = "") -> None:
        self._url = f"{base_url}/v1/{dialect.path}"
        self._line, self._keyed = line, keyed
        self._number = 0
        self._client = httpx.AsyncClient(transport=line, timeout=TIMEOUT_S)

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        for retry in range(MAX_RETRIES + 1):
            headers = {"x-stainless-retry-count": str(retry)}
            if self._keyed:
                headers["idempotency-key"] = f"{self._keyed}-{self._number}"
            is_leaving = bool(self._line.fates) and self._line.fates[0] == "leave"
            try:
                answer = await self._client.post(self._url, json=body, headers=headers)
            except httpx.TransportError as error:
                if is_leaving:
                    raise Left from None
                if not isinstance(error, httpx.TimeoutException):
                    raise Refused(f"the connection broke: {error!r}") from None
                continue
            if answer.status_code == 200:
                reply = reply_in(self._url, answer.text)
                if reply is not None:
                    return reply
            elif answer.status_code not in _AGAIN:
                raise Refused(f"{answer.status_code}: {answer.text[:300]}")
            await asyncio.sleep(0.01 * 2**retry)
        raise Refused("tried too often")

    async def aclose(self) -> None:
        await self._client.aclose()


def _over_httpx2(line: Line) -> Any:
    """Return a client of httpx2, which some SDKs are made of, that sends over the same line."""

    class Pieces(httpx2.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, response: httpx.Response) -> None:
            self._response = response

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for piece in self._response.stream:  # type: ignore[union-attr]
                    yield piece
            except httpx.ReadError as error:
                raise httpx2.ReadError(str(error)) from None

        async def aclose(self) -> None:
            await self._response.aclose()

    class Over(httpx2.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            same = httpx.Request(
                request.method, str(request.url), headers=list(request.headers.raw),
                content=await request.aread(),
            )  # fmt: skip
            try:
                response = await line.handle_async_request(same)
            except httpx.TransportError as error:
                raise getattr(httpx2, type(error).__name__)(str(error)) from None
            return httpx2.Response(
                response.status_code, headers=list(response.headers.raw), stream=Pieces(response)
            )

        async def aclose(self) -> None:
            await line.aclose()

    return httpx2.AsyncClient(transport=Over(), timeout=TIMEOUT_S)


class Sdk:
    """The `openai` and `anthropic` SDKs, with their own retries."""

    def __init__(self, base_url: str, dialect: Dialect, line: Line) -> None:
        self._line, self._dialect = line, dialect
        is_anthropic = dialect.path == "messages"
        self._http: Any = (
            _over_httpx2(line)
            if is_anthropic
            else httpx.AsyncClient(transport=line, timeout=TIMEOUT_S)
        )
        given: dict[str, Any] = {
            "base_url": base_url, "api_key": API_KEY, "http_client": self._http,
            "max_retries": MAX_RETRIES,
        }  # fmt: skip
        if is_anthropic:
            self._create: Any = anthropic.AsyncAnthropic(**given).messages.create
        else:
            client = openai.AsyncOpenAI(**given)
            chat = client.chat.completions.create
            self._create = chat if dialect.path != "responses" else client.responses.create

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        broken = (
            openai.APIConnectionError, anthropic.APIConnectionError, httpx.TransportError,
            httpx2.TransportError,
        )  # fmt: skip
        is_leaving = bool(self._line.fates) and self._line.fates[0] == "leave"
        for _ in range(MAX_RETRIES):
            try:
                answer = await self._create(**body)
                if not body["stream"]:
                    return answer.model_dump(mode="json", exclude_none=True)  # type: ignore[no-any-return]
                events = [event.model_dump(mode="json", warnings=False) async for event in answer]
            except (openai.APIStatusError, anthropic.APIStatusError) as error:
                if error.status_code in _AGAIN:  # in a stream that had begun: not tried again by it
                    continue
                raise Refused(f"{error.status_code}: {error!r:.300}") from None
            except broken:
                if is_leaving:
                    raise Left from None
                continue
            except (openai.APIError, anthropic.APIError):
                continue
            reply = self._dialect.joined(events)
            if reply is not None:
                return reply
        raise Refused("tried too often")

    async def aclose(self) -> None:
        await self._http.aclose()
