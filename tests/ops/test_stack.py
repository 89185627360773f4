"""The real stack, watched by a real Prometheus: everything has an answer, and every alert fires.

Runs what the compose file runs, from its very `command:` lists, under load. What is broken, and
what must be seen then, stands in `tests/ops/stack/faults.py`. Nothing here is about how long
something takes: limits are generous, and what was waited for must be seen, not be there on time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.ops.composed import ROOT
from tests.ops.stack.expressions import Dashboard, Expression, of_rules
from tests.ops.stack.faults import FAULTS, PHASES, Fault
from tests.ops.stack.processes import Stack
from tests.ops.stack.watch import Watch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="replicas need Linux's loopback"),
]
DASHBOARDS = ROOT / "ops" / "grafana" / "dashboards"
INTERVAL = "10s"
"""What `$__rate_interval` is: many scrapes."""
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Stack]:
    """Everything runs and is well; whatever a test breaks it mends."""
    made = Stack(tmp_path_factory.mktemp("stack"), vocabulary)
    try:
        made.up()
        yield made
    except BaseException:
        made.stop()
        raise
    made.close()


@pytest.fixture(scope="module")
def watch(stack: Stack) -> Watch:
    return Watch(stack.prometheus, stack.alertmanager)


def expressions_of(stack: Stack) -> list[Expression]:
    """Return every expression, of panels and rules, once all variables have something to choose."""

    def dashboards() -> list[Dashboard] | None:
        files = sorted(DASHBOARDS.glob("*.json"))
        made = [Dashboard(file, stack.prometheus, INTERVAL) for file in files]
        return None if any(one.empty for one in made) else made

    found = list(of_rules(stack.prometheus))
    for dashboard in stack.wait(dashboards, "every variable has something to choose from"):
        found += dashboard.expressions()
    names = [one.name for one in found]
    assert len(set(names)) == len(names), "two expressions of one name"
    return found


def needs_fault(name: str, faults: Sequence[Fault] = FAULTS) -> bool:
    """Whether an expression has an answer only while something is broken."""
    return name in {f"alert {alert}" for fault in faults for alert in fault.alerts}


def test_prometheus_finds_every_worker_by_the_name_that_they_share(stack: Stack) -> None:
    wanted = {stack.address("worker", number) for number in stack.numbers("worker")}
    targets = stack.wait(
        lambda: (
            (found := stack.prometheus.targets())
            and {one.instance for one in found if one.job == "rollstream-worker"} == wanted
            and all(one.health == "up" for one in found)
            and found
        ),
        "all targets are found and up",
    )
    assert {one.job for one in targets} == {
        "rollstream-worker", "rollstream-exporter", "redis", "prometheus"
    }  # fmt: skip


def test_prometheus_asks_dns_for_the_workers(stack: Stack) -> None:
    if stack.names is None:
        pytest.skip("no process can have a resolver of its own here: targets are written down")
    asked = stack.names.asked["worker"]
    stack.wait(lambda: stack.names and stack.names.asked["worker"] > asked, "asked again")


def test_every_rule_is_evaluated_and_every_alert_has_a_fault(stack: Stack) -> None:
    rules = stack.wait(
        lambda: (
            (found := stack.prometheus.rules())
            and all(one.health != "unknown" for one in found)
            and found
        ),
        "all rules were evaluated",
    )
    assert [one for one in rules if one.health != "ok"] == []
    alerts = {one.name for one in rules if one.kind == "alerting"}
    assert alerts == {alert for fault in FAULTS for alert in fault.alerts}


def test_every_expression_has_an_answer_and_what_needs_a_fault_has_none(
    stack: Stack, watch: Watch
) -> None:
    expressions = expressions_of(stack)
    plain = [one for one in expressions if not needs_fault(one.name)]
    faulty = [one for one in expressions if needs_fault(one.name)]
    watch.forget()

    def missing() -> list[str]:
        watch.ask(one for one in plain if one.name not in watch.answered)
        watch.ask(one for one in faulty if one.name not in watch.silent)
        return [
            *(f"{n.name}: {watch.silent[n.name]}" for n in plain if n.name not in watch.answered),
            *(f"{n.name}: answers without a fault" for n in faulty if n.name not in watch.silent),
        ]

    wait_for_none(stack, missing)


@pytest.mark.parametrize("phase", PHASES)
def test_alerts_fire_reach_alertmanager_and_end(stack: Stack, watch: Watch, phase: str) -> None:
    faults = PHASES[phase]
    alerts = {alert for fault in faults for alert in fault.alerts}
    asked = [one for one in expressions_of(stack) if needs_fault(one.name, faults)]
    stack.wait(lambda: watch.over(alerts), f"none of {alerts} fires yet", LIMIT_S)
    watch.forget()

    def missing() -> list[str]:
        watch.look()
        watch.ask(one for one in asked if one.name not in watch.answered)
        return [
            *(f"{name} does not fire" for name in alerts - watch.fired),
            *(f"{name} is not in Alertmanager" for name in alerts - watch.told),
            *(f"{n.name}: {watch.silent[n.name]}" for n in asked if n.name not in watch.answered),
        ]

    with contextlib.ExitStack() as mended:
        for fault in faults:
            mended.callback(fault.end, stack)
            fault.begin(stack)
        with again_and_again(stack, faults):
            wait_for_none(stack, missing)
    stack.wait(lambda: watch.over(alerts), f"all of {alerts} end", LIMIT_S)


@contextlib.contextmanager
def again_and_again(stack: Stack, faults: Sequence[Fault]) -> Iterator[None]:
    """Do what the faults do again and again, from a thread, until the block ends."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            for fault in faults:
                fault.meanwhile(stack)
            over.wait(0.05)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LIMIT_S)


def wait_for_none(stack: Stack, missing: Callable[[], list[str]]) -> None:
    """Wait until nothing is missing any more; a failure names what is."""
    last: list[str] = []

    def none() -> bool:
        last[:] = missing()
        return not last

    try:
        stack.wait(none, "seen", LIMIT_S)
    except AssertionError as error:
        raise AssertionError("\n".join(["missing:", *last, str(error)])) from None
