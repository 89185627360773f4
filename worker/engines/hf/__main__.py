"""Run the engine: `python -m worker.engines.hf --model PATH`.

Owns the command line and the process's beginning and end. What is wrong at the start is one
sentence and exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.errors import ConfigError

from .folder import check_folder, load_decoder

if TYPE_CHECKING:
    from .engine import Batch
    from .server import HfServer

NEEDED = ("torch", "transformers", "safetensors", "aiohttp", "tokenizers")
STOP_S = 5.0
"""After SIGTERM: for replies to leave, and for the step that runs."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    cli = argparse.ArgumentParser(
        prog="python -m worker.engines.hf",
        description="SGLang's /generate over transformers, for a laptop, a test, or a GPU without "
        "SGLang.",
    )
    cli.add_argument("--model", required=True, type=Path, help="a model's folder (safetensors)")
    cli.add_argument("--host", default="127.0.0.1")
    cli.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    cli.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    cli.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto: float32 on a CPU, the checkpoint's own elsewhere",
    )
    cli.add_argument("--max-batch", type=int, default=64, help="requests that run at once")
    cli.add_argument(
        "--logprob-mode", default="temperature", choices=("temperature", "raw", "processed")
    )
    cli.add_argument("--context-tokens", type=int, default=0, help="0: the model's own")
    cli.add_argument(
        "--prefix-cache-mb", type=int, default=1024, help="KV kept for the next turn; 0: none"
    )
    cli.add_argument("--weight-version", default="default")
    cli.add_argument("--seed", type=int, help="of requests that send no sampling_seed")
    cli.add_argument("--threads", type=int, default=0, help="of PyTorch; 0: its own choice")
    return cli


def build(args: argparse.Namespace) -> tuple[Batch, HfServer]:
    """Load the model and return the engine, not yet started.

    Raises:
        ConfigError: the packages, the folder or a value is not what it must be.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} missing; install rollstream[hf,service] (PyTorch is several GB)"
        )
    for name, low in (("max_batch", 1), ("context_tokens", 0), ("prefix_cache_mb", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {low}")
    # A folder is read and nothing else: a hub's name would be looked for for a long time.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from .engine import Batch
    from .model import Model, set_threads
    from .sampler import LogprobMode
    from .server import HfServer

    set_threads(args.threads)
    model = Model(args.model, device=args.device, dtype=args.dtype)
    context_tokens = args.context_tokens or model.context_tokens
    if context_tokens > model.context_tokens:
        raise ConfigError(
            f"--context-tokens {context_tokens} exceeds the model's {model.context_tokens}"
        )
    decoder = load_decoder(args.model)
    batch = Batch(
        model,
        decoder=decoder,
        max_batch=args.max_batch,
        prefix_bytes=args.prefix_cache_mb << 20,
        mode=LogprobMode(args.logprob_mode),
        version=args.weight_version,
        seed=args.seed,
    )
    return batch, HfServer(model, batch, decoder, context_tokens=context_tokens)


def bind(host: str, port: int) -> socket.socket:
    """Take the address, before the model is loaded; nothing is accepted yet.

    Raises:
        OSError: it is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"{host}:{port}: {error.strerror}") from None
    return listener


async def serve(batch: Batch, server: HfServer, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are then answered as aborted."""
    from aiohttp import web

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = server.runner(STOP_S)
    await runner.setup()
    try:
        site = web.SockSite(runner, listener, backlog=1024)
        await site.start()
        batch.start()
        host, port = listener.getsockname()[:2]
        sys.stdout.write(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}\n")
        sys.stdout.flush()
        await stop.wait()
        await asyncio.to_thread(batch.stop, STOP_S)
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 after a signal, 2 where it could not begin."""
    args = parser().parse_args(argv)
    try:
        check_folder(args.model)
        with bind(args.host, args.port) as listener:
            batch, server = build(args)
            asyncio.run(serve(batch, server, listener))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"hf engine: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own end takes seconds with PyTorch loaded, and would wait for a step.
    os._exit(code)
