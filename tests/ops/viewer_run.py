"""A real run whose groups the viewer shows, and the picture of one for the docs.

    python -m tests.ops.viewer_run docs/images/viewer.png

Owns that run: Valkey, the simulated engine, a producer and a worker whose model calls tools, with
`debug.messages`. Its groups stay where they are: nobody takes them.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.demo.options import ROOT, VOCABULARY
from examples.devserver import DevServer, die_with_parent
from examples.small_run import SmallRun, stack
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import StreamEntry
from rollstream.sample import Sample
from rollstream.trainer.assemble import assemble
from tests.backstage import wait_until
from tests.ops.chromium import take_picture

GROUPS, MEMBERS = 4, 3
SOURCE = f"reasoning_gym:gsm_symbolic?size={GROUPS}&seed=1"
RUN = SmallRun(
    "viewer",
    {
        "producer": {"source": SOURCE},
        "worker": {
            "generate": "multi_turn",
            "tools": ["calculator", "examples.tool_use:as_fraction"],
            "max_turns": 4,
        },
        "reward": {"kind": "math"},
        "debug": {"messages": True},
    },
    SOURCE,
    GROUPS,
    MEMBERS,
)


@dataclass(frozen=True, slots=True)
class Played:
    """A run whose groups are all ready for a trainer."""

    queue: BlockingQueue
    url: str

    def samples(self) -> dict[str, list[Sample]]:
        """Return every group's samples."""
        info = self.queue.info()
        assert info is not None
        found = {}
        for entry in self.entries():
            (stored,) = self.queue.groups([(entry.group_index, entry.n)], text=True)
            found[entry.group_index] = assemble(stored, info.envs)[0].flat()
        return found

    def entries(self) -> list[StreamEntry]:
        """Return the entries of all groups."""
        return self.queue.newest("ready", GROUPS)

    def rollstream(self, *argv: str) -> str:
        """Run one command of the command line on it; return what it printed."""
        place = ("--redis", self.url, "--run", RUN.name)
        return rollstream(*argv[:1], *place, *argv[1:])


def rollstream(*argv: str) -> str:
    """Run one command of the command line; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "rollstream.cli", *argv], cwd=ROOT, text=True, capture_output=True,
        timeout=60, check=False, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def played(folder: Path) -> Iterator[Played]:
    """A run that has sampled everything; `folder` gets its logs."""
    with (
        DevServer() as redis,
        stack(RUN, redis.url, folder),
        contextlib.closing(BlockingQueue.connect(redis.url, RUN.name)) as queue,
    ):
        wait_until(lambda: queue.depths()["ready"] == GROUPS)
        yield Played(queue, redis.url)


def with_most_turns(samples: dict[str, list[Sample]]) -> str:
    """Return the group whose samples have the most turns."""
    return max(samples, key=lambda name: sum(len(sample.calls) for sample in samples[name]))


def main() -> int:
    """Make the picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.ops.viewer_run", description=__doc__)
    parser.add_argument("file", type=Path, help="where the picture (PNG) goes")
    parser.add_argument("--height", type=int, default=1700)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollstream-viewer-") as name:
        folder = Path(name)
        page = folder / "group.html"
        with played(folder) as run:
            group = with_most_turns(run.samples())
            run.rollstream("show", group, "--html", str(page), "--tokenizer", str(VOCABULARY))
        take_picture(
            f"{page.as_uri()}#tokens",
            options.file.resolve(),
            width=1200,
            height=options.height,
            dark=options.dark,
        )
    sys.stdout.write(f"{options.file}: {options.file.stat().st_size:,} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
