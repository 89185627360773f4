"""A call that is told as text is what the model wrote, markers included, in every family."""

from __future__ import annotations

import pytest

from tests.unit.tito.families import toyvocab
from tests.unit.tito.families.spelling import NAMES, SPELLINGS
from tests.unit.tito.families.test_every_family import TOOLS, ids_of, opening, parallel
from worker.tito.ids import as_ids

pytestmark = pytest.mark.xdist_group("families")
REBUILT = frozenset({"gpt-oss"})
"""A call's header is told in one form, whatever the order of its parts was."""
TEXTS = [name for name in NAMES if name not in REBUILT]
BROKEN = [(name, what) for name in TEXTS for what in SPELLINGS[name].broken]


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_as_it_was_written_is_a_piece_of_the_reply(name: str) -> None:
    renderer = toyvocab.renderer(name)
    reply = ids_of(name, SPELLINGS[name].turn(content="", calls=parallel(name)))
    found = renderer.parse(as_ids(reply), as_ids(opening(name)), TOOLS)
    text, at = renderer.decode(as_ids(reply)), 0
    assert len(found.tool_calls) == len(parallel(name))
    for call in found.tool_calls:
        place = text.find(call.as_written, at)
        assert place >= at, "in order, and none inside another"
        at = place + len(call.as_written)


@pytest.mark.parametrize(("name", "what"), BROKEN)
def test_a_malformed_call_keeps_what_the_model_wrote(name: str, what: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    opened = spelling.think[1] if spelling.opened else ""
    reply = ids_of(name, f"{opened}{spelling.broken[what]}{spelling.calls_end}")
    (call,) = renderer.parse(as_ids(reply), as_ids(opening(name)), TOOLS).tool_calls
    assert call.as_written in renderer.decode(as_ids(reply))


def test_markers_of_a_block_are_part_of_it_where_its_format_has_some() -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    reply, held = ids_of("qwen3", f"I look.\n{text}"), opening("qwen3")
    (call,) = toyvocab.renderer("qwen3").parse(as_ids(reply), as_ids(held), TOOLS).tool_calls
    assert call.as_written == text
    assert call.raw == '{"name": "look", "arguments": {}}'


@pytest.mark.parametrize("name", [name for name in NAMES if SPELLINGS[name].reasons])
def test_the_ids_of_reasoning_are_counted_or_said_to_be_unknown(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    for reasoning in ("Hm.", "Hm hm hm."):
        reply = ids_of(name, spelling.turn(reasoning=reasoning, content="no", calls=[]))
        found = renderer.parse(as_ids(reply), as_ids(opening(name)), TOOLS)
        assert found.reasoning == reasoning
        least = len(renderer.encode(reasoning))
        if name in REBUILT:
            assert found.num_reasoning is None
        else:
            assert found.num_reasoning is not None
            assert least < found.num_reasoning <= least + 8
