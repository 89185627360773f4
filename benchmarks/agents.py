"""What one call of an agent costs the worker that serves it.

    python -m benchmarks.agents [--json] [--turns 128] [--sampled 48]

One process has the real gateway, a real session and the real renderer; the engine answers at once,
in process. The client is a process of its own over real HTTP, so its CPU is not counted. It goes on
for `--turns` turns, and sends the whole conversation with every one of them, as agents do; by the
last turn some 8k tokens are held.

* `cpu_ms_per_call`: CPU of this process, all threads, of the last quarter of the turns.
* `wall_ms_p50`: of the same calls, as the client sees them, one at a time.
* `held_tokens`: in front of the last call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from examples.devserver import die_with_parent
from examples.vocabulary import write
from rollstream.sample import Sample
from worker.gateway.book import Book
from worker.gateway.dialects.anthropic import AnthropicMessages
from worker.gateway.dialects.openai_chat import OpenAIChat
from worker.gateway.dialects.responses import OpenAIResponses
from worker.gateway.prompting import Prompter
from worker.gateway.rules import SessionRules
from worker.gateway.server import Gateway
from worker.sampling import Sampling, call_seed
from worker.telemetry.spans import SpanList
from worker.tito.ids import as_ids, ids_json
from worker.tito.load import load_renderer, render_prompt
from worker.types import Completion, Finish, GenerateInput, Limits, RequestIds

PATHS = {"chat": "v1/chat/completions", "anthropic": "v1/messages", "responses": "v1/responses"}
SAID = "Then the total is what was there before and what was added to it, as the question says. "
ASKED = "And how many are there if three more are put in?"
PIECE = 16
"""Tokens of one piece of a stream, as engines are asked for them."""
CLIENT_S = 300.0


class Instant:
    """An engine that says the same at once."""

    def __init__(self, renderer: Any, sampled: int) -> None:
        words = renderer.encode_raw(SAID * (1 + sampled // 8)).tolist()[: sampled - 1]
        self.ids = as_ids([*words, renderer.stop_token_ids[0]])
        self.text = renderer.decode(self.ids[:-1])
        self._log_probs = np.full(len(self.ids), -0.5, dtype=np.float32)
        self._json = ids_json(self.ids)
        self.held = 0

    async def generate(self, prompt: RequestIds, sampling: Sampling, **how: Any) -> Completion:
        """Return the one reply."""
        b",".join(prompt.pieces)
        self.held = prompt.num_tokens
        rid = f"{self.held:032x}"
        if prompt.sink is not None:
            prompt.sink.begin(rid)
            for start in range(0, len(self.ids), PIECE):
                prompt.sink.add(self.ids[start : start + PIECE])
                await asyncio.sleep(0)
        return Completion(
            ids=self.ids, log_probs=self._log_probs, json=self._json, finish=Finish.STOP,
            versions=[(0, 0, len(self.ids))], engine="in-process", rid=rid, dispatched_version=0,
        )  # fmt: skip


async def measure(renderer: Any, dialect: str, args: argparse.Namespace, *, stream: bool) -> Any:
    """Return the row of one way of asking."""
    engine, book = Instant(renderer, args.sampled), Book()
    gateway = Gateway(book, [OpenAIChat(), AnthropicMessages(), OpenAIResponses()])
    await gateway.start()
    given = GenerateInput(
        sample=Sample(group_index=0, routing_key="g0"),
        sampling=Sampling(max_new_tokens=1024),
        engine=engine,  # type: ignore[arg-type]  # never closed
        renderer=renderer,
        tools=[],
        spans=SpanList(),
        deadline=time.monotonic() + 3600,
        prompt=render_prompt(renderer, [{"role": "user", "content": ASKED}], []),
        limits=Limits(max_turns=args.turns + 1, max_context=1 << 20, max_response=1 << 20),
        version=lambda: 0,
        turn_seed=lambda turn: call_seed(0, 0, 0, turn),
    )
    session = book.open(given, SessionRules(prompter=Prompter(renderer)))
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.agents", "--client", gateway.base_url(session.key),
        dialect, str(int(stream)), str(args.turns), engine.text,
        stdout=asyncio.subprocess.PIPE, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert client.stdout is not None
    async with asyncio.timeout(CLIENT_S):
        await client.stdout.readline()
        before_s = time.process_time()
        told = json.loads(await client.stdout.readline())
        spent_s = time.process_time() - before_s
        await client.wait()
    assert session.stats["committed"] == args.turns
    assert session.stats["divergences"] == 0, "it began anew, so this measures something else"
    await session.close()
    await gateway.aclose()
    return {
        "dialect": dialect,
        "stream": stream,
        "cpu_ms_per_call": round(1000 * spent_s / told["calls"], 3),
        "wall_ms_p50": round(told["p50_ms"], 3),
        "held_tokens": engine.held,
    }


def converse(url: str, dialect: str, stream: bool, turns: int, text: str) -> None:
    """Be the client: say when the last quarter begins, and how long its calls took."""
    items: list[Any] = []
    took: list[float] = []
    first = turns - turns // 4
    with httpx.Client(timeout=60.0) as client:
        for turn in range(turns):
            items.append({"role": "user", "content": ASKED})
            if turn == first:
                sys.stdout.write("\n")
                sys.stdout.flush()
            field = "input" if dialect == "responses" else "messages"
            body = {"model": "m", field: items, "stream": stream}
            body |= {"max_tokens": 1024} if dialect == "anthropic" else {}
            start = time.perf_counter()
            client.post(f"{url}/{PATHS[dialect]}", json=body).raise_for_status()
            took.append(1000 * (time.perf_counter() - start))
            items.append({"role": "assistant", "content": text})
    last = took[first:]
    sys.stdout.write(json.dumps({"calls": len(last), "p50_ms": statistics.median(last)}) + "\n")


def main() -> int:
    """Run once; return the exit code."""
    cli = argparse.ArgumentParser(prog="python -m benchmarks.agents")
    cli.add_argument("--json", action="store_true", help="print one line of JSON only")
    cli.add_argument("--turns", type=int, default=128)
    cli.add_argument("--sampled", type=int, default=48, help="tokens of one reply")
    cli.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.client:
        url, dialect, stream, turns, text = args.client
        converse(url, dialect, stream == "1", int(turns), text)
        return 0
    renderer = load_renderer(write(Path(".cache") / "qwen3"), "qwen3")
    rows = [
        asyncio.run(measure(renderer, dialect, args, stream=stream))
        for dialect in PATHS
        for stream in (False, True)
    ]
    if args.json:
        sys.stdout.write(json.dumps({"turns": args.turns, "rows": rows}) + "\n")
        return 0
    for row in rows:
        sys.stdout.write(f"{row}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
