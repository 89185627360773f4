"""The proof of moving weights: its judges see what they are there to see, and short runs of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import die_with_parent
from tests.e2e.weights.breaks import BREAKS
from tests.e2e.weights.bubble import bubbles_ms
from tests.e2e.weights.by_hand import Hand
from tests.e2e.weights.engine import reading_of
from tests.e2e.weights.findings import Finding, Kind
from tests.e2e.weights.journal import Journal, read_engines, read_workers
from tests.e2e.weights.judge import judge, oldest
from tests.e2e.weights.record import EngineCall, Execution, Record, Update
from tests.e2e.weights.report import BESIDE, FIRST, Report, Row
from tests.e2e.weights.rows import question_of, write_rows
from tests.e2e.weights.scenes import TOKEN_S, Protocol, Scene, full_scenes, quick_scenes
from tests.e2e.weights.truth import Truth
from worker.engines.protocol.versions import BETWEEN_VERSIONS, recorded
from worker.tito.load import load_renderer

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 2


@dataclasses.dataclass
class Parts:
    """What writes a record by hand, and what judges it."""

    truth: Truth
    renderer: Any
    written: dict[str, Record] = dataclasses.field(default_factory=dict)

    def record(self, **changes: Any) -> Record:
        scene = Scene(
            "by-hand", Protocol.SGLANG, True, {"abort": UPDATES}, evaluations=1,
            max_staleness=2, labels=True,
        )  # fmt: skip
        scene = dataclasses.replace(scene, **changes)
        if str(scene) not in self.written:
            self.written[str(scene)] = Hand(scene, self.truth.policy, self.renderer).write()
        return copy.deepcopy(self.written[str(scene)])

    def judge(self, record: Record) -> list[Finding]:
        self.truth.label_of, self.truth.newest = record.scene.label_of, UPDATES
        return judge(record, self.truth, question_of, self.truth.policy.vocabulary.decode)

    def figures(self, record: Record) -> Counter[Kind]:
        counted: Counter[Kind] = Counter()
        for finding in self.judge(record):
            counted[finding.kind] += finding.count
        return counted


@pytest.fixture(scope="module")
def parts(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    folder = tmp_path_factory.mktemp("rows")
    _, answers = write_rows(folder, quick_scenes()[0], 3)
    truth = Truth.load(vocabulary, f"jsonl:{answers}", 11, str, UPDATES)
    return Parts(truth, load_renderer(vocabulary, "qwen3"))


# --- the judge ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes", [{}, {"partial": False}, {"mask_offpolicy": True}, {"labels": False}]
)
def test_judge_finds_nothing_in_a_record_of_a_faultless_service(
    parts: Parts, changes: dict[str, Any]
) -> None:
    record = parts.record(**changes)
    assert [str(finding) for finding in parts.judge(record)] == []
    row = Row.of(record, [], 1)
    assert (row.resumed > 0) is record.scene.partial
    assert row.mixed > 0
    assert row.executions > 0


@pytest.mark.parametrize("name", [n for n, one in BREAKS.items() if one.damage is not None])
def test_every_damage_of_a_record_shows_in_its_own_figure(parts: Parts, name: str) -> None:
    broken = BREAKS[name]
    assert broken.damage is not None
    # With a version that changes within calls, where that is what is damaged.
    record = parts.record(partial=name not in ("dispatched", "newest"))
    broken.damage(record)
    figures = parts.figures(record)
    assert figures[broken.shows_in] > 0, figures  # type: ignore[index]  # of a record: a kind


def test_truth_tells_a_wrong_version_from_a_wrong_log_prob(parts: Parts) -> None:
    record = parts.record()
    call = record.samples()[0].calls[0]
    count = call.end - call.start
    call.versions = [(version + 1, a, b) for version, a, b in call.versions]
    assert parts.figures(record)[Kind.VERSION] == count
    record = parts.record()
    sample = record.samples()[0]
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[0] *= 2
    figures = parts.figures(record)
    assert (figures[Kind.VERSION], figures[Kind.TOKEN]) == (0, 1)


def test_truth_takes_no_token_without_a_version(parts: Parts) -> None:
    record = parts.record()
    call = record.samples()[0].calls[0]
    count = call.end - call.start
    call.versions = [(-1, call.start, call.end)]
    assert parts.figures(record)[Kind.VERSION] == count


def an_update_meets(record: Record, **changes: Any) -> tuple[Any, int]:
    """Have an update of `keep` go on while an engine has the first call; return it, and its size.

    All of its tokens are recorded as of no version.
    """
    call = record.samples()[0].calls[0]
    held = record.engine_calls[call.rid]
    assert held.ended_s is not None
    count = call.end - call.start
    call.versions = [(0, call.start, call.start), (-1, call.start, call.end)]
    met: dict[str, Any] = {
        "asked_s": held.started_s, "done_s": held.started_s + TOKEN_S * count, "hides": True,
        "mode": "keep",
    }  # fmt: skip
    record.updates[0] = dataclasses.replace(record.updates[0], **(met | changes))
    return held, count


def test_truth_excuses_what_was_sampled_between_a_push_and_its_name_and_counts_it(
    parts: Parts,
) -> None:
    record = parts.record()
    _, count = an_update_meets(record)
    before = parts.truth.unknown
    assert parts.figures(record)[Kind.VERSION] == 0
    assert parts.truth.unknown == before + count


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        # It named the weights, or nothing went on.
        ({"hides": False}, 1.0),
        # Its weights are neither those before nor those behind it.
        ({"version": 2}, 1.0),
        # The engine had the call at another time.
        ({"asked_s": 0.0, "done_s": 1.0}, 1.0),
    ],
)
def test_truth_excuses_no_unknown_version_elsewhere(
    parts: Parts, changes: dict[str, Any], wrong: float
) -> None:
    record = parts.record()
    _, count = an_update_meets(record, **changes)
    assert parts.figures(record)[Kind.VERSION] == wrong * count


def test_truth_excuses_no_unknown_token_of_older_weights_than_its_age_is_counted_from(
    parts: Parts,
) -> None:
    record = parts.record()
    _, count = an_update_meets(record)
    call = record.samples()[0].calls[0]
    call.versions[0], call.dispatched_version = (1, call.start, call.start), 1
    assert parts.figures(record)[Kind.VERSION] == count


@pytest.mark.parametrize(
    ("said", "least"),
    [
        # It was sent under 5, waited while its engine got 6, and went on over the update to 7.
        ([(6, 0, 3), (BETWEEN_VERSIONS, 3, 5), (7, 5, 8)], 6),
        ([(6, 0, 3), (BETWEEN_VERSIONS, 3, 8)], 6),
        ([(6, 0, 3), (BETWEEN_VERSIONS, 3, 5), (6, 5, 8)], 6),
        ([(5, 0, 3), (BETWEEN_VERSIONS, 3, 5), (6, 5, 8)], 5),
        ([(4, 0, 3), (BETWEEN_VERSIONS, 3, 8)], 4),
        ([(BETWEEN_VERSIONS, 0, 3), (6, 3, 8)], 5),
        ([(BETWEEN_VERSIONS, 0, 8)], 5),
    ],
)
def test_judge_counts_ages_from_where_the_product_does_through_tokens_of_no_version(
    parts: Parts, said: list[tuple[int, int, int]], least: int
) -> None:
    record = parts.record()
    batch = record.handed[0]
    group = batch.groups[0]
    for sample in group.samples:
        call = sample.calls[0]
        spans = recorded(said, 5)
        call.versions = [(v, call.start + a, call.start + b) for v, a, b in spans]
        call.dispatched_version, call.end = 5, call.start + 8
        del sample.calls[1:]
        sample.derive_weight_versions()
        assert sample.version_range() == (least, max(v for v, _, _ in spans))
    assert oldest(group.samples) == least
    del batch.groups[1:]
    batch.version, group.staleness = least + 1, 1
    assert parts.figures(record)[Kind.STALE] == 0
    group.staleness = 2
    assert parts.figures(record)[Kind.STALE] == 1


def test_truth_excuses_no_more_tokens_than_an_engine_samples_in_so_long(parts: Parts) -> None:
    record = parts.record()
    held, count = an_update_meets(record)
    record.updates[0].done_s = held.started_s + TOKEN_S * 2.5
    assert parts.figures(record)[Kind.VERSION] == count - 3


@pytest.mark.parametrize(("weights_mode", "found"), [("colocated", 1), ("on_policy", 0)])
def test_judge_counts_calls_of_nobody_where_the_engines_share_the_trainers_gpus(
    parts: Parts, weights_mode: Any, found: int
) -> None:
    record = parts.record()
    record.scene = dataclasses.replace(record.scene, weights_mode=weights_mode)
    update = record.updates[0]
    record.engine_calls["nobody's"] = EngineCall(
        "nobody's", update.entered_s - 1, update.left_s + 1, 3, "stop"
    )
    assert parts.figures(record)[Kind.PAUSE] == found


def test_truth_misses_tokens_that_the_engine_answered_and_nobody_kept(parts: Parts) -> None:
    record = parts.record()
    rid = record.samples()[0].calls[0].rid
    answered = record.engine_calls[rid].num_tokens
    assert answered is not None
    record.engine_calls[rid].num_tokens = answered + 3
    assert parts.figures(record)[Kind.TOKEN] == 3


def test_judge_excuses_only_what_a_killed_worker_ran(parts: Parts) -> None:
    record = parts.record()
    first = record.executions[0]
    record.executions.append(dataclasses.replace(first, nonce="f" * 12, pid=8))
    assert parts.figures(record)[Kind.TOOL] == 1
    record.killed[8] = 0.0
    assert parts.figures(record)[Kind.TOOL] == 0


def test_judge_misses_an_execution_that_the_observation_claims(parts: Parts) -> None:
    record = parts.record()
    shown = {e.nonce: e for e in record.executions}
    record.executions.remove(next(iter(shown.values())))
    assert parts.figures(record)[Kind.TOKEN] == 1


def test_judge_takes_no_drop_that_nothing_in_the_configuration_makes(parts: Parts) -> None:
    record = parts.record()
    BREAKS["short"].damage(record)  # type: ignore[misc]  # it has one
    assert parts.figures(record)[Kind.DROP] == 1


def test_judge_finds_what_the_run_still_holds_at_its_end(parts: Parts) -> None:
    record = parts.record()
    record.left = {"queued": 2}
    assert parts.figures(record)[Kind.LOST] == 2


# --- the bubble --------------------------------------------------------------------------------
def a_call(start: float, end: float) -> EngineCall:
    return EngineCall(f"{start}", start, end, 1, "stop")


def a_timing(*calls: tuple[int, EngineCall]) -> Record:
    record = Record(quick_scenes()[0], 1)
    record.updates = [Update(1, "abort", 10.0, 10.02, 10.5, 10.6)]
    for pid, call in calls:
        record.pid_of[call.rid], record.engine_calls[call.rid] = pid, call
    return record


def test_bubble_is_what_entering_waits_for_and_the_last_worker_that_goes_on() -> None:
    record = a_timing(
        (1, a_call(9.0, 10.01)), (1, a_call(10.55, 11)), (2, a_call(9.5, 10.01)),
        (2, a_call(10.53, 11)),
    )  # fmt: skip
    assert bubbles_ms(record)[1] == pytest.approx(20 + 50)


def test_bubble_of_a_worker_whose_calls_go_on_is_what_entering_waits_for() -> None:
    record = a_timing((1, a_call(9.0, 10.7)), (1, a_call(10.8, 11)))
    assert bubbles_ms(record)[1] == pytest.approx(20)


@pytest.mark.parametrize("why", ["killed", "stood_still"])
def test_update_that_waits_for_something_else_has_no_bubble(why: str) -> None:
    record = a_timing((1, a_call(9.0, 10.01)), (1, a_call(10.55, 11)))
    if why == "killed":
        record.killed[5] = 9.9
    else:
        record.stood_still.append((9.8, 10.01))
    assert bubbles_ms(record) == {}


@pytest.mark.parametrize(
    "calls",
    [
        [(1, a_call(9.0, 9.5)), (1, a_call(10.55, 11))],
        [(1, a_call(9.0, 10.01)), (1, a_call(16.0, 17))],
        [(1, a_call(9.0, 10.01))],
    ],
)
def test_worker_without_work_says_nothing_about_an_update(
    calls: list[tuple[int, EngineCall]],
) -> None:
    assert bubbles_ms(a_timing(*calls)) == {}


# --- the report --------------------------------------------------------------------------------
def a_row(**changes: Any) -> Row:
    scene = changes.pop("scene", quick_scenes()[0])
    good: dict[str, Any] = {
        "updates": Counter(scene.updates), "samples": 100, "executions": 100, "evaluations": 2,
        "stopped": 50, "resumed": 10 if scene.partial else 0, "mixed": 5, "mixed_calls": 5,
        "disturbances": {"abort_all": 3, "restart": scene.restarts}, "bubbles_ms": [50.0] * 100,
        "kills": scene.kills, "stops": scene.stops, "failed_updates": 1, "unknown_tokens": 9,
    }  # fmt: skip
    return Row(scene, **(good | changes))


def test_good_report_is_a_proof_and_its_line_has_the_promised_keys() -> None:
    report = Report(50, [a_row(scene=scene) for scene in full_scenes(50)])
    assert (report.broken, report.missing) == ([], [])
    line = json.loads(report.to_json())
    assert [*line][:9] == [
        "lost", "twice", "token_mismatches", "wrong_version_tokens", "repeated_tool_calls",
        "resumed", "longest_pause_s", "update_bubble_ms_p99", "accounting_difference",
    ]  # fmt: skip
    assert line["updates"]["keep"] >= 50
    assert line["updates"]["abort"] >= 50


@pytest.mark.parametrize("kind", [*FIRST, *BESIDE])
def test_report_with_a_figure_that_is_not_0_is_no_proof(kind: Kind) -> None:
    assert len(Report(1, [a_row(wrong=Counter({kind: 1}))]).broken) == 1


def test_report_in_which_nothing_was_resumed_or_something_without_partial_is_no_proof() -> None:
    assert len(Report(1, [a_row(resumed=0)]).broken) == 1
    plain = dataclasses.replace(quick_scenes()[0], partial=False)
    assert len(Report(1, [a_row(scene=plain, resumed=1)]).broken) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"updates": Counter({"keep": 50})},
        {"updates": Counter({"abort": 50})},
        {"samples": 3},
        {"executions": 0},
        {"evaluations": 0},
        {"stopped": 0},
        {"mixed": 0},
        {"mixed_calls": 0},
        {"unknown_tokens": 0, "scene": full_scenes(50)[0]},
        {"disturbances": {}},
        {"failed_updates": 0},
        {"bubbles_ms": []},
    ],
)
def test_report_of_a_run_that_did_too_little_is_no_proof(changes: dict[str, Any]) -> None:
    assert len(Report(0, [a_row(**changes)]).missing) == 1


# --- what it reads -----------------------------------------------------------------------------
def test_journal_gives_back_what_was_written_and_nothing_that_a_kill_cut_off(
    tmp_path: Path,
) -> None:
    ran = Execution("a", "3", 1, 0, "r", 0, "n", 7)
    with contextlib.closing(Journal(tmp_path / "worker-7.jsonl")) as worker:
        worker.write("begin", id="a", group="3", member=1, pid=7, held=0)
        worker.write("call", rid="r", pid=7)
        worker.write("tool", **dataclasses.asdict(ran))
        worker.write("end", id="a", how="aborted")
    with contextlib.closing(Journal(tmp_path / "engine-0.jsonl")) as engine:
        engine.write("start", rid="r", at_s=1.0)
        engine.write("end", rid="r", at_s=2.0, num_tokens=5, finish="abort")
    with (tmp_path / "engine-0.jsonl").open("ab") as torn:
        torn.write(b'{"event": "start", "rid": "torn')
    record = Record(quick_scenes()[0], 1)
    read_workers(tmp_path, record)
    read_engines(tmp_path, record)
    assert record.executions == [ran]
    assert record.attempts["a"].ended == "aborted"
    assert record.engine_calls == {"r": EngineCall("r", 1.0, 2.0, 5, "abort")}
    assert record.pid_of == {"r": 7}


def test_door_reads_replies_of_both_protocols() -> None:
    sglang = {"meta_info": {"completion_tokens": 3, "finish_reason": {"type": "abort"}}}
    vllm = {"choices": [{"token_ids": [1, 2], "finish_reason": "length"}]}
    assert reading_of(json.dumps(sglang).encode()) == (3, "abort")
    assert reading_of(json.dumps(vllm).encode()) == (2, "length")


# --- runs --------------------------------------------------------------------------------------
def proof(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.e2e.weights", "--json", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=die_with_parent,
        check=False,
    )


@pytest.mark.slow
def test_quick_proof_finds_nothing_wrong(vocabulary: Path) -> None:
    done = proof("--quick")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert {kind.value: found[kind.value] for kind in (*FIRST, *BESIDE)} == {
        kind.value: 0 for kind in (*FIRST, *BESIDE)
    }
    assert found["resumed"] > 0


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["dispatched", "drop", *(n for n, one in BREAKS.items() if one.damage is None)]
)
def test_damaged_proof_fails_in_the_figure_of_its_damage(vocabulary: Path, name: str) -> None:
    done = proof("--quick", "--break", name)
    assert done.returncode == 1, done.stderr
    found, shows_in = json.loads(done.stdout), BREAKS[name].shows_in
    if shows_in == "resumed":
        assert found["resumed"] == 0
    else:
        assert found[shows_in.value] > 0
    # What nothing was done to is as it was.
    unharmed = Kind.LOST if shows_in is not Kind.LOST else Kind.TWICE
    assert found[unharmed.value] == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fifty_updates_in_each_mode_lose_double_and_misname_nothing(vocabulary: Path) -> None:
    done = proof()
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["updates"]["keep"] >= 50
    assert found["updates"]["abort"] >= 50
    assert sum(found[kind.value] for kind in (*FIRST, *BESIDE)) == 0
    assert {(row["protocol"], row["partial"]) for row in found["scenes"]} == {
        (protocol, partial) for protocol in ("sglang", "vllm") for partial in (True, False)
    }


def test_proof_refuses_wrong_options_before_it_starts_anything() -> None:
    assert proof("--updates", "1").returncode == 2
    assert proof("--scene", "nobody").returncode == 2
    assert proof("--break", "nothing").returncode == 2
