"""Tool plumbing of `multi_turn`: what is executed, what is observed, what is recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollstream.errors import EngineFault, Status, StopReason
from rollstream.sample import Sample
from tests.generate_stage import InProcess, Says, check, engine_of, given
from tests.unit.generate import weather
from tests.unit.generate.weather import says
from worker.generate import multi_turn, single_turn
from worker.sampling import Sampling
from worker.tools import FunctionTool
from worker.types import Tool

END = "<|im_end|>"
DONE = f"Done.{END}"


class Recorder:
    """A tool that keeps what it was called with."""

    def __init__(self, name: str, answer: Any = "ok") -> None:
        self.name, self.answer, self.calls = name, answer, []
        self.spec = {
            "type": "function",
            "function": {"name": name, "description": "", "parameters": {"type": "object"}},
        }

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        self.calls.append(arguments)
        return self.answer


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


async def run(qwen3: Any, first: str, *names: str, **fields: Any) -> tuple[Sample, list[Recorder]]:
    """Run two turns: `first`, then an answer."""
    recorders = [Recorder(name) for name in names]
    replies = [says(qwen3, first + END), says(qwen3, DONE)]
    async with engine_of("process", *replies) as engine:
        tools: dict[str, Tool] = {tool.name: tool for tool in recorders}
        stage = given(engine, qwen3, weather.QUESTION, tools=tools, **fields)
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    check(sample, engine.asked, replies[: len(engine.asked)])
    return sample, recorders


def observed(sample: Sample, qwen3: Any) -> str:
    """Return what the environment wrote."""
    start, end = sample.calls[0].end, sample.calls[1].start
    return str(qwen3.decode(sample.tokens[start:end]))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            '{"name":"w","arguments":{"text":"use </tool_call> here }"}}',
            {"text": "use </tool_call> here }"},
        ),
        ('{"name":"w","arguments":{"cmd":"mkdir -p t/{a,b"}}', {"cmd": "mkdir -p t/{a,b"}),
        (
            '{"name":"w","arguments":"\\"{\\\\\\"url\\\\\\":\\\\\\"http://x.test\\\\\\"}\\""}',
            {"url": "http://x.test"},
        ),
        ('{"name":"w","arguments":{"t":"a}{b"}}', {"t": "a}{b"}),
    ],
    ids=["25-closing-tag", "26-brace", "28-double-encoded", "37-valid-json"],
)
async def test_arguments_reach_the_tool_as_the_model_meant_them(
    text: str, arguments: dict[str, Any], qwen3: Any
) -> None:
    # As plain text, in which no control string is its id; the next test has the id itself.
    ids = _spelled(text, qwen3)
    recorder = Recorder("w")
    replies = [Says(ids, matched=ids[-1]), says(qwen3, DONE)]
    async with engine_of("process", *replies) as engine:
        stage = given(engine, qwen3, weather.QUESTION, tools={"w": recorder})
        sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert recorder.calls == [arguments]
    assert "tool_errors" not in sample.metadata


def _spelled(text: str, qwen3: Any) -> list[int]:
    return [
        *qwen3.encode_raw("<tool_call>\n").tolist(),
        *qwen3.encode(text).tolist(),
        *qwen3.encode_raw(f"\n</tool_call>{END}").tolist(),
    ]


async def test_25_a_closing_id_inside_a_string_closes_nothing(qwen3: Any) -> None:
    text = block('{"name":"w","arguments":{"text":"use </tool_call> here }"}}')
    after = block('{"name":"w","arguments":{"text":"second"}}')
    sample, [tool] = await run(qwen3, f"{text}\n{after}", "w")
    assert tool.calls == [{"text": "use </tool_call> here }"}, {"text": "second"}]
    assert "malformed_calls" not in sample.metadata


async def test_25_a_broken_block_does_not_swallow_the_good_one_behind_it(qwen3: Any) -> None:
    text = block('{"name":"w","arguments":{"x": 1,}') + block('{"name":"w","arguments":{}}')
    sample, [tool] = await run(qwen3, text, "w")
    assert tool.calls == [{}]
    assert sample.metadata["malformed_calls"] == {"invalid_json": 1}


async def test_27_two_objects_in_one_tag_are_one_error_for_the_model(qwen3: Any) -> None:
    text = block('{"name":"a","arguments":{}}\n{"name":"b","arguments":{}}')
    sample, [a, b] = await run(qwen3, text, "a", "b")
    assert (a.calls, b.calls) == ([], [])
    assert "not valid JSON (Extra data" in observed(sample, qwen3)
    assert sample.metadata["tool_errors"] == {"malformed": 1}
    assert len(sample.calls) == 2


@pytest.mark.parametrize("text", ["{}", '{"name":null,"arguments":{}}'])
async def test_29_a_call_without_a_name_is_an_observation(text: str, qwen3: Any) -> None:
    sample, [tool] = await run(qwen3, block(text), "a")
    assert tool.calls == []
    assert "has no name" in observed(sample, qwen3)
    assert sample.metadata["malformed_calls"] == {"no_name": 1}
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize("arguments", ["[1,2]", "5", '"text"'])
async def test_31_arguments_that_are_no_object_are_an_observation(
    arguments: str, qwen3: Any
) -> None:
    sample, [tool] = await run(qwen3, block(f'{{"name":"a","arguments":{arguments}}}'), "a")
    assert tool.calls == []
    assert "arguments must be a JSON object" in observed(sample, qwen3)
    assert sample.metadata["malformed_calls"] == {"bad_arguments": 1}


async def test_32_a_call_rehearsed_in_the_reasoning_is_not_executed(qwen3: Any) -> None:
    call = block('{"name":"a","arguments":{}}')
    _, [tool] = await run(qwen3, f"<think>\nI will do {call}\n</think>\n\n{call}", "a")
    assert tool.calls == [{}]


async def test_34_bare_json_is_not_a_call(qwen3: Any) -> None:
    sample, [tool] = await run(qwen3, 'Example: {"name":"rm","arguments":{"path":"/"}}', "rm")
    assert tool.calls == []
    assert len(sample.calls) == 1
    assert sample.status is Status.COMPLETED


async def test_35_an_unknown_tool_is_an_observation_that_names_the_known(qwen3: Any) -> None:
    sample, _ = await run(qwen3, block('{"name":"nope","arguments":{}}'), "calc")
    assert "unknown tool 'nope'; available tools: calc" in observed(sample, qwen3)
    assert sample.metadata["tool_errors"] == {"unknown_tool": 1}
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(
    "text", ['{"name":"a","arguments":{"cmd":"a\nb"}}', '{"name":"a","arguments":{"re":"\\d+"}}']
)
async def test_38_control_characters_and_bad_escapes_are_observations(
    text: str, qwen3: Any
) -> None:
    sample, [tool] = await run(qwen3, block(text), "a")
    assert tool.calls == []
    assert "not valid JSON" in observed(sample, qwen3)
    assert sample.metadata["malformed_calls"] == {"invalid_json": 1}


async def test_39_results_come_in_the_order_of_the_calls(qwen3: Any) -> None:
    b_done = asyncio.Event()

    async def a() -> str:
        """Wait for b."""
        await b_done.wait()
        return "first"

    async def b() -> str:
        """Be quick."""
        b_done.set()
        return "second"

    text = block('{"name":"a","arguments":{}}') + "\n" + block('{"name":"b","arguments":{}}')
    engine = InProcess([says(qwen3, text + END), says(qwen3, DONE)])
    tools: dict[str, Tool] = {f.__name__: FunctionTool(f) for f in (a, b)}
    sample = (await multi_turn(given(engine, qwen3, weather.QUESTION, tools=tools))).samples
    assert isinstance(sample, Sample)
    seen = observed(sample, qwen3)
    assert seen.index("first") < seen.index("second")
    start, end = sample.calls[0].end, sample.calls[1].start
    offset = sample.prompt_length
    assert sample.loss_mask is not None
    assert not sample.loss_mask[start - offset : end - offset].any()


async def test_42_no_call_of_a_cut_turn_is_executed(qwen3: Any) -> None:
    text = (
        block('{"name":"a","arguments":{}}') + '\n<tool_call>\n{"name":"a","arguments":{"p":"/srv/'
    )
    cut = says(qwen3, text, finish="length")
    recorder = Recorder("a")
    stage = given(
        InProcess([cut]),
        qwen3,
        weather.QUESTION,
        tools={"a": recorder},
        sampling=Sampling(max_new_tokens=len(cut.ids)),
    )
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert recorder.calls == []
    assert sample.loss_mask is not None
    assert sample.loss_mask.all()
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, len(cut.ids))


async def test_43_malformed_json_of_one_member_leaves_its_siblings_alone(qwen3: Any) -> None:
    good, bad = '{"name":"calc","arguments":{"x": 1}}', '{"name":"calc","arguments":{"x": 1,}'
    results = await asyncio.gather(
        *(run(qwen3, block(bad if member == 5 else good), "calc", member=member)
          for member in range(8))
    )  # fmt: skip
    assert [len(tool.calls) for _, [tool] in results] == [1, 1, 1, 1, 1, 0, 1, 1]
    assert all(sample.status is Status.COMPLETED for sample, _ in results)


async def test_without_tools_a_written_call_is_an_answer(qwen3: Any) -> None:
    sample, _ = await run(qwen3, block('{"name":"a","arguments":{}}'))
    assert sample.stop_reason is StopReason.STOP
    assert len(sample.calls) == 1


async def test_numbers_that_no_codec_takes_are_recorded_as_text(qwen3: Any) -> None:
    text = block('{"name":"a","arguments":{"n":123456789012345678901234567890}}')
    sample, [tool] = await run(qwen3, text, "a")
    assert tool.calls == [{"n": 123456789012345678901234567890}]
    [call] = sample.metadata["tool_calls"]
    assert call["arguments"] == '{"n": 123456789012345678901234567890}'


async def test_a_call_with_half_of_a_surrogate_pair_is_malformed_and_recorded(qwen3: Any) -> None:
    sample, [tool] = await run(qwen3, block('{"name":"a","arguments":{"s":"\\ud800"}}'), "a")
    assert tool.calls == []
    assert sample.metadata["malformed_calls"] == {"invalid_json": 1}
    [call] = sample.metadata["tool_calls"]
    assert call["executed"] is False


async def test_an_abnormal_end_is_counted_and_its_id_stays(qwen3: Any) -> None:
    endoftext = qwen3.encode_raw("<|endoftext|>").tolist()
    ids = qwen3.encode("The answer is 8.").tolist() + endoftext
    stage = given(InProcess([Says(ids, matched=endoftext[0])]), qwen3)
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert sample.metadata["abnormal_ends"] == 1
    assert sample.tokens[-1] == endoftext[0]
    assert sample.status is Status.COMPLETED


async def test_a_hanging_tool_is_cancelled_and_its_sample_goes_on(qwen3: Any) -> None:
    cancelled = asyncio.Event()

    async def stuck() -> str:
        """Never answer."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return "late"

    engine = InProcess(
        [says(qwen3, block('{"name":"stuck","arguments":{}}') + END), says(qwen3, DONE)]
    )
    stage = given(
        engine,
        qwen3,
        weather.QUESTION,
        tools={"stuck": FunctionTool(stuck)},
        limits={"tool_timeout_s": 0.05},
    )
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert "stuck did not answer within 0.05 s" in observed(sample, qwen3)
    assert sample.metadata["tool_errors"] == {"timeout": 1}
    assert sample.non_generation_time >= 0.05
    await asyncio.wait_for(cancelled.wait(), 1)


async def test_spans_name_every_part_and_its_turn(qwen3: Any) -> None:
    engine = InProcess([says(qwen3, weather.TURN_1), says(qwen3, weather.FINAL)])
    stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
    await multi_turn(stage)
    assert [(s.name, s.turn, s.outcome) for s in stage.spans.spans] == [
        ("generate", 0, "ok"),
        ("tool", 0, "ok"),
        ("generate", 1, "ok"),
        ("merge", -1, "ok"),
    ]


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
async def test_a_fault_leaves_its_span_and_escapes(generate: Any, qwen3: Any) -> None:
    stage = given(InProcess([EngineFault("gone", retryable=True)]), qwen3)
    with pytest.raises(EngineFault, match="gone"):
        await generate(stage)
    assert [(s.name, s.outcome) for s in stage.spans.spans] == [("generate", "error")]


async def test_a_cancelled_rollout_leaves_its_span_and_stops_its_tools(qwen3: Any) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        """Take long."""
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    engine = InProcess([says(qwen3, block('{"name":"slow","arguments":{}}') + END)])
    stage = given(engine, qwen3, weather.QUESTION, tools={"slow": FunctionTool(slow)})
    task = asyncio.create_task(multi_turn(stage))  # type: ignore[arg-type]  # a coroutine
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [(s.name, s.outcome) for s in stage.spans.spans] == [
        ("generate", "ok"),
        ("tool", "cancelled"),
    ]
    await asyncio.wait_for(stopped.wait(), 1)


async def test_the_version_is_asked_for_at_every_call(qwen3: Any) -> None:
    versions = iter([4, 4, 5, 5])
    replies = [
        says(qwen3, weather.TURN_1, version=4),
        says(qwen3, weather.FINAL, version=5),
    ]
    stage = given(
        InProcess(replies),
        qwen3,
        weather.QUESTION,
        tools=weather.tools(),
        version=lambda: next(versions),
    )
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert [call.dispatched_version for call in sample.calls] == [4, 5]
    assert sample.weight_versions == [4, 5]


async def test_the_members_own_metadata_is_filled_and_the_given_one_left_alone(
    qwen3: Any,
) -> None:
    stage = given(
        InProcess([says(qwen3, weather.TURN_1), says(qwen3, weather.FINAL)]),
        qwen3,
        weather.QUESTION,
        tools=weather.tools(),
    )
    stage.sample.metadata["difficulty"] = 3
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    assert stage.sample.metadata == {"difficulty": 3}
    assert sample.metadata["difficulty"] == 3
    assert [call["name"] for call in sample.metadata["tool_calls"]] == [
        "get_year",
        "get_temperature",
    ]


@pytest.mark.parametrize("finish", ["stop", "abort"])
async def test_an_empty_reply_is_a_call_of_no_tokens(finish: str, qwen3: Any) -> None:
    stage = given(InProcess([Says([], finish)]), qwen3)
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    # An abort before the first token is as if the call had never been made.
    assert (sample.response_length, len(sample.calls)) == (0, finish == "stop")
    assert sample.rollout_log_probs is not None
    assert sample.rollout_log_probs.tolist() == []
    assert sample.status is (Status.COMPLETED if finish == "stop" else Status.ABORTED)


async def test_a_reply_of_the_end_token_alone_is_complete(qwen3: Any) -> None:
    sample = (await multi_turn(given(InProcess([says(qwen3, END)]), qwen3))).samples
    assert isinstance(sample, Sample)
    assert sample.loss_mask is not None
    assert (sample.loss_mask.tolist(), sample.status) == ([1], Status.COMPLETED)
