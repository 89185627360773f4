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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.errors import ConfigError

if TYPE_CHECKING:
    from .engine import Batch
    from .server import HfServer
    from .task import Decoder

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
    if not args.model.is_dir():
        raise ConfigError(f"--model {args.model} is not a folder")
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
    decoder = _decoder(args.model)
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


def _decoder(folder: Path) -> Decoder | None:
    """Return the tokenizer, or None where there is none: ids need none, stop strings do."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        decoder: Decoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ConfigError(f"{path}: {error}") from None
    return decoder


async def serve(batch: Batch, server: HfServer, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight are then answered as aborted."""
    from aiohttp import web

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        server.app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        batch.start()
        port = runner.addresses[0][1]
        sys.stdout.write(f"listening on http://{host}:{port}\n")
        sys.stdout.flush()
        await stop.wait()
        await asyncio.to_thread(batch.stop, STOP_S)
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 after a signal, 2 where it could not begin."""
    args = parser().parse_args(argv)
    try:
        batch, server = build(args)
        asyncio.run(serve(batch, server, args.host, args.port))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"hf engine: {error}\n")
        return 2
    if batch.alive:  # inside a long operation of PyTorch: the interpreter would wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
