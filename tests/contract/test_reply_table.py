"""Every malformed, partial, contradictory or impossible reply, and what becomes of it.

The rows of docs/engines.md ("Replies"), each driven over HTTP against the simulated engine, in both
protocols, through a real pool, a real generate function and a real attempt. Held against the
trajectory that nothing damages: a token or a log-prob of a reply that was a fault is in no sample.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import Report, Status, StopReason
from rollstream.sample import UNKNOWN_VERSION, Sample
from tests.contract.sim_process import KINDS, SimProcess, pool_of
from tests.scripted_engine import ABORTS, ScriptedEngine, a_reply, a_vllm_reply, hang, scripted
from tests.unit.worker.works import a_book, a_work, an_env, leased
from worker.engines.faults import REPLIES, Action, Detail
from worker.engines.protocol.replay import ReplayShape, RowShape
from worker.engines.sim.damage import OVERFLOW_WORDS
from worker.engines.sim.faults import Fault
from worker.generate import multi_turn
from worker.generate.finish import finish
from worker.members.rollout import Rollout
from worker.sampling import Sampling
from worker.tito.load import render_prompt
from worker.tools import load_tools
from worker.types import Limits

pytestmark = pytest.mark.xdist_group("contract-sim")
QUESTION = [{"role": "user", "content": "How much is 12 and 30?"}]
TOOLS = load_tools(("calculator",))
REPLAY = ReplayShape(experts=RowShape(2, 2))

IDS = [59, 79075, 90, 23, 92]

F, D = Fault, Detail


@dataclass(frozen=True)
class Row:
    """One thing that a reply can be, and how each protocol's client calls it."""

    fault: Fault
    sglang: Detail
    vllm: Detail
    replay: bool = False
    """Only where routed experts were asked for."""

    def detail(self, kind: str) -> Detail:
        """Return what the fault is called."""
        return self.sglang if kind == "sglang" else self.vllm


def same(fault: Fault, detail: Detail, **fields: Any) -> Row:
    """Return a row that is the same in both protocols."""
    return Row(fault, detail, detail, **fields)


FAULTS = [
    # No answer, or half of one.
    same(F.RESET, D.RESET),
    same(F.HALF_BODY, D.RESET),
    same(F.HANG, D.TIMEOUT),
    # Another status than 200.
    same(F.UNAVAILABLE, D.UNAVAILABLE),
    same(F.QUEUE_FULL, D.UNAVAILABLE),
    same(F.HTTP_408, D.UNAVAILABLE),
    same(F.HTTP_429, D.UNAVAILABLE),
    same(F.HTTP_500, D.SERVER_ERROR),
    same(F.HTTP_400, D.REFUSED),
    same(F.HTTP_404, D.REFUSED),
    # A frame that cannot be read, or is another request's.
    same(F.NOT_JSON, D.BAD_REPLY),
    same(F.OTHER_RID, D.BAD_REPLY),
    # Why it ended.
    same(F.NO_FINISH, D.UNKNOWN_FINISH),
    same(F.UNKNOWN_FINISH, D.UNKNOWN_FINISH),
    Row(F.NAN, D.NAN, D.SERVER_ERROR),
    Row(F.ABORT_CODE, D.ABORT_ERROR, D.SERVER_ERROR),
    Row(F.ABORT_503, D.ABORT_ERROR, D.UNAVAILABLE),
    # How many, and of what.
    same(F.LOGPROBS_MISSING, D.LOGPROB_LENGTH_MISMATCH),
    same(F.LOGPROBS_SHORT, D.LOGPROB_LENGTH_MISMATCH),
    same(F.LOGPROBS_LONG, D.LOGPROB_LENGTH_MISMATCH),
    same(F.COMPLETION_TOKENS, D.LOGPROB_LENGTH_MISMATCH),
    same(F.OTHER_IDS, D.ID_MISMATCH),
    same(F.TOO_MANY, D.BAD_REPLY),
    same(F.EMPTY_LENGTH, D.BAD_REPLY),
    same(F.PROMPT_CUT, D.PROMPT_MISMATCH),
    # Values that cannot be.
    same(F.LOGPROB_NULL, D.BAD_LOGPROB),
    same(F.LOGPROB_POSITIVE, D.BAD_LOGPROB),
    same(F.LOGPROB_NAN, D.BAD_REPLY),
    same(F.LOGPROB_LOWEST, D.BAD_LOGPROB),
    same(F.BAD_TOKEN, D.BAD_TOKEN),
    same(F.NEGATIVE_TOKEN, D.BAD_TOKEN),
    # Whose weights, and which experts.
    same(F.SPANS_GAP, D.BAD_REPLY),
    same(F.SPANS_OVERLAP, D.BAD_REPLY),
    same(F.SPANS_SHORT, D.BAD_REPLY),
    same(F.EXPERTS_MISSING, D.REPLAY_MISMATCH, replay=True),
    same(F.EXPERTS_SHORT, D.REPLAY_MISMATCH, replay=True),
    same(F.EXPERTS_GARBAGE, D.REPLAY_MISMATCH, replay=True),
]
"""Replies whose tokens are discarded."""
BELIEVED = [
    F.SLOW, F.LENGTH, F.NO_END, F.VERSION_CHANGE, F.NO_VERSION, F.SPANS_WRONG, F.LOGPROBS_WRONG,
]  # fmt: skip
"""Replies that are odd, or of which nobody can tell (other weights named, other log-probs said)."""
STOPPED = [F.ABORT, F.ABORT_EMPTY]
"""Replies that the trajectory goes on from."""


@dataclass(frozen=True)
class Met:
    """How a kind of fault is met, as docs/engines.md says; written down here once more."""

    action: Action = Action.FAULT
    again: bool = True
    """The same call is sent again."""
    report: Report = Report.RETRY
    """What the queue is told in the end."""
    aborts: bool = False
    """The engine is told to stop, whether the call is sent again or not."""


REFUSED = Met(Action.REFUSE, again=False, report=Report.FINAL)
MET: dict[Detail, Met] = {
    D.RESET: Met(Action.RETRY, aborts=True),
    D.TIMEOUT: Met(Action.RETRY, aborts=True),
    D.UNAVAILABLE: Met(Action.RETRY, aborts=True),
    D.SERVER_ERROR: Met(Action.RETRY, aborts=True),
    D.ABORT_ERROR: Met(Action.RETRY),
    D.NAN: Met(),
    D.BAD_LOGPROB: Met(),
    D.BAD_TOKEN: Met(),
    D.LOGPROB_LENGTH_MISMATCH: Met(),
    D.ID_MISMATCH: Met(),
    D.BAD_REPLY: Met(aborts=True),
    D.UNKNOWN_FINISH: Met(),
    D.PROMPT_MISMATCH: REFUSED,
    D.REFUSED: REFUSED,
    D.REPLAY_MISMATCH: Met(report=Report.FINAL),
}


kinds = pytest.mark.parametrize("kind", KINDS)
rows = pytest.mark.parametrize("row", FAULTS, ids=lambda row: row.fault.value)


def _abort(status: int | None, message: str = "aborted") -> dict[str, Any]:
    return {"type": "abort", "message": message, "status_code": status}


class Stage:
    """Attempts of one member, in one protocol."""

    def __init__(self, sim: SimProcess | Scripted, kind: str, renderer: Any) -> None:
        self.sim, self.kind, self.renderer = sim, kind, renderer
        env = an_env(
            multi_turn, limits=Limits(4, 4096), sampling=Sampling(max_new_tokens=512), tools=TOOLS
        )
        self._book = a_book(env, partial(render_prompt, renderer))

    async def run(self, *damage: Any, retries: int = 3, replay: bool = False, **bounds: Any) -> Ran:
        """Run one attempt against an engine that is told what to do to its next requests."""
        async with pool_of(
            self.kind, self.sim.url, retries=retries, replay=REPLAY if replay else None, **bounds
        ) as pool:
            rollout = Rollout(
                engine=pool, renderer=self.renderer, book=self._book, version=lambda: 0, run_seed=7,
                finish=partial(finish, decode=self.renderer.decode), replay=replay,
            )  # fmt: skip
            self.sim.damage(*damage)
            before, aborts = self.sim.reached(), self.sim.aborts()
            ending = await rollout.run(a_work(self._book, leased(prompt=QUESTION)))
        # Behind the pool's end: aborts that go out in the background are out by then.
        (engine,) = pool.counters.engines
        counted = {name: count for name, count in engine.requests.items() if count}
        assert isinstance(ending.trajectory, Sample)
        return Ran(
            ending.report, ending.trajectory, self.sim.reached() - before, counted,
            pool.counters.retries, self.sim.aborts() - aborts,
        )  # fmt: skip

    async def whole(self, replay: bool = False) -> Sample:
        """Return the trajectory that nothing damages: a call, its result, an answer."""
        key = (self.kind, replay)
        if key not in WHOLE:
            ran = await self.run(replay=replay)
            assert ran.sample.stop_reason is StopReason.STOP
            assert (len(ran.sample.calls), ran.requests) == (2, 2)
            WHOLE[key] = ran.sample
        return WHOLE[key]


@dataclass
class Ran:
    """What an attempt came to."""

    report: Report
    sample: Sample
    requests: int
    """That the engine got."""
    counted: dict[str, int]
    """By outcome, as the pool counts."""
    retries: int
    aborts: int
    """That the engine got, in the words of either protocol."""


WHOLE: dict[tuple[str, bool], Sample] = {}
"""By protocol, and whether routed experts were asked for; made once."""


@pytest.fixture
def stage(kind: str, sim: SimProcess, qwen3: Any) -> Stage:
    """A stage of the test's protocol."""
    return Stage(sim, kind, qwen3)


def assert_same(found: Sample, whole: Sample) -> None:
    """Assert that two samples hold the same tokens, log-probs, mask and rows."""
    for name in ("tokens", "rollout_log_probs", "loss_mask", "rollout_routed_experts"):
        assert np.array_equal(getattr(found, name), getattr(whole, name)), name
    assert [dataclasses.replace(call, rid="") for call in found.calls] == [
        dataclasses.replace(call, rid="") for call in whole.calls
    ]
    assert found.stop_reason is whole.stop_reason


# --- faults --------------------------------------------------------------------------------------
@kinds
@rows
async def test_a_reply_that_is_no_answer_leaves_nothing_behind_where_the_next_one_is(
    stage: Stage, row: Row
) -> None:
    detail = row.detail(stage.kind)
    if not MET[detail].again:
        return  # nothing is sent again: the next test
    whole = await stage.whole(row.replay)
    # The first reset may be that of a connection which the engine had given up: it is free.
    again = (row.fault,) * (2 if row.fault is F.RESET else 1)
    damage = again if row.fault is F.HANG else (*again, None, *again)
    ran = await stage.run(*damage, replay=row.replay, **patience(row))
    times = 1 if row.fault is F.HANG else 2
    assert ran.report is Report.COMPLETE
    assert_same(ran.sample, whole)
    assert ran.requests == 2 + damage.count(row.fault)
    assert ran.retries == times
    assert ran.counted == {"stop": 2, detail.value: times}
    assert ran.aborts == (damage.count(row.fault) if MET[detail].aborts else 0)


@kinds
@rows
@pytest.mark.parametrize("turn", [0, 1])
async def test_a_reply_that_stays_no_answer_ends_the_attempt_without_a_token(
    stage: Stage, row: Row, turn: int
) -> None:
    detail = row.detail(stage.kind)
    met = MET[detail]
    if row.fault is F.HANG and turn:
        return  # it costs its time, and the turn makes no difference to it
    tries = 2 if met.again and row.fault is not F.HANG else 1
    requests = tries + (row.fault is F.RESET)  # one more: see above
    ran = await stage.run(
        *(None,) * turn, *(row.fault,) * requests, retries=tries - 1 if met.again else 3,
        replay=row.replay, **patience(row),
    )  # fmt: skip
    assert ran.report is met.report
    assert (ran.requests, ran.counted[detail.value]) == (turn + requests, tries)
    assert ran.aborts == (requests if met.aborts else 0)
    sample = ran.sample
    assert (sample.status, sample.stop_reason) == (Status.FAILED, StopReason.ENGINE_ERROR)
    assert sample.metadata["error_detail"] == detail.value
    assert (len(sample.tokens), sample.response_length, sample.calls) == (0, 0, [])


def patience(row: Row) -> dict[str, float]:
    """Return how long an engine is waited for: the others answer, however slow the machine."""
    return {"request_timeout_s": 1.0, "abort_wait_s": 0.2} if row.fault is F.HANG else {}


# --- replies that end or go on -------------------------------------------------------------------
@kinds
@pytest.mark.parametrize("turn", [0, 1])
async def test_an_overflow_in_any_words_truncates_what_is_there(stage: Stage, turn: int) -> None:
    whole = await stage.whole()
    for _ in OVERFLOW_WORDS:  # the engine takes them in turn
        ran = await stage.run(*(None,) * turn, F.OVERFLOW)
        reason = StopReason.CONTEXT_LENGTH if turn else StopReason.PROMPT_TOO_LONG
        assert (ran.report, ran.sample.stop_reason) == (Report.COMPLETE, reason)
        assert (ran.sample.status, ran.requests) == (Status.TRUNCATED, turn + 1)
        held = whole.calls[1].start if turn else whole.prompt_length
        assert ran.sample.tokens.tolist() == whole.tokens[:held].tolist()


async def test_an_abort_with_the_code_of_an_overflow_truncates_as_its_status_does(
    qwen3: Any,
) -> None:
    raw = a_reply(IDS, finish=_abort(400, "the input is longer than the model's context length"))
    async with scripted(raw) as engine:
        ran = await Stage(Scripted(engine), "sglang", qwen3).run()
    assert (ran.sample.stop_reason, ran.requests) == (StopReason.PROMPT_TOO_LONG, 1)
    assert (ran.report, ran.sample.response_length) == (Report.COMPLETE, 0)


@kinds
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("fault", STOPPED)
async def test_an_abort_by_request_is_no_fault_and_keeps_its_tokens(
    stage: Stage, fault: Fault, turn: int
) -> None:
    whole = await stage.whole()
    ran = await stage.run(*(None,) * turn, {"kind": fault, "after": 3})
    assert ran.report is Report.BACK, "parked instead where `weights.partial` is on"
    assert (ran.requests, ran.retries) == (turn + 1, 0)
    assert ran.counted == ({"stop": turn} if turn else {}) | {"abort": 1}
    assert ran.sample.stop_reason is StopReason.ABORT_WEIGHTS
    kept = whole.calls[turn].start + (3 if fault is F.ABORT else 0)
    assert ran.sample.tokens.tolist() == whole.tokens[:kept].tolist()


@kinds
async def test_odd_replies_that_are_right_are_believed(stage: Stage) -> None:
    whole = await stage.whole()
    ran = await stage.run(F.SLOW, F.VERSION_CHANGE)
    assert ran.requests == 2
    assert_same(ran.sample, whole)

    ran = await stage.run(F.NO_VERSION, F.NO_VERSION)
    assert ran.requests == 2
    assert ran.sample.tokens.tolist() == whole.tokens.tolist()
    # At version 0 nobody can have updated the weights: unlabelled ones are those of the start.
    assert {span[0] for call in ran.sample.calls for span in call.versions} <= {0, UNKNOWN_VERSION}

    ran = await stage.run({"kind": F.LENGTH, "after": 4})
    assert (ran.sample.stop_reason, ran.requests) == (StopReason.CONTEXT_LENGTH, 1)
    assert ran.sample.tokens.tolist() == whole.tokens[: whole.prompt_length + 4].tolist()

    ran = await stage.run(None, F.NO_END)
    assert ran.sample.stop_reason is StopReason.STOP
    assert ran.sample.tokens.tolist() == whole.tokens[:-1].tolist(), "no end is appended by hand"


# --- what the simulated engine never does --------------------------------------------------------
class Scripted:
    """An engine of exact bytes, told and asked like the simulated one."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.url, self._engine = engine.url, engine

    def damage(self, *_: Any) -> None:
        """Nothing: its replies are given already."""

    def reached(self) -> int:
        """Return how many requests for tokens came."""
        return len(self._engine.requests)

    def aborts(self) -> int:
        """Return how many aborts came."""
        return sum(self._engine.paths().count(path) for path in ABORTS)


GOOD = {"sglang": a_reply(IDS), "vllm": a_vllm_reply(IDS, prompt_tokens=None)}
ERROR = b'{"error": {"message": "out of luck"}}'


def _entries(*names: str) -> dict[str, Any]:
    return {"logprobs": {"content": [{"token": name, "logprob": -0.5} for name in names]}}


WRITTEN: list[tuple[str, str, bytes]] = [
    ("sglang", "error_200", ERROR),
    ("vllm", "error_200", ERROR),
    ("sglang", "abort_400", a_reply(IDS, finish=_abort(400, "bad image"))),
    ("sglang", "abort_429", a_reply(IDS, finish=_abort(429, "queue full"))),
    ("sglang", "abort_429", a_reply(IDS, finish=_abort(408, "too late"))),
    ("sglang", "abort_code", a_reply(IDS, finish=_abort(302, "elsewhere"))),
    ("vllm", "unnamed_ids", a_vllm_reply(IDS, prompt_tokens=None, **_entries(*"abcde"))),
    ("vllm", "choices", b'{"choices": []}'),
    ("vllm", "choices", a_vllm_reply(IDS, index=1, prompt_tokens=None)),
]


@pytest.mark.parametrize(("kind", "row", "raw"), WRITTEN, ids=lambda part: str(part)[:12])
async def test_rows_of_written_replies_are_met_as_the_table_says(
    kind: str, row: str, raw: bytes, qwen3: Any
) -> None:
    detail = REPLIES[row].detail
    assert detail is not None
    for steps, retries in (([raw, GOOD[kind]], 3), ([raw, raw], 1)):
        async with scripted(*steps) as engine:
            ran = await Stage(Scripted(engine), kind, qwen3).run(retries=retries)
        met = MET[detail]
        ends = not met.again or steps[1] is raw
        assert ran.counted[detail.value] == (2 if met.again and ends else 1)
        if ends:
            assert ran.report is met.report
            assert (ran.requests, len(ran.sample.tokens)) == (2 if met.again else 1, 0)
        else:
            assert (ran.report, ran.requests) == (Report.COMPLETE, 2)
            assert ran.sample.tokens[ran.sample.prompt_length :].tolist() == IDS


@kinds
async def test_what_an_engine_had_when_its_time_was_up_is_not_used(kind: str, qwen3: Any) -> None:
    partial_reply = {
        "sglang": a_reply(IDS, finish=_abort(None)),
        "vllm": a_vllm_reply(IDS, finish="abort", prompt_tokens=None),
    }[kind]
    async with scripted(hang, GOOD[kind]) as engine:
        engine.aborted = lambda _: engine.raw[0].answer(200, partial_reply)
        ran = await Stage(Scripted(engine), kind, qwen3).run(request_timeout_s=1.0)
    assert (ran.report, ran.requests) == (Report.COMPLETE, 2)
    assert ran.counted == {"stop": 1, "timeout": 1}
    assert ran.sample.tokens[ran.sample.prompt_length :].tolist() == IDS
    assert len(ran.sample.calls) == 1


def test_every_kind_of_damage_is_a_row_here_and_in_the_table_of_the_worker() -> None:
    rows_of = [row.fault for row in FAULTS] + BELIEVED + STOPPED + [F.OVERFLOW]
    assert sorted(rows_of) == sorted(Fault)
    # No engine, and no connection to one, are no replies; an overflow is no fault of a sample.
    assert set(MET) == set(Detail) - {D.NO_ENGINE, D.CONNECT, D.CONTEXT_OVERFLOW}
    assert {row.detail(kind) for row in FAULTS for kind in KINDS} == set(MET)
    for row in FAULTS:
        said = REPLIES.get(ALSO.get(row.fault, row.fault))
        assert said is not None, row.fault
        assert said.detail is row.sglang, row.fault
        assert said.action is MET[row.sglang].action, row.fault
    assert {REPLIES[fault].action for fault in STOPPED} == {Action.RESUME}
    tried = {ALSO.get(row.fault, row.fault) for row in FAULTS} | {*STOPPED, F.OVERFLOW}
    tried |= {row for _, row, _ in WRITTEN} | {"abort_late"}
    # A body that is too large, and no engine at all: tests/integration/engines/test_pool.py.
    # What only a stream can be wrong in: test_stream_table.py.
    assert set(REPLIES) - tried == {"too_large", "connect", "no_engine"} | {
        name for name in REPLIES if name.startswith("stream_")
    }


ALSO = {F.QUEUE_FULL: "503", F.HTTP_408: "503", F.HTTP_429: "503", F.HTTP_404: "400",
        F.ABORT_503: "abort_code"}  # fmt: skip
"""Damages that are one row of the worker's table with another one."""


def test_docs_show_the_table_of_replies() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    section = page.partition("## Replies\n")[2].partition("\n## ")[0]
    row = r"^\| `(\w+)` \| (.+?) \| (?:both|SGLang|vLLM) \| (\w+) \| (?:`(\w+)`)? \|"
    assert re.findall(row, section, re.MULTILINE) == [
        (name, seen.reply, seen.action.value, "" if seen.detail is None else seen.detail.value)
        for name, seen in REPLIES.items()
    ]
