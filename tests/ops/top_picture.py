"""The picture of `rollstream top` for the docs: the real page, of a real run that is slow.

    python -m tests.ops.top_picture docs/images/top.png

Owns that run (`examples.slow_run reward`) and the picture. Never draws anything that `top` does
not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME

from examples.slow_run import FAULTS
from rollstream.cli.top.reading import Reader
from rollstream.cli.top.top import Watch
from rollstream.cli.top.view import Page
from rollstream.queue.blocking import BlockingQueue
from tests.e2e.test_operate import process, told
from tests.ops.chromium import take_picture

FAULT = "reward"
COLUMNS = 108
LOOKS = 15
SIZE = (945, 540)
"""Width and height in pixels."""
STYLE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: #292929; color: #c5c8c6 }
pre { margin: 14px; font: 14px/1.3 "DejaVu Sans Mono", monospace }
</style>%s"""


@contextlib.contextmanager
def slow_run() -> Iterator[str]:
    """Start the run; yield its server's URL."""
    with process("examples.slow_run", FAULT) as running:
        yield told(running, r"rollstream top --redis (redis://\S+)")


def record_of(url: str) -> dict[str, Any]:
    """Look at the run until its figures have settled."""
    with contextlib.closing(BlockingQueue.connect(url, f"slow_{FAULT}")) as queue:
        reader = Reader(queue, 5.0)
        watch = Watch(reader, queue.run)
        record: dict[str, Any] = watch.look()
        for _ in range(LOOKS):
            reader.wait(1.0)
            record = watch.look()
    return record


def page_of(record: dict[str, Any]) -> str:
    """Return the page as HTML, as a terminal would show it."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(Page(record))
    code = '<pre><code style="font-family:inherit">{code}</code></pre>'
    return STYLE % console.export_html(theme=SVG_EXPORT_THEME, inline_styles=True, code_format=code)


def main() -> int:
    """Make the picture."""
    parser = argparse.ArgumentParser(prog="python -m tests.ops.top_picture", description=__doc__)
    parser.add_argument("file", type=Path, help="PNG to write")
    file: Path = parser.parse_args().file
    with slow_run() as url:
        record = record_of(url)
    if record["cause"] != FAULTS[FAULT].cause:
        sys.stderr.write(f"top says {record['cause']}\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "top.html"
        page.write_text(page_of(record), encoding="utf-8")
        take_picture(page.as_uri(), file, width=SIZE[0], height=SIZE[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
