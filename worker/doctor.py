"""`python -m worker doctor`: is this tokenizer, under this renderer, fit to make training data of?

Owns the report about tokens: the start-up checks alone, and the table of families with how far each
was proven. Never talks to Redis or an engine. Invariant: what it finds is what a worker with the
same configuration finds at its start, by the same code.

Exit codes: 0 fit; 1 refused, with the reason; 2 wrong usage, or no tokenizer to look at (none is
named, or there is no such file).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollstream.config import load_settings, split_argv
from rollstream.errors import ConfigError
from rollstream.settings import ModelTable, Settings

FIT, REFUSED, USAGE = 0, 1, 2
PROG = "python -m worker doctor"


@dataclass(slots=True)
class Report:
    """What was found."""

    tokenizer: str
    renderer: str
    """As configured."""
    ok: bool = False
    error: str | None = None
    resolved: str = ""
    """The family's name, or `template`."""
    proof: str = ""
    note: str = ""
    facts: list[str] = field(default_factory=list)
    """Sentences for people."""
    warnings: list[str] = field(default_factory=list)
    """What a worker would warn of at its start."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Per assistant turn of the self-test; see `worker.tito.selftest.Checked`."""
    seconds: float = 0.0
    examined: bool = False
    """There was a tokenizer to look at."""


def main(argv: Sequence[str]) -> int:
    """Check what `argv` and the configuration name, and print what was found."""
    ours, others = split_argv(argv)
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Check a tokenizer and its renderer as a worker does at its start.",
        epilog="Configuration is read as by `python -m worker`: rollstream.toml, the environment, "
        "--config PATH and --table.key value. Exit codes: 0 fit, 1 refused, 2 wrong usage.",
    )
    parser.add_argument("--tokenizer", help="a tokenizer.json, its folder, or a hub id")
    parser.add_argument("--renderer", help="a family of the table, auto, or template")
    parser.add_argument("--families", action="store_true", help="show the table of families too")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    try:
        args = parser.parse_args(list(others))
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else USAGE
    if args.tokenizer is not None:
        ours += ["--model.tokenizer", args.tokenizer]
    if args.renderer is not None:
        ours += ["--model.renderer", args.renderer]
    try:
        settings = load_settings(ours, prog=PROG).settings
    except ConfigError as error:
        sys.stderr.write(f"{PROG}: error: {error}\n")
        return USAGE
    table = settings.model
    report = Report(table.tokenizer, table.renderer)
    there = _is_there(report, table)
    if there:
        report.examined = True
        _examine(report, settings)
    _say(_as_json(report) if args.json else _as_text(report, with_families=args.families))
    if not there:
        return USAGE
    return FIT if report.ok else REFUSED


def families() -> list[dict[str, Any]]:
    """Return the table of families as plain data."""
    from .tito.families import FAMILIES

    return [
        {"name": name, "proof": str(f.proof), "note": f.note, "models": list(f.models)}
        for name, f in FAMILIES.items()
    ]


def _is_there(report: Report, table: ModelTable) -> bool:
    """Return whether there is a tokenizer to look at; else the report says why not."""
    from .hub import locate

    if not table.tokenizer:
        report.error = "no tokenizer: give --tokenizer, or model.tokenizer in the configuration"
        return False
    try:
        path = locate(table.tokenizer)
    except ConfigError as error:
        report.error = str(error)
        return False
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        report.error = (
            f"model.tokenizer: no file {str(file)!r}; give the path of the model's tokenizer.json "
            "or of the folder that has it"
        )
    return report.error is None


def _examine(report: Report, settings: Settings) -> None:
    from .model import load_model
    from .process.startup import UNSEEN_TOOLS
    from .tito.backend import RenderersBackend
    from .tito.families import FAMILIES
    from .tito.selftest import self_test

    table = settings.model
    started = time.monotonic()
    try:
        renderer = load_model(table)
        report.resolved = renderer.name
        if isinstance(renderer, RenderersBackend):
            family = FAMILIES[renderer.name]
            traits = family.traits
            report.proof, report.note = str(family.proof), family.note
        else:
            traits = renderer.traits
            report.proof = "the model's own chat template, tried just now"
            report.facts = renderer.describe()
        report.checks = [asdict(one) for one in self_test(renderer, table.tokenizer, **traits)]
        if not renderer.shows_tools:
            tools = {tool for env in settings.envs().values() for tool in env.tools}
            named = ", ".join(sorted(tools)) or "none is configured"
            report.warnings.append(f"tools ({named}): {UNSEEN_TOOLS}")
        stops = [renderer.tokenizer.decode([number]) for number in renderer.stop_token_ids]
        report.facts += [
            f"largest id {renderer.max_token_id}, {len(renderer.control_ids)} control strings",
            f"a turn stops at: {' '.join(stops)}",
        ]
        report.ok = True
    except ConfigError as error:
        report.error = str(error)
    report.seconds = round(time.monotonic() - started, 3)


def _as_json(report: Report) -> str:
    return json.dumps(asdict(report) | {"families": families()}, ensure_ascii=False)


def _as_text(report: Report, *, with_families: bool) -> str:
    lines = _found(report)
    if with_families or not report.tokenizer:
        lines += ["", "Families (model.renderer):", *_table()]
    else:
        lines += ["", "--families shows the families that model.renderer takes"]
    return "\n".join(lines)


def _found(report: Report) -> list[str]:
    """Return the verdict, and what it rests on."""
    if report.ok:
        lines = [f"fit        in {report.seconds:.2f} s"]
    else:
        lines = [f"{'REFUSED    ' if report.examined else 'NOTHING    '}{report.error}"]
    lines += [f"WARNING    {warning}" for warning in report.warnings]
    if not report.tokenizer:
        return lines
    lines.append(f"tokenizer  {report.tokenizer}")
    chosen = f" -> {report.resolved}" if report.resolved not in ("", report.renderer) else ""
    lines.append(f"renderer   {report.renderer}{chosen}")
    if report.proof:
        note = f" ({report.note})" if report.note else ""
        lines.append(f"proof      {report.proof}{note}")
    lines += [f"           {fact}" for fact in report.facts]
    for one in report.checks:
        with_ = "with" if one["reasoning"] else "without"
        lines.append(
            f"           behind message {one['message']} ({with_} reasoning), "
            f"{' and '.join(one['roles'])}: {one['kind']}, {one['num_ids']} ids"
        )
    return lines


def _table() -> list[str]:
    rows = families()
    width = max(len(row["name"]) for row in rows)
    return [f"  {row['name']:<{width}}  {row['proof']:<9}  {row['note']}".rstrip() for row in rows]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
