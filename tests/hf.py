"""The hf engine for tests: a tiny random Qwen3 over the toy vocabulary, served over real HTTP.

Needs PyTorch, which `make setup` does not install: call `need_torch()` before anything else here.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.toy import write_toy_tokenizer

if TYPE_CHECKING:
    from worker.engines.hf.engine import Batch
    from worker.engines.hf.model import Model

VOCABULARY = 1280
EOS = 2
CONTEXT = 256
NOISE = 2e-5
"""How far two ways to the same log-prob may differ in float32, with room to spare."""


def need_torch() -> None:
    """Skip the module without PyTorch; fail it where the tests must run."""
    if os.environ.get("ROLLSTREAM_REQUIRE_HF") == "1":
        import torch
    else:
        torch = pytest.importorskip("torch", reason="needs PyTorch: make hf-test")
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"


def write_model(folder: Path, seed: int = 0, kind: str = "Qwen3", **changes: Any) -> Path:
    """Write a random model with the toy tokenizer and return its folder."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    net = getattr(transformers, f"{kind}ForCausalLM")(config)
    folder.mkdir(parents=True, exist_ok=True)
    net.save_pretrained(folder)
    write_toy_tokenizer(folder)
    return folder


class Reference:
    """The same weights in plain transformers: no cache, no batch, one forward pass."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.net = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def logits(self, ids: Sequence[int]) -> Any:
        """Return [L, V] float32."""
        import torch

        with torch.no_grad():
            return self.net(torch.tensor([list(ids)])).logits[0].float()

    def log_probs(
        self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Return log softmax(logits / T) of each output token behind what precedes it."""
        import torch

        rows = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        table = torch.log_softmax(rows / temperature, dim=-1)
        return [float(table[i, token]) for i, token in enumerate(output)]


class Hf:
    """A running engine, a plain client for it, and its inside.

    Attributes:
        batch: the engine's thread; tests stop it at a chosen step.
    """

    def __init__(self, url: str, batch: Batch, model: Model) -> None:
        self.url, self.batch, self.model = url, batch, model

    async def post(self, path: str, body: Any = None, **words: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=40.0, verify=False) as client:
            if "content" not in words:
                words["json"] = {} if body is None else body
            return await client.post(self.url + path, **words)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=40.0, verify=False) as client:
            return await client.get(self.url + path)

    async def generate(self, ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        """Return a reply; what is no field of the body is a sampling parameter."""
        response = await self.post("/generate", request(ids, **fields))
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    async def refused(self, ids: Sequence[int], **fields: Any) -> str:
        """Return the message of a refusal."""
        response = await self.post("/generate", request(ids, **fields))
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return str(error if isinstance(error, str) else error["message"])

    async def state(self) -> dict[str, Any]:
        body: dict[str, Any] = (await self.get("/server_info")).json()
        return body

    def pause_after(self, steps: int) -> None:
        """Pause the engine (as in_place) once it has made so many steps."""
        left = steps
        step = self.batch._step

        def counted() -> None:
            nonlocal left
            step()
            left -= 1
            if left == 0:
                del self.batch._step
                self.batch.paused = True

        self.batch._step = counted  # type: ignore[method-assign]

    async def paused_with(self, running: int = 0, waiting: int = 0) -> None:
        """Return once the engine is paused with so many requests."""

        def reached() -> bool:
            state = self.batch.state()
            return state["paused"] and (state["running"], state["waiting"]) == (running, waiting)

        await until(reached)


async def until(true: Any) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.002)


FIELDS = frozenset(
    "rid return_logprob logprob_start_len extra_key stream text return_routed_experts lora_path "
    "routed_experts_start_len return_prompt_token_ids routing_key top_logprobs_num".split()
)


def request(ids: Sequence[int], **fields: Any) -> dict[str, Any]:
    """Return a body of `/generate`."""
    own = {name: value for name, value in fields.items() if name in FIELDS}
    sampling = {name: value for name, value in fields.items() if name not in FIELDS}
    sampling = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 1} | sampling
    body = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
    return body | own


def outcome(reply: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return ids and log-probs of a reply that agree with themselves."""
    meta = reply["meta_info"]
    ids = [entry[1] for entry in meta["output_token_logprobs"]]
    assert ids == reply["output_ids"]
    assert meta["completion_tokens"] == len(ids)
    assert meta["finish_reason"].get("matched") != "NaN happened"
    return ids, [entry[0] for entry in meta["output_token_logprobs"]]


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Hf]:
    """Serve a model in this process, on a loop of its own; arguments as on the command line."""
    from aiohttp import web

    from worker.engines.hf.__main__ import build, parser

    args = parser().parse_args(
        ["--model", str(folder), "--device", "cpu", "--dtype", "float32", *arguments]
    )
    batch, server = build(args)
    loop = asyncio.new_event_loop()
    runner = server.runner(5.0)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    batch.start()
    try:
        yield Hf(f"http://127.0.0.1:{port}", batch, batch._model)
    finally:
        assert batch.stop(10), "the engine's thread did not end"
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
