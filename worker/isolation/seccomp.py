"""System calls that a model's program may not make: no network, no leaving its process group.

Owns the filter (classic BPF, as `prctl` takes it) and nothing else. Never denies what an ordinary
program needs. Invariant: the filter works without any privilege and without namespaces, so also in
a container with the default profile; on an architecture it does not know there is none.

`setsid` and `setpgid` are answered with success and do nothing: the whole tree of a program stays
in one process group, which one signal ends, however fast it forks.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
import sys
from collections.abc import Sequence

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NR, _ARCH = 0, 4
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_SOCK_STREAM, _SOCK_TYPE_MASK = 1, 0xF
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_NUMBERS: dict[str, tuple[int, int]] = {
    # name: (x86_64, aarch64)
    "socket": (41, 198), "socketpair": (53, 199),
    "setsid": (112, 157), "setpgid": (109, 154), "prctl": (157, 167),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "clone": (56, 220), "clone3": (435, 435), "unshare": (272, 97), "setns": (308, 268),
    "io_uring_setup": (425, 425), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    # Memory that no limit of a process counts, and that outlives it.
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # What makes another process of the same user slow, small, or dead.
    "prlimit64": (302, 261), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "fcntl": (72, 25), "ioctl": (16, 29),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_REFUSED = (
    "unshare", "setns", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp",
    "keyctl", "add_key", "request_key", "bpf", "perf_event_open", "userfaultfd",
    "open_by_handle_at", "memfd_create", "memfd_secret", "shmget", "semget", "msgget", "mq_open",
    "setpriority", "ioprio_set", "sched_setscheduler", "sched_setparam", "sched_setattr",
    "sched_setaffinity",
)  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


@functools.cache
def available() -> bool:
    """Return whether this kernel takes such a filter; it is tried, once, in a process of its own.

    Kernels that only look like Linux (gVisor) say that they do.
    """
    if os.uname().machine not in _MACHINES or sys.maxsize < 1 << 32:
        return False
    libc, program = ctypes.CDLL(None), build(network=False)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            enter(program)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def build(*, network: bool, own_signals_only: int = 0, hides_memory: bool = False) -> bytes:
    """Return the filter of one program.

    Args:
        network: leave `socket` alone.
        own_signals_only: the process that alone may be sent signals one by one (its own group may,
            too); 0 leaves signals alone.
        hides_memory: it may do so from others of its user; what it has open cannot be counted then.
    """
    column, arch = _MACHINES[os.uname().machine]
    number = {name: numbers[column] for name, numbers in _NUMBERS.items()}
    code = [_step(_LOAD, _ARCH), _step(_EQUAL, arch, 1, 0), _step(_RETURN, _KILL)]
    code.append(_step(_LOAD, _NR))
    if column == 0:
        code += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _KILL)]
    for name in _REFUSED:
        code += _block(number[name], [_fail(errno.EPERM)])
    # What is not known of a `clone3` cannot be checked: libraries fall back to `clone`.
    code += _block(number["clone3"], [_fail(errno.ENOSYS)])
    code += _block(number["io_uring_setup"], [_fail(errno.ENOSYS)])
    code += _block(number["clone"], _if_bits(0, _NEW_NAMESPACES, errno.EPERM))
    for name in ("setsid", "setpgid"):
        code += _block(number[name], [_fail(0)])
    unheard = [_PR_SET_PDEATHSIG] + ([] if hides_memory else [_PR_SET_DUMPABLE])
    code += _block(number["prctl"], _if_equal(0, unheard, _fail(0), _allow()))
    # Limits of its own alone: a limit of CPU time is a way to kill.
    code += _block(number["prlimit64"], _if_equal(0, [0], _allow(), _fail(errno.EPERM)))
    # A file can be told to send any signal to anybody of the user.
    owners = [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX]
    code += _block(number["fcntl"], _if_equal(1, owners, _fail(errno.EPERM), _allow()))
    owners = [_FIOSETOWN, _SIOCSPGRP]
    code += _block(number["ioctl"], _if_equal(1, owners, _fail(errno.EPERM), _allow()))
    if not network:
        code += _block(number["socket"], [_fail(errno.EACCES)])
        stream = [
            _load(1), _step(_AND, _SOCK_TYPE_MASK), _step(_EQUAL, _SOCK_STREAM, 1, 0),
            _fail(errno.EACCES), _allow(),
        ]  # fmt: skip
        code += _block(number["socketpair"], stream)
    if own_signals_only:
        for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
            mine = [own_signals_only] + ([0] if name == "kill" else [])
            code += _block(number[name], _if_equal(0, mine, _allow(), _fail(errno.EPERM)))
        for name in ("tkill", "pidfd_send_signal"):
            code += _block(number[name], [_fail(errno.EPERM)])
    code.append(_allow())
    return b"".join(code)


def enter(program: bytes) -> None:
    """Put this process, and all that it starts, under the filter; there is no way back.

    It needs no privilege once `PR_SET_NO_NEW_PRIVS` is set.

    Raises:
        OSError: the kernel did not take it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    given = _Program(len(program) // 8, program)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(given), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _step(code: int, k: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, k)


def _load(argument: int) -> bytes:
    return _step(_LOAD, 16 + 8 * argument)  # the low half: both machines are little-endian


def _allow() -> bytes:
    return _step(_RETURN, _ALLOW)


def _fail(number: int) -> bytes:
    """Answer with this errno; 0 is a success that did nothing."""
    return _step(_RETURN, _ERRNO | number)


def _block(number: int, steps: Sequence[bytes]) -> list[bytes]:
    """Return the steps for one system call; they end with an answer on every way."""
    return [_step(_EQUAL, number, 0, len(steps)), *steps]


def _if_bits(argument: int, mask: int, number: int) -> list[bytes]:
    return [_load(argument), _step(_ANY_BIT, mask, 0, 1), _fail(number), _allow()]


def _if_equal(argument: int, values: Sequence[int], then: bytes, otherwise: bytes) -> list[bytes]:
    steps = [_load(argument)]
    for at, value in enumerate(values):
        steps.append(_step(_EQUAL, value, len(values) - at, 0))
    return [*steps, otherwise, then]
