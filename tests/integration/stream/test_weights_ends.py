"""Updates whose end is none of the plan: pushes that raise, workers, Redis, other pauses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from rollstream.errors import (
    ConsumerTaken,
    PauseNotConfirmed,
    RunFailed,
    StreamError,
    StreamStalled,
)
from rollstream.queue import calls
from rollstream.runs import Interrupted
from rollstream.stream import GroupStream
from rollstream.trainer.control import PauseMode
from tests.backstage import Backstage, wait_until
from tests.integration.stream.crew import Hand, an_engine, finish, info_of, told
from tests.proxy import Proxy
from tests.unit.stream.test_engine_posts import engines

Connect = Callable[..., GroupStream]


Hire = Callable[..., Hand]


# --- ends that are none of the plan --------------------------------------------------------------
class Boom(BaseException):
    """No Exception, as KeyboardInterrupt is none."""


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, Boom])
def test_a_push_that_raises_leaves_the_old_version_and_a_run_that_goes_on(
    run: Backstage, connect: Connect, hire: Hire, kind: type[BaseException]
) -> None:
    with engines(1) as servers:
        hire(engines=[an_engine(servers[0].url)])
        stream = connect()
        finish(run, 0)
        batch = stream.next_batch(1, 5)
        assert batch is not None
        with pytest.raises(kind), stream.updating_weights(7, ack=batch):
            raise kind
        # Its label again, before the run goes on.
        assert servers[0].got == [told("0~7"), told("default")]
    assert not batch.acked
    assert (info_of(run).state, info_of(run).version, stream.version) == ("running", 0, 0)
    with stream.updating_weights(1, post=False, ack=batch):
        pass
    assert info_of(run).version == 1
    assert stream.metrics()["stream/updates_failed"] == 1


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_an_interrupt_while_workers_are_waited_for_resumes(
    run: Backstage, connect: Connect, hire: Hire, kind: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    hire(obeys=False)
    stream = connect()

    def interrupted() -> Any:
        assert info_of(run).state == "paused"
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(stream._hold.queue, "confirmations", interrupted)
        with pytest.raises(kind), stream.updating_weights(1):
            raise AssertionError("entered")
    assert (info_of(run).state, info_of(run).version) == ("running", 0)
    stream.set_weight_version(1)


def test_a_worker_that_does_not_obey_is_named_and_the_run_goes_on(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    hire()
    deaf = hire(obeys=False)
    stream = connect()
    with (
        pytest.raises(PauseNotConfirmed, match="heard of -1 of") as failure,
        stream.updating_weights(1, confirm_s=0.2),
    ):
        raise AssertionError("entered")
    assert failure.value.workers == (deaf.name,)
    assert run.queue.run in str(failure.value)
    assert (info_of(run).state, info_of(run).version, stream.version) == ("running", 0, 0)
    deaf.obeys = True
    with stream.updating_weights(1, post=False):
        pass


def test_a_worker_that_dies_while_it_is_waited_for_stops_counting_after_its_lease(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    hire(engines=[an_engine("http://a")])
    victim = hire(obeys=False, engines=[an_engine("http://b")])
    stream = connect()

    def kill() -> None:
        wait_until(lambda: info_of(run).state == "paused")
        victim.die()

    killer = threading.Thread(target=kill)
    killer.start()
    with stream.updating_weights(1, post=False) as update:
        assert len(update.workers) == 1
        assert victim.name not in update.workers
        assert update.engines == ["http://a"]
        # Redis has not even forgotten it yet.
        assert victim.name in {one.worker for one in run.queue.confirmations()}
    killer.join(20)


def test_nobody_at_work_is_nobody_to_wait_for(
    run: Backstage, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    stream = connect()
    with stream.updating_weights(1) as update:
        assert (update.workers, update.engines) == ([], [])
    assert info_of(run).version == 1
    assert "no engine is known" in caplog.text


def test_a_run_that_is_ended_in_the_block_is_told_and_stays_ended(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    with pytest.raises(RunFailed, match="enough"), stream.updating_weights(1, post=False):
        run.queue.call(calls.fail_run("enough"))
    assert info_of(run).state == "failed"
    # And where the push raised too, its error is the one that counts.
    with pytest.raises(RunFailed, match="enough"), stream.updating_weights(2, post=False):
        raise AssertionError("entered")
    stream.close()


def test_the_error_of_a_push_is_not_hidden_by_a_run_that_ended(
    run: Backstage, connect: Connect
) -> None:
    def push() -> None:
        run.queue.call(calls.fail_run("enough"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), connect().updating_weights(1):
        push()


def test_a_run_that_is_ended_while_workers_are_waited_for_is_told(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    hire(obeys=False)
    stream = connect()
    ender = threading.Thread(
        target=lambda: (
            wait_until(lambda: info_of(run).state == "paused"),
            run.queue.call(calls.fail_run("enough")),
        )
    )
    ender.start()
    with pytest.raises(RunFailed, match="enough"), stream.updating_weights(1):
        raise AssertionError("entered")
    ender.join(20)


@pytest.mark.parametrize("fails", [False, True])
def test_a_pause_that_an_operator_sets_in_the_block_stands_behind_it(
    run: Backstage, connect: Connect, fails: bool
) -> None:
    stream = connect()
    with contextlib.suppress(KeyError), stream.updating_weights(1, post=False):
        run.queue.call(calls.pause("keep"))
        if fails:
            raise KeyError
    assert (info_of(run).state, info_of(run).version) == ("paused", 1 - fails)
    stream.resume()
    assert info_of(run).state == "running"


@pytest.mark.slow
def test_a_pause_that_is_over_here_and_stands_in_redis_again_is_ended_by_who_waits_for_groups(
    run: Backstage, connect: Connect
) -> None:
    stream, kept = connect(), []
    with stream.updating_weights(1, post=False):
        kept.append(run.keys())
    run.roll_back(kept[0])
    assert info_of(run).state == "paused"
    wait_until(lambda: ended(stream) and info_of(run).state == "running")
    assert info_of(run).version == 1
    # An operator's is nobody else's to end, nor one of this trainer that still stands.
    for pause in (lambda: run.queue.call(calls.pause("keep")), stream.pause):
        pause()
        ended(stream)
        assert info_of(run).state == "paused"
        stream.resume()


def ended(stream: GroupStream) -> bool:
    """Wait in vain for a group, over some looks at the run."""
    with contextlib.suppress(StreamStalled, Interrupted):
        # A pause of its own does not stall a trainer, so that wait is interrupted.
        interrupt = threading.Event()
        timer = threading.Timer(0.8, interrupt.set)
        timer.start()
        try:
            stream.next_batch(1, 0.6, interrupt)
        finally:
            timer.cancel()
            timer.join()
    return True


@pytest.mark.parametrize(
    ("weights_mode", "how", "clears"),
    [
        ("colocated", {}, True),
        ("colocated", {"mode": "keep"}, True),
        ("colocated", {"mode": "keep", "wait_idle": False}, False),
        ("on_policy", {}, False),
        ("async", {"mode": "abort"}, False),
    ],
)
def test_engines_that_share_the_trainers_gpus_are_told_to_stop_what_dead_workers_asked(
    run: Backstage,
    connect: Connect,
    hire: Hire,
    caplog: pytest.LogCaptureFixture,
    weights_mode: str,
    how: dict[str, Any],
    clears: bool,
) -> None:
    run.budgets["weights_mode"] = weights_mode
    run.open()
    with engines(2) as (sglang, other):
        other.answer = (404, b"")
        hire(engines=[an_engine(sglang.url), an_engine(other.url)])
        stream = connect()
        for version in (1, 2):
            with stream.updating_weights(version, post=False, **how):
                times = version if clears else 0
                first: tuple[str, object] = ("/abort_request", {"abort_all": True})
                assert sglang.got == [first] * times
                assert other.got == [first, ("/abort_requests", {"request_ids": []})] * times
    said = [r for r in caplog.records if "did not stop all calls" in r.getMessage()]
    assert len(said) == clears, "once an engine"
    assert all("HTTP 404" in r.getMessage() for r in said)


def test_a_label_that_comes_back_keeps_its_meaning_until_the_new_weights_are_in_place(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    stream.set_weight_version(3, "again")
    with pytest.raises(KeyError), stream.updating_weights(4, label="again", post=False):
        raise KeyError
    assert info_of(run).labels == {"again": 3}, "the push failed: it is what they have"
    with stream.updating_weights(4, label="again", post=False):
        assert info_of(run).labels == {"again": 3}
    assert info_of(run).labels == {"again": 4}


def test_a_trainer_that_was_taken_over_in_its_block_changes_nothing(
    run: Backstage, connect: Connect, hire: Hire, caplog: pytest.LogCaptureFixture
) -> None:
    with engines(1) as servers:
        hire(engines=[an_engine(servers[0].url)])
        older, newer = connect(), []

        def take_over() -> None:
            newer.append(connect())
            newer[0].pause("abort")

        with pytest.raises(ConsumerTaken), older.updating_weights(5):
            take_over()
        assert servers[0].got == [told("0~5")], "a label that means nothing; the other one names it"
        assert "keep a label that means no version" in caplog.text
        assert (info_of(run).state, info_of(run).pause_mode) == ("paused", "abort")
        assert info_of(run).version == 0
        newer[0].resume()
    assert info_of(run).state == "running"


def test_a_stream_that_was_closed_in_the_block_says_so(run: Backstage, connect: Connect) -> None:
    stream = connect()
    with pytest.raises(StreamError, match="closed"), stream.updating_weights(1, deadline_s=0.2):
        stream.close()
    # Nobody resumes it but its deadline, by whoever sweeps.
    wait_until(lambda: run.queue.call(calls.sweep()) and info_of(run).state == "running")
    assert info_of(run).version == 0
    assert run.queue.counters()["pauses_expired"] == 1


def test_a_push_that_takes_longer_than_the_deadline_is_told(
    run: Backstage, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    stream = connect()
    with stream.updating_weights(1, deadline_s=0.1, post=False):
        wait_until(lambda: run.queue.call(calls.sweep()) and info_of(run).state == "running")
    assert (info_of(run).state, info_of(run).version) == ("running", 1)
    assert "the pause ended before the new weights were in place" in caplog.text


# --- Redis that is away, or forgets --------------------------------------------------------------
def test_an_outage_in_the_block_is_waited_out_at_its_end(
    run: Backstage, valkey_url: str, hire: Hire
) -> None:
    hire()
    with (
        Proxy(int(valkey_url.rpartition(":")[2])) as proxy,
        GroupStream.connect(f"redis://127.0.0.1:{proxy.port}", run=run.queue.run) as stream,
        stream.updating_weights(1, post=False),
    ):
        proxy.cut()
        threading.Timer(0.3, proxy.mend).start()
    assert (info_of(run).state, info_of(run).version) == ("running", 1)


def test_a_push_that_raises_in_an_outage_leaves_the_resume_to_the_deadline(
    run: Backstage, valkey_url: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("rollstream.updates.pausing.UNDO_TIMEOUT_S", 0.2)
    with Proxy(int(valkey_url.rpartition(":")[2])) as proxy:

        def push() -> None:
            proxy.cut()
            raise ZeroDivisionError

        with (
            GroupStream.connect(f"redis://127.0.0.1:{proxy.port}", run=run.queue.run) as stream,
            pytest.raises(ZeroDivisionError),
            stream.updating_weights(1, deadline_s=0.5),
        ):
            push()
        assert "ends by itself within 0.5 s" in caplog.text
    wait_until(lambda: run.queue.call(calls.sweep()) and info_of(run).state == "running")
    assert info_of(run).version == 0


def test_a_pause_that_redis_forgot_is_set_again_before_the_block_begins(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    deaf = hire(obeys=False)
    stream = connect()
    before = run.keys()
    restored = threading.Event()

    def forget() -> None:
        wait_until(lambda: info_of(run).state == "paused")
        run.roll_back(before)
        wait_until(lambda: info_of(run).state == "paused")
        restored.set()
        deaf.obeys = True

    thread = threading.Thread(target=forget)
    thread.start()
    with stream.updating_weights(1, post=False):
        assert restored.is_set()
        assert info_of(run).state == "paused"
    thread.join(20)
    assert (info_of(run).state, info_of(run).version) == ("running", 1)


def test_a_label_that_redis_forgot_is_told_again(run: Backstage, connect: Connect) -> None:
    stream = connect()
    before = run.keys()
    with stream.updating_weights(2, label="v2", post=False):
        pass
    run.roll_back(before)
    assert info_of(run).labels == {}
    stream.state_dict()
    assert (info_of(run).labels, info_of(run).version) == ({"v2": 2}, 2)


# --- other pauses --------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["keep", "abort"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_pause_that_somebody_set_for_good_stands_again_behind_an_update(
    run: Backstage, connect: Connect, mode: str, fails: bool
) -> None:
    run.queue.call(calls.pause(mode))
    stream = connect()
    other = "keep" if mode == "abort" else "abort"
    try:
        with stream.updating_weights(1, cast(PauseMode, other), post=False):
            assert info_of(run).pause_mode == other
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    assert (info_of(run).state, info_of(run).pause_mode) == ("paused", mode)
    assert info_of(run).version == (0 if fails else 1)
    stream.resume()
    assert info_of(run).state == "running"


def test_the_pause_of_a_trainer_that_died_in_its_update_ends_with_the_next_one(
    run: Backstage, connect: Connect
) -> None:
    dead = connect()
    dead.updating_weights(1).__enter__()
    dead.close()
    stream = connect()
    assert info_of(run).state == "paused"
    with stream.updating_weights(1, post=False):
        pass
    assert (info_of(run).state, info_of(run).version) == ("running", 1)


def test_a_pause_with_a_deadline_ends_by_itself(run: Backstage, connect: Connect) -> None:
    stream = connect()
    stream.pause("abort", deadline_s=0.1)
    assert info_of(run).pause_mode == "abort"
    wait_until(lambda: run.queue.call(calls.sweep()) and info_of(run).state == "running")
    with pytest.raises(ValueError, match="deadline_s"):
        stream.pause(deadline_s=-1)


def test_drain_returns_once_no_call_is_in_flight_and_resume_goes_on(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    hand = hire(in_flight=2)
    stream = connect()
    with pytest.raises(PauseNotConfirmed, match="2 calls in flight"):
        stream.drain(timeout_s=0.2)
    assert info_of(run).state == "running"
    hand.in_flight = 0
    stream.drain()
    assert (info_of(run).state, info_of(run).pause_mode) == ("paused", "keep")
    stream.resume()
    assert info_of(run).state == "running"
