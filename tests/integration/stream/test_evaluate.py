"""Evaluations: every prompt and member accounted for, beside training, and nothing left of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rollstream.errors import (
    ConsumerTaken,
    MemberReason,
    Report,
    RunFailed,
    RunLost,
    Status,
    StopReason,
    StreamError,
)
from rollstream.evaluation.eval_result import EvalResult
from rollstream.group import EnvRule, PromptGroup, Trajectory
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from rollstream.queue.calls import Completion
from rollstream.runs import Interrupted
from rollstream.sample import Sample
from rollstream.stream import GroupStream
from rollstream.wire import decode_prompt, encode_body, encode_envs, encode_header, encode_text
from tests.backstage import Backstage, wait_until
from tests.builders import a_sample
from tests.proxy import Proxy

Connect = Callable[..., GroupStream]
Make = Callable[[PromptGroup, Lease], "Trajectory | None"]


def result_of(prompt: PromptGroup, lease: Lease) -> Sample:
    """Return a sample whose reward is its member, of the version 3."""
    return a_sample(0, lease.member, reward=float(lease.member), versions=3,
                    response=f"{prompt.prompt} {lease.member}")  # fmt: skip


class Evaluator:
    """A worker in a thread that ends what it is given as `make` says; None leaves it leased."""

    def __init__(self, run: Backstage, url: str, make: Make) -> None:
        self._run = Backstage(url, run.queue.run)
        self._make = make
        self.prompts: list[PromptGroup] = []
        self.priority_ids: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._run.queue.close()

    def _work(self) -> None:
        run = self._run
        while not self._stop.is_set():
            run.call_no += 1
            answer = run.queue.call(calls.lease(run.worker, run.call_no, 64))
            run.queue.call(calls.confirm(run.worker, answer.control_seq, 0))
            done = []
            for group in answer.groups:
                self.priority_ids.append(group.group_index)
                prompt = decode_prompt(group.prompt, 0, group.n)
                self.prompts.append(prompt)
                for member in group.members:
                    made = self._make(prompt, member.lease)
                    if made is not None:
                        header = encode_header(made, num_turns=1, done_unix_s=time.time())
                        body, text = encode_body(made), encode_text(made)
                        done.append(Completion(member.lease, header, body, text))
            if done:
                run.queue.call(calls.complete(done))
            elif not answer.groups:
                time.sleep(0.005)


@contextmanager
def at_work(run: Backstage, url: str, make: Make = result_of) -> Iterator[Evaluator]:
    worker = Evaluator(run, url, make)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def nothing_left(run: Backstage) -> None:
    """Assert that no key of any evaluation is left, and that the accounts hold."""
    client = run.queue.client
    assert client.scard(f"{run.queue.prefix}ge") == 0
    assert client.xlen(f"{run.queue.prefix}eval") == 0
    assert [k for k in client.scan_iter(f"{run.queue.prefix}*") if b"e:" in k] == []
    assert run.queue.call(calls.audit(deep=True)).problems == []


# --- the result ----------------------------------------------------------------------------------
def test_evaluate_returns_every_prompt_in_order_and_trains_on_none(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    stream = connect()
    prompts: list[Any] = [
        "What is 1+1?",
        [{"role": "user", "content": "What is 1+2?"}],
        {
            "prompt": "What is 1+3?",
            "label": "4",
            "metadata": {"level": 1},
            "sampling": {"top_k": 9},
        },
        PromptGroup(77, 9, "What is 1+4?", label="5"),
    ]
    with at_work(run, valkey_url) as worker:
        result = stream.evaluate("math 1", prompts, 3, {"temperature": 0.0}, timeout_s=20)
    assert [group.group_index for group in result.groups] == [0, 1, 2, 3]
    assert result.rewards.tolist() == [[0.0, 1.0, 2.0]] * 4
    assert [s.prompt for s in result.flat()[::3]] == [
        "What is 1+1?", [{"role": "user", "content": "What is 1+2?"}], "What is 1+3?",
        "What is 1+4?",
    ]  # fmt: skip
    assert [s.label for s in result.flat()[::3]] == [None, None, "4", "5"]
    assert result.missing == []
    assert (result.versions, result.is_mixed) == ({3: 24}, False)
    asked = {str(p.prompt): p for p in worker.prompts}
    assert asked["What is 1+3?"].sampling == {"top_k": 9, "temperature": 0.0}
    assert asked["What is 1+3?"].metadata == {"level": 1}
    assert {name.partition("-")[0] for name in worker.priority_ids} == {"e:math_1"}
    nothing_left(run)
    figures = stream.metrics()
    assert figures["stream/eval/acked"] == 4
    assert "stream/acked" not in figures
    run.end_of_data()
    assert stream.next_batch(1, 5) is None


def test_evaluate_tells_its_figures(run: Backstage, connect: Connect, valkey_url: str) -> None:
    def make(prompt: PromptGroup, lease: Lease) -> Trajectory:
        version = 3 + lease.member % 2
        if lease.member == 2:
            return a_sample(0, 2, stop_reason=StopReason.AGENT_ERROR, reward=None)
        if lease.member == 3:
            leaves = [a_sample(0, 3, reward=8.0, versions=version) for _ in range(2)]
            for leaf in leaves:
                leaf.calls = leaves[0].calls
            return leaves
        return a_sample(0, lease.member, reward=float(lease.member), versions=version,
                        stop_reason=StopReason.TURN_LENGTH)  # fmt: skip

    with at_work(run, valkey_url, make):
        result = connect().evaluate("m", ["a", "b"], 4, timeout_s=20)
    assert result.is_mixed
    assert result.versions == {3: 4, 4: 8}  # a leaf's calls count once
    assert [(place, one.member, one.reason) for place, one in result.missing] == [
        (0, 2, "agent_error"), (1, 2, "agent_error"),
    ]  # fmt: skip
    np.testing.assert_equal(result.rewards, [[0.0, 1.0, np.nan, 8.0]] * 2)
    figures = result.metrics()
    assert figures.pop("eval/m/seconds") > 0
    assert figures == {
        "eval/m/prompts": 2,
        "eval/m/samples": 6,
        "eval/m/truncated": 4,
        "eval/m/missing": 2,
        "eval/m/missing/agent_error": 2,
        "eval/m/mixed_versions": 1.0,
        "eval/m/reward_mean": 3.0,
        "eval/m/reward_std": pytest.approx(np.std([0, 1, 8])),
        "eval/m/reward_min": 0.0,
        "eval/m/reward_max": 8.0,
        "eval/m/response_length_mean": 2.0,
        "eval/m/response_length_max": 2,
        "eval/m/version_min": 3,
        "eval/m/version_max": 4,
    }


def test_evaluate_takes_texts_where_the_stream_does(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    with at_work(run, valkey_url):
        said = connect(text=True).evaluate("m", ["a"], 2, timeout_s=20).flat()
        silent = connect().evaluate("m", ["a"], 1, timeout_s=20).flat()
    assert [sample.response for sample in said] == ["a 0", "a 1"]
    assert silent[0].response == ""


def test_evaluate_runs_before_training_groups_and_beyond_the_capacity(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    run.enqueue(*range(8))
    assert run.enqueue(8) == ["full"]
    stream = connect()
    found: list[EvalResult] = []
    evaluating = threading.Thread(
        target=lambda: found.append(stream.evaluate("m", ["a"] * 70, 2, timeout_s=20))
    )
    evaluating.start()
    wait_until(lambda: run.queue.client.scard(f"{run.queue.prefix}ge") == 70)
    with at_work(run, valkey_url) as worker:
        evaluating.join(20)
        wait_until(lambda: len(worker.priority_ids) == 78)
    first = [name.startswith("e:") for name in worker.priority_ids]
    assert first == [True] * 70 + [False] * 8
    assert len(found[0].flat()) == 140


def test_evaluate_goes_on_while_another_thread_trains(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    stream = connect()
    seen: list[int] = []

    def train() -> None:
        for batch in stream.batches(groups=2, timeout_s=20):
            seen.extend(batch.group_indexes)
            with stream.updating_weights(stream.version + 1, ack=batch, post=False, confirm_s=9):
                pass

    with at_work(run, valkey_url):
        trainer = threading.Thread(target=train)
        trainer.start()
        run.enqueue(*range(6))
        # Also in the midst of an update: it waits until that is over.
        results = [stream.evaluate("m", ["a", "b"], 2, timeout_s=20) for _ in range(3)]
        while len(seen) < 6:
            run.judge()
            assert trainer.is_alive()
        run.end_of_data()
        trainer.join(20)
        assert not trainer.is_alive()
    assert [len(result.flat()) for result in results] == [4, 4, 4]
    assert sorted(seen) == [0, 1, 2, 3, 4, 5]
    nothing_left(run)


def test_evaluate_waits_for_an_update_of_another_thread(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    stream = connect()
    found: list[EvalResult] = []
    evaluating = threading.Thread(
        target=lambda: found.append(stream.evaluate("m", ["a"], timeout_s=20))
    )
    with at_work(run, valkey_url):
        with stream.updating_weights(1, post=False):
            evaluating.start()
            wait_until(lambda: run.queue.client.scard(f"{run.queue.prefix}ge") == 1)
            assert found == []
        evaluating.join(20)
    assert len(found[0].flat()) == 1


def test_two_evaluations_at_once_do_not_see_each_other(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    stream = connect()
    found: dict[str, EvalResult] = {}

    def evaluate(name: str, count: int) -> None:
        found[name] = stream.evaluate(name, [name] * count, 1, timeout_s=20)

    with at_work(run, valkey_url):
        threads = [threading.Thread(target=evaluate, args=(n, c)) for n, c in (("x", 9), ("y", 4))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert {name: [s.prompt for s in r.flat()] for name, r in found.items()} == {
        "x": ["x"] * 9, "y": ["y"] * 4,
    }  # fmt: skip
    nothing_left(run)


# --- what does not end ---------------------------------------------------------------------------
def test_evaluate_lists_what_did_not_end_in_time_and_withdraws_it(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    def make(prompt: PromptGroup, lease: Lease) -> Trajectory | None:
        stuck = prompt.prompt == "b" and lease.member == 1
        return None if stuck else result_of(prompt, lease)

    stream = connect()
    with at_work(run, valkey_url, make):
        result = stream.evaluate("m", ["a", "b"], 2, timeout_s=0.7)
    np.testing.assert_equal(result.rewards, [[0.0, 1.0], [0.0, np.nan]])
    ((place, one),) = result.missing
    assert (place, one.member, one.reason, one.status) == (1, 1, "timeout", Status.ABORTED)
    assert "0.7 s" in one.error
    assert result.metrics()["eval/m/missing/timeout"] == 1
    nothing_left(run)


def test_evaluate_without_a_worker_has_everything_missing(run: Backstage, connect: Connect) -> None:
    result = connect().evaluate("m", ["a", "b"], 2, timeout_s=0.2)
    assert [(place, one.member, one.reason) for place, one in result.missing] == [
        (0, 0, "timeout"), (0, 1, "timeout"), (1, 0, "timeout"), (1, 1, "timeout"),
    ]  # fmt: skip
    assert result.flat() == []
    assert result.versions == {}
    assert not result.is_mixed
    nothing_left(run)


def test_evaluate_keeps_members_that_failed_with_their_reason_and_garbage_as_unreadable(
    run: Backstage, connect: Connect
) -> None:
    stream = connect()
    found: list[EvalResult] = []
    evaluating = threading.Thread(
        target=lambda: found.append(stream.evaluate("m", ["a", "b"], 1, timeout_s=20))
    )
    evaluating.start()
    wait_until(lambda: run.queue.client.scard(f"{run.queue.prefix}ge") == 2)
    leases = run.lease()
    by_place = sorted(leases, key=lambda lease: lease.group_index)
    run.queue.call(calls.fail(by_place[0], Report.FINAL, MemberReason.TOOL_ERROR, "no host"))
    run.queue.call(calls.complete([Completion(by_place[1], b"garbage", b"garbage")]))
    evaluating.join(20)
    assert [(p, one.reason) for p, one in found[0].missing] == [
        (0, "tool_error"), (1, "unreadable"),
    ]  # fmt: skip
    assert found[0].missing[0][1].error == "no host"
    nothing_left(run)


@pytest.mark.parametrize("how", ["interrupt", "close", "raise"])
def test_evaluate_withdraws_what_is_left_when_it_is_given_up(
    run: Backstage, connect: Connect, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, interrupt = connect(), threading.Event()
    raised: list[BaseException] = []

    def evaluate() -> None:
        try:
            stream.evaluate("m", ["a"] * 3, 2, timeout_s=20, interrupt=interrupt)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            raised.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    wait_until(lambda: run.queue.client.scard(f"{run.queue.prefix}ge") == 3)
    if how == "interrupt":
        interrupt.set()
    elif how == "close":
        stream.close()
    else:

        def broken(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("rollstream.evaluation.evaluate.Evaluation._step", broken)
    thread.join(20)
    expected = {"interrupt": Interrupted, "close": StreamError, "raise": KeyboardInterrupt}[how]
    assert isinstance(raised[0], expected)
    nothing_left(run)


def test_evaluate_of_a_run_that_ended_or_is_gone_says_so(run: Backstage, connect: Connect) -> None:
    stream = connect()
    run.queue.call(calls.fail_run("enough"))
    with pytest.raises(RunFailed, match="failed"):
        stream.evaluate("m", ["a"], timeout_s=5)


def test_evaluate_of_a_run_that_vanished_is_lost(
    run: Backstage, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.evaluation.evaluate.REOPEN_S", 0.2)
    stream = connect()
    run.queue.client.delete(*run.keys())
    with pytest.raises(RunLost):
        stream.evaluate("m", ["a"], timeout_s=20)


def test_a_new_trainer_withdraws_evaluations_that_nobody_waits_for_any_more(
    run: Backstage, connect: Connect
) -> None:
    run.enqueue(0)
    for place in range(70):
        run.queue.call(calls.enqueue(f"e:m-1:{place}", 2, b"prompt", timeout_ms=60_000))
    run.lease(1)
    stream = connect()
    assert run.queue.depths()["evaluations"] == 0
    assert run.queue.depths()["live"] == 1
    assert run.queue.counters()["e.dropped:withdrawn"] == 70
    assert run.queue.call(calls.audit(deep=True)).problems == []
    assert stream.evaluate("m", ["a"], timeout_s=0.05).missing


def test_evaluate_refuses_what_is_wrong_and_enqueues_nothing(
    run: Backstage, connect: Connect
) -> None:
    rules = {"a": EnvRule(), "b": EnvRule(reward_key="score")}
    run.queue.call(calls.open_run(1, "data", run.budgets | {"envs": encode_envs(rules)}))
    stream = connect()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompts": []}, "at least one"),
        ({"prompts": "What is 1+1?"}, "a list"),
        ({"prompts": [{"text": "x"}]}, r"unknown keys \['text'\]"),
        ({"prompts": [{"label": "x"}]}, "no prompt"),
        ({"prompts": [""]}, "prompt 0: no prompt"),
        ({"prompts": ["x"], "sampling": {"temprature": 0}}, "did you mean temperature"),
        ({"prompts": ["x"], "sampling": {"top_p": 2}}, "top_p = 2: expected"),
        ({"n": 0}, "n=0"),
        ({"n": 5000}, "n=5000"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"env": "c"}, r"\['a', 'b'\]"),
        ({}, "name one"),
        ({"env": "a", "prompts": [{"prompt": "x", "metadata": {"x": object()}}]}, "object"),
        ({"env": "a", "prompts": [{"prompt": "x", "metadata": 5}]}, "metadata"),
        ({"env": "a", "prompts": [{"prompt": 5}]}, "prompt"),
        ({"env": "a", "prompts": ["x\ud800"]}, "surrogates"),
        ({"env": "a", "prompts": {"prompt": "x"}}, "a list"),
        ({"env": "a", "n": 2.5}, "integer"),
        ({"env": "a", "name": 5}, "name 5 is a int"),
    ]
    for given, said in wrong:
        with pytest.raises((ValueError, TypeError), match=said):
            stream.evaluate(**({"name": "m", "prompts": ["x"]} | given))
    with pytest.raises(TypeError, match="prompt 0 is a int"):
        stream.evaluate("m", [7], env="a")  # type: ignore[list-item]
    assert run.queue.counters().get("e.enqueued", 0) == 0


def test_evaluate_takes_rewards_by_the_rule_of_its_environment(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    rules = {"only": EnvRule(reward_key="score")}
    run.queue.call(calls.open_run(1, "data", run.budgets | {"envs": encode_envs(rules)}))

    def make(prompt: PromptGroup, lease: Lease) -> Trajectory:
        return a_sample(0, lease.member, reward={"score": 0.5, "other": 9.0})

    with at_work(run, valkey_url, make) as worker:
        result = connect().evaluate("m", ["a"], timeout_s=20)
    assert worker.prompts[0].env == result.groups[0].env == "only"
    assert result.rewards.tolist() == [[0.5]]


# --- Redis that is away, forgets, or has another trainer -----------------------------------------
def test_evaluate_outlasts_an_outage_and_replies_that_are_lost(
    run: Backstage, valkey_url: str
) -> None:
    with (
        Proxy(int(valkey_url.rpartition(":")[2])) as proxy,
        GroupStream.connect(f"redis://127.0.0.1:{proxy.port}", run=run.queue.run) as stream,
        at_work(run, valkey_url),
    ):
        proxy.lose_replies = 3
        assert len(stream.evaluate("m", ["a"] * 5, 2, timeout_s=20).flat()) == 10
        proxy.cut()
        threading.Timer(0.4, proxy.mend).start()
        assert len(stream.evaluate("m", ["a"] * 5, 2, timeout_s=20).flat()) == 10
    nothing_left(run)


def test_evaluate_in_an_outage_that_lasts_is_an_error(
    run: Backstage, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.evaluation.evaluate.UNDO_TIMEOUT_S", 0.1)
    with (
        Proxy(int(valkey_url.rpartition(":")[2])) as proxy,
        GroupStream.connect(f"redis://127.0.0.1:{proxy.port}", run=run.queue.run) as stream,
    ):
        proxy.cut()
        with pytest.raises(StreamError, match="nothing was evaluated"):
            stream.evaluate("m", ["a"], timeout_s=0.3)


def test_evaluate_asks_again_for_what_redis_forgot(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    stream = connect()
    before = run.keys()
    found: list[EvalResult] = []
    evaluating = threading.Thread(
        target=lambda: found.append(stream.evaluate("m", ["a"] * 3, 1, timeout_s=20))
    )
    evaluating.start()
    wait_until(lambda: run.queue.client.scard(f"{run.queue.prefix}ge") == 3)
    run.roll_back(before)
    with at_work(run, valkey_url):
        evaluating.join(20)
    assert len(found[0].flat()) == 3
    nothing_left(run)


def test_evaluate_ends_where_a_later_trainer_took_over(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    older = connect()
    raised: list[BaseException] = []

    def evaluate() -> None:
        try:
            older.evaluate("m", ["a"], timeout_s=20)
        except StreamError as error:
            raised.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    wait_until(lambda: run.queue.client.scard(f"{run.queue.prefix}ge") == 1)
    connect()
    with at_work(run, valkey_url):
        thread.join(20)
    assert isinstance(raised[0], ConsumerTaken)


def test_evaluate_of_an_environment_whose_groups_are_judged_brings_samples_and_no_reward(
    run: Backstage, connect: Connect, valkey_url: str
) -> None:
    rules = {"only": EnvRule(group_reward=True, on_truncated="drop")}
    run.queue.call(calls.open_run(1, "data", run.budgets | {"envs": encode_envs(rules)}))

    def make(prompt: PromptGroup, lease: Lease) -> Trajectory:
        return a_sample(0, lease.member, reward=None, stop_reason=StopReason.TURN_LENGTH)

    with at_work(run, valkey_url, make):
        result = connect().evaluate("m", ["a"], timeout_s=20)
    assert result.missing == []
    assert [s.reward for s in result.groups[0].flat()] == [None]
    assert int(result.groups[0].flat()[0].effective_response_length) == 2
