"""Groups as turns or as a page: what `show --text`, `--html` and `--dump` do with them.

Owns the file of a page, and which groups of a dump are shown. Never reads a run. Invariant: a page
that could not be written whole leaves the file that was there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollstream.cli.decoding import load_decoder
from rollstream.cli.exits import OK, PROBLEM, USAGE, CommandError
from rollstream.cli.gather import GroupFacts, of_finished
from rollstream.cli.html.members import plain
from rollstream.cli.html.page import page
from rollstream.cli.transcript import print_turns
from rollstream.cli.turns import Decode, Story, tell
from rollstream.cli.view import print_json, print_rows, print_text
from rollstream.errors import WireError
from rollstream.group import FinishedGroup

_MAX_ROW = 400


def show_facts(facts: GroupFacts, args: argparse.Namespace, shown: Mapping[str, Any]) -> bool:
    """Write a page or print JSON where that is asked for; False where rows and turns are."""
    if args.html:
        write_page(facts, args)
        return True
    if args.json:
        print_json(dict(shown) | {"turns": turns_json(facts, _decode_of(args))})
        return True
    return False


def show_turns(facts: GroupFacts, args: argparse.Namespace) -> None:
    """Print the turns for people."""
    print_turns(facts, _decode_of(args))


def _decode_of(args: argparse.Namespace) -> Decode | None:
    decoder = load_decoder(args)
    return None if decoder is None else decoder.decode


def turns_json(facts: GroupFacts, decode: Decode | None) -> list[dict[str, Any]]:
    """Return what was said as plain data, an entry per leaf."""
    return [
        {"member": member.member, "leaf": place} | _story_json(tell(sample, decode))
        for member in facts.members
        for place, sample in enumerate(member.leaves)
    ]


def _story_json(story: Story) -> dict[str, Any]:
    turns = []
    for turn in story.turns:
        known = asdict(turn)
        known["engines"] = [call.pop("engine") for call in known.pop("calls")]
        turns.append(known)
    return {"text": story.source, "before": [asdict(said) for said in story.before],
            "turns": turns, "response": story.whole}  # fmt: skip


# --- a page --------------------------------------------------------------------------------------
def write_page(facts: GroupFacts, args: argparse.Namespace) -> None:
    """Write a group's page and say so.

    Raises:
        CommandError: the file cannot be written, or there is no such tokenizer.
    """
    if args.members is not None:
        facts.members = [one for one in facts.members if one.member in args.members]
    file = Path(args.html)
    decoder = load_decoder(args)
    try:
        size = _write(file, facts, decoder)
    except OSError as error:
        raise CommandError(f"--html {file}: {error.strerror or error}", PROBLEM) from None
    if args.json:
        print_json({"group_index": facts.group_index, "file": str(file), "bytes": size,
                    "members": len(facts.members)})  # fmt: skip
    else:
        print_text(
            f"{file}: group {facts.group_index}, {len(facts.members)} members, {size:,} bytes"
        )


def _write(file: Path, facts: GroupFacts, decoder: Any) -> int:
    if file.exists() and not file.is_file():  # /dev/stdout, a pipe
        with file.open("w", encoding="utf-8") as out:
            return sum(out.write(part) for part in page(facts, decoder))
    handle, name = tempfile.mkstemp(prefix=f".{file.name[:100]}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as out:
            out.writelines(page(facts, decoder))
        Path(name).chmod(0o644 & ~_umask())
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    return file.stat().st_size


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# --- a dump --------------------------------------------------------------------------------------
def show_dumped(args: argparse.Namespace) -> int:
    """Show one group of a dump, or which groups it has; exit code 1 where it has none of that id.

    Raises:
        CommandError: there is no dump there, or it cannot be read.
    """
    from rollstream.dump import read_groups

    if args.group is None and (args.html or args.text or args.members is not None):
        raise CommandError("show --text, --members and --html need a GROUP", USAGE)
    only = _only(args)
    try:
        if args.group is None:
            return _list(args, [_row(g) for g in read_groups(args.dump, only, text=False)])
        groups = list(read_groups(args.dump, only))
    except (WireError, OSError, ValueError) as error:
        raise CommandError(f"--dump {args.dump}: {error}", PROBLEM) from None
    if not groups:
        if args.json:
            print_json({"dump": args.dump, "group_index": args.group, "members": []})
        else:
            print_text(f"group {args.group} is not in the dump {args.dump}")
        return PROBLEM
    _show_group(groups, args)
    return OK


def _only(args: argparse.Namespace) -> set[int] | None:
    if args.group is None:
        return None
    if not str(args.group).isdecimal():
        raise CommandError(f"show --dump: {args.group} is no group of a dump", USAGE)
    return {int(args.group)}


def _show_group(groups: list[FinishedGroup], args: argparse.Namespace) -> None:
    facts = of_finished(groups[-1], f"dump {args.dump}")
    if len(groups) > 1:
        facts.rows["times in the dump"] = f"{len(groups)}; this is the last one"
    if args.members is not None:
        facts.members = [one for one in facts.members if one.member in args.members]
    members = [{"member": one.member, "where": one.where, "status": one.status,
                "reward": one.reward, "error": one.error} for one in facts.members]  # fmt: skip
    shown = {"dump": args.dump, "group_index": facts.group_index, "members": members}
    if args.html:
        write_page(facts, args)
    elif args.json and not args.text:
        print_json(shown)
    elif not show_facts(facts, args, shown):
        print_facts(facts)
        if args.text:
            show_turns(facts, args)


def print_facts(facts: GroupFacts) -> None:
    """Print a group and a line for each member."""
    print_rows(f"group {facts.group_index}", {name: _line(v) for name, v in facts.rows.items()})
    rows = {}
    for one in facts.members:
        reward = "no reward" if one.reward is None else f"reward {plain(one.reward)}"
        tokens = sum(sample.num_sampled for sample in one.leaves)
        said = [one.status, _line(one.rows.get("stop reason")), reward, f"{tokens} sampled tokens",
                _line(one.error)]  # fmt: skip
        rows[f"{one.member} {one.where}"] = ", ".join(filter(None, said))
    print_rows("members", rows)


def _line(value: Any) -> str:
    """Return one bounded line without control characters."""
    text = "" if value is None else value if isinstance(value, str) else plain(value)
    line = "".join(c if c.isprintable() else " " for c in text[: _MAX_ROW + 1])
    return line if len(line) <= _MAX_ROW else line[:_MAX_ROW] + " …"


def _row(group: FinishedGroup) -> dict[str, Any]:
    samples = group.flat()
    return {"group_index": group.group_index, "env": group.env, "samples": len(samples),
            "missing": len(group.missing), "staleness": group.staleness,
            "rewards": [s.reward for s in samples]}  # fmt: skip


def _list(args: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    if args.json:
        print_json({"dump": args.dump, "groups": rows})
        return OK
    told = {
        str(row["group_index"]): f"{row['env']}: {row['samples']} samples, {row['missing']} "
        f"missing, rewards {_line(row['rewards'])}"
        for row in rows
    }
    print_rows(f"dump {args.dump}: {len(rows)} groups", told)
    return OK
