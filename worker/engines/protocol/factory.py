"""The one place that knows which client speaks which protocol.

Owns the table of `engine.kind`. Never talks to an engine. Invariant: every kind that the settings
accept has a client.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rollstream.errors import ConfigError

from ..client import EngineClient
from .http_base import ClientOptions
from .sglang import SglangClient
from .vllm import VllmClient

if TYPE_CHECKING:
    from httpx_aiohttp import AiohttpTransport

_CLIENTS: dict[str, Callable[[str, AiohttpTransport, ClientOptions], EngineClient]] = {
    "sglang": SglangClient,
    "vllm": VllmClient,
    "hf": partial(SglangClient, streams=False),
    "sim": SglangClient,
}


def new_client(
    kind: str, url: str, transport: AiohttpTransport, options: ClientOptions
) -> EngineClient:
    """Return a client of one engine, without any I/O.

    Args:
        kind: `engine.kind`.
        url: root URL of the engine.
        transport: shared by the clients of a pool (`http_base.new_transport`).
        options: what they have in common.

    Raises:
        ConfigError: an unknown kind, no URL, or an option that the protocol has no words for.
    """
    make = _CLIENTS.get(kind)
    if make is None:
        raise ConfigError(f"engine.kind {kind!r} is none of {', '.join(sorted(_CLIENTS))}")
    return make(url, transport, options)
