"""Cases 25 to 50 of the public reports: tool calls, through whole rollouts and both vocabularies.

Streams (44 to 47) are in `tests/unit/tito/test_deltas.py`, echoed history (50) in
`tests/unit/tito/test_history.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rollstream.errors import EnvFault, Status, StopReason
from tests.contract.rolls import END, QUESTION, Recorder, Rolled, block, call_of, rolled, says
from tests.generate_stage import Says
from tests.unit.worker.works import a_book, a_work, an_env, leased
from worker.sampling import Sampling
from worker.tito.load import render_prompt
from worker.tools import FunctionTool, tool_label
from worker.types import AssistantMessage

DONE = f"Done.{END}"


async def ran(renderer: Any, first: str | Says, *names: str, **fields: Any) -> tuple[Rolled, Any]:
    """Run `first` and an answer, with tools of these names."""
    tools = [Recorder(name) for name in names]
    fields.setdefault("sampling", Sampling(max_new_tokens=8000))
    return await rolled(renderer, first, DONE, tools=tools, **fields), tools


@pytest.mark.parametrize("as_ids", [True, False], ids=["its-id", "its-characters"])
async def test_case_25_a_closing_tag_inside_a_string_closes_nothing(
    as_ids: bool, renderer: Any
) -> None:
    body = '{"name":"write","arguments":{"text":"use </tool_call> here }"}}'
    encode = renderer.encode_raw if as_ids else renderer.encode
    ids = [
        *renderer.encode_raw("<tool_call>\n").tolist(),
        *encode(body).tolist(),
        *renderer.encode_raw(f"\n</tool_call>{END}").tolist(),
    ]
    run, [write] = await ran(renderer, Says(ids, matched=ids[-1]), "write")
    assert write.calls == [{"text": "use </tool_call> here }"}]
    assert "malformed_calls" not in run.sample.metadata


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"cmd":"mkdir -p t/{a,b"}', {"cmd": "mkdir -p t/{a,b"}),
        ('"\\"{\\\\\\"url\\\\\\":\\\\\\"http://x.test\\\\\\"}\\""', {"url": "http://x.test"}),
        ('{"t":"a}{b"}', {"t": "a}{b"}),
    ],
    ids=["26-brace", "28-double-encoded", "37-valid-json"],
)
async def test_case_26_28_37_arguments_reach_the_tool_as_they_were_meant(
    arguments: str, given: dict[str, Any], renderer: Any
) -> None:
    run, [tool] = await ran(renderer, call_of("t", arguments), "t")
    assert tool.calls == [given]
    assert "tool_errors" not in run.sample.metadata


@pytest.mark.parametrize(
    ("text", "told", "kind"),
    [
        ('{"name":"a","arguments":{}}\n{"name":"b","arguments":{}}', "Extra data", "invalid_json"),
        ("{}", "has no name", "no_name"),
        ('{"name":null,"arguments":{}}', "has no name", "no_name"),
        ('{"name":"a","arguments":[1,2]}', "must be a JSON object, not list", "bad_arguments"),
        ('{"name":"a","arguments":5}', "must be a JSON object, not int", "bad_arguments"),
        ('{"name":"a","arguments":"text"}', "must be a JSON object, not str", "bad_arguments"),
        ('{"name":"a","arguments":{"cmd":"a\nb"}}', "Invalid control character", "invalid_json"),
        ('{"name":"a","arguments":{"re":"\\d+"}}', "Invalid \\escape", "invalid_json"),
        ('{"name":"a","arguments":"{\\"cmd\\":\\"a\nb\\"}"}', "control character", "invalid_json"),
        ('{"name":"a","arguments":{"x": 1,}', "not valid JSON", "invalid_json"),
        ('{"name":"a","arguments":{"x": 1, "x": 2}}', '"x" is there twice', "invalid_json"),
        ('{"name":"a","arguments":{"x": NaN}}', "NaN is not JSON", "invalid_json"),
        ('{"name":"a","arguments":{"x": 1e999}}', "out of range", "invalid_json"),
    ],
    ids=["27-two", "29-empty", "29-null", "31-list", "31-number", "31-text", "38-newline",
         "38-escape", "38-inner-newline", "43-malformed", "twice", "nan", "range"],
)  # fmt: skip
async def test_case_27_29_31_38_43_what_cannot_be_read_one_way_is_answered_and_not_executed(
    text: str, told: str, kind: str, renderer: Any
) -> None:
    run, [a, b] = await ran(renderer, block(text), "a", "b")
    assert (a.calls, b.calls) == ([], [])
    assert told in run.observed()
    assert run.sample.metadata["malformed_calls"] == {kind: 1}
    assert run.sample.metadata["tool_errors"] == {"malformed": 1}
    assert [call["executed"] for call in run.sample.metadata["tool_calls"]] == [False]
    # The error is an observation: mask 0, and the trajectory went on behind it.
    start, end = run.sample.calls[0].end, run.sample.calls[1].start
    offset = run.sample.prompt_length
    assert run.sample.loss_mask is not None
    assert not run.sample.loss_mask[start - offset : end - offset].any()
    assert run.sample.status is Status.COMPLETED


async def test_case_32_a_call_rehearsed_in_the_reasoning_is_executed_once(renderer: Any) -> None:
    call = call_of("a")
    run, [tool] = await ran(renderer, f"<think>I will do {call}</think>{call}", "a")
    assert tool.calls == [{}]
    assert len(run.requests) == 2


async def test_a_call_inside_unfinished_reasoning_is_not_executed(renderer: Any) -> None:
    run, [tool] = await ran(renderer, f"<think>I will do {call_of('a')}", "a")
    assert tool.calls == []
    assert len(run.requests) == 1
    assert (run.sample.status, run.sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert "tool_calls" not in run.sample.metadata


async def test_case_34_bare_json_is_an_answer(renderer: Any) -> None:
    run, [tool] = await ran(
        renderer, 'Example: {"name":"rm","arguments":{"path":"/"}}', "rm"
    )  # fmt: skip
    assert tool.calls == []
    assert (run.sample.status, len(run.requests)) == (Status.COMPLETED, 1)


async def test_case_35_an_unknown_tool_is_told_the_known_ones_up_to_the_turn_limit(
    renderer: Any,
) -> None:
    calc = Recorder("calc")
    run = await rolled(renderer, *[call_of("nope")] * 3, tools=[calc], limits={"max_turns": 3})
    assert calc.calls == []
    assert "unknown tool 'nope'; available tools: calc" in run.observed()
    assert run.sample.metadata["tool_errors"] == {"unknown_tool": 2}
    assert run.sample.stop_reason is StopReason.MAX_TURNS
    assert tool_label("nope", {"calc": calc}) == "other"


async def test_case_39_results_are_in_the_order_of_the_calls_whichever_ends_first(
    renderer: Any,
) -> None:
    b_done = asyncio.Event()

    async def a() -> str:
        """Wait for b."""
        await b_done.wait()
        return "first"

    async def b() -> str:
        """Be quick."""
        b_done.set()
        return "second"

    run = await rolled(
        renderer, f"{call_of('a')}\n{call_of('b')}", DONE, tools=[FunctionTool(a), FunctionTool(b)]
    )
    seen = run.observed()
    assert 0 <= seen.index("first") < seen.index("second")


async def test_case_39_the_model_is_told_of_calls_beyond_the_limit(renderer: Any) -> None:
    calls = "\n".join(call_of("a", f'{{"n":{n}}}') for n in range(4))
    broken = block("{")
    run, [tool] = await ran(renderer, f"{broken}\n{calls}", "a", limits={"max_parallel_calls": 3})
    assert tool.calls == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert "not executed: 4 calls in one turn, at most 3 are run" in run.observed()
    assert run.sample.metadata["tool_errors"] == {"malformed": 1, "too_many": 1}
    assert run.sample.metadata["malformed_calls"] == {"invalid_json": 1}
    executed = [call["executed"] for call in run.sample.metadata["tool_calls"]]
    assert executed == [False, True, True, True, False]


async def test_case_39_no_limit_runs_them_all(renderer: Any) -> None:
    calls = "\n".join(call_of("a", f'{{"n":{n}}}') for n in range(70))
    _, [tool] = await ran(
        renderer, calls, "a", sampling=Sampling(max_new_tokens=7000),
        limits={"max_parallel_calls": None, "max_context": 20_000},
    )  # fmt: skip
    assert len(tool.calls) == 70


def cut_turn(renderer: Any, finish: str) -> Says:
    """A complete call, and one that was cut."""
    ids = renderer.encode_raw(
        call_of("a") + '\n<tool_call>\n{"name":"a","arguments":{"path":"/srv/a'
    ).tolist()
    return Says(ids, finish)


@pytest.mark.parametrize("finish", ["stop", "length"], ids=["41-hidden", "42-told"])
async def test_case_41_42_no_call_of_a_cut_turn_is_executed(finish: str, renderer: Any) -> None:
    cut = cut_turn(renderer, finish)
    # Cut at the cap, whatever the engine calls it: the count says so.
    run, [tool] = await ran(renderer, cut, "a", sampling=Sampling(max_new_tokens=len(cut.ids)))
    assert tool.calls == []
    assert len(run.requests) == 1
    assert (run.sample.status, run.sample.stop_reason) == (
        Status.TRUNCATED,
        StopReason.TURN_LENGTH,
    )
    assert run.sample.loss_mask is not None
    assert run.sample.loss_mask.tolist() == [1] * len(cut.ids)
    assert run.sample.tokens[run.sample.prompt_length :].tolist() == list(cut.ids)


async def test_case_42_a_call_that_the_model_left_open_by_itself_is_a_problem_it_is_told(
    renderer: Any,
) -> None:
    left_open = f'{call_of("a")}\n<tool_call>\n{{"name":"a","arguments":{{}}}}'
    run, [tool] = await ran(renderer, left_open, "a")
    assert tool.calls == [{}]
    assert "was not closed" in run.observed()
    assert run.sample.metadata["malformed_calls"] == {"unclosed": 1}


async def test_case_43_malformed_json_of_one_of_eight_leaves_the_others_alone(
    renderer: Any,
) -> None:
    bad = block('{"name":"calc","arguments":{"x": 1,}')
    runs = await asyncio.gather(
        *(
            ran(renderer, bad if member == 5 else call_of("calc"), "calc", member=member)
            for member in range(8)
        )
    )
    assert [len(tool.calls) for _, [tool] in runs] == [1, 1, 1, 1, 1, 0, 1, 1]
    assert [run.sample.status for run, _ in runs] == [Status.COMPLETED] * 8


class RepeatingIds:
    """A renderer of a format whose call ids begin anew in every turn, as Kimi's do."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def parse(self, completion: Any, prompt_tail: Any, tools: Any = None) -> AssistantMessage:
        message: AssistantMessage = self._inner.parse(completion, prompt_tail, tools)
        for place, call in enumerate(message.tool_calls):
            call.id = f"{call.name}:{place}"
        return message


async def test_case_48_ids_that_repeat_in_every_turn_get_the_result_of_their_own_turn(
    renderer: Any,
) -> None:
    tool = Recorder("f", lambda arguments: {1: "one", 2: "two"}[arguments["n"]])
    run = await rolled(
        RepeatingIds(renderer), call_of("f", '{"n":1}'), call_of("f", '{"n":2}'), DONE, tools=[tool]
    )
    assert [call["id"] for call in run.sample.metadata["tool_calls"]] == ["f:0", "f:0"]
    assert "one" in run.observed(0)
    assert "two" in run.observed(1)
    assert "one" not in run.observed(1)


def asked_for(*results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a history of two calls, weather then time, and these results."""
    calls = [
        {"id": "c_w", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "c_t", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    return [*QUESTION, {"role": "assistant", "content": None, "tool_calls": calls}, *results]


WEATHER = {"role": "tool", "tool_call_id": "c_w", "content": "22C"}
TIME = {"role": "tool", "tool_call_id": "c_t", "content": "14:05"}


async def test_case_49_results_are_rendered_in_the_order_of_their_calls(renderer: Any) -> None:
    crossed = await rolled(renderer, DONE, prompt=asked_for(TIME, WEATHER))
    straight = await rolled(renderer, DONE, prompt=asked_for(WEATHER, TIME))
    assert crossed.prompts == straight.prompts
    text = renderer.decode(crossed.sample.tokens[: crossed.sample.prompt_length])
    assert 0 <= text.index("22C") < text.index("14:05")


async def test_case_49_results_without_any_id_keep_the_clients_order(renderer: Any) -> None:
    without = [{"role": "tool", "content": one["content"]} for one in (TIME, WEATHER)]
    run = await rolled(renderer, DONE, prompt=asked_for(*without))
    text = renderer.decode(run.sample.tokens[: run.sample.prompt_length])
    assert 0 <= text.index("14:05") < text.index("22C")


async def test_case_49_a_result_for_no_call_fails_its_group_with_the_index(renderer: Any) -> None:
    prompt = asked_for(WEATHER, TIME | {"tool_call_id": "c_x"})
    book = a_book(an_env(), lambda given, tools: render_prompt(renderer, given, tools))
    work = a_work(book, leased(prompt=prompt))
    with pytest.raises(EnvFault, match="message 3: tool_call_id 'c_x' answers no call"):
        await book.prompt_of(work.group)


def _system(text: str, role: str) -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    "late", [[], [_system("be quick", "developer")], [_system("be quick", "system")]]
)
async def test_case_18_developer_and_late_system_messages_stay_a_prefix_on_every_turn(
    late: Sequence[dict[str, str]], renderer: Any
) -> None:
    tool = Recorder("a")
    prompt = [_system("be kind", "developer"), *QUESTION, *late]
    plain = [{**message} for message in prompt]
    for message in plain:
        message["role"] = message["role"].replace("developer", "system")
    run = await rolled(renderer, call_of("a"), DONE, tools=[tool], prompt=prompt)
    same = await rolled(renderer, call_of("a"), DONE, tools=[tool], prompt=plain)
    assert run.prompts == same.prompts
    assert run.prompts[1][: len(run.prompts[0])] == run.prompts[0]
    assert len(tool.calls) == 2


def test_case_18_the_toy_ids_of_a_developer_message() -> None:
    from tests.toy import P0, toy_renderer

    rendered = toy_renderer().render([_system("be kind", "developer"), *QUESTION], None)
    be_kind = [1098, 1101, 1032, 1107, 1105, 1110, 1100]
    assert rendered.tolist() == [1, 20, 10, *be_kind, 2, 10, *P0]


async def test_case_25_27_a_broken_call_swallows_no_good_one_behind_it(renderer: Any) -> None:
    text = f"{block('{')}\n{call_of('a')}"
    run, [tool] = await ran(renderer, text, "a")
    assert tool.calls == [{}]
    assert [call["executed"] for call in run.sample.metadata["tool_calls"]] == [False, True]
    assert says(renderer, text + END).ids == run.sample.tokens[
        run.sample.calls[0].start : run.sample.calls[0].end
    ].tolist()  # fmt: skip
