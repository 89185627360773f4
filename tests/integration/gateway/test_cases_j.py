"""Theme J: agents that are black boxes, through the gateway, with exact ids at the engine.

Streams and retries of a real SDK (120, 126 with its header) are `test_openai_sdk.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from rollstream.sample import Message, Sample, TokenIds
from tests.integration.gateway.toys import Says, Toy, call_text, said, spans_of, toy_gateway, until
from tests.toy import A1, A1_LOG_PROBS, A2, HI, NO, OK, P0, U1, toy_renderer
from worker.sampling import Sampling
from worker.types import DivergencePolicy

HELLO = {"role": "assistant", "content": "hello"}
HE = {"role": "assistant", "content": "he"}
A2_AGAIN = [31, 2]
"""Another second turn, "he"."""
THOUGHT = [4, 30, 5, 30, 2]
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
TOOLS = [{"type": "function", "function": {"name": "a", "strict": True}}]


def counts(sample: Sample) -> dict[str, int]:
    """Return what a sample says of its session."""
    found: dict[str, int] = sample.metadata["agent"]
    return found


async def refused(toy: Toy, messages: Sequence[Any] = HI, **fields: Any) -> Any:
    """Return the 400 of a request that reaches no engine and changes nothing."""
    calls = len(toy.engine.asked)
    with pytest.raises(openai.BadRequestError) as caught:
        await toy.chat(messages, **fields)
    assert len(toy.engine.asked) == calls
    return caught.value


@pytest.mark.parametrize("fields", [{"n": 2}, {"extra_body": {"best_of": 2}}])
async def test_case_121_several_choices_are_refused_and_leave_nothing(fields: Any) -> None:
    async with toy_gateway(A1) as toy:
        error = await refused(toy, **fields)
        assert error.param in ("n", "best_of")
        assert "line of replies" in error.message
        sample = await toy.sample()
    assert (sample.status, sample.stop_reason) == ("aborted", "no_model_call")


async def test_case_121_one_choice_and_null_are_what_happens() -> None:
    async with toy_gateway(A1, A2) as toy:
        assert len((await toy.chat(n=1)).choices) == 1
        assert len((await toy.chat(NO, n=None)).choices) == 1


async def test_case_122_the_engine_samples_with_the_runs_own_values() -> None:
    pinned = Sampling(temperature=1.0, max_new_tokens=10)
    async with toy_gateway(A1, sampling=pinned) as toy:
        client = toy.client()
        response = await client.chat.completions.with_raw_response.create(
            model="m", messages=HI, temperature=0, top_p=0.1, max_tokens=4096, seed=1, stop=["x"],
            logit_bias={}, presence_penalty=1.0, extra_body={"top_k": 3, "min_p": 0.2},
        )  # fmt: skip
        asked = toy.engine.asked[0].sampling
    assert asked == Sampling(
        temperature=1.0,
        max_new_tokens=10,
        seed=asked.seed,
        stop_token_ids=asked.stop_token_ids,
    )
    assert asked.seed != 1
    named = response.headers["x-rollstream-pinned"].split(", ")
    assert set(named) == {
        "temperature", "top_p", "seed", "stop", "presence_penalty", "top_k", "min_p",
    }  # fmt: skip


async def test_case_124_a_cap_lowers_and_never_raises() -> None:
    long = [30] * 20
    async with toy_gateway(*[long] * 5, sampling=Sampling(max_new_tokens=10)) as toy:
        reply = await toy.chat(max_completion_tokens=5)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == 5
        await toy.chat(max_completion_tokens=5, max_tokens=9)
        await toy.chat(max_completion_tokens=9, max_tokens=5)
        await toy.chat(max_tokens=7)
        await toy.chat(max_completion_tokens=1_000_000)
        caps = [asked.sampling.max_new_tokens for asked in toy.engine.asked]
        assert caps == [5, 5, 9, 7, 10]
        for fields in ({"max_completion_tokens": 0}, {"max_tokens": -1}):
            assert (await refused(toy, **fields)).param in fields


async def test_case_126_a_resend_is_a_second_try_of_the_same_turn() -> None:
    async with toy_gateway(A1, A2, [31, 32, 2]) as toy:
        await toy.chat()
        turn = [*HI, HELLO, *OK]
        first = await toy.chat(turn)
        second = await toy.chat(turn)
        assert first.id != second.id
        sample = await toy.sample()
    assert toy.engine.prompts[1] == toy.engine.prompts[2]
    assert [ids for ids, mask in spans_of(sample) if mask] == [A1, [31, 32, 2]]
    assert counts(sample)["superseded"] == 1
    assert counts(sample)["dropped_tokens"] == len(A2)


async def test_case_126_the_try_that_the_client_went_on_with_counts() -> None:
    async with toy_gateway(A1, A2, A2_AGAIN, A1) as toy:
        await toy.chat()
        turn = [*HI, HELLO, *OK]
        await toy.chat(turn)
        await toy.chat(turn)
        await toy.chat([*turn, HELLO, *NO])
        sample = await toy.sample()
    assert toy.engine.prompts[3] == [*toy.engine.prompts[1], *A2, *U1]
    assert [ids for ids, mask in spans_of(sample) if mask] == [A1, A2, A1]
    assert counts(sample)["dropped_tokens"] == len(A2_AGAIN)


def system(text: str) -> Message:
    return {"role": "system", "content": text}


async def sub_agents(toy: Toy) -> None:
    """Play A1, B1, A2, B2."""
    first, second = [system("hello"), *HI], [system("he"), *HI]
    await toy.chat(first)
    await toy.chat(second)
    await toy.chat([*first, HELLO, *NO])
    await toy.chat([*second, HE, *NO])
    head_of_first, head_of_second = [1, 20, 10, 30, 2, 10], [1, 20, 10, 31, 2, 10]
    assert toy.engine.prompts == [
        [*head_of_first, *P0],
        [*head_of_second, *P0],
        [*head_of_first, *P0, *A1, *U1],
        [*head_of_second, *P0, *A2_AGAIN, *U1],
    ]


async def test_case_127_a_sub_agent_in_a_linear_session_is_never_mixed_in() -> None:
    async with toy_gateway(A1, A2_AGAIN, A2, [30, 30, 2]) as toy:
        await sub_agents(toy)
        sample = await toy.sample()
    assert spans_of(sample) == [(A2_AGAIN, 1), (U1, 0), ([30, 30, 2], 1)]
    assert counts(sample)["dropped_tokens"] == len(A1) + len(A2)
    assert counts(sample)["divergences"] > 0


async def test_case_127_in_a_tree_each_agent_is_a_sample_of_one_rollout() -> None:
    async with toy_gateway(A1, A2_AGAIN, A2, [30, 30, 2], kind="tree") as toy:
        await sub_agents(toy)
        samples = await toy.collected()
    assert [spans_of(sample) for sample in samples] == [
        [(A2_AGAIN, 1), (U1, 0), ([30, 30, 2], 1)],
        [(A1, 1), (U1, 0), (A2, 1)],
    ]
    assert len({sample.rollout_id for sample in samples}) == 1


async def test_case_128_compaction_begins_a_line_and_says_what_was_left_out() -> None:
    turns = 20
    async with toy_gateway(*[A1] * turns, [31, 2]) as toy:
        messages: list[Any] = list(HI)
        for _ in range(turns):
            await toy.chat(messages)
            messages += [HELLO, *NO]
        compacted = [system("be kind"), {"role": "user", "content": "hello"}, *NO]
        reply = await toy.chat(compacted)
        assert reply.choices[0].message.content == "he"
        sample = await toy.sample()
    assert toy.engine.prompts[turns - 1] == [*P0, *([*A1, *U1] * (turns - 1))]
    assert spans_of(sample) == [([31, 2], 1)]
    assert sample.tokens.tolist() == [*toy.engine.prompts[-1], 31, 2]
    assert counts(sample)["dropped_tokens"] == turns * len(A1)
    assert counts(sample)["divergences"] == 1


async def test_case_128_a_session_that_rejects_says_where_and_keeps_its_line() -> None:
    policy = DivergencePolicy.REJECT
    async with toy_gateway(A1, A2, A1, on_divergence=policy) as toy:
        await toy.chat()
        await toy.chat([*HI, HELLO, *NO])
        error = await refused(toy, [*OK, *NO])
        assert error.param == "messages"
        assert "message" in error.message
        await toy.chat([*HI, HELLO, *NO, HELLO, *OK])
        sample = await toy.sample()
    assert [ids for ids, mask in spans_of(sample) if mask] == [A1, A2, A1]


async def test_case_128_a_session_that_forks_trains_every_line() -> None:
    async with toy_gateway(A1, A2, on_divergence=DivergencePolicy.FORK) as toy:
        await toy.chat()
        await toy.chat([system("he"), *HI])
        samples = await toy.collected()
    assert sorted(ids for sample in samples for ids, mask in spans_of(sample) if mask) == [A2, A1]
    assert len({sample.rollout_id for sample in samples}) == 1


async def test_case_129_110_a_turn_that_was_cut_cannot_be_continued() -> None:
    async with toy_gateway([31, 32, 30], A2) as toy:
        cut = await toy.chat(max_tokens=2)
        assert cut.choices[0].finish_reason == "length"
        for _ in range(2):
            with pytest.raises(openai.ConflictError) as caught:
                await toy.chat([*HI, cut.choices[0].message.model_dump(), *NO])
            assert caught.value.code == "conflict"
        sample = await toy.sample()
    assert toy.engine.prompts == [P0]
    assert spans_of(sample) == [([31, 32], 1)]
    assert (sample.status, sample.stop_reason) == ("truncated", "turn_length")


@pytest.mark.parametrize(
    ("echo", "is_known"),
    [
        ({"content": "hello"}, True),
        ({"content": "hello", "reasoning": "hello"}, True),
        ({"content": "hello", "reasoning_content": "hello"}, True),
        ({"content": "hello", "reasoning_content": "he"}, False),
        ({"content": "hello", "reasoning": "he"}, False),
    ],
)
async def test_case_130_reasoning_left_out_or_renamed_is_the_same_turn(
    echo: dict[str, Any], is_known: bool
) -> None:
    async with toy_gateway(THOUGHT, A2) as toy:
        message = (await toy.chat()).choices[0].message
        assert (message.content, message.reasoning_content) == ("hello", "hello")
        await toy.chat([*HI, {"role": "assistant", **echo}, *NO])
        sample = await toy.sample()
    assert (toy.engine.prompts[1] == [*P0, *THOUGHT, *U1]) is is_known
    sampled = [ids for ids, mask in spans_of(sample) if mask]
    assert sampled == ([THOUGHT, A2] if is_known else [A2])


async def test_case_132_93_assistant_messages_of_the_first_prompt_are_prompt() -> None:
    async with toy_gateway(A1, A2) as toy:
        shots = [*HI, HELLO, *NO]
        await toy.chat(shots)
        prompt = toy.engine.prompts[0]
        await toy.chat([*shots, HELLO, *NO])
        sample = await toy.sample()
    assert prompt == [*P0, 30, 2, *U1]
    assert sample.prompt_length == len(prompt)
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]


@pytest.mark.parametrize("stream", [False, True])
async def test_case_133_a_response_format_is_refused_by_policy(stream: bool) -> None:
    async with toy_gateway(A1) as toy:
        error = await refused(toy, response_format=RESPONSE_FORMAT, stream=stream)
        assert error.param == "response_format"
        assert (await toy.chat(response_format={"type": "text"})).choices


async def test_case_133_a_reply_of_nothing_but_reasoning_is_recorded() -> None:
    ids = [4, 30, 5, 2]
    async with toy_gateway(ids) as toy:
        message = (await toy.chat()).choices[0].message
        assert (message.content, message.reasoning_content) == ("", "hello")
        assert spans_of(await toy.sample()) == [(ids, 1)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "a"}}])
async def test_case_134_a_forced_call_is_refused_and_not_taken_for_auto(
    choice: Any, stream: bool
) -> None:
    async with toy_gateway(A1) as toy:
        error = await refused(toy, tools=TOOLS, tool_choice=choice, stream=stream)
        assert error.param == "tool_choice"


async def test_case_134_none_gives_the_same_text_with_and_without_stream() -> None:
    ids = said("hello" + call_text("a", {}))
    async with toy_gateway(ids, ids) as toy:
        reply = (await toy.chat(tools=TOOLS, tool_choice="none")).choices[0]
        stream = await toy.chat(tools=TOOLS, tool_choice="none", stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        sample = await toy.sample()
    assert reply.finish_reason == "stop"
    assert reply.message.tool_calls is None
    assert all(delta.tool_calls is None for delta in deltas)
    assert "".join(delta.content or "" for delta in deltas) == reply.message.content
    assert toy.engine.prompts == [P0, P0]
    assert spans_of(sample) == [(ids, 1)]


class Held:
    """A renderer whose rendering waits."""

    def __init__(self) -> None:
        self._inner = toy_renderer()
        self.begun, self.go = threading.Event(), threading.Event()
        self.is_held = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render(self, messages: Any, tools: Any) -> TokenIds:
        if self.is_held:
            self.begun.set()
            assert self.go.wait(20)
        return self._inner.render(messages, tools)


async def test_case_135_nothing_is_generated_for_a_session_that_closed_meanwhile() -> None:
    held = Held()
    async with toy_gateway(A1, A2, renderer=held) as toy:
        await toy.chat()
        held.is_held = True
        long = {"role": "user", "content": "hello " * 4000}  # rendered beside the loop
        late = asyncio.ensure_future(toy.chat([long]))
        await until(held.begun.is_set, "the request to be in preparation")
        closing = asyncio.ensure_future(toy.session.close())
        await asyncio.sleep(0)
        held.go.set()
        await closing
        first = await toy.session.collect()
        with pytest.raises(openai.APIStatusError) as caught:
            await late
        assert caught.value.status_code in (409, 410)
        with pytest.raises(openai.APIStatusError) as after:
            await toy.chat()
        assert after.value.status_code == 410
        assert await toy.session.collect() is first
        assert toy.engine.prompts == [P0]
        assert spans_of(first) == [(A1, 1)]


async def test_case_135_a_call_under_way_is_stopped_and_its_client_told() -> None:
    async with toy_gateway(Says(A1, A1_LOG_PROBS), Says(A2, held=asyncio.Event())) as toy:
        await toy.chat()
        late = asyncio.ensure_future(toy.chat([*HI, HELLO, *NO]))
        await until(lambda: len(toy.engine.asked) == 2, "the call")
        sample = await toy.sample()
        assert toy.engine.stopped == [1]
        with pytest.raises(openai.APIStatusError) as caught:
            await late
        assert caught.value.status_code in (409, 410)
    assert spans_of(sample) == [(A1, 1)]


async def test_case_136_unknown_fields_are_ignored_and_structural_ones_refused() -> None:
    async with toy_gateway(A1, A1, A1, A1) as toy:
        body = {"foo": 1, "metadata": {}, "chat_template_kwargs": {}}
        await toy.chat(tools=TOOLS, extra_body=body)
        assert toy.engine.prompts == [P0]
        with capture_logs() as logs:
            for number in range(3):
                await toy.chat(NO, extra_body={"foo": number, "bar": 1})
        told = [entry for entry in logs if entry["event"] == "request_fields_ignored"]
        assert [entry["fields"] for entry in told] == [["bar"]]  # `foo` was told of before
        for name, value in (
            ("input_ids", [1, 2]),
            ("prompt_token_ids", [1]),
            ("chat_template_kwargs", {"enable_thinking": False}),
        ):
            assert (await refused(toy, extra_body={name: value})).param == name
