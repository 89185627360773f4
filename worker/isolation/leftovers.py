"""The end of everything that a program started, and of everything that it wrote.

Owns the kill of a process tree and the removal of a hostile folder. Never touches a process that is
no descendant of the calling one. Invariant: `end_children` returns when this process has no child
left, or raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import signal
import stat
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_KILL_S = 10.0
_MAX_PATH_CHARS = 2048
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


class Unkillable(RuntimeError):
    """Processes were still there long after they had been killed."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (double forks among them)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent `parent` ends.

    Where it has ended already, no signal comes: then this process ends at once.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def descendants(pid: int, spare: Collection[int] = ()) -> list[int]:
    """Return all processes below `pid` that there are at this moment, parents first.

    Args:
        pid: whose.
        spare: children that are left out, with all that is below them.
    """
    found, known = _children(pid), {pid, *spare}
    kept = []
    for child in found:
        if child not in known:
            known.add(child)
            kept.append(child)
            found.extend(_children(child))
    return kept


def end_children(groups: Iterable[int] = (), *, spare: Collection[int] = ()) -> None:
    """Kill and reap the descendants of this process, orphans that it adopted among them.

    Args:
        groups: of children that were not waited for (their numbers are still theirs): killed
            first, each at one blow.
        spare: children that go on, with all that is below them.

    Raises:
        Unkillable: some did not go within ten seconds.
    """
    limit, pause_s = time.monotonic() + _KILL_S, _FIRST_PAUSE_S
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    while found := descendants(os.getpid(), spare):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):  # no child of ours, or not yet
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > limit:
            raise Unkillable(f"{len(found)} processes of a program could not be killed")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as listed:
                found += map(int, listed.read().split())
    except (FileNotFoundError, ProcessLookupError):
        if not found and not Path("/proc/self/task", str(os.getpid()), "children").exists():
            return _children_by_parent(pid)
    return found


def _children_by_parent(parent: int) -> list[int]:
    """Return the same where the kernel keeps no such lists."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if name.isdigit():
                after_name = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2]
                if int(after_name.split()[1]) == parent:
                    found.append(int(name))
    return found


def new_folder() -> str:
    """Return a new folder; those of killed processes go meanwhile.

    Raises:
        OSError: it cannot be made; the message names the place.
    """
    base = _base()
    with contextlib.suppress(FileExistsError):
        base.mkdir(0o711)
        base.chmod(0o711)  # programs of other users pass through, and see no names
    found = base.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EPERM, "belongs to somebody else, remove it", str(base))
    remove_abandoned()
    own = os.getpid()
    return tempfile.mkdtemp(prefix=f"{own}-{_began(own)}-", dir=base)


def remove_abandoned() -> None:
    """Remove the folders whose processes were killed before they could."""
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(_base())):
            pid, _, rest = entry.name.partition("-")
            if _began(pid) != rest.partition("-")[0]:
                with contextlib.suppress(OSError):  # another process removes it, too
                    remove(entry.path)


def _base() -> Path:
    return Path(tempfile.gettempdir(), f"rollstream-programs-{os.geteuid()}")


def _began(pid: int | str) -> str:
    """Return when this process began, which with its number names it; empty: there is none."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError, ValueError):
        return ""


def remove(folder: str) -> None:
    """Remove a folder whatever a program made of it: any depth, any modes, any number.

    Folders within are moved to the top before they are emptied: no path grows long.

    Raises:
        OSError: something could not be removed.
    """
    prefix, waiting = f"{folder}/{secrets.token_hex(8)}-", [folder]
    num_moved = 0
    while waiting:
        emptied = waiting.pop()
        os.chmod(emptied, 0o700)
        for entry in list(os.scandir(emptied)):
            if entry.is_dir(follow_symlinks=False):
                num_moved += 1
                os.chmod(entry.path, 0o700)  # to move a folder is to write its `..`
                os.rename(entry.path, f"{prefix}{num_moved}")
                waiting.append(f"{prefix}{num_moved}")
            else:
                os.unlink(entry.path)
        if emptied != folder:
            os.rmdir(emptied)
    os.rmdir(folder)


def _open_up(path: str) -> None:
    """Make a folder readable for its owner; a link that took its place meanwhile is left alone."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
        try:
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
        finally:
            os.close(fd)


def count(folder: str, *, max_entries: int) -> tuple[int, int]:
    """Return entries and bytes on the disk below a folder; counting ends at `max_entries`."""
    entries = size = 0
    todo = [folder]
    while todo and entries < max_entries:
        path = todo.pop()
        if len(path) > _MAX_PATH_CHARS:
            return max_entries, size  # so deep that looking at it is work
        try:
            listed = os.scandir(path)
        except OSError:  # gone meanwhile, or hidden: it is counted the next time
            _open_up(path)
            entries += 1
            continue
        with listed:
            for entry in listed:
                entries += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                if entries >= max_entries:
                    break
    return entries, size


def count_unlinked(pids: Iterable[int], folder: str) -> int:
    """Return the bytes of files of `folder` that have no name any more, but are open or mapped."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{name}")
                    if found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
            for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
                _note_mapped(line, os.fsencode(folder), sizes)
    return sum(sizes.values())


def _note_mapped(line: bytes, folder: bytes, sizes: dict[tuple[int, int], int]) -> None:
    """Note the size of a mapping whose file has no name and may be open nowhere."""
    parts = line.split(maxsplit=5)
    if len(parts) < 6 or not parts[5].startswith(folder) or not parts[5].endswith(b" (deleted)"):
        return
    first, _, last = parts[0].partition(b"-")
    major, _, minor = parts[3].partition(b":")
    key = (os.makedev(int(major, 16), int(minor, 16)), int(parts[4]))
    sizes[key] = max(sizes.get(key, 0), int(last, 16) - int(first, 16))
