"""`AsyncGroupStream`: the same stream for a trainer that lives on an event loop.

Owns two threads: one waits for batches, one does everything else; what takes long (an update, an
evaluation) has one of its own. Never decides anything: every method is `GroupStream`'s. Invariant:
a task that is cancelled while it waits loses no group; the wait ends within half a second, and what
it was about to hand out goes back to the front. One that is cancelled in an update resumes the run.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from rollstream.batch import Batch
from rollstream.errors import StreamError
from rollstream.evaluation.eval_result import EvalResult
from rollstream.evaluation.evaluate import EvalPrompt
from rollstream.queue.reads import RunInfo
from rollstream.runs import Interrupted
from rollstream.stream import GroupStream, check_bounds
from rollstream.trainer.control import PauseMode
from rollstream.trainer.steering import ACK_TIMEOUT_S
from rollstream.updates.weights import NOTHING_SAMPLED, Updating, WeightUpdate

T = TypeVar("T")


class AsyncGroupStream:
    """Finished groups of one run, in batches, for one trainer; see `GroupStream`.

    Ack with `await stream.ack(batch)`: `batch.ack()` would block the loop.

    Example:
        >>> async with await AsyncGroupStream.connect("redis://localhost", run="demo") as stream:
        ...     async for batch in stream.batches(groups=32):
        ...         await train(batch.to_arrays(pad_id=0))
        ...         await stream.ack(batch)
    """

    def __init__(self, stream: GroupStream) -> None:
        """Use `connect`."""
        self._stream = stream
        self._waiting = ThreadPoolExecutor(1, "rollstream-wait")
        self._doing = ThreadPoolExecutor(1, "rollstream-call")
        self._asides: set[threading.Event] = set()
        """Set to end what goes on beside the two threads."""
        self._blocks: set[asyncio.Task[Any] | None] = set()
        """Tasks that are in the block of an update."""
        self._closed = False

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        run: str,
        state: Mapping[str, Any] | Literal["fresh"] | None = None,
        connect_timeout_s: float = 30.0,
        ca: str | None = None,
        text: bool = False,
        dump_dir: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Become the trainer of a run, as `GroupStream.connect` does."""
        interrupt = threading.Event()
        connecting = functools.partial(
            GroupStream.connect,
            url,
            run=run,
            state=state,
            connect_timeout_s=connect_timeout_s,
            ca=ca,
            text=text,
            dump_dir=dump_dir,
            interrupt=interrupt,
        )
        starter = ThreadPoolExecutor(1, "rollstream-connect")
        try:
            future = starter.submit(connecting)
            try:
                return cls(await asyncio.wrap_future(future))
            except asyncio.CancelledError:
                interrupt.set()
                future.add_done_callback(_close_unwanted)
                raise
        finally:
            starter.shutdown(wait=False)

    @classmethod
    async def from_dump(
        cls,
        dump_dir: str | os.PathLike[str],
        *,
        state: Mapping[str, Any] | Literal["fresh"] | None = None,
        epochs: int = 1,
        text: bool = True,
    ) -> Self:
        """Return a stream of the groups in a dump, as `GroupStream.from_dump` does."""
        opening = functools.partial(
            GroupStream.from_dump, dump_dir, state=state, epochs=epochs, text=text
        )
        return cls(await asyncio.to_thread(opening))

    async def aclose(self) -> None:
        """Close every connection and end the threads; unacked groups stay for the next trainer."""
        if self._closed:
            return
        for interrupt in self._asides:
            interrupt.set()
        closing = self._doing.submit(self._stream.close)
        self._closed = True
        try:
            await asyncio.wrap_future(closing)
        finally:
            self._waiting.shutdown(wait=False)
            self._doing.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def info(self) -> RunInfo:
        """What the run is, as of the last look."""
        return self._stream.info

    @property
    def version(self) -> int:
        """The weight version that this trainer asserts."""
        return self._stream.version

    async def batches(self, groups: int = 32, timeout_s: float = 600.0) -> AsyncIterator[Batch]:
        """Yield batches until the run is over; ends and errors are those of `GroupStream`."""
        check_bounds(groups, timeout_s)
        while (batch := await self.next_batch(groups, timeout_s)) is not None:
            yield batch

    async def next_batch(self, groups: int, timeout_s: float) -> Batch | None:
        """Return the next batch, or None where the run is over."""
        self._refuse_if_closed()
        handover = _Handover(self._stream)
        try:
            return await asyncio.wrap_future(self._waiting.submit(handover.wait, groups, timeout_s))
        except asyncio.CancelledError:
            batch = handover.refuse()
            if batch is not None and not self._closed:
                # By the thread that waits, so that it is back before the next wait begins.
                self._waiting.submit(self._stream.take_back, batch)
            raise

    async def ack(self, batch: Batch, timeout_s: float = ACK_TIMEOUT_S) -> None:
        """Say that a batch was trained on; a repeat does nothing."""
        await self._do(lambda: self._stream.ack(batch, timeout_s))

    async def state_dict(self, timeout_s: float = ACK_TIMEOUT_S) -> dict[str, Any]:
        """Return what `connect(state=…)` needs to go on from here."""
        return await self._do(lambda: self._stream.state_dict(timeout_s))

    async def set_weight_version(self, version: int, label: str | None = None) -> None:
        """Say which policy the engines serve from now on."""
        await self._do(lambda: self._stream.set_weight_version(version, label))

    def updating_weights(
        self,
        version: int,
        mode: PauseMode | None = None,
        *,
        label: str | None = None,
        wait_idle: bool | None = None,
        deadline_s: float = 600.0,
        confirm_s: float = 30.0,
        ack: Batch | Sequence[Batch] | None = None,
        post: bool = True,
    ) -> AsyncUpdating:
        """Pause the run for the block (`async with`), in which you push weights; then resume."""
        self._refuse_if_closed()
        updating = self._stream.updating_weights(
            version,
            mode,
            label=label,
            wait_idle=wait_idle,
            deadline_s=deadline_s,
            confirm_s=confirm_s,
            ack=ack,
            post=post,
        )
        return AsyncUpdating(updating, self._blocks)

    async def engines(self) -> list[str]:
        """Return the root URLs of the engines."""
        return await self._do(self._stream.engines)

    async def set_engines(self, urls: Sequence[str] | None) -> None:
        """Name the engines for every worker, in place of its own configuration."""
        await self._do(lambda: self._stream.set_engines(urls))

    async def pause(
        self,
        mode: PauseMode = "keep",
        deadline_s: float = 0.0,
        *,
        timeout_s: float = ACK_TIMEOUT_S,
    ) -> None:
        """Have no sample started and no call made until `resume`."""
        await self._do(lambda: self._stream.pause(mode, deadline_s, timeout_s=timeout_s))

    async def resume(self, timeout_s: float = ACK_TIMEOUT_S) -> None:
        """End a pause; does nothing where there is none."""
        await self._do(lambda: self._stream.resume(timeout_s))

    async def drain(self, timeout_s: float = 600.0) -> None:
        """Pause the run, and return once no engine has a call of it."""
        await self._aside(lambda interrupt: self._stream.drain(timeout_s, interrupt))

    async def evaluate(
        self,
        name: str,
        prompts: Sequence[EvalPrompt],
        n: int = 1,
        sampling: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        env: str | None = None,
    ) -> EvalResult:
        """Sample prompts to measure the policy, while other tasks go on to train."""
        if asyncio.current_task() in self._blocks:
            raise RuntimeError(NOTHING_SAMPLED)
        return await self._aside(
            lambda interrupt: self._stream.evaluate(
                name, prompts, n, sampling, timeout_s, env, interrupt
            )
        )

    async def withdraw(self, group_index: int, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Drop a live group as `withdrawn`; whether there was one to drop."""
        return await self._do(lambda: self._stream.withdraw(group_index, timeout_s))

    async def requeue(self, group_index: int, timeout_s: float = ACK_TIMEOUT_S) -> bool:
        """Run a live group again from its prompt; whether it does."""
        return await self._do(lambda: self._stream.requeue(group_index, timeout_s))

    async def abort_run(self, reason: str = "", timeout_s: float = 30.0) -> None:
        """End the run: live groups are dropped as `run_aborted`."""
        await self._do(lambda: self._stream.abort_run(reason, timeout_s))

    async def metrics(self) -> dict[str, float]:
        """Return figures of the run and of this stream for a tracker."""
        return await self._do(self._stream.metrics)

    async def _do(self, action: Callable[[], T]) -> T:
        self._refuse_if_closed()
        # Shielded by the thread: a cancelled caller leaves the call to its end, which may repeat.
        return await asyncio.wrap_future(self._doing.submit(action))

    async def _aside(self, action: Callable[[threading.Event], T]) -> T:
        """Run what takes long in a thread of its own; a cancelled caller ends it soon."""
        self._refuse_if_closed()
        interrupt, thread = threading.Event(), ThreadPoolExecutor(1, "rollstream-aside")
        self._asides.add(interrupt)
        try:
            return await asyncio.wrap_future(thread.submit(action, interrupt))
        except Interrupted:
            raise StreamError("the stream was closed") from None
        except asyncio.CancelledError:
            interrupt.set()
            raise
        finally:
            self._asides.discard(interrupt)
            thread.shutdown(wait=False)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StreamError("the stream was closed")


class AsyncUpdating:
    """One update of the weights, as an asynchronous context manager."""

    def __init__(self, updating: Updating, blocks: set[asyncio.Task[Any] | None]) -> None:
        self._updating, self._blocks, self._interrupt = updating, blocks, threading.Event()
        self._thread = ThreadPoolExecutor(1, "rollstream-update")

    async def __aenter__(self) -> WeightUpdate:
        entering = self._thread.submit(self._updating.enter, self._interrupt)
        try:
            update = await asyncio.wrap_future(entering)
        except BaseException as error:
            self._interrupt.set()
            # Behind it in the same thread: nobody will ever leave what it may have entered.
            abandoning = self._thread.submit(self._abandon, entering)
            self._thread.shutdown(wait=False)
            if isinstance(error, asyncio.CancelledError):
                await _to_its_end(abandoning)
            raise
        self._blocks.add(asyncio.current_task())
        return update

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._blocks.discard(asyncio.current_task())
        leaving = self._thread.submit(lambda: self._updating.leave(is_failed=kind is not None))
        try:
            await _to_its_end(leaving)
        finally:
            self._thread.shutdown(wait=False)

    def _abandon(self, entering: Future[WeightUpdate]) -> None:
        if not entering.cancelled() and entering.exception() is None:
            self._updating.leave(is_failed=True)


async def _to_its_end(future: Future[None]) -> None:
    """Wait for what must not be left half done, also where the task is cancelled meanwhile."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # the cancellation is what the task hears of
        raise


class _Handover:
    """One batch on its way from the waiting thread to a task that may be cancelled meanwhile."""

    def __init__(self, stream: GroupStream) -> None:
        self._stream, self._lock, self._interrupt = stream, threading.Lock(), threading.Event()
        self._batch: Batch | None = None

    def wait(self, groups: int, timeout_s: float) -> Batch | None:
        """Wait in the thread; what comes after a refusal goes back at once."""
        batch = self._stream.next_batch(groups, timeout_s, self._interrupt)
        with self._lock:
            if batch is not None and self._interrupt.is_set():
                self._stream.take_back(batch)
                raise Interrupted
            self._batch = batch
        return batch

    def refuse(self) -> Batch | None:
        """End the wait; return the batch that was handed over already, for nobody to see."""
        with self._lock:
            self._interrupt.set()
            return self._batch


def _close_unwanted(future: Future[GroupStream]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
