"""`rollstream show`: what a person sees of a group, wherever it and its members are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollstream.cli.__main__ import main
from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.queue.answers import Lease
from tests.backstage import Backstage

Show = Callable[..., tuple[int, str]]


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as backstage:
        yield backstage.open()


@pytest.fixture
def show(
    run: Backstage,
    valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> Show:
    def called(*argv: str) -> tuple[int, str]:
        code = main(["show", *argv, "--redis", valkey_url, "--run", run.queue.run])
        out, err = capsys.readouterr()
        assert err == ""
        return code, out

    return called


def fail(run: Backstage, lease: Lease, report: Report, text: str, delay_s: float = 0.0) -> None:
    run.queue.call(calls.fail(lease, report, MemberReason.ENGINE_ERROR, text, delay_s=delay_s))


def crash(run: Backstage, lease: Lease, times: int) -> None:
    """Make a member what it is after so many expired leases (the queue's clock stands still)."""
    client, prefix = run.queue.client, run.queue.prefix
    client.hset(f"{prefix}g:{lease.group_index}", f"x{lease.member}", times)
    run.queue.call(calls.fail(lease, Report.BACK, MemberReason.SHUTDOWN, ""))


def test_show_says_of_each_member_where_it_is_and_what_befell_it(
    run: Backstage, show: Show
) -> None:
    run.enqueue(7, n=6, timeout_ms=60_000)
    run.queue.call(calls.present("worker", run.worker, about="node-3 pid 12"))
    by_member = {lease.member: lease for lease in run.lease(limit=5)}
    run.complete([by_member[0]])
    fail(run, by_member[1], Report.FINAL, "400: \x1b[31mtool choice\nnot enabled")
    fail(run, by_member[2], Report.RETRY, "timeout after 3 s", delay_s=30)
    crash(run, by_member[3], 2)

    code, out = show("7")

    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "group 7"
    assert "members left 4 of 6" in lines
    assert any(line.startswith("deadline in ") for line in lines)
    done, failed, delayed, suspect, leased, queued = lines[-6:]
    assert done.startswith("0 done completed (stop), reward 1.0, 2 tokens")
    assert (
        failed == "1 failed attempts 1, crashes 0; engine_error: 400: [31mtool choice not enabled"
    )
    assert delayed.startswith("2 delayed due in ")
    assert delayed.endswith("last retry: engine_error timeout after 3 s")
    assert suspect.startswith("3 suspect attempts 0, crashes 2; last had by ")
    assert leased.startswith(f"4 leased by {run.worker} (node-3 pid 12), lease ends in ")
    assert queued == "5 queued -"


def test_show_gives_scripts_what_it_gives_people(run: Backstage, show: Show) -> None:
    run.enqueue(7, n=2)
    run.complete(run.lease(limit=1))
    code, out = show("7", "--json")
    shown = json.loads(out)
    assert code == 0
    assert (shown["state"], shown["left"], shown["life"], shown["version"]) == ("open", 1, 0, 0)
    assert shown["deadline_in_s"] is None
    done, queued = shown["members"]
    assert (done["where"], done["result"]["reward"]) == ("done", 1.0)
    assert (queued["where"], queued["attempts"], queued["crashes"]) == ("queued", 0, 0)


def test_show_lists_the_last_drops_with_the_errors_of_their_members(
    run: Backstage, show: Show
) -> None:
    assert show() == (0, f"run {run.queue.run}: no group was dropped\n")
    run.enqueue(0, 1, 2)
    for lease in run.lease():
        if lease.member:
            fail(run, lease, Report.FINAL, f"refused {lease.group_index}")
        else:
            run.complete([lease])
    for entry in run.queue.read_full("judge", count=10, block_s=0):
        verdict = calls.verdict(
            entry.group_index, entry.message_id, drop=DropReason.SHORT_GROUP, detail="1 of 2"
        )
        run.queue.call(verdict)

    code, out = show("--last", "2")

    assert code == 0
    assert "group 2 (n 2, was full)  short_group: 1 of 2" in out
    assert "    member 0: completed (stop), reward 1.0, 2 tokens" in out
    assert "    member 1: failed, engine_error: refused 2" in out
    assert "refused 1" in out
    assert "refused 0" not in out
    drops: list[dict[str, Any]] = json.loads(show("--json")[1])["drops"]
    assert [drop["group_index"] for drop in drops] == ["2", "1", "0"]
    assert drops[0]["members"][1] == {
        "member": 1, "where": "failed", "reason": "engine_error", "error": "refused 2",
    }  # fmt: skip


def test_show_tells_a_dropped_group_from_a_trained_and_an_unknown_one(
    run: Backstage, show: Show
) -> None:
    run.finish(0, 1, drop={1})
    run.queue.call(calls.connect("c", 1))
    run.queue.call(calls.ack("c", ["0"]))

    code, out = show("1")
    assert code == 0
    assert "it was dropped once" in out
    assert "zero_std" in out
    code, out = show("0")
    assert (code, out.startswith("group 0 has ended")) == (0, True)
    code, out = show("5")
    assert (code, out.startswith("group 5 is unknown")) == (1, True)
    states = [json.loads(show(name, "--json")[1])["state"] for name in ("1", "0", "5", "e:x")]
    assert states == ["dropped", "ended", "unknown", "unknown"]


def test_show_reads_a_group_of_a_thousand_members(run: Backstage, show: Show) -> None:
    run.enqueue(0, n=1000)
    run.complete(run.lease(limit=200)[:150])
    shown = json.loads(show("0", "--json")[1])
    assert [m["member"] for m in shown["members"]] == list(range(1000))
    places = [m["where"] for m in shown["members"]]
    assert [places.count(name) for name in ("done", "leased", "queued")] == [150, 50, 800]


@pytest.mark.parametrize("name", ["-1", "x", "1.5", "e:\x1b[2J", "²"])
def test_show_refuses_what_is_no_group(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", "--", name])
    assert ended.value.code == 2
    assert "is no group" in capsys.readouterr().err
