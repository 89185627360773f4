"""`rollstream show --text`, `--html` and drops, on a real server: groups in every state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.cli.__main__ import main
from rollstream.cli.reasons import MEANS
from rollstream.errors import DropReason, MemberReason, Report
from rollstream.queue import calls
from rollstream.sample import Sample, Span
from rollstream.wire import encode_prompt, rewarded_header
from tests.backstage import Backstage
from tests.builders import a_prompt, a_sample
from tests.toy import A1, A2, O1, P0, write_toy_tokenizer

Show = Callable[..., tuple[int, str, str]]
CALL = {"turn": 0, "id": "c", "name": "f", "arguments": "{}", "executed": True}


@pytest.fixture
def run(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name, cap=2000, max_stale=1) as backstage:
        yield backstage.open()


@pytest.fixture
def show(
    run: Backstage,
    valkey_url: str,
    capsys: pytest.CaptureFixture[str],
) -> Show:
    def called(*argv: str) -> tuple[int, str, str]:
        code = main(["show", *argv, "--redis", valkey_url, "--run", run.queue.run])
        out, err = capsys.readouterr()
        return code, out, err

    return called


def a_talk(group_index: int, member: int, **fields: Any) -> Sample:
    """Return a call of a tool, what it said, an answer; with its text."""
    known: dict[str, Any] = {
        "prompt_ids": P0,
        "turns": [(A1, O1), (A2, ())],
        "response": "hello<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\nhello"
        "<|im_end|>",
        "metadata": {"tool_calls": [CALL]},
        "spans": [Span("generate", 0, 1e9, 1.5), Span("reward", -1, 1e9 + 2, 0.5)],
    }
    return a_sample(group_index, member, **(known | fields))


def mixed(run: Backstage) -> None:
    """Enqueue group 7: two members done, one failed, one leased, one waiting."""
    run.enqueue(7, n=5)
    by_member = {lease.member: lease for lease in run.lease(limit=4)}
    run.complete([by_member[0], by_member[1]], a_talk)
    failed = calls.fail(by_member[2], Report.FINAL, MemberReason.ENGINE_ERROR, "it <b>broke</b>")
    run.queue.call(failed)


def test_text_has_the_turns_of_members_that_ended_and_says_where_the_others_are(
    run: Backstage, show: Show
) -> None:
    mixed(run)
    code, out, err = show("7", "--text")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for told in ("[user]", "What is 1+7?", "[assistant] turn 0, 3 tokens, stop", "hello",
                 "  -> f {}", "[tool]", "ok", "[assistant] turn 1, 2 tokens, stop",
                 "member 2: failed", "  it <b>broke</b>", "member 3: leased",
                 "member 4: queued"):  # fmt: skip
        assert told in lines, told
    code, out, err = show("7", "--text", "--members", "1,3")
    assert [line for line in out.splitlines() if line.startswith("member ")] == [
        "member 1: completed, reward 1",
        "member 3: leased",
    ]


def test_json_with_text_has_every_turn_as_data(run: Backstage, show: Show) -> None:
    mixed(run)
    code, out, _ = show("7", "--text", "--json", "--members", "0")
    (told,) = json.loads(out)["turns"]
    assert code == 0
    assert (told["member"], told["leaf"], told["before"][0]["text"]) == (0, 0, "What is 1+7?")
    assert [turn["reply"]["text"] for turn in told["turns"]] == ["hello", "hello"]
    assert [turn["tool_calls"] for turn in told["turns"]] == [[CALL], []]
    assert told["turns"][0]["spans"][0]["duration_s"] == 1.5


def test_html_of_a_live_group_is_one_file_with_every_member(
    run: Backstage, show: Show, tmp_path: Path
) -> None:
    mixed(run)
    file = tmp_path / "group.html"
    code, out, err = show("7", "--html", str(file), "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert (said["bytes"], said["members"]) == (file.stat().st_size, 5)
    page = file.read_text()
    for told in ("it &lt;b&gt;broke&lt;/b&gt;", 'id="m0-l0-data"', 'id="m1-l0-data"', "leased",
                 "5, 2 unfinished, 1 failed", "<title>generate, turn 0: 1.50 s"):  # fmt: skip
        assert told in page, told
    assert list(tmp_path.iterdir()) == [file]


def test_html_decodes_tokens_where_a_tokenizer_or_the_runs_configuration_is_given(
    run: Backstage, show: Show, tmp_path: Path
) -> None:
    mixed(run)
    tokenizer = write_toy_tokenizer(tmp_path)
    config = tmp_path / "rollstream.toml"
    config.write_text(f'[model]\ntokenizer = "{tokenizer}"\n')
    file = tmp_path / "group.html"
    for option in (("--tokenizer", str(tokenizer)), ("--config", str(config))):
        code, _, err = show("7", "--html", str(file), *option)
        assert (code, err) == (0, "")
        page = file.read_text()
        assert "decoded from the ids of the tokens" in page
        assert '"31":"he","32":"llo"' in page


def test_a_member_that_cannot_be_read_is_told_and_the_others_are_shown(
    run: Backstage, show: Show, tmp_path: Path
) -> None:
    mixed(run)
    run.queue.client.hset(f"{run.queue.prefix}b:7", "0", b"\xc1 no record")
    run.queue.client.hset(f"{run.queue.prefix}b:7", "x1", b"\x00\xff no text")
    code, out, _ = show("7", "--text")
    assert code == 0
    assert out.count("its result cannot be read: ") == 2
    assert show("7", "--html", str(tmp_path / "x.html"))[0] == 0


def test_the_reward_is_the_one_that_the_group_was_judged_with(
    run: Backstage, show: Show, tmp_path: Path
) -> None:
    run.enqueue(7, n=1)
    run.complete(run.lease(), lambda g, m: a_talk(g, m, reward=None))
    (entry,) = run.queue.read_full("judge", count=2, block_s=0)
    (stored,) = run.queue.headers([entry])
    assert stored.headers[0] is not None
    headers = {0: rewarded_header(stored.headers[0], {"group": 0.25})}
    run.queue.call(calls.verdict("7", entry.message_id, headers=headers))
    assert 'member 0: completed, reward {"group": 0.25}' in show("7", "--text")[1]
    show("7", "--html", str(tmp_path / "x.html"))
    assert "{&quot;group&quot;: 0.25}" in (tmp_path / "x.html").read_text()


def test_an_evaluations_group_has_a_page(run: Backstage, show: Show, tmp_path: Path) -> None:
    name = "e:1:0"
    run.queue.call(calls.enqueue(name, 1, encode_prompt(a_prompt(0, 1)), timeout_ms=60_000))
    code, _, err = show(name, "--html", str(tmp_path / "x.html"))
    assert (code, err) == (0, "")
    assert "group e:1:0" in (tmp_path / "x.html").read_text()


# --- drops ---------------------------------------------------------------------------------------
def dropped(run: Backstage, group_index: int, reason: DropReason, detail: str, n: int = 3) -> None:
    """Enqueue a group, end its members with rewards and an error, and drop it."""
    run.enqueue(group_index, n=n)
    first, *rest = run.lease()
    run.complete(rest, lambda g, m: a_sample(g, m, reward={"score": m / 2}))
    run.queue.call(calls.fail(first, Report.FINAL, MemberReason.CRASHED, "it died"))
    (entry,) = run.queue.read_full("judge", count=2, block_s=0)
    verdict = calls.verdict(entry.group_index, entry.message_id, drop=reason, detail=detail)
    assert run.queue.call(verdict) == "dropped"


@pytest.mark.parametrize("reason", list(DropReason))
def test_show_says_why_a_group_was_dropped_for_every_reason(
    run: Backstage, show: Show, reason: DropReason
) -> None:
    dropped(run, 0, reason, "mine(0.5): 3 of 4")
    code, out, err = show("0")
    assert (code, err) == (0, "")
    assert f"(n 3, was full)  {reason.value}: mine(0.5): 3 of 4" in out
    assert MEANS[reason.value] in out
    assert "member 0: failed, crashed: it died" in out
    assert 'member 2: completed (stop), reward {"score": 1.0}, 2 tokens' in out
    told = json.loads(show("0", "--json")[1])["drops"][0]
    assert (told["reason"], told["means"]) == (reason.value, MEANS[reason.value])
    assert told["members"][2]["result"]["reward"] == {"score": 1.0}


def test_show_says_of_a_stale_group_how_old_it_was(run: Backstage, show: Show) -> None:
    run.enqueue(0, n=2)
    run.lease()
    run.queue.call(calls.set_version(5, "step-5"))
    run.queue.call(calls.sweep())
    code, out, _ = show("0")
    assert code == 0
    assert "stale: while it was running: first leased at version 0, now it is 5" in out
    assert "(weights.max_staleness 1)" in out


def test_show_says_of_an_aborted_runs_groups_what_the_run_was_aborted_for(
    run: Backstage, show: Show
) -> None:
    run.enqueue(0, n=2)
    run.queue.call(calls.abort_run("the disk is full"))
    run.queue.call(calls.sweep())
    code, out, _ = show("0")
    assert code == 0
    assert "run_aborted: the disk is full" in out


def test_show_says_what_befell_every_member_of_a_usual_group(run: Backstage, show: Show) -> None:
    dropped(run, 0, DropReason.SHORT_GROUP, "1 of 64 usable", n=64)
    code, out, _ = show("0")
    assert code == 0
    assert out.count("completed (stop), reward") == 63
    assert "more members nothing is kept" not in out


def test_show_finds_a_group_among_the_last_thousand_drops(run: Backstage, show: Show) -> None:
    run.enqueue(*range(1000), n=1)
    for first in range(0, 1000, 100):
        run.queue.call_many([calls.withdraw(str(g)) for g in range(first, first + 100)])
    code, out, _ = show("0")
    assert code == 0
    assert "withdrawn" in out
    assert len(json.loads(show("--last", "1000", "--json")[1])["drops"]) == 1000


def test_html_of_a_dropped_group_has_its_reason_and_members(
    run: Backstage, show: Show, tmp_path: Path
) -> None:
    dropped(run, 7, DropReason.ZERO_STD, "reward_nonzero_std: std 0 of 2")
    file = tmp_path / "drop.html"
    code, _, err = show("7", "--html", str(file))
    assert (code, err) == (0, "")
    page = file.read_text()
    for told in ("zero_std", "reward_nonzero_std: std 0 of 2", "it died", "do not differ"):
        assert told in page, told


# --- what cannot be done -------------------------------------------------------------------------
def test_a_page_that_cannot_be_written_leaves_what_was_there(
    run: Backstage, show: Show, tmp_path: Path
) -> None:
    mixed(run)
    code, _, err = show("7", "--html", str(tmp_path / "no" / "x.html"))
    assert (code, "No such file or directory" in err) == (1, True)
    file = tmp_path / "x.html"
    file.write_text("older")
    code, _, err = show("7", "--html", str(file), "--tokenizer", str(tmp_path / "none.json"))
    assert (code, "--tokenizer" in err) == (2, True)
    (tmp_path / "bad.json").write_text("{}")
    code, _, err = show("7", "--html", str(file), "--tokenizer", str(tmp_path / "bad.json"))
    assert (code, "it is no tokenizer" in err) == (2, True)
    code, _, err = show("8", "--html", str(file))
    assert (code, "there is nothing of group 8" in err) == (1, True)
    assert file.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "x.html"]


@pytest.mark.parametrize("option", [("--html", "x"), ("--text",), ("--members", "0")])
def test_turns_and_pages_are_of_one_group(show: Show, option: tuple[str, ...]) -> None:
    code, _, err = show(*option)
    assert (code, "need a GROUP" in err) == (2, True)
