"""Environments of which every group fails: which counts, what is said, and when the run ends."""

from __future__ import annotations

from structlog.testing import capture_logs

from worker.members.failures import PATIENCE, Failures

WORDS = "http://e answered 400: no such parameter"


def refuse(failures: Failures, env: str, groups: range) -> list[str]:
    """Refuse groups of an environment; return every reason to end the run."""
    answers = (failures.failed(env, f"{env}{g}", WORDS, refused=True) for g in groups)
    return [why for why in answers if why]


def test_the_only_environment_ends_the_run_with_the_engines_words() -> None:
    failures = Failures(["default"], 3)
    assert refuse(failures, "default", range(2)) == []
    assert refuse(failures, "default", range(2)) == []  # the other members of the same groups
    assert refuse(failures, "default", range(2, 3)) == [
        f"3 groups in a row were refused, the last one: {WORDS}"
    ]


def test_an_environment_that_only_fails_ends_no_run_in_which_another_works() -> None:
    failures = Failures(["good", "bad"], 3)
    failures.worked("good")
    assert refuse(failures, "bad", range(100 * PATIENCE)) == []


def test_a_success_changes_no_other_environments_count() -> None:
    failures = Failures(["good", "bad"], 3)
    with capture_logs() as logs:
        for g in range(3):
            refuse(failures, "bad", range(g, g + 1))
            failures.worked("good")
    assert [(entry["event"], entry["env"]) for entry in logs] == [("environment_only_fails", "bad")]


def test_environments_that_all_refuse_end_the_run() -> None:
    failures = Failures(["a", "b"], 2)
    assert refuse(failures, "a", range(9)) == []
    assert refuse(failures, "b", range(1)) == []
    assert len(refuse(failures, "b", range(1, 2))) == 1


def test_an_environment_that_surely_comes_is_waited_for_and_one_that_may_never_come_is_not() -> (
    None
):
    rows_name_theirs, mixed = Failures(["a", "b"], 2), Failures(["a", "b"], 2, all_come=True)
    almost = range(2 * PATIENCE - 1)
    assert refuse(rows_name_theirs, "a", almost) == refuse(mixed, "a", almost) == []
    assert len(refuse(rows_name_theirs, "a", range(90, 91))) == 1
    assert refuse(mixed, "a", range(90, 900)) == []


def test_failures_that_may_pass_are_told_once_and_end_nothing() -> None:
    failures = Failures(["default"], 2)
    with capture_logs() as logs:
        for g in range(50):
            assert failures.failed("default", str(g), "the sandbox is away", refused=False) == ""
        failures.worked("default")
        failures.worked("default")
    assert [entry["event"] for entry in logs] == [
        "environment_only_fails",
        "environment_works_again",
    ]
    assert logs[0]["error"] == "the sandbox is away"
    assert logs[0]["groups"] == 2


def test_a_name_that_is_not_configured_counts_nowhere() -> None:
    failures = Failures(["a"], 1)
    failures.worked("nope")
    assert refuse(failures, "nope", range(9)) == []


def test_a_success_begins_both_counts_of_its_environment_anew() -> None:
    failures = Failures(["a"], 3)
    with capture_logs() as logs:
        for start in (0, 10, 20):
            assert refuse(failures, "a", range(start, start + 2)) == []
            failures.worked("a")
    assert logs == []


def test_an_answer_of_an_engine_ends_a_row_of_refusals_and_no_row_of_failures() -> None:
    failures = Failures(["a"], 3)
    with capture_logs() as logs:
        for start in (0, 10):
            assert refuse(failures, "a", range(start, start + 2)) == []
            failures.answered("a")
            failures.answered("nope")
    assert [entry["event"] for entry in logs] == ["environment_only_fails"]
