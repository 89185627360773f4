"""The engine calls of one session: what each may sample, its seed, and going on behind a stop.

Owns budgets, seeds, the salt and the deadline of calls, and their spans. Never renders or parses,
knows no client. Invariant: a call is made only with room for at least one token; what an engine
answered is in the context whatever happens next; every reply has a seed of its own, the same for
the same order of requests, and all of its calls have that one.

Axes: C sampled tokens of one reply.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, fields, replace
from typing import Any

from rollstream.errors import EngineFault, StopReason, Withheld
from rollstream.sample import UNKNOWN_VERSION, empty_ids

from ..engines.faults import Detail
from ..generate.budget import Room, cut_by, effective, room_left
from ..sampling import Sampling
from ..types import Completion, Finish, GenerateInput
from .context import Answer, Context
from .live import LiveReply

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.02, 1.0
"""Between calls that an engine stops at once although nobody here is paused."""


@dataclass(slots=True)
class Stats:
    """What became of a session's requests, in whole numbers; they stand in its sample's metadata.

    Every token that an engine sampled is in a sample or in `dropped_tokens`:
    `sampled_tokens == (sampled tokens of all samples, each once) + dropped_tokens`, and once the
    session is closed `requests == committed + joined + replayed + refused + failed + left`.
    """

    requests: int = 0
    """All of them."""
    calls: int = 0
    """Engine calls that were answered with tokens, or whose reply was empty."""
    committed: int = 0
    """Replies that were given out."""
    joined: int = 0
    """Requests that were another try of one under way."""
    replayed: int = 0
    """Requests that were another try of one that was answered."""
    refused: int = 0
    """Requests that were turned down: 4xx."""
    failed: int = 0
    """Requests that broke: 5xx."""
    left: int = 0
    """Replies that nobody waited for any more."""
    superseded: int = 0
    """Replies whose turn another one took over."""
    divergences: int = 0
    """Requests that did not go on from the newest reply, and did not repeat its turn either."""
    raced: int = 0
    """Replies that were committed behind what another request had committed meanwhile."""
    sampled_tokens: int = 0
    dropped_tokens: int = 0
    """Of them, those that no sample holds."""

    def to_dict(self) -> dict[str, int]:
        """Return plain values."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


class NoRoom(Exception):
    """There is no room for a token behind this prompt.

    Attributes:
        bound: the limit.
        num_tokens: of the prompt.
    """

    def __init__(self, bound: StopReason, num_tokens: int) -> None:
        super().__init__(bound.value)
        self.bound, self.num_tokens = bound, num_tokens


@dataclass(slots=True)
class Sampled:
    """How the calls of one reply ended."""

    cut: StopReason | None
    """The limit that cut it; None where its turn is complete."""
    stop_text: str = ""
    num_prompt: int = 0
    num_cached: int = 0


class Caller:
    """Makes the calls of one session."""

    def __init__(self, given: GenerateInput, stats: Stats) -> None:
        self._given, self._stats = given, stats
        self._closing = (*given.renderer.stop_token_ids, *given.sampling.stop_token_ids)
        self._num_begun = 0
        self._salt: int | None = None
        """The version at the first call: later calls find the cache of the earlier ones."""

    def check_room(self, context: Context, most: int | None) -> None:
        """Check that a call behind `context` could sample a token.

        Raises:
            NoRoom: it could not.
        """
        room = self._room(context, self._sampling(most))
        if room.tokens <= 0:
            raise NoRoom(room.bound, context.num_tokens)

    async def sample(
        self, context: Context, most: int | None, live: LiveReply | None = None
    ) -> Sampled:
        """Sample one reply into `context`, in as many calls as stops make of it.

        Args:
            context: without answers; gets all of them.
            most: the client's cap of this reply; never raises ours.
            live: is told while it is sampled.

        Raises:
            NoRoom: there is none behind the prompt.
            EngineFault: no engine answered sensibly.
            Withheld: no call may be made, or one was stopped, and none follows.
        """
        sampling = self._sampling(most)
        # One seed for a reply, as for a turn: a call that was stopped goes on under its own.
        number, idle = -1, 0
        cached: int | None = None
        while True:
            room = self._room(context, sampling)
            if room.tokens <= 0:
                if not context.answers:
                    raise NoRoom(room.bound, context.num_tokens)
                return self._ended(context, room.bound, cached)
            if number < 0:
                number, self._num_begun = self._num_begun, self._num_begun + 1
            try:
                completion = await self._call(context, sampling, room, number, live)
            except EngineFault as error:
                if error.detail != Detail.CONTEXT_OVERFLOW:
                    raise
                # Its context is smaller than ours says.
                if not context.answers:
                    raise NoRoom(StopReason.CONTEXT_LENGTH, context.num_tokens) from None
                return self._ended(context, StopReason.CONTEXT_LENGTH, cached)
            if completion is None:
                idle += 1
                await self._wait(idle)
                continue
            idle = 0
            cached = completion.cache.cached_tokens if cached is None else cached
            if completion.finish is not Finish.ABORT:
                return self._ended(context, cut_by(completion, room, self._closing), cached)
            if len(completion.ids) and int(completion.ids[-1]) in self._closing:
                return self._ended(context, None, cached)  # it was stopped behind its end
            await self._wait(0)

    async def _call(
        self,
        context: Context,
        sampling: Sampling,
        room: Room,
        number: int,
        live: LiveReply | None,
    ) -> Completion | None:
        """Make one call and keep what it brought; None where that is nothing, or it was withheld.

        Raises:
            EngineFault: as the engine; or what was streamed was not the reply.
            Withheld: no call may be made, and none follows.
        """
        given = self._given
        request = context.request(given.replay)
        request.sink = live
        asked = effective(sampling, room, given.turn_seed(number))
        version = given.version()
        try:
            start_mono_s = time.monotonic()
            try:
                completion = await given.engine.generate(
                    request,
                    asked,
                    routing_key=given.sample.routing_key or f"g{given.sample.group_index}",
                    version=version,
                    deadline_s=max(given.deadline - time.monotonic(), 0.001),
                    salt=self._salt,
                )
            except BaseException as error:
                given.spans.ended("generate", number, start_mono_s, error)
                raise
            given.spans.ended("generate", number, start_mono_s)
        except Withheld:
            if given.opened is None:
                raise
            completion = None
        if completion is None or (completion.finish is Finish.ABORT and not len(completion.ids)):
            if live is not None:
                live.settle(empty_ids())
            return None  # as if the call had never been made
        # A call may wait for a pause to end, or be tried again: the version is that of its try.
        dispatched = completion.dispatched_version
        dispatched = version if dispatched == UNKNOWN_VERSION else dispatched
        if self._salt is None and dispatched != UNKNOWN_VERSION:
            self._salt = dispatched
        self._stats.calls += 1
        self._stats.sampled_tokens += len(completion.ids)
        context.add(Answer(completion, dispatched, given.version(), asked))
        if live is not None:
            live.settle(completion.ids)
        return completion

    async def _wait(self, idle: int) -> None:
        """Return once the next call may be made.

        Args:
            idle: how many calls in a row came to nothing.

        Raises:
            EngineFault: the time of the sample is over.
            Withheld: none follows.
        """
        given = self._given
        if given.opened is None:
            raise Withheld("the call was stopped, and samples that are stopped begin anew")
        await given.opened()
        if idle > 1:
            # An engine that stops everything although no pause is known here, until it does not.
            await asyncio.sleep(min(_FIRST_WAIT_S * 2**idle, _LONGEST_WAIT_S))
        if time.monotonic() >= given.deadline:
            raise EngineFault(
                "the sample's time is over", retryable=True, detail=Detail.TIMEOUT.value
            )

    def _sampling(self, most: int | None) -> Sampling:
        sampling = self._given.sampling
        if most is None or most >= sampling.max_new_tokens:
            return sampling
        return replace(sampling, max_new_tokens=most)

    def _room(self, context: Context, sampling: Sampling) -> Room:
        return room_left(
            self._given.limits,
            sampling,
            held=context.num_tokens,
            response=context.num_tokens - context.num_root,
            turn=context.num_sampled,
        )

    @staticmethod
    def _ended(context: Context, cut: StopReason | None, cached: int | None) -> Sampled:
        matched: Any = context.answers[-1].completion.matched
        text = matched if isinstance(matched, str) and cut is None else ""
        return Sampled(cut, text, context.num_prompt, cached or 0)
