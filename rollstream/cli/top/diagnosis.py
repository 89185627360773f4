"""What holds a run up: one cause out of a closed set, from a few snapshots.

Owns the rules and their thresholds, the gravest first: what stops a run comes before what slows
it down, and the trainer comes before the rollouts, because a run is as fast as its trainer allows.
Never does I/O. Invariant: one cause, always; every cause says what it was seen by and what to do,
and docs/operate.md has a row for it.

Generation is held up by its engines where most leased members have a call there. An engine is
slow where one sample gets fewer than `SLOW_TOKENS_PER_S`; above that its calls are quick, and more
of them would be answered too: then the trainer starves for slots, or for capacity. Where few
members have a call the others are in tools or rewards, and the spans of samples that ended say in
which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rollstream.cli.top.snapshot import STALE, Snapshot, Window
from rollstream.updates import confirmed

SLOW_TOKENS_PER_S = 15.0
"""Of one sample, as fast as people read. Below it an engine is slow, or has too many calls."""
MOST = 0.5
MANY = 0.8
FEW_ENDED = 4
"""Groups that have to end in the window before their reasons are judged."""
STALE_SHARE = 0.3
SLOW_TRIP_MS = 50.0
FULL_MEMORY = 0.95
UPDATE_S = 10.0
"""A trainer's pause that lasts longer holds the run up."""
PATIENCE_S = 15.0
"""Without the end of a sample, before its engines are called slow."""
SOME_LOOKS = 3
"""Looks that have to agree before a moment counts as a state."""
_FAILING = frozenset({"short_group", "filter_error", "too_large", "deadline"})
_FILTERING = frozenset({"zero_std", "no_aborted", "range", "min_ok", "length", "custom"})


class Cause(StrEnum):
    """What holds a run up."""

    RUN_OVER = "run_over"
    REDIS_DOWN = "redis_down"
    PAUSED = "paused"
    DRAINING = "draining"
    REDIS_FULL = "redis_full"
    REDIS_SLOW = "redis_slow"
    NO_WORKERS = "no_workers"
    PRODUCER_OUT_OF_PROMPTS = "producer_out_of_prompts"
    ENGINE_DOWN = "engine_down"
    STALE_GROUPS = "stale_groups"
    TRAINER_SLOW = "trainer_slow"
    SAMPLES_FAIL = "samples_fail"
    FILTER_STRICT = "filter_strict"
    ENGINE_SLOW = "engine_slow"
    REWARD_SLOW = "reward_slow"
    TOOL_SLOW = "tool_slow"
    TRAINER_STARVED = "trainer_starved"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What holds a run up, what says so, and what to do."""

    cause: Cause
    evidence: str
    do: str = ""

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        return f"{self.cause}: {self.evidence}" + (f" → {self.do}" if self.do else "")


Rule = Callable[[Window], Diagnosis | None]


def diagnose(snapshots: Sequence[Snapshot]) -> Diagnosis:
    """Return what holds the run up.

    Args:
        snapshots: of one run, oldest first; a minute of them is enough.
    """
    if not snapshots:
        return Diagnosis(Cause.NOTHING, "nothing was read yet")
    window = Window(snapshots)
    for rule in RULES:
        found = rule(window)
        if found is not None:
            return found
    return Diagnosis(Cause.NOTHING, _flow(window))


def unreachable(why: str) -> Diagnosis:
    """Return the diagnosis of a run whose Redis does not answer."""
    return Diagnosis(Cause.REDIS_DOWN, f"Redis does not answer ({why}), and everybody waits",
                     "start it: everybody goes on")  # fmt: skip


def unreadable(why: str) -> Diagnosis:
    """Return the diagnosis of a run that is damaged, or that Redis lets us read no more."""
    return Diagnosis(Cause.REDIS_DOWN, f"Redis answers, and the run cannot be read ({why})",
                     "rollstream doctor")  # fmt: skip


def gone() -> Diagnosis:
    """Return the diagnosis of a run that was removed while it was looked at."""
    return Diagnosis(Cause.RUN_OVER, "the run was removed; a producer opens it again")


def _flow(window: Window) -> str:
    last = window.last
    if window.share("trainer_waits") < MOST and last.trainer == "here":
        return "the trainer finds groups when it asks for them"
    if len(window.looks) < SOME_LOOKS:
        return "too few looks to say"
    return "groups flow"


# --- what stops a run ----------------------------------------------------------------------------
def _over(window: Window) -> Diagnosis | None:
    last = window.last
    if last.state in ("running", "paused"):
        return None
    why = f": {last.error}" if last.error else ""
    do = "mend what it names, then begin anew with the checkpoint" if last.state == "failed" else ""
    return Diagnosis(Cause.RUN_OVER, f"the run is {last.state}{why}", do)


def _paused(window: Window) -> Diagnosis | None:
    last = window.last
    if last.state != "paused":
        return None
    since = f"paused ({last.pause_mode}) since {last.paused_s:.0f} s"
    if not last.pause_by:
        return Diagnosis(Cause.PAUSED, f"{since}, by an operator", "rollstream resume")
    if last.paused_s < UPDATE_S:
        return None  # an update of weights; the next look is behind it
    return Diagnosis(Cause.PAUSED, f"{since}, by the trainer's update of weights",
                     "look at the trainer's push; rollstream engines says who obeys")  # fmt: skip


def _draining(window: Window) -> Diagnosis | None:
    last = window.last
    if not last.draining:
        return None
    left = f"{last.waiting + last.leased} members left"
    return Diagnosis(Cause.DRAINING, f"an operator drains the run: no new prompts, {left}",
                     "rollstream resume")  # fmt: skip


def _redis(window: Window) -> Diagnosis | None:
    last = window.last
    if last.max_memory and (last.used_memory or 0) >= FULL_MEMORY * last.max_memory:
        used = 100 * (last.used_memory or 0) / last.max_memory
        return Diagnosis(Cause.REDIS_FULL, f"Redis uses {used:.0f} % of its maxmemory",
                         "raise maxmemory, or lower producer.capacity_groups")  # fmt: skip
    trip_ms = window.median_of("round_trip_ms")
    if len(window.looks) >= SOME_LOOKS and trip_ms >= SLOW_TRIP_MS:
        return Diagnosis(Cause.REDIS_SLOW, f"a round trip takes {trip_ms:.0f} ms from here",
                         "rollstream doctor; a core of its own, near the workers")  # fmt: skip
    return None


def _workers(window: Window) -> Diagnosis | None:
    last = window.last
    members = last.waiting + last.leased
    if members and not last.workers:
        return Diagnosis(Cause.NO_WORKERS, f"{members} members wait and no worker is alive",
                         "start workers: rollstream worker")  # fmt: skip
    if last.full and not last.aggregators:
        return Diagnosis(Cause.NO_WORKERS,
                         f"{last.full} groups wait for a verdict and no aggregator is alive",
                         "start one: rollstream worker --worker.role aggregator")  # fmt: skip
    return None


def _prompts(window: Window) -> Diagnosis | None:
    last = window.last
    undelivered = last.live - last.delivered
    if last.done and undelivered <= 0:
        return Diagnosis(Cause.PRODUCER_OUT_OF_PROMPTS, "every prompt is enqueued and has ended",
                         "more producer.epochs or prompts, or let the trainer end")  # fmt: skip
    if last.done or last.is_blocked or window.most("waiting"):
        return None
    if not last.producers:
        return Diagnosis(Cause.PRODUCER_OUT_OF_PROMPTS,
                         f"no producer is alive; {last.live} of {last.capacity} groups are live",
                         "start it: rollstream producer")  # fmt: skip
    return None


def _engines(window: Window) -> Diagnosis | None:
    last = window.last
    away = [look for look in window.looks if _mostly_away(look)]
    if not (_mostly_away(last) and len(away) > MOST * len(window.looks)):
        return None
    up = last.engine_states().get("up", 0)
    said = confirmed.hindrances(list(last.engines), last.version)
    where = "none takes calls" if not up else f"only {up} of {len(last.engines)} take calls"
    behind = last.engine_states().get("behind", 0) == len(last.engines) - up
    do = "give them the run's weights" if behind else "start them, or correct engine.urls"
    return Diagnosis(Cause.ENGINE_DOWN, f"{where}: {said}", f"{do}; rollstream engines")


def _mostly_away(look: Snapshot) -> bool:
    return bool(look.engines) and look.engine_states().get("up", 0) < MOST * len(look.engines)


# --- what becomes of groups ----------------------------------------------------------------------
def _stale(window: Window) -> Diagnosis | None:
    stale, requeued = window.gained(*STALE), window.gained("requeued:stale")
    whole = window.ended() + requeued
    if stale < FEW_ENDED or stale < STALE_SHARE * whole:
        return None
    places = {name.partition(":")[2]: window.gained(name) for name in STALE}
    where = max(places, key=lambda place: places[place])
    evidence = (f"{stale} of {whole} groups were too old for max_staleness in the last "
                f"{window.seconds:.0f} s, most {_PLACES[where]}")  # fmt: skip
    if where == "running":
        do = "rollouts last longer than the steps allow: raise weights.max_staleness, shorten them"
    else:
        do = "they wait for the trainer: set weights.groups_per_step, or lower capacity_groups"
    return Diagnosis(Cause.STALE_GROUPS, evidence, do)


_PLACES = {"running": "while they ran", "ready": "while they waited",
           "hand_out": "when they were handed out"}  # fmt: skip


def _trainer(window: Window) -> Diagnosis | None:
    last = window.last
    held = last.ready + last.delivered
    has_plenty = window.least("ready") >= 1 and held >= MOST * last.live and last.is_blocked
    if not has_plenty or window.share("trainer_waits") >= MOST:
        return None
    evidence = f"{last.ready} groups are ready, {last.delivered} in its hands, capacity is used up"
    if not last.trainer_connects:
        return Diagnosis(Cause.TRAINER_SLOW, f"no trainer ever connected; {evidence}",
                         "connect one: GroupStream.connect(url, run=…)")  # fmt: skip
    if last.trainer == "left":
        return Diagnosis(Cause.TRAINER_SLOW, f"the trainer left; {evidence}",
                         "start it again, with its checkpoint")  # fmt: skip
    return Diagnosis(Cause.TRAINER_SLOW, evidence,
                     "the trainer is the slowest part: faster steps, or fewer engines")  # fmt: skip


def _filters(window: Window) -> Diagnosis | None:
    dropped, ended = window.gained_by("dropped"), window.ended()
    if ended < FEW_ENDED:
        return None
    for cause, reasons in ((Cause.SAMPLES_FAIL, _FAILING), (Cause.FILTER_STRICT, _FILTERING)):
        found = {reason: n for reason, n in dropped.items() if reason in reasons}
        count = sum(found.values())
        if count <= MOST * ended:
            continue
        top = max(found, key=lambda reason: found[reason])
        evidence = f"{count} of {ended} groups were dropped, most as {top}"
        if cause is Cause.FILTER_STRICT:
            return Diagnosis(cause, evidence,
                             "relax aggregator.filters, take other prompts, or raise "
                             "producer.over_sampling; rollstream show")  # fmt: skip
        failed = window.gained_by("member_failed")
        first = max(failed, key=lambda reason: failed[reason]) if failed else ""
        why = f"; members failed, most as {first}" if first else ""
        return Diagnosis(cause, evidence + why, "rollstream show has the errors of the last drops")
    return None


def _batch(window: Window) -> Diagnosis | None:
    """Say that the trainer's batch is larger than what may live: it waits for ever."""
    last = window.last
    has_all = last.is_blocked and last.delivered >= last.live
    if not has_all or window.share("trainer_waits") < MOST:
        return None
    return Diagnosis(Cause.TRAINER_STARVED,
                     f"by capacity: all {last.capacity} groups that may live are in its hands, and "
                     "its batch is not full",
                     "raise producer.capacity_groups above a batch")  # fmt: skip


def _verdicts(window: Window) -> Diagnosis | None:
    last = window.last
    if not window.least("full") or last.full < MOST * last.live or _is_served(window):
        return None
    return Diagnosis(Cause.REWARD_SLOW,
                     f"{last.full} of {last.live} live groups wait for their verdict: a group "
                     "reward or a filter is slow",
                     "a faster one, or more workers of the role aggregator")  # fmt: skip


# --- where rollouts spend their time -------------------------------------------------------------
def _source(window: Window) -> Diagnosis | None:
    last = window.last
    if last.done or len(window.looks) < SOME_LOOKS or _is_served(window):
        return None
    if window.most("waiting") or window.most("live") > MANY * last.capacity:
        return None
    kept = f"{last.live} of {last.capacity} groups"
    return Diagnosis(Cause.PRODUCER_OUT_OF_PROMPTS,
                     f"the producer keeps {kept} live and none waits",
                     "its source or Redis is slow: look at the producer's log")  # fmt: skip


def _rollouts(window: Window) -> Diagnosis | None:
    """Say what the rollouts wait for, where somebody waits for the rollouts."""
    calls = window.call_share()
    if calls is None or len(window.looks) < 2 or _is_served(window):
        return None
    if calls >= MOST:
        return _calling(window, calls)
    return _elsewhere(window, calls)


def _is_served(window: Window) -> bool:
    return window.last.trainer in ("here", "waiting") and window.share("trainer_waits") < MOST


def _calling(window: Window, calls: float) -> Diagnosis | None:
    last, spans = window.last, window.spans
    speed = None if spans is None else spans.tokens_per_s
    members = f"{100 * calls:.0f} % of the leased members have a call at an engine"
    more = "more engines, fewer calls each (worker.concurrency), or shorter samples"
    if speed is None:
        if window.gained("completed") or window.seconds < PATIENCE_S:
            return None
        waited = f"no sample ended for {window.seconds:.0f} s"
        return Diagnosis(Cause.ENGINE_SLOW, f"{members}, and {waited}", more)
    pace = f"a sample gets {speed:.0f} tokens/s"
    if speed < SLOW_TOKENS_PER_S:
        return Diagnosis(Cause.ENGINE_SLOW, f"{members}, {pace}", more)
    if window.least("waiting"):
        slots = f"{last.waiting} members wait for a slot, {last.leased} have one"
        return Diagnosis(Cause.TRAINER_STARVED, f"by slots: {slots}, {pace}",
                         "raise worker.concurrency, or start more workers")  # fmt: skip
    if window.share("is_blocked") >= MOST:
        return Diagnosis(Cause.TRAINER_STARVED,
                         f"by capacity: all {last.capacity} groups are live and none waits, {pace}",
                         "raise producer.capacity_groups (or max_staleness)")  # fmt: skip
    return None


def _elsewhere(window: Window, calls: float) -> Diagnosis | None:
    spans = window.spans
    members = f"only {100 * calls:.0f} % of the leased members have a call at an engine"
    if spans is None and window.seconds < PATIENCE_S:
        return None
    if spans is None:
        return Diagnosis(Cause.TOOL_SLOW,
                         f"{members}, and no sample that ended tells tools from rewards",
                         "see what your tools and rewards wait for")  # fmt: skip
    tool, reward = spans.share("tool"), spans.share("reward")
    if reward >= tool and reward > 0:
        return Diagnosis(Cause.REWARD_SLOW,
                         f"{members}; rewards took {100 * reward:.0f} % of a sample",
                         "a faster reward, more verifiers, or more slots")  # fmt: skip
    return Diagnosis(Cause.TOOL_SLOW,
                     f"{members}; tools took {100 * tool:.0f} % of a sample",
                     "faster tools, a tool_timeout_s, or more slots")  # fmt: skip


RULES: tuple[Rule, ...] = (
    _over, _paused, _draining, _redis, _workers, _prompts, _engines, _stale, _trainer, _filters,
    _batch, _verdicts, _source, _rollouts,
)  # fmt: skip
