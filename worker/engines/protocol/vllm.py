"""Talks to one vLLM server (or router): token ids in, token ids out.

Owns vLLM's paths and headers. Its request is written by `vllm_request`, its reply read by
`vllm_reply`, its HTTP is `http_base`. Never closes a connection to stop a request whose tokens
somebody may want: vLLM would lose them. Invariant: as `http_base`.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from httpx_aiohttp import AiohttpTransport

from rollstream.errors import ConfigError

from ...sampling import Sampling
from ...types import Completion
from ..client import Look
from ..faults import Detail, fault
from .checks import UNREADABLE, error_text
from .http_base import ClientOptions, HttpClient, Sent, header_value
from .vllm_reply import ID_PREFIXES, read_vllm_reply
from .vllm_request import PATHS, REQUEST_HEADER, SESSION_HEADER, Route, VllmWriter
from .vllm_stream import INTERVAL, VllmJoiner

_ABSENT = frozenset({404, 405})
"""What a server answers on a path that it does not have."""
_OFF = _ABSENT | {403}
"""Likewise, or on one that it was not told to serve (`--enable-scale-out`)."""
UNSCORED = "samples cannot be scored again by vLLM here; set telemetry.rescore_fraction = 0"
"""Why `score` refuses; said at the worker's start, too."""


class _Paused(msgspec.Struct):
    is_paused: bool = False


class _WeightInfo(msgspec.Struct):
    weight_version: str | int | None = None


_Said = TypeVar("_Said", _Paused, _WeightInfo)


class VllmClient(HttpClient):
    """One engine that speaks vLLM's protocol, by its base URL."""

    def __init__(self, url: str, transport: AiohttpTransport, options: ClientOptions) -> None:
        """Refuse what vLLM has no words for.

        Raises:
            ConfigError: an adapter's path, or rows of an indexer.
        """
        try:
            self._route = Route(options.vllm_route)
        except ValueError:
            raise ConfigError(
                f"engine.vllm_route {options.vllm_route!r} is none of {', '.join(Route)}"
            ) from None
        super().__init__(url, transport, options, path=PATHS[self._route])
        if options.lora_path:
            raise ConfigError(
                "engine.lora_path is SGLang's; vLLM knows an adapter by the name that it was "
                "loaded under: give engine.model"
            )
        if options.replay is not None and options.replay.indexer is not None:
            raise ConfigError("engine.indexer_topk: vLLM serves no indexer rows; switch it off")
        self._writer = VllmWriter(self._route, model=options.model)
        self._has_route = False

    def _head(
        self, sampling: Sampling, sent: Sent, *, routing_key: str, salt: int, streams: bool
    ) -> bytes:
        return self._writer.head(
            sampling,
            rid=sent.rid,
            salt=salt,
            replay=sent.replay,
            interval=INTERVAL if streams else 0,
        )

    def _joiner(self, sent: Sent) -> VllmJoiner | None:
        if sent.replay is not None and self._route is Route.COMPLETIONS:
            return None  # whose streams have no routed experts
        return VllmJoiner(sent, self._route)

    def _headers(self, sent: Sent, routing_key: str) -> dict[str, str]:
        return {SESSION_HEADER: header_value(routing_key), REQUEST_HEADER: sent.rid}

    def _read(self, status: int, raw: bytes, sent: Sent) -> Completion:
        return read_vllm_reply(
            status,
            raw,
            sent,
            route=self._route,
            max_token_id=self._options.max_token_id,
            versions=self._options.versions,
        )

    async def _abort(self, rid: str) -> int:
        """Post the abort; it is answered before it happened, and the request's own reply comes."""
        item = "-0" if self._route is Route.COMPLETIONS else ""  # each prompt has its own id there
        body = b'{"request_ids":["%b%b%b"]}' % (
            ID_PREFIXES[self._route].encode(),
            rid.encode(),
            item.encode(),
        )
        status, _ = await self.ask("POST", "/inference/v1/abort_requests", body)
        if status in _OFF:  # older servers have it in dev mode and with --tokens-only
            status, _ = await self.ask("POST", "/abort_requests", body)
        return status

    async def look(self) -> Look:
        """Ask the engine what it serves, and whether it is paused.

        Both are known in dev mode only (VLLM_SERVER_DEV_MODE=1); without it the engine is there if
        `/health` says so, under an unknown version.

        Raises:
            EngineFault: it did not answer, says that it is ill, or does not serve our route.
        """
        if not self._has_route:
            await self._find_route()
        paused = await self._said("/is_paused", _Paused)
        info = await self._said("/weight_info", _WeightInfo)
        if paused is None and info is None:
            status, raw = await self.ask("GET", "/health")
            if status in _ABSENT:
                status, raw = await self.ask("GET", "/v1/models")
            if status != 200:
                raise self.refusal("/health", status, raw)
        return Look(
            None if info is None else info.weight_version,
            paused=paused is not None and paused.is_paused,
        )

    async def _find_route(self) -> None:
        """Learn, by a request that no server runs, whether calls can be sent at all.

        A server without `--enable-scale-out` would refuse each call of each member, for good.
        """
        path = PATHS[self._route]
        status, raw = await self.ask("POST", path, b"{}")
        if status in _OFF:
            raise fault(
                Detail.REFUSED,
                f"{self.url}{path} answered {status} ({error_text(raw)}): start vllm serve with "
                "--enable-scale-out, or set engine.vllm_route",
            )
        self._has_route = True

    async def _said(self, path: str, kind: type[_Said]) -> _Said | None:
        status, raw = await self.ask("GET", path)
        if status in _ABSENT:
            return None
        if status != 200:
            raise self.refusal(path, status, raw)
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as error:
            raise fault(Detail.BAD_REPLY, f"{self.url}{path}: {error}") from None

    async def score(self, body: bytes, *, timeout_s: float) -> bytes:
        """Refuse: log-probs of a prompt are asked for in SGLang's words only.

        Raises:
            EngineFault: always.
        """
        raise fault(
            Detail.REFUSED,
            f"{self.url}: {UNSCORED}",
        )
