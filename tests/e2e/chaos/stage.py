"""The stage: everybody, their wires, and the hand that does to them what the schedule says.

Owns the main loop of chaos. Never judges and never decides: `schedule` drew what happens.
Invariant: after `heal` everybody runs, nobody is frozen, and every wire carries.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from examples.demo.children import stop_all
from examples.devserver import DevServer
from rollstream.queue.blocking import BlockingQueue
from tests.e2e.chaos import operator_acts
from tests.e2e.chaos.actors import Actor, ServerActor
from tests.e2e.chaos.cast import CLIENTS, MAX_STALENESS, RUN, Cast
from tests.e2e.chaos.links import Links
from tests.e2e.chaos.observer import Observer
from tests.e2e.chaos.options import Options
from tests.e2e.chaos.report import say
from tests.e2e.chaos.schedule import ON_LINKS, Act, Event, schedule

READY_S = 90.0
TICK_S = 0.03
SAY_EVERY_S = 5.0
HARMLESS_EXITS = frozenset({-9, 3, 5})
"""Killed by its own sample; Redis or every engine was away when it started; its loop stood still
for so long that it ended itself, or the trainer was taken over."""


class ChaosFailed(RuntimeError):
    """The run could not even begin; the message says why."""


class Stage:
    """Everybody, and what is done to them.

    Attributes:
        actors: by name.
        queue: straight to the server; for the calm after.
    """

    def __init__(
        self,
        options: Options,
        folder: Path,
        cast: Cast,
        server: DevServer,
        links: Links,
        observer: Observer,
    ) -> None:
        self.cast, self.observer = cast, observer
        self.queue = BlockingQueue.connect(server.url, RUN)
        self._options, self._links, self._folder = options, links, folder
        self._draw = random.Random(f"{options.seed} durations")
        draw = random.Random(f"{options.seed} crashes")
        self.redis = ServerActor(server, draw, observer.server_restarted)
        self.actors: dict[str, Actor] = {actor.name: actor for actor in cast.everyone}
        self.actors["redis"] = self.redis
        self._later: list[tuple[float, Callable[[], None]]] = []

    def open(self) -> None:
        """Start everybody and wait until a first group was trained on.

        Raises:
            ChaosFailed: that took too long, or somebody broke.
        """
        self.cast.auditor.start()
        for engine in self.cast.engines:
            engine.start()
        for engine in self.cast.engines:
            engine.child.wait_ready(READY_S)
        for actor in self.cast.everyone:
            if actor not in self.cast.engines:
                actor.start()
        limit = time.monotonic() + READY_S
        while self.queue.counters().get("acked", 0) == 0:
            self.tick()
            broken = [a for a in self.cast.everyone if set(a.exits) - HARMLESS_EXITS]
            if broken or time.monotonic() > limit:
                who = (broken or [self.cast.trainer])[0]
                raise ChaosFailed(f"nothing was trained on; {who.name}:\n{who.child.tail()}")
            time.sleep(0.05)

    def play(self) -> None:
        """Let everything on the schedule happen, at its time."""
        started = time.monotonic()
        next_say_s = SAY_EVERY_S
        self.observer.time_stalls(on=True)
        for event in schedule(self._options.seed, self._options.seconds):
            while (now_s := time.monotonic() - started) < event.at_s:
                self.tick()
                time.sleep(min(TICK_S, max(0.0, event.at_s - now_s)))
            if now_s >= next_say_s:
                next_say_s = now_s + SAY_EVERY_S
                say(f"{now_s:.0f} s, {self.observer.num_ended} groups ended")
            self._do(event)
            self.note(f"{event.act} {event.victim} {event.duration_s:.1f} s")
        while time.monotonic() - started < self._options.seconds:
            self.tick()
            time.sleep(TICK_S)
        self.observer.time_stalls(on=False)

    def tick(self) -> None:
        """Do what is due."""
        for actor in self.actors.values():
            actor.tick()
        now = time.monotonic()
        due = [action for at, action in self._later if at <= now]
        self._later = [(at, action) for at, action in self._later if at > now]
        for action in due:
            action()

    def heal(self) -> None:
        """End all chaos: Redis first, then everybody else."""
        for _, action in self._later:
            action()
        self._later = []
        self.redis.heal()
        for name in CLIENTS:
            self._links.heal(name)
        for actor in self.actors.values():
            actor.heal()

    def note(self, what: str) -> None:
        """Write something down, with the time that the processes' logs have."""
        now = datetime.now(tz=UTC).isoformat()
        seen = f"{self.observer.num_ended} ended, {self.observer.depths}"
        with (self._folder / "events.log").open("a") as log:
            log.write(f"{now} {what}; {seen}\n")

    # --- acts ----------------------------------------------------------------------------------
    def _do(self, event: Event) -> None:
        if event.role == "operator":
            self._operate(event)
            return
        actor = self._victim(event)
        if actor is None:
            return
        if event.act in ON_LINKS:
            self._spoil(event, actor)
        elif event.act is Act.KILL:
            actor.kill(event.duration_s)
        elif event.act is Act.FREEZE:
            actor.freeze(event.duration_s)
        elif event.act is Act.AMNESIA:
            self.redis.forget(event.duration_s)
        elif event.act is Act.USURP:
            self.cast.trainer.usurp(event.duration_s)

    def _victim(self, event: Event) -> Actor | None:
        """Return who is hurt: of workers and aggregators one that works, if there is any.

        On a slow machine they would else be killed while they start, and never do anything that
        could go wrong.
        """
        drawn = self.actors[event.victim]
        if event.role not in ("worker", "aggregator") or event.act in ON_LINKS:
            return drawn
        peers = [a for a in self.cast.everyone if a.role == event.role]
        first = next(i for i, peer in enumerate(peers) if peer is drawn)
        return next((a for a in peers[first:] + peers[:first] if a.works), None)

    def _spoil(self, event: Event, actor: Actor) -> None:
        actor.acts[event.act] += 1
        name = event.victim
        if event.act is Act.CUT:
            self._links.cut(name)
        elif event.act is Act.TEAR:
            self._links.tear(name)
        elif event.act is Act.LOSE:
            self._links.lose(name, self._draw.randint(1, 3))
        else:
            self._links.stall(name)
            self._after(event.duration_s, partial(self._links.heal, name))

    def _operate(self, event: Event) -> None:
        errand = self.observer.run_errand
        if event.act is Act.WITHDRAW:
            errand(partial(operator_acts.withdraw_some, draw=self._draw))
        elif event.act is Act.REQUEUE:
            errand(partial(operator_acts.requeue_some, draw=self._draw))
        else:
            errand(partial(operator_acts.bound_staleness, versions=1))
            loosen = partial(operator_acts.bound_staleness, versions=MAX_STALENESS)
            self._after(event.duration_s, partial(errand, loosen))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, action))

    # --- the end -------------------------------------------------------------------------------
    def done_to(self, *acts: Act) -> dict[str, int]:
        """Return how often something was done to processes of each role."""
        counts: Counter[str] = Counter()
        for actor in self.actors.values():
            counts[actor.role] += sum(actor.acts[act] for act in acts)
        return {role: count for role, count in sorted(counts.items()) if count}

    def exits(self) -> dict[str, int]:
        """Return how often processes ended by themselves, by `role:exit code`."""
        counts: Counter[str] = Counter()
        for actor in self.actors.values():
            for code, count in actor.exits.items():
                counts[f"{actor.role}:{code}"] += count
        return dict(sorted(counts.items()))


def end_everybody(cast: Cast) -> None:
    """End every process, whatever state it is in."""
    for actor in cast.everyone:
        actor.child.thaw()
    cast.trainer.end(0.0)
    stop_all([*(actor.child for actor in cast.everyone), cast.auditor])
