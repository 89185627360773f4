"""`show`: the last drops of a run with their reasons and errors, or one group with its members.

Owns what of a group a person sees, and who shows it: rows here, turns (`transcript`) or a page
(`html`). Never writes to a run, reads a body only for turns and pages. Invariant: `--json` and the
text for people say the same; what a user's function raised is shown without its control characters,
so that it cannot write on the terminal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rollstream.cli.exits import OK, PROBLEM, USAGE, CommandError
from rollstream.cli.reach import the_run
from rollstream.cli.reasons import MEANS
from rollstream.cli.view import print_json, print_rows, print_text
from rollstream.errors import DropReason, WireError
from rollstream.frontier import TerminalIds
from rollstream.queue import calls
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.look import MOVING, GroupLook, MemberLook, look
from rollstream.queue.reads import RunInfo
from rollstream.wire import decode_header

PAST = 1000
"""As many drops as the queue keeps."""
MAX_TEXT = 400


def show(args: argparse.Namespace) -> int:
    """Show one group, or the last drops; exit code 1 where nothing is known of the group.

    Raises:
        CommandError: arguments that do not go together, or a file that cannot be read or written.
    """
    if args.dump:
        from rollstream.cli.pages import show_dumped

        return show_dumped(args)
    if args.group is None and (args.html or args.text or args.members is not None):
        raise CommandError("show --text, --members and --html need a GROUP", USAGE)
    with the_run(args) as (queue, info):
        if args.group is None:
            return _show_drops(queue, info, args)
        return _show_group(queue, info, args)


# --- drops ---------------------------------------------------------------------------------------
def _show_drops(queue: BlockingQueue, info: RunInfo, args: argparse.Namespace) -> int:
    drops = [_drop(row, info) for row in queue.past(args.last)]
    if args.json:
        print_json({"run": queue.run, "drops": drops})
    elif not drops:
        print_text(f"run {queue.run}: no group was dropped")
    else:
        print_text(f"run {queue.run}: the last {len(drops)} drops, newest first")
        for drop in drops:
            _print_drop(drop)
    return OK


def _drop(row: Mapping[str, Any], info: RunInfo) -> dict[str, Any]:
    """Return a record of `past` as plain data."""
    members = []
    for i, (header, error) in enumerate(zip(row["headers"], row["errors"], strict=True)):
        if error is not None:
            members.append({"member": i, "where": "failed", "reason": error[0], "error": error[1]})
        elif header is not None:
            members.append({"member": i, "where": "done", "result": _result(header)})
        else:
            members.append({"member": i, "where": "unfinished"})
    at = datetime.fromtimestamp(row["unix_s"], UTC).isoformat(timespec="seconds")
    known = {name: row[name] for name in ("group_index", "n", "reason", "detail", "state", "why")}
    if row["reason"] == DropReason.RUN_ABORTED and not row["detail"]:
        known["detail"] = info.error
    return known | {"means": MEANS.get(row["reason"], ""), "at": at, "members": members}


def _print_drop(drop: Mapping[str, Any]) -> None:
    detail = f": {_plain(drop['detail'])}" if drop["detail"] else ""
    print_text(
        f"{drop['at']}  group {drop['group_index']} (n {drop['n']}, was {drop['state']})  "
        f"{drop['reason']}{detail}"
    )
    if drop["means"]:
        print_text(f"    {drop['means']}")
    if drop["why"]:
        print_text(f"    first failure: {_plain(drop['why'])}")
    for member in drop["members"]:
        print_text(f"    member {member['member']}: {_ended(member)}")
    if len(drop["members"]) < drop["n"]:
        print_text(f"    (of {drop['n'] - len(drop['members'])} more members nothing is kept)")


def _ended(member: Mapping[str, Any]) -> str:
    if member["where"] == "failed":
        return f"failed, {member['reason']}: {_plain(member['error'])}"
    if member["where"] == "done":
        return _said(member["result"])
    return "had not ended"


# --- one group -----------------------------------------------------------------------------------
def _show_group(queue: BlockingQueue, info: RunInfo, args: argparse.Namespace) -> int:
    name = str(args.group)
    group = look(queue, name)
    if group is not None:
        _show_live(queue, info, group, args)
        return OK
    drops = [_drop(row, info) for row in queue.past(PAST) if row["group_index"] == name]
    if drops and args.html:
        from rollstream.cli.gather import of_drops
        from rollstream.cli.pages import write_page

        write_page(of_drops(queue.run, name, drops), args)
        return OK
    ended = bool(drops) or _is_terminal(queue, name)
    if args.json:
        state = "dropped" if drops else "ended" if ended else "unknown"
        print_json({"run": queue.run, "group_index": name, "state": state, "drops": drops})
    elif drops:
        print_text(f"group {name} is not live; it was dropped {_times(len(drops))}, newest first")
        for drop in drops:
            _print_drop(drop)
    elif ended:
        print_text(
            f"group {name} has ended: it was trained on, skipped, or dropped longer ago than "
            f"the last {PAST} drops"
        )
    else:
        print_text(f"group {name} is unknown: not enqueued yet, or no id of this run")
    if args.html:
        raise CommandError(f"there is nothing of group {name} to write to {args.html}", PROBLEM)
    return OK if ended else PROBLEM


def _show_live(
    queue: BlockingQueue, info: RunInfo, group: GroupLook, args: argparse.Namespace
) -> None:
    if args.members is not None:
        group.members = [member for member in group.members if member.member in args.members]
    shown = _shown(group)
    if args.html or args.text:
        from rollstream.cli.gather import of_run
        from rollstream.cli.pages import show_facts

        facts = of_run(queue, info, group, shown["members"])
        if show_facts(facts, args, {"run": queue.run} | shown):
            return
    if args.json:
        print_json({"run": queue.run} | shown)
        return
    _print_group(group, shown)
    if args.text:
        from rollstream.cli.pages import show_turns

        show_turns(facts, args)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _is_terminal(queue: BlockingQueue, name: str) -> bool:
    if not name.isdecimal():
        return False
    state = queue.call(calls.state())
    return int(name) in TerminalIds(state.frontier, state.bitmap)


def _shown(group: GroupLook) -> dict[str, Any]:
    shown = asdict(group)
    for member in shown["members"]:
        header = member.pop("header")
        if header is not None:
            member["result"] = _result(header)
    return shown


def _print_group(group: GroupLook, shown: Mapping[str, Any]) -> None:
    rows: dict[str, Any] = {
        "state": group.state,
        "life": group.life,
        "members left": f"{group.left} of {group.n}",
        "members failed": f"{group.failed}"
        + (f", the first one: {group.why}" if group.why else ""),
        "deadline": "none" if group.deadline_in_s is None else f"in {group.deadline_in_s:.1f} s",
        "version at first lease": "not leased yet" if group.version is None else group.version,
    }
    print_rows(f"group {group.group_index}", rows)
    members = {
        f"{look.member} {look.where}": _about(look, member.get("result"))
        for look, member in zip(group.members, shown["members"], strict=True)
    }
    print_rows("members", members)


def _about(look: MemberLook, result: Mapping[str, Any] | None) -> str:
    said = []
    if look.where == "leased" and look.due_in_s is not None:
        said.append(f"by {_worker(look)}, lease ends in {look.due_in_s:.1f} s")
    elif look.where == "delayed" and look.due_in_s is not None:
        said.append(f"due in {look.due_in_s:.1f} s")
    elif look.where == MOVING:
        said.append("look again")
    if result is not None:
        said.append(_said(result))
    if look.attempts or look.crashes:
        said.append(f"attempts {look.attempts}, crashes {look.crashes}")
    if look.parked_bytes:
        said.append(f"parked {look.parked_bytes} bytes")
    if look.where == "failed":
        said.append(f"{look.reason}: {_plain(look.error)}")
    elif look.where != "done":
        if look.worker and look.where != "leased":
            said.append(f"last had by {_worker(look)}")
        if look.error:
            said.append(f"last retry: {_plain(look.error)}")
    return "; ".join(said) or "-"


def _worker(look: MemberLook) -> str:
    return look.worker + (f" ({_plain(look.host)})" if look.host else "")


# --- small ---------------------------------------------------------------------------------------
def _result(header: bytes) -> dict[str, Any]:
    """Return what a header says of a result."""
    try:
        known = decode_header(header)
    except WireError as error:
        return {"unreadable": str(error)}
    leaf = known.leaves[0]
    return {
        "status": str(known.status),
        "stop_reason": None if leaf.stop_reason is None else str(leaf.stop_reason),
        "reward": known.reward,
        "leaves": len(known.leaves),
        "sampled_tokens": known.num_sampled,
        "turns": known.num_turns,
        "versions": leaf.versions,
        "reward_error": known.reward_error,
    }


def _said(result: Mapping[str, Any]) -> str:
    if "unreadable" in result:
        return f"result that cannot be read: {_plain(result['unreadable'])}"
    leaves = f" in {result['leaves']} leaves" if result["leaves"] > 1 else ""
    reward = "no reward" if result["reward"] is None else f"reward {json.dumps(result['reward'])}"
    because = f" ({_plain(result['reward_error'])})" if result["reward_error"] else ""
    return (f"{result['status']} ({result['stop_reason']}), {_plain(reward)}{because}, "
            f"{result['sampled_tokens']} tokens{leaves}")  # fmt: skip


def _plain(text: str) -> str:
    """Return one bounded line without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text[: MAX_TEXT + 1])
    return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + " …"
