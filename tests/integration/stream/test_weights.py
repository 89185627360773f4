"""Updates of the weights: who is waited for, what is told to whom in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from rollstream.errors import (
    PauseNotConfirmed,
)
from rollstream.stream import GroupStream
from rollstream.trainer.control import PauseMode
from tests.backstage import Backstage, wait_until
from tests.integration.stream.crew import Hand, an_engine, audited, finish, info_of, ops, told
from tests.unit.stream.test_engine_posts import engines

Connect = Callable[..., GroupStream]


Hire = Callable[..., Hand]


# --- the way in and out --------------------------------------------------------------------------
def test_updating_weights_pauses_pushes_tells_engines_versions_and_resumes_in_that_order(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    with engines(2) as servers:
        first, second = servers
        hire(engines=[an_engine(first.url)])
        hire(engines=[an_engine(first.url), an_engine(second.url)])
        stream = connect()
        with stream.updating_weights(4, label="v4") as update:
            assert info_of(run).state == "paused"
            assert (info_of(run).pause_mode, info_of(run).version) == ("keep", 0)
            # Replies under the new name are understood before the run has it.
            assert info_of(run).labels == {"v4": 4}
            assert update.engines == stream.engines() == sorted(s.url for s in servers)
            assert len(update.workers) == 2
            assert update.entered_s > 0
            # Calls go on: what they sample now is of weights that nobody can name.
            assert [server.got for server in servers] == [[told("0~4")]] * 2
        for server in servers:
            assert server.got[1:] == [told("v4")]
        assert (info_of(run).state, info_of(run).version) == ("running", 4)
        assert stream.version == 4
        assert ops(run) == ["label 4", "pause keep", "version 4", "resume"]
        with stream.updating_weights(5):
            pass
        assert first.got[2:] == [told("4~5"), told("5")]
    assert stream.metrics()["stream/updates"] == 2


def test_updating_weights_is_entered_only_once_every_live_worker_confirmed(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    hire()
    slow = hire(obeys=False)
    stream = connect()
    entered = threading.Event()

    def update() -> None:
        with stream.updating_weights(1, post=False):
            entered.set()

    thread = threading.Thread(target=update)
    thread.start()
    wait_until(lambda: info_of(run).state == "paused")
    seq = info_of(run).control_seq
    wait_until(lambda: sum(c.control_seq >= seq for c in run.queue.confirmations()) == 1)
    assert not entered.is_set()
    slow.obeys = True
    thread.join(20)
    assert entered.is_set()
    assert info_of(run).version == 1


@pytest.mark.parametrize(
    ("weights_mode", "given", "mode", "waits"),
    [
        ("async", {}, "keep", False),
        ("async", {"wait_idle": True}, "keep", True),
        ("async", {"mode": "abort"}, "abort", True),
        ("on_policy", {}, "abort", True),
        ("on_policy", {"mode": "keep"}, "keep", False),
        ("colocated", {}, "abort", True),
        ("colocated", {"mode": "keep"}, "keep", True),
        ("colocated", {"mode": "keep", "wait_idle": False}, "keep", False),
    ],
)
def test_updating_weights_waits_for_calls_in_flight_where_the_mode_says_so(
    run: Backstage,
    connect: Connect,
    hire: Hire,
    weights_mode: str,
    given: dict[str, Any],
    mode: str,
    waits: bool,
) -> None:
    run.budgets["weights_mode"] = weights_mode
    run.open()
    hand = hire(in_flight=3)
    stream = connect()
    updating = stream.updating_weights(1, post=False, confirm_s=0.3, **given)
    if waits:
        with pytest.raises(PauseNotConfirmed, match="3 calls in flight") as failure, updating:
            raise AssertionError("entered")
        assert failure.value.workers == (hand.name,)
        hand.in_flight = 0
        updating = stream.updating_weights(1, post=False, **given)
    with updating as update:
        assert info_of(run).pause_mode == update.mode == mode
    assert (info_of(run).state, info_of(run).version) == ("running", 1)


def test_updating_weights_acks_batches_before_anything_new_is_sampled(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    hire()
    stream = connect()
    finish(run, 0, 1)
    batch = stream.next_batch(1, 5)
    other = stream.next_batch(1, 5)
    assert batch is not None
    assert other is not None
    states: list[str] = []

    def ack(acked: Any) -> None:
        states.append(info_of(run).state)
        original(acked)

    original = stream._weights._ack
    stream._weights._ack = ack
    with stream.updating_weights(1, ack=batch, post=False):
        assert not batch.acked
    with stream.updating_weights(2, ack=[batch, other], post=False):
        assert not other.acked
    assert (batch.acked, other.acked) == (True, True)
    assert set(states) == {"paused"}
    assert stream.state_dict()["frontier"] == 2
    audited(run)


def test_updating_weights_leaves_an_engine_out_that_does_not_take_the_version(
    run: Backstage, connect: Connect, hire: Hire, caplog: pytest.LogCaptureFixture
) -> None:
    with engines(3) as servers:
        fine, broken, unreached = servers
        broken.answer = (404, b"no such route")
        hire(engines=[an_engine(server.url) for server in servers])
        stream = connect()
        for version in (1, 2):
            with stream.updating_weights(version) as update:
                update.engines.remove(unreached.url)
        # What went on there may have sampled with weights that a push broke off: it stays so.
        assert fine.got == broken.got == [told("0~1"), told("1"), told("1~2"), told("2")]
        assert unreached.got == [told("0~1"), told("1~2")]
    assert info_of(run).version == 2
    said = [r for r in caplog.records if "did not take" in r.getMessage()]
    assert [r.levelname for r in said if r.levelname == "WARNING"] == ["WARNING"]
    assert "404" in said[0].getMessage()
    assert stream.metrics()["stream/engines_not_told"] == 2


# --- refusals ------------------------------------------------------------------------------------
def test_updating_weights_refuses_what_is_wrong_before_it_pauses(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    stream.set_weight_version(3)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"version": 2}, ValueError, "lower than 3"),
        ({"version": 2**60}, ValueError, "larger than"),
        ({"version": 3.5}, TypeError, "float"),
        ({"mode": cast(PauseMode, "drop")}, ValueError, "expected 'keep' or 'abort'"),
        ({"deadline_s": 0}, ValueError, "positive"),
        ({"deadline_s": float("nan")}, ValueError, "deadline_s"),
        ({"confirm_s": -1}, ValueError, "confirm_s"),
        ({"label": ""}, ValueError, "label"),
        ({"label": "x" * 201}, ValueError, "label"),
        ({"label": "\ud800"}, ValueError, "surrogate"),
        ({"label": b"v1"}, TypeError, "label"),
        ({"label": "3~4"}, ValueError, "name weights something else"),
        ({"mode": "abort", "wait_idle": False}, ValueError, "calls that are stopped are waited"),
    ]
    for given, kind, said in wrong:
        with pytest.raises(kind, match=said):
            stream.updating_weights(**({"version": 4} | given))
    assert ops(run) == ["version 3"]


def test_the_same_version_again_gives_the_engines_their_weights_once_more(
    run: Backstage, connect: Connect
) -> None:
    with engines(1) as servers:
        stream = connect()
        stream.set_engines([servers[0].url + "/"])
        stream.set_weight_version(3)
        for _ in range(2):
            with stream.updating_weights(3):
                assert stream.engines() == [servers[0].url]
                # Whom the push went to is told, whoever is named meanwhile.
                stream.set_engines(["http://127.0.0.1:1"])
                assert stream.engines() == [servers[0].url]
            stream.set_engines([servers[0].url])
        assert servers[0].got == [told("3~3"), told("3")] * 2
    assert (info_of(run).state, info_of(run).version) == ("running", 3)


def test_only_one_update_is_under_way_and_it_alone_pauses_and_sets_versions(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    refused: list[str] = []
    with stream.updating_weights(1, post=False):
        seq = info_of(run).control_seq
        tries: list[Callable[[], Any]] = [
            lambda: stream.updating_weights(2).__enter__(),
            lambda: stream.set_weight_version(2),
            stream.pause, stream.resume, stream.drain,
        ]  # fmt: skip

        def attempt() -> None:
            for one in tries:
                with pytest.raises(RuntimeError, match="inside updating_weights"):
                    one()
                refused.append("")

        attempt()
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(20)
        with pytest.raises(RuntimeError, match="nothing is sampled"):
            stream.evaluate("math", ["1+1?"])
        assert info_of(run).control_seq == seq
    assert len(refused) == 10
    assert (info_of(run).state, info_of(run).version) == ("running", 1)
    stream.pause()
    stream.resume()


# --- what engines are called while calls go on ---------------------------------------------------
@pytest.mark.parametrize(
    ("weights_mode", "how"),
    [
        ("async", {"mode": "abort"}),
        ("async", {"wait_idle": True}),
        ("async", {"post": False}),
        ("on_policy", {}),
        ("colocated", {"mode": "keep"}),
    ],
)
def test_no_label_is_hidden_where_no_call_goes_on_or_the_push_names_the_weights(
    run: Backstage, connect: Connect, hire: Hire, weights_mode: str, how: dict[str, Any]
) -> None:
    run.budgets["weights_mode"] = weights_mode
    run.open()
    with engines(1) as servers:
        hire(engines=[an_engine(servers[0].url)])
        stream = connect()
        with stream.updating_weights(1, **how):
            pass
        told_labels = [one for one in servers[0].got if one[0] == "/update_weight_version"]
        assert told_labels == ([told("1")] if how.get("post", True) else [])


def test_a_push_that_raises_gives_every_engine_the_label_back_that_it_had(
    run: Backstage, connect: Connect, hire: Hire, caplog: pytest.LogCaptureFixture
) -> None:
    with engines(4) as servers:
        current, restarted, vllm, mute = servers
        current.label, vllm.label = "step-3", "step-2"
        vllm.label_path, mute.label_path = "/weight_info", "/nowhere"
        hire(engines=[an_engine(server.url) for server in servers])
        stream = connect()
        stream.set_weight_version(3, "step-3")
        with pytest.raises(KeyError), stream.updating_weights(4):
            raise KeyError
        assert [server.label for server in servers] == ["step-3", "default", "step-2", "3~4"]
        assert restarted.got == [told("3~4"), told("default")]
        (said,) = [r for r in caplog.records if "old label back" in r.getMessage()]
        assert said.__dict__["engine"] == mute.url
        # The next one reaches them all, and knows no better what the mute one was called.
        with stream.updating_weights(4):
            pass
        assert [server.label for server in servers] == ["4"] * 4


def test_a_trainer_that_was_replaced_while_its_push_broke_leaves_the_engines_alone(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    with engines(1) as servers:
        hire(engines=[an_engine(servers[0].url)])
        older, newer = connect(), []

        def break_off() -> None:
            newer.append(connect())
            raise KeyError

        with pytest.raises(KeyError), older.updating_weights(1):
            break_off()
        assert servers[0].got == [told("0~1")]
        with newer[0].updating_weights(1):
            pass
        assert servers[0].label == "1"


# --- who iterates meanwhile ----------------------------------------------------------------------
def test_another_thread_iterates_and_acks_while_an_update_waits_and_pushes(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    deaf = hire(obeys=False)
    stream = connect()
    finish(run, 0, 1, 2, 3)
    seen: list[int] = []

    def iterate() -> None:
        for batch in stream.batches(groups=1, timeout_s=20):
            seen.extend(batch.group_indexes)
            batch.ack()

    pushing, pushed = threading.Event(), threading.Event()

    def update() -> None:
        with stream.updating_weights(1, post=False):
            pushing.set()
            pushed.wait(20)

    updater = threading.Thread(target=update)
    updater.start()
    wait_until(lambda: info_of(run).state == "paused")
    reader = threading.Thread(target=iterate)
    reader.start()
    wait_until(lambda: len(seen) == 4)
    assert not pushing.is_set()
    deaf.obeys = True
    assert pushing.wait(20)
    pushed.set()
    updater.join(20)
    run.end_of_data()
    reader.join(20)
    assert not reader.is_alive()
    assert seen == [0, 1, 2, 3]
    audited(run)


def test_engines_are_those_that_were_set_else_what_live_workers_found(
    run: Backstage, connect: Connect, hire: Hire
) -> None:
    stream = connect()
    assert stream.engines() == []
    hire(engines=[an_engine("http://b", "down"), an_engine("http://a", "behind")])
    hire(engines=[an_engine("http://b"), an_engine("http://c", "down"), {"url": 7}, {}])
    assert stream.engines() == ["http://a", "http://b"]
    stream.set_engines(["http://x/", "http://x", "https://y:1"])
    assert stream.engines() == ["http://x", "https://y:1"]
    assert info_of(run).engines == ("http://x", "https://y:1")
    # A name stands for engines that only the workers know.
    stream.set_engines(["dns+http://engines:30000"])
    assert stream.engines() == ["http://a", "http://b"]
    stream.set_engines(None)
    assert info_of(run).engines is None
    for wrong in ([], ["ftp://x"], ["http://"], ["http://x:99999"], ["x"], ["http://a b"]):
        with pytest.raises(ValueError, match="engine"):
            stream.set_engines(wrong)
    with pytest.raises(TypeError, match="list of URLs"):
        stream.set_engines("http://x")


def test_engines_that_every_worker_finds_down_are_all_there_are(
    connect: Connect, hire: Hire
) -> None:
    hire(engines=[an_engine("http://a", "down"), an_engine("http://b", "refused")])
    assert connect().engines() == ["http://a", "http://b"]
