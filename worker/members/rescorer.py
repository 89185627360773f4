"""A share of finished samples, scored again in the background by the engines that sampled them.

Owns which samples, the short queue of them, and what a difference leads to: figures, a log line, a
count. Never delays a rollout and never changes a sample: it was delivered already. Invariant: at
most `QUEUE_SAMPLES` samples wait; one that finds no room is dropped and counted, and each chosen
sample ends in exactly one outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import structlog

from rollstream import rescore
from rollstream.errors import EngineFault
from rollstream.group import Trajectory
from rollstream.sample import Sample

from ..bounded import in_thread
from ..telemetry.catalog import RESCORE_OUTCOMES

QUEUE_SAMPLES = 32
"""Samples that wait to be scored; of 32k tokens each they are about 10 MB."""
MEAN_LIMIT = 0.05
"""Nats: a sample whose mean difference is above it is a mismatch. A mean, since the few worst
tokens of a sample differ by more between a prefill and a decode in bf16, and a wrong token, version
or temperature moves all of them."""
_UNIT = 2.0**-64

log = structlog.get_logger("worker")


class ScoringEngine(Protocol):
    """What scores: the pool of engines."""

    async def score(self, body: bytes, *, routing_key: str) -> bytes:
        """Return the answer to a request that samples nothing.

        Raises:
            EngineFault: no engine answered with 200.
        """
        ...


class Rescorer:
    """Takes samples as they finish, and scores them one behind the other.

    Attributes:
        outcomes: chosen samples by what became of them, as running totals.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        fraction: float,
        *,
        version: Callable[[], int],
        run_seed: int,
        differences: Callable[[Iterable[float]], None],
        mismatch: Callable[[], None],
    ) -> None:
        """Begin with nothing to do.

        Args:
            engine: that scores.
            fraction: of samples, 0 to 1.
            version: the weight version that this worker knows as current.
            run_seed: which samples are chosen follows from it.
            differences: takes the absolute differences of one sample.
            mismatch: is told of a sample whose mean difference is above `MEAN_LIMIT`.
        """
        self.outcomes: dict[str, int] = dict.fromkeys(RESCORE_OUTCOMES, 0)
        self._engine, self._fraction, self._version = engine, fraction, version
        self._run_seed, self._differences, self._mismatch = run_seed, differences, mismatch
        self._waiting: deque[Sample] = deque()
        self._came = asyncio.Event()

    def offer(self, trajectory: Trajectory) -> None:
        """Take the leaves of a finished trajectory that are chosen; costs a hash."""
        for sample in trajectory if isinstance(trajectory, list) else [trajectory]:
            if not self._is_chosen(sample) or not rescore.can_score(sample):
                continue
            if len(self._waiting) >= QUEUE_SAMPLES:
                self.outcomes["dropped"] += 1
                continue
            self._waiting.append(sample)
            self._came.set()

    def _is_chosen(self, sample: Sample) -> bool:
        """Return the same for a member however often it is tried."""
        if self._fraction <= 0.0:
            return False
        text = f"rescore:{self._run_seed}:{sample.index}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest, "little") * _UNIT < self._fraction

    async def run(self) -> None:
        """Score what comes, for ever."""
        while True:
            while self._waiting:
                await self._score(self._waiting.popleft())
            self._came.clear()
            await self._came.wait()

    async def _score(self, sample: Sample) -> None:
        try:
            body = await in_thread(_body_of, sample)
            raw = await self._engine.score(body, routing_key=sample.routing_key or "")
            found = await in_thread(_compare, sample, raw, self._version())
        except (EngineFault, ValueError) as error:
            self._failed(sample, str(error))
        except Exception as error:  # noqa: BLE001 - a task's runner: a look must not end a worker
            self._failed(sample, f"{type(error).__name__}: {error}")
        else:
            self._judge(sample, found)

    def _failed(self, sample: Sample, why: str) -> None:
        self.outcomes["failed"] += 1
        log.warning(
            "rescore_failed", group_index=sample.group_index, member=sample.member, error=why
        )

    def _judge(self, sample: Sample, found: rescore.Comparison) -> None:
        differences = found.counted()
        if not len(differences):
            self.outcomes["not_comparable"] += 1
            return
        self.outcomes["compared"] += 1
        self._differences(differences.tolist())
        mean = float(differences.mean())
        if mean <= MEAN_LIMIT:
            return
        self._mismatch()
        first = rescore.summarise([found]).first
        log.error(
            "token_mismatch",
            kind="log_prob",
            group_index=sample.group_index,
            member=sample.member,
            position=None if first is None else first.position,
            token=None if first is None else first.id,
            sampled=None if first is None else first.sampled,
            scored=None if first is None else first.scored,
            mean_difference=mean,
            version=found.served,
            engines=sorted({call.engine for call in sample.calls}),
            message="a prefill of the same weights gives other log-probs; the sample was delivered",
        )


def _body_of(sample: Sample) -> bytes:
    return msgspec.json.encode(rescore.request_of(sample))


def _compare(sample: Sample, raw: bytes, current: int) -> rescore.Comparison:
    reply = msgspec.json.decode(raw)
    if not isinstance(reply, dict):
        raise ValueError("the engine's answer is no JSON object")
    scored = rescore.scores_of(sample, reply)
    label = reply["meta_info"].get("weight_version")
    served = rescore.served_version(label, current=current)
    return rescore.compare(sample, scored, served=served)
