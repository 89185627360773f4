"""The closed tables of endings and reports, and errors that cross process boundaries."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest

from rollstream import errors
from rollstream.errors import (
    STATUS_OF,
    MemberReason,
    Report,
    RolloutFault,
    Status,
    StopReason,
    report_of,
)

COMPLETED, TRUNCATED, ABORTED, FAILED = (
    Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED
)  # fmt: skip
COMPLETE, BACK, RETRY, FINAL = Report.COMPLETE, Report.BACK, Report.RETRY, Report.FINAL
# stop reason: status, report where the fault is retryable, report where it is not
ENDINGS: dict[str, tuple[Status, Report, Report]] = {
    "stop": (COMPLETED, COMPLETE, COMPLETE),
    "max_turns": (COMPLETED, COMPLETE, COMPLETE),
    "turn_length": (TRUNCATED, COMPLETE, COMPLETE),
    "response_length": (TRUNCATED, COMPLETE, COMPLETE),
    "context_length": (TRUNCATED, COMPLETE, COMPLETE),
    "prompt_too_long": (TRUNCATED, COMPLETE, COMPLETE),
    "abort_requested": (ABORTED, COMPLETE, COMPLETE),
    "abort_weights": (ABORTED, BACK, BACK),
    "deadline": (ABORTED, FINAL, FINAL),
    "no_model_call": (ABORTED, COMPLETE, COMPLETE),
    "engine_error": (FAILED, RETRY, FINAL),
    "tool_error": (FAILED, RETRY, FINAL),
    "env_error": (FAILED, RETRY, FINAL),
    "agent_error": (FAILED, COMPLETE, COMPLETE),
    "reward_error": (FAILED, RETRY, FINAL),
    "merge_error": (FAILED, FINAL, FINAL),
}
CLASSES = [
    kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)
]
ARGUMENTS: dict[str, tuple[Any, ...]] = {"CapacityTooSmall": (9, 4, 2)}


def test_every_stop_reason_has_one_status_and_one_report() -> None:
    assert {reason.value for reason in StopReason} == set(ENDINGS)
    for name, (status, retryable, not_retryable) in ENDINGS.items():
        reason = StopReason(name)
        assert STATUS_OF[reason] is status
        assert report_of(reason, retryable=True) is retryable
        assert report_of(reason, retryable=False) is not_retryable


def test_whatever_is_not_completed_names_a_reason_that_a_member_can_fail_for() -> None:
    for name, (_, retryable, not_retryable) in ENDINGS.items():
        if {retryable, not_retryable} != {COMPLETE}:
            assert MemberReason(name)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[Exception]) -> None:
    error = kind(*ARGUMENTS.get(kind.__name__, ("what happened",)))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_fault_keeps_whether_it_may_pass_and_its_detail() -> None:
    fault = errors.EngineFault("503", retryable=True, detail="unavailable")
    again = pickle.loads(pickle.dumps(fault))
    assert (again.retryable, again.detail, again.reason) == (
        True, "unavailable", StopReason.ENGINE_ERROR
    )  # fmt: skip


def test_every_fault_has_a_reason_of_its_own() -> None:
    kinds = RolloutFault.__subclasses__()
    assert len({kind.reason for kind in kinds}) == len(kinds)


def test_what_broke_fails_its_sample_and_what_is_withheld_is_given_back() -> None:
    broken = [kind for kind in RolloutFault.__subclasses__() if kind is not errors.Withheld]
    assert all(STATUS_OF[kind.reason] is Status.FAILED for kind in broken)
    withheld = errors.Withheld()
    assert STATUS_OF[withheld.reason] is Status.ABORTED
    assert report_of(withheld.reason, retryable=withheld.retryable) is Report.BACK


def test_errors_of_a_users_input_are_value_errors() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.WireError, ValueError)


def test_the_tree_at_the_top_names_every_error() -> None:
    assert errors.__doc__ is not None
    missing = [kind.__name__ for kind in CLASSES if kind.__name__ not in errors.__doc__]
    assert missing == []
