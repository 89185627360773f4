"""Where lines of a log go: a file descriptor that may be full, closed, or a pipe nobody reads.

Owns a bounded buffer and the one thread that writes. Never raises, and never makes whoever logs
wait: a line that has no room is dropped and counted. Invariant: every line is written whole and in
order, or counted in `lines_dropped`, and what was written of such a one is a line for itself;
nothing here waits longer than `FLUSH_S`, not even at the end.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from datetime import UTC, datetime

MAX_BYTES = 4 << 20
"""Of lines that wait: about 20,000 usual ones."""
FLUSH_S = 2.0
"""How long the end of a process waits for lines to be written."""
LOGGER = "logs"
_ATOMIC_BYTES = 4096
"""Of a pipe that says it is writable: so many fit (PIPE_BUF)."""

_handlers: weakref.WeakSet[LineHandler] = weakref.WeakSet()


def lines_dropped() -> int:
    """Return how many lines of this process had no room, or went to a broken descriptor."""
    return sum(handler.num_dropped for handler in list(_handlers))


class LineHandler(logging.Handler):
    """Writes records as lines to a descriptor.

    Attributes:
        num_dropped: lines that were not written.
    """

    def __init__(self, descriptor: int, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self.num_dropped = 0
        self._descriptor, self._max_bytes = descriptor, max_bytes
        self._is_torn = False
        self._start_anew(may_thread=True)
        _handlers.add(self)

    def _start_anew(self, *, may_thread: bool) -> None:
        """Have no thread and no lines: also in a forked process, where both stay behind.

        There none is started: processes of jobs are looked at for threads that a job left over.
        """
        self._may_thread = may_thread
        # Reentrant: a signal's handler may log in the middle of a record of the same thread.
        self._changed = threading.Condition(threading.RLock())
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_writing = False
        self._num_said = self.num_dropped
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written."""
        line = self._line_of(record)
        with self._changed:
            if self._lines and self._num_bytes + len(line) > self._max_bytes:
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            if self._thread is None and not (self._may_thread and self._start()):
                self._write_now()
            self._changed.notify_all()

    def _line_of(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001 - whatever a value's own __str__ does
            text = json.dumps(
                {"ts": datetime.now(UTC).isoformat(), "level": record.levelname.lower(),
                 "logger": record.name, "event": "log_record_unprintable",
                 "error": type(error).__name__}
            )  # fmt: skip
        return f"{text}\n".encode(errors="backslashreplace")

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="logs", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is at its end
            return False
        self._thread = thread
        return True

    def flush(self) -> None:
        """Wait until everything is written, but not for long."""
        limit = time.monotonic() + FLUSH_S
        with self._changed:
            while (self._lines or self._is_writing) and self._thread is not None:
                left_s = limit - time.monotonic()
                if left_s <= 0 or not self._thread.is_alive():
                    return
                self._changed.wait(left_s)

    def close(self) -> None:
        """Write lines that come from now on at once, as far as none blocks.

        At the end of a process (`logging.shutdown`, behind its flush) nobody flushes any more, and
        the thread stops without notice: what the last callbacks say would be lost.
        """
        with self._changed:
            if not (self._lines or self._is_writing):
                self._may_thread, self._thread = False, None
                self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._lines:
                    if self._thread is not me:
                        return  # closed
                    self._changed.wait()
                line = self._lines.popleft()
                self._num_bytes -= len(line)
                self._is_writing = True
            is_written = self._write(line)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
            if is_written:
                self._say_dropped()

    def _write(self, line: bytes) -> bool:
        left = memoryview(self._begun(line))
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # whoever we share it with made it so
                    _wait_writable(self._descriptor)
        except OSError:  # a full disk, a reader that left: the next line may find it mended
            self._tear(line, len(left))
            return False
        self._is_torn = False
        return True

    def _begun(self, line: bytes) -> bytes:
        """Return a line that does not go on where a torn one stopped."""
        return b"\n" + line if self._is_torn else line

    def _tear(self, line: bytes, num_left: int) -> None:
        """Count a line of which the last bytes, perhaps all, could not be written."""
        self.num_dropped += 1
        if num_left <= len(line):  # else not even the end of the one before was written
            self._is_torn = num_left < len(line)

    def _say_dropped(self) -> None:
        """Say that lines are missing where they are, once there is room again."""
        dropped, before = self.num_dropped, self._num_said
        if dropped > before and self._num_bytes * 2 < self._max_bytes:
            self._num_said = dropped
            # The record's own line may be dropped too: then the next one says so.
            logging.getLogger(LOGGER).warning(
                "log_lines_dropped", extra={"lines": dropped - before}
            )

    def _write_now(self) -> None:
        """Write what waits without a thread, as far as it does not block; drop the rest."""
        while self._lines:
            line = self._lines.popleft()
            self._num_bytes -= len(line)
            left = memoryview(self._begun(line))
            while left and (written := self._write_part(left[:_ATOMIC_BYTES])):
                left = left[written:]
            if left:
                self._tear(line, len(left))
            else:
                self._is_torn = False

    def _write_part(self, part: memoryview) -> int:
        if not _is_writable(self._descriptor):
            return 0
        try:
            return os.write(self._descriptor, part)
        except OSError:
            return 0


def _is_writable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))


def _wait_writable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


def _in_forked_process() -> None:
    for handler in list(_handlers):
        handler._start_anew(may_thread=False)


os.register_at_fork(after_in_child=_in_forked_process)


def flush() -> None:
    """Wait, not for long, until the lines of this process are written."""
    for handler in list(_handlers):
        handler.flush()


def say(text: str) -> None:
    """Write a last line to standard error, whatever that is; never raises, never waits long."""

    def speak() -> None:
        left = memoryview(f"{text}\n".encode(errors="backslashreplace"))
        try:
            while left:
                left = left[os.write(2, left) :]
        except OSError:
            pass

    flush()
    if sys.stderr is not sys.__stderr__ and sys.stderr is not None:
        sys.stderr.write(f"{text}\n")  # somebody has put another in its place
        return
    thread = threading.Thread(target=speak, name="last-words", daemon=True)
    thread.start()
    thread.join(FLUSH_S)


def hold_standard_descriptors() -> None:
    """Put /dev/null where standard input, output or error were closed by whoever started us.

    Else the next socket gets their number, and what anybody writes to standard error goes there.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest free number: this one. Programs that we start inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for the process
