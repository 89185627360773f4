"""Replies cut into events as SGLang and vLLM stream them, a step that sends some, and a sink.

Written from the servers' own code (`tests/data/engine_fields.json` names its classes), and not from
the client's: a whole reply goes in, and what a server would have sent for it comes out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.sample import TokenIds
from worker.engines.sim.http import Exchange

DONE = b"data: [DONE]\n\n"
Streamed = Callable[[Exchange], None]


@dataclass
class Sink:
    """Keeps what it is told."""

    takes: int | None = None
    """How many tries it takes; None takes as `TokenSink` says: until something was passed on."""
    begun: list[str] = field(default_factory=list)
    added: list[TokenIds] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def begin(self, rid: str) -> bool:
        free = not self.added if self.takes is None else len(self.begun) < self.takes
        (self.begun if free else self.refused).append(rid)
        return free

    def add(self, ids: TokenIds) -> None:
        assert ids.dtype == np.int32
        assert len(ids) > 0
        assert not ids.flags.writeable
        self.added.append(ids)

    @property
    def ids(self) -> list[int]:
        """All that was passed on, in order."""
        return [token for ids in self.added for token in ids.tolist()]


def sglang_events(
    reply: bytes, cuts: Iterable[int], *, incremental: bool = False
) -> list[dict[str, Any]]:
    """Return the events of a reply of `/generate`, one that ends at each cut and the last one."""
    whole: dict[str, Any] = json.loads(reply)
    meta, ids = whole["meta_info"], whole["output_ids"]
    found, behind = [], 0
    for end in cuts:
        part = {name: value for name, value in meta.items() if name not in LAST_ONLY}
        part |= {"finish_reason": None, "completion_tokens": end}
        start = behind if incremental else 0
        part["output_token_logprobs"] = meta["output_token_logprobs"][start:end]
        found.append({"text": "", "output_ids": ids[start:end], "meta_info": part})
        behind = end
    if incremental:
        meta["output_token_logprobs"] = meta["output_token_logprobs"][behind:]
        whole["output_ids"] = ids[behind:]
    return [*found, whole]


LAST_ONLY = {"weight_versions", "routed_experts", "indexer_topk"}


def vllm_events(reply: bytes, cuts: Iterable[int], *, usage: bool = True) -> list[dict[str, Any]]:
    """Return the events of a reply of either of vLLM's routes."""
    whole: dict[str, Any] = json.loads(reply)
    (choice,) = whole["choices"]
    ids, found, behind = choice["token_ids"], [], 0
    named = {name: whole[name] for name in ("request_id", "id") if name in whole}
    ends = [*cuts, len(ids)]
    for number, end in enumerate(ends, 1):
        is_last = number == len(ends)
        part: dict[str, Any] = {"index": 0, "finish_reason": None, "stop_reason": None}
        if is_last:
            part |= choice
        part.pop("prompt_token_ids", None)
        if behind == 0 and "prompt_token_ids" in choice:
            part["prompt_token_ids"] = choice["prompt_token_ids"]
        part["token_ids"] = ids[behind:end]
        log_probs: dict[str, list[Any]] = choice["logprobs"] or {}
        part["logprobs"] = {name: values[behind:end] for name, values in log_probs.items()}
        found.append({**named, "choices": [part]})
        behind = end
    if usage and whole.get("usage") is not None:
        last = {name: whole[name] for name in ("usage", "metrics") if whole.get(name) is not None}
        found.append({**named, "choices": [], **last})
    return found


def events_of(kind: str, reply: bytes, cuts: Sequence[int], **how: Any) -> list[dict[str, Any]]:
    """Return the events of a reply in a protocol's words."""
    return (sglang_events if kind == "sglang" else vllm_events)(reply, cuts, **how)


def sse(event: Any) -> bytes:
    """Return one event as bytes."""
    data = event if isinstance(event, bytes) else json.dumps(event).encode()
    return b"data: %b\n\n" % data


def streams(*pieces: Any, done: bool = True, then: Streamed | None = None) -> Streamed:
    """Return a step that sends events (or raw bytes), and ends or does something else instead."""

    def step(exchange: Exchange) -> None:
        exchange.begin()
        for piece in pieces:
            exchange.write(piece if isinstance(piece, bytes) else sse(piece))
        if then is not None:
            then(exchange)
            return
        if done:
            exchange.write(DONE)
        exchange.end()

    return step
