"""Rewards computed in a process of their own: jobs out through RQ, judgements in by BLPOP.

Owns the tokens that this worker waits for, and the one connection that reads them. Never runs a
judge. Invariant: `judge` returns or raises within its bound whatever happens to the job (lost,
expired, killed, answered twice), and a judgement that nobody waits for is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from typing import Any

import redis
import structlog

from rollstream.errors import RewardFault
from rollstream.link import OUTAGE
from rollstream.queue.connection import Reach, refuse_cluster

from ..bounded import in_thread
from .judges import MAX_ANSWER_CHARS, MAX_JUDGEMENT_BYTES, QUEUE, inbox_key

BLOCK_S = 0.5
"""Every blocking read is this short, so that closing never waits long."""
_SOCKET_TIMEOUT_S = 5.0
_RECONNECT_S = 0.25
PATIENCE_S = 600.0
"""How long a judgement waits for servers that are away or full: the sample is not to blame."""
_counter = itertools.count()
log = structlog.get_logger("worker")


class Isolated:
    """Asks the verifiers for judgements.

    A job waits in the queue at most as long as it may run, so the answer is due within twice
    `timeout_s`; RQ forgets the job by then, too. While a server is away, or its memory full, the
    sample waits: an attempt is charged for what the sample did, never for that.
    """

    def __init__(
        self,
        *,
        redis_url: str,
        rq_url: str | None,
        run: str,
        incarnation: str,
        timeout_s: float,
        ca: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        # Two scorers of one process must not take each other's judgements.
        self._inbox = f"{incarnation}.{next(_counter)}"
        self._key = inbox_key(run, self._inbox)
        self._run, self._timeout_s = run, timeout_s
        self._reader = Reach(redis_url, self._key, ca=ca).asyncio_client()
        self._jobs = Reach(rq_url or redis_url, "", ca=ca).blocking_client(
            socket_timeout=_SOCKET_TIMEOUT_S
        )
        self._jobs_key = "rq.url" if rq_url else "redis.url"
        self._queue: Any = None
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._tokens = itertools.count(1)
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._closing = False
        self._patience_s = patience_s
        self._outages = 0
        self._is_away = False
        self.num_strays = 0
        """Judgements that came for a token nobody waits for."""

    async def check(self) -> None:
        """Refuse a place for jobs that RQ cannot use; one that is away is waited for later.

        Raises:
            ConfigError: it is a cluster.
        """
        with contextlib.suppress(redis.RedisError, OSError):
            await in_thread(refuse_cluster, self._jobs, self._jobs_key)

    async def judge(self, name: str, answer: str, label: str) -> float:
        """Return the reward that the judge `name` gives.

        Raises:
            RewardFault: no verdict; retryable where the job was lost, not where the judge itself
                broke or hung on this answer (the same seed would give the same answer again).
        """
        if self._task is None:
            self._task = asyncio.create_task(self._read())
        limit = asyncio.get_running_loop().time() + self._patience_s
        while True:
            outages = self._outages
            try:
                return _reward_of(name, await self._ask(name, answer, label))
            except TimeoutError:
                if self._outages == outages:
                    raise RewardFault(
                        f"no judgement of {name} within {2 * self._timeout_s:g} s; is a verifier "
                        "running (python -m worker.rewards.verifier)?",
                        retryable=True,
                        detail="lost",
                    ) from None
                # A server was away meanwhile, and the job or its judgement went with it.
            except OUTAGE as error:
                self._say_away(error)
                if asyncio.get_running_loop().time() >= limit:
                    raise self._unreachable(error) from error
                await asyncio.sleep(_RECONNECT_S)
            except redis.RedisError as error:
                raise self._unreachable(error) from error

    async def _ask(self, name: str, answer: str, label: str) -> dict[str, Any]:
        """Return the judgement of one job.

        Raises:
            TimeoutError: there was none in time.
            redis.RedisError: the job could not be enqueued.
        """
        token = f"{self._inbox}-{next(self._tokens)}"
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        self._wanted.set()
        try:
            # Bounded by the socket's own timeouts.
            await in_thread(self._enqueue, name, token, answer, label)
            async with asyncio.timeout(2 * self._timeout_s):
                return await future
        finally:
            del self._waiting[token]

    def _say_away(self, error: BaseException) -> None:
        self._outages += 1
        if not self._is_away:
            self._is_away = True
            log.warning("judges_away", error=str(error))

    def _unreachable(self, error: BaseException) -> RewardFault:
        return RewardFault(
            f"the job queue of isolated rewards (rq.url) cannot be used: {error}",
            retryable=True,
            detail="unreachable",
        )

    def _enqueue(self, name: str, token: str, answer: str, label: str) -> None:
        from rq import Queue, Retry  # 0.2 s that only workers with isolated rewards pay

        if self._queue is None:
            self._queue = Queue(QUEUE, connection=self._jobs, serializer="json")
        seconds = math.ceil(self._timeout_s)
        self._queue.enqueue_call(
            name,
            kwargs={
                "run": self._run,
                "inbox": self._inbox,
                "token": token,
                "answer": answer[: MAX_ANSWER_CHARS + 1],
                "label": label,
                "timeout_s": self._timeout_s,
            },
            job_id=token.replace(".", "_"),
            description=name,  # its default is the arguments, which RQ logs
            # Behind the verifier's own kill at `timeout_s`, and never what ends a judge.
            timeout=seconds + 10,
            ttl=seconds,
            result_ttl=0,
            failure_ttl=60,
            retry=Retry(max=1),
        )

    async def _read(self) -> None:
        """Read judgements while anybody waits for one."""
        while not self._closing:
            await self._wanted.wait()
            try:
                popped = await self._reader.blpop([self._key], timeout=BLOCK_S)
            except (redis.RedisError, OSError) as error:
                self._say_away(error)
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._is_away = False
            if popped is not None:
                self._deliver(popped[1])
            if not self._waiting and not self._closing:
                self._wanted.clear()

    def _deliver(self, raw: bytes | str) -> None:
        future = None
        if len(raw) <= MAX_JUDGEMENT_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                answered = json.loads(raw)
                if isinstance(answered, dict):
                    future = self._waiting.get(str(answered.get("token")))
        if future is None or future.done():
            self.num_strays += 1
        else:
            future.set_result(answered)

    async def aclose(self) -> None:
        """Stop reading and close both connections."""
        # Not by cancelling alone: on Python 3.11 `wait_for` inside redis-py can swallow that.
        self._closing = True
        self._wanted.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._reader.aclose()
        await in_thread(self._jobs.close)


def _reward_of(name: str, answered: dict[str, Any]) -> float:
    reward = answered.get("reward")
    if isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward):
        return float(reward)
    detail = str(answered.get("detail", "invalid"))
    raise RewardFault(
        f"{name} gave no verdict ({detail}): {answered.get('error', '')}",
        retryable=detail == "crashed",
        detail=detail if detail in ("raised", "timeout", "crashed") else "invalid",
    )
