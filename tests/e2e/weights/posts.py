"""What is told to an engine directly, in the words of either protocol. Never tried again."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from tests.e2e.weights.scenes import Protocol

POST_S = 10.0


def post(url: str, path: str, body: Mapping[str, Any]) -> int:
    """Send one control call; return its HTTP status, 0 where nobody answered."""
    request = urllib.request.Request(
        url + path, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=POST_S) as reply:
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def abort_everything(protocol: Protocol, url: str) -> int:
    """Stop every request of one engine, as an operator or a router might."""
    if protocol is Protocol.VLLM:
        return post(url, "/abort_requests", {"request_ids": []})
    return post(url, "/abort_request", {"abort_all": True})


def pause(protocol: Protocol, url: str, mode: str) -> int:
    """Have one engine stand still; modes as its protocol names them."""
    if protocol is Protocol.VLLM:
        return post(url, f"/pause?mode={mode}", {})
    return post(url, "/pause_generation", {"mode": mode})


def go_on(protocol: Protocol, url: str) -> int:
    """End a pause."""
    if protocol is Protocol.VLLM:
        return post(url, "/resume", {})
    return post(url, "/continue_generation", {})


def restart(url: str) -> int:
    """Have a simulated engine lose what it is doing, and its weights: it is as at its start."""
    return post(url, "/sim/restart", {})


PAUSES = {
    Protocol.SGLANG: ("in_place", "retract", "abort"),
    Protocol.VLLM: ("keep", "abort", "wait"),
}
"""Modes of a pause that nobody asked the service about."""
STILL = {Protocol.SGLANG: "in_place", Protocol.VLLM: "keep"}
"""The mode in which requests in flight live on."""


def push(url: str, weights: str, *, named: bool) -> int:
    """Put weights into a simulated engine, which samples by them from then on; stops nothing.

    Named, they are called by their label from the same moment; else by what the engine was called.
    """
    return post(url, "/sim/weights", {"weights": weights} | (
        {"weight_version": weights} if named else {}
    ))  # fmt: skip
