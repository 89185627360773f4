"""Steering a run from the command line: what each command changes, says and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from rollstream.cli.__main__ import main
from rollstream.cli.control import BUDGETS, Choice
from rollstream.queue import calls
from rollstream.queue.keys import window_of
from rollstream.settings import Settings
from tests.backstage import Backstage, wait_until

Outcome = tuple[int, str, str]
Command = Callable[..., Outcome]


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name, max_requeues=1) as backstage:
        yield backstage.open()


@pytest.fixture
def command(
    run: Backstage,
    valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Call the command line for this run: exit code, standard output, standard error."""

    def call(*argv: str) -> Outcome:
        code = main([*argv, "--redis", valkey_url, "--run", run.queue.run])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def said(outcome: Outcome) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome[1])
    return found


def m(run: Backstage, field: str) -> str:
    value: Any = run.queue.client.hget(f"{run.queue.prefix}m", field)
    return str(value.decode())


def held(run: Backstage, group_index: int) -> None:
    """Bring a group into a trainer's hands."""
    run.finish(group_index)
    run.queue.call(calls.connect("c", 1))
    run.queue.call(calls.deliver("c", [str(group_index)]))


# --- pause, resume, abort ------------------------------------------------------------------------
def test_pause_and_resume_change_the_state_and_may_be_repeated(
    run: Backstage, command: Command
) -> None:
    run.enqueue(0)
    for mode in ("keep", "keep", "abort"):
        assert command("pause", "--mode", mode) == (0, f"run {run.queue.run}: paused\n", "")
        assert m(run, "pause_mode") == mode
        assert run.lease() == []
    for _ in range(2):
        assert said(command("resume", "--json")) == {"run": run.queue.run, "state": "running"}
    assert len(run.lease()) == 2


def test_a_pause_with_a_deadline_ends_by_itself(
    run: Backstage, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("pause", "--mode", "abort", "--deadline", "0.1")[0] == 0
    wait_until(lambda: run.queue.call(calls.sweep()) and m(run, "state") == "running")
    with pytest.raises(SystemExit):
        command("pause", "--deadline", "-1")
    assert "--deadline: -1 is not between" in capsys.readouterr().err
    assert m(run, "state") == "running"


def test_set_changes_what_becomes_of_stale_groups(run: Backstage, command: Command) -> None:
    for key, word in (("weights.on_stale", "requeue"), ("on_stale", "deliver")):
        expected = f"run {run.queue.run}: weights.on_stale = {word}\n"
        assert command("set", key, word) == (0, expected, "")
        assert m(run, "on_stale") == word


@pytest.mark.parametrize("name", ["pause", "resume"])
def test_an_ended_run_is_neither_paused_nor_resumed(
    run: Backstage, command: Command, name: str
) -> None:
    run.queue.call(calls.fail_run("no engine"))
    code, out, err = command(name)
    assert (code, out) == (1, "")
    assert f"run '{run.queue.run}' is failed (no engine)" in err


def test_abort_drops_what_is_live_and_ends_the_run(run: Backstage, command: Command) -> None:
    run.enqueue(*range(40))
    run.lease(6)
    answer = said(command("abort", "--yes", "--reason", "wrong data", "--json"))
    assert answer == {"run": run.queue.run, "state": "ended", "dropped": 40, "live": 0}
    assert run.queue.counters()["dropped:run_aborted"] == 40
    assert m(run, "error") == "wrong data"
    assert command("abort", "--yes")[0] == 0
    assert run.queue.call(calls.audit(deep=True)).problems == []


def test_abort_without_a_yes_changes_nothing(run: Backstage, command: Command) -> None:
    run.enqueue(0)
    code, _, err = command("abort")
    assert code == 2
    assert "--yes" in err
    assert m(run, "state") == "running"


# --- one group -----------------------------------------------------------------------------------
def test_withdraw_drops_a_live_group_once(run: Backstage, command: Command) -> None:
    run.enqueue(7)
    assert command("withdraw", "7") == (0, f"run {run.queue.run}: group 7 dropped\n", "")
    code, out, _ = command("withdraw", "7")
    assert code == 1
    assert "it is not live" in out
    assert run.queue.counters()["dropped:withdrawn"] == 1


def test_requeue_runs_a_group_again_as_often_as_the_run_permits(
    run: Backstage, command: Command
) -> None:
    run.enqueue(7)
    run.lease()
    assert command("requeue", "7")[0] == 0
    assert len(run.lease()) == 2
    code, out, _ = command("requeue", "7")
    assert code == 1
    assert "rollstream set max_requeues N" in out
    assert command("set", "max_requeues", "2")[0] == 0
    assert command("requeue", "7")[0] == 0
    assert said(command("requeue", "8", "--json"))["outcome"] == "gone"


@pytest.mark.parametrize("name", ["withdraw", "requeue"])
def test_a_group_in_a_trainers_hands_stays_there(
    run: Backstage, command: Command, name: str
) -> None:
    held(run, 3)
    code, out, _ = command(name, "3", "--json")
    assert code == 1
    assert json.loads(out)["outcome"] == "held"
    assert "a trainer has it in hand" in json.loads(out)["why"]
    assert run.queue.call(calls.ack("c", ["3"])) == ["acked"]


@pytest.mark.parametrize("name", ["withdraw", "requeue"])
def test_a_group_that_is_none_is_refused_before_anything_is_done(
    command: Command, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as error:
        command(name, "seven")
    assert error.value.code == 2
    assert "is no group" in capsys.readouterr().err


# --- budgets -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value", "field", "stored"),
    [
        ("producer.capacity_groups", "9000", "cap", "9000"),
        ("capacity_groups", "3", "cap", "3"),
        ("worker.lease_s", "2.5", "lease_ms", "2500"),
        ("worker.max_attempts", "7", "max_attempts", "7"),
        ("worker.max_crashes", "2", "max_crashes", "2"),
        ("worker.max_body_bytes", "4096", "max_body", "4096"),
        ("weights.max_staleness", "-1", "max_stale", "-1"),
        ("max_staleness", "4", "max_stale", "4"),
        ("max_requeues", "0", "max_requeues", "0"),
        ("weights.max_requeues", "5", "max_requeues", "5"),
    ],
)
def test_set_changes_one_budget(
    run: Backstage, command: Command, key: str, value: str, field: str, stored: str
) -> None:
    answer = said(command("set", key, value, "--json"))
    assert (answer["key"].rpartition(".")[2], answer["value"]) == (
        key.rpartition(".")[2],
        float(value),
    )
    assert m(run, field) == stored
    if field == "cap":
        assert m(run, "W") == str(window_of(int(value)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("worker.lease_s", "0.1", "expected a number from 0.5 to 86400"),
        ("worker.lease_s", "nan", "expected a number"),
        ("capacity_groups", "0", "expected a whole number from 1 to 1e+06"),
        ("max_attempts", "2.5", "expected a whole number"),
        ("max_body_bytes", "many", "expected a whole number"),
        ("worker.max_attemps", "2", "did you mean worker.max_attempts?"),
        ("capacity_group", "2", "did you mean producer.capacity_groups?"),
        ("engine.urls", "x", "cannot be set in a running run"),
        ("on_stale", "keep", "expected drop or requeue or deliver"),
    ],
)
def test_set_refuses_what_it_cannot_set(
    run: Backstage, command: Command, key: str, value: str, message: str
) -> None:
    before = run.queue.client.hgetall(f"{run.queue.prefix}m")
    code, out, err = command("set", key, value)
    assert (code, out) == (2, "")
    assert message in err
    assert run.queue.client.hgetall(f"{run.queue.prefix}m") == before


def test_set_has_the_names_and_lower_bounds_of_the_configuration() -> None:
    for name, budget in BUDGETS.items():
        table, _, key = name.rpartition(".")
        kind = Settings.model_fields[table].annotation
        assert kind is not None
        if isinstance(budget, Choice):
            given = kind.model_fields[key].annotation
            assert set(budget.words) <= set(get_args(get_args(given)[0]))
            continue
        bounds = kind.model_fields[key].metadata
        (low,) = [bound.ge for bound in bounds if hasattr(bound, "ge")]
        assert budget.low == low, name
        for high in [bound.le for bound in bounds if hasattr(bound, "le")]:
            assert budget.high == high, name


def test_capacity_that_was_raised_lets_a_waiting_producer_go_on(
    run: Backstage, command: Command
) -> None:
    command("set", "capacity_groups", "2")
    assert run.enqueue(0, 1, 2) == ["new", "new", "full"]
    command("set", "capacity_groups", "3")
    assert run.enqueue(2) == ["new"]


@pytest.mark.parametrize(
    "argv", [("pause",), ("resume",), ("abort", "--yes"), ("withdraw", "1"), ("requeue", "1"),
             ("set", "max_attempts", "2"), ("engines",), ("engines", "--set", "http://a")],
)  # fmt: skip
def test_an_unknown_run_is_exit_code_3(
    valkey_url: str, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]
) -> None:
    assert main([*argv, "--redis", valkey_url, "--run", "no-such-run"]) == 3
    assert "no run 'no-such-run'" in capsys.readouterr().err
