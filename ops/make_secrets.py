"""Make the server's users file and what its clients read, once, with random passwords.

Owns the files in the folders that it is given. Never prints or replaces a password.
Invariant: a file is complete when it is there, what belongs together holds the same password, and a
second start changes nothing; it only adds what an older one had not made yet.

    python ops/make_secrets.py /run/rollstream redis 6379 [/run/observability]

The second folder is for those who watch: they get a user that may read the server's figures and
nothing of a run, and never the first folder.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path

ACL = "redis.acl"
URL = "redis_url"
WATCHING = "redis_exporter.json"
GRAFANA = "grafana_password"
_USERS = """\
user default off
user rollstream on >{password} ~rs:* ~rq:* &* +@all -@admin -@dangerous +info +keys +client|list
user health on nopass resetkeys resetchannels -@all +ping
"""
# Not `slowlog|get`: its entries show the beginning of what was written, prompts among it.
_WATCHER = """\
user metrics on >{password} resetkeys resetchannels -@all \
+info +ping +client|setname +slowlog|len +latency|latest
"""


def make(folder: Path, host: str, port: int) -> bool:
    """Write the users and the URL unless they are there; return whether they were written.

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


def make_watching(folder: Path, watching: Path, host: str, port: int) -> bool:
    """Write what Prometheus' exporter of Redis and Grafana read; return whether that was written.

    A server that runs already reads its users file again at its next start.
    """
    target = watching / WATCHING
    users = (folder / ACL).read_text().splitlines(keepends=True)
    if target.exists():
        # One folder may be older than the other, whose volume was removed.
        (password,) = set(json.loads(target.read_text()).values())
        if any(line.startswith(f"user metrics on >{password} ") for line in users):
            return False
    else:
        password = secrets.token_urlsafe(32)
    watching.mkdir(parents=True, exist_ok=True)
    kept = "".join(line for line in users if not line.startswith("user metrics "))
    _write(folder / ACL, kept + _WATCHER.format(password=password))
    if not (watching / GRAFANA).exists():
        _write(watching / GRAFANA, secrets.token_urlsafe(16))
    # redis_exporter looks its password up by the address, newer ones with the user's name in it.
    by_address = {f"redis://{user}{host}:{port}": password for user in ("metrics@", "")}
    _write(target, json.dumps(by_address) + "\n")
    return True


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    # The server and the workers run as different users, and only they mount this folder.
    partial.chmod(0o444)
    partial.replace(path)


if __name__ == "__main__":
    folder, host, port, *watching = sys.argv[1:]
    made = make(Path(folder), host, int(port))
    for place in watching:
        made |= make_watching(Path(folder), Path(place), host, int(port))
    what = "made what was missing" if made else "kept the passwords that are there"
    sys.stdout.write(f"{folder}: {what}\n")
