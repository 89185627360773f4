"""An engine that answers exact bytes over real HTTP, and keeps what it was asked.

For tests of the client and of whatever sits on it. It listens on the test's own loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from worker.engines.sim.http import Exchange, port_of, serve

Step: TypeAlias = "bytes | tuple[int, bytes] | Callable[[Exchange], None]"
"""What one `/generate` gets: a 200 body, a status with its body, or anything at all."""


def a_reply(
    ids: Sequence[int] = (59, 79075, 90, 23, 92),
    *,
    log_probs: Sequence[Any] | None = None,
    finish: dict[str, Any] | None = None,
    prompt_tokens: int | None = None,
    drop: Sequence[str] = (),
    **meta: Any,
) -> bytes:
    """Return a good reply's bytes; log-prob of output i is -i/128; `drop` leaves fields out.

    It names no request (`id`): one that names another than it answers is refused.
    """
    if log_probs is None:
        log_probs = [-i / 128 for i in range(len(ids))]
    info: dict[str, Any] = {
        "finish_reason": {"type": "stop", "matched": ids[-1] if ids else None},
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "default",
        "output_token_logprobs": [[p, i, None] for p, i in zip(log_probs, ids, strict=False)],
    }
    if finish is not None:
        info["finish_reason"] = finish
    if prompt_tokens is not None:
        info["prompt_tokens"] = prompt_tokens
    body: dict[str, Any] = {"text": "", "output_ids": list(ids), "meta_info": info | meta}
    for name in drop:
        (body if name in body else body["meta_info"]).pop(name)
    return json.dumps(body).encode()


def a_vllm_reply(
    ids: Sequence[int] = (59, 79075, 90, 23, 92),
    *,
    log_probs: Sequence[Any] | None = None,
    finish: str | None = "stop",
    prompt_tokens: int | None = None,
    drop: Sequence[str] = (),
    **choice: Any,
) -> bytes:
    """Return a good reply of vLLM's `/inference/v1/generate`, the twin of `a_reply`.

    `drop` leaves fields out, `choice` changes those of the one choice.
    """
    if log_probs is None:
        log_probs = [-i / 128 for i in range(len(ids))]
    content = [
        {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": []}
        for p, i in zip(log_probs, ids, strict=False)
    ]
    held: dict[str, Any] = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": list(ids),
        "logprobs": {"content": content},
        "routed_experts": None,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}] if ids else [],
    }
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}
    body: dict[str, Any] = {"choices": [held | choice], "usage": usage}
    for name in drop:
        (body if name in body else body["choices"][0]).pop(name)
    return json.dumps(body).encode()


def a_vllm_completion(
    ids: Sequence[int] = (59, 79075, 90, 23, 92), *, num_prompt: int = 7, **choice: Any
) -> bytes:
    """Return a good reply of vLLM's `/v1/completions`."""
    held: dict[str, Any] = {
        "index": 0,
        "text": "",
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": list(ids),
        "prompt_token_ids": list(range(num_prompt)),
        "logprobs": {
            "token_logprobs": [-i / 128 for i in range(len(ids))],
            "tokens": [f"token_id:{i}" for i in ids],
        },
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
    }
    usage = {"prompt_tokens": num_prompt, "completion_tokens": len(ids)}
    return json.dumps({"choices": [held | choice], "usage": usage}).encode()


def hang(exchange: Exchange) -> None:
    """Never answer."""


def reset(exchange: Exchange) -> None:
    """Close the connection in place of an answer."""
    exchange.drop()


GENERATIONS = ("/generate", "/inference/v1/generate", "/v1/completions")
ABORTS = ("/abort_request", "/inference/v1/abort_requests", "/abort_requests")


@dataclass
class ScriptedEngine:
    """One server. `/model_info` and `/abort_request` answer 200 unless told otherwise; vLLM's paths
    are served beside SGLang's."""

    steps: list[Step] = field(default_factory=list)
    """Taken in order; the last one is repeated."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of generations, in order of arrival."""
    raw: list[Exchange] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    """(path, rid) of everything, in order of arrival."""
    aborted: Callable[[str], None] | None = None
    abort_status: int = 200
    info_status: int = 200
    weight_version: str = "default"
    paused: bool = False
    """It says so; see `pause` for one that also keeps requests."""
    held: list[Exchange] | None = None
    """Requests that came during a pause; None where they are answered."""
    is_dev: bool = True
    """Serves vLLM's control calls, as in dev mode."""
    absent: Sequence[str] = ()
    """Paths that are answered with 404."""
    off: Sequence[str] = ()
    """Paths that are answered with 403, as vLLM does without `--enable-scale-out`."""
    url: str = ""
    _server: asyncio.Server | None = None

    def handle(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body) if exchange.body else {}
        rid = body.get("rid") or body.get("request_id") or "".join(body.get("request_ids", ()))
        path = exchange.path
        self.log.append((path, rid))
        if path in self.absent:
            exchange.answer(404, b'{"detail":"Not Found"}')
        elif path in self.off:
            exchange.answer(403, b'{"error":{"message":"Scale-out endpoints are disabled."}}')
        elif path in GENERATIONS and not body:
            exchange.answer(400, b'{"error":{"message":"Field required"}}')
        elif path in ABORTS:
            exchange.answer(self.abort_status, b'{"success":true}')
            if self.aborted is not None:
                self.aborted(rid)
        elif path == "/model_info":
            info = {"model_path": "scripted", "weight_version": self.weight_version}
            exchange.answer(self.info_status, json.dumps(info).encode())
        elif path == "/ready":
            exchange.answer(503 if self.paused else 200, b"{}")
        elif path == "/health":
            exchange.answer(self.info_status, b"")
        elif path == "/is_paused" and self.is_dev:
            exchange.answer(self.info_status, json.dumps({"is_paused": self.paused}).encode())
        elif path == "/weight_info" and self.is_dev:
            info = {"weight_version": self.weight_version}
            exchange.answer(self.info_status, json.dumps(info).encode())
        elif path in GENERATIONS:
            self._generate(exchange, body)
        else:
            exchange.answer(404, b"{}")

    def _generate(self, exchange: Exchange, body: dict[str, Any]) -> None:
        self.requests.append(body)
        self.raw.append(exchange)
        if self.held is not None:
            self.held.append(exchange)
        else:
            self._step(exchange)

    def pause(self) -> None:
        """Keep every request from now on, as a paused SGLang does."""
        self.paused, self.held = True, []

    def go_on(self) -> None:
        """Answer what was kept, and what comes."""
        held, self.held, self.paused = self.held or [], None, False
        for exchange in held:
            self._step(exchange)

    def _step(self, exchange: Exchange) -> None:
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if callable(step):
            step(exchange)
        elif isinstance(step, tuple):
            exchange.answer(*step)
        else:
            exchange.answer(200, step)

    def paths(self) -> list[str]:
        """Return which paths were asked for, in order."""
        return [path for path, _ in self.log]

    async def start(self, port: int = 0) -> None:
        """Listen (again)."""
        self._server = await serve(self.handle, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port_of(self._server)}"

    async def stop(self) -> None:
        """Stop listening and close what is open."""
        if self._server is not None:
            self._server.close()
            for exchange in self.raw:
                exchange.drop()
            self._server = None
            await asyncio.sleep(0)

    @property
    def port(self) -> int:
        """Return where it listens."""
        return int(self.url.rpartition(":")[2])


@asynccontextmanager
async def scripted(*steps: Step) -> AsyncIterator[ScriptedEngine]:
    """Yield a running engine with these answers."""
    engine = ScriptedEngine(list(steps) or [a_reply()])
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
