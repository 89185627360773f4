"""Programs that hang, fork, eat and escape: each ends, says why, and leaves nothing (case 92).

Every limit is met first by a program that would do no harm without it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.verify import FORK_BOMB, SWALLOWS
from worker.isolation import landlock, leftovers, sandbox, seccomp
from worker.isolation.program import ProgramLimits
from worker.isolation.sandbox import MAIN, Head, Program, SandboxBroken, run_program, watch

from .programs import SMALL, USERS, Raised, folders, forked, lives, run

pytestmark = pytest.mark.slow
BOTH = ["root", "plain"]
WITH_SECCOMP = USERS[:3]
needs_layers = pytest.mark.skipif(
    not landlock.scopes_signals() or not seccomp.available(), reason="this kernel has not all"
)


@pytest.mark.parametrize("user", USERS)
def test_program_reads_its_input_prints_and_ends(user: str) -> None:
    source = "print(input()[::-1]); print(open('/dev/stdin').read())"
    result = run(source, user=user, stdin="ab\nc")
    assert result.ok, result
    assert result.stdout == b"ba\nab\nc\n"
    assert result.stderr == b""


@needs_layers
def test_every_layer_is_there_and_the_result_says_so() -> None:
    assert run("", user="plain").layers == ("rlimits", "seccomp", "landlock", "signals")
    assert run("", user="plain, no landlock").layers == ("rlimits", "seccomp", "signals")
    assert run("", user="plain, rlimits alone").layers == ("rlimits",)
    if os.getuid() == 0:
        layers = ("rlimits", "uid", "seccomp", "landlock", "signals")
        assert run("", user="root").layers == layers


@pytest.mark.parametrize("user", BOTH)
def test_program_has_its_limits_and_no_privilege(user: str) -> None:
    source = """
import ctypes, os, resource as r
print([r.getrlimit(x)[1] for x in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_CORE)])
print(sorted(os.environ), os.getcwd() == os.environ["HOME"], os.getgroups(), os.getsid(0))
print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0), 0 in os.getresuid(), os.getresuid())
try:
    os.setuid(0)
except PermissionError:
    print("stays")
"""
    result = run(source, user=user, timeout_s=7)
    limits, rest, ids, stays = result.stdout.decode().splitlines()
    assert limits == str([SMALL.memory_bytes, 9, SMALL.file_bytes, 0])
    names = sorted([*sandbox._ENVIRONMENT, "HOME", "TMPDIR"])
    assert rest.startswith(f"{names} True [] ")
    assert ids.startswith("1 False")
    assert stays == "stays"


def test_programs_of_a_root_verifier_have_a_user_each() -> None:
    printed = {run("import os; print(os.getuid())", user="root").stdout for _ in range(3)}
    assert len(printed) == 3
    assert all(20_000 <= int(number) < 60_000 for number in printed)


@pytest.mark.parametrize("user", USERS)
def test_program_that_sleeps_is_ended_at_its_time(user: str) -> None:
    result = run("import time; print('now', flush=True); time.sleep(60)", user=user, timeout_s=0.3)
    assert result.timed_out
    assert result.starved is None
    assert result.stdout == b"now\n"


@pytest.mark.parametrize("user", BOTH)
def test_program_that_swallows_everything_is_ended_at_its_time(user: str) -> None:
    assert run(SWALLOWS, user=user, timeout_s=0.3).timed_out


@pytest.mark.parametrize("user", BOTH)
def test_program_that_eats_memory_gets_no_more(user: str) -> None:
    result = run("x = bytearray(300 << 20)", user=user)  # of 256
    assert result.exit_code == 1
    assert result.stderr.endswith(b"MemoryError\n")
    result = run("x = bytearray(10 << 30)", user=user)
    assert result.stderr.endswith(b"MemoryError\n")


@pytest.mark.parametrize("user", BOTH)
def test_processes_of_one_program_share_its_memory(user: str) -> None:
    source = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = b"x" * (100 << 20)
        time.sleep(60)
time.sleep(60)
"""
    assert run(source, user=user).killed_for == "memory"


SLEEPERS = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        time.sleep(60)
print("all", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("user", USERS)
def test_program_that_forks_is_ended_or_refused(user: str) -> None:
    result = run(SLEEPERS, user=user)  # 20 that do nothing, of 8
    if user == "root":
        assert b"BlockingIOError" in result.stderr
    else:
        assert result.killed_for == "processes"


@pytest.mark.parametrize("user", WITH_SECCOMP)
def test_fork_bomb_is_ended_and_nothing_of_it_runs(user: str) -> None:
    result = run(FORK_BOMB, user=user, timeout_s=0.5)
    assert result.timed_out or result.killed_for == "processes"
    assert not folders()


@pytest.mark.parametrize("user", USERS)
def test_double_fork_into_a_session_of_its_own_is_ended_too(user: str) -> None:
    source = """
import os, sys, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setpgid(0, 0)
        os.write(writer, str(os.getpid()).encode())
        time.sleep(600)
    os._exit(0)
print(os.read(reader, 20).decode())
"""
    result = run(source, user=user)
    assert result.ok, result
    assert not lives(int(result.stdout))


@pytest.mark.parametrize("user", WITH_SECCOMP)
def test_program_cannot_leave_the_group_that_is_killed_at_one_blow(user: str) -> None:
    source = """
import os
group = os.getpgid(0)
if os.fork() == 0:
    os.setsid(); os.setpgid(0, 0)
    print(os.getpgid(0) == group, os.getsid(0) == group, flush=True)
    os._exit(0)
os.wait()
"""
    assert run(source, user=user).stdout == b"True True\n"


@pytest.mark.parametrize("user", BOTH)
def test_files_are_bounded_in_size_and_number(user: str) -> None:
    result = run("open('x', 'wb').write(b'x' * (2 << 20))", user=user)
    assert b"File too large" in result.stderr
    source = "for i in range(10 ** 9): open(str(i), 'wb').write(b'x' * (1 << 20))"
    assert run(source, user=user).killed_for == "files"
    source = "for i in range(10 ** 9): open(str(i), 'wb').close()"
    assert run(source, user=user).killed_for == "files"
    assert not folders()


@pytest.mark.parametrize("user", BOTH)
def test_folder_goes_whatever_the_program_made_of_it(user: str) -> None:
    source = """
import os
os.makedirs("a/b/c"); os.symlink("/etc", "a/etc"); os.mkfifo("a/fifo")
open("a/b/c/file", "w").close(); os.chmod("a/b/c/file", 0); os.chmod("a/b", 0); os.chmod("a", 0)
for _ in range(900):  # deeper, it is ended where it is looked at meanwhile
    os.mkdir("d"); os.chdir("d")
print("made")
"""
    assert run(source, user=user).stdout == b"made\n"
    assert not folders()
    assert Path("/etc/passwd").exists()


@pytest.mark.parametrize("user", BOTH)
def test_endless_output_is_read_and_not_kept(user: str) -> None:
    result = run("while True: print('x' * 65536)", user=user)
    assert result.killed_for == "output"
    assert len(result.stdout) == SMALL.output_bytes
    assert result.stdout_bytes > SMALL.printed_bytes
    many = run(f"import sys; print('a' * {1 << 20}); print('b' * 5000, file=sys.stderr)", user=user)
    assert many.ok
    assert (many.stdout_bytes, len(many.stdout)) == ((1 << 20) + 1, SMALL.output_bytes)
    assert len(many.stderr) == SMALL.output_bytes


@pytest.mark.parametrize("user", WITH_SECCOMP)
def test_program_reaches_no_network(user: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        assert run(source, user=user).stderr.endswith(
            b"PermissionError: [Errno 13] Permission denied\n"
        )
        for family in ("AF_UNIX", "AF_INET6", "AF_NETLINK"):
            source = f"import socket; socket.socket(socket.{family}, socket.SOCK_DGRAM)"
            assert run(source, user=user).exit_code == 1
        source = "import socket; socket.socketpair(); socket.socketpair(type=socket.SOCK_DGRAM)"
        assert b"in <module>" in run(source, user=user).stderr
        with pytest.raises(BlockingIOError):
            server.accept()
        # The server is one that answers whoever may.
        allowed = ProgramLimits(memory_bytes=256 << 20, network=True)
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        assert run(source, user=user, limits=allowed).ok
        server.settimeout(10)
        server.accept()[0].close()


@pytest.mark.parametrize("user", BOTH)
def test_ordinary_libraries_run(user: str) -> None:
    source = """
import asyncio, subprocess, threading, multiprocessing
async def one(): await asyncio.sleep(0); return 1
print(asyncio.run(one()))
print(subprocess.run(["/bin/echo", "two"], capture_output=True, text=True).stdout.strip())
threads = [threading.Thread(target=print, args=(3,))]; threads[0].start(); threads[0].join()
import numpy
print(int((numpy.ones((64, 64)) @ numpy.ones((64, 1))).sum()))
"""
    result = run(source, user=user)
    assert result.ok, result
    assert result.stdout.split() == [b"1", b"two", b"3", b"4096"]


@pytest.mark.parametrize("user", BOTH)
def test_segfault_is_told_as_one(user: str) -> None:
    result = run("import ctypes; ctypes.string_at(0)", user=user)
    assert (result.signal, result.exit_code) == (signal.SIGSEGV, None)
    assert result.ending() == "ended by signal SIGSEGV"


@pytest.mark.parametrize("user", WITH_SECCOMP)
def test_program_signals_nobody_outside(user: str) -> None:
    source = """
import os, signal
for pid in (os.getppid(), 1):
    try:
        os.kill(pid, signal.SIGTERM)
        print("sent")
    except OSError:
        pass
try:
    os.kill(-1, signal.SIGTERM)  # whom it may reach: nobody
except OSError:
    pass
"""
    result = run(source, user=user)
    assert (result.exit_code, result.stdout) == (0, b""), result


@pytest.mark.parametrize("user", USERS)
def test_program_reads_no_memory_and_no_environment_of_others(user: str) -> None:
    source = """
import os
for name in ("environ", "mem", "maps"):
    try:
        print(open(f"/proc/{os.getppid()}/{name}", "rb").read(1))
    except OSError:
        pass
"""
    assert run(source, user=user).stdout == b""


@needs_layers
@pytest.mark.parametrize("user", BOTH)
def test_program_reads_and_writes_nothing_outside_its_folder(user: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o666)
    source = f"""
import os
for what in ("open({str(secret)!r})", "open({str(secret)!r}, 'w')", "open('/etc/passwd')",
             "os.listdir('/tmp')", "open('/tmp/b', 'w')", "open('/dev/shm/b', 'w')",
             "os.listdir('/proc')", "os.unlink({str(secret)!r})",
             "os.mkdir({str(tmp_path / "d")!r})",
             "os.link({str(secret)!r}, 'here')"):
    try:
        eval(what)
        print(what)
    except OSError:
        pass
"""
    result = run(source, user=user)
    assert (result.stdout, result.exit_code) == (b"", 0), result
    assert secret.read_text() == "s"


@pytest.mark.parametrize("user", WITH_SECCOMP)
def test_program_makes_nothing_that_outlives_it_or_escapes_its_limits(user: str) -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "shmget": lambda: libc.shmget(0, 4096, 0o1600), "memfd": lambda: libc.memfd_create(b"x", 0),
    "user namespace": lambda: libc.unshare(0x10000000), "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
    "io_uring": lambda: libc.syscall(425, 1, 0), "keyctl": lambda: libc.syscall(250, 0, -3, 0),
    "clone": lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
}
print([name for name, call in calls.items() if call() >= 0])
"""
    result = run(source, user=user)
    assert result.stdout == b"[]\n", result


def test_time_in_which_the_machine_gave_no_cpu_is_not_the_programs() -> None:
    def starve() -> None:
        sandbox.PATIENCE, sandbox._MIN_PATIENCE_S = 1.0, 0.2
        sandbox.Program.seconds = lambda _self: 0.0  # type: ignore[method-assign]

    result = run("import time; time.sleep(60)", timeout_s=0.2, before=starve)
    assert result.starved == "cpu"
    assert not result.ok


def test_a_crash_while_the_kernel_was_out_of_memory_says_nothing() -> None:
    numbers = iter(range(100))

    def short_of_memory() -> None:
        sandbox._num_oom_kills = lambda: next(numbers)  # type: ignore[assignment]

    killed = "import os; os.kill(os.getpid(), 9)"
    assert run(killed, before=short_of_memory).starved == "memory"
    assert run("pass", before=short_of_memory).starved is None
    assert run(killed).starved is None


def test_program_ends_with_whoever_keeps_it_and_its_folder_goes_with_the_next() -> None:
    reader, writer = os.pipe()
    source = f"import os, time; os.write({writer}, str(os.getpid()).encode()); time.sleep(600)"
    keeper = os.fork()
    if keeper == 0:
        program = sandbox.Program(
            {sandbox.MAIN: source}, limits=SMALL, timeout_s=600.0, pass_fds=(writer,)
        )
        sandbox.watch([program])
        os._exit(0)
    try:
        pid = int(os.read(reader, 20))
        assert lives(pid)
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)
        for _ in range(1000):
            if not lives(pid):
                break
            time.sleep(0.01)
        assert not lives(pid)
        assert [name for name in folders() if f"/{keeper}-" in name]
        run_program("pass", limits=SMALL, timeout_s=20.0)
        assert not [name for name in folders() if f"/{keeper}-" in name]
    finally:
        with contextlib.suppress(ProcessLookupError, UnboundLocalError):
            os.kill(pid, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_place_that_cannot_be_written_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(leftovers, "new_folder", nowhere)
    with pytest.raises(SandboxBroken, match="No space left"):
        run_program("pass", limits=SMALL, timeout_s=20.0)


def test_root_that_can_confine_nobody_runs_nothing() -> None:
    def without_landlock() -> None:
        landlock.abi = lambda: 0  # type: ignore[assignment]
        sandbox.Confinement.__init__.__globals__["_python_is_public"] = lambda: False

    with pytest.raises(Raised, match="CannotConfine: root runs the verifier"):
        run("pass", user="root", before=without_landlock)


def test_end_of_a_program_is_seen_where_the_kernel_has_no_pidfd() -> None:
    def without_pidfd() -> None:
        def refuse(_pid: int) -> int:
            raise OSError(1, "Operation not permitted")

        os.pidfd_open = refuse  # type: ignore[assignment]

    result = run("print(1); raise SystemExit(3)", before=without_pidfd)
    assert (result.exit_code, result.stdout, result.timed_out) == (3, b"1\n", False)


@pytest.mark.parametrize("user", BOTH)
def test_files_in_hidden_and_deep_folders_are_counted(user: str) -> None:
    hidden = """
import os
os.mkdir("a"); here = os.open("a", os.O_RDONLY); os.chmod("a", 0o300)
for i in range(10 ** 9): open(f"a/{i}", "wb").write(b"x" * (1 << 20))
"""
    assert run(hidden, user=user).killed_for == "files"
    deep = "import os\nwhile True: os.mkdir('a' * 99); os.chdir('a' * 99)"
    assert run(deep, user=user).killed_for == "files"
    assert not folders()


def test_caller_keeps_its_own_processes() -> None:
    def call() -> Any:
        other = os.fork()
        if other == 0:
            time.sleep(600)
        result = run_program("print(1)", limits=SMALL, timeout_s=20.0)
        alive = lives(other)
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        return [result.ok, alive]

    assert forked("plain", call) == [True, True]


DEGRADES = """
import fcntl, os, resource, signal, time
def tried(name, call):
    try:
        call()
    except OSError:
        pass
    else:
        print(name)
other = os.getppid()
tried("limits", lambda: resource.prlimit(other, resource.RLIMIT_NOFILE, (500, 500)))
tried("cores", lambda: os.sched_setaffinity(other, {0}))
tried("priority", lambda: os.setpriority(os.PRIO_PROCESS, other, 19))
tried("scheduler", lambda: os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0)))
read, write = os.pipe()
def sigio():
    fcntl.fcntl(read, fcntl.F_SETOWN, other)
    fcntl.fcntl(read, 10, signal.SIGKILL)
    fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
    os.write(write, b"x")
tried("a signal by a file", sigio)
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
time.sleep(0.2)
"""


@pytest.mark.parametrize("user", ["root", "plain", "plain, no landlock"])
def test_program_changes_no_limit_and_no_priority_of_others(user: str) -> None:
    ran = run(DEGRADES, user=user)
    assert (ran.stdout, ran.exit_code) == (b"", 0), ran.stderr


FILES_WITHOUT_A_NAME = """
import ctypes, os, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
for _ in range(40):
    fd = os.open("a", os.O_RDWR | os.O_CREAT)
    os.unlink("a")
    for _ in range(15):
        os.write(fd, bytes(65536))
time.sleep(20)
"""


@pytest.mark.parametrize("user", ["root", "plain", "plain, no landlock"])
def test_files_without_a_name_are_counted(user: str) -> None:
    ran = run(FILES_WITHOUT_A_NAME, user=user)
    assert ran.killed_for == "files"


class Takes(Head):
    """Takes back what another pipe holds, before it can be read."""

    def __init__(self, other: int) -> None:
        super().__init__(9)
        self.other = other

    def take(self, data: bytes) -> None:
        super().take(data)
        os.read(self.other, 9)


def test_program_that_takes_back_what_it_wrote_is_ended_at_its_time() -> None:
    def call() -> bool:
        (one, to_one), (other, to_other) = os.pipe(), os.pipe()
        program = Program({MAIN: "import time; time.sleep(30)"}, limits=SMALL, timeout_s=1.0)
        os.write(to_one, b"x")
        os.write(to_other, b"x")
        signal.alarm(15)  # ends this process, where nothing else does
        with contextlib.closing(program):
            watch([program], {one: Takes(other), other: Takes(one)})
        return program.result().timed_out

    assert forked("plain", call)
