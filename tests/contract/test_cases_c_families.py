"""Cases of theme C for every family: whole rollouts over small vocabularies with its control ids.

The same claims as `test_cases_c.py`, in the spelling of each format: what its models write is read
one way, executed once, and answered where it cannot be read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.errors import Status, StopReason
from tests.contract.rolls import Recorder, Rolled
from tests.generate_stage import InProcess, Says, check, given
from tests.toy import HI
from tests.unit.tito.families import toyvocab
from tests.unit.tito.families.spelling import NAMES, SPELLINGS
from tests.unit.tito.template.folder import backend
from worker.generate import multi_turn
from worker.sampling import Sampling
from worker.tito.families import FAMILIES

every_family = pytest.mark.parametrize("name", NAMES)
SCHEMA = {
    "properties": {
        "zip": {"type": "string"},
        "flag": {"type": "string"},
        "n": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
}
ARGUMENTS = {"zip": "01234", "flag": "true", "n": 3, "tags": ["a", "1"]}
"""Formats that write no quotes have the types from the schema alone: 01234 is no number."""
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


async def ran(name: str, *turns: str, tool: Recorder) -> Rolled:
    """Run turns in a family's spelling."""
    renderer = toyvocab.renderer(name)
    replies = []
    for turn in turns:
        ids = renderer.encode_raw(turn).tolist()
        replies.append(Says(ids, matched=ids[-1]))
    engine = InProcess(replies)
    stage = given(
        engine, renderer, PROMPT, tools={tool.name: tool}, limits={"max_context": 16384},
        sampling=Sampling(max_new_tokens=2048),
    )  # fmt: skip
    sample = (await multi_turn(stage)).samples
    assert not isinstance(sample, list)
    check(sample, engine.asked, replies[: len(engine.asked)])
    return Rolled(sample, [{"input_ids": asked.ids} for asked in engine.asked], renderer)


def answer(name: str) -> str:
    """Return a plain answer of a family's model."""
    return SPELLINGS[name].turn(reasoning="hm", content="Done.")


@every_family
async def test_case_28_37_arguments_have_the_types_that_the_tool_asks_for(name: str) -> None:
    tool = Recorder("look", **SCHEMA)
    call = SPELLINGS[name].turn(reasoning="hm", calls=[("look", ARGUMENTS)])
    run = await ran(name, call, answer(name), tool=tool)
    assert tool.calls == [ARGUMENTS]
    assert (len(run.requests), run.sample.stop_reason) == (2, StopReason.STOP)
    assert "tool_errors" not in run.sample.metadata
    assert "ok" in run.observed()


@pytest.mark.parametrize(("template", "parser"), [("glm_like", "glm"), ("toy", "qwen3.5")])
async def test_case_28_37_a_template_with_a_spelling_of_tags_has_the_types_of_the_tool_too(
    template: str, parser: str, tmp_path: Path
) -> None:
    renderer = backend(tmp_path, template, tool_parser=parser)
    spell = SPELLINGS["glm-4.5" if parser == "glm" else "nemotron-3"].calls
    tool = Recorder("look", **SCHEMA)
    replies = []
    for text in (spell([("look", ARGUMENTS)]), "Done."):
        ids = [*renderer.encode_raw(text).tolist(), renderer.stop_token_ids[0]]
        replies.append(Says(ids, matched=ids[-1]))
    engine = InProcess(replies)
    sample = (await multi_turn(given(engine, renderer, HI, tools={"look": tool}))).samples
    assert not isinstance(sample, list)
    check(sample, engine.asked, replies)
    assert tool.calls == [ARGUMENTS]


@every_family
async def test_case_31_an_argument_of_another_type_is_told_what_is_wanted(name: str) -> None:
    tool = Recorder("look", **SCHEMA)
    call = SPELLINGS[name].turn(reasoning="hm", calls=[("look", {"n": "three"})])
    run = await ran(name, call, answer(name), tool=tool)
    assert tool.calls == []
    assert "n must be integer" in run.observed()
    assert run.sample.metadata["tool_errors"] == {"bad_arguments": 1}


@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name in NAMES for what in SPELLINGS[name].broken]
)
async def test_case_27_29_43_a_broken_call_is_answered_and_the_turn_after_it_counts(
    name: str, what: str
) -> None:
    tool, spelling = Recorder("look"), SPELLINGS[name]
    broken = spelling.turn(reasoning="hm").removesuffix(spelling.answer_end)
    broken += spelling.broken[what] + spelling.calls_end
    good = spelling.turn(reasoning="hm", calls=[("look", {"word": "né"})])
    run = await ran(name, broken, good, answer(name), tool=tool)
    assert tool.calls == [{"word": "né"}]
    assert run.sample.metadata["tool_errors"]["malformed"] >= 1
    assert "Error: " in run.observed(0)
    assert (len(run.requests), run.sample.status) == (3, Status.COMPLETED)


@pytest.mark.parametrize("name", [name for name in NAMES if SPELLINGS[name].reasons])
async def test_case_32_a_rehearsed_call_is_executed_once(name: str) -> None:
    spelling, tool = SPELLINGS[name], Recorder("look")
    rehearsed = f"I will do {spelling.calls([('look', {'word': 'a'})])}"
    turn = spelling.turn(reasoning=rehearsed, calls=[("look", {"word": "b"})])
    run = await ran(name, turn, answer(name), tool=tool)
    assert tool.calls == [{"word": "b"}]
    assert len(run.requests) == 2


@pytest.mark.parametrize("name", [name for name in NAMES if SPELLINGS[name].reasons])
async def test_a_call_inside_unfinished_reasoning_is_not_executed(name: str) -> None:
    spelling, tool = SPELLINGS[name], Recorder("look")
    opener = "" if spelling.opened else spelling.think[0]
    turn = f"{opener}I will do {spelling.calls([('look', {'word': 'a'})])}{spelling.calls_end}"
    run = await ran(name, turn, tool=tool)
    assert tool.calls == []
    assert (len(run.requests), run.sample.stop_reason) == (1, StopReason.STOP)
    assert "tool_calls" not in run.sample.metadata


@every_family
async def test_case_42_nothing_of_a_cut_turn_is_executed(name: str) -> None:
    tool, spelling = Recorder("look"), SPELLINGS[name]
    whole = spelling.turn(reasoning="hm", calls=[("look", {"word": "né"})])
    ids = toyvocab.renderer(name).encode_raw(whole).tolist()[:-1]
    engine = InProcess([Says(ids, "length")])
    stage = given(
        engine, toyvocab.renderer(name), PROMPT, tools={"look": tool},
        limits={"max_context": 16384}, sampling=Sampling(max_new_tokens=len(ids)),
    )  # fmt: skip
    sample = (await multi_turn(stage)).samples
    assert not isinstance(sample, list)
    assert tool.calls == []
    assert (sample.status, sample.stop_reason) == (Status.TRUNCATED, StopReason.TURN_LENGTH)
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1] * len(ids)


@every_family
async def test_case_39_48_calls_of_two_turns_get_their_own_results_in_order(name: str) -> None:
    tool = Recorder("look", lambda arguments: f"saw {arguments['word']}")
    words = ["né", "nu"] if FAMILIES[name].parallel_calls else ["né"]
    turns = [
        SPELLINGS[name].turn(
            reasoning="hm", calls=[("look", {"word": f"{word}{turn}"}) for word in words]
        )
        for turn in range(2)
    ]
    run = await ran(name, *turns, answer(name), tool=tool)
    for turn in range(2):
        seen = run.observed(turn)
        places = [seen.index(f"saw {word}{turn}") for word in words]
        assert places == sorted(places)
        assert not any(f"saw {word}{1 - turn}" in seen for word in words)
    assert run.sample.metadata["tool_calls"][0]["turn"] == 0
    assert run.sample.metadata["tool_calls"][-1]["turn"] == 1


@every_family
async def test_case_35_an_unknown_tool_is_told_the_known_ones(name: str) -> None:
    tool = Recorder("look")
    call = SPELLINGS[name].turn(reasoning="hm", calls=[("nope", {"word": "né"})])
    run = await ran(name, call, answer(name), tool=tool)
    assert tool.calls == []
    assert "unknown tool 'nope'; available tools: look" in run.observed()
    assert run.sample.metadata["tool_errors"] == {"unknown_tool": 1}
