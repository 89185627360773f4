"""The job `code`: runs a program against tests, and counts those that pass.

    {"program": str, "tests": ..., "timeout_s": float, "stop_early": bool, "partial": bool,
     "test_timeout_s": float}
    → {"passed": int, "total": int, "problems": [str], "reward": float}

`tests` is one of
    {"stdin": [{"input": str, "output": str}, ...]}     each in an interpreter of its own
    {"entry": str, "cases": [{"args": [...], "expected": ...}, ...]}      a function is called
    {"asserts": str}      Python text about names of the program

Owns the verdict. Never lets the program's process see an expected value, nor decide what passed:
what it prints and returns is data that is compared outside of it. Invariant: what the program does
(hangs, crashes, exits, eats memory) is a test that failed; what the machine does raises, and is no
verdict.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from .confine import layers
from .inside import plain
from .place import here
from .program import ProgramLimits, ProgramResult
from .python import blaming_the_machine, refuse_starved, seconds_of
from .sandbox import MAIN, Program, SandboxBroken, run_here, watch

MAX_TESTS = 1000
MAX_PROBLEMS = 5
MAX_LINE_BYTES = 1 << 20
TEST_TIMEOUT_S = 10.0
"""Of one test, where the payload names no other."""
_MAX_SAID_CHARS = 200
_MIN_S = 0.05
_NUMBER = re.compile(r"[+-]?\d{1,40}(\.\d{0,40})?([eE][+-]?\d{1,3})?")


@dataclass(slots=True)
class Tally:
    """What the tests said so far, and the time that is left for the others."""

    total: int
    limit_s: float
    test_s: float
    stop_early: bool
    passed: int = 0
    failed: int = 0
    problems: list[str] = field(default_factory=list)
    spent_s: float = 0.0

    def count(self, ok: bool, problem: str = "") -> None:
        """Count one test."""
        self.passed += ok
        self.failed += not ok
        if not ok and len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"test {self.num_done}: {problem}"[:_MAX_SAID_CHARS])

    @property
    def num_done(self) -> int:
        """Tests that were counted."""
        return self.passed + self.failed

    def decided(self) -> bool:
        """Whether nothing more has to run."""
        return self.num_done >= self.total or (self.stop_early and self.failed > 0)

    @property
    def next_s(self) -> float:
        """What the next test may take."""
        return min(self.test_s, self.limit_s - self.spent_s)

    def result(self, partial: bool) -> dict[str, Any]:
        """Return the verdict."""
        share = self.passed / self.total
        return {
            "passed": self.passed,
            "total": self.total,
            "problems": self.problems,
            "reward": share if partial else float(self.passed == self.total),
        }


def run(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on the program of the payload.

    Raises:
        ValueError: tests that are none, or that cannot be run apart from the program.
        JobBroken: the machine failed it: no CPU, no memory, a full disk.
    """
    program, tests = payload.get("program"), payload.get("tests")
    if not isinstance(program, str) or not isinstance(tests, dict):
        raise ValueError("'program' is a text, 'tests' an object")
    limit_s = seconds_of(payload, "timeout_s")
    asked_s = payload.get("test_timeout_s")
    test_s = TEST_TIMEOUT_S if asked_s is None else seconds_of(payload, "test_timeout_s")
    runner, given = _runner_of(tests)
    tally = Tally(
        total=len(given) if isinstance(given, list) else 1,
        limit_s=limit_s,
        test_s=min(test_s, limit_s),
        stop_early=payload.get("stop_early") is True,
    )
    limits = ProgramLimits.of(here().limits)
    with blaming_the_machine():
        runner(program, tests, tally, limits)
        if tally.failed or tally.num_done < tally.total:
            _refuse_full_disk(limits)
    return tally.result(payload.get("partial") is True)


def _runner_of(tests: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what runs these tests, and the list or text that they are.

    Raises:
        ValueError: none of the three.
    """
    for name, runner, kind in (
        ("stdin", _run_stdin, list),
        ("cases", _run_cases, list),
        ("asserts", _run_asserts, str),
    ):
        given = tests.get(name)
        if isinstance(given, kind) and given:
            if isinstance(given, list) and len(given) > MAX_TESTS:
                raise ValueError(f"{len(given)} tests, of at most {MAX_TESTS}")
            return runner, given
    raise ValueError("'tests' has none of: stdin, cases with entry (lists), asserts (a text)")


def _run_stdin(program: str, tests: Mapping[str, Any], tally: Tally, limits: ProgramLimits) -> None:
    """Run the program once for each input, and compare what it prints."""
    pairs = [(_text(test, "input"), _text(test, "output")) for test in tests["stdin"]]
    for given, expected in pairs:
        if tally.decided() or tally.next_s < _MIN_S:
            return
        ran = run_here(
            program,
            stdin=given,
            limits=limits,
            timeout_s=tally.next_s,
            output_bytes=max(limits.output_bytes, 2 * len(expected.encode()) + 4096),
        )
        tally.spent_s += ran.seconds
        refuse_starved(ran)
        if not ran.ok:
            tally.count(False, _said(ran))
        else:
            same = same_output(expected, ran.stdout.decode(errors="replace"))
            tally.count(same, "another output was expected")


def _text(test: Any, name: str) -> str:
    value = test.get(name) if isinstance(test, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"{name!r} of every test is a text")
    return value


def same_output(expected: str, printed: str) -> bool:
    """Return whether a program printed what was expected.

    Blanks at the ends of lines and empty lines at the end do not count; numbers that are written
    in two ways (1.0, 1.00) are the same.
    """
    ours, theirs = _lines(expected), _lines(printed)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    ours, theirs = expected.split(), printed.split()
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(expected: str, printed: str) -> bool:
    if expected == printed:
        return True
    both = (_NUMBER.fullmatch(expected), _NUMBER.fullmatch(printed))
    return all(both) and Decimal(expected) == Decimal(printed)


class _Lines:
    """Takes JSON lines of an untrusted writer, one at a time."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._rest = bytearray()
        self.garbled = False

    def take(self, data: bytes) -> None:
        """Take the next bytes."""
        self.num_bytes += len(data)
        if self.garbled:
            return
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            self._take_line(bytes(line))
        self.garbled = self.garbled or len(self._rest) > MAX_LINE_BYTES + 1

    def _take_line(self, line: bytes) -> None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and not self.garbled:
            self.take_message(found)
        else:
            self.garbled = True

    def take_message(self, message: dict[str, Any]) -> None:
        """Take one message."""
        raise NotImplementedError


class _Answers(_Lines):
    """Compares what the calls of the cases returned."""

    def __init__(self, cases: Sequence[Any], tally: Tally, program: Program) -> None:
        super().__init__()
        self._cases, self._tally, self._program = iter(cases), tally, program
        self.loaded = False

    def enough(self) -> bool:
        """Whether no further answer matters."""
        return self.garbled or self._tally.decided()

    def take_message(self, message: dict[str, Any]) -> None:
        """Count one answer."""
        self._tally.spent_s += self._program.seconds()
        self._program.restart_clock(min(self._tally.next_s, self._program.timeout_s))
        if not self.loaded:
            self.loaded = message.get("loaded") is True
            self.garbled = not self.loaded
            if self.garbled:
                self._tally.count(False, f"the program does not load: {_error(message)}")
            return
        case = None if self._tally.decided() else next(self._cases, None)
        if case is None:
            self.garbled = True  # more answers than calls
        elif "value" not in message:
            self._tally.count(False, _error(message))
        else:
            same = False
            with contextlib.suppress(*_UNREADABLE):
                # What has many more parts than what is expected is not read: that costs us time.
                most = 8 * plain.num_parts(case["expected"]) + 64
                if plain.num_parts(message["value"]) > most:
                    raise ValueError("another value")
                value = plain.decode(message["value"], _no_object)
                same = plain.same(case["expected"], value)
            self._tally.count(same, "another value was expected")


_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, ArithmeticError)


def _no_object(_: Any) -> Any:
    raise ValueError("no plain data")


def _error(message: Mapping[str, Any]) -> str:
    given = message.get("error")
    return ": ".join(str(part) for part in given[:2]) if isinstance(given, list) else "no value"


def _run_cases(program: str, tests: Mapping[str, Any], tally: Tally, limits: ProgramLimits) -> None:
    """Call the function with the arguments of each case; a new process behind one that ended it."""
    entry, cases = tests.get("entry"), tests["cases"]
    if not isinstance(entry, str) or not all(
        isinstance(case, dict) and isinstance(case.get("args"), list) and "expected" in case
        for case in cases
    ):
        raise ValueError("'entry' is a name; every case has 'args' (a list) and 'expected'")
    while not tally.decided() and tally.next_s >= _MIN_S:
        left = cases[tally.num_done :]
        requests = [
            {"do": "entry", "name": entry, "args": [_as_data(item) for item in case["args"]]}
            for case in left
        ]
        num_before = tally.num_done
        with contextlib.ExitStack() as opened:
            reader, writer = _pipe(opened)
            lines = ("{}", *map(json.dumps, requests))  # the first lets it load
            asked = _file(opened, "".join(f"{one}\n" for one in lines).encode())
            ran = Program(
                _files("serve.py", program),
                limits=limits,
                timeout_s=tally.next_s,
                cpu_s=tally.limit_s - tally.spent_s,
                arguments=(str(asked), str(writer.fd)),
                pass_fds=(asked, writer.fd),
            )
            opened.callback(ran.close)
            answers = _Answers(left, tally, ran)
            watch(
                [ran],
                {reader.fd: answers},
                until=answers.enough,
            )
        tally.spent_s += ran.had_s
        how = ran.result()
        if tally.decided():
            return
        refuse_starved(how)
        if not answers.loaded:
            if tally.num_done == num_before:
                tally.count(False, f"the program does not load: {_said(how)}")
            return  # nor would it for the others
        tally.count(False, _said(how))


def _as_data(value: Any) -> Any:
    return plain.encode(value, _no_object)


class _Verdicts(_Lines):
    """Counts what the examiner says; it runs the row's text, which the program cannot reach."""

    def __init__(self, tally: Tally, programs: Sequence[Program]) -> None:
        super().__init__()
        self._tally, self._programs = tally, programs
        self.began, self.unusable = False, ""

    def enough(self) -> bool:
        """Whether no further verdict matters."""
        return self.garbled or bool(self.unusable) or (self.began and self._tally.decided())

    def take_message(self, message: dict[str, Any]) -> None:
        """Count one verdict."""
        if "unusable" in message:
            self.unusable = str(message["unusable"])
        elif not self.began:
            self.began, self._tally.total = True, max(1, int(message.get("total", 1)))
        elif not self._tally.decided():
            self._tally.count(message.get("ok") is True, str(message.get("problem", "")))
            self._tally.spent_s += max(one.seconds() for one in self._programs)
            for one in self._programs:
                one.restart_clock(min(self._tally.next_s, one.timeout_s))


def _run_asserts(
    program: str, tests: Mapping[str, Any], tally: Tally, limits: ProgramLimits
) -> None:
    """Run the text in one process, which asks the program's process for every call."""
    with contextlib.ExitStack() as opened:
        asked, asking = _pipe(opened)
        answered, answering = _pipe(opened)
        reader, writer = _pipe(opened)
        examiner = Program(
            _files("examine.py"),
            hides_memory=True,
            limits=limits,
            timeout_s=tally.next_s,
            cpu_s=tally.limit_s,
            stdin=tests["asserts"].encode("utf-8", "surrogatepass"),
            arguments=(str(asking.fd), str(answered.fd), str(writer.fd)),
            pass_fds=(asking.fd, answered.fd, writer.fd),
        )
        opened.callback(examiner.close)
        ran = Program(
            _files("serve.py", program),
            limits=limits,
            timeout_s=tally.next_s,
            cpu_s=tally.limit_s,
            arguments=(str(asked.fd), str(answering.fd)),
            pass_fds=(asked.fd, answering.fd),
        )
        opened.callback(ran.close)
        for end in (asked, asking, answered, answering, writer):
            end.close()  # theirs alone: one that ends is noticed by the other
        verdicts = _Verdicts(tally, (examiner, ran))
        watch(
            [examiner, ran],
            {reader.fd: verdicts},
            until=verdicts.enough,
        )
    if verdicts.unusable:
        raise ValueError(f"the asserts cannot be run: {verdicts.unusable}")
    judged, how = examiner.result(), ran.result()
    if not verdicts.began:
        said = judged.stderr.decode(errors="replace")[-_MAX_SAID_CHARS:]
        raise SandboxBroken(f"the asserts did not begin: {judged.ending()} {said}")
    if not tally.decided():
        refuse_starved(how)
        refuse_starved(judged)
        overdue = judged.timed_out or how.timed_out
        tally.count(False, "timed out" if overdue else _said(how))


class _End:
    """One end of a pipe."""

    def __init__(self, fd: int, opened: contextlib.ExitStack) -> None:
        self.fd = fd
        opened.callback(self.close)

    def close(self) -> None:
        """Close it; twice is once."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pipe(opened: contextlib.ExitStack) -> tuple[_End, _End]:
    reader, writer = os.pipe()
    return _End(reader, opened), _End(writer, opened)


def _file(opened: contextlib.ExitStack, data: bytes) -> int:
    fd = os.memfd_create("requests")
    opened.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _said(ran: ProgramResult) -> str:
    """Return how a program ended, with the last line that it complained."""
    lines = ran.stderr.decode(errors="replace").strip().splitlines()
    return f"{ran.ending()}: {lines[-1]}" if lines and not ran.ok else ran.ending()


def _refuse_full_disk(limits: ProgramLimits) -> None:
    """Refuse to call a program wrong that had no room for its files.

    Raises:
        OSError: the disk is full.
    """
    place = tempfile.gettempdir()
    found = os.statvfs(place)
    if found.f_bavail * found.f_frsize < limits.file_bytes:
        raise OSError(errno.ENOSPC, "no room for the files of a program", place)


@functools.cache
def _script(name: str) -> str:
    return Path(__file__).with_name("inside").joinpath(name).read_text()


def _files(script: str, program: str | None = None) -> dict[str, str]:
    """Return what the folder of a process holds; the program is never in the examiner's."""
    own = {} if program is None else {"program.py": program}
    return {MAIN: _script(script), "plain.py": _script("plain.py"), **own}


def warm() -> None:
    """Read what the processes forked later need."""
    for script in ("serve.py", "examine.py", "plain.py"):
        _script(script)
    layers()  # what the kernel has is tried once
