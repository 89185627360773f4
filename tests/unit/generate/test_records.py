"""Recorded turns: what a client that rewrites its history gets under each policy."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from examples import generate_compacting
from rollstream.errors import EngineFault, MergeFault, Report, Status, StopReason
from rollstream.sample import Sample
from tests.generate_stage import Asked, InProcess, Says, engine_of, given
from tests.toy import A1, A2, HI, O1, P0, U1, toy_renderer
from tests.unit.worker.works import a_book, a_rollout, a_work, an_env
from worker.generate import finish, records
from worker.generate.records import merge_records, record_call
from worker.members.fidelity import Watch, WatchedEngine
from worker.tito.divergence import resolve
from worker.tito.merge import TurnRecord
from worker.tito.trajectory import Trajectory
from worker.types import DivergencePolicy, Finish, GenerateInput, GenerateOutput, Replay

REWRITTEN = [*P0[:4], 1110, *P0[5:]]
"""Another prompt, of which the first four ids are P0's."""
SHARED = 4


def limits(policy: str, **fields: Any) -> dict[str, Any]:
    return {"on_divergence": DivergencePolicy(policy)} | fields


async def run(engine: Any, prompts: list[list[int]], policy: str, **fields: Any) -> Any:
    """Send prompts as a client made them, and return (output, input)."""
    stage = given(engine, toy_renderer(), HI, limits=limits(policy), **fields)
    turns: list[TurnRecord] = []
    for prompt in prompts:
        await record_call(stage, turns, prompt)
    return (await merge_records(stage, turns)).samples, stage


def check_invariants(samples: Any, asked: list[Asked], replies: list[Says]) -> list[int]:
    """Check invariants 1 to 3 of every kept call; returns the numbers of those calls."""
    leaves = samples if isinstance(samples, list) else [samples]
    kept = []
    for leaf in leaves:
        leaf.validate()
        mask, log_probs = [0] * leaf.response_length, [0.0] * leaf.response_length
        tokens = leaf.tokens.tolist()
        for call in leaf.calls:
            seed = call.sampling["seed"]
            number = next(n for n, one in enumerate(asked) if one.seed == seed)
            kept.append(number)
            assert tokens[: call.start] == asked[number].ids
            count = call.end - call.start
            assert tokens[call.start : call.end] == list(replies[number].ids)[:count]
            for i in range(count):
                at = call.start + i - leaf.prompt_length
                mask[at], log_probs[at] = 1, float(np.float32(-i / 128))
        assert leaf.loss_mask.tolist() == mask
        assert leaf.rollout_log_probs.tolist() == log_probs
    assert len(kept) == len(set(kept))
    return kept


# --- one call ------------------------------------------------------------------------------------
class KeepsSalts(InProcess):
    """Keeps what salted the cache of every call."""

    salts: list[int | None]

    async def generate(self, prompt: Any, sampling: Any, **fields: Any) -> Any:
        self.salts = [*getattr(self, "salts", []), fields["salt"]]
        return await super().generate(prompt, sampling, **fields)


async def test_a_recorded_call_has_the_seed_salt_budget_and_provenance_of_its_turn() -> None:
    engine = KeepsSalts([Says(A1, version=3), Says(A2, version=4)])
    versions = iter([3, 3, 4, 5])
    stage = given(engine, toy_renderer(), HI, limits={"max_context": 30},
                  version=lambda: next(versions))  # fmt: skip
    turns: list[TurnRecord] = []
    first = await record_call(stage, turns, P0)
    second = await record_call(stage, turns, np.array([*P0, *A1, *O1]))
    assert turns == [first, second]
    assert [one.ids for one in engine.asked] == [P0, P0 + A1 + O1]
    assert [one.max_new_tokens for one in engine.asked] == [20, 6]
    assert [one.seed for one in engine.asked] == [stage.turn_seed(0), stage.turn_seed(1)]
    assert engine.salts == [None, 3], "the first has its own; later calls find the cache of it"
    assert second is not None
    assert (second.dispatched_version, second.versions) == (4, [(4, 0, 2)])
    assert await record_call(stage, turns, [7] * 30) is None
    assert len(turns) == 2, "no room, no call"


async def test_records_of_an_append_only_client_are_what_a_trajectory_gives() -> None:
    replies = [Says(A1, version=1, cached=3), Says(A2, version=2)]
    samples, stage = await run(InProcess(replies), [P0, P0 + A1 + O1], "reject")
    grown = Trajectory(stage.prompt, (2, 3))
    engine = InProcess(replies)
    for turn in range(2):
        request = grown.request()
        reply = await engine.generate(request, stage.sampling, routing_key="", version=0)
        grown.add_completion(reply, dispatched_version=0, sampling=samples.calls[turn].sampling)
        if turn == 0:
            grown.add_observation(np.array(O1, np.int32))
    expected = grown.write_to(Sample(**{
        name: getattr(stage.sample, name)
        for name in ("group_index", "member", "index", "rollout_id", "prompt", "label",
                     "routing_key")
    }), stage.renderer.decode)  # fmt: skip
    expected.finish(StopReason.STOP, Status.COMPLETED)
    assert samples.to_dict() == expected.to_dict()
    assert "divergences" not in samples.metadata


# --- policies ------------------------------------------------------------------------------------
HISTORY = [P0, P0 + A1 + O1, REWRITTEN, [*REWRITTEN, *A2, *U1]]
REPLIES = [Says(A1), Says(A2), Says(A2), Says([31, 2])]


@pytest.mark.parametrize("over", ["process", "http"])
async def test_fork_gives_a_sample_per_history_and_every_call_is_in_one(over: str) -> None:
    async with engine_of(over, *REPLIES) as engine:
        samples, stage = await run(engine, HISTORY, "fork")
        result = finish(stage.sample, GenerateOutput(samples), stage.renderer.decode)
        assert isinstance(result, list)
        assert check_invariants(result, engine.asked, REPLIES) == [0, 1, 2, 3]
    first, second = result
    assert first.tokens.tolist() == P0 + A1 + O1 + A2
    assert second.tokens.tolist() == [*REWRITTEN, *A2, *U1, 31, 2]
    assert {leaf.rollout_id for leaf in result} == {stage.sample.rollout_id}
    assert [leaf.prompt_length for leaf in result] == [len(P0), len(REWRITTEN)]
    assert "divergences" not in first.metadata
    assert second.metadata["divergences"] == [
        {"turn": 2, "index": SHARED, "policy": "fork", "dropped_tokens": 0}
    ]
    assert first.response == stage.renderer.decode(first.tokens[first.prompt_length :])


async def test_keep_prefix_gives_the_newest_context_and_counts_what_it_drops() -> None:
    engine = InProcess(REPLIES)
    sample, _ = await run(engine, HISTORY, "keep_prefix")
    assert check_invariants(sample, engine.asked, REPLIES) == [2, 3]
    assert sample.tokens.tolist() == [*REWRITTEN, *A2, *U1, 31, 2]
    assert sample.metadata["divergences"] == [
        {"turn": 2, "index": SHARED, "policy": "keep_prefix", "dropped_tokens": len(A1 + A2)}
    ]


async def test_keep_prefix_keeps_a_reply_as_far_as_the_next_prompt_has_it() -> None:
    # The client cut the end of the reply: 31 is still there, 32 and the close are not.
    replies = [Says(A1), Says(A2)]
    engine = InProcess(replies)
    sample, _ = await run(engine, [P0, [*P0, 31, 2, *O1]], "keep_prefix")
    assert check_invariants(sample, engine.asked, replies) == [0, 1]
    assert [(call.start, call.end) for call in sample.calls] == [(10, 11), (23, 25)]
    assert sample.prompt_length == len(P0)
    assert sample.rollout_log_probs[1] == 0.0, "the close is the client's"
    assert sample.metadata["divergences"] == [
        {"turn": 1, "index": 11, "policy": "keep_prefix", "dropped_tokens": 2}
    ]


async def test_a_sub_agent_that_interleaves_costs_its_own_tokens_only() -> None:
    prompts = [P0, [1, 20, 10], P0 + A1 + O1]
    replies = [Says(A1), Says([30]), Says(A2)]
    engine = InProcess(replies)
    sample, _ = await run(engine, prompts, "keep_prefix")
    assert check_invariants(sample, engine.asked, replies) == [0, 2]
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert [one["dropped_tokens"] for one in sample.metadata["divergences"]] == [0, 1]
    engine = InProcess(replies)
    samples, _ = await run(engine, prompts, "fork")
    assert sorted(check_invariants(samples, engine.asked, replies)) == [0, 1, 2]
    assert [leaf.tokens.tolist() for leaf in samples] == [[1, 20, 10, 30], P0 + A1 + O1 + A2]


async def test_reject_is_a_fault_that_says_where_and_is_recorded_on_the_sample() -> None:
    with pytest.raises(MergeFault, match="turn 2 does not continue turn 1: at index 4") as caught:
        await run(InProcess(REPLIES), HISTORY, "reject")
    assert caught.value.detail == "prefix"


@pytest.mark.parametrize(
    ("policy", "report", "stop_reason"),
    [
        ("reject", Report.FINAL, StopReason.MERGE_ERROR),
        ("fork", Report.COMPLETE, StopReason.STOP),
        ("keep_prefix", Report.COMPLETE, StopReason.STOP),
    ],
)
async def test_every_policy_ends_as_data_of_its_member(
    policy: str, report: Report, stop_reason: StopReason
) -> None:
    async def generate(member: GenerateInput) -> GenerateOutput:
        stage = given(InProcess(REPLIES), toy_renderer(), HI, limits=limits(policy),
                      sample=member.sample)  # fmt: skip
        turns: list[TurnRecord] = []
        for prompt in HISTORY:
            await record_call(stage, turns, prompt)
        return await merge_records(stage, turns)

    book = a_book(an_env(generate))
    ending = await a_rollout(book).run(a_work(book))
    assert (ending.report, ending.stop_reason) == (report, stop_reason)
    leaves = ending.trajectory if isinstance(ending.trajectory, list) else [ending.trajectory]
    noted = [one for leaf in leaves for one in leaf.metadata.get("divergences", [])]  # type: ignore[union-attr]
    assert [(one["turn"], one["index"], one["policy"]) for one in noted] == [(2, SHARED, policy)]
    if policy == "reject":
        assert "at index 4" in ending.error
        assert noted[0]["dropped_tokens"] == sum(len(reply.ids) for reply in REPLIES)


# --- endings -------------------------------------------------------------------------------------
async def test_an_abort_of_the_engine_gives_the_member_back_and_keeps_its_tokens() -> None:
    replies = [Says(A1), Says([30], finish="abort")]
    sample, _ = await run(InProcess(replies), [P0, P0 + A1 + O1], "fork")
    assert sample.stop_reason is StopReason.ABORT_WEIGHTS
    assert sample.tokens.tolist() == [*P0, *A1, *O1, 30]


@pytest.mark.parametrize("policy", ["fork", "keep_prefix"])
async def test_an_aborted_reply_that_was_asked_for_again_is_left_out(policy: str) -> None:
    replies = [Says(A1), Says([30], finish="abort"), Says(A2)]
    engine = InProcess(replies)
    sample, _ = await run(engine, [P0, P0 + A1 + O1, P0 + A1 + O1], policy)
    assert check_invariants(sample, engine.asked, replies) == [0, 2]
    assert (sample.status, sample.tokens.tolist()) == (Status.COMPLETED, P0 + A1 + O1 + A2)
    assert sample.metadata["left_out_turns"] == 1
    assert sample.metadata["divergences"][0]["turn"] == 2


@pytest.mark.parametrize("policy", list(DivergencePolicy))
async def test_without_a_call_there_is_a_sample_that_says_so(policy: DivergencePolicy) -> None:
    sample, stage = await run(InProcess([]), [], policy.value)
    assert (sample.stop_reason, len(sample.tokens)) == (StopReason.NO_MODEL_CALL, 0)
    assert finish(stage.sample, GenerateOutput(sample)) is sample


async def test_turns_beyond_max_seq_len_are_left_out_and_counted() -> None:
    stage = given(InProcess(REPLIES), toy_renderer(), HI, limits={"max_context": 4096})
    turns: list[TurnRecord] = []
    for prompt in HISTORY[:2]:
        await record_call(stage, turns, prompt)
    for length, kept, reason in [(26, 2, StopReason.STOP), (25, 1, StopReason.STOP),
                                 (12, 0, StopReason.CONTEXT_LENGTH)]:  # fmt: skip
        short = given(None, toy_renderer(), HI, limits={"max_seq_len": length})
        sample = (await merge_records(short, turns)).samples
        assert isinstance(sample, Sample)
        assert (len(sample.calls), sample.stop_reason) == (kept, reason)
        assert sample.metadata.get("left_out_turns", 0) == 2 - kept
        assert short.sample.metadata == {}, "what was given is copied"


async def test_a_fault_of_the_engine_goes_through_and_records_nothing() -> None:
    stage = given(InProcess([EngineFault("gone", retryable=True)]), toy_renderer(), HI)
    turns: list[TurnRecord] = []
    with pytest.raises(EngineFault):
        await record_call(stage, turns, P0)
    assert turns == []


# --- replay --------------------------------------------------------------------------------------
class WithRows(InProcess):
    """Answers the rows that it is asked for: call * 1000 + position."""

    starts: list[int | None]

    async def generate(self, prompt: Any, sampling: Any, **fields: Any) -> Any:
        number = len(self.asked)
        reply = await super().generate(prompt, sampling, **fields)
        self.starts = [*getattr(self, "starts", []), prompt.replay_start]
        if prompt.replay_start is not None:
            fed = range(prompt.replay_start, prompt.num_tokens + len(reply.ids) - 1)
            rows = np.zeros((len(fed), 2, 2), np.int32)
            rows += np.array([number * 1000 + p for p in fed], np.int32).reshape(-1, 1, 1)
            reply.routed_experts = Replay(prompt.replay_start, rows)
        return reply


@pytest.mark.parametrize("policy", ["fork", "keep_prefix"])
async def test_rows_are_asked_for_anew_where_history_was_rewritten(policy: str) -> None:
    engine = WithRows(REPLIES)
    samples, _ = await run(engine, HISTORY, policy, replay=True)
    assert engine.starts == [0, 12, 0, 11]
    last = samples[-1] if isinstance(samples, list) else samples
    rows = last.rollout_routed_experts[:, 0, 0].tolist()
    end = len(HISTORY[3]) + 1
    assert rows == [*range(2000, 2011), *range(3011, 3000 + end)]
    if isinstance(samples, list):
        first = samples[0].rollout_routed_experts[:, 0, 0].tolist()
        assert first == [*range(12), *range(1012, 1025)]


# --- the example ---------------------------------------------------------------------------------
COMPACTED = "You answered:\n{}\nCheck your answer once more."


@pytest.mark.parametrize(
    ("policy", "kept"), [("fork", [0, 1, 2, 3]), ("keep_prefix", [2, 3])]
)  # fmt: skip
async def test_the_compacting_example_sends_what_it_says_and_trains_what_was_sent(
    policy: str, kept: list[int]
) -> None:
    renderer = toy_renderer()
    replies = [Says(A1, matched=2), Says(A2, matched=2), Says([31, 2], matched=2), Says(A1)]
    async with engine_of("http", *replies) as engine:
        stage = given(engine, renderer, HI, limits=limits(policy, max_turns=4))
        watch = Watch(stage.prompt)
        stage.engine = WatchedEngine(engine, watch)
        output = await generate_compacting.generate(stage)
        samples = finish(stage.sample, output, renderer.decode)
        assert sorted(check_invariants(samples, engine.asked, replies)) == kept
        leaves = samples if isinstance(samples, list) else [samples]
        # What the client put on the wire, seen by the worker's own witness.
        assert [watch.check(leaf) for leaf in leaves] == [None] * len(leaves)
        assert (watch.num_checked, watch.num_unknown) == (len(kept), 0)
        review = {"role": "user", "content": COMPACTED.format("hello")}
        assert engine.asked[2].ids == renderer.render([*HI, review], None).tolist()
        assert engine.asked[1].ids[: len(P0 + A1)] == P0 + A1


async def test_the_compacting_example_stops_where_a_reply_was_cut() -> None:
    engine = InProcess([Says(A1, finish="length")])
    sample = (await generate_compacting.generate(given(engine, toy_renderer(), HI))).samples
    assert isinstance(sample, Sample)
    assert (sample.status, sample.calls[0].finish) == (Status.TRUNCATED, Finish.LENGTH)


# --- calls that are recorded wrongly -------------------------------------------------------------
@pytest.mark.parametrize("policy", list(DivergencePolicy))
async def test_a_call_that_is_recorded_twice_is_trained_once(policy: DivergencePolicy) -> None:
    replies = [Says(A1), Says(A2)]
    async with engine_of("process", *replies) as engine:
        stage = given(engine, toy_renderer(), HI, limits=limits(policy))
        turns: list[TurnRecord] = []
        for prompt in (P0, [*P0, *A1, *O1]):
            record = await record_call(stage, turns, prompt)
            assert record is not None
            turns.append(record)  # record_call has done so
        turns.append(dataclasses.replace(turns[0]))  # as a log of requests has it
        sample = (await merge_records(stage, turns)).samples
    assert isinstance(sample, Sample)
    assert check_invariants(sample, engine.asked, replies) == [0, 1]
    assert "divergences" not in sample.metadata


async def a_little_later() -> Says:
    await asyncio.sleep(0)
    return Says(A1)


async def test_calls_side_by_side_without_their_turns_are_refused_for_their_one_seed() -> None:
    async with engine_of("process", a_little_later, a_little_later) as engine:
        stage = given(engine, toy_renderer(), HI, limits=limits("fork"))
        turns: list[TurnRecord] = []
        with pytest.raises(ValueError, match=r"another call was recorded while call 0 ran"):
            await asyncio.gather(*(record_call(stage, turns, P0) for _ in range(2)))
    assert len({asked.seed for asked in engine.asked}) == 1


async def test_calls_side_by_side_have_the_seeds_of_their_turns() -> None:
    replies = [Says(A1), Says(A1)]
    async with engine_of("process", a_little_later, a_little_later) as engine:
        stage = given(engine, toy_renderer(), HI, limits=limits("fork"))
        turns: list[TurnRecord] = []
        await asyncio.gather(*(record_call(stage, turns, P0, turn=turn) for turn in (4, 9)))
        leaves = (await merge_records(stage, turns)).samples
    assert [asked.seed for asked in engine.asked] == [stage.turn_seed(4), stage.turn_seed(9)]
    assert check_invariants(leaves, engine.asked, replies) == [0, 1]


async def test_an_empty_prompt_is_refused_before_any_call() -> None:
    async with engine_of("process", Says(A1)) as engine:
        stage = given(engine, toy_renderer(), HI, limits=limits("fork"))
        with pytest.raises(ValueError, match="the prompt is empty"):
            await record_call(stage, [], [])
    assert engine.asked == []


async def test_records_of_many_ids_are_merged_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def noted(*args: Any, **fields: Any) -> Any:
        threads.append(threading.current_thread())
        return resolve(*args, **fields)

    monkeypatch.setattr(records, "resolve", noted)
    for limit in (len(P0), len(P0) - 1):
        monkeypatch.setattr(records, "LONG_RECORDS", limit)
        sample, _ = await run(InProcess([Says(A1)]), [P0], "reject")
        assert sample.tokens.tolist() == [*P0, *A1]
    assert [one is threading.main_thread() for one in threads] == [True, False]
