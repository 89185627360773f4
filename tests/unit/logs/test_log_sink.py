"""Whatever becomes of standard error, whoever logs goes on, and what is missing is counted."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.log_sink import LineHandler
from tests.backstage import wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reads, writes = os.pipe()
    yield reads, writes
    for end in (reads, writes):
        with contextlib.suppress(OSError):
            os.close(end)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, whose handlers come back."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a", logging.WARNING, "f", 1, text, None, None)


def read_all(descriptor: int) -> list[str]:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read().decode().splitlines()


def test_lines_come_out_whole_and_in_order(pipe: tuple[int, int]) -> None:
    handler = LineHandler(pipe[1])
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(read_all(pipe[0])))
    reader.start()
    texts = [f"{i}:" + "é" * (i * 37 % 9000) for i in range(300)]
    for text in texts:
        handler.emit(record(text))
    handler.flush()
    os.close(pipe[1])
    reader.join(20)
    assert (got, handler.num_dropped) == (texts, 0)


def test_a_pipe_nobody_reads_costs_lines_and_no_time_and_says_so_later(
    pipe: tuple[int, int], root: logging.Logger
) -> None:
    handler = LineHandler(pipe[1], max_bytes=50_000)
    root.handlers[:] = [handler]
    num = 4000  # 400 KB: more than the pipe and the buffer hold; returns only where nobody waits
    for i in range(num):
        handler.emit(record(f"{i:0100}"))
    dropped = handler.num_dropped
    assert 0 < dropped < num
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(read_all(pipe[0])))
    reader.start()
    handler.flush()
    wait_until(lambda: handler._num_said == dropped, 20.0)
    handler.emit(record("the last"))
    handler.flush()
    os.close(pipe[1])
    reader.join(20)
    numbers = [int(line) for line in got if line.isdecimal()]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == num - dropped == num - handler.num_dropped
    said = [line for line in got if not line.isdecimal()]
    assert (set(said[:-1]), said[-1]) == ({"log_lines_dropped"}, "the last")


@pytest.mark.parametrize("how", ["full", "not to be written", "no reader"])
def test_a_broken_descriptor_is_counted_line_by_line(how: str, pipe: tuple[int, int]) -> None:
    if how == "no reader":
        os.close(pipe[0])
    descriptor = {
        "full": lambda: os.open("/dev/full", os.O_WRONLY),
        "not to be written": lambda: os.open(os.devnull, os.O_RDONLY),
        "no reader": lambda: os.dup(pipe[1]),
    }[how]()
    handler = LineHandler(descriptor)
    for i in range(20):
        handler.emit(record(str(i)))
    handler.flush()
    wait_until(lambda: handler.num_dropped == 20, 20.0)
    os.close(descriptor)


def test_a_pipe_that_does_not_block_gets_every_line_whole(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)  # whoever shares the descriptor may do that at any time
    handler = LineHandler(pipe[1])
    texts = [f"{i}:" + "x" * 9000 for i in range(40)]
    for text in texts:
        handler.emit(record(text))
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(read_all(pipe[0])))
    reader.start()
    handler.flush()
    os.close(pipe[1])
    reader.join(20)
    assert (got, handler.num_dropped) == (texts, 0)


@pytest.mark.parametrize("with_thread", [True, False])
def test_what_is_left_of_a_torn_line_does_not_take_the_next_one_with_it(
    tmp_path: Path, with_thread: bool
) -> None:
    code = f"""
import logging, os, resource, signal, sys
from rollstream.log_sink import LineHandler
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
handler = LineHandler(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND))
if not {with_thread}:
    handler._start_anew(may_thread=False)
def say(text):
    handler.emit(logging.LogRecord("a", logging.INFO, "f", 1, text, None, None))
    handler.flush()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
say("first")
say("torn in the middle")
say("nothing of it")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
say("next")
print(handler.num_dropped)
"""
    file = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True,
                          check=True, timeout=20)  # fmt: skip
    assert file.read_text().splitlines() == ["first", "torn", "next"]
    assert done.stdout == "2\n"


def test_lines_of_the_very_end_of_a_process_are_written() -> None:
    code = """
import atexit
atexit.register(lambda: log.error("last"))  # before logging is imported: it is called behind it
import logging
from rollstream.logs import configure
configure()
log = logging.getLogger("a")
log.error("first")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=20)  # fmt: skip
    told = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert told == ["first", "last"]


def test_the_end_of_a_process_waits_once_for_a_pipe_nobody_reads(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = LineHandler(pipe[1])
    for i in range(200):
        handler.emit(record(f"{i}" * 1000))
    waits: list[float | None] = []
    monkeypatch.setattr("rollstream.log_sink.FLUSH_S", 0.01)
    real = handler._changed.wait

    def wait(timeout: float | None = None) -> bool:
        waits.append(timeout)
        return real(timeout)

    handler.flush()
    monkeypatch.setattr(handler._changed, "wait", wait)
    handler.close()  # as logging.shutdown does it
    assert waits == []
    # The thread that writes gets on, and is to do so before its descriptor is another's.
    os.close(pipe[0])
    wait_until(lambda: handler.num_dropped and not (handler._lines or handler._is_writing), 20.0)


def test_a_record_that_cannot_be_printed_is_a_line_all_the_same(pipe: tuple[int, int]) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("odd")

    handler = LineHandler(pipe[1])
    handler.emit(logging.LogRecord("a", logging.INFO, "f", 1, "%s", (Odd(),), None))
    handler.flush()
    os.close(pipe[1])
    (line,) = read_all(pipe[0])
    assert json.loads(line)["event"] == "log_record_unprintable"


def test_a_forked_process_writes_its_own_lines_and_not_its_parents(pipe: tuple[int, int]) -> None:
    code = """
import logging, os, sys
from rollstream.logs import configure
configure()
log = logging.getLogger("a")
log.warning("before")
pid = os.fork()
if pid == 0:
    log.warning("child")
    import threading
    os._exit(threading.active_count() - 1)
_, status = os.waitpid(pid, 0)
log.warning("after")
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    events = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert sorted(events) == ["after", "before", "child"]


EVERYTHING = """
import logging, math, sys, threading, warnings
import structlog
from rollstream.logs import bind_process, configure

configure()
bind_process(run="r", incarnation="i")
structlog.contextvars.bind_contextvars(group_index=7, member=2)
log = structlog.get_logger("worker")
log.info("own", url="redis://:hunter2@h", deep=[{"at": "http://u:hunter2@h"}], nan=math.nan,
         odd="\\udcff", text_of_two_lines="a\\nb", error=OSError("no rediss://:hunter2@h"),
         far_down=[[[[[[math.nan, {(1,): "http://u:hunter2@h"}]]]]]])
logging.getLogger("a.library").warning("a message with %s", "values")
warnings.warn("old", UserWarning)

def dies():
    raise ValueError("of a thread")

thread = threading.Thread(target=dies, name="mine")
thread.start()
thread.join()

class Broken:
    def __del__(self):
        raise ValueError("of a finaliser")

Broken()
raise RuntimeError("at the end")
"""


def test_whatever_a_process_says_is_json_of_one_shape() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    lines: list[dict[str, Any]] = [
        json.loads(line, parse_constant=pytest.fail) for line in done.stderr.splitlines()
    ]
    assert [line["event"] for line in lines] == [
        "own", "a message with values", "python_warning", "thread_died", "exception_ignored",
        "uncaught_exception",
    ]  # fmt: skip
    for line in lines:
        assert list(line)[:4] == ["ts", "level", "logger", "event"]
        assert (line["run"], line["incarnation"]) == ("r", "i"), "in whatever thread"
    own, library, warning, thread, finaliser, last = lines
    assert list(own)[4:8] == ["run", "incarnation", "group_index", "member"]
    assert "hunter2" not in done.stderr
    assert (own["nan"], own["odd"], own["text_of_two_lines"]) == ("nan", "\\udcff", "a\nb")
    assert (library["logger"], library["member"]) == ("a.library", 2)
    assert (warning["category"], warning["warning"]) == ("UserWarning", "old")
    assert thread["thread_name"] == "mine"
    assert "of a thread" in thread["exception"]
    assert "of a finaliser" in finaliser["exception"]
    assert (last["level"], "RuntimeError: at the end" in last["exception"]) == ("critical", True)
