"""Make the server's users file and the URL that clients read, once, with a random password.

Owns the two files in the folder that it is given. Never prints or replaces a password.
Invariant: both files hold the same password, and a second start changes nothing.

    python ops/make_secrets.py /run/rollstream redis 6379
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

ACL = "redis.acl"
URL = "redis_url"
_USERS = """\
user default off
user rollstream on >{password} ~rs:* ~rq:* &* +@all -@admin -@dangerous +info +keys +client|list
user health on nopass resetkeys resetchannels -@all +ping
"""


def make(folder: Path, host: str, port: int) -> bool:
    """Write both files unless they are there; return whether they were written.

    The URL is written last and moved into place, so its presence says that both are complete.
    """
    target = folder / URL
    if target.exists():
        return False
    folder.mkdir(parents=True, exist_ok=True)
    password = secrets.token_urlsafe(32)
    _write(folder / ACL, _USERS.format(password=password))
    _write(target, f"redis://rollstream:{password}@{host}:{port}/0\n")
    return True


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    # The server and the workers run as different users, and only they mount this folder.
    partial.chmod(0o444)
    partial.replace(path)


if __name__ == "__main__":
    folder, host, port = sys.argv[1:4]
    made = make(Path(folder), host, int(port))
    what = "made a new password" if made else "kept the password that is there"
    sys.stdout.write(f"{folder}: {what}\n")
