"""The demo's command line, and what follows from it.

Owns the options and the sizes that are derived from them. Never starts anything.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = ROOT / ".cache" / "qwen3" / "tokenizer.json"
DATASET = "gsm_symbolic"
GROUPS_A_BATCH = 8
SAMPLES_A_GROUP = 8
NUM_WORKERS = 2


@dataclass(frozen=True)
class Options:
    """What the command line asked for."""

    json: bool
    batches: int
    kill_every: float | None
    engine: str
    urls: tuple[str, ...]
    tokenizer: Path
    seed: int
    renderer: str = "auto"

    @property
    def simulated(self) -> bool:
        """Whether the demo starts its own stand-in for a model."""
        return not self.urls

    @property
    def num_groups(self) -> int:
        """How many groups are enqueued.

        Filters drop groups without spread in their rewards. The stand-in solves a fifth of the
        problems always or never, and the whole source is trained to its end, so that at the end
        every group is accounted for. A real model may be much better or worse, and there the demo
        stops at the asked number of batches.
        """
        asked = self.batches * GROUPS_A_BATCH
        return max(asked + 24, asked * 8 // 5) if self.simulated else asked * 8

    @property
    def lease_s(self) -> float:
        """Short where workers are killed, so that their members come back soon."""
        return 2.0 if self.kill_every else 15.0

    @property
    def source(self) -> str:
        """The prompts, as `producer.source` and the stand-in's `--answers` name them."""
        return f"reasoning_gym:{DATASET}?size={self.num_groups}&seed={self.seed}"


def parse(arguments: Sequence[str]) -> Options:
    """Return the options; a wrong command line ends the process with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="A whole run on this machine, audited token by token. Exit code 0 only when "
        "nothing was lost, nothing was trained twice and every token is as the engine sampled it.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout, no more")
    parser.add_argument(
        "--batches", type=int, default=20, metavar="N", help="at least so many (default 20)"
    )
    parser.add_argument(
        "--kill-every", type=float, metavar="S", help="SIGKILL a random ready worker every S s"
    )
    parser.add_argument(
        "--engine",
        choices=("sim", "sglang"),
        default="sim",
        help="sim: a stand-in for a model that the demo starts; sglang: yours, with --url",
    )
    parser.add_argument(
        "--url", action="append", default=[], metavar="URL", help="of an engine; may be repeated"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="tokenizer.json of the engine's model"
    )
    parser.add_argument(
        "--renderer", default="auto", metavar="NAME", help="chat format of the engine's model"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the run (default 0)")
    given = parser.parse_args(arguments)
    if given.batches < 1:
        parser.error(f"--batches {given.batches}: at least 1")
    if given.kill_every is not None and given.kill_every < 0.5:
        parser.error(f"--kill-every {given.kill_every}: at least 0.5 s")
    if given.seed < 0:
        parser.error(f"--seed {given.seed}: not negative")
    if given.engine == "sglang" and not (given.url and given.tokenizer):
        parser.error("--engine sglang needs --url http://… and --tokenizer PATH of its model")
    if given.engine == "sim" and given.url:
        parser.error("--url goes with --engine sglang; the stand-in is started by the demo itself")
    if given.tokenizer is not None and not given.tokenizer.exists():
        parser.error(f"--tokenizer {given.tokenizer}: no such file or folder")
    return Options(
        json=given.json,
        batches=given.batches,
        kill_every=given.kill_every,
        engine=given.engine,
        urls=tuple(url.rstrip("/") for url in given.url),
        tokenizer=(given.tokenizer or VOCABULARY).absolute(),
        seed=given.seed,
        renderer=given.renderer,
    )
