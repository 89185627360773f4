"""Write the dashboards, or with `--check` say which file is not what would be written.

Owns the files below ops/grafana/dashboards. Never touches another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import engines, groups, overview, workers
from .panels import Board, dashboard

FOLDER = Path(__file__).parents[1] / "grafana" / "dashboards"
BOARDS: tuple[Board, ...] = (overview.BOARD, workers.BOARD, groups.BOARD, engines.BOARD)


def files() -> dict[str, str]:
    """Return the name and the content of every dashboard."""
    return {
        f"{board.uid}.json": json.dumps(dashboard(board), indent=2, ensure_ascii=False) + "\n"
        for board in BOARDS
    }


def differences(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """Return the files of a folder that are missing, too many, or not as they would be written."""
    found = {path.name: path.read_text() for path in folder.glob("*.json")}
    return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 where `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m ops.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: %(default)s")
    given = parser.parse_args(arguments)
    wanted = files()
    differing = differences(given.folder, wanted)
    if given.check:
        for name in differing:
            sys.stderr.write(f"{name} differs: run python -m ops.dashboards and commit it\n")
        return 1 if differing else 0
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in differing:
        if name in wanted:
            (given.folder / name).write_text(wanted[name])
        else:
            (given.folder / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
