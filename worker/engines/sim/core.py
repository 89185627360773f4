"""Requests in flight: their timers, aborts, pauses, and the weights they are sampled under.

Owns all state of the simulated engine. Knows no protocol: what a request is asked with and answered
with is its front's (`sglang`, `vllm`). Never decides what is said (`policy`) or what goes wrong
(`faults`). Invariant: every flight ends exactly once, by its answer, its client's leaving or a
restart; its tokens are a prefix of the policy's, whatever happens meanwhile; and nothing here
blocks: a request in flight is one timer.

Axes: P prompt ids, C ids of one reply.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from rollstream.sample import LogProbs, TokenIds

from ..server_words import version_spans
from .faults import (
    BREAKS,
    CUTS,
    NEED_TOKENS,
    STATUSES,
    Fault,
    FaultConfig,
    FaultDice,
    Order,
)
from .flight import ABORTED, RETRACTED, Deliver, End, Flight, Stream, break_of, next_event
from .http import Exchange
from .policy import Policy, Reply


class Pause(StrEnum):
    """What a pause does to requests in flight."""

    FREEZE = "freeze"
    """Nothing is sampled; what flies goes on at `resume`."""
    RETRACT = "retract"
    """As FREEZE, but what flies lies in the queue again: an abort finds nothing sampled."""
    DRAIN = "drain"
    """What flies goes on; only what is new is kept away, by the front that paused."""


_FORCED: Mapping[Fault, End] = {
    Fault.ABORT: End("abort", message="Aborted by the simulated engine on purpose"),
    Fault.ABORT_CODE: End("abort", message="The simulated engine failed on purpose", status=500),
    Fault.ABORT_503: End("abort", message="The request queue is full.", status=503),
    Fault.NAN: End("stop", "NaN happened"),
}


class SimCore:
    """What both protocols share; everything runs on one loop.

    Attributes:
        counts: requests by what happened to them, for tests and people.
        weight_version: the label: "default" until someone updates it.
        weights: what samples: the label's, until someone sets them apart from it.
        paused: None while sampling goes on.
        flights: by a key that is unique.
    """

    def __init__(
        self,
        policy: Policy,
        faults: FaultConfig,
        *,
        weight_version: str = "default",
        versioned: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy
        self.faults = faults
        self.weight_version = weight_version
        self.versioned = versioned
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self.most_in_flight = 0
        self.paused: Pause | None = None
        self.flights: dict[str, Flight] = {}
        self.on_resume: list[Callable[[], None]] = []
        self.on_restart: list[Callable[[], None]] = []
        self._first_version = weight_version
        self._weights: str | None = None
        """Those that were set apart from the label."""
        self._dice = FaultDice(faults)
        self._when_idle: list[Callable[[], None]] = []

    # -- one request

    def order(self, orders: Sequence[Order]) -> int:
        """Say what happens to the next requests; return how many are ordered."""
        return self._dice.order(orders)

    def set_faults(self, shares: Mapping[str, float]) -> None:
        """Have these shares of requests go wrong from here on, and no others.

        Raises:
            ConfigError: no fault of that name, or no share.
        """
        faults = self.faults.with_shares(shares)
        self._dice.draw_from(faults)
        self.faults = faults

    def draw(self) -> Order:
        """Count a request and return what happens to it."""
        self.counts["requests"] += 1
        order = self._dice.next()
        if order.fault is not None and order.fault in STATUSES:
            self.counts[order.fault.value] += 1
        return order

    def fly(
        self,
        key: str,
        exchange: Exchange,
        answer: Deliver,
        *,
        rid: str,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        order: Order,
        waits_frozen: bool,
        stream: Stream | None = None,
    ) -> None:
        """Begin a request.

        Args:
            key: unique among the flights.
            exchange: of the request.
            answer: how it is answered in its protocol.
            rid: as an abort names it.
            prompt: [P] ids.
            sampling: in SGLang's names, as `Policy.reply` reads them.
            order: what goes wrong.
            waits_frozen: an abort during a freeze waits for its end.
            stream: None answers it as a whole.
        """
        reply = self.policy.reply(prompt, sampling)
        cut, fault = self._cut(reply, order)
        if stream is not None and fault in BREAKS:
            cut = break_of(len(reply.ids), fault, order.after)
        elif stream is not None and fault is Fault.ABORT_EMPTY:
            cut = 0  # aborted before it began
        if fault is not None:
            self.counts[fault.value] += 1
        temperature = sampling.get("temperature")
        flight = Flight(
            exchange=exchange,
            rid=rid,
            prompt=prompt,
            temperature=1.0 if temperature is None else float(temperature),
            answer=answer,
            reply=reply,
            fault=fault,
            cut=cut,
            duration_s=self._dice.latency_s(cut, fault),
            waits_frozen=waits_frozen,
            stream=stream,
        )
        self.flights[key] = flight
        self.most_in_flight = max(self.most_in_flight, len(self.flights))
        exchange.on_close = lambda: self._leave(key, flight)
        if self.paused not in (Pause.FREEZE, Pause.RETRACT):
            self._start(key, flight)

    def _start(self, key: str, flight: Flight) -> None:
        flight.started_s = self.clock()
        self._wait(key, flight)

    def _wait(self, key: str, flight: Flight) -> None:
        """Set its timer: to its next event, or to its end."""
        at, due_s = next_event(flight), flight.duration_s
        if at is not None:
            due_s *= at / flight.cut
        elif flight.fault is Fault.HANG:
            flight.timer = None
            return
        left_s = max(0.0, due_s - self.elapsed_s(flight))
        what = self._land if at is None else self._tell_and_wait
        flight.timer = asyncio.get_running_loop().call_later(left_s, what, key, flight)

    def _tell_and_wait(self, key: str, flight: Flight) -> None:
        self._tell(flight, self._said(flight))
        self._wait(key, flight)

    def _tell(self, flight: Flight, num: int) -> None:
        """Send the events of the first so many tokens that were not sent yet."""
        while (at := next_event(flight)) is not None and at <= num:
            assert flight.stream is not None
            if flight.sent == 0:
                self._change_version(flight, at)
            flight.stream.tell(flight, at)
            flight.sent = at

    def _leave(self, key: str, flight: Flight) -> None:
        """Stop sampling for a client that closed its connection."""
        self.counts["left"] += 1
        self._forget(key, flight)

    def _cut(self, reply: Reply, order: Order) -> tuple[int, Fault | None]:
        """Return how many tokens the reply gets; a fault that cannot happen to it is none."""
        num, fault = len(reply.ids), order.fault
        if fault is None:
            return num, None
        if fault in CUTS:
            if order.after is not None:
                return min(order.after, num), fault
            # An engine says `length` behind what it sampled; an abort may come before that.
            return self._dice.cut(num, least=1 if fault is Fault.LENGTH else 0), fault
        if fault is Fault.EMPTY_LENGTH:
            return 0, fault
        if fault is Fault.NO_END:
            if reply.finish == "stop" and isinstance(reply.matched, int) and num > 1:
                return num - 1, fault
            return num, None
        if fault is Fault.VERSION_CHANGE:
            names = (self.weight_version, self.weights)
            possible = num > 1 and all(name.isdigit() and int(name) > 0 for name in names)
            return num, fault if possible else None
        if fault in NEED_TOKENS and num == 0:
            return num, None
        return num, fault

    def _land(self, key: str, flight: Flight) -> None:
        """Answer a request whose time has come."""
        self._forget(key, flight)
        if flight.fault is Fault.RESET:
            flight.exchange.drop()
            return
        try:
            self._deliver(flight, flight.cut, self._end(flight))
        except BaseException:
            # Nobody else ever would: a broken engine breaks its connections.
            flight.exchange.drop()
            raise

    def _deliver(self, flight: Flight, num: int, end: End) -> None:
        if num > 1 and flight.sent == 0:
            self._change_version(flight, num // 2)
        self.counts[f"finish_{end.kind}"] += 1
        flight.answer(flight, num, end)

    def _change_version(self, flight: Flight, num: int) -> None:
        """Have the first tokens sampled and reported as of the version before, where ordered."""
        if flight.fault is Fault.VERSION_CHANGE and self._stood_still(flight):
            flight.changes.insert(0, (str(int(self.weight_version) - 1), num))
            flight.weight_changes.insert(0, (str(int(self.weights) - 1), num))

    def _stood_still(self, flight: Flight) -> bool:
        """Return whether a change can be made up: none happened, and both names are numbers."""
        if flight.changes or flight.weight_changes:
            return False
        return self.weight_version.isdigit() and self.weights.isdigit()

    def _end(self, flight: Flight) -> End:
        fault, reply = flight.fault, flight.reply
        forced = None if fault is None else _FORCED.get(fault)
        if forced is not None:
            return forced
        if fault in (Fault.LENGTH, Fault.EMPTY_LENGTH) or reply.finish == "length":
            return End("length")
        return End("stop", reply.matched)

    def _forget(self, key: str, flight: Flight) -> None:
        if flight.timer is not None:
            flight.timer.cancel()
        flight.exchange.on_close = None
        if self.flights.get(key) is flight:
            del self.flights[key]
        if not self.flights and self._when_idle:
            waiting, self._when_idle = self._when_idle, []
            for call in waiting:
                call()

    # -- what a front needs to answer

    def elapsed_s(self, flight: Flight) -> float:
        """Return how long a request took so far, pauses left out."""
        if flight.timer is None:
            return flight.elapsed_s
        return flight.elapsed_s + self.clock() - flight.started_s

    def spans(self, flight: Flight, num: int) -> list[dict[str, Any]]:
        """Return under which label which of the first `num` tokens were sampled."""
        return version_spans(flight.changes, self.weight_version, num)

    def log_probs(self, flight: Flight, num: int) -> LogProbs:
        """Return the log-probs of the first `num` tokens, as the weights that sampled them say.

        Shape: [num] float32.
        """
        if not self.versioned:
            return flight.reply.log_probs[:num]
        labels = [
            span["version"]
            for span in version_spans(flight.weight_changes, self.weights, num)
            for _ in range(span["start"], span["end"])
        ]
        return self.policy.score(
            self.fed(flight, num), len(flight.prompt), flight.temperature, labels
        )

    def score(self, ids: TokenIds, start: int) -> LogProbs:
        """Return the log-probs of a prompt's ids from `start` on, at T = 1, by today's weights."""
        return self.policy.score(ids, start, 1.0, self.weights if self.versioned else None)

    def fed(self, flight: Flight, num: int) -> TokenIds:
        """Return the prompt and the first `num` tokens of the reply."""
        return np.concatenate([np.asarray(flight.prompt, dtype=np.int32), flight.reply.ids[:num]])

    # -- control

    def _said(self, flight: Flight) -> int:
        """Return how many tokens a request has so far."""
        elapsed_s = flight.elapsed_s
        if flight.timer is not None:
            elapsed_s += self.clock() - flight.started_s
        share = elapsed_s / flight.duration_s if flight.duration_s > 0 else 1.0
        return min(flight.cut, math.floor(flight.cut * share))

    def abort(self, matches: Callable[[Flight], bool]) -> int:
        """End these requests; the own reply of each carries what it has. Return how many."""
        chosen = [(key, flight) for key, flight in self.flights.items() if matches(flight)]
        for key, flight in chosen:
            self._abort(key, flight)
        return len(chosen)

    def _abort(self, key: str, flight: Flight) -> None:
        if flight.fault is Fault.HANG:
            return  # it is stuck: nobody answers
        if self.paused is Pause.FREEZE and flight.waits_frozen:
            flight.is_aborted = True
            return
        is_retracted = self.paused is Pause.RETRACT and flight.waits_frozen
        num = flight.sent if is_retracted else max(flight.sent, self._said(flight))
        self._forget(key, flight)
        self.counts["aborted"] += 1
        self._tell(flight, num - 1)  # the end has an event of its own, with what is new in it
        self._deliver(flight, num, RETRACTED if is_retracted else ABORTED)

    def pause(self, how: Pause) -> None:
        """Stop sampling, or (DRAIN) only remember that new requests are not wanted."""
        self.counts["pauses"] += 1
        self.paused = how
        if how is Pause.DRAIN:
            return
        for flight in self.flights.values():
            if flight.timer is not None:
                flight.timer.cancel()
                flight.timer = None
                flight.elapsed_s += self.clock() - flight.started_s

    def resume(self) -> None:
        """Go on."""
        self.paused = None
        for key, flight in list(self.flights.items()):
            if flight.is_aborted:
                self._abort(key, flight)
            elif flight.timer is None:
                self._start(key, flight)
        for call in self.on_resume:
            call()

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call once nothing is in flight: at once, or when the last one ended."""
        if self.flights:
            self._when_idle.append(call)
        else:
            call()

    @property
    def weights(self) -> str:
        """Return which weights sample."""
        return self.weight_version if self._weights is None else self._weights

    def set_version(self, label: str) -> None:
        """Call the weights something else from here on; what is in flight goes on.

        Unless weights were set apart from the label, they are others then too.
        """
        self.counts["version_updates"] += 1
        self._mark()
        self.weight_version = label

    def set_weights(self, weights: str, label: str | None = None) -> None:
        """Sample under other weights from here on, whatever the label says, then and later.

        Args:
            weights: what samples.
            label: what they are called from the same token on; None leaves the label.
        """
        self.counts["weight_updates"] += 1
        self._mark()
        self._weights = weights
        if label is not None:
            self.weight_version = label

    def _mark(self) -> None:
        """Note how far everything in flight is, before label or weights change."""
        for flight in self.flights.values():
            num = self._said(flight)
            if num > 0:
                flight.changes.append((self.weight_version, num))
                flight.weight_changes.append((self.weights, num))

    def pause_for(self, seconds: float) -> None:
        """Sample nothing for a while, as if somebody paused; a pause that is on stays as it is."""
        if self.paused is not None:
            return
        self.pause(Pause.FREEZE)
        serial = self.counts["pauses"]

        def go_on() -> None:
            if self.paused is not None and self.counts["pauses"] == serial:
                self.resume()

        asyncio.get_running_loop().call_later(seconds, go_on)

    def restart(self, label: str | None = None) -> None:
        """Lose everything that is in flight, and be as at the start: no pause, the first label.

        Its weights are those of that label; were they apart from it, they stay so.

        Args:
            label: another one than the first.
        """
        self.counts["restarts"] += 1
        for key, flight in list(self.flights.items()):
            self._forget(key, flight)
            flight.exchange.drop()
        self.weight_version = self._first_version if label is None else label
        if self._weights is not None:
            self._weights = self.weight_version
        for call in self.on_restart:
            call()
        if self.paused is not None:
            self.resume()
