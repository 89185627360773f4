"""What a user of Redis may do: every script loads, and every command that they use is permitted.

Owns the list of commands and the sentences about what is missing. Never writes data: scripts are
loaded, and the server is asked what it would permit (`redis.acl_check_cmd`, Redis 7 and Valkey).
Invariant: the commands of scripts are read from the scripts themselves, so none is forgotten.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from redis.exceptions import NoPermissionError

from rollstream.health import NOTE, PROBLEM, Finding
from rollstream.queue.scripts import load_scripts

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue
    from rollstream.queue.scripts import Script

_CALLED = re.compile(r"""\b(?:call|redis\.p?call)\(\s*'([A-Z]+)'""")
_CHECK = """
local check = redis.acl_check_cmd
if not check then return false end
local denied = {}
for _, line in ipairs(ARGV) do
  local words = {}
  for word in string.gmatch(line, '%S+') do words[#words + 1] = word end
  local ok, permitted = pcall(check, unpack(words))
  if ok and not permitted then denied[#denied + 1] = words[1] end
end
return denied
"""
_KEYLESS = frozenset({"TIME", "PING"})
_OF_KEYS = _KEYLESS | {"DEL", "EXISTS", "UNLINK"}
"""Commands whose every argument is a key."""
_SUBCOMMANDS = {"XGROUP": ("CREATE",), "XINFO": ("STREAM",)}


def commands_of(key: str, scripts: Sequence[Script]) -> list[str]:
    """Return an example of every command that processes of a run send, with `key` as its key."""
    named = {name for script in scripts for name in _CALLED.findall(script.source)}
    found = []
    for name in sorted(named | {"TIME", "PING"}):
        words = [name] if name in _KEYLESS else [name, *_SUBCOMMANDS.get(name, ()), key]
        if name not in _OF_KEYS:
            words += ["0", "0"]
        found.append(" ".join(words))
    return [
        *found,
        f"XREADGROUP GROUP g c COUNT 1 STREAMS {key} >",
        f"XREAD COUNT 1 STREAMS {key} 0",
        f"XREVRANGE {key} + - COUNT 1",
        f"XACK {key} g 0-1",
        f"XCLAIM {key} g c 0 0-1 JUSTID",
        f"BLPOP {key} 0.1",
    ]


def right_findings(queue: BlockingQueue, *, is_named: bool) -> Iterator[Finding]:
    """Load every script and ask what its user may do.

    Args:
        queue: of the run whose keys are asked about.
        is_named: there is a run to ask about; else only the scripts are loaded.
    """
    scripts = list(load_scripts().values())
    replies = queue.ask([("SCRIPT LOAD", script.source) for script in scripts])
    failed = [(script.name, reply) for script, reply in zip(scripts, replies, strict=True)
              if isinstance(reply, Exception)]  # fmt: skip
    if failed:
        names = ", ".join(name for name, _ in failed)
        is_denied = isinstance(failed[0][1], NoPermissionError)
        do = "ACL SETUSER NAME +evalsha +script|load" if is_denied else "Use Redis 6.2, or Valkey"
        yield Finding("scripts", PROBLEM, f"scripts cannot be loaded: {names} ({failed[0][1]})",
                      "every change of a run is one of them", f"{do}; docs/deploy.md")  # fmt: skip
        return
    if is_named:
        yield from _denied(queue, scripts)


def _denied(queue: BlockingQueue, scripts: Sequence[Script]) -> Iterator[Finding]:
    key = f"{queue.prefix}m"
    sha = hashlib.sha1(_CHECK.encode(), usedforsecurity=False).hexdigest()
    lines = commands_of(key, scripts)
    _, reply = queue.ask([("SCRIPT LOAD", _CHECK), ("EVALSHA", sha, 1, key, *lines)])
    if isinstance(reply, NoPermissionError):
        yield Finding("scripts", PROBLEM, f"this user may not work on run {queue.run!r} ({reply})",
                      "its workers and trainer stop at their first call",
                      f"ACL SETUSER NAME +evalsha ~{queue.prefix}*; docs/deploy.md")  # fmt: skip
    elif isinstance(reply, Exception):
        yield Finding("scripts", NOTE, f"what this user may do cannot be asked ({reply})",
                      "a command that is forbidden is found when it is used",
                      "Give it the rights of docs/deploy.md")  # fmt: skip
    elif isinstance(reply, list) and reply:
        names = sorted({_text(name).lower() for name in reply})
        given = " ".join(f"+{name}" for name in names)
        yield Finding("scripts", PROBLEM,
                      f"this user may not use {', '.join(names)} on keys of run {queue.run!r}",
                      "scripts and processes of the run stop where they do",
                      f"ACL SETUSER NAME {given} ~{queue.prefix}*; docs/deploy.md")  # fmt: skip


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
