"""`rollstream engines` and the workers in `stats`: what is shown, set and refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollstream.cli.__main__ import main
from rollstream.queue import calls
from tests.backstage import Backstage

Outcome = tuple[int, str, str]
Command = Callable[..., Outcome]
STATES = [
    {"url": "http://a", "kind": "sglang", "state": "up", "version": 4, "in_flight": 3, "limit": 0},
    {
        "url": "http://b",
        "kind": "vllm",
        "state": "behind\x1b",
        "version": None,
        "in_flight": 0,
        "problem": "no \x1broute: start it with --enable-scale-out" + "x" * 500,
    },
]


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        yield backstage.open()


@pytest.fixture
def command(run: Backstage, valkey_url: str, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*argv: str) -> Outcome:
        code = main([*argv, "--redis", valkey_url, "--run", run.queue.run])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def confirm(run: Backstage, worker: str, seq: int, in_flight: int, states: Any) -> None:
    run.queue.call(calls.beat(worker, []))
    if seq >= 0:
        run.queue.call(calls.confirm(worker, seq, in_flight, json.dumps(states).encode()))


def test_engines_shows_what_workers_found_and_who_obeys(run: Backstage, command: Command) -> None:
    run.queue.call(calls.set_version(4))
    run.queue.call(calls.pause("abort"))
    info = run.queue.info()
    assert info is not None
    confirm(run, "obedient", info.control_seq, 3, STATES)
    confirm(run, "late", info.control_seq - 1, 1, STATES[:1])
    confirm(run, "mute", -1, 0, [])
    code, out, _ = command("engines")
    assert code == 0
    assert "every worker has the engines of its own configuration; weight version 4" in out
    assert "up, version 4, 6 calls, sglang; up for 2 of 2" in out
    assert "no version known, 0 calls, vllm; behind  for 1 of 1" in out
    assert "\x1b" not in out
    assert "no  route: start it with --enable-scale-out" in out
    assert "x" * 200 not in out
    assert "obeys every control word, 3 calls in flight" in out
    seq = info.control_seq
    assert f"heard of {seq - 1} of {seq} control words, 1 calls in flight" in out
    assert "confirmed nothing" in out
    shown = json.loads(command("engines", "--json")[1])
    assert (shown["version"], shown["set"]) == (4, None)
    assert [engine["url"] for engine in shown["engines"]] == ["http://a", "http://b"]
    assert [len(engine["problem"]) for engine in shown["engines"]] == [0, 200]
    assert {w["worker"]: (w["live"], w["obeys"], w["in_flight"]) for w in shown["workers"]} == {
        "obedient": (True, True, 3), "late": (True, False, 1), "mute": (True, False, 0),
    }  # fmt: skip
    _, out, _ = command("stats")
    assert "paused (abort) since 0 s" in out
    assert "obeys every control word, 3 calls in flight" in out
    workers = json.loads(command("stats", "--json")[1])["workers"]
    assert len(workers) == 3


def test_engines_sets_and_unsets_them_for_every_worker(run: Backstage, command: Command) -> None:
    code, out, _ = command("engines", "--set", "http://a:30000/", "router+http://r")
    assert code == 0
    assert "engines set for every worker: http://a:30000, router+http://r" in out
    info = run.queue.info()
    assert info is not None
    assert info.engines == ("http://a:30000", "router+http://r")
    assert json.loads(command("engines", "--json")[1])["set"] == list(info.engines)
    assert json.loads(command("engines", "--unset", "--json")[1])["set"] is None
    info = run.queue.info()
    assert info is not None
    assert info.engines is None


def test_engines_refuses_what_is_no_url_and_a_run_that_has_ended(
    run: Backstage, command: Command
) -> None:
    code, out, err = command("engines", "--set", "http://a", "a:30000")
    assert (code, out) == (2, "")
    assert "engine 'a:30000': expected a URL that starts with http://" in err
    run.queue.call(calls.fail_run("enough"))
    assert command("engines")[0] == 0
    code, _, err = command("engines", "--set", "http://a")
    assert code == 1
    assert "is failed" in err


def test_stats_counts_evaluations_and_stale_groups_apart(run: Backstage, command: Command) -> None:
    run.queue.client.hset(f"{run.queue.prefix}c", mapping={
        "e.enqueued": 5, "e.acked": 3, "e.dropped:withdrawn": 2, "stale:running": 4,
        "requeued:stale": 1,
    })  # fmt: skip
    _, out, _ = command("stats")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for row in ("evaluations", "read 3", "dropped, withdrawn 2", "stale, running 4",
                "requeued, stale 1"):  # fmt: skip
        assert row in rows


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(b"9" * 5000 + b" 0 []", id="endless number"),
        pytest.param(b"7 " + b"9" * 5000 + b" []", id="endless count"),
        pytest.param(b"7 0 " + b"[" * 20_000, id="nested"),
        pytest.param(b"7 0 " + b"[" * 9_000 + b"]" * 9_000, id="nested and closed"),
        pytest.param(
            b'7 0 [{"url":"http://\\u001b[31m\\u009b2J\\ud800","state":"\\ud800"}]', id="text"
        ),
        pytest.param(b'7 0 [{"url":"http://a","in_flight":' + b"9" * 4000 + b"}]", id="too many"),
        pytest.param(b"7 0 \xff\xfe", id="no text"),
        pytest.param("²³ 0 []".encode(), id="other digits"),
    ],
)
def test_what_a_worker_wrote_is_shown_or_ignored_and_breaks_nothing(
    run: Backstage, command: Command, connect: Callable[..., Any], record: bytes
) -> None:
    worker = "w\x1b[31m"
    run.queue.call(calls.beat(worker, []))
    run.queue.client.hset(f"{run.queue.prefix}wc", worker, record)
    for argv in (["engines"], ["engines", "--json"], ["stats"], ["stats", "--json"]):
        code, out, err = command(*argv)
        assert (code, err) == (0, "")
        assert out.replace("\n", "").isprintable()
        assert len(out) < 10_000
        if "--json" in argv:
            assert json.loads(out)["workers"][0]["worker"] == worker
    stream = connect()
    assert all(url.isprintable() for url in stream.engines())
    assert stream.metrics()["stream/workers"] == 1
