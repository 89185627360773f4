"""Whatever a generate function does to its tokens, a sample that is not what happened is caught.

Whole attempts over the real engine client and HTTP. The functions under test are the built-in ones
with one thing spoilt, and functions of a user's own, right and wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollstream.errors import Report, Status, StopReason
from rollstream.sample import Call, Sample
from tests.contract.test_cases_a import FirstCalls, Reply, f
from tests.generate_stage import OverHttp, engine_of, given
from tests.toy import A1, A1_LOG_PROBS, A2, A2_LOG_PROBS, HI, NO, O1, P0, U1, toy_renderer
from tests.unit.worker.works import a_book, a_work, an_env
from worker.generate import multi_turn, single_turn
from worker.generate.finish import finish
from worker.generate.records import merge_records, record_call
from worker.members.fidelity import MAX_CALLS, Fidelity, Kind, Mismatch, Watch, WatchedEngine
from worker.members.groups import GroupBook
from worker.members.rollout import Rollout
from worker.members.work import Ending, leaves_of
from worker.sampling import Sampling
from worker.tito.ids import ids_json
from worker.tito.load import render_prompt
from worker.tito.merge import TurnRecord, merge_turns
from worker.tito.trajectory import Trajectory
from worker.tools import FunctionTool
from worker.types import DivergencePolicy, GenerateInput, GenerateOutput, RequestIds

TWO = (Reply(A1, A1_LOG_PROBS), Reply(A2, A2_LOG_PROBS, version=2))
Generate = Callable[[GenerateInput], Awaitable[GenerateOutput]]


@dataclass
class Stage:
    """A worker's rollouts of one group, beside an engine that answers in order."""

    engine: OverHttp
    rollout: Rollout
    book: GroupBook
    fidelity: Fidelity

    async def run(self, member: int = 0) -> Ending:
        return await self.rollout.run(a_work(self.book, member=member))


async def ran(generate: Generate, *replies: Reply) -> tuple[Ending, Fidelity]:
    async with engine_of("http", *[(200, r.to_bytes()) for r in replies or TWO]) as engine:
        stage = a_stage(engine, generate)
        return await stage.run(), stage.fidelity


def a_stage(
    engine: Any, generate: Generate, *, first: Sequence[int] = A1, sampling: Sampling | None = None
) -> Stage:
    """Return a worker's rollouts whose model calls `f` in the reply `first`."""
    renderer: Any = FirstCalls(first)
    tools = {"f": FunctionTool(f)}
    env = an_env(generate, tools=tools, sampling=sampling or Sampling())
    book = a_book(env, render=lambda prompt, specs: render_prompt(renderer, HI, None))
    fidelity = Fidelity()
    rollout = Rollout(
        engine=engine, renderer=renderer, book=book, finish=finish, version=lambda: 0, run_seed=7,
        fidelity=fidelity,
    )  # fmt: skip
    return Stage(engine, rollout, book, fidelity)


async def scalar(given: GenerateInput) -> Sample:
    sample = (await multi_turn(given)).samples
    assert isinstance(sample, Sample)
    return sample


# --- right functions -----------------------------------------------------------------------------
async def through_merge(given: GenerateInput) -> GenerateOutput:
    """Keep turn records and merge them, re-encoding every request as one piece with spaces."""
    turns: list[TurnRecord] = []
    for suffix in ([], O1):
        prompt = [*P0, *A1, *suffix] if suffix else P0
        reply = await given.engine.generate(
            RequestIds([", ".join(map(str, prompt)).encode()], len(prompt)),
            Sampling(max_new_tokens=8), routing_key="k", version=0,
        )  # fmt: skip
        turns.append(
            TurnRecord(
                prompt_ids=np.array(prompt, np.int32), output_ids=reply.ids,
                log_probs=reply.log_probs, finish=reply.finish.value, rid=reply.rid,
                engine=reply.engine, versions=reply.versions,
            )
        )  # fmt: skip
    return GenerateOutput(merge_turns(turns, template=given.sample).sample)  # type: ignore[arg-type]


async def two_leaves(given: GenerateInput) -> GenerateOutput:
    """Give the first turn and the whole conversation as two samples."""
    whole = await scalar(given)
    first = dataclasses.replace(
        whole, tokens=whole.tokens[: len(P0) + len(A1)], response_length=len(A1),
        loss_mask=None, rollout_log_probs=np.array(A1_LOG_PROBS, np.float32),
        calls=whole.calls[:1], response="", spans=[], metadata={},
    )  # fmt: skip
    return GenerateOutput([first, whole])


async def trims_the_end(given: GenerateInput) -> GenerateOutput:
    """Leave out the last sampled token, as a merge may where the session did."""
    sample = await scalar(given)
    last = sample.calls[-1]
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    end = last.end - 1
    # The last span may be empty: the version that was current when the reply came.
    short = dataclasses.replace(
        last, end=end, versions=[(v, min(a, end), min(b, end)) for v, a, b in last.versions]
    )
    return GenerateOutput(
        dataclasses.replace(
            sample, tokens=sample.tokens[:-1], response_length=sample.response_length - 1,
            loss_mask=sample.loss_mask[:-1], rollout_log_probs=sample.rollout_log_probs[:-1],
            calls=[*sample.calls[:-1], short],
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "generate", [multi_turn, single_turn, through_merge, two_leaves, trims_the_end]
)
async def test_a_function_that_is_right_is_delivered_with_every_call_checked(
    generate: Generate,
) -> None:
    ending, fidelity = await ran(generate)
    assert (ending.report, ending.stop_reason) == (Report.COMPLETE, StopReason.STOP), ending.error
    assert ending.trajectory is not None
    num_calls = sum(len(leaf.calls) for leaf in leaves_of(ending.trajectory))
    assert fidelity.counters.checked == num_calls > 0
    assert fidelity.counters.unknown == 0
    assert not any(fidelity.counters.mismatches.values())


@pytest.mark.parametrize(
    ("policy", "checked"), [(DivergencePolicy.FORK, 3), (DivergencePolicy.KEEP_PREFIX, 2)]
)
async def test_what_a_rewritten_history_becomes_is_what_was_sent(
    policy: DivergencePolicy, checked: int
) -> None:
    """The client forgets the second turn: each call of what is left was sent its sample's ids."""

    async def rewrites(given: GenerateInput) -> GenerateOutput:
        turns: list[TurnRecord] = []
        given.limits = dataclasses.replace(given.limits, on_divergence=policy)
        for prompt in (P0, [*P0, *A1, *O1], [*P0, *A1, *U1]):
            assert await record_call(given, turns, prompt) is not None
        return await merge_records(given, turns)

    ending, fidelity = await ran(rewrites, *TWO, TWO[1])
    assert (ending.report, ending.stop_reason) == (Report.COMPLETE, StopReason.STOP), ending.error
    assert (fidelity.counters.checked, fidelity.counters.unknown) == (checked, 0)
    notes = [leaf.metadata.get("divergences") for leaf in leaves_of(ending.trajectory)]  # type: ignore[arg-type]
    assert [note["policy"] for found in notes for note in found or ()] == [policy]


async def test_calls_that_nobody_here_sent_are_unknown_and_delivered() -> None:
    async def elsewhere(given: GenerateInput) -> GenerateOutput:
        sample = await scalar(given)
        for call in sample.calls:
            call.rid = "of another client"
        return GenerateOutput(sample)

    ending, fidelity = await ran(elsewhere)
    assert (ending.report, ending.stop_reason) == (Report.COMPLETE, StopReason.STOP), ending.error
    assert (fidelity.counters.checked, fidelity.counters.unknown) == (0, 2)


async def test_a_sample_that_trains_tokens_of_no_call_is_counted_as_unknown() -> None:
    async def without_calls(given: GenerateInput) -> GenerateOutput:
        sample = await scalar(given)
        sample.calls = []
        return GenerateOutput(sample)

    async def without_mask(given: GenerateInput) -> GenerateOutput:
        output = await without_calls(given)
        for leaf in leaves_of(output.samples):
            leaf.loss_mask = None
        return output

    ending, fidelity = await ran(without_calls)
    assert ending.report is Report.COMPLETE, ending.error
    assert (fidelity.counters.checked, fidelity.counters.unknown) == (0, 1)
    _, fidelity = await ran(without_mask)
    assert (fidelity.counters.checked, fidelity.counters.unknown) == (0, 0)


async def test_the_sign_of_a_log_prob_of_zero_is_no_difference() -> None:
    async def added(given: GenerateInput) -> GenerateOutput:
        sample = await scalar(given)
        assert sample.rollout_log_probs is not None
        sample.rollout_log_probs = sample.rollout_log_probs + np.float32(0.0)
        return GenerateOutput(sample)

    certain = Reply(A1, [-0.0] * len(A1))
    ending, fidelity = await ran(added, certain, TWO[1])
    assert ending.report is Report.COMPLETE, ending.error
    assert (fidelity.counters.checked, sum(fidelity.counters.mismatches.values())) == (2, 0)


async def test_a_buffer_for_all_members_reaches_no_sample_that_was_returned() -> None:
    buffer = {
        "tokens": np.zeros(64, np.int32), "loss_mask": np.zeros(64, np.uint8),
        "rollout_log_probs": np.zeros(64, np.float32),
    }  # fmt: skip

    async def generate(given: GenerateInput) -> GenerateOutput:
        sample = await scalar(given)
        for name, memory in buffer.items():
            held = memory[: len(getattr(sample, name))]
            held[:] = getattr(sample, name)
            setattr(sample, name, held)
        return GenerateOutput(sample)

    ending, _ = await ran(generate)
    assert ending.report is Report.COMPLETE, ending.error
    (sample,) = leaves_of(ending.trajectory)  # type: ignore[arg-type]
    expected = {
        name: memory[: len(getattr(sample, name))].copy() for name, memory in buffer.items()
    }
    for memory in buffer.values():
        memory[:] = 1  # the next member's
    assert {name: getattr(sample, name).tolist() for name in buffer} == {
        name: held.tolist() for name, held in expected.items()
    }


# --- wrong functions -----------------------------------------------------------------------------
def spoilt(change: Callable[[Sample], None]) -> Generate:
    async def generate(given: GenerateInput) -> GenerateOutput:
        sample = await scalar(given)
        change(sample)
        return GenerateOutput(sample)

    return generate


def rebuilt(sample: Sample, tokens: Sequence[int], spans: Sequence[tuple[int, int]]) -> None:
    """Give a sample other tokens, consistent in itself: only what was sent says it is wrong."""
    sample.tokens = np.array(tokens, dtype=np.int32)
    sample.response_length = len(tokens) - len(P0)
    log_probs = np.zeros(sample.response_length, dtype=np.float32)
    calls: list[Call] = []
    for call, (start, end) in zip(sample.calls, spans, strict=True):
        log_probs[start - len(P0) : end - len(P0)] = -0.5
        calls.append(dataclasses.replace(call, start=start, end=end, versions=[(1, start, end)]))
    sample.calls, sample.rollout_log_probs, sample.loss_mask = calls, log_probs, None


def observed_id_changed(sample: Sample) -> None:
    sample.tokens[len(P0) + len(A1) + 4] = 1112


def observation_dropped(sample: Sample) -> None:
    rebuilt(sample, [*P0, *A1, *A2], [(10, 13), (13, 15)])
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[:] = [*A1_LOG_PROBS, *A2_LOG_PROBS]


def last_observed_id_dropped(sample: Sample) -> None:
    rebuilt(sample, [*P0, *A1, *O1[:-1], *A2], [(10, 13), (23, 25)])
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[:3] = A1_LOG_PROBS
    sample.rollout_log_probs[-2:] = A2_LOG_PROBS


def one_more_observed_id(sample: Sample) -> None:
    rebuilt(sample, [*P0, *A1, *O1, 10, *A2], [(10, 13), (25, 27)])
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[:3] = A1_LOG_PROBS
    sample.rollout_log_probs[-2:] = A2_LOG_PROBS


def prompt_id_changed(sample: Sample) -> None:
    sample.tokens[3] = 1105


def retokenized(sample: Sample) -> None:
    """The text "hello" is one canonical id; two were sampled."""
    renderer = toy_renderer()
    again = renderer.encode_raw(renderer.decode(sample.tokens)).tolist()
    assert again == [*P0, 30, 2, *O1, *A2]
    rebuilt(sample, again, [(10, 12), (23, 25)])


def retokenized_at_the_end(sample: Sample) -> None:
    sample.tokens[-2] = 31


def one_more_sampled_id(sample: Sample) -> None:
    rebuilt(sample, [*P0, *A1, *O1, *A2, 10], [(10, 13), (24, 27)])
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[:3] = A1_LOG_PROBS
    sample.rollout_log_probs[-3:] = [*A2_LOG_PROBS, -0.5]


def log_probs_shifted(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[:3] = [-0.25, -0.125, -0.5]


def one_log_prob_rounded(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[-1] = np.nextafter(np.float32(A2_LOG_PROBS[-1]), np.float32(0))


def log_probs_of_nothing(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[:] = 0.0


def calls_swapped(sample: Sample) -> None:
    first, second = sample.calls
    first.rid, second.rid = second.rid, first.rid


@pytest.mark.parametrize(
    ("change", "kind", "position"),
    [
        (observed_id_changed, Kind.PREFIX, 17),
        (observation_dropped, Kind.PREFIX, 13),
        (last_observed_id_dropped, Kind.PREFIX, 23),
        (one_more_observed_id, Kind.PREFIX, 24),
        (prompt_id_changed, Kind.PREFIX, 3),
        (retokenized, Kind.SAMPLED, 10),
        (retokenized_at_the_end, Kind.SAMPLED, 24),
        (one_more_sampled_id, Kind.SAMPLED, 26),
        (log_probs_shifted, Kind.LOG_PROB, 10),
        (one_log_prob_rounded, Kind.LOG_PROB, 25),
        (log_probs_of_nothing, Kind.LOG_PROB, 10),
        (calls_swapped, Kind.PREFIX, 10),
    ],
)
async def test_a_function_that_changes_anything_fails_its_member_with_the_first_position(
    change: Callable[[Sample], None], kind: Kind, position: int
) -> None:
    ending, fidelity = await ran(spoilt(change))
    assert (ending.report, ending.stop_reason) == (Report.FINAL, StopReason.MERGE_ERROR)
    sample = leaves_of(ending.trajectory)[0]  # type: ignore[arg-type]
    assert (sample.status, len(sample.tokens)) == (Status.FAILED, 0)
    assert sample.metadata["error_detail"] == f"mismatch_{kind.value}"
    assert f"at token {position} of call" in sample.metadata["error"]
    assert fidelity.counters.mismatches == {k: int(k is kind) for k in Kind}


async def test_what_was_sent_is_the_bytes_and_not_what_the_function_held() -> None:
    """The trajectory is right in itself; the request left a token out on its way."""

    async def forgets(given: GenerateInput) -> GenerateOutput:
        trajectory = Trajectory(given.prompt, (2,))
        request = trajectory.request()
        ids = given.prompt.ids[:-1]
        request = RequestIds([ids_json(ids)], request.num_tokens)
        reply = await given.engine.generate(request, Sampling(), routing_key="k", version=0)
        trajectory.add_completion(reply, dispatched_version=0, sampling={})
        return GenerateOutput(trajectory.write_to(given.sample))

    ending, fidelity = await ran(forgets)
    assert ending.stop_reason is StopReason.MERGE_ERROR
    assert "9 tokens were sent" in ending.error
    assert fidelity.counters.mismatches[Kind.PREFIX] == 1


@pytest.mark.parametrize(
    ("place", "kind"), [(5, Kind.PREFIX), (17, Kind.PREFIX), (24, Kind.SAMPLED)]
)
async def test_requests_that_are_written_anew_each_time_are_checked_from_end_to_end(
    place: int, kind: Kind
) -> None:
    async def generate(given: GenerateInput) -> GenerateOutput:
        output = await through_merge(given)
        leaves_of(output.samples)[0].tokens[place] += 1
        return output

    ending, fidelity = await ran(generate)
    assert f"at token {place} of call" in ending.error
    assert fidelity.counters.mismatches[kind] == 1


async def test_a_request_written_anew_with_another_beginning_is_caught_at_its_beginning() -> None:
    async def generate(given: GenerateInput) -> GenerateOutput:
        """Send another third prompt token in the second request than the first one had."""
        trajectory = Trajectory(given.prompt, (2,))
        first = await given.engine.generate(
            trajectory.request(), Sampling(), routing_key="k", version=0
        )
        trajectory.add_completion(first, dispatched_version=0, sampling={})
        trajectory.add_observation(np.array(O1, dtype=np.int32))
        ids = [*P0[:3], 1105, *P0[4:], *A1, *O1]
        request = RequestIds([ids_json(np.array(ids, np.int32))], len(ids))
        second = await given.engine.generate(request, Sampling(), routing_key="k", version=0)
        trajectory.add_completion(second, dispatched_version=0, sampling={})
        return GenerateOutput(trajectory.write_to(given.sample))

    ending, fidelity = await ran(generate)
    assert "at token 3 of call" in ending.error
    assert fidelity.counters.mismatches[Kind.PREFIX] == 1


async def test_one_wrong_leaf_fails_the_whole_member_and_is_named() -> None:
    async def generate(given: GenerateInput) -> GenerateOutput:
        output = await two_leaves(given)
        leaves = leaves_of(output.samples)
        leaves[0].tokens = leaves[0].tokens.copy()
        leaves[0].tokens[-1] = 3
        return output

    ending, _ = await ran(generate)
    assert ending.stop_reason is StopReason.MERGE_ERROR
    assert "leaf 0: the engine sampled other tokens at token 12" in ending.error


async def test_what_was_sampled_cannot_be_changed_in_place() -> None:
    """The record refers to the reply's own arrays, so nobody may write into them."""

    async def generate(given: GenerateInput) -> GenerateOutput:
        request = Trajectory(given.prompt, (2,)).request()
        reply = await given.engine.generate(request, Sampling(), routing_key="k", version=0)
        with pytest.raises(ValueError, match="read-only"):
            reply.ids[0] = 30
        with pytest.raises(ValueError, match="read-only"):
            reply.log_probs[0] = 0.0
        return await single_turn(given)

    ending, _ = await ran(generate, *TWO)
    assert ending.stop_reason is StopReason.STOP, ending.error


async def test_a_prompt_whose_json_is_of_other_ids_is_caught_for_every_member() -> None:
    replies = [(200, Reply(A2, A2_LOG_PROBS).to_bytes())] * 3
    async with engine_of("http", *replies) as engine:
        stage = a_stage(engine, single_turn)
        other = render_prompt(toy_renderer(), NO, None)

        def render(*_: Any) -> Any:
            return dataclasses.replace(other, json=ids_json(np.array([*P0[:-1], 23], np.int32)))

        stage.book._render = render
        endings = [await stage.run(), await stage.run()]
    assert [e.stop_reason for e in endings] == [StopReason.MERGE_ERROR] * 2


async def test_the_shared_prompt_is_compared_once_and_every_sample_all_the_same() -> None:
    replies = [(200, Reply(A2, A2_LOG_PROBS).to_bytes())] * 3
    async with engine_of("http", *replies) as engine:
        stage = a_stage(engine, single_turn)
        work = a_work(stage.book)
        proven = [work.group.is_prompt_proven]
        assert (await stage.rollout.run(work)).stop_reason is StopReason.STOP
        assert [*proven, work.group.is_prompt_proven] == [False, True]

        stage.rollout._finish = _with_another_prompt
        ending = await stage.rollout.run(work)
    assert ending.stop_reason is StopReason.MERGE_ERROR


def _with_another_prompt(pending: Sample, output: GenerateOutput) -> Any:
    trajectory = finish(pending, output)
    sample = leaves_of(trajectory)[0]
    sample.tokens = sample.tokens.copy()
    sample.tokens[4] = 1111
    return trajectory


# --- resumed, long and without a witness ---------------------------------------------------------
async def resumed(change: Callable[[Sample], None]) -> tuple[Mismatch | None, Watch]:
    """Go on from a sample of another worker, and check what comes of it after `change`."""
    cut = Reply([31], [-0.5], finish="abort")
    async with engine_of("http", (200, cut.to_bytes())) as first:
        stage = given(first, toy_renderer(), HI)
        begun = (await single_turn(stage)).samples
    assert isinstance(begun, Sample)
    assert begun.status is Status.ABORTED
    rest = Reply([32, 2], [-0.25, -0.125])
    async with engine_of("http", (200, rest.to_bytes())) as second:
        stage = given(second, toy_renderer(), HI, sample=begun)
        watch = Watch(stage.prompt)
        stage.engine = WatchedEngine(second, watch)
        sample = (await single_turn(stage)).samples
    assert isinstance(sample, Sample)
    change(sample)
    return watch.check(sample), watch


async def test_a_resumed_sample_is_checked_from_what_this_worker_sent() -> None:
    found, watch = await resumed(lambda sample: None)
    assert found is None
    assert (watch.num_checked, watch.num_unknown) == (1, 1)


async def test_the_earlier_calls_of_a_resumed_sample_are_part_of_what_was_sent() -> None:
    def change(sample: Sample) -> None:
        sample.tokens[10] = 30

    found, _ = await resumed(change)
    assert found is not None
    assert (found.kind, found.position) == (Kind.PREFIX, 10)


async def test_a_function_of_many_calls_forgets_the_oldest_and_stays_bounded() -> None:
    async with engine_of("http", (200, Reply(A2, A2_LOG_PROBS).to_bytes())) as engine:
        stage = given(engine, toy_renderer(), HI)
        reply = await engine.generate(
            RequestIds([stage.prompt.json], 10), Sampling(), routing_key="k", version=0
        )
    watch = Watch(stage.prompt)
    for number in range(MAX_CALLS + 10):
        copy = dataclasses.replace(reply, rid=str(number), json=b"%d,2" % (number + 1000))
        watch.add((stage.prompt.json,), copy)
    assert len(watch._exchanges) == MAX_CALLS
    assert len(watch._known) == MAX_CALLS
    assert next(iter(watch._exchanges)) == "10"


async def test_a_reply_that_was_sent_twice_is_not_taken_for_proven_at_its_second_place() -> None:
    async def generate(given: GenerateInput) -> GenerateOutput:
        """Send prompt, reply, reply; record prompt, reply, something else of that length."""
        trajectory = Trajectory(given.prompt, (2,))
        first = await given.engine.generate(
            trajectory.request(), Sampling(), routing_key="k", version=0
        )
        trajectory.add_completion(first, dispatched_version=0, sampling={})
        request = trajectory.request()
        twice = RequestIds([*request.pieces, first.json], request.num_tokens + len(first.ids))
        second = await given.engine.generate(twice, Sampling(), routing_key="k", version=0)
        trajectory.add_observation(np.array([31, 30, 2], dtype=np.int32))
        trajectory.add_completion(second, dispatched_version=0, sampling={})
        return GenerateOutput(trajectory.write_to(given.sample))

    ending, _ = await ran(generate)
    assert ending.stop_reason is StopReason.MERGE_ERROR
    assert "at token 14 of call" in ending.error
