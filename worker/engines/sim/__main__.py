"""Run the simulated engine: `python -m worker.engines.sim --tokenizer … --answers …`.

Owns the command line. A stand-in for a model, and it says so on its first line.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence

from rollstream.errors import ConfigError

from .answers import load_answers
from .faults import NAMED, Fault, FaultConfig
from .http import port_of, serve
from .numbers import ReplayConfig
from .policy import NOTICE, Policy
from .script import PolicyConfig
from .server import Dialect, LogProbsMode, Protocols, SimEngine

KEEPALIVE_S = 5.0
"""Of uvicorn, which SGLang and vLLM are served by."""


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    cli = argparse.ArgumentParser(
        prog="python -m worker.engines.sim",
        description=f"A simulated engine that speaks SGLang's protocol and vLLM's: {NOTICE}.",
    )
    cli.add_argument("--host", default="127.0.0.1")
    cli.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    cli.add_argument("--tokenizer", required=True, help="path of a tokenizer.json (Qwen3's)")
    cli.add_argument("--answers", default="", help="reasoning_gym:NAME?size=…&seed=… or jsonl:PATH")
    cli.add_argument("--context-tokens", type=int, default=32768)
    cli.add_argument("--weight-version", default="default")
    _add_dialect(cli)
    default = FaultConfig()
    cli.add_argument("--latency-median-s", type=float, default=default.latency_median_s)
    cli.add_argument("--latency-sigma", type=float, default=default.latency_sigma)
    cli.add_argument("--token-s", type=float, default=default.token_s, help="pace of one token")
    cli.add_argument("--seed", type=int, default=0, help="of faults and latencies, never of text")
    for kind in Fault:
        cli.add_argument(
            f"--fault-{kind.value.replace('_', '-')}",
            dest=f"fault_{kind.value}",
            type=float,
            default=0.0,
            metavar="SHARE",
        )
    cli.add_argument("--slow-factor", type=float, default=default.slow_factor)
    for name, what in (
        ("--pause-every-s", "be paused by nobody, again and again"),
        ("--pause-s", "for so long"),
        ("--restart-every-s", "lose what is in flight and the label, again and again"),
    ):
        cli.add_argument(name, type=float, default=0.0, metavar="S", help=what)
    replay = ReplayConfig()
    cli.add_argument(
        "--replay-layers", type=int, default=0, help="serve routed experts of so many layers"
    )
    cli.add_argument("--replay-top-k", type=int, default=replay.top_k)
    cli.add_argument("--replay-experts", type=int, default=replay.num_experts)
    cli.add_argument(
        "--replay-dtype",
        default=replay.dtype,
        choices=("", "uint8", "uint16", "int32"),
        help="of vLLM's rows; the narrowest by default",
    )
    policy = PolicyConfig()
    for name, value in policy.to_dict().items():
        flag = "--" + name.replace("_", "-")
        cli.add_argument(flag, type=type(value), default=value, metavar="N")
    return cli


def _add_dialect(cli: argparse.ArgumentParser) -> None:
    dialect = Dialect()
    cli.add_argument("--protocol", type=Protocols, default=dialect.protocols, choices=Protocols)
    cli.add_argument(
        "--logprobs-mode",
        type=lambda text: LogProbsMode(text.removesuffix("_logprobs")),
        default=dialect.logprobs_mode,
        choices=LogProbsMode,
        help="auto: with the temperature by SGLang's calls, without it by vLLM's",
    )
    cli.add_argument(
        "--versioned-log-probs",
        action="store_true",
        help="log-probs tell which weights sampled a token",
    )
    cli.add_argument(
        "--vllm-dev",
        action=argparse.BooleanOptionalAction,
        default=dialect.vllm_dev,
        help="serve vLLM's control calls",
    )
    cli.add_argument("--vllm-old", action="store_true", help="replies of older vLLM servers")
    cli.add_argument(
        "--incremental-streaming-output",
        action="store_true",
        help="events of SGLang's streams say what is new, not all so far",
    )
    cli.add_argument("--model-name", default="", help="the only one that vLLM's calls take")
    cli.add_argument(
        "--keepalive-s",
        type=float,
        default=KEEPALIVE_S,
        help="close a connection that was idle for so long; 0 never does",
    )


def build(args: argparse.Namespace) -> SimEngine:
    """Return the engine that the command line asks for.

    Raises:
        ConfigError: a value that makes no sense.
    """
    faults = FaultConfig(
        **{name: getattr(args, f"fault_{kind}") for kind, name in NAMED.items()},
        others={
            kind.value: getattr(args, f"fault_{kind}")
            for kind in Fault
            if kind not in NAMED and getattr(args, f"fault_{kind}")
        },
        slow_factor=args.slow_factor,
        latency_median_s=args.latency_median_s,
        latency_sigma=args.latency_sigma,
        token_s=args.token_s,
        seed=args.seed,
    )
    faults.check()
    config = PolicyConfig(**{name: getattr(args, name) for name in PolicyConfig().to_dict()})
    answers = load_answers(args.answers)
    try:
        policy = Policy.load(args.tokenizer, answers, config)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception
        raise ConfigError(f"--tokenizer {args.tokenizer}: {error}") from None
    return SimEngine(
        policy,
        faults=faults,
        context_tokens=args.context_tokens,
        weight_version=args.weight_version,
        replay=ReplayConfig(
            args.replay_layers, args.replay_top_k, args.replay_experts, args.replay_dtype
        ),
        dialect=Dialect(
            protocols=args.protocol,
            logprobs_mode=args.logprobs_mode,
            versioned=args.versioned_log_probs,
            vllm_dev=args.vllm_dev,
            vllm_old=args.vllm_old,
            model=args.model_name,
            incremental=args.incremental_streaming_output,
        ),
    )


def _again(every_s: float, what: Callable[[], None]) -> None:
    """Do something every so many seconds, from then on."""

    def act() -> None:
        what()
        _again(every_s, what)

    if every_s > 0.0:
        asyncio.get_running_loop().call_later(every_s, act)


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT."""
    engine = build(args)
    server = await serve(engine.handle, args.host, args.port, keepalive_s=args.keepalive_s)
    _again(args.pause_every_s, lambda: engine.core.pause_for(args.pause_s))
    _again(args.restart_every_s, engine.core.restart)
    url = f"http://{args.host}:{port_of(server)}"
    sys.stdout.write(f"simulated engine ({NOTICE}) on {url}\n")
    sys.stdout.flush()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    server.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 after a signal, 2 where the command line is wrong."""
    args = parser().parse_args(argv)
    try:
        asyncio.run(run(args))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"simulated engine: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
