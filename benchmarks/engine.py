"""A latency-bound engine that answers precomputed bytes and times its clients from outside.

    python -m benchmarks.engine [--port 0] [--seconds 2]

It stands in for engines in a benchmark of the worker: no policy, no sampling, one core. Each
conversation (the request's routing key, `c<script>-<anything>`) gets the replies of its script in
order, each after a latency; what is timed is the client: *reply sent → next request of that
conversation complete*. A worker's own timers miss what happens before they start.

Its first line is JSON: where it listens and its own ceiling, measured by a bare loader in a process
of its own that sends requests of 8k tokens and looks at nothing. `POST /bench` sets the latency and
opens a window of so many seconds, `GET /bench` answers what was seen in it, null until it closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from worker.engines.sim.http import Exchange, port_of, serve

NUM_SCRIPTS = 64
SAMPLED = 261
"""Tokens of one reply."""
TOOL = "lookup"
NUM_WORDS = 20_000
_KEY = b'"routing_key":"c'
_LOAD_TOKENS = 8192


class Words:
    """Random text that reads like text to an encoder: few words often, many words seldom."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        words = sorted(
            number
            for piece, number in vocabulary.items()
            if piece[0] == "Ġ" and piece[1:].isascii() and piece[1:].islower() and len(piece) > 3
        )[:NUM_WORDS]
        self._ids = np.array(words, dtype=np.int32)
        """Of words with their leading space; ids of a BPE vocabulary are in order of frequency."""
        weights = 1.0 / np.arange(2, len(words) + 2)
        self._weights = weights / weights.sum()
        self._rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer

    def ids(self, count: int) -> list[int]:
        """Return ids of `count` words."""
        chosen: list[int] = self._rng.choice(self._ids, count, p=self._weights).tolist()
        return chosen

    def text(self, count: int) -> str:
        """Return `count` words."""
        return str(self._tokenizer.decode(self.ids(count)))


def scripts(tokenizer: Tokenizer) -> list[list[bytes]]:
    """Return the bodies of every script's replies: tool calls, and an answer at the end."""
    rng = np.random.default_rng(11)
    words = Words(tokenizer, seed=4)
    end = tokenizer.token_to_id("<|im_end|>")
    made = []
    for script in range(NUM_SCRIPTS):
        bodies = []
        for turn in reversed(range(8 + rng.integers(17))):
            tail: list[int] = []
            if turn:
                call = {"name": TOOL, "arguments": {"key": f"key {script} {turn}"}}
                text = f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
                tail = tokenizer.encode(text, add_special_tokens=False).ids
            ids = [*words.ids(SAMPLED - 1 - len(tail)), *tail, end]
            log_probs = (-rng.exponential(0.6, SAMPLED)).astype(np.float32).tolist()
            meta = {
                "finish_reason": {"type": "stop", "matched": end},
                "weight_version": "0",
                "completion_tokens": SAMPLED,
                "cached_tokens": 0,
                "e2e_latency": 2.0,
                "output_token_logprobs": [
                    [p, i, None] for p, i in zip(log_probs, ids, strict=True)
                ],
            }
            text = tokenizer.decode(ids, skip_special_tokens=False)
            body = {"text": text, "output_ids": ids, "meta_info": meta}
            bodies.append(json.dumps(body, separators=(",", ":")).encode())
        made.append(bodies)
    return made


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process with all its threads, to 10 ms (0.0 where unknown)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def run_delay_s(pid: int) -> float:
    """Return how long a process's main thread has waited for a core (0.0 where unknown)."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@dataclass(slots=True)
class _Conversation:
    replies: list[bytes]
    turn: int = 0
    sent_s: float = 0.0


@dataclass(slots=True)
class _Reading:
    """Clocks of two processes at one moment."""

    now_s: float
    cpu_s: tuple[float, ...]
    delay_s: tuple[float, ...]

    @classmethod
    def of(cls, *pids: int) -> _Reading:
        return cls(time.perf_counter(), tuple(map(cpu_s, pids)), tuple(map(run_delay_s, pids)))


@dataclass(slots=True)
class _Window:
    """What is seen between two readings."""

    pids: tuple[int, ...]
    first: _Reading
    requests: int = 0
    added_s: array[float] = field(default_factory=lambda: array("d"))
    late_s: float = 0.0
    """How late the engine itself was at worst."""

    def close(self) -> dict[str, Any]:
        """Return the figures; `worker` is the process that asked, `engine` this one."""
        first, last = self.first, _Reading.of(*self.pids)
        seconds = last.now_s - first.now_s
        added_ms = np.array(self.added_s or [0.0]) * 1e3
        figures: dict[str, Any] = {
            "seconds": seconds,
            "requests": self.requests,
            "requests_per_s": self.requests / seconds,
            "added_ms_p50": float(np.percentile(added_ms, 50)),
            "added_ms_p99": float(np.percentile(added_ms, 99)),
            "added_ms_max": float(added_ms.max()),
            "engine_late_ms_max": self.late_s * 1e3,
        }
        for name, place in (("worker", 0), ("engine", 1)):
            spent_s = last.cpu_s[place] - first.cpu_s[place]
            waited_s = last.delay_s[place] - first.delay_s[place]
            figures[f"{name}_cpu_s"] = spent_s
            figures[f"{name}_core_share"] = spent_s / seconds
            figures[f"{name}_wait_share"] = waited_s / seconds
        return figures


class BenchEngine:
    """Answers exchanges with what was precomputed."""

    def __init__(self, made: list[list[bytes]]) -> None:
        self._scripts = made
        self._conversations: dict[bytes, _Conversation] = {}
        self._latency_s = 0.0
        self._random = random.Random(3)
        self._window: _Window | None = None
        self._figures: dict[str, Any] | None = None
        self._loop = asyncio.get_running_loop()

    def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        if exchange.path == "/generate":
            self._generate(exchange)
        elif exchange.path == "/bench" and exchange.method == "POST":
            self._begin(json.loads(exchange.body))
            exchange.answer(200, b"{}")
        elif exchange.path == "/bench":
            exchange.answer(200, json.dumps(self._figures).encode())
        else:
            exchange.answer(200, b'{"model_path":"precomputed replies","weight_version":"0"}')

    def _begin(self, order: dict[str, Any]) -> None:
        """Set the latency; with `seconds` and `pid`, measure that process for so long.

        The window is opened and closed here: a client that is saturated asks for it seconds late.
        """
        self._latency_s = float(order["latency_s"])
        if "seconds" in order:
            pids = (int(order["pid"]), os.getpid())
            self._figures, self._window = None, _Window(pids, _Reading.of(*pids))
            self._loop.call_later(order["seconds"], self._end)

    def _end(self) -> None:
        window, self._window = self._window, None
        assert window is not None
        self._figures = window.close()

    def _generate(self, exchange: Exchange) -> None:
        now_s = time.perf_counter()
        body, window = exchange.body, self._window
        start = body.index(_KEY) + len(_KEY)
        key = body[start : body.index(b'"', start)]
        conversation = self._conversations.get(key)
        if conversation is None:
            replies = self._scripts[int(key.partition(b"-")[0]) % NUM_SCRIPTS]
            conversation = self._conversations[key] = _Conversation(replies)
        elif window is not None:
            window.added_s.append(now_s - conversation.sent_s)
        if window is not None:
            window.requests += 1
        if self._latency_s <= 0.0:
            self._send(exchange, conversation, key, 0.0)
            return
        # Within half and three halves, so that conversations do not march in step.
        wait_s = self._latency_s * (0.5 + self._random.random())
        due_s = self._loop.time() + wait_s
        self._loop.call_later(wait_s, self._send, exchange, conversation, key, due_s)

    def _send(
        self, exchange: Exchange, conversation: _Conversation, key: bytes, due_s: float
    ) -> None:
        if due_s and self._window is not None:
            self._window.late_s = max(self._window.late_s, self._loop.time() - due_s)
        reply = conversation.replies[conversation.turn]
        conversation.turn += 1
        if conversation.turn == len(conversation.replies):
            del self._conversations[key]
        conversation.sent_s = time.perf_counter()
        exchange.answer(200, reply)


class _Loader(asyncio.Protocol):
    """Sends one request again and again; looks only at how long a reply is."""

    done = 0

    def __init__(self, request: bytes) -> None:
        self._request, self._left, self._head = request, 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._left == 0:
            self._head += data
            head, found, rest = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self._left, data, self._head = length, rest, b""
        self._left -= len(data)
        if self._left == 0:
            _Loader.done += 1
            self._transport.write(self._request)


async def load(port: int, seconds: float, connections: int) -> float:
    """Return how many requests a second one engine answered to a bare loader."""
    loop = asyncio.get_running_loop()
    ids = b",".join([b"12345"] * _LOAD_TOKENS)
    opened = []
    for i in range(connections):
        body = b'{"rid":"%032x","routing_key":"c%d-l%d","input_ids":[%b]}' % (i, i, i, ids)
        request = b"POST /generate HTTP/1.1\r\nhost: e\r\ncontent-length: %d\r\n\r\n%b" % (
            len(body),
            body,
        )
        transport, _ = await loop.create_connection(
            lambda request=request: _Loader(request), "127.0.0.1", port
        )
        opened.append(transport)
    await asyncio.sleep(0.3)
    before, start = _Loader.done, time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (_Loader.done - before) / (time.perf_counter() - start)
    for transport in opened:
        transport.abort()
    return rate


async def run(port: int, seconds: float) -> None:
    """Serve until the standard input closes."""
    from examples.vocabulary import write

    tokenizer = Tokenizer.from_file(str(write(Path(".cache") / "qwen3")))
    engine = BenchEngine(scripts(tokenizer))
    server = await serve(engine.handle, "127.0.0.1", port)
    port = port_of(server)
    loader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.engine", "--load", str(port)),
        *("--seconds", str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await loader.communicate()
    ceiling = json.loads(out)["requests_per_s"]
    line = {"url": f"http://127.0.0.1:{port}", "pid": os.getpid(), "ceiling_per_s": ceiling}
    print(json.dumps(line), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()
    server.close()


def main() -> None:
    cli = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    cli.add_argument("--port", type=int, default=0)
    cli.add_argument("--seconds", type=float, default=2.0, help="of measuring its own ceiling")
    cli.add_argument("--load", type=int, metavar="PORT", help="be the loader of that engine")
    args = cli.parse_args()
    if args.load:
        rate = asyncio.run(load(args.load, args.seconds, connections=64))
        print(json.dumps({"requests_per_s": rate}))
        return
    asyncio.run(run(args.port, args.seconds))


if __name__ == "__main__":
    main()
