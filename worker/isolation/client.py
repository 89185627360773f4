"""What a worker asks of the verifiers: jobs out through RQ, results in by BLPOP.

Owns the tokens that this worker waits for, and the one connection that reads them. Never runs a
job. Invariant: `call` returns or raises within its bound whatever happens to the job (lost,
expired, killed, answered twice), and a result that nobody waits for is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

import redis
import structlog

from rollstream.link import OUTAGE
from rollstream.queue.connection import Reach, refuse_cluster

from ..bounded import Threads
from .messages import MAX_PAYLOAD_BYTES, MAX_RESULT_BYTES, QUEUE, inbox_key

BLOCK_S = 0.5
"""Every blocking read is this short, so that closing never waits long."""
_SOCKET_TIMEOUT_S = 5.0
_RECONNECT_S = 0.25
_QUIET_READS = 6
"""Reads in a row without a result after which a worker that waits looks for verifiers: 3 s."""
NOBODY = (
    "no verifier runs here: rewards and tools that run isolated get no result and fail as lost; "
    "start one (python -m worker.isolation.verifier) with the same redis.url and rq.url"
)
_SETTLE_S = 0.5
"""Behind an outage, results that were told meanwhile come first."""
PATIENCE_S = 600.0
"""How long a job waits for servers that are away or full: the sample is not to blame."""
DETAILS = ("raised", "timeout", "crashed", "lost", "unreachable", "too_large", "invalid")
_THREADS = Threads(8, "isolated-jobs")
"""Their own: while the place for jobs does not answer, each is held for seconds."""
_RETRYABLE = ("crashed", "lost", "unreachable")
_counter = itertools.count()
log = structlog.get_logger("worker")


class IsolatedFault(Exception):
    """A job has no result.

    Attributes:
        detail: `raised`, `timeout`, `too_large` (its result) or `invalid` (no such job, no JSON):
            the same input ends so again. `crashed` (its process died, twice), `lost` (nobody
            answered in time) or `unreachable` (no queue): another try may succeed.
        message: for people.
    """

    def __init__(self, message: str, detail: str) -> None:
        super().__init__(message, detail)
        self.message = message
        self.detail = detail if detail in DETAILS else "invalid"

    @property
    def retryable(self) -> bool:
        """Whether another try may succeed."""
        return self.detail in _RETRYABLE

    def __str__(self) -> str:
        return self.message


class Isolated:
    """Asks the verifiers to run jobs. One is enough for all of a worker's rewards and tools.

    A job waits in the queue at most as long as it may run, so the answer is due within twice its
    timeout; RQ forgets the job by then, too. While a server is away, or its memory full, the
    caller waits: an attempt is charged for what the sample did, never for that.

    Args:
        redis_url: of the run; results come back through it.
        rq_url: where jobs go; None is `redis_url`.
        run: its name.
        incarnation: of this worker process; part of the inbox of results.
        ca: CA certificate for `rediss://`.
        patience_s: how long one call waits for servers that are away.
    """

    def __init__(
        self,
        *,
        redis_url: str,
        rq_url: str | None,
        run: str,
        incarnation: str,
        ca: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        # Two of one process must not take each other's results.
        self._inbox = f"{incarnation}.{next(_counter)}"
        self._key = inbox_key(run, self._inbox)
        self._run = run
        self._reader = Reach(redis_url, self._key, ca=ca).asyncio_client()
        self._jobs = Reach(rq_url or redis_url, "", ca=ca).blocking_client(
            socket_timeout=_SOCKET_TIMEOUT_S
        )
        self._jobs_key = "rq.url" if rq_url else "redis.url"
        self._queue: Any = None
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._tokens = itertools.count(1)
        self._sent: set[str] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._closing = False
        self._patience_s = patience_s
        self._outages = 0
        self._is_away = self._is_unserved = False
        self.num_strays = 0
        """Results that came for a token nobody waits for."""

    async def check(self) -> None:
        """Refuse a place for jobs that RQ cannot use, and say where no verifier is there yet.

        One that is away is waited for later.

        Raises:
            ConfigError: it is a cluster.
        """
        with contextlib.suppress(redis.RedisError, OSError):
            await _in_thread(refuse_cluster, self._jobs, self._jobs_key)
        await self._look_for_verifiers()

    async def call(self, job: str, payload: dict[str, Any], *, timeout_s: float) -> Any:
        """Return what the job returns for `payload`.

        Cancelled, it forgets the job: one that had not begun is not run, and the result of one
        that had is dropped.

        Args:
            job: an entry of the verifier's table.
            payload: plain JSON, at most `MAX_PAYLOAD_BYTES` of it.
            timeout_s: how long it may run before it is killed, and how long it may wait before.

        Raises:
            IsolatedFault: there is no result.
            ValueError: the payload is no JSON, or too large.
        """
        if self._task is None:
            self._task = asyncio.create_task(self._read())
        limit = asyncio.get_running_loop().time() + self._patience_s
        while True:
            outages = self._outages
            try:
                return _value_of(job, await self._ask(job, payload, timeout_s))
            except TimeoutError:
                if self._outages == outages or asyncio.get_running_loop().time() >= limit:
                    raise IsolatedFault(
                        f"no result of {job} within {2 * timeout_s:g} s; is a verifier running "
                        "(python -m worker.isolation.verifier)?",
                        "lost",
                    ) from None
                # A server was away meanwhile, and the job or its result went with it.
            except OUTAGE as error:
                self._say_away(error)
                if asyncio.get_running_loop().time() >= limit:
                    raise _unreachable(error) from error
                await asyncio.sleep(_RECONNECT_S)
            except redis.RedisError as error:
                raise _unreachable(error) from error

    async def _ask(self, job: str, payload: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the message that one job ends with.

        Raises:
            TimeoutError: there was none in time.
            redis.RedisError: the job could not be enqueued.
            ValueError: the payload cannot be sent.
        """
        token = f"{self._inbox}-{next(self._tokens)}"
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        self._wanted.set()
        # Bounded by the socket's own timeouts.
        sending = asyncio.create_task(_in_thread(self._enqueue, job, token, payload, timeout_s))
        try:
            await asyncio.shield(sending)
            self._sent.add(token)
            async with asyncio.timeout(2 * timeout_s):
                return await future
        except (asyncio.CancelledError, TimeoutError):
            self._forget(token, sending)
            raise
        finally:
            del self._waiting[token]
            self._sent.discard(token)

    def _forget(self, token: str, sending: asyncio.Task[None]) -> None:
        """Take back a job that has not begun, on the side."""

        async def forget() -> None:
            # Its thread cannot be cancelled; an error of it concerns nobody any more.
            await asyncio.gather(sending, return_exceptions=True)
            await _in_thread(self._take_back, token)

        self._aside(forget())

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _give_up_lost(self) -> None:
        """Behind an outage, ask anew for jobs that went with the server, and not at their timeout.

        A job that is not there either ended, and its result is on its way, or is lost.
        """
        sent = {token: self._waiting[token] for token in self._sent & self._waiting.keys()}
        await asyncio.sleep(_SETTLE_S)
        with contextlib.suppress(redis.RedisError, OSError):  # away again
            lost = await _in_thread(self._not_there, list(sent))
            await asyncio.sleep(_SETTLE_S)
            for token in lost:
                if not sent[token].done():
                    sent[token].set_exception(TimeoutError())

    def _not_there(self, tokens: list[str]) -> list[str]:
        pipeline = self._jobs.pipeline(transaction=False)
        for token in tokens:
            pipeline.exists(f"rq:job:{_job_id(token)}")
        there = pipeline.execute() if tokens else []
        return [token for token, found in zip(tokens, there, strict=True) if not found]

    def _say_away(self, error: BaseException) -> None:
        self._outages += 1
        if not self._is_away:
            self._is_away = True
            log.warning("isolated_jobs_away", error=str(error))

    async def _look_for_verifiers(self) -> None:
        """Say once, until a result comes, that nobody serves: samples would wait for minutes."""
        with contextlib.suppress(redis.RedisError, OSError):  # an outage is said elsewhere
            is_served = self._is_unserved or await _in_thread(self._is_served)
            if not is_served and not self._is_unserved:
                self._is_unserved = True
                log.warning("no_verifier", queue=QUEUE, place=self._jobs_key, message=NOBODY)

    def _is_served(self) -> bool:
        # What a server that was killed left in the set has a key of its own that expires.
        servers = self._jobs.smembers(f"rq:workers:{QUEUE}")
        return bool(servers) and self._jobs.exists(*servers) > 0

    def _take_back(self, token: str) -> None:
        with contextlib.suppress(redis.RedisError, OSError):  # its time to live ends it then
            # Where a verifier has it already, it is the verifier's to clean up behind it.
            if self._jobs.lrem(f"rq:queue:{QUEUE}", 1, _job_id(token)):
                self._jobs.delete(f"rq:job:{_job_id(token)}")

    def _enqueue(self, job: str, token: str, payload: dict[str, Any], timeout_s: float) -> None:
        from rq import Queue  # 0.2 s that only workers with isolated jobs pay

        _check(payload)
        if self._queue is None:
            self._queue = Queue(QUEUE, connection=self._jobs, serializer="json")
        seconds = math.ceil(timeout_s)
        self._queue.enqueue_call(
            job,
            kwargs={
                "run": self._run,
                "inbox": self._inbox,
                "token": token,
                "payload": payload,
                "timeout_s": timeout_s,
            },
            job_id=_job_id(token),
            description=job,  # its default is the arguments, which RQ logs
            # Behind the verifier's own kill at `timeout_s`, and never what ends a job.
            timeout=seconds + 10,
            ttl=seconds,
            result_ttl=0,
            failure_ttl=60,
        )

    async def _read(self) -> None:
        """Read results while anybody waits for one."""
        quiet = 0
        while not self._closing:
            await self._wanted.wait()
            try:
                popped = await self._reader.blpop([self._key], timeout=BLOCK_S)
            except (redis.RedisError, OSError) as error:
                self._say_away(error)
                await asyncio.sleep(_RECONNECT_S)
                continue
            if self._is_away:
                self._is_away = False
                self._aside(self._give_up_lost())
            quiet = 0 if popped is not None else quiet + 1
            if popped is not None:
                self._is_unserved = False
                self._deliver(popped[1])
            elif quiet % _QUIET_READS == 0 and self._waiting:
                self._aside(self._look_for_verifiers())
            if not self._waiting and not self._closing:
                self._wanted.clear()

    def _deliver(self, raw: bytes | str) -> None:
        future = None
        if len(raw) <= MAX_RESULT_BYTES:
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
        if self._beside:
            _, pending = await asyncio.wait(self._beside, timeout=_SOCKET_TIMEOUT_S)
            for task in pending:
                task.cancel()
        await self._reader.aclose()
        await _in_thread(self._jobs.close)


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await _THREADS.submit(functools.partial(function, *args))


def _job_id(token: str) -> str:
    return token.replace(".", "_")


def _check(payload: dict[str, Any]) -> None:
    try:
        size = len(json.dumps(payload, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the payload of a job must be JSON: {error}") from None
    if size > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"the payload of a job is {size} bytes, above the limit of {MAX_PAYLOAD_BYTES}"
        )


def _unreachable(error: BaseException) -> IsolatedFault:
    text = f"the queue of isolated jobs (rq.url) cannot be used: {error}"
    return IsolatedFault(text, "unreachable")


def _value_of(job: str, answered: dict[str, Any]) -> Any:
    if "value" in answered:
        return answered["value"]
    detail = str(answered.get("detail", "invalid"))
    raise IsolatedFault(f"{job} gave no result ({detail}): {answered.get('error', '')}", detail)
