"""Damage of the simulated engine: every fault has a place, and a spoilt frame one thing wrong."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from rollstream.errors import ConfigError
from worker.engines.sim.damage import _DAMAGE, STATUS_WORDS, Frame, spoil
from worker.engines.sim.faults import (
    CUTS,
    NAMED,
    NEED_TOKENS,
    STATUSES,
    Fault,
    FaultConfig,
    FaultDice,
    Order,
)
from worker.engines.sim.flight import End

TRANSPORT = {Fault.HANG, Fault.HALF_BODY, Fault.NOT_JSON}
ELSEWHERE = {Fault.EMPTY_LENGTH}
IN_SPOIL = {Fault.BAD_TOKEN, Fault.TOO_MANY}


def a_frame(ids: tuple[int, ...] = (4, 5, 6, 7)) -> Frame:
    num = len(ids)
    return Frame(
        rid="a" * 32,
        ids=list(ids),
        log_probs=[-0.5] * num,
        log_prob_ids=list(ids),
        end=End("stop", 7),
        num_prompt=10,
        num_said=num,
        spans=[{"version": "3", "start": 0, "end": num}],
        version="3",
        experts=np.zeros((13, 2, 2), dtype=np.int32),
    )


def changed(one: Frame, other: Frame) -> set[str]:
    names = [field.name for field in fields(Frame)]
    return {name for name in names if not np.array_equal(getattr(one, name), getattr(other, name))}


WRONG = {
    Fault.ABORT_EMPTY: "end experts ids log_prob_ids log_probs num_prompt num_said spans",
    Fault.NO_FINISH: "end",
    Fault.UNKNOWN_FINISH: "end",
    Fault.LOGPROBS_MISSING: "log_probs",
    Fault.LOGPROBS_SHORT: "log_prob_ids log_probs",
    Fault.LOGPROBS_LONG: "log_prob_ids log_probs",
    Fault.LOGPROB_NULL: "log_probs",
    Fault.LOGPROB_POSITIVE: "log_probs",
    Fault.LOGPROB_NAN: "log_probs",
    Fault.LOGPROB_LOWEST: "log_probs",
    Fault.LOGPROBS_WRONG: "log_probs",
    Fault.OTHER_IDS: "log_prob_ids",
    Fault.BAD_TOKEN: "ids log_prob_ids",
    Fault.NEGATIVE_TOKEN: "ids log_prob_ids",
    Fault.TOO_MANY: "ids log_prob_ids log_probs num_said spans",
    Fault.COMPLETION_TOKENS: "num_said",
    Fault.PROMPT_CUT: "num_prompt",
    Fault.OTHER_RID: "rid",
    Fault.SPANS_GAP: "spans",
    Fault.SPANS_OVERLAP: "spans",
    Fault.SPANS_SHORT: "spans",
    Fault.SPANS_WRONG: "spans version",
    Fault.NO_VERSION: "spans version",
    Fault.EXPERTS_MISSING: "experts",
    Fault.EXPERTS_SHORT: "experts",
    Fault.EXPERTS_GARBAGE: "experts",
}


def test_every_fault_happens_somewhere() -> None:
    assert set(Fault) == set(NAMED) | set(STATUSES) | CUTS | TRANSPORT | ELSEWHERE | IN_SPOIL | set(
        _DAMAGE
    )
    assert set(WRONG) == IN_SPOIL | set(_DAMAGE)
    assert set(STATUS_WORDS) | {Fault.OVERFLOW} == set(STATUSES)


@pytest.mark.parametrize("fault", WRONG)
def test_damage_makes_one_thing_of_a_frame_wrong(fault: Fault) -> None:
    frame = a_frame()
    spoil(frame, fault, vocabulary_size=100, limit=4)
    assert changed(frame, a_frame()) == set(WRONG[fault].split())


@pytest.mark.parametrize("fault", sorted(set(Fault) - set(WRONG)))
def test_fault_that_is_no_damage_leaves_a_frame_alone(fault: Fault) -> None:
    frame = a_frame()
    spoil(frame, fault, vocabulary_size=100, limit=4)
    assert changed(frame, a_frame()) == set()


@pytest.mark.parametrize("fault", sorted(set(WRONG) - NEED_TOKENS))
def test_damage_that_needs_no_tokens_can_happen_to_an_empty_frame(fault: Fault) -> None:
    frame = a_frame(())
    spoil(frame, fault, vocabulary_size=100, limit=0)
    assert changed(frame, a_frame(()))


def test_too_many_tokens_are_one_over_the_budget_and_agree_with_each_other() -> None:
    frame = a_frame()
    spoil(frame, Fault.TOO_MANY, vocabulary_size=100, limit=9)
    assert len(frame.ids) == len(frame.log_prob_ids) == len(frame.log_probs or ()) == 10
    assert frame.num_said == 10
    assert frame.spans == [{"version": "3", "start": 0, "end": 10}]


def test_orders_come_before_the_dice_and_leave_the_draws_as_they_are() -> None:
    config = FaultConfig(nan=0.3, others={"logprobs_short": 0.3}, seed=4)
    plain, ordered = FaultDice(config), FaultDice(config)
    assert ordered.order([Order(Fault.HANG), Order(None)]) == 2
    assert [ordered.next().fault for _ in range(2)] == [Fault.HANG, None]
    drawn = [ordered.next().fault for _ in range(300)]
    assert drawn == [plain.fault() for _ in range(300)]
    assert set(drawn) == {Fault.NAN, Fault.LOGPROBS_SHORT, None}


def test_share_of_no_fault_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'logprobs_shrot' is no fault; there are 503"):
        FaultConfig(others={"logprobs_shrot": 0.1}).check()
