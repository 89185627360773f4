"""How fast the hf engine is with a model, alone and in a batch (docs/engines.md).

    python -m benchmarks.hf --model .cache/tiny [--json]

Starts the engine, sends requests of 64 prompt tokens and 128 new ones, `concurrency` at a time, and
counts sampled tokens per second at the client. Every prompt is another, so nothing is reused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx

from examples.devserver import die_with_parent

PROMPT, NEW = 64, 128


async def tokens_per_s(url: str, vocabulary: int, concurrency: int, seconds: float) -> float:
    """Return the rate of `concurrency` clients that each ask again and again."""
    dice = random.Random(concurrency)
    stop_s = time.monotonic() + seconds
    num = 0

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal num
        while time.monotonic() < stop_s:
            body = {
                "input_ids": [dice.randrange(vocabulary) for _ in range(PROMPT)],
                "sampling_params": {"max_new_tokens": NEW, "ignore_eos": True},
                "return_logprob": True,
            }
            reply = (await client.post(f"{url}/generate", json=body)).json()
            num += len(reply["output_ids"])

    start_s = time.monotonic()
    async with httpx.AsyncClient(timeout=None) as client, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(ask(client))
    return num / (time.monotonic() - start_s)


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line a concurrency, or one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hf")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", default="1")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each concurrency")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "worker.engines.hf", "--model", args.model, "--port", "0"]
    command += ["--threads", args.threads, "--prefix-cache-mb", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    ) as engine:
        try:
            assert engine.stdout is not None
            url = engine.stdout.readline().removeprefix("listening on ").strip()
            if not url:
                raise SystemExit("the engine did not start")
            vocabulary = int(httpx.get(f"{url}/server_info").json()["vocabulary_size"])
            found = {}
            for concurrency in (1, 8, 32):
                rate = asyncio.run(tokens_per_s(url, vocabulary, concurrency, args.seconds))
                found[f"tokens_per_s_at_{concurrency}"] = round(rate)
                if not args.json:
                    print(f"{concurrency:3d} at once  {rate:8.0f} tokens/s")
            if args.json:
                print(json.dumps(found))
        finally:
            engine.terminate()


if __name__ == "__main__":
    main()
