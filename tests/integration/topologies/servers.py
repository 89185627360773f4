"""Sentinels and clusters of real servers, as plain processes of the one binary there is.

Owns their start, what they are told, and their end. Never touches a server that it did not start.
Invariant: `with` returns once the topology agrees on itself, and leaves no process and no folder,
not even where it never came to agree.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from examples.devserver import DevServer, die_with_parent, free_port, server_binary
from tests.backstage import wait_until

MASTER = "mymaster"
DOWN_AFTER_MS = 600
_HURRY = (
    "info-period", 300, "ping-period", 100, "ask-period", 100, "publish-period", 200,
    "min-link-reconnect-period", 200, "election-timeout", 1000,
)  # fmt: skip
SLOTS = 16384


@contextlib.contextmanager
def told(port: int, **options: Any) -> Iterator[Any]:
    """Yield a client of one server, for a test to tell it things; answers are as on the wire."""
    client = redis.Redis(port=port, protocol=2, **options)
    try:
        yield client
    finally:
        client.close()


def role_of(server: DevServer) -> str:
    """Return `master` or `slave`; empty while it does not answer."""
    try:
        with told(server.port) as client:
            return str(client.execute_command("ROLE")[0].decode())
    except redis.RedisError:
        return ""


def answers(port: int, **options: Any) -> bool:
    """Return whether a server or a sentinel is there."""
    try:
        with told(port, **options) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def is_linked(server: DevServer) -> bool:
    """Return whether a replica follows its master."""
    with told(server.port) as client:
        return bool(client.info("replication").get("master_link_status") == "up")


def freeze(server: DevServer) -> None:
    """Stop its process as a hung machine would (SIGSTOP)."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)


def thaw(server: DevServer) -> None:
    """Let it go on."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGCONT)


class Sentinel:
    """One sentinel process."""

    def __init__(self, master_port: int, quorum: int, *lines: str) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="rollstream-sentinel-"))
        self._file = self._folder / "sentinel.conf"
        self._file.write_text(
            "\n".join([
                f"port {self.port}",
                "bind 127.0.0.1",
                f"dir {self._folder}",
                f"sentinel monitor {MASTER} 127.0.0.1 {master_port} {quorum}",
                f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {MASTER} 1000",
                *lines,
            ])
        )  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [server_binary(), str(self._file), "--sentinel"],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def hurry(self) -> None:
        """Shorten its periods: seconds of them are made for networks."""
        with told(self.port) as client:
            client.execute_command("SENTINEL DEBUG", *_HURRY)

    def knows(self, num_sentinels: int, num_replicas: int) -> bool:
        """Whether it has found the others."""
        try:
            with told(self.port) as client:
                found = client.execute_command("SENTINEL MASTER", MASTER)
        except redis.RedisError:
            return False
        return (
            found["num-other-sentinels"] >= num_sentinels - 1
            and found["num-slaves"] >= num_replicas
            and found["flags"] == "master"
        )

    def names(self, port: int) -> bool:
        """Whether it says that the master is there."""
        with told(self.port) as client:
            found = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", MASTER)
        return int(found[1]) == port

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class Watched:
    """A master with a replica, and three sentinels that fail it over.

    Attributes:
        servers: the first one starts as the master.
        url: what a client of ours is given.
    """

    def __init__(
        self, *options: str, sentinels: int = 3, sentinel_lines: Sequence[str] = ()
    ) -> None:
        flags = ("--repl-diskless-sync-delay", "0", *options)
        self.servers = [DevServer(*flags, aof=True), DevServer(*flags, aof=True)]
        self.sentinels: list[Sentinel] = []
        self._num, self._lines = sentinels, sentinel_lines

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{MASTER}"

    @property
    def master(self) -> DevServer:
        """The one that says it is the master."""
        return next(server for server in self.servers if role_of(server) == "master")

    def __enter__(self) -> Watched:
        with contextlib.ExitStack() as undo:
            undo.push(self.__exit__)
            self._start()
            undo.pop_all()
        return self

    def _start(self) -> None:
        first, second = self.servers
        first.start()
        second.start()
        with told(second.port) as client:
            client.replicaof("127.0.0.1", first.port)
        wait_until(lambda: is_linked(second))
        for _ in range(self._num):
            self.sentinels.append(Sentinel(first.port, self._num // 2 + 1, *self._lines))
        for sentinel in self.sentinels:
            wait_until(lambda: answers(sentinel.port))  # noqa: B023 - called at once
            sentinel.hurry()
        wait_until(lambda: all(one.knows(self._num, 1) for one in self.sentinels))

    def heal(self) -> None:
        """Start what is dead, wake what is frozen, and wait until there is a replica again."""
        for server in self.servers:
            if server.process is not None and server.process.poll() is not None:
                server.start()
            else:
                thaw(server)
        wait_until(lambda: sorted(map(role_of, self.servers)) == ["master", "slave"])
        (replica,) = (server for server in self.servers if role_of(server) == "slave")
        wait_until(lambda: is_linked(replica))
        # No failover begins before the last one is forgotten by all.
        wait_until(lambda: all(one.knows(self._num, 1) for one in self.sentinels))

    def wait_failed_over(self, before: DevServer) -> DevServer:
        """Wait for another master than `before`, which all sentinels name, and return it."""
        (other,) = (server for server in self.servers if server is not before)
        wait_until(lambda: role_of(other) == "master")
        # Until then one of them sends clients to the old one, which may be back by then.
        wait_until(lambda: all(one.names(other.port) for one in self.sentinels))
        return other

    def __exit__(self, *_: object) -> None:
        for sentinel in self.sentinels:
            sentinel.stop()
        for server in self.servers:
            server.stop()


class Cluster:
    """Three masters that own a third of the slots each.

    Attributes:
        servers: the masters.
    """

    def __init__(self, *options: str) -> None:
        flags = (
            "--cluster-enabled", "yes", "--cluster-node-timeout", "2000",
            "--cluster-require-full-coverage", "no", *options,
        )  # fmt: skip
        self.servers = [DevServer(*flags, aof=True, port=_cluster_port()) for _ in range(3)]

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as undo:
            undo.push(self.__exit__)
            self._start()
            undo.pop_all()
        return self

    def _start(self) -> None:
        bounds = [0, 5461, 10923, SLOTS]
        for number, server in enumerate(self.servers):
            server.start()
            with told(server.port) as client:
                client.execute_command(
                    "CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1
                )
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        with told(self.servers[0].port) as client:
            for other in self.servers[1:]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", other.port)
        wait_until(lambda: all(map(self._agrees, self.servers)))

    @staticmethod
    def _agrees(server: DevServer) -> bool:
        with told(server.port) as client:
            info = client.execute_command("CLUSTER INFO")
            nodes = client.execute_command("CLUSTER SLOTS")
        return info["cluster_state"] == "ok" and len(nodes) == 3

    def owner(self, key: str) -> DevServer:
        """Return who owns a key's slot, as each of them says of itself."""
        return next(server for server in self.servers if self._owns(server, key_slot(key.encode())))

    def others(self, key: str) -> list[DevServer]:
        """Return the masters that do not own it."""
        owner = self.owner(key)
        return [server for server in self.servers if server is not owner]

    @staticmethod
    def _owns(server: DevServer, slot: int) -> bool:
        try:
            with told(server.port) as client:
                client.execute_command("GET", _key_in(slot))
        except redis.RedisError:
            return False
        return True

    def begin_move(self, key: str, target: DevServer) -> None:
        """Mark the slot of `key` as on its way to `target`."""
        slot, source = key_slot(key.encode()), self.owner(key)
        with told(target.port) as client:
            client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", _id_of(source))
        with told(source.port) as client:
            client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", _id_of(target))

    def end_move(self, key: str, source: DevServer, target: DevServer) -> None:
        """Move the keys of a slot that was marked, and its ownership."""
        slot = key_slot(key.encode())
        with told(source.port) as client:
            while keys := client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                client.execute_command(
                    "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys
                )
        for server in (target, source, *self.servers):
            with told(server.port) as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", _id_of(target))

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.stop()


def _id_of(server: DevServer) -> str:
    with told(server.port) as client:
        return str(client.execute_command("CLUSTER MYID").decode())


def _key_in(slot: int) -> str:
    """Return a key of a slot."""
    return next(key for j in range(10**6) if key_slot((key := f"probe-{j}").encode()) == slot)


def _cluster_port() -> int:
    """Return a free port whose cluster bus (10,000 above) is free too."""
    for _ in range(100):
        port = free_port()
        if port + 10000 > 65535:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port + 10000))
            return port
    raise RuntimeError("no free pair of ports")
