"""One attempt: its lifecycle, and where every fault is attributed (conformance 136)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import (
    AgentFault,
    ConfigError,
    EngineFault,
    MemberReason,
    MergeFault,
    Report,
    RewardFault,
    Status,
    StopReason,
    ToolFault,
)
from rollstream.group import PromptGroup, Trajectory
from rollstream.sample import Sample
from worker.members.groups import LONG_PROMPT_CHARS
from worker.members.work import Cause, Ending, leaves_of
from worker.tito.ids import prompt_ids
from worker.types import GenerateInput, GenerateOutput

from .works import PROMPT, a_book, a_rollout, a_work, an_env, answer, leased, plain

ALL_THREE = ["attempt_start", "gen_start", "attempt_end"]


async def run_one(generate: Any = plain, **fields: Any) -> tuple[Ending, Any]:
    book = a_book(an_env(generate, **fields))
    work = a_work(book)
    return await a_rollout(book).run(work), work


def sample_of(ending: Ending) -> Sample:
    assert ending.trajectory is not None
    return leaves_of(ending.trajectory)[0]


async def test_an_attempt_that_succeeds_keeps_its_whole_lifecycle() -> None:
    ending, work = await run_one()
    sample = sample_of(ending)

    assert (ending.report, ending.stop_reason) == (Report.COMPLETE, StopReason.STOP)
    assert list(work.lifecycle) == ALL_THREE
    assert sorted(work.lifecycle.values()) == list(work.lifecycle.values())
    assert sample.metadata["attempt"] == work.lifecycle
    assert [span.name for span in sample.spans] == ["queue_wait"]


async def test_an_attempt_aborted_before_its_start_never_calls_generate() -> None:
    called = []

    async def generate(given: GenerateInput) -> GenerateOutput:
        called.append(1)
        return await plain(given)

    book = a_book(an_env(generate))
    work = a_work(book)
    work.cause = Cause.SHUTDOWN

    ending = await a_rollout(book).run(work)

    assert called == []
    assert list(work.lifecycle) == ["attempt_start", "attempt_end"]
    assert sample_of(ending).status is Status.ABORTED
    assert ending.report is Report.BACK


async def test_an_attempt_whose_deadline_has_passed_never_calls_generate() -> None:
    book = a_book(an_env(lambda given: pytest.fail("generate was called")))
    work = a_work(book)
    work.deadline_mono_s = 0.0

    ending = await a_rollout(book).run(work)

    assert (ending.report, ending.stop_reason) == (Report.FINAL, StopReason.DEADLINE)
    assert list(work.lifecycle) == ["attempt_start", "attempt_end"]


async def test_an_attempt_that_raises_keeps_its_whole_lifecycle() -> None:
    async def generate(given: GenerateInput) -> GenerateOutput:
        raise KeyError("x")

    _, work = await run_one(generate)

    assert list(work.lifecycle) == ALL_THREE


async def test_an_attempt_that_is_cancelled_keeps_its_whole_lifecycle_and_stays_cancelled() -> None:
    started = asyncio.Event()

    async def generate(given: GenerateInput) -> GenerateOutput:
        started.set()
        await asyncio.sleep(60)
        raise AssertionError

    book = a_book(an_env(generate))
    work = a_work(book)
    task = asyncio.create_task(a_rollout(book).run(work))
    await started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(work.lifecycle) == ALL_THREE


# --- attribution ---------------------------------------------------------------------------------
async def leaks_cancel(given: GenerateInput) -> GenerateOutput:
    raise asyncio.CancelledError


async def exits(given: GenerateInput) -> GenerateOutput:
    raise SystemExit(3)


class Odd(BaseException):
    """What no `except Exception` sees."""


async def is_odd(given: GenerateInput) -> GenerateOutput:
    raise Odd


async def is_odd_in_a_group(given: GenerateInput) -> GenerateOutput:
    async with asyncio.TaskGroup() as group:
        group.create_task(is_odd(given))
    raise AssertionError


async def interrupts(given: GenerateInput) -> GenerateOutput:
    raise KeyboardInterrupt


async def recurses(given: GenerateInput) -> GenerateOutput:
    raise RecursionError("too deep")


async def returns_nonsense(given: GenerateInput) -> GenerateOutput:
    return GenerateOutput(samples=[])


async def awaits_a_cancelled_task(given: GenerateInput) -> GenerateOutput:
    other = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    other.cancel()
    await other
    raise AssertionError


@pytest.mark.parametrize(
    "generate",
    [
        leaks_cancel,
        exits,
        interrupts,
        is_odd,
        is_odd_in_a_group,
        recurses,
        returns_nonsense,
        awaits_a_cancelled_task,
    ],
)
async def test_whatever_a_generate_function_does_wrong_is_recorded_as_agent_error(
    generate: Any,
) -> None:
    ending, _ = await run_one(generate)
    sample = sample_of(ending)

    assert (ending.report, ending.stop_reason) == (Report.COMPLETE, StopReason.AGENT_ERROR)
    assert sample.status is Status.FAILED
    assert sample.metadata["error"].startswith("AgentFault: ")
    assert sample.reward is None


@pytest.mark.parametrize(
    ("fault", "report", "reason"),
    [
        (EngineFault("503", retryable=True), Report.RETRY, MemberReason.ENGINE_ERROR),
        (EngineFault("400", detail="refused"), Report.FINAL, MemberReason.ENGINE_ERROR),
        (ToolFault("no host", retryable=True), Report.RETRY, MemberReason.TOOL_ERROR),
        (RewardFault("no verifier", retryable=True), Report.RETRY, MemberReason.REWARD_ERROR),
        (RewardFault("not a number"), Report.FINAL, MemberReason.REWARD_ERROR),
        (MergeFault("drift", retryable=True), Report.FINAL, MemberReason.MERGE_ERROR),
    ],
)
async def test_a_fault_keeps_the_boundary_it_came_from(
    fault: Any, report: Report, reason: MemberReason
) -> None:
    async def generate(given: GenerateInput) -> GenerateOutput:
        raise fault

    ending, _ = await run_one(generate)

    assert (ending.report, ending.reason) == (report, reason)
    assert ending.error == f"{type(fault).__name__}: {fault.message}"
    assert ending.refused == (isinstance(fault, EngineFault) and not fault.retryable)


@pytest.mark.parametrize(
    ("stop", "report"),
    [
        (StopReason.STOP, Report.COMPLETE),
        (StopReason.TURN_LENGTH, Report.COMPLETE),
        (StopReason.ABORT_REQUESTED, Report.COMPLETE),
        (StopReason.ABORT_WEIGHTS, Report.BACK),
        (StopReason.MERGE_ERROR, Report.FINAL),
    ],
)
async def test_a_returned_ending_is_reported_by_the_table(stop: StopReason, report: Report) -> None:
    async def generate(given: GenerateInput) -> GenerateOutput:
        sample = answer(given)
        sample.stop_reason = stop
        return GenerateOutput(sample)

    ending, _ = await run_one(generate)

    assert (ending.report, ending.stop_reason) == (report, stop)


class Score:
    """A scorer that does what its function does."""

    def __init__(self, function: Any) -> None:
        self.function, self.asked = function, 0

    async def score(self, trajectory: Trajectory, group: PromptGroup) -> None:
        self.asked += 1
        self.function(trajectory)


def divides(trajectory: Trajectory) -> None:
    raise ZeroDivisionError("by zero")


async def test_a_reward_cannot_write_into_the_tokens_that_it_judges() -> None:
    def rewrites(trajectory: Trajectory) -> None:
        leaves_of(trajectory)[0].tokens[0] = 1

    ending, _ = await run_one(scorer=Score(rewrites))
    assert ending.stop_reason is StopReason.REWARD_ERROR
    assert "read-only" in ending.error


def cut(sample: Sample) -> None:
    sample.tokens = sample.tokens[:-1]


def scaled(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs = sample.rollout_log_probs * 2


def forgets(sample: Sample) -> None:
    sample.calls = []


def shortens(sample: Sample) -> None:
    sample.response_length -= 1


def weighs(sample: Sample) -> None:
    assert sample.loss_mask is not None
    sample.loss_mask[0] = 3


def widens(sample: Sample) -> None:
    sample.loss_mask = np.ones(len(sample.tokens), np.uint8)


def halves(sample: Sample) -> None:
    sample.loss_mask = np.full(sample.response_length, 0.5)  # type: ignore[assignment]  # that is it


def moves_a_call(sample: Sample) -> None:
    sample.calls[0].start += 1


def renames_a_version(sample: Sample) -> None:
    sample.calls[0].versions[0] = (7, 3, 5)


def clears(sample: Sample) -> None:
    sample.calls.clear()


def renumbers(sample: Sample) -> None:
    sample.index = 99


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut, "replaced tokens"), (scaled, "replaced rollout_log_probs"),
        (forgets, "replaced calls"), (shortens, "replaced response_length"),
        (moves_a_call, "replaced calls"), (renames_a_version, "replaced calls"),
        (clears, "replaced calls"), (renumbers, "replaced index"),
        (weighs, "other numbers than 0 and 1"), (widens, "loss_mask has 5 entries"),
        (halves, "other numbers than 0 and 1"),
    ],
)  # fmt: skip
async def test_a_reward_that_edits_what_it_judges_is_a_reward_error(
    change: Callable[[Sample], None], says: str
) -> None:
    ending, _ = await run_one(scorer=Score(lambda trajectory: change(leaves_of(trajectory)[-1])))
    assert ending.stop_reason is StopReason.REWARD_ERROR
    assert says in ending.error


async def test_a_reward_may_narrow_the_mask() -> None:
    def narrows(trajectory: Trajectory) -> None:
        for leaf in leaves_of(trajectory):
            assert leaf.loss_mask is not None
            leaf.loss_mask = leaf.loss_mask * np.array([0, 1], np.uint8)
            leaf.reward = 1.0

    ending, _ = await run_one(scorer=Score(narrows))
    assert ending.report is Report.COMPLETE, ending.error
    assert ending.trajectory is not None
    mask = leaves_of(ending.trajectory)[0].loss_mask
    assert mask is not None
    assert mask.tolist() == [0, 1]


@pytest.mark.parametrize("mask", [[1, 1], None])
async def test_a_reward_may_not_train_what_was_masked(mask: list[int] | None) -> None:
    async def masked(given: GenerateInput) -> GenerateOutput:
        sample = answer(given)
        sample.loss_mask = np.array([0, 1], np.uint8)
        return GenerateOutput(sample)

    def unmasks(trajectory: Trajectory) -> None:
        sample = leaves_of(trajectory)[0]
        sample.loss_mask = None if mask is None else np.array(mask, np.uint8)

    ending, _ = await run_one(masked, scorer=Score(unmasks))
    assert ending.stop_reason is StopReason.REWARD_ERROR
    assert "widened loss_mask" in ending.error


async def test_a_reward_that_raises_is_a_reward_error_and_never_reward_zero() -> None:
    ending, _ = await run_one(scorer=Score(divides))

    assert (ending.report, ending.stop_reason) == (Report.FINAL, StopReason.REWARD_ERROR)
    assert ending.error == "RewardFault: ZeroDivisionError: by zero"


async def test_only_a_trajectory_that_can_be_trained_on_is_scored() -> None:
    async def aborted(given: GenerateInput) -> GenerateOutput:
        sample = answer(given)
        sample.stop_reason = StopReason.ABORT_REQUESTED
        return GenerateOutput(sample)

    scorer = Score(lambda trajectory: None)
    await run_one(aborted, scorer=scorer)
    assert scorer.asked == 0
    ending, _ = await run_one(scorer=scorer)
    assert scorer.asked == 1
    assert [span.name for span in sample_of(ending).spans] == ["queue_wait", "reward"]


async def test_the_worst_leaf_of_a_list_decides_how_its_member_is_reported() -> None:
    async def tree(given: GenerateInput) -> GenerateOutput:
        good = answer(given)
        bad = Sample(tokens=good.tokens[:3], stop_reason=StopReason.AGENT_ERROR)
        return GenerateOutput([good, bad])

    ending, _ = await run_one(tree)

    assert ending.stop_reason is StopReason.AGENT_ERROR
    assert isinstance(ending.trajectory, list)


# --- what members share --------------------------------------------------------------------------
async def test_members_of_a_group_share_one_rendering_and_nothing_they_can_change() -> None:
    rendered: list[Any] = []

    def render(prompt: Any, tools: Any) -> Any:
        rendered.append(prompt)
        return PROMPT

    seen: list[GenerateInput] = []

    async def generate(given: GenerateInput) -> GenerateOutput:
        given.sample.metadata["deep"]["list"].append(given.sample.member)
        seen.append(given)
        return await plain(given)

    book = a_book(an_env(generate), render)
    group = leased(3, n=2, members=2, metadata={"deep": {"list": []}})
    rollout = a_rollout(book)
    for member in (0, 1):
        await rollout.run(a_work(book, group, member))

    assert len(rendered) == 1
    assert seen[0].prompt is seen[1].prompt
    assert seen[0].sample.routing_key == seen[1].sample.routing_key
    assert [given.sample.metadata["deep"]["list"] for given in seen] == [[0], [1]]
    assert seen[0].turn_seed(0) != seen[1].turn_seed(0)


async def test_a_long_prompt_is_rendered_once_in_a_thread_while_members_wait() -> None:
    rendered: list[int] = []

    def render(prompt: Any, tools: Any) -> Any:
        rendered.append(len(prompt))
        return prompt_ids([9, 9])

    book = a_book(an_env(), render)
    group = leased(3, n=3, members=3, prompt="x" * (LONG_PROMPT_CHARS + 1))
    rollout = a_rollout(book)
    works = [a_work(book, group, member) for member in range(3)]
    first = asyncio.create_task(rollout.run(works[0]))
    await asyncio.sleep(0)
    first.cancel()  # one member's cancellation takes nobody else's prompt away
    endings = await asyncio.gather(*(rollout.run(work) for work in works[1:]))

    assert len(rendered) == 1
    assert [ending.report for ending in endings] == [Report.COMPLETE] * 2


async def test_a_prompt_that_cannot_be_rendered_fails_every_member_alone() -> None:
    def render(prompt: Any, tools: Any) -> Any:
        raise ValueError("message 0 has no role")

    book = a_book(an_env(), render)
    group = leased(members=2)
    endings = [await a_rollout(book).run(a_work(book, group, i)) for i in (0, 1)]

    for ending in endings:
        assert (ending.report, ending.reason) == (Report.FINAL, MemberReason.ENV_ERROR)
        assert "message 0 has no role" in ending.error


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"env": "other"}, "'other' is not configured here; known: ['default']"),
        ({"sampling": {"temprature": 1.0}}, "unknown sampling parameter 'temprature'"),
        ({"sampling": {"top_p": 0.5}}, "the row's sampling.top_p = 0.5 leaves"),
        ({"tools": [{"function": {"name": "rm"}}]}, "the row names the tool 'rm'"),
    ],
)
async def test_a_row_that_this_worker_cannot_run_fails_for_good_and_says_why(
    fields: dict[str, Any], says: str
) -> None:
    book = a_book(an_env())
    ending = await a_rollout(book).run(a_work(book, leased(**fields)))

    assert (ending.report, ending.reason) == (Report.FINAL, MemberReason.ENV_ERROR)
    assert says in ending.error


async def test_a_row_may_vary_the_distribution_where_that_is_permitted() -> None:
    book = a_book(an_env(), allow_off_distribution=True)
    ending = await a_rollout(book).run(a_work(book, leased(sampling={"top_p": 0.5})))

    assert ending.report is Report.COMPLETE


async def test_a_record_that_is_garbage_fails_its_member_and_not_the_worker() -> None:
    book = a_book(an_env())
    garbage = leased()
    object.__setattr__(garbage, "prompt", b"\x80\x04garbage")
    ending = await a_rollout(book).run(a_work(book, garbage))

    assert (ending.report, ending.reason) == (Report.FINAL, MemberReason.ENV_ERROR)


async def test_a_group_is_forgotten_with_its_last_member() -> None:
    book = a_book(an_env())
    group = leased(members=2)
    first = book.join(group)
    book.leave(first)
    assert book.join(group) is first
    for _ in range(3):
        book.leave(first)
    assert book.join(group) is not first


def test_a_faults_message_is_bounded() -> None:
    from worker.members.work import MAX_ERROR_CHARS, ending_of_fault

    ending = ending_of_fault(Sample(), AgentFault("x" * 10_000))

    assert len(ending.error) == MAX_ERROR_CHARS


def test_startup_refuses_to_leave_the_distribution_unless_told(tmp_path: Path) -> None:
    from rollstream.settings import SamplingTable, Settings
    from worker.process.startup import env_runtimes

    class Renderer:
        stop_token_ids = (2,)

    renderer: Any = Renderer()
    settings = Settings(sampling=SamplingTable(top_p=0.9))
    with pytest.raises(ConfigError, match=r"sampling\.top_p = 0\.9"):
        env_runtimes(settings, renderer, {"default": None})
    allowed = Settings(sampling=SamplingTable(top_p=0.9, allow_off_distribution=True))
    (env,) = env_runtimes(allowed, renderer, {"default": None}).values()
    assert env.marks == ("top_p",)
    assert env.sampling.stop_token_ids == (2,)


def test_startup_gives_generate_functions_the_policy_of_rewritten_history() -> None:
    from rollstream.settings import Settings, WorkerTable
    from worker.process.startup import env_runtimes

    class Renderer:
        stop_token_ids = (2,)

    renderer: Any = Renderer()
    for policy in ("reject", "fork", "keep_prefix"):
        settings = Settings(worker=WorkerTable(on_divergence=policy))
        (env,) = env_runtimes(settings, renderer, {"default": None}).values()
        assert env.limits.on_divergence == policy
