"""The arguments of `rollstream`, and which command they call.

Owns the parser and the translation of errors into exit codes. Never imports a command before it
is called: `--help` answers at once, and `worker` brings its own world.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rollstream import __version__
from rollstream.cli.dump import add_dump
from rollstream.cli.exits import EXPLAINED, INTERRUPTED, PROBLEM, USAGE, CommandError
from rollstream.cli.show_options import add_show_options
from rollstream.cli.view import cleaned, close_stdout
from rollstream.log_sink import hold_standard_descriptors, say
from rollstream.urls import scrub

APPS = ("worker", "producer", "exporter")
COMMANDS = {
    "top": "rollstream.cli.top.top:top",
    "stats": "rollstream.cli.inspect:stats",
    "audit": "rollstream.cli.inspect:audit",
    "runs": "rollstream.cli.inspect:runs",
    "version": "rollstream.cli.inspect:version",
    "show": "rollstream.cli.show:show",
    "dump": "rollstream.cli.dump:dump",
    "doctor": "rollstream.cli.doctor:doctor",
    "engines": "rollstream.cli.engines:engines",
    "drain": "rollstream.cli.drain:drain",
    "pause": "rollstream.cli.control:pause",
    "resume": "rollstream.cli.control:resume",
    "abort": "rollstream.cli.control:abort",
    "withdraw": "rollstream.cli.control:withdraw",
    "requeue": "rollstream.cli.control:requeue",
    "set": "rollstream.cli.control:set_value",
}
"""Command → the function that is called with its arguments; imported when it is."""
REDIS_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments behind the program's name; None is the process's own.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    hold_standard_descriptors()
    try:
        code = _dispatch(given)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader that went away or a full disk can be named
    except CommandError as error:
        return _say(str(error), error.code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python would complain once more at its exit.
        close_stdout()
        return 0
    except Exception as error:  # noqa: BLE001 - the last line of defence: one line, not a traceback
        return _say(f"unexpected {type(error).__name__}: {error}", PROBLEM)
    return code


def _say(message: str, code: int) -> int:
    say(f"rollstream: error: {cleaned(scrub(message))}")
    return code


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in APPS:
        from rollstream.cli.apps import run_app

        return run_app(argv[0], argv[1:])
    if argv[:1] == ["config"]:
        from rollstream.cli.config import run_config

        return run_config(argv[1:])
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    if args.command == "runs" and args.remove is None and (args.yes or args.force):
        parser.error("--yes and --force belong to runs --remove NAME")
    if args.command == "doctor" and args.engine and args.logprobs is None:
        parser.error("--engine belongs to doctor --logprobs N")
    module, _, function = COMMANDS[args.command].partition(":")
    return int(getattr(import_module(module), function)(args))


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of every command that is not an app."""
    parser = argparse.ArgumentParser(
        prog="rollstream",
        description="Look at runs, steer them, and start the parts of one.",
        epilog=EXPLAINED,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rollstream {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    server, run = _server_options(), _run_options()

    _add_top(commands, [server, run])
    audit = commands.add_parser(
        "audit", parents=[server, run], help="prove that enqueued = acked + dropped + live"
    )
    audit.add_argument(
        "--deep",
        action="store_true",
        help="also that every member and every entry is in exactly one place (reads all groups)",
    )
    commands.add_parser("stats", parents=[server, run], help="where the groups of a run are")
    shown = commands.add_parser(
        "show", parents=[server, run], help="one group with its members, or the last drops"
    )
    shown.add_argument("group", metavar="GROUP", nargs="?", type=_group_name, help="id of a group")
    shown.add_argument(
        "--last", metavar="N", type=_count, default=20, help="how many drops (default 20)"
    )
    add_show_options(shown)
    doctor = commands.add_parser(
        "doctor", parents=[server, run], help="is everything fit for a run? what to do where not"
    )
    doctor.add_argument(
        "--config", metavar="FILE", help="also what this rollstream.toml names: engines, rq.url"
    )
    doctor.add_argument(
        "--logprobs",
        metavar="N",
        type=_count,
        help="score N finished samples of the run again, and compare their log-probs",
    )
    doctor.add_argument(
        "--engine", metavar="URL", help="that scores them (else the first of engine.urls)"
    )
    runs = commands.add_parser("runs", parents=[server], help="the runs on a server; remove one")
    runs.add_argument("--remove", metavar="NAME", help="delete every key of that run")
    runs.add_argument("--yes", action="store_true", help="do not ask")
    runs.add_argument(
        "--force", action="store_true", help="also where a producer or worker is alive"
    )
    _add_control(commands, [server, run])
    _add_drain(commands, run)
    add_dump(commands, [server, run], _count, _seconds)
    told = commands.add_parser("version", help="what is installed here: version, wire, layout")
    told.add_argument("--json", action="store_true", help="one JSON document on stdout")
    for app in APPS:
        commands.add_parser(app, add_help=False, help=f"start the {app}: rollstream {app} --help")
    commands.add_parser("config", add_help=False, help="config show: every effective value")
    return parser


def _add_top(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    watched = commands.add_parser(
        "top", parents=parents, help="what a run does now, and what holds it up"
    )
    watched.add_argument(
        "--interval-s",
        metavar="SECONDS",
        type=_seconds,
        default=2.0,
        help="between two looks (default 2)",
    )
    times = watched.add_mutually_exclusive_group()
    times.add_argument("--once", action="store_true", help="one look, as --count 1")
    times.add_argument("--count", metavar="N", type=_count, help="so many looks, then end")


def _add_drain(commands: Any, run: argparse.ArgumentParser) -> None:
    waits = _server_options(600.0, "longest wait for what lives to end")
    drained = commands.add_parser(
        "drain",
        parents=[waits, run],
        help="take no new prompts, and wait until what lives has ended; resume undoes it",
    )
    drained.add_argument(
        "--trained", action="store_true", help="wait for the trainer's last ack, too"
    )
    drained.set_defaults(redis_timeout_s=REDIS_S)


def _add_control(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    paused = commands.add_parser("pause", parents=parents, help="start no sample until resume")
    paused.add_argument(
        "--mode",
        choices=("keep", "abort"),
        default="keep",
        help="keep: calls in flight end (the default); abort: workers stop them, uncharged",
    )
    paused.add_argument(
        "--deadline",
        metavar="SECONDS",
        type=_seconds,
        default=0.0,
        help="then the run goes on by itself (else: never)",
    )
    fleet = commands.add_parser(
        "engines", parents=parents, help="the engines that workers call; name them for all workers"
    )
    named = fleet.add_mutually_exclusive_group()
    named.add_argument("--set", metavar="URL", nargs="+", help="in place of every engine.urls")
    named.add_argument(
        "--unset", action="store_true", help="every worker has its own engine.urls again"
    )
    commands.add_parser("resume", parents=parents, help="end a pause, and a drain")
    aborted = commands.add_parser("abort", parents=parents, help="end a run, drop what is live")
    aborted.add_argument("--reason", metavar="TEXT", default="", help="what trainers are told")
    aborted.add_argument("--yes", action="store_true", help="do not ask")
    for name, does in (
        ("withdraw", "drop a live group as withdrawn"),
        ("requeue", "run a live group again from its prompt"),
    ):
        one = commands.add_parser(name, parents=parents, help=does)
        one.add_argument("group", metavar="GROUP", type=_group_name, help="id of a group")
    changed = commands.add_parser(
        "set", parents=parents, help="change a budget of a running run: capacity, lease, …"
    )
    changed.add_argument("key", metavar="KEY", help="as in the configuration, e.g. worker.lease_s")
    changed.add_argument("value", metavar="VALUE", help="in the configuration's unit")


def _server_options(
    wait_s: float = REDIS_S, waits_for: str = "longest wait for Redis"
) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--redis",
        metavar="URL",
        help="redis://, rediss://, unix:// or redis+sentinel:// (else ROLLSTREAM_REDIS__URL, else "
        "this machine)",
    )
    options.add_argument("--ca", metavar="FILE", help="CA certificate for rediss://")
    options.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options.add_argument(
        "--timeout-s",
        metavar="SECONDS",
        type=_seconds,
        default=wait_s,
        help=f"{waits_for} (default {wait_s:g})",
    )
    return options


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 86400")
    return value


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 1000")
    return value


def _group_name(text: str) -> str:
    named = text.isascii() and text.isprintable() and (text.isdecimal() or text.startswith("e:"))
    if not named or len(text) > 256:
        raise argparse.ArgumentTypeError(f"{text!r} is no group: a number, or e:… of an evaluation")
    return str(int(text)) if text.isdecimal() else text


def _run_name(text: str) -> str:
    if text and not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a run")
    return text


def _run_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--run",
        metavar="NAME",
        type=_run_name,
        help="else ROLLSTREAM_RUN__NAME, else the only run there is",
    )
    return options


if __name__ == "__main__":
    sys.exit(main())
