"""The generate function `agent`: what every ending of the user's agent becomes, as data."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollstream.errors import (
    STATUS_OF,
    AgentFault,
    EngineFault,
    EnvFault,
    MergeFault,
    RolloutFault,
    Status,
    StopReason,
    ToolFault,
    Withheld,
)
from rollstream.sample import Sample
from tests.unit.generate.agents_stage import INSTANCE, Stage, an_input, run_agent
from worker.bounded import AGENT_THREADS
from worker.generate.agent import AgentLimits, Agents
from worker.generate.agent_function import chat_kwargs
from worker.generate.finish import finish
from worker.members.work import ending_of, ending_of_fault, leaves_of
from worker.sampling import Sampling

Agent = Callable[..., Any]


async def ended(stage: Stage, agent: Agent, given: Any, **fields: Any) -> Sample:
    """Run an agent, and return its one sample as it leaves the generate function's checks."""
    output = await run_agent(stage, agent, given, **fields)
    sample = finish(given.sample, output)
    assert isinstance(sample, Sample)
    assert stage.only.closes >= 1
    assert stage.only.after_close == 0
    return sample


# --- endings -------------------------------------------------------------------------------------
async def test_an_agent_that_returns_a_dictionary_has_it_in_the_metadata(qwen3: Any) -> None:
    stage = Stage()

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        await stage.at(base_url).chat()
        return {"reward": 1.0, "x": (1, np.float32(0.5)), "divergences": 9, "row": 2}

    sample = await ended(stage, agent, an_input(qwen3))

    assert (sample.status, sample.stop_reason, sample.reward) == ("completed", "stop", 1.0)
    # The row's entries give way to the agent's, and the agent's to ours.
    assert sample.metadata == {
        "reward": 1.0, "x": [1, 0.5], "divergences": 0, "row": 2, "agent": {"calls": 1},
    }  # fmt: skip


async def test_29_an_agent_that_returns_none_has_no_reward(qwen3: Any) -> None:
    stage = Stage()

    async def agent(base_url: str, **_: Any) -> None:
        await stage.at(base_url).chat()

    sample = await ended(stage, agent, an_input(qwen3))

    assert sample.reward is None
    assert "reward" not in sample.metadata


async def test_31_an_agent_that_raises_after_a_call_keeps_what_was_generated(qwen3: Any) -> None:
    stage = Stage()

    async def agent(base_url: str, **_: Any) -> None:
        await stage.at(base_url).chat()
        raise KeyError("x")

    sample = await ended(stage, agent, an_input(qwen3))

    assert (sample.status, sample.stop_reason) == (Status.FAILED, StopReason.AGENT_ERROR)
    assert sample.num_sampled == 1
    assert sample.metadata["error"] == "AgentFault: the agent raised KeyError: 'x'"


async def test_32_an_agent_that_makes_no_call_is_one_aborted_sample(qwen3: Any) -> None:
    async def agent(**_: Any) -> dict[str, Any]:
        return {"reward": 1.0}

    sample = await ended(Stage(), agent, an_input(qwen3))

    assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.NO_MODEL_CALL)


class Odd(BaseException):
    """No `Exception`, and none of Python's own."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (asyncio.CancelledError(), "a CancelledError leaked out of the agent"),
        (SystemExit(3), "the agent raised SystemExit: 3"),
        (KeyboardInterrupt(), "the agent raised KeyboardInterrupt"),
        (Odd("odd"), "the agent raised Odd: odd"),
        (TimeoutError("its own"), "the agent raised TimeoutError: its own"),
        (ExceptionGroup("several", [ValueError("v")]), "the agent raised ExceptionGroup"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_whatever_an_agent_raises_is_data(
    qwen3: Any, error: BaseException, said: str, is_async: bool
) -> None:
    stage = Stage(calls=2)

    async def agent(**_: Any) -> None:
        raise error

    def plain(**_: Any) -> None:
        raise error

    sample = await ended(stage, agent if is_async else plain, an_input(qwen3))

    assert sample.stop_reason is StopReason.AGENT_ERROR
    assert sample.metadata["error"].startswith(f"AgentFault: {said}")
    assert sample.num_sampled == 2


@pytest.mark.parametrize(
    "returned",
    [[], "text", 1.0, {"x": object()}, {1: "no name"}, {"x": 1 << 64}, {"x": "\ud800"}, {"x": {2}}],
    ids=lambda value: repr(value)[:12],
)
async def test_what_cannot_be_stored_is_an_agent_error_that_says_so(
    qwen3: Any, returned: Any
) -> None:
    stage = Stage(calls=1)

    async def agent(**_: Any) -> Any:
        return returned

    sample = await ended(stage, agent, an_input(qwen3))

    assert sample.stop_reason is StopReason.AGENT_ERROR
    assert "the agent returned" in sample.metadata["error"]
    assert sample.num_sampled == 1


async def test_a_dictionary_that_holds_itself_is_an_agent_error(qwen3: Any) -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop

    async def agent(**_: Any) -> Any:
        return loop

    sample = await ended(Stage(calls=1), agent, an_input(qwen3))

    assert sample.stop_reason is StopReason.AGENT_ERROR


async def test_what_an_agent_keeps_of_its_answer_is_not_the_sample_s(qwen3: Any) -> None:
    answer: dict[str, Any] = {"steps": [1], "reward": {"score": 1.0}}

    async def agent(**_: Any) -> Any:
        return answer

    stage = Stage(calls=1, leaves=2)
    output = await run_agent(stage, agent, an_input(qwen3))
    answer["steps"].append(2)
    first, second = leaves_of(output.samples)
    first.metadata["steps"].append(3)

    assert second.metadata["steps"] == [1]
    assert first.reward == second.reward == {"score": 1.0}
    assert first.reward is not second.reward


# --- rewards -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given_reward", "kept"),
    [(1, 1.0), (True, 1.0), (False, 0.0), (0.25, 0.25), (None, None), ({"a": 1}, {"a": 1}),
     (np.float64(0.5), 0.5), (np.bool_(True), 1.0)],
)  # fmt: skip
async def test_a_reward_is_a_number_or_a_dictionary(
    qwen3: Any, given_reward: Any, kept: Any
) -> None:
    async def agent(**_: Any) -> Any:
        return {"reward": given_reward}

    sample = await ended(Stage(calls=1), agent, an_input(qwen3))

    assert sample.reward == kept
    assert type(sample.reward) is type(kept)


async def test_a_reward_that_is_not_a_number_stays_so_and_is_judged_with_its_group(
    qwen3: Any,
) -> None:
    async def agent(**_: Any) -> Any:
        return {"reward": math.nan}

    sample = await ended(Stage(calls=1), agent, an_input(qwen3))

    assert isinstance(sample.reward, float)
    assert math.isnan(sample.reward)


@pytest.mark.parametrize("reward", ["1.0", [1.0]])
async def test_a_reward_of_another_type_is_a_reward_error(qwen3: Any, reward: Any) -> None:
    async def agent(**_: Any) -> Any:
        return {"reward": reward}

    sample = await ended(Stage(calls=2), agent, an_input(qwen3))

    assert (sample.stop_reason, sample.reward) == (StopReason.REWARD_ERROR, None)
    assert sample.num_sampled == 2
    assert sample.metadata["reward"] == reward
    assert sample.metadata["error"].startswith("RewardFault: the agent gave the reward")
    assert "it must be a number, a dictionary or None" in sample.metadata["error"]
    assert sample.metadata["error_detail"] == "invalid"
    ending = ending_of(sample)
    assert (ending.report, ending.reason) == ("final", "reward_error")
    assert ending.error == sample.metadata["error"]


# --- limits and infrastructure -------------------------------------------------------------------
@pytest.mark.parametrize("raises", [True, False])
async def test_infrastructure_is_raised_whatever_the_agent_made_of_it(
    qwen3: Any, raises: bool
) -> None:
    fault = EngineFault("no engine", retryable=True, detail="no_engine")
    stage = Stage(calls=1, fault=fault)

    async def agent(**_: Any) -> Any:
        if raises:
            raise RuntimeError("503")
        return {"reward": 0.0}

    with pytest.raises(EngineFault) as caught:
        await run_agent(stage, agent, an_input(qwen3))

    assert caught.value is fault
    assert stage.only.closes


@pytest.mark.parametrize("limit", [StopReason.CONTEXT_LENGTH, StopReason.MAX_TURNS])
async def test_an_agent_that_breaks_at_a_limit_ends_for_the_limit(qwen3: Any, limit: Any) -> None:
    async def agent(**_: Any) -> Any:
        raise RuntimeError("400: too long")

    stage = Stage(calls=3, ended_by=limit, refused_by=limit)
    sample = await ended(stage, agent, an_input(qwen3))

    assert sample.stop_reason is limit
    assert sample.num_sampled == 3
    assert "400: too long" in sample.metadata["error"]


@pytest.mark.parametrize("leaves", [1, 2])
async def test_an_agent_that_breaks_behind_a_turn_that_was_only_cut_broke_by_itself(
    qwen3: Any, leaves: int
) -> None:
    async def agent(**_: Any) -> Any:
        raise KeyError("answer")

    stage = Stage(calls=3, leaves=leaves, ended_by=StopReason.TURN_LENGTH)
    output = await run_agent(stage, agent, an_input(qwen3))

    assert [leaf.stop_reason for leaf in leaves_of(output.samples)] == ["agent_error"] * leaves


@pytest.mark.parametrize("limit", [StopReason.CONTEXT_LENGTH, StopReason.MAX_TURNS])
async def test_an_agent_that_returns_at_a_limit_ends_for_the_limit_too(
    qwen3: Any, limit: Any
) -> None:
    async def agent(**_: Any) -> Any:
        return {"reward": 0.5}

    sample = await ended(Stage(calls=3, ended_by=limit), agent, an_input(qwen3))
    assert (sample.stop_reason, sample.reward) == (limit, 0.5)

    # Of several leaves nobody knows whose request that was.
    output = await run_agent(Stage(calls=1, leaves=2, ended_by=limit), agent, an_input(qwen3))
    assert {leaf.stop_reason for leaf in leaves_of(output.samples)} == {StopReason.STOP}


@pytest.mark.parametrize("how", ["returns", "raises", "hangs"])
async def test_what_an_update_stopped_begins_anew_whatever_the_agent_made_of_it(
    qwen3: Any, how: str
) -> None:
    fault = EngineFault("an earlier one", retryable=True)
    over = asyncio.Event()
    over.set()
    stage = Stage(calls=1, ended_by=StopReason.ABORT_WEIGHTS, fault=fault, over=over)

    async def agent(**_: Any) -> Any:
        if how == "raises":
            raise RuntimeError("503")
        if how == "hangs":
            await hangs()
        return {"reward": 0.0}

    sample = await ended(stage, agent, an_input(qwen3), limits=AgentLimits(0.01))

    assert sample.stop_reason is StopReason.ABORT_WEIGHTS
    assert sample.status is Status.ABORTED
    assert "error" not in sample.metadata


async def test_an_agent_whose_sample_begins_anew_is_stopped_at_once(qwen3: Any) -> None:
    stage, aborts = Stage(calls=1), Aborts()
    agents = Agents(stage, stage)

    async def agent(base_url: str, **_: Any) -> None:
        session = stage.at(base_url)
        session.ended_by = StopReason.ABORT_WEIGHTS
        session.over.set()
        await hangs()

    sample = await ended(stage, agent, an_input(qwen3), agents=agents, abort=aborts)
    await agents.aclose()

    assert sample.stop_reason is StopReason.ABORT_WEIGHTS
    assert len(aborts.calls) == 1


@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize(
    "fault",
    [
        ToolFault("no such sandbox", detail="gone"),
        EnvFault("the task is broken"),
        AgentFault("it gave up", retryable=True),  # which is not tried again
        MergeFault("two histories"),
        ToolFault("it said \ud800"),
    ],
    ids=lambda fault: type(fault).__name__,
)
async def test_a_fault_that_the_agent_raises_keeps_its_reason_and_what_was_generated(
    qwen3: Any, fault: RolloutFault, leaves: int
) -> None:
    async def agent(**_: Any) -> Any:
        raise fault

    # A limit that refused its last request does not stand over what it says itself.
    limit = StopReason.MAX_TURNS
    stage = Stage(calls=2, leaves=leaves, ended_by=limit, refused_by=limit)
    given = an_input(qwen3)
    trajectory = finish(given.sample, await run_agent(stage, agent, given))

    told = f"{type(fault).__name__}: {fault.message}".replace("\ud800", "\ufffd")
    for leaf in leaves_of(trajectory):
        assert (leaf.stop_reason, leaf.status) == (fault.reason, STATUS_OF[fault.reason])
        assert leaf.num_sampled == 2
        assert leaf.metadata["error"] == told
        assert leaf.metadata.get("error_detail", "") == fault.detail
    ending, raised = ending_of(trajectory), ending_of_fault(Sample(), fault)
    for name in ("report", "stop_reason", "reason", "refused"):
        assert getattr(ending, name) == getattr(raised, name), name


@pytest.mark.parametrize(
    "fault",
    [
        ToolFault("the sandbox host is gone", retryable=True),
        EnvFault("503", retryable=True),
        Withheld(),
        EngineFault("400"),  # is counted over all members
    ],
    ids=["ToolFault", "EnvFault", "Withheld", "EngineFault"],
)
async def test_a_fault_of_the_agent_s_that_begins_anew_is_raised_as_it_is(
    qwen3: Any, fault: RolloutFault
) -> None:
    async def agent(**_: Any) -> Any:
        raise fault

    with pytest.raises(type(fault)) as caught:
        await run_agent(Stage(calls=1), agent, an_input(qwen3))

    assert caught.value is fault


async def test_an_error_with_half_a_character_is_stored_like_any_other(qwen3: Any) -> None:
    async def agent(**_: Any) -> Any:
        raise ValueError("cannot parse '\ud800'")

    sample = await ended(Stage(calls=1), agent, an_input(qwen3))

    assert sample.metadata["error"] == (
        "AgentFault: the agent raised ValueError: cannot parse '\ufffd'"
    )
    assert sample.num_sampled == 1


async def test_an_end_of_memory_is_the_process_s_matter(qwen3: Any) -> None:
    async def agent(**_: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        await run_agent(Stage(calls=1), agent, an_input(qwen3))


# --- time ----------------------------------------------------------------------------------------
class Aborts:
    """An `abort` that keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def __call__(self, base_url: str, metadata: dict[str, Any]) -> None:
        self.calls.append({"base_url": base_url} | metadata)


async def hangs(**_: Any) -> None:
    await asyncio.Event().wait()


async def test_an_agent_beyond_its_time_is_stopped_and_what_was_generated_is_kept(
    qwen3: Any,
) -> None:
    stage, aborts = Stage(calls=2), Aborts()
    agents, cancelled = Agents(stage, stage), []

    async def agent(**_: Any) -> None:
        try:
            await hangs()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    sample = await ended(
        stage, agent, an_input(qwen3), limits=AgentLimits(0.2), agents=agents, abort=aborts
    )
    await agents.aclose()

    assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.DEADLINE)
    assert "gateway.agent_timeout_s" in sample.metadata["error"]
    assert "worker.sample_timeout_s" not in sample.metadata["error"]
    assert sample.num_sampled == 2
    assert cancelled == [1]
    (told,) = aborts.calls
    assert told["base_url"].endswith(stage.only.key)
    assert told["session_server_instance_id"] == INSTANCE


async def test_an_agent_s_time_is_never_beyond_the_sample_s(qwen3: Any) -> None:
    given = an_input(qwen3)
    given.deadline = time.monotonic() + 0.01

    sample = await ended(Stage(calls=1), hangs, given, limits=AgentLimits(3600.0))

    assert sample.stop_reason is StopReason.DEADLINE
    assert "worker.sample_timeout_s" in sample.metadata["error"]
    assert "gateway.agent_timeout_s" not in sample.metadata["error"]


async def test_a_pause_moves_the_agent_s_time_with_the_sample_s(qwen3: Any) -> None:
    given, stage, go = an_input(qwen3), Stage(calls=1), asyncio.Event()

    async def agent(**_: Any) -> dict[str, Any]:
        given.deadline += 3600  # as a pause does; the agent's own time would be over long ago
        await asyncio.sleep(0.3)
        await go.wait()
        return {"done": True}

    running = asyncio.create_task(ended(stage, agent, given, limits=AgentLimits(0.25)))
    await asyncio.sleep(0.4)
    assert not running.done()
    go.set()

    assert (await running).metadata["done"] is True


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_work_that_is_cancelled_closes_the_session_and_tells_the_agent(
    qwen3: Any, is_async: bool
) -> None:
    stage, aborts = Stage(hold=asyncio.Event()), Aborts()
    agents, started, let_go = Agents(stage, stage), threading.Event(), threading.Event()

    async def agent(base_url: str, **_: Any) -> None:
        started.set()
        await stage.at(base_url).chat()

    def plain(**_: Any) -> None:
        started.set()
        let_go.wait(60)

    task = asyncio.create_task(
        run_agent(stage, agent if is_async else plain, an_input(qwen3), agents=agents, abort=aborts)
    )
    await asyncio.to_thread(started.wait, 60)
    await asyncio.sleep(0.01)  # until its call is at the engine
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stage.only.hold.set()  # type: ignore[union-attr]  # it was given
    await agents.aclose()
    if not is_async:
        assert AGENT_THREADS.hung_functions()
    let_go.set()

    assert stage.only.closes == 1
    assert (stage.only.calls, stage.only.after_close) == (0, 0)
    assert len(aborts.calls) == 1


async def test_an_agent_that_returned_is_not_told_to_abort(qwen3: Any) -> None:
    stage, aborts = Stage(), Aborts()

    async def agent(base_url: str, **_: Any) -> None:
        await stage.at(base_url).chat()

    await ended(stage, agent, an_input(qwen3), abort=aborts)

    assert aborts.calls == []


async def test_an_abort_that_breaks_or_hangs_changes_nothing(
    qwen3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.generate.agent.ABORT_S", 0.01)

    async def breaks(**_: Any) -> None:
        raise SystemExit

    for abort in (breaks, hangs):
        stage = Stage(calls=1)
        agents = Agents(stage, stage)
        sample = await ended(
            stage, hangs, an_input(qwen3), limits=AgentLimits(0.01), agents=agents, abort=abort
        )
        await agents.aclose()
        assert sample.stop_reason is StopReason.DEADLINE


async def test_an_agent_that_ignores_its_cancellation_holds_nobody(qwen3: Any) -> None:
    let_go = asyncio.Event()

    async def agent(**_: Any) -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    sample = await ended(Stage(calls=1), agent, an_input(qwen3), limits=AgentLimits(0.01))
    let_go.set()

    assert sample.stop_reason is StopReason.DEADLINE


async def test_tasks_that_the_agent_left_behind_get_no_call(qwen3: Any) -> None:
    stage = Stage()
    left: list[asyncio.Task[None]] = []

    async def again(base_url: str) -> None:
        while True:
            await stage.at(base_url).chat()
            await asyncio.sleep(0)

    async def agent(base_url: str, **_: Any) -> None:
        left.append(asyncio.create_task(again(base_url)))
        await stage.at(base_url).chat()

    sample = await ended(stage, agent, an_input(qwen3))
    await asyncio.gather(*left, return_exceptions=True)

    assert sample.num_sampled == stage.only.calls >= 1
    assert stage.only.after_close == 0


# --- what it is given ----------------------------------------------------------------------------
async def test_30_metadata_is_the_row_s_own_copy_and_says_where_the_session_is(
    qwen3: Any,
) -> None:
    seen: list[dict[str, Any]] = []

    async def agent(metadata: dict[str, Any], prompt: Any, **_: Any) -> None:
        seen.append(dict(metadata))
        metadata["row"]["k"].append(2)
        prompt[0]["content"] = "rewritten"

    for max_seq_len in (None, 77):
        given = an_input(qwen3, prompt=[{"role": "user", "content": "hi"}])
        await ended(Stage(), agent, given, limits=AgentLimits(max_seq_len=max_seq_len))
        assert given.sample.metadata == {"row": {"k": [1]}}
        assert given.sample.prompt == [{"role": "user", "content": "hi"}]

    where = {"session_server_id": "127.0.0.1:9500", "session_server_instance_id": INSTANCE}
    assert [set(one) for one in seen] == [{"row", *where}, {"row", *where, "max_seq_len"}]
    assert where.items() <= seen[0].items()
    assert seen[1]["max_seq_len"] == 77


async def test_35_request_kwargs_are_a_chat_request_s_and_no_engine_s(qwen3: Any) -> None:
    seen: list[dict[str, Any]] = []

    async def agent(request_kwargs: dict[str, Any], **_: Any) -> None:
        seen.append(request_kwargs)

    await ended(Stage(), agent, an_input(qwen3))

    assert seen == [{"temperature": 0.7, "max_tokens": 64}]


def test_request_kwargs_fit_the_openai_sdk_whatever_the_run_samples_with(qwen3: Any) -> None:
    from openai.resources.chat.completions import AsyncCompletions

    given = an_input(qwen3)
    given.sampling = Sampling(
        temperature=0.5, max_new_tokens=8, top_p=0.9, top_k=20, min_p=0.1, frequency_penalty=0.1,
        presence_penalty=0.2, repetition_penalty=1.1, min_new_tokens=2, stop=("x",),
        stop_token_ids=(5,), seed=3, logit_bias=((7, 1.0),),
    )  # fmt: skip
    told = chat_kwargs(given)

    create = inspect.signature(AsyncCompletions.create)
    create.bind(None, model="policy", messages=[], **told)
    assert told["extra_body"] == {
        "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2,
        "stop_token_ids": [5],
    }  # fmt: skip
    assert (told["temperature"], told["max_tokens"], told["seed"]) == (0.5, 8, 3)


async def test_further_arguments_are_given_by_what_the_function_takes(qwen3: Any) -> None:
    seen: dict[str, Any] = {}

    async def agent(**kw: Any) -> None:
        seen.update(kw)

    given = an_input(qwen3)
    await ended(
        Stage(), agent, given, extra=("label", "sample_index", "evaluation", "timeout_s", "api_key",
                                      "tools")
    )  # fmt: skip

    assert (seen["label"], seen["sample_index"], seen["evaluation"]) == ("8", 12288, False)
    assert 0 < seen["timeout_s"] <= 60
    assert seen["api_key"]
    assert seen["tools"] is None


# --- time of the agent's own ---------------------------------------------------------------------
async def test_what_lies_between_calls_is_the_agent_s_own_time(qwen3: Any) -> None:
    stage, given = Stage(), an_input(qwen3)

    async def agent(base_url: str, **_: Any) -> None:
        await stage.at(base_url).chat()
        await asyncio.sleep(0.02)
        await stage.at(base_url).chat()

    sample = await ended(stage, agent, given)

    tools = [span for span in given.spans.spans if span.name == "tool"]
    assert sample.non_generation_time == pytest.approx(sum(span.duration_s for span in tools))
    assert sample.non_generation_time >= 0.02
    assert [span.turn for span in tools][:2] == [-1, 0]
