"""The generate function `agent` over real sessions and HTTP: each ending, and no call behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollstream.errors import EngineFault, EnvFault, Report, Status, StopReason, Withheld
from rollstream.sample import Sample
from tests.generate_stage import Says, given
from tests.integration.gateway.stage import HELLO, Held, Script, Stage, gateway_stage, text
from worker.gateway.dialects.openai_chat import OpenAIChat
from worker.gateway.picker import resolve_picker
from worker.gateway.rules import SessionRules
from worker.generate.agent import AgentLimits, Agents
from worker.generate.agent_function import AgentFunction
from worker.generate.finish import finish
from worker.members.work import ending_of, leaves_of
from worker.sampling import Sampling
from worker.types import DivergencePolicy

Agent = Callable[..., Any]


class Played:
    """One agent's run: its samples, and what the engine was asked until then."""

    def __init__(self, stage: Stage, samples: Sequence[Sample]) -> None:
        self.samples, self.asked = list(samples), len(stage.asked)

    @property
    def only(self) -> Sample:
        """The one sample."""
        (sample,) = self.samples
        return sample


async def play(
    stage: Stage,
    agent: Agent,
    *,
    within: AgentLimits | None = None,
    rules: dict[str, Any] | None = None,
    **changes: Any,
) -> Played:
    """Run one agent to its end; afterwards its session answers nothing, and nothing is asked."""
    leased = given(stage.engine, stage.renderer, HELLO, **changes)
    urls: list[str] = []

    async def noted(base_url: str, **kw: Any) -> Any:
        urls.append(base_url)
        return await agent(base_url=base_url, **kw)

    maker = Agents(stage.book, stage.gateway)
    function = AgentFunction("test:agent", noted, ("api_key",))
    generate = maker.generate(
        function, SessionRules(**stage.rules | (rules or {})), within or AgentLimits()
    )
    try:
        output = await generate(leased)
    finally:
        asked = len(stage.asked)
        for url in urls:
            late = await stage.client.post(f"{url}/chat/completions", json=a_body())
            assert late.status_code == 410
        assert len(stage.asked) == asked
        assert stage.engine.in_flight == 0
        assert stage.book.num_open == 1  # the stage's own
    return Played(stage, leaves_of(finish(leased.sample, output)))


def a_body(messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **fields}


async def chat(base_url: str, messages: Any = HELLO, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(f"{base_url}/chat/completions", json=a_body(messages, **fields))


async def go_on(base_url: str, messages: list[Any], **fields: Any) -> httpx.Response:
    """Ask, and append the reply with a next question."""
    answer = await chat(base_url, messages, **fields)
    if answer.status_code == 200:
        said = answer.json()["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "And then?"}]
    return answer


async def test_an_agent_s_calls_are_one_sample_with_what_it_returned(qwen3: Any) -> None:
    async def agent(base_url: str, api_key: str, **_: Any) -> dict[str, Any]:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        async with client:
            first = await client.chat.completions.create(model="m", messages=HELLO)  # type: ignore[arg-type]
        return {"reward": 0.5, "said": first.choices[0].message.content}

    async with gateway_stage(qwen3, *text(qwen3, "It is 8.")) as stage:
        played = await play(stage, agent)

    sample = played.only
    assert (sample.status, sample.reward) == (Status.COMPLETED, 0.5)
    assert sample.metadata["said"] == "It is 8."
    assert sample.metadata["agent"]["committed"] == 1
    assert [span.name for span in sample.spans] == []  # the worker hands them over
    assert sample.non_generation_time > 0


async def test_20_one_turn_with_a_call_is_the_first_reply_alone(qwen3: Any) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    statuses: list[int] = []

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        messages: list[Any] = list(HELLO)
        statuses.append((await go_on(base_url, messages, tools=tools)).status_code)
        messages[-1] = {"role": "tool", "content": "8", "tool_call_id": _id_of(messages[-2])}
        statuses.append((await chat(base_url, messages, tools=tools)).status_code)
        return {}

    async with gateway_stage(qwen3, *text(qwen3, call)) as stage:
        played = await play(stage, agent, rules={"max_turns": 1})

    assert statuses == [200, 400]
    assert (played.only.status, played.only.stop_reason) == (
        Status.COMPLETED, StopReason.MAX_TURNS,
    )  # fmt: skip
    assert len(played.only.calls) == 1


def _id_of(message: Any) -> str:
    return str(message["tool_calls"][0]["id"])


async def test_25_messages_for_people_are_the_conversation_as_it_went(qwen3: Any) -> None:
    calls = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in "ab"
    )
    empty = {"type": "object", "properties": {}}
    tools = [{"type": "function", "function": {"name": n, "parameters": empty}} for n in "ab"]

    async def agent(base_url: str, **_: Any) -> None:
        messages: list[Any] = list(HELLO)
        answer = await chat(base_url, messages, tools=tools)
        said = answer.json()["choices"][0]["message"]
        results = [
            {"role": "tool", "content": call["function"]["name"], "tool_call_id": call["id"]}
            for call in said["tool_calls"]
        ]
        await chat(base_url, [*messages, said, *results], tools=tools)

    async with gateway_stage(qwen3, *text(qwen3, calls, "Done.")) as stage:
        played = await play(stage, agent, debug_messages=True)
    messages = played.only.metadata["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [m["content"] for m in messages[2:]] == ["a", "b", "Done."]
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["a", "b"]


async def test_28_log_probs_are_recorded_whatever_the_client_asked_for(qwen3: Any) -> None:
    shown: list[Any] = []

    async def agent(base_url: str, **_: Any) -> None:
        answer = await chat(base_url, logprobs=False)
        shown.append(answer.json()["choices"][0].get("logprobs"))

    (says,) = text(qwen3, "It is 8.")
    async with gateway_stage(qwen3, says) as stage:
        played = await play(stage, agent)
    assert shown == [None]
    assert played.only.rollout_log_probs is not None
    assert played.only.rollout_log_probs.tolist() == [-i / 128 for i in range(len(says.ids))]


@pytest.mark.parametrize("hardened", [True, False])
async def test_an_engine_s_fault_is_raised_and_a_success_behind_it_forgets_it(
    qwen3: Any, hardened: bool
) -> None:
    fault = EngineFault("no engine answers", retryable=True, detail="no_engine")

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        answer = await chat(base_url)
        if not hardened:
            answer.raise_for_status()
        return {"reward": 0.0}

    async with gateway_stage(qwen3, fault) as stage:
        with pytest.raises(EngineFault, match="no engine answers"):
            await play(stage, agent)

    async def patient(base_url: str, **_: Any) -> dict[str, Any]:
        statuses = [(await chat(base_url)).status_code for _ in range(2)]
        return {"statuses": statuses}

    async with gateway_stage(qwen3, fault, *text(qwen3, "8")) as stage:
        played = await play(stage, patient)
    assert played.only.metadata["statuses"] == [503, 200]
    assert played.only.status is Status.COMPLETED


async def test_a_bug_of_ours_is_no_agent_s_fault(qwen3: Any) -> None:
    async def breaks() -> Any:
        raise ZeroDivisionError

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        assert (await chat(base_url)).status_code == 500
        return {"reward": 0.0}

    async with gateway_stage(qwen3, breaks) as stage:
        with pytest.raises(EnvFault) as caught:
            await play(stage, agent)
    assert caught.value.retryable


async def test_a_fault_of_one_line_is_not_made_good_by_another_one(qwen3: Any) -> None:
    fault = EngineFault("no engine answers", retryable=True, detail="no_engine")

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        messages: list[Any] = list(HELLO)
        await go_on(base_url, messages)
        sub = await chat(base_url, [{"role": "user", "content": "You are a helper."}])
        assert sub.status_code == 503
        await go_on(base_url, messages)
        return {"reward": 0.0}

    async with gateway_stage(qwen3, *text(qwen3, "8"), fault, *text(qwen3, "9")) as stage:
        with pytest.raises(EngineFault, match="no engine answers"):
            await play(stage, agent)


async def test_a_fault_is_made_good_by_what_goes_on_from_the_same_reply(qwen3: Any) -> None:
    fault = EngineFault("no engine answers", retryable=True, detail="no_engine")

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        messages: list[Any] = list(HELLO)
        await go_on(base_url, messages)
        assert (await chat(base_url, messages)).status_code == 503
        await go_on(base_url, [*messages[:-1], {"role": "user", "content": "And then?"}])
        return {"reward": 0.5}

    async with gateway_stage(qwen3, *text(qwen3, "8"), fault, *text(qwen3, "9")) as stage:
        played = await play(stage, agent)
    assert played.only.reward == 0.5


@pytest.mark.parametrize("where", ["matcher", "reply"])
async def test_a_bug_in_front_of_the_call_or_behind_it_is_no_agent_s_fault(
    qwen3: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        messages: list[Any] = list(HELLO)
        if where == "matcher":
            await go_on(base_url, messages)
        answer = await chat(base_url, messages)
        assert answer.status_code == 500
        return {"reward": 0.0}

    if where == "reply":
        monkeypatch.setattr(OpenAIChat, "reply", breaks)
    rules = {"matcher": breaks} if where == "matcher" else {}
    async with gateway_stage(qwen3, *text(qwen3, "8", "9")) as stage:
        with pytest.raises(EnvFault) as caught:
            await play(stage, agent, rules=rules)
    assert caught.value.retryable


async def test_an_agent_that_is_late_loses_the_call_that_was_under_way(qwen3: Any) -> None:
    (one,), (two,) = text(qwen3, "8"), text(qwen3, "It is eight, I am sure of it.")

    async def agent(base_url: str, **_: Any) -> None:
        messages: list[Any] = list(HELLO)
        await go_on(base_url, messages)
        await chat(base_url, messages)

    for seconds in (0.3, 3.0, 30.0):  # a busy machine may need more until the second call
        async with gateway_stage(qwen3, one, Held(two)) as stage:
            played = await play(stage, agent, within=AgentLimits(seconds))
            if len(stage.asked) == 2:
                break
    assert stage.engine.cancelled == 1

    sample = played.only
    assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.DEADLINE)
    assert sample.num_sampled == len(one.ids)


async def test_work_that_is_cancelled_stops_its_calls(qwen3: Any) -> None:
    held = Held(*text(qwen3, "8"))

    async def agent(base_url: str, **_: Any) -> None:
        await chat(base_url)

    async with gateway_stage(qwen3, held) as stage:
        task = asyncio.create_task(play(stage, agent))
        async with asyncio.timeout(30):
            while not stage.engine.in_flight:
                await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert stage.engine.cancelled == 1


async def test_tasks_that_the_agent_left_behind_are_told_that_it_is_over(qwen3: Any) -> None:
    statuses: list[int] = []
    left: list[asyncio.Task[None]] = []

    async def again(base_url: str) -> None:
        while 410 not in statuses:
            statuses.append((await chat(base_url)).status_code)

    async def agent(base_url: str, **_: Any) -> None:
        left.append(asyncio.create_task(again(base_url)))
        await chat(base_url)

    (says,) = text(qwen3, "8")
    engine = Script(default=lambda _: says)
    async with gateway_stage(qwen3, engine=engine) as stage:
        played = await play(stage, agent)
        await asyncio.gather(*left)
    # Whatever was answered before it is a turn or was counted as dropped; nothing behind it is.
    stats = played.only.metadata["agent"]
    assert stats["sampled_tokens"] == played.only.num_sampled + stats["dropped_tokens"]


async def test_an_agent_that_only_reads_makes_no_model_call(qwen3: Any) -> None:
    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            return {"models": (await client.get(f"{base_url}/models")).status_code}

    async with gateway_stage(qwen3) as stage:
        played = await play(stage, agent)
    assert played.only.stop_reason is StopReason.NO_MODEL_CALL
    assert played.only.metadata["models"] == 200


@pytest.mark.parametrize("raises", [True, False])
async def test_a_context_that_is_full_ends_the_trajectory_whatever_the_agent_does(
    qwen3: Any, raises: bool
) -> None:
    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        messages: list[Any] = list(HELLO)
        while True:
            answer = await go_on(base_url, messages)
            if raises:
                answer.raise_for_status()
            if answer.status_code != 200:
                return {"reward": 0.25, "code": answer.json()["error"]["code"]}

    (says,) = text(qwen3, "It is 8, and that is all that there is to say about it.")
    engine = Script(default=lambda _: says)
    async with gateway_stage(qwen3, engine=engine) as stage:
        played = await play(stage, agent, **_context(120))
    sample = played.only
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.CONTEXT_LENGTH)
    assert sample.num_sampled > 0
    if not raises:
        assert sample.metadata["code"] == "context_length_exceeded"


def _context(tokens: int) -> dict[str, Any]:
    return {"limits": {"max_context": tokens}, "sampling": Sampling(max_new_tokens=64)}


async def test_a_prompt_without_room_is_no_call_and_says_why(qwen3: Any) -> None:
    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        assert (await chat(base_url)).status_code == 400
        return {"reward": 0.0}

    async with gateway_stage(qwen3) as stage:
        played = await play(stage, agent, **_context(4))
    assert played.only.stop_reason is StopReason.PROMPT_TOO_LONG
    assert played.only.num_sampled == 0


async def test_without_partial_what_an_update_stops_ends_its_agent(qwen3: Any) -> None:
    (says,) = text(qwen3, "8", finish="length")
    stopped = Says(says.ids, "abort")
    statuses: list[int] = []

    async def agent(base_url: str, **_: Any) -> None:
        statuses.append((await chat(base_url)).status_code)
        await asyncio.Event().wait()

    for step in (stopped, Withheld()):
        async with gateway_stage(qwen3, step) as stage:
            played = await play(stage, agent)
        assert played.only.stop_reason is StopReason.ABORT_WEIGHTS
        assert played.only.num_sampled == 0


async def test_with_partial_the_client_sees_one_reply(qwen3: Any) -> None:
    (whole,) = text(qwen3, "It is eight, I am sure of it.")
    cut = 4
    steps = [Says(whole.ids[:cut], "abort"), Withheld(), Says(whole.ids[cut:])]
    waited: list[int] = []
    told: list[str] = []

    async def opened() -> None:
        waited.append(1)

    async def agent(base_url: str, **_: Any) -> None:
        answer = await chat(base_url)
        told.append(answer.json()["choices"][0]["message"]["content"])

    async with gateway_stage(qwen3, *steps) as stage:
        played = await play(stage, agent, opened=opened)
    assert told == ["It is eight, I am sure of it."]
    assert len(waited) == 2
    assert [call.end - call.start for call in played.only.calls] == [cut, len(whole.ids) - cut]
    assert len({call.sampling["seed"] for call in played.only.calls}) == 1


async def test_a_tree_is_a_list_whose_leaves_share_what_the_agent_gave(qwen3: Any) -> None:
    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        for question in ("One?", "Two?"):
            await chat(base_url, [{"role": "user", "content": question}])
        return {"reward": 1.0}

    async with gateway_stage(qwen3, *text(qwen3, "a", "b")) as stage:
        played = await play(stage, agent, rules={"kind": "tree"})
    assert [leaf.reward for leaf in played.samples] == [1.0, 1.0]
    assert len({leaf.rollout_id for leaf in played.samples}) == 1
    assert [("agent" in leaf.metadata) for leaf in played.samples] == [True, False]


@pytest.mark.parametrize(
    "rules",
    [{"kind": "tree"}, {"on_divergence": DivergencePolicy.FORK}],
    ids=["tree", "fork"],
)
async def test_leaves_that_were_all_cut_are_truncated_and_have_the_agent_s_reward(
    qwen3: Any, rules: dict[str, Any]
) -> None:
    cut = text(qwen3, "It is", "That is", finish="length")

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        for question, says in zip(("One?", "Two?"), cut, strict=True):
            asked = [{"role": "user", "content": question}]
            answer = await chat(base_url, asked, max_tokens=len(says.ids))
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        return {"reward": {"score": 0.5}}

    async with gateway_stage(qwen3, *cut) as stage:
        played = await play(stage, agent, rules=rules)
    assert len(played.samples) == 2
    for leaf in played.samples:
        assert (leaf.status, leaf.stop_reason) == (Status.TRUNCATED, StopReason.TURN_LENGTH)
        assert leaf.reward == {"score": 0.5}
        assert leaf.loss_mask is not None
        assert leaf.loss_mask.sum() == leaf.num_sampled > 0
    ending = ending_of(list(played.samples))
    assert (ending.report, ending.stop_reason) == (Report.COMPLETE, StopReason.TURN_LENGTH)


@pytest.mark.parametrize(("refused", "reason"), [(False, "agent_error"), (True, "turn_length")])
async def test_only_a_cut_that_refused_the_last_request_is_why_an_agent_broke(
    qwen3: Any, refused: bool, reason: str
) -> None:
    (cut,) = text(qwen3, "It is", finish="length")

    async def agent(base_url: str, **_: Any) -> Any:
        messages: list[Any] = list(HELLO)
        await go_on(base_url, messages, max_tokens=len(cut.ids))
        if refused:
            assert (await chat(base_url, messages)).status_code == 409
        raise KeyError("answer")

    async with gateway_stage(qwen3, cut) as stage:
        played = await play(stage, agent)
    assert played.only.stop_reason == reason
    assert played.only.num_sampled > 0
    assert played.only.metadata["error"] == "AgentFault: the agent raised KeyError: 'answer'"


@pytest.mark.parametrize("how", ["returns", "raises", "late", "refused"])
async def test_a_picker_that_breaks_leaves_what_was_generated_to_no_reward(
    qwen3: Any, how: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def pick(leaves): raise ZeroDivisionError('no leaf')\n")
    picker = resolve_picker(f"{path}:pick")

    async def agent(base_url: str, **_: Any) -> dict[str, Any]:
        messages: list[Any] = list(HELLO)
        await go_on(base_url, messages)
        if how == "late":
            await asyncio.Event().wait()
        if how == "refused":
            assert (await chat(base_url, messages)).status_code == 400
        if how in ("raises", "refused"):
            raise KeyError("answer")
        return {"solved": True}

    rules = {"kind": "tree", "picker": picker, "max_turns": 1}
    async with gateway_stage(qwen3, *text(qwen3, "It is 8.")) as stage:
        within = AgentLimits(2.0 if how == "late" else None)
        played = await play(stage, agent, rules=rules, within=within)
    sample = played.only
    reason = StopReason.DEADLINE if how == "late" else StopReason.AGENT_ERROR
    assert sample.stop_reason is reason
    assert sample.num_sampled > 0
    assert "ZeroDivisionError: no leaf" in sample.metadata["error"]
    assert ("KeyError" in sample.metadata["error"]) == (how in ("raises", "refused"))
    assert sample.metadata.get("solved", False) == (how == "returns")
    report = Report.FINAL if how == "late" else Report.COMPLETE
    assert ending_of(played.samples).report is report
