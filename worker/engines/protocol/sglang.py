"""Talks to one SGLang server (or router): token ids in, token ids out.

Owns SGLang's paths and headers: `/generate`, `/abort_request`, `/model_info`, `/ready`. Its request
is written by `request`, its reply read by `reply`, its HTTP is `http_base`. Never asks what loads
an engine or makes a paused one ill (`/health*`). Invariant: as `http_base`.
"""

from __future__ import annotations

import msgspec
from httpx_aiohttp import AiohttpTransport

from rollstream.errors import EngineFault

from ...sampling import Sampling
from ...types import Completion
from ..client import Look
from ..faults import Detail, fault
from .checks import UNREADABLE
from .http_base import ClientOptions, HttpClient, Sent, header_value
from .reply import read_reply
from .request import ROUTING_HEADER, RequestWriter
from .stream import SglangJoiner, interval_of

_PAUSED = 503
"""What `/ready` answers while generation is paused, and before the model is loaded."""


class ModelInfo(msgspec.Struct):
    """What `/model_info` says, as far as we ask."""

    model_path: str = ""
    weight_version: str | int | None = None


class SglangClient(HttpClient):
    """One engine that speaks SGLang's protocol, by its base URL."""

    def __init__(
        self,
        url: str,
        transport: AiohttpTransport,
        options: ClientOptions,
        *,
        streams: bool = True,
    ) -> None:
        """`streams` says whether the server can; from one that cannot, replies come as a whole."""
        super().__init__(url, transport, options, path="/generate")
        self._writer = RequestWriter(lora_path=options.lora_path)
        self._streams = streams

    def _head(
        self, sampling: Sampling, sent: Sent, *, routing_key: str, salt: int, streams: bool
    ) -> bytes:
        return self._writer.head(
            sampling,
            rid=sent.rid,
            routing_key=routing_key,
            salt=salt,
            replay=sent.replay,
            interval=interval_of(sent.max_new_tokens) if streams else 0,
        )

    def _joiner(self, sent: Sent) -> SglangJoiner | None:
        return SglangJoiner(sent) if self._streams else None

    def _headers(self, sent: Sent, routing_key: str) -> dict[str, str]:
        return {ROUTING_HEADER: header_value(routing_key)}

    def _read(self, status: int, raw: bytes, sent: Sent) -> Completion:
        return read_reply(
            status,
            raw,
            rid=sent.rid,
            engine=sent.engine,
            num_prompt=sent.num_prompt,
            version=sent.version,
            max_token_id=self._options.max_token_id,
            max_new_tokens=sent.max_new_tokens,
            replay=sent.replay,
            versions=self._options.versions,
        )

    async def _abort(self, rid: str) -> int:
        status, _ = await self.ask("POST", "/abort_request", b'{"rid":"%b"}' % rid.encode())
        return status

    async def look(self) -> Look:
        """Ask the engine what it serves, and whether it is paused; also while it is.

        `/model_info` rather than `/health`: a paused engine answers it at once. `/ready` is 503
        while generation is paused; servers that lack it are not known to be.

        Raises:
            EngineFault: it did not answer `/model_info`, or not with 200.
        """
        status, raw = await self.ask("GET", "/model_info")
        if status != 200:
            raise self.refusal("/model_info", status, raw)
        try:
            info = msgspec.json.decode(raw, type=ModelInfo)
        except UNREADABLE as error:
            raise fault(Detail.BAD_REPLY, f"{self.url}/model_info: {error}") from None
        try:
            status, _ = await self.ask("GET", "/ready")
        except EngineFault:
            status = 0
        return Look(info.weight_version, paused=status == _PAUSED)

    async def score(self, body: bytes, *, timeout_s: float) -> bytes:
        """Return the raw answer to a `/generate` that samples nothing; never tried again.

        Raises:
            EngineFault: no answer in time, or another status than 200.
        """
        status, raw = await self.ask("POST", "/generate", body, limit_s=timeout_s)
        if status != 200:
            raise self.refusal("", status, raw)
        return raw
