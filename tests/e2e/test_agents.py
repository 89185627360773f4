"""The proof of the gateway: its judge sees what it is there to see, and a short run of it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.devserver import die_with_parent
from tests.e2e.agents.breaks import BREAKS
from tests.e2e.agents.by_hand import scene_by_hand, write
from tests.e2e.agents.cast import POLICY, write_rows
from tests.e2e.agents.engine import reading_of_stream
from tests.e2e.agents.findings import Finding, Wrong
from tests.e2e.agents.journal import read_agents
from tests.e2e.agents.judge import judge
from tests.e2e.agents.line import Line
from tests.e2e.agents.model import leaves_of, read_session
from tests.e2e.agents.options import parse
from tests.e2e.agents.plan import Fate, Kind, plan_of
from tests.e2e.agents.record import Record
from tests.e2e.agents.report import BESIDE, FIRST, Report, Row
from tests.e2e.agents.truth import Truth, words_in, words_of
from tests.e2e.agents.words import DIALECTS, Turn
from tests.e2e.weights.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
KINDS = [("linear", "keep_prefix"), ("linear", "fork"), ("tree", "drop_retries"), ("tree", "all")]


class Parts:
    """What writes records by hand, and what judges them."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self._written = {policy: write(scene_by_hand(k, policy), truth) for k, policy in KINDS}

    def record(self, policy: str) -> Record:
        return copy.deepcopy(self._written[policy])

    def figures(self, record: Record) -> Counter[Wrong]:
        counted: Counter[Wrong] = Counter()
        for finding in judge(record, self.truth):
            counted[finding.kind] += finding.count
        return counted


@pytest.fixture(scope="module")
def parts(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    source = write_rows(tmp_path_factory.mktemp("rows"), scene_by_hand(*KINDS[0]))
    return Parts(Truth.load(vocabulary, f"jsonl:{source}", POLICY))


# --- the judge ---------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", [policy for _, policy in KINDS])
def test_judge_finds_nothing_in_a_record_of_a_faultless_service(parts: Parts, policy: str) -> None:
    record = parts.record(policy)
    assert [str(finding) for finding in judge(record, parts.truth)] == []
    row = Row.of(record, [], 1)
    assert row.sessions == 4
    assert (row.happened["branched"] > 0) is (record.scene.kind == "tree")
    assert row.happened["replayed"] == 4


DAMAGES = [
    (name, policy)
    for name, one in BREAKS.items()
    for kind, policy in KINDS
    if one.damage is not None
    and not (one.of_trees and kind == "linear")
    # Of `all`, every reply is trained: nothing there is beyond the policy.
    and policy in ("keep_prefix", "drop_retries")
]


@pytest.mark.parametrize(("name", "policy"), DAMAGES)
def test_every_damage_of_a_record_shows_in_its_own_figure(
    parts: Parts, name: str, policy: str
) -> None:
    broken, record = BREAKS[name], parts.record(policy)
    assert broken.damage is not None
    broken.damage(record)
    figures = parts.figures(record)
    assert figures[broken.shows_in] > 0, figures


def test_judge_tells_a_reply_that_nobody_was_sampled_for_from_one_that_was_left(
    parts: Parts,
) -> None:
    record = parts.record("drop_retries")
    attempt = next(iter(record.attempts.values()))
    last = attempt.tries[-1]
    last.how, last.raw = "left", ""
    # Its client cannot know whether it was given out: nobody is blamed.
    assert parts.figures(record) == Counter()
    last.how = "unsent"
    assert parts.figures(record)[Wrong.POLICY] == 1


def test_judge_takes_a_call_that_no_engine_answered_for_a_made_up_one(parts: Parts) -> None:
    record = parts.record("keep_prefix")
    rid = record.handed[0].members[0].samples[0].calls[0].rid
    record.engine_calls[rid].finish = "left"
    assert parts.figures(record)[Wrong.TOKEN] > 0


def test_judge_finds_a_group_whose_members_are_of_others(parts: Parts) -> None:
    record = parts.record("keep_prefix")
    first, second = record.handed[0].members
    first.member, second.member = second.member, first.member
    assert parts.figures(record)[Wrong.ODD] == 2


def test_truth_reads_what_a_client_reads_of_calls_that_are_none() -> None:
    good, bad = '{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "arguments": {"a": 1'
    text = f"<think>\nHm.\n</think>\n\nSo: <tool_call>\n{good}\n</tool_call>\n<tool_call>\n{bad}\n"
    words = words_in(text + "</tool_call><|im_end|>")
    assert words.calls == (("f", '{"a": 1}'),)
    assert words.thought == "Hm."
    assert words.text == "".join(f"So:<tool_call>{bad}</tool_call>".split())
    assert words_in("<think>\ncut").thought == "cut"
    assert words_in(f"<tool_call>\n{good}\n</tool_call>").calls == ()  # of a reply that was cut


# --- policies ----------------------------------------------------------------------------------
def test_model_knows_what_each_policy_keeps(parts: Parts) -> None:
    """Replies: 0 first, 1 second turn, 2 the same again, 3 goes on from 2, 4 a branch, 5 a sub."""
    kept = {}
    for kind, policy in KINDS:
        record = parts.record(policy)
        session = read_session(next(iter(record.attempts.values())))
        kept[policy] = [node.id for node in leaves_of(session.nodes, scene_by_hand(kind, policy))]
    assert kept == {"keep_prefix": [3], "fork": [3], "drop_retries": [3, 4, 5],
                    "all": [1, 3, 4, 5]}  # fmt: skip


def test_model_joins_a_reply_that_was_told_twice_and_finds_one_that_was_not(parts: Parts) -> None:
    attempt = next(iter(parts.record("keep_prefix").attempts.values()))
    session = read_session(attempt)
    assert (session.num_retries, session.lost_retries) == (1, [])
    assert [len(node.tries) for node in session.nodes] == [1, 2, 1, 1]
    retry = next(one for one in attempt.tries if one.retry)
    retry.raw = retry.raw.replace("chatcmpl-", "chatcmpl-other")
    assert len(read_session(attempt).lost_retries) == 1


# --- dialects ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(DIALECTS))
def test_dialects_read_their_own_bodies_alike(name: str) -> None:
    dialect = DIALECTS[name]
    items = dialect.user("a 🤔")
    items += dialect.results([("call_1", "r")])
    body = dialect.body("s", items, tool=None, most=5, stream=False, previous="")
    turns = dialect.turns_of(body)
    assert turns == [Turn("system", "s"), Turn("user", "a 🤔"), Turn("tool", "r")]


def test_a_chat_stream_is_put_together_from_its_deltas() -> None:
    dialect = DIALECTS["chat"]

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"id": "x", "choices": [{"delta": delta, "finish_reason": finish}]}

    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}}
    events = [
        chunk({"role": "assistant", "content": None}),
        chunk({"reasoning_content": "h"}),
        chunk({"content": "te"}),
        chunk({"content": "xt"}),
        chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}),
    ]
    assert dialect.joined(events) is None  # it never ended
    reply = dialect.joined([*events, chunk({}, "tool_calls")])
    assert reply is not None
    said = dialect.said(reply)
    assert (said.thought, said.text, said.finish) == ("h", "text", "tool_calls")
    assert words_of(said).calls == (("f", '{"a": 1}'),)
    assert dialect.joined([*events, {"error": {}}]) is None


def test_witness_counts_what_left_an_engine_of_either_protocol() -> None:
    def event(**fields: Any) -> bytes:
        return b"data: " + json.dumps(fields).encode() + b"\n\n"

    sglang = [
        event(meta_info={"completion_tokens": 1, "finish_reason": None}),
        event(meta_info={"completion_tokens": 5, "finish_reason": {"type": "stop"}}),
        b"data: [DONE]\n\n",
    ]
    assert reading_of_stream(sglang) == (5, "stop")
    assert reading_of_stream(sglang[:1]) == (1, "broken")
    vllm = [
        event(choices=[{"token_ids": [1], "finish_reason": None}]),
        event(choices=[{"token_ids": [2, 3], "finish_reason": "abort"}]),
    ]
    assert reading_of_stream(vllm) == (3, "abort")


# --- agents ------------------------------------------------------------------------------------
def test_plans_are_the_same_every_time_and_have_everything_in_them() -> None:
    plans = [plan_of(1, group, member, tree=True) for group in range(100) for member in range(2)]
    assert plans[3] == plan_of(1, 1, 1, tree=True)
    assert plans[3] != plan_of(2, 1, 1, tree=True)
    steps = [step for plan in plans for step in plan.steps]
    assert {step.kind for step in steps} == set(Kind)
    assert {fate for step in steps for fate in step.fates} == set(Fate) - {Fate.PASS}
    assert {(plan.dialect, plan.sdk) for plan in plans} == {
        (name, sdk) for name in DIALECTS for sdk in (False, True)
    }
    assert all(plan.steps[-1].kind is Kind.TURN for plan in plans)


async def test_a_line_writes_down_what_it_loses(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "attempt-1.jsonl")
    journal.write("begin", nonce="1", group="0", member=0, pid=1, dialect="chat", sdk=False)
    line = Line(journal, iter(range(9)), 0)

    async def answer(request: httpx.Request) -> httpx.Response:
        await request.aread()
        return httpx.Response(200, json={"id": "r"})

    line._inner = httpx.MockTransport(answer)  # type: ignore[assignment]
    line.fates = [Fate.REFUSE, Fate.LOSE, Fate.TIMEOUT]
    found = []
    async with httpx.AsyncClient(transport=line) as client:
        for _ in range(4):
            try:
                found.append((await client.post("http://x/chat/completions", json={})).status_code)
            except httpx.ReadTimeout:
                found.append(0)
    journal.close()
    assert found == [503, 503, 0, 200]
    record = Record(scene_by_hand(*KINDS[0]), 1)
    read_agents(tmp_path, record)
    tries = record.attempts["1"].tries
    assert [one.how for one in tries] == ["unsent", "lost", "lost", "got"]
    assert tries[1].raw == '{"id":"r"}'


# --- the command -------------------------------------------------------------------------------
def test_report_says_what_is_broken_and_what_there_was_too_little_of() -> None:
    report = Report(8, measures=True)
    row = Row(scene_by_hand(*KINDS[0]))
    row.wrong.update({Wrong.LOST: 2})
    report.rows.append(row)
    assert report.broken == ["lost = 2"]
    assert "the overhead was not measured" in report.missing
    line = json.loads(report.to_json())
    assert list(line)[:8] == [
        "sessions", "calls", "lost", "twice", "token_mismatches", "accounting_difference",
        "overhead_ms_p50", "overhead_ms_p95",
    ]  # fmt: skip
    assert {kind.value for kind in (*FIRST, *BESIDE)} == {kind.value for kind in Wrong}


def test_options_make_every_session_that_is_asked_for() -> None:
    options = parse([])
    assert sum(scene.sessions for scene in options.scenes) >= 500
    assert {(s.protocol.value, s.kind) for s in options.scenes} == {
        (protocol, kind) for protocol in ("sglang", "vllm") for kind in ("linear", "tree")
    }
    assert all(scene.kills for scene in options.scenes)
    assert parse(["--quick"]).calls == 0


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.e2e.agents", "--quick", "--json", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=170, preexec_fn=die_with_parent,
        check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_short_run_over_both_protocols_finds_nothing() -> None:
    done = command()
    assert done.returncode == 0, done.stderr[-3000:]
    line = json.loads(done.stdout)
    assert line["sessions"] >= 48
    assert line["kills"] == 1
    assert [line[kind.value] for kind in (*FIRST, *BESIDE)] == [0] * len(Wrong)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["account", "train-twice"])
def test_a_damaged_run_ends_with_1_and_says_what_is_wrong(name: str) -> None:
    done = command("--break", name, "--sessions", "32")
    line = json.loads(done.stdout)
    assert done.returncode == 1
    assert line[BREAKS[name].shows_in.value] > 0
    assert f"{BREAKS[name].shows_in.value} = " in done.stderr


def test_findings_say_where() -> None:
    assert str(Finding(Wrong.LOST, "3:1", "gone")) == "lost: 3:1: gone"
