"""`debug.messages` of the built-in generate functions, and what a viewer makes of them."""

from __future__ import annotations

from typing import Any

from rollstream.cli.turns import tell
from rollstream.group import PromptGroup
from rollstream.sample import Sample
from rollstream.wire import decode_body, encode_body, encode_text
from tests.generate_stage import engine_of, given
from tests.unit.environments.stage import ASKED, END, play, scripted
from tests.unit.generate.weather import says
from worker.environments import StepResult
from worker.generate.single_turn import single_turn
from worker.members.snapshots import keep_messages
from worker.tito.ids import as_ids


def roles_and_texts(sample: Sample) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in sample.metadata["messages"]]


async def travelled(sample: Sample, renderer: Any, prompt: Any) -> Sample:
    """Return what a trainer gets of a sample."""
    await keep_messages([sample], renderer)
    read = decode_body(encode_body(sample), PromptGroup(0, 1, prompt=prompt), encode_text(sample))
    assert isinstance(read, Sample)
    return read


async def test_single_turn_keeps_the_prompt_and_the_reply(qwen3: Any) -> None:
    async with engine_of("process", says(qwen3, f"<think>hm</think>8{END}")) as engine:
        stage = given(engine, qwen3, "What is 1+7?", debug_messages=True)
        output = await single_turn(stage)
        assert isinstance(output.samples, Sample)
        quiet = await _quiet(qwen3)
    sample = await travelled(output.samples, qwen3, "What is 1+7?")
    expected = [("user", "What is 1+7?"), ("assistant", "<think>hm</think>8")]
    assert roles_and_texts(sample) == expected
    assert "messages" not in quiet.metadata


async def _quiet(qwen3: Any) -> Sample:
    async with engine_of("process", says(qwen3, f"8{END}")) as engine:
        output = await single_turn(given(engine, qwen3, "What is 1+7?"))
    assert isinstance(output.samples, Sample)
    return output.samples


async def test_an_episode_keeps_what_the_environment_showed_and_a_viewer_tells_it(
    qwen3: Any,
) -> None:
    environment, _ = scripted(
        StepResult("Too low.", 0.0, False, {}), StepResult("", 1.0, True, {}),
        first=[{"role": "user", "content": "Begin."}],
    )  # fmt: skip
    played = await play(qwen3, environment, "It is 3.", "It is 7.", debug_messages=True)
    sample = await travelled(played.sample, qwen3, ASKED)
    expected = [("user", ASKED[0]["content"]), ("user", "Begin."), ("assistant", "It is 3."),
                ("user", "Too low."), ("assistant", "It is 7.")]  # fmt: skip
    assert roles_and_texts(sample) == expected
    del sample.metadata["messages"]
    for decode in (None, lambda ids: qwen3.decode(as_ids(ids))):
        story = tell(sample, decode)
        said = list(story.before)
        for turn in story.turns:
            assert turn.reply is not None
            said += [turn.reply, *turn.behind]
        assert [(one.role, one.text) for one in said] == expected
