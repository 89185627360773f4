"""Where results go: the lists that workers read, in the Redis of their run.

Owns the connections. Never reads. Invariant: a list that nobody reads any more expires.
"""

from __future__ import annotations

from collections import OrderedDict

import redis

from rollstream.queue.connection import Reach

from .messages import inbox_key

TTL_S = 600
_SOCKET_TIMEOUT_S = 5.0
_MAX_RUNS = 8
"""Connections that are kept, one per run."""


class Inboxes:
    """Pushes results to the lists that workers read; used after the fork only."""

    def __init__(self, url: str, ca: str | None = None) -> None:
        self._url, self._ca = url, ca
        self._clients: OrderedDict[str, redis.Redis] = OrderedDict()

    def push(self, run: str, inbox: str, message: bytes) -> None:
        """Append one message, and let the list expire where nobody reads it.

        Raises:
            redis.RedisError: it could not be sent.
            ValueError: one of the names is not such a name.
        """
        key = inbox_key(run, inbox)
        pipeline = self._client(run, key).pipeline(transaction=False)
        pipeline.rpush(key, message)
        pipeline.expire(key, TTL_S)
        pipeline.execute()

    def _client(self, run: str, key: str) -> redis.Redis:
        client = self._clients.get(run)
        if client is None:
            # All keys of a run lie in one slot of a cluster, so one of them finds its server.
            reach = Reach(self._url, key, ca=self._ca)
            client = self._clients[run] = reach.blocking_client(socket_timeout=_SOCKET_TIMEOUT_S)
        self._clients.move_to_end(run)
        if len(self._clients) > _MAX_RUNS:
            self._clients.popitem(last=False)[1].close()
        return client
