"""What holds a run up is named by one cause, whatever else is true of the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rollstream.cli.top.diagnosis import Cause, diagnose, gone, unreachable
from rollstream.cli.top.snapshot import Snapshot, Window

from .looks import a_look, an_engine, looks, some_spans

STARVED: dict[str, Any] = {"trainer": "waiting", "depths": {"ready": 0}}
"""A trainer that gets too little."""


def cause(found: Sequence[Snapshot]) -> Cause:
    return diagnose(found).cause


def test_a_run_whose_trainer_finds_its_groups_is_held_up_by_nothing() -> None:
    found = diagnose(looks(each={"acked": 4, "completed": 16}))
    assert (found.cause, found.do) == (Cause.NOTHING, "")
    assert "the trainer finds groups" in found.evidence


def test_no_look_and_one_look_say_nothing() -> None:
    assert cause([]) is Cause.NOTHING
    assert cause([a_look(**STARVED)]) is Cause.NOTHING


# --- what stops a run ----------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["failed", "aborting", "ended"])
def test_a_run_that_is_over_says_why(state: str) -> None:
    found = diagnose(looks(state=state, error="64 groups in a row were dropped"))
    assert found.cause is Cause.RUN_OVER
    assert "64 groups in a row" in found.evidence


def test_a_pause_of_an_operator_is_named_at_once_and_that_of_an_update_when_it_lasts() -> None:
    paused: dict[str, Any] = {"state": "paused", "pause_mode": "keep"}
    assert cause([a_look(**paused, paused_s=1.0)]) is Cause.PAUSED
    update = paused | {"pause_by": "trainer"}
    assert cause(looks(**update, paused_s=2.0)) is Cause.NOTHING
    found = diagnose(looks(**update, paused_s=40.0))
    assert found.cause is Cause.PAUSED
    assert "update of weights" in found.evidence


def test_a_drain_is_named_with_what_is_left() -> None:
    found = diagnose(looks(draining=True, depths={"l": 3, "q": 2}))
    assert (found.cause, found.do) == (Cause.DRAINING, "rollstream resume")
    assert "5 members left" in found.evidence


def test_full_memory_comes_before_everything_that_follows_from_it() -> None:
    full = {"used_memory": 97, "max_memory": 100, "workers": 0}
    assert cause(looks(**full)) is Cause.REDIS_FULL
    assert cause(looks(used_memory=97, max_memory=0)) is Cause.NOTHING


def test_one_slow_round_trip_is_no_slow_redis() -> None:
    assert cause(looks(round_trip_ms=200.0)) is Cause.REDIS_SLOW
    once = [*looks(9), a_look(18.0, round_trip_ms=200.0)]
    assert cause(once) is Cause.NOTHING


def test_members_or_full_groups_without_anybody_are_no_workers() -> None:
    assert cause(looks(workers=0)) is Cause.NO_WORKERS
    found = diagnose(looks(aggregators=0, depths={"full": 3}))
    assert found.cause is Cause.NO_WORKERS
    assert "no aggregator" in found.evidence
    idle = {"q": 0, "l": 0}
    assert cause(looks(workers=0, depths=idle, trainer="here")) is not Cause.NO_WORKERS


def test_a_run_without_prompts_says_whether_they_ended_or_nobody_brings_them() -> None:
    ended = diagnose(looks(done=True, depths={"l": 0, "ready": 0, "delivered": 2, "live": 2}))
    assert (ended.cause, ended.evidence) == (
        Cause.PRODUCER_OUT_OF_PROMPTS, "every prompt is enqueued and has ended",
    )  # fmt: skip
    nobody = diagnose(looks(producers=0))
    assert nobody.cause is Cause.PRODUCER_OUT_OF_PROMPTS
    assert "no producer is alive" in nobody.evidence
    slow = diagnose(looks(trainer="waiting", depths={"live": 12, "ready": 0, "delivered": 0}))
    assert slow.cause is Cause.PRODUCER_OUT_OF_PROMPTS
    assert "12 of 64" in slow.evidence


def test_the_last_groups_of_the_data_are_no_want_of_prompts() -> None:
    tail = looks(done=True, trainer="waiting", depths={"ready": 0, "live": 12, "delivered": 0})
    assert cause(tail) is not Cause.PRODUCER_OUT_OF_PROMPTS


def test_engines_that_take_no_calls_are_down_and_the_reason_is_said() -> None:
    down = an_engine("down")
    down.problem = "connection refused"
    found = diagnose(looks(engines=(down,)))
    assert found.cause is Cause.ENGINE_DOWN
    assert "connection refused" in found.evidence
    behind = diagnose(looks(engines=(an_engine("behind", version=2),)))
    assert behind.cause is Cause.ENGINE_DOWN
    assert "weights" in behind.do


def test_engines_that_are_behind_for_a_moment_or_few_of_many_do_not_hold_up() -> None:
    update = [*looks(9), a_look(18.0, engines=(an_engine("behind"),))]
    assert cause(update) is Cause.NOTHING
    four = [an_engine(url=f"http://e:{k}") for k in range(3)] + [
        an_engine("down", url="http://e:9")
    ]
    assert cause(looks(engines=tuple(four))) is Cause.NOTHING


# --- what becomes of groups ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("place", "advice"),
    [("running", "max_staleness"), ("ready", "groups_per_step"), ("hand_out", "groups_per_step")],
)
def test_stale_groups_are_named_with_where_they_got_old(place: str, advice: str) -> None:
    each = {"acked": 4, "dropped:stale": 4, f"stale:{place}": 4}
    found = diagnose(looks(each=each, **STARVED))
    assert found.cause is Cause.STALE_GROUPS
    assert advice in found.do


def test_stale_groups_that_begin_anew_count_too_and_few_do_not() -> None:
    begun = {"acked": 4, "stale:running": 4, "requeued:stale": 4}
    assert cause(looks(each=begun, trainer="here")) is Cause.STALE_GROUPS
    few = {"acked": 40, "dropped:stale": 4, "stale:running": 4}
    assert cause(looks(each=few, trainer="here")) is Cause.NOTHING


def test_a_filter_that_drops_most_groups_is_strict_where_the_trainer_has_no_plenty() -> None:
    found = diagnose(looks(each={"acked": 1, "dropped:zero_std": 6, "dropped:range": 1}, **STARVED))
    assert found.cause is Cause.FILTER_STRICT
    assert "most as zero_std" in found.evidence
    assert "63 of 72" in found.evidence


def test_groups_that_fail_are_told_from_groups_that_are_filtered() -> None:
    each = {"dropped:short_group": 5, "member_failed:tool_error": 9, "member_failed:deadline": 1}
    found = diagnose(looks(each=each, **STARVED))
    assert found.cause is Cause.SAMPLES_FAIL
    assert "most as tool_error" in found.evidence


def test_drops_of_long_ago_say_nothing_of_now() -> None:
    counters = {"acked": 10, "dropped:zero_std": 1000}
    assert cause(looks(counters=counters, each={"acked": 4}, trainer="here")) is Cause.NOTHING


def test_a_trainer_with_plenty_of_groups_is_the_slowest_part() -> None:
    plenty = {"ready": 40, "delivered": 8, "l": 64, "live": 64}
    assert cause(looks(depths=plenty)) is Cause.TRAINER_SLOW
    nobody = diagnose(looks(depths=plenty, trainer="none", trainer_connects=0))
    assert nobody.cause is Cause.TRAINER_SLOW
    assert "no trainer ever connected" in nobody.evidence
    left = diagnose(looks(depths=plenty, trainer="left"))
    assert left.cause is Cause.TRAINER_SLOW
    assert "left" in left.evidence
    assert cause(looks(depths=plenty, trainer="waiting")) is not Cause.TRAINER_SLOW


def test_a_batch_that_is_larger_than_the_capacity_starves_its_trainer() -> None:
    held = {"ready": 0, "l": 0, "delivered": 64, "live": 64}
    found = diagnose(looks(trainer="waiting", depths=held))
    assert found.cause is Cause.TRAINER_STARVED
    assert "all 64 groups that may live are in its hands" in found.evidence
    assert cause(looks(trainer="here", depths=held)) is Cause.NOTHING


def test_groups_that_pile_up_before_their_verdict_are_a_slow_group_reward_or_filter() -> None:
    piled = {"ready": 0, "l": 8, "full": 50, "live": 60}
    found = diagnose(looks(trainer="waiting", depths=piled))
    assert found.cause is Cause.REWARD_SLOW
    assert "50 of 60 live groups wait for their verdict" in found.evidence
    assert cause(looks(trainer="here", depths=piled)) is Cause.NOTHING
    assert cause([*looks(9, **STARVED), a_look(18.0, trainer="waiting", depths=piled)]) is not (
        Cause.REWARD_SLOW
    )


# --- where rollouts spend their time -------------------------------------------------------------
def test_few_tokens_a_second_are_a_slow_engine() -> None:
    slow = some_spans(generate=100.0, tokens=400)
    found = diagnose(looks(spans=slow, **STARVED))
    assert found.cause is Cause.ENGINE_SLOW
    assert "4 tokens/s" in found.evidence


def test_an_engine_that_ends_no_sample_is_slow_after_a_while() -> None:
    hung: dict[str, Any] = {"spans": None, "counters": {}} | STARVED
    assert cause(looks(4, **hung)) is Cause.NOTHING
    assert cause(looks(12, **hung)) is Cause.ENGINE_SLOW
    assert cause(looks(12, each={"completed": 1}, **hung)) is Cause.NOTHING


def test_quick_calls_and_a_trainer_that_waits_are_too_few_slots_or_too_little_capacity() -> None:
    slots = diagnose(looks(trainer="waiting", depths={"ready": 0, "q": 40}))
    assert slots.cause is Cause.TRAINER_STARVED
    assert slots.evidence.startswith("by slots: 40 members wait")
    capacity = diagnose(looks(trainer="waiting", depths={"ready": 0, "live": 64}))
    assert capacity.cause is Cause.TRAINER_STARVED
    assert capacity.evidence.startswith("by capacity: all 64 groups")


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        (some_spans(reward=30.0), Cause.REWARD_SLOW),
        (some_spans(tool=30.0), Cause.TOOL_SLOW),
        (some_spans(tool=10.0, reward=30.0), Cause.REWARD_SLOW),
        (some_spans(tool=30.0, reward=10.0), Cause.TOOL_SLOW),
        (some_spans(reward=0.0), Cause.TOOL_SLOW),
    ],
)
def test_members_without_calls_are_in_tools_or_rewards_as_spans_say(
    spans: Any, wanted: Cause
) -> None:
    assert cause(looks(spans=spans, in_flight=6, **STARVED)) is wanted


def test_tools_and_rewards_are_not_told_apart_before_a_sample_ended() -> None:
    unknown: dict[str, Any] = {"spans": None, "in_flight": 0} | STARVED
    assert cause(looks(4, **unknown)) is Cause.NOTHING
    found = diagnose(looks(12, **unknown))
    assert found.cause is Cause.TOOL_SLOW
    assert "no sample that ended tells" in found.evidence


def test_slow_rollouts_do_not_matter_to_a_trainer_that_is_served() -> None:
    slow = some_spans(generate=100.0, tokens=400)
    assert cause(looks(spans=slow, trainer="here")) is Cause.NOTHING
    assert cause(looks(spans=slow, trainer="left")) is Cause.ENGINE_SLOW
    assert cause(looks(spans=slow, trainer="none")) is Cause.ENGINE_SLOW


# --- looks ---------------------------------------------------------------------------------------
def test_counters_that_fell_are_not_counted_backwards() -> None:
    forgot = [a_look(0.0, counters={"acked": 90}), a_look(2.0, counters={"acked": 10}),
              a_look(4.0, counters={"acked": 16})]  # fmt: skip
    assert Window(forgot).gained("acked") == 6


def test_causes_beside_the_rules_are_said_by_who_cannot_read_the_run() -> None:
    assert unreachable("refused").cause is Cause.REDIS_DOWN
    assert gone().cause is Cause.RUN_OVER
    assert "\n" not in unreachable("refused").sentence
