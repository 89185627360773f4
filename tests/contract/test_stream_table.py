"""Every reply of the table (docs/engines.md, "Replies") as a stream, in each form that there is.

The simulated engine does to a stream what it does to a reply, and a pool with a reader must call it
by the same name, pass on nothing but a prefix of what was sampled, and try again only where it
passed on nothing. `test_reply_table` is the same without a reader.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import EngineFault
from tests.engine_pool import a_pool
from tests.scripted_engine import a_reply, a_vllm_reply, scripted
from tests.sim_server import SimServer, sim_server
from tests.streams import DONE, Sink, events_of, sse, streams
from tests.vocabulary_once import tokenizer_of
from worker.engines.faults import REPLIES, Action, Detail
from worker.engines.fleet.pool import EnginePool
from worker.engines.protocol.replay import ReplayShape, RowShape
from worker.engines.sim.damage import OVERFLOW_WORDS
from worker.engines.sim.faults import BREAKS, STATUSES, Fault
from worker.engines.sim.policy import Policy
from worker.engines.sim.script import PolicyConfig
from worker.sampling import Sampling
from worker.types import Completion, Finish, RequestIds

from .test_reply_table import BELIEVED, FAULTS, MET, STOPPED, Row

PROMPT_IDS = [151644, 872, 198, 3838, 151645, 198, 151644, 77091, 198]
PROMPT = RequestIds([b",".join(b"%d" % one for one in PROMPT_IDS)], len(PROMPT_IDS), 0)
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cumulative": ("sglang", {}, {}),
    "incremental": ("sglang", {"incremental": True}, {}),
    "generate": ("vllm", {}, {}),
    "completions": ("vllm", {}, {"vllm_route": "completions"}),
}
forms = pytest.mark.parametrize("form", list(FORMS))
SHAPE = ReplayShape(RowShape(2, 2))
SAMPLING = Sampling(max_new_tokens=1024, seed=4)


@pytest.fixture(scope="module")
def policy(vocabulary: Path) -> Policy:
    """One that says long things."""
    config = PolicyConfig(max_sentences=40, think_rate=1.0)
    return Policy(tokenizer_of(str(vocabulary)), {}, config)


class Stage:
    """One engine and a pool on it."""

    def __init__(self, form: str, sim: SimServer, pool: EnginePool, *, replay: bool) -> None:
        self.form, self.sim, self.pool = form, sim, pool
        self.kind = FORMS[form][0]
        self._prompt = PROMPT if replay else replace(PROMPT, replay_start=None)

    async def ask(self, *damage: Any, sink: Sink | None = None) -> Completion:
        """Make one call; its requests are damaged."""
        await self.sim.post("/sim/next", {"damage": list(damage)})
        prompt = replace(self._prompt, sink=sink)
        return await self.pool.generate(prompt, SAMPLING, routing_key="g", version=5)

    async def fault(self, *damage: Any, sink: Sink) -> str:
        """Return what a call ends with that is damaged as often as it is tried."""
        with pytest.raises(EngineFault) as caught:
            await self.ask(*damage, sink=sink)
        return caught.value.detail


@contextlib.asynccontextmanager
async def stage(
    form: str, policy: Policy, *, replay: bool = False, **bounds: Any
) -> AsyncIterator[Stage]:
    kind, dialect, options = FORMS[form]
    quick: dict[str, Any] = {"max_retries": 1, "backoff_s": 0.0, "require_version": False} | bounds
    layers = 2 if replay else 0
    shape = SHAPE if replay else None
    async with (
        sim_server(policy, version="5", layers=layers, **dialect) as sim,
        a_pool(sim.url, kind=kind, replay=shape, **options, **quick) as pool,
    ):
        yield Stage(form, sim, pool, replay=replay)


def assert_same(got: Completion, want: Completion) -> None:
    for name in set(want.__slots__) - {"rid", "routed_experts"}:
        ours, theirs = getattr(got, name), getattr(want, name)
        if isinstance(theirs, np.ndarray):
            assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes()), name
        else:
            assert ours == theirs, name
    rows = [None if one.routed_experts is None else one.routed_experts for one in (got, want)]
    assert (rows[0] is None) == (rows[1] is None)
    if rows[0] is not None and rows[1] is not None:
        assert (rows[0].start, rows[0].rows.dtype) == (rows[1].start, rows[1].rows.dtype)
        assert np.array_equal(rows[0].rows, rows[1].rows)


async def met(on: Stage, row: Row, whole: list[int]) -> bool:
    """Have a row come once; return whether something was passed on, and it was the last try."""
    detail, sink = row.detail(on.kind), Sink()
    counted = on.pool.counters.engines[0].requests
    before = counted[detail.value]
    said = None
    try:
        got = await on.ask(row.fault.value, sink=sink)
    except EngineFault as fault:
        said = fault.detail
    if said is None:
        assert (got.ids.tolist(), sink.ids, len(sink.begun)) == (whole, whole, 2), row.fault
    else:
        assert (said, len(sink.begun)) == (detail, 1), row.fault
        assert sink.ids or not MET[detail].again, row.fault
        assert sink.ids == whole[: len(sink.ids)], row.fault
        await on.ask()  # three faults in a row would put the engine aside
    assert counted[detail.value] == before + 1, row.fault
    return said is not None and len(sink.ids) > 0


@forms
async def test_a_stream_that_is_no_answer_has_the_name_that_it_has_without_one(
    form: str, policy: Policy
) -> None:
    async with stage(form, policy) as on:
        whole = (await on.ask()).ids.tolist()
        assert len(whole) > 100
        rows = [row for row in FAULTS if not row.replay and row.fault is not Fault.HANG]
        last = {row.fault for row in rows if await met(on, row, whole)}
        assert on.pool.counters.engines[0].in_flight == 0
    # What is known before the first event is passed on leaves the call to another try: a status, a
    # connection that is closed, another request's id, no token at all, and (from SGLang) another
    # prompt.
    early = {*STATUSES, Fault.RESET, Fault.OTHER_RID, Fault.EMPTY_LENGTH}
    early |= {Fault.PROMPT_CUT} if on.kind == "sglang" else set()
    assert last == {row.fault for row in rows} - early


@forms
@pytest.mark.parametrize("after", [0, 40])
async def test_a_stream_that_falls_silent_is_out_of_time(
    form: str, after: int, policy: Policy
) -> None:
    bounds = {"request_timeout_s": 0.3, "abort_wait_s": 0.05}
    async with stage(form, policy, **bounds) as on:
        whole = (await on.ask()).ids.tolist()
        sink = Sink()
        damage = {"kind": "hang", "after": after}
        said = await on.fault(damage, *([] if after else [damage]), sink=sink)
    assert said == "timeout"
    assert (sink.ids == whole[: len(sink.ids)], bool(sink.ids)) == (True, after > 0)
    assert len(sink.begun) == (1 if after else 2)


@forms
@pytest.mark.parametrize("fault", [Fault.RESET, Fault.HALF_BODY])
async def test_a_connection_breaks_where_it_is_told_to(
    form: str, fault: Fault, policy: Policy
) -> None:
    async with stage(form, policy) as on:
        whole = (await on.ask()).ids.tolist()
        for after, told in ((0, 0), (1, 1), (40, 33)):  # events end at 1, 17 (33), 33 (65), …
            sink = Sink()
            damage = {"kind": fault.value, "after": after}
            assert await on.fault(damage, *([] if after else [damage]), sink=sink) == "reset"
            assert sink.ids == whole[:told]
            await on.ask()


@pytest.mark.parametrize("form", ["cumulative", "incremental", "generate"])
async def test_replay_rows_come_with_the_end_of_a_stream_or_are_missed_there(
    form: str, policy: Policy
) -> None:
    async with stage(form, policy, replay=True) as on:
        want, sink = await on.ask(), Sink()
        got = await on.ask(sink=sink)
        assert want.routed_experts is not None
        assert_same(got, want)
        assert sink.ids == want.ids.tolist()
        for row in FAULTS:
            if row.replay:
                assert await met(on, row, want.ids.tolist())


@forms
async def test_an_overflow_in_any_words_is_one_in_a_stream(form: str, policy: Policy) -> None:
    async with stage(form, policy) as on:
        for _ in OVERFLOW_WORDS:
            sink = Sink()
            assert await on.fault("overflow", sink=sink) == "context_overflow"
            assert (len(sink.begun), sink.ids) == (1, [])


@forms
async def test_odd_streams_that_are_right_are_believed(form: str, policy: Policy) -> None:
    async with stage(form, policy) as on:
        for fault in BELIEVED:
            if fault is Fault.VERSION_CHANGE:
                continue  # below: it is made up where the first event ends
            damage = {"kind": fault.value, "after": 40}
            sink = Sink()
            want, got = await on.ask(damage), await on.ask(damage, sink=sink)
            assert_same(got, want)
            assert sink.ids == want.ids.tolist()
        sink = Sink()
        got = await on.ask("version_change", sink=sink)
        num = len(got.ids)
        assert got.versions == [(4, 0, 1), (5, 1, num)], "behind the first event"
        assert sink.ids == got.ids.tolist()


@forms
async def test_an_abort_by_request_keeps_what_was_told_and_what_was_not(
    form: str, policy: Policy
) -> None:
    async with stage(form, policy) as on:
        whole = (await on.ask()).ids.tolist()
        for fault, after, num in ((Fault.ABORT, 40, 40), (Fault.ABORT, 1, 1), (Fault.ABORT, 0, 0),
                                  (Fault.ABORT_EMPTY, None, 0)):  # fmt: skip
            assert fault in STOPPED
            sink = Sink()
            got = await on.ask({"kind": fault.value, "after": after}, sink=sink)
            assert (got.finish, got.ids.tolist()) == (Finish.ABORT, whole[:num])
            assert (sink.ids, len(sink.begun)) == (whole[:num], 1)


# --- what only a stream can be wrong in ----------------------------------------------------------
IDS = list(range(300, 340))
GOOD = {"sglang": a_reply(IDS), "vllm": a_vllm_reply(IDS)}


def changed(kind: str) -> list[Any]:
    told = events_of(kind, GOOD[kind], [1, 17, 33])
    told[2]["output_ids"][3] += 1
    return [*told, DONE]


WRITTEN = [
    ("sglang", "stream_cut", events_of("sglang", GOOD["sglang"], [1, 17])),
    ("vllm", "stream_cut", events_of("vllm", GOOD["vllm"], [1, 17])),
    ("sglang", "stream_changes", changed("sglang")),
    ("sglang", "stream_goes_on", [*events_of("sglang", GOOD["sglang"], [17]) * 2, DONE]),
    ("vllm", "stream_goes_on", [*events_of("vllm", GOOD["vllm"], [17]) * 2, DONE]),
    ("sglang", "not_json", [*events_of("sglang", GOOD["sglang"], [17])[:1], b"<html>\n", DONE]),
    ("vllm", "not_json", [*events_of("vllm", GOOD["vllm"], [17])[:1], sse(b"{}"), DONE]),
    ("sglang", "error_200", [{"error": {"message": "out of luck"}}, DONE]),
    ("vllm", "error_200", [{"error": {"message": "out of luck"}}, DONE]),
    ("sglang", "no_finish", [*events_of("sglang", GOOD["sglang"], [17])[:1], DONE]),
    ("vllm", "no_finish", [*events_of("vllm", GOOD["vllm"], [17])[:1], DONE]),
    *[
        (kind, row, [*events_of(kind, GOOD[kind], [17])[:1], {"error": error}, DONE])
        for kind in ("sglang", "vllm")
        for row, error in (
            ("400", {"message": "Unexpected message role", "code": 400}),
            ("overflow", {"message": "longer than the context length", "code": 400}),
            ("503", {"message": "busy", "code": 503}),
            ("500", {"message": "Internal server error", "code": 500}),
        )
    ],
]


@pytest.mark.parametrize(("kind", "row", "pieces"), WRITTEN)
async def test_rows_of_written_streams_are_met_as_the_table_says(
    kind: str, row: str, pieces: list[Any]
) -> None:
    seen, sink = REPLIES[row], Sink()
    step = streams(*pieces, done=False)
    async with scripted(step, GOOD[kind]) as engine, a_pool(engine.url, kind=kind) as pool:
        prompt = replace(PROMPT, replay_start=None, sink=sink)
        call = pool.generate(prompt, SAMPLING, routing_key="g", version=0)
        if not sink.ids and row == "error_200":
            assert (await call).ids.tolist() == IDS
        else:
            with pytest.raises(EngineFault) as caught:
                await call
            assert caught.value.detail == seen.detail
            assert sink.ids == IDS[:17]
        counted = pool.counters.engines[0].requests
        assert seen.detail is not None
        assert counted[seen.detail.value] == 1
    assert len(engine.requests) == (2 if row == "error_200" else 1)


def test_every_row_that_only_a_stream_can_be_is_written_here() -> None:
    assert {name for name in REPLIES if name.startswith("stream_")} <= {
        row for _, row, _ in WRITTEN
    }
    assert {Fault.RESET, Fault.HALF_BODY, Fault.HANG} == BREAKS
    assert REPLIES["stream_cut"].action is Action.RETRY
    assert Detail.RESET in MET
