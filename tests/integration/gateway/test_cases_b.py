"""Theme B through the gateway: spellings of one conversation, and the ids that the engine gets."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.integration.gateway.toys import RENDERER, Toy, call_text, said, spans_of, toy_gateway
from tests.toy import A1, A2, HI, NO, OK, P0, U1, ToyTemplate, toy_renderer, toy_tokenizer
from worker.tito.backend import RenderersBackend
from worker.tito.ids import as_ids

THOUGHT = [4, 30, 5, 30, 2]
"""A reply that thinks "hello" and says "hello"."""
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ADD = {
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "name": "add",
    "description": "adds",
}


async def prompt_of(toy: Toy, messages: list[Any], **fields: Any) -> list[int]:
    """Return the ids that the engine gets for a conversation."""
    await toy.chat(messages, **fields)
    return toy.engine.prompts[-1]


def history(call: dict[str, Any] | None = None, **turn: Any) -> list[Any]:
    """Return a conversation that a client brings: a call and its result."""
    calls = [call or CALL]
    result = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
    return [*HI, {"role": "assistant", "tool_calls": calls, **turn}, result]


async def test_case_12_13_reasoning_that_a_template_would_drop_stays_as_it_was_sampled() -> None:
    async with toy_gateway(THOUGHT, A2) as toy:
        first = await toy.chat()
        assert first.usage.completion_tokens_details.reasoning_tokens == 3
        message = first.choices[0].message
        assert (message.content, message.reasoning_content) == ("hello", "hello")
        prompt = await prompt_of(toy, [*HI, message.model_dump(exclude_none=True), *NO])
        sample = await toy.sample()
    assert prompt == [*P0, *THOUGHT, *U1]
    assert str(prompt).count("1110, 1111") == 1
    assert spans_of(sample) == [(THOUGHT, 1), (U1, 0), (A2, 1)]


async def test_case_15_content_that_is_null_or_absent_is_the_empty_text() -> None:
    async with toy_gateway(A1, A1, A1) as toy:
        prompts = [
            await prompt_of(toy, history(content="")),
            await prompt_of(toy, history(content=None)),
            await prompt_of(toy, history()),
        ]
    assert prompts[0] == prompts[1] == prompts[2]
    text = RENDERER.decode(as_ids(prompts[0]))
    assert "None" not in text
    assert "null" not in text


async def test_case_16_arguments_as_text_render_as_the_object_and_stay_text_for_the_client() -> (
    None
):
    def calls(arguments: Any) -> dict[str, Any]:
        return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    async with toy_gateway(A1, A1, A2) as toy:
        as_object = await prompt_of(toy, history(calls({"a": 3})))
        given = history(calls('{"a": 3}'))
        assert await prompt_of(toy, given) == as_object
        # The same string comes back and is the same conversation.
        behind = await prompt_of(toy, [*given, {"role": "assistant", "content": "hello"}, *NO])
    assert behind == [*as_object, *A1, *U1]


@pytest.mark.parametrize("arguments", ["null", "[1,2]", '"x"', "{bad", None])
async def test_case_17_arguments_that_are_no_object_are_answered(arguments: str | None) -> None:
    function = {"name": "f"} if arguments is None else {"name": "f", "arguments": arguments}
    given = history({"id": "c1", "type": "function", "function": function})
    async with toy_gateway(A1, A1) as toy:
        assert await prompt_of(toy, given) == await prompt_of(toy, given)


async def test_case_18_developer_is_system_and_a_late_one_stands_where_it_came() -> None:
    async with toy_gateway(A1, A1, A1, A2) as toy:
        kind = [{"role": "developer", "content": "be kind"}, *HI]
        head = [1, 20, 10, 1098, 1101, 1032, 1107, 1105, 1110, 1100, 2, 10]
        assert await prompt_of(toy, kind) == [*head, *P0]
        assert await prompt_of(toy, [{**kind[0], "role": "system"}, *HI]) == [*head, *P0]
        late = [
            {"role": "system", "content": "ok"}, *HI, {"role": "developer", "content": "no"},
        ]  # fmt: skip
        prompt = await prompt_of(toy, late)
        assert prompt == [
            1, 20, 10, 1111, 1107, 2, 10, *P0[:7], 1, 20, 10, 1110, 1111, 2, 10, 1, 22, 10,
        ]  # fmt: skip
        behind = await prompt_of(toy, [*late, {"role": "assistant", "content": "hello"}, *NO])
    assert behind == [*prompt, *A1, *U1]


class FirstOnly(ToyTemplate):
    """Has no form for a system message that comes late."""

    def _message(self, message: dict[str, Any]) -> list[int]:
        if message["role"] == "system":
            raise ValueError("a system message must be the first")
        return super()._message(message)


async def test_case_18_a_late_system_message_that_a_family_has_no_form_for_is_a_clear_400() -> None:
    tokenizer = toy_tokenizer()
    strict = RenderersBackend(tokenizer, FirstOnly(tokenizer), 2, (4, 5))
    system = {"role": "system", "content": "be kind"}
    said_hello = {"role": "assistant", "content": "hello"}
    async with toy_gateway(A1, A2, renderer=strict) as toy:
        for late in ([*HI, system], [*HI, said_hello, system]):
            with pytest.raises(openai.BadRequestError, match="system") as caught:
                await toy.chat(late)
            assert caught.value.param == "messages"
            await toy.chat()
        assert toy.engine.prompts == [P0, P0]


async def test_case_19_a_result_and_a_user_message_may_follow_together() -> None:
    async with toy_gateway(A1, A2) as toy:
        await toy.chat()
        prompt = await prompt_of(toy, [*HI, {"role": "assistant", "content": "hello"}, *OK, *NO])
        sample = await toy.sample()
    suffix = [10, 1, 23, 10, 1111, 1107, 2, 10, 1, 21, 10, 1110, 1111, 2, 10, 1, 22, 10]
    assert prompt == [*P0, *A1, *suffix]
    assert spans_of(sample) == [(A1, 1), (suffix, 0), (A2, 1)]


async def test_case_21_tools_are_one_text_on_every_turn_and_flat_ones_are_the_same(
    qwen3: RenderersBackend,
) -> None:
    nested, flat = {"type": "function", "function": ADD}, {"type": "function", **ADD}
    reply = [*qwen3.encode("Hi.").tolist(), qwen3.stop_token_ids[0]]
    async with toy_gateway(reply, reply, reply, renderer=qwen3) as toy:
        first = await prompt_of(toy, HI, tools=[nested])
        said = {"role": "assistant", "content": "Hi."}
        second = await prompt_of(toy, [*HI, said, *NO], tools=[nested])
        assert await prompt_of(toy, HI, tools=[flat]) == first
    assert first == qwen3.render(HI, [nested]).tolist()
    assert second[: len(first) + len(reply)] == [*first, *reply]
    assert "adds" not in qwen3.decode(as_ids(second[len(first) :]))
    shown = qwen3.decode(as_ids(first))
    assert shown.index('"parameters"') < shown.index('"name": "add"') < shown.index('"adds"')


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "hi"}],
        [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
    ],
)
async def test_case_23_parts_are_the_same_message_as_their_text(content: list[Any]) -> None:
    in_parts = {"role": "user", "content": content}
    async with toy_gateway(A1, A2, A1) as toy:
        await toy.chat()
        behind = await prompt_of(toy, [in_parts, {"role": "assistant", "content": "hello"}, *NO])
        assert behind == [*P0, *A1, *U1]
        sample = await toy.sample()
    assert spans_of(sample) == [(A1, 1), (U1, 0), (A2, 1)]
    async with toy_gateway(A1) as toy:
        assert await prompt_of(toy, [in_parts]) == P0


async def test_case_23_a_reply_that_comes_back_in_parts_is_known() -> None:
    async with toy_gateway(A1, A2) as toy:
        await toy.chat()
        parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
        behind = await prompt_of(toy, [*HI, {"role": "assistant", "content": parts}, *NO])
    assert behind == [*P0, *A1, *U1]


async def test_case_23_a_part_that_is_no_text_is_refused_where_it_stands() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    async with toy_gateway(A1) as toy:
        with pytest.raises(openai.BadRequestError) as caught:
            await toy.chat([*HI, {"role": "user", "content": [image]}])
        assert caught.value.param == "messages[1].content[0]"
        assert toy.engine.asked == []


@pytest.mark.parametrize("calls", [[], None])
async def test_case_24_no_calls_are_a_plain_turn(calls: list[Any] | None) -> None:
    turn = {"role": "assistant", "content": "hello", "tool_calls": calls}
    async with toy_gateway(A1, A2, A1) as toy:
        await toy.chat()
        assert await prompt_of(toy, [*HI, turn, *NO]) == [*P0, *A1, *U1]
        assert spans_of(await toy.sample()) == [(A1, 1), (U1, 0), (A2, 1)]
    async with toy_gateway(A1) as toy:
        prompt = await prompt_of(toy, [*HI, turn, *NO])
    assert prompt == [*P0, 30, 2, *U1]


async def test_a_call_behind_an_open_reasoning_is_told_in_its_own_field() -> None:
    """What 12 asks of templates that open the reasoning themselves."""
    opened = toy_renderer(opener=[4])
    text = "hello</think>" + call_text("f", {})
    async with toy_gateway(said(text), renderer=opened) as toy:
        tools = [{"type": "function", "function": {"name": "f"}}]
        message = (await toy.chat(tools=tools)).choices[0].message
    assert message.reasoning_content == "hello"
    assert message.content is None
    assert [call.function.name for call in message.tool_calls] == ["f"]
