"""Waits while the run is paused, or its engines take no calls: what is an error, what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rollstream.errors import StreamStalled
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.backstage import Backstage, wait_until
from tests.integration.stream.crew import Hand, an_engine

Connect = Callable[..., GroupStream]
Hire = Callable[..., Hand]


def test_a_wait_does_not_stall_while_this_trainer_has_paused_the_run(
    run: Backstage, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    stream = connect()
    run.enqueue(0)
    stream.pause()
    found: list[Any] = []

    def wait() -> None:
        try:
            found.append(stream.next_batch(1, 0.2))
        except StreamStalled as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    # Twice the time, at least, as the log tells: nothing can end, and that is our own doing.
    wait_until(lambda: "by this trainer: resume() ends it" in caplog.text)
    assert waiting.is_alive()
    stream.resume()
    waiting.join(20)
    assert found
    assert "nothing ended for 0.2 s" in found[0]
    assert "paused" not in found[0]


def test_what_was_seen_before_a_resume_is_not_said_behind_it(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.enqueue(0)
    stream.pause()
    stream._hold.pulse()  # it has seen the pause, and looks again only a while later
    stream.resume()
    with pytest.raises(StreamStalled) as caught:
        stream.next_batch(1, 0.01)
    assert "paused" not in str(caught.value)


def test_a_wait_goes_on_over_an_update_in_another_thread(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.enqueue(0)
    found: list[Any] = []
    pushed = threading.Event()

    def update() -> None:
        with stream.updating_weights(1, post=False):
            pushed.wait(20)

    updating = threading.Thread(target=update)
    updating.start()
    wait_until(lambda: stream._weights.current is not None)
    waiting = threading.Thread(target=lambda: found.append(stream.next_batch(1, 0.3)))
    waiting.start()
    wait_until(lambda: stream._hold.info.state == "paused")
    pushed.set()
    updating.join(20)
    run.work()
    waiting.join(20)
    assert found[0].group_indexes == [0]


def test_a_pause_of_somebody_else_is_told_with_its_mode_and_age(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.enqueue(0)
    run.queue.call(calls.pause("abort"))
    with pytest.raises(StreamStalled, match=r"paused \(abort\) since \d+ s, by somebody else"):
        stream.next_batch(1, 0.2)
    # Ours takes it over, theirs ends it: both are seen.
    stream.pause("keep")
    run.queue.call(calls.resume())
    with pytest.raises(StreamStalled, match="0 are ready") as stalled:
        stream.next_batch(1, 0.2)
    assert "paused" not in str(stalled.value)


def test_a_stall_names_engines_that_take_no_calls(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    stream = connect()
    stream.set_weight_version(5)
    run.enqueue(0)
    behind, up = an_engine("http://a", "behind", 3), an_engine("http://c", "up", 5)
    unknown, paused = an_engine("http://d", "behind", None), an_engine("http://b", "paused", 5)
    hire(engines=[behind, paused, up, unknown])
    hire(engines=[behind, an_engine("http://c", "down", 5)])
    with pytest.raises(StreamStalled) as stalled:
        stream.next_batch(1, 0.2)
    assert (
        "3 of 4 engines take no calls: http://a is behind (version 3, the run has 5), "
        "http://b is paused, http://d is behind (unknown weights, the run has 5)"
    ) in str(stalled.value)


def test_metrics_tell_workers_calls_engines_and_updates(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    stream = connect()
    hire(in_flight=2, engines=[an_engine("http://a"), an_engine("http://b", "paused")])
    hire(in_flight=1, engines=[an_engine("http://a"), an_engine("http://c", "behind")])
    with stream.updating_weights(1, post=False):
        pass
    figures = stream.metrics()
    expected = {
        "stream/workers": 2,
        "stream/calls_in_flight": 3,
        "stream/engines/up": 1,
        "stream/engines/paused": 1,
        "stream/engines/behind": 1,
        "stream/pauses": 1,
        "stream/updates": 1,
        "stream/updates_failed": 0,
    }
    assert {name: figures[name] for name in expected} == expected
    assert 0 < figures["stream/update_enter_s"] <= figures["stream/update_s"]
    assert figures["stream/updating_s"] == figures["stream/update_s"]
