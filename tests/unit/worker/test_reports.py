"""How endings are reported: what waits how long, and what counts for what."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from rollstream.errors import MemberReason, Report, StopReason
from rollstream.queue.answers import Lease
from rollstream.sample import Sample
from tests.builders import a_sample
from tests.unit.worker.works import a_book, a_work, an_env, leased
from worker.members.gate import Gate, Position
from worker.members.reports import Reporter, ReportLimits
from worker.members.view import RunView
from worker.members.work import Ending, Work
from worker.telemetry.metrics import Metrics
from worker.telemetry.spans import SpanList


class Sent:
    """Keeps what is put on its way."""

    def __init__(self) -> None:
        self.failed: list[tuple[Report, MemberReason, float, bool]] = []
        self.parked: list[float] = []
        self.completed = 0

    def fail(
        self,
        work: Work,
        report: Report,
        reason: MemberReason,
        error: str,
        delay_s: float = 0.0,
        *,
        forget: bool = False,
    ) -> None:
        self.failed.append((report, reason, delay_s, forget))

    def park(self, work: Work, body: bytes, delay_s: float = 0.0) -> None:
        self.parked.append(delay_s)

    def complete(self, *_: Any) -> None:
        self.completed += 1


class Engines:
    """Always up."""

    def healthy(self) -> bool:
        return True


class Desk:
    """A reporter, and members to report of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("worker.members.reports.random.uniform", lambda a, b: 1.0)
        self.sent, self.gate, self.view = Sent(), Gate(), RunView()
        self.metrics = Metrics(version="0", wire=1, envs=["default"])
        self.left: list[Work] = []
        nothing: Any = None
        sent: Any = self.sent
        self.reporter = Reporter(
            nothing, nothing, self.view, sent, gate=self.gate, health=Engines(),
            limits=ReportLimits(0.5, 2), metrics=self.metrics, left=self.left.append,
        )  # fmt: skip
        self.book = a_book(an_env())

    def work(self, key: str = "0", **fields: Any) -> Work:
        work = a_work(self.book, leased())
        work.lease, work.group.key = Lease(key, 0, "w-1-0"), key
        for name, value in fields.items():
            setattr(work, name, value)
        return work

    async def aborted(self, report: Report, **fields: Any) -> None:
        """Report one attempt that an abort stopped."""
        sample = a_sample(stop_reason=StopReason.ABORT_WEIGHTS)
        ending = Ending(report, StopReason.ABORT_WEIGHTS, sample, reason=MemberReason.ABORT_WEIGHTS)
        await self.reporter.report(self.work(**fields), ending)

    def shown(self, line: str) -> bool:
        self.metrics.flush()
        return line in self.metrics.render().decode().splitlines()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


async def test_an_engine_that_stops_everything_by_itself_is_asked_ever_more_rarely(
    desk: Desk,
) -> None:
    for _ in range(10):
        await desk.aborted(Report.BACK)
    waits = [delay for _, _, delay, _ in desk.sent.failed]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0]
    await desk.aborted(Report.PARK)
    assert desk.sent.parked == [10.0], "what it has changes nothing of that"
    await desk.aborted(Report.BACK, key="1")
    assert desk.sent.failed[-1][2] == 0.1, "each member for itself"


async def test_an_attempt_that_got_somewhere_waits_from_the_beginning(desk: Desk) -> None:
    for _ in range(4):
        await desk.aborted(Report.PARK)
    await desk.aborted(Report.PARK, leased_unix_s=0.0)
    assert desk.sent.parked == [0.1, 0.2, 0.4, 0.8, 0.1]


@pytest.mark.parametrize("position", [Position.KEEP, Position.ABORT])
async def test_what_the_run_itself_stops_waits_for_nothing(desk: Desk, position: Position) -> None:
    desk.gate.move(position)
    for report in (Report.BACK, Report.PARK, Report.BACK):
        await desk.aborted(report)
    assert [delay for _, _, delay, _ in desk.sent.failed] == [0.0, 0.0]
    assert desk.sent.parked == [0.0]


async def test_what_stopped_an_attempt_is_told_by_when_it_stopped_not_by_when_it_is_reported(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(unix_s: float) -> SpanList:
        spans = SpanList()
        spans.record("generate", 0, 90.0, unix_s - 90.0)
        spans.record("tool", 0, unix_s, 500.0)
        return spans

    def moves(position: Position, unix_s: float) -> None:
        monkeypatch.setattr("worker.members.gate.time.time", lambda: unix_s)
        desk.gate.move(position)

    moves(Position.ABORT, 100.0)
    await desk.aborted(Report.BACK, key="before", spans=stopped(99.0))
    moves(Position.OPEN, 101.0)
    for unix_s in (99.5, 100.5, 101.5):
        await desk.aborted(Report.BACK, key=f"{unix_s}", spans=stopped(unix_s))
        await desk.aborted(Report.PARK, key=f"{unix_s}", spans=stopped(unix_s))
    assert [delay for _, _, delay, _ in desk.sent.failed] == [0.1, 0.1, 0.0, 0.1]
    assert desk.sent.parked == [0.2, 0.0, 0.2]

    # No call: its own end counts.
    monkeypatch.setattr("worker.members.reports.time.time", lambda: 100.5)
    await desk.aborted(Report.BACK, key="no call", lifecycle={"attempt_end": 100.7})
    await desk.aborted(Report.BACK, key="no call, late", lifecycle={"attempt_end": 102.0})
    assert [delay for _, _, delay, _ in desk.sent.failed[-2:]] == [0.0, 0.1]


async def test_a_worker_that_ends_gives_back_for_that_reason(desk: Desk) -> None:
    desk.gate.stop()
    await desk.aborted(Report.BACK)
    assert desk.sent.failed == [(Report.BACK, MemberReason.SHUTDOWN, 0.0, False)]


async def test_a_parked_member_is_counted_where_it_ends_and_only_there(desk: Desk) -> None:
    await desk.aborted(Report.PARK)
    assert desk.shown("rollout_parked_samples_total 1.0")
    assert desk.shown('rollout_tokens_total{kind="sampled"} 0.0')
    done = a_sample(turns=(((4, 5), (9,)), ((6,), ())), reward=1.0)
    await desk.reporter.report(desk.work(resumes=1), Ending(Report.COMPLETE, StopReason.STOP, done))
    assert desk.sent.completed == 1
    assert desk.shown("rollout_resumed_samples_total 1.0")
    assert desk.shown('rollout_tokens_total{kind="sampled"} 3.0')


async def test_tokens_that_stay_parked_behind_a_failed_attempt_are_not_discarded(
    desk: Desk,
) -> None:
    def failed(work: Work, **how: Any) -> None:
        sample = a_sample(stop_reason=StopReason.ENGINE_ERROR)
        ending = Ending(
            Report.RETRY, StopReason.ENGINE_ERROR, sample, reason=MemberReason.ENGINE_ERROR, **how
        )
        desk.reporter.end(work, ending)

    failed(desk.work(resumes=1))
    assert desk.shown('rollout_tokens_total{kind="discarded"} 0.0')
    failed(desk.work(resumes=1), forget=True)
    failed(desk.work())
    assert desk.shown('rollout_tokens_total{kind="discarded"} 4.0')
    assert [forget for *_, forget in desk.sent.failed] == [False, True, False]


@pytest.mark.parametrize("report", [Report.COMPLETE, Report.PARK])
async def test_what_is_too_large_or_has_no_wire_form_fails_that_member(
    desk: Desk, report: Report
) -> None:
    reason = StopReason.STOP if report is Report.COMPLETE else StopReason.ABORT_WEIGHTS
    odd = a_sample(stop_reason=reason, metadata={"x": object()})
    await desk.reporter.report(desk.work(), Ending(report, reason, odd))
    desk.view.max_body_bytes = 64
    await desk.reporter.report(desk.work(), Ending(report, reason, a_sample(stop_reason=reason)))
    assert [(sent, why) for sent, why, *_ in desk.sent.failed] == [
        (Report.FINAL, MemberReason.AGENT_ERROR),
        (Report.FINAL, MemberReason.TOO_LARGE),
    ]
    assert desk.sent.parked == []


async def test_refusals_of_evaluations_end_no_run_and_count_for_themselves(desk: Desk) -> None:
    for place in range(4):
        ending = Ending(
            Report.FINAL, StopReason.ENGINE_ERROR, Sample(), MemberReason.ENGINE_ERROR, refused=True
        )
        desk.reporter.end(desk.work(key=f"e:x:{place}"), ending)
    assert desk.reporter._failing is None
    assert desk.shown('rollout_evaluation_samples_total{status="failed"} 4.0')
    assert desk.shown(
        'rollout_samples_total{env="default",reason="engine_error",status="failed"} 0.0'
    )


async def test_an_environment_whose_agents_only_break_is_told_once_and_ends_no_run(
    desk: Desk,
) -> None:
    reason = StopReason.AGENT_ERROR

    async def ended(key: str, stop_reason: StopReason, **metadata: Any) -> None:
        sample = a_sample(stop_reason=stop_reason, metadata=metadata)
        ending = Ending(Report.COMPLETE, stop_reason, sample)
        await desk.reporter.report(desk.work(key=key), ending)

    with capture_logs() as logs:
        for key in ("0", "0", "1", "2", "3"):
            await ended(key, reason, error="AgentFault: the agent raised KeyError")
        await ended("4", StopReason.STOP)
        await ended("5", StopReason.TURN_LENGTH)
        await ended("6", reason)
    told = [entry for entry in logs if entry["event"].startswith("environment")]
    assert [(entry["event"], entry.get("error")) for entry in told] == [
        ("environment_only_fails", "AgentFault: the agent raised KeyError"),
        ("environment_works_again", None),
    ]
    assert desk.reporter._failing is None


async def test_an_outage_of_all_engines_is_no_environments_failure(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engines, "healthy", lambda _: False)
    with capture_logs() as logs:
        for place in range(4):
            ending = Ending(
                Report.RETRY, StopReason.ENGINE_ERROR, Sample(), MemberReason.ENGINE_ERROR
            )
            desk.reporter.end(desk.work(key=str(place)), ending)
    assert logs == []
    assert {(report, why) for report, why, *_ in desk.sent.failed} == {
        (Report.BACK, MemberReason.NO_ENGINE)
    }
