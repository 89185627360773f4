"""SGLang's HTTP routes over a batch.

Owns requests, their futures and the control calls. Never touches the model: everything goes to the
engine's thread and comes back as a future, so this loop answers `/model_info` and `/abort_request`
whatever that thread does. Invariant: every `/generate` is answered once, and one whose client went
away is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from rollstream.errors import ConfigError

from ..server_words import Refused, error_body, weight_label
from .engine import Batch
from .model import Model
from .params import read_params
from .protocol import Limits, read_generate, reply
from .task import Decoder, Task

MAX_BODY_BYTES = 64 << 20
HEALTH_S = 20.0
"""How long `/health_generate` waits for its token, as SGLang."""
MODES = ("abort", "retract", "in_place")
_ENCODER = msgspec.json.Encoder()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HfServer:
    """The routes of one engine.

    Attributes:
        app: the routes; serve them by `runner`.
    """

    def __init__(
        self, model: Model, batch: Batch, decoder: Decoder | None, *, context_tokens: int
    ) -> None:
        self._model, self._batch, self._decoder = model, batch, decoder
        self._limits = Limits(
            context_tokens, model.vocabulary_size, decoder is not None, model.has_experts
        )
        self._rids: set[str] = set()
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        self.app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort_request),
                web.get("/model_info", self._model_info),
                web.get("/get_model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
                web.get("/ready", self._ready),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weight_version", self._update_weight_version),
                web.post("/update_weights_from_disk", self._update_weights_from_disk),
                web.route("*", "/flush_cache", self._flush_cache),
            ]
        )

    def runner(self, shutdown_timeout_s: float) -> web.AppRunner:
        """Return what serves the routes, told of clients that leave."""
        return web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=shutdown_timeout_s,
        )

    # -- generation

    async def _generate(self, request: web.Request) -> web.Response:
        started_s = time.monotonic()
        task, frame = read_generate(await request.read(), self._limits, self._rids)
        self._rids.add(task.rid)
        try:
            await self._run(task)
        finally:
            self._rids.discard(task.rid)
        if task.error is not None:
            return _answer({"error": {"message": task.error}}, 500)
        text = task.text(self._decoder)
        return _answer(reply(task, frame, text, time.monotonic() - started_s))

    async def _run(self, task: Task) -> None:
        """Return once a request has ended; abort it where nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def on_end(_: Task) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(ended.set)

        task.on_end = on_end
        self._batch.submit(task)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self._batch.abort(task.rid, exact=True)
            raise

    # -- control

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await _object(request)
        rid = str(body.get("rid") or "")
        if body.get("abort_all") is True:
            self._batch.abort_all()
        elif rid:  # an empty rid would be a prefix of every other: ignored
            self._batch.abort(rid)
        return _answer({"success": True})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await _object(request)).get("mode", "abort")
        if mode not in MODES:
            raise Refused(f"mode {mode!r}: expected abort, retract or in_place")
        await asyncio.wrap_future(self._batch.pause(mode))
        return _answer({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self._batch.resume())
        return _answer({"message": "Generation continued successfully.", "status": "ok"})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        body = await _object(request)
        if "new_version" not in body:
            raise Refused("new_version is missing")
        version = weight_label(body["new_version"])
        abort_all = body.get("abort_all_requests", True) is not False
        await asyncio.wrap_future(self._batch.set_version(version, abort_all=abort_all))
        message = f"Weight version updated to {version}"
        return _answer({"success": True, "message": message, "new_version": version})

    async def _update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await _object(request)
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise Refused("model_path is missing: the folder of the new weights")
        label = body.get("weight_version")
        reloading = self._batch.reload(
            Path(path),
            None if label is None else weight_label(label),
            abort_all=body.get("abort_all_requests") is True,
            recompute=body.get("flush_cache", True) is not False,
        )
        try:
            num = await asyncio.wrap_future(reloading)
        except ConfigError as error:
            return _answer({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if label is not None:
            message += f" Weight version updated to {self._batch.version}."
        return _answer({"success": True, "message": message, "num_paused_requests": num})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        done = await asyncio.wrap_future(self._batch.flush())
        text = "Cache flushed.\n" if done else "Flush cache failed.\n"
        return web.Response(text=text, status=200 if done else 400)

    # -- questions

    async def _model_info(self, request: web.Request) -> web.Response:
        model = self._model
        return _answer(
            {
                "model_path": str(model.path),
                "served_model_name": model.path.name,
                "tokenizer_path": str(model.path) if self._decoder is not None else "",
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._batch.version,
                "load_format": "safetensors",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "model_type": getattr(model.config, "model_type", None),
                "architectures": [model.architecture],
                "engine": "rollstream-hf",
                "logprob_mode": self._batch.mode.value,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return _answer(
            {
                "context_tokens": self._limits.context_tokens,
                "vocabulary_size": self._limits.vocabulary_size,
                "eos_ids": sorted(self._model.eos_ids),
                "device": str(self._model.device),
                "dtype": str(self._model.dtype).removeprefix("torch."),
                "batched": self._model.kv.batched,
                "routed_experts": self._limits.has_experts,
                **self._batch.state(),
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._batch.alive else 503)

    async def _health_generate(self, request: web.Request) -> web.Response:
        if not self._batch.alive or self._batch.paused:
            return web.Response(status=503)
        params = read_params({"max_new_tokens": 1}, self._model.vocabulary_size, has_text=False)
        task = Task(rid=f"HEALTH_CHECK_{time.monotonic_ns()}", prompt=[0], params=params)
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._run(task)
        except TimeoutError:
            return web.Response(status=503)
        return web.Response(status=200 if task.error is None else 503)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._batch.paused else 200)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refusals and HTTP's own errors as JSON in SGLang's shape."""
    try:
        return await handler(request)
    except Refused as refusal:
        return web.Response(status=400, body=refusal.body, content_type="application/json")
    except web.HTTPException as error:
        message = f"{request.path}: {error.reason}"
        return web.Response(
            status=error.status, body=error_body(message), content_type="application/json"
        )


async def _object(request: web.Request) -> dict[str, Any]:
    raw = await request.read()
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    return body


def _answer(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=_ENCODER.encode(body), content_type="application/json")
