"""`dump`: the finished groups of a run into files, with or without taking them.

Owns that loop: write, then ack. Never acks what is not on the disk. Invariant: killed at any
instant, a repeat goes on where it ended: nothing is lost, and nothing is in the dump twice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rollstream.cli.exits import OK, PROBLEM, UNREACHABLE, USAGE, CommandError
from rollstream.cli.reach import the_run, url_of
from rollstream.cli.view import print_json, print_progress, print_text
from rollstream.dump.format import read_manifest
from rollstream.dump.reader import DumpIndex
from rollstream.dump.writer import DumpWriter, Written
from rollstream.errors import RollstreamError, RunLost, RunMismatch, WireError
from rollstream.group import FinishedGroup
from rollstream.queue.blocking import BlockingQueue
from rollstream.queue.reads import RunInfo, StreamEntry
from rollstream.stream import GroupStream
from rollstream.trainer.assemble import assemble
from rollstream.trainer.intake import HeldGroup

MAX_PEEKED = 100_000
"""Entries that one look reads: each is a few dozen bytes."""


class _Tally:
    """What one command has written, said batch by batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._folder, self._json = str(args.dir), args.json
        self.batches = self.groups = self.num_bytes = self.recognised = 0

    def add(self, written: Written) -> None:
        self.groups += written.num_groups
        self.num_bytes += written.num_bytes
        self.recognised += written.num_recognised
        if written.path is not None:
            self.batches += 1
            if not self._json:
                print_progress(f"{written.path.name}: {written.num_groups} groups, "
                               f"{written.num_bytes / 1e6:.1f} MB")  # fmt: skip

    def say(self, run: str, **more: Any) -> None:
        if self._json:
            print_json({"dir": self._folder, "run": run, "batches": self.batches,
                        "groups": self.groups, "bytes": self.num_bytes,
                        "recognised": self.recognised} | more)  # fmt: skip
            return
        known = f", {self.recognised} were there already" if self.recognised else ""
        print_text(
            f"{self._folder}: {self.groups} groups of run {run} in {self.batches} files{known}"
        )


def dump(args: argparse.Namespace) -> int:
    """Write finished groups to files."""
    if args.check:
        with _said(args):
            return _check(args)
    return _peek(args) if args.peek else _take(args)


@contextlib.contextmanager
def _said(args: argparse.Namespace) -> Iterator[None]:
    """What the disk and the dump object to, in one line; nothing that was not written is acked."""
    try:
        yield
    except BlockingIOError as error:
        raise CommandError(str(error), PROBLEM) from None
    except OSError as error:
        raise CommandError(
            f"{error.filename or args.dir}: {error.strerror or error}; what is acked is on the "
            "disk, and all else comes again: mend that, then repeat the command",
            PROBLEM,
        ) from None
    except RunMismatch as error:
        raise CommandError(str(error), USAGE) from None
    except RollstreamError as error:
        raise CommandError(str(error), PROBLEM) from None


class _Writing:
    """The dump that is written, whose errors are said as the disk's and never as the server's."""

    def __init__(self, args: argparse.Namespace, info: RunInfo) -> None:
        self._args, self.tally = args, _Tally(args)
        with _said(args):
            self._writer = DumpWriter.open(
                args.dir,
                run=info.run,
                fingerprint=info.fingerprint,
                rules=info.envs,
                weight_version=info.version,
                total=info.total,
            )

    def write(self, groups: Sequence[FinishedGroup], kind: str, version: int) -> None:
        """Write one batch, and say so."""
        with _said(self._args):
            written = self._writer.write(groups, kind, version)
        self.tally.add(written)

    def close(self) -> None:
        self._writer.close()


def _take(args: argparse.Namespace) -> int:
    with the_run(args) as (queue, info):
        run = queue.run
    # Before the run is claimed: a disk that says no is no reason to take it from its trainer.
    with contextlib.closing(_Writing(args, info)) as writing:
        is_over = _take_batches(args, run, writing)
    writing.tally.say(run, taken=True, ended=is_over)
    return OK


def _take_batches(args: argparse.Namespace, run: str, writing: _Writing) -> bool:
    """Write and ack batch by batch; whether the run is over."""
    with _of_the_run():
        stream = GroupStream.connect(
            url_of(args),
            run=run,
            ca=args.ca or os.environ.get("ROLLSTREAM_REDIS__CA"),
            text=True,
            connect_timeout_s=args.timeout_s,
        )
        with stream:
            batches = stream.batches(min(args.groups, stream.info.capacity), args.stall)
            for number, batch in enumerate(batches, 1):
                writing.write(batch.groups, "taken", stream.version)
                batch.ack()
                if number == args.batches:
                    return False
    return True


@contextlib.contextmanager
def _of_the_run() -> Iterator[None]:
    try:
        yield
    except RollstreamError as error:
        code = UNREACHABLE if isinstance(error, RunLost) else PROBLEM
        raise CommandError(f"{error}; repeat the command to go on", code) from None


def _peek(args: argparse.Namespace) -> int:
    unreadable = 0
    most = args.batches * args.groups if args.batches else MAX_PEEKED
    with the_run(args) as (queue, info), contextlib.closing(_Writing(args, info)) as writing:
        waiting: list[FinishedGroup] = []
        for group in itertools.islice(_ready(queue, info), most):
            if isinstance(group, WireError):
                unreadable += 1
                continue
            waiting.append(group)
            if len(waiting) == args.groups:
                writing.write(waiting, "peeked", info.version)
                waiting = []
        if waiting:
            writing.write(waiting, "peeked", info.version)
    writing.tally.say(queue.run, taken=False, unreadable=unreadable)
    return OK


def _ready(queue: BlockingQueue, info: RunInfo) -> Iterator[FinishedGroup | WireError]:
    """Yield what waits for the trainer or is with it, oldest first, as it would get it now."""
    seen: set[str] = set()
    for entry in reversed(queue.newest("ready", MAX_PEEKED)):
        if entry.group_index in seen or not entry.group_index.isdecimal():
            continue
        seen.add(entry.group_index)
        yield from _one(queue, info, entry)


def _one(
    queue: BlockingQueue, info: RunInfo, entry: StreamEntry
) -> Iterator[FinishedGroup | WireError]:
    (stored,) = queue.groups([(entry.group_index, entry.n)], text=True)
    if stored.state not in ("ready", "delivered") or stored.ready_id != entry.message_id:
        return  # ended meanwhile, or of an earlier life
    try:
        group, oldest = assemble(stored, info.envs)
    except WireError as error:
        yield error
        return
    HeldGroup(group, oldest, stored.ready_unix_s).stamp(info.version, time.time())
    yield group


def _check(args: argparse.Namespace) -> int:
    """Read everything, every checksum too."""
    index = DumpIndex(args.dir)
    num_groups = num_samples = 0
    for number in index.heads:
        for group in index.groups(number):
            num_groups, num_samples = num_groups + 1, num_samples + len(group.flat())
    manifest = read_manifest(args.dir)
    if args.json:
        print_json({"dir": str(args.dir), "run": manifest.run, "ok": True,
                    "batches": len(index.heads), "groups": num_groups,
                    "samples": num_samples})  # fmt: skip
    else:
        print_text(
            f"{args.dir}: run {manifest.run}, {len(index.heads)} files, {num_groups} groups, "
            f"{num_samples} samples; every checksum is right"
        )
    return OK
