"""Turns of a sample: which tokens by its calls, which texts by what there is."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.cli.turns import Said, parts_of, prompt_of, split_chatml, tell, turns_of
from rollstream.sample import Call, Sample, Span
from tests.builders import a_sample

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What year?"}]
REPLY = '<tool_call>\n{"name": "year", "arguments": {}}\n</tool_call>'
BETWEEN = (
    "\n<|im_start|>user\n<tool_response>\n2026\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
WORDS = {4: REPLY, 5: "<|im_end|>", 6: BETWEEN, 7: "It is 2026.", 8: "<|im_end|>"}
TURNS = (((4, 5), (6,)), ((7, 8), ()))


def decode(ids: Any) -> str:
    return "".join(WORDS[number] for number in ids)


def a_talk(**fields: Any) -> Sample:
    """Return a call of a tool, what it said, an answer."""
    known: dict[str, Any] = {"prompt": ASKED, "turns": TURNS} | fields
    return a_sample(**known)


def roles_and_texts(sample: Sample, **how: Any) -> list[tuple[str, str]]:
    story = tell(sample, **how)
    said = []
    for turn in story.turns:
        assert turn.reply is not None
        said += [turn.reply, *turn.behind]
    return [(one.role, one.text) for one in said]


EXPECTED = [
    ("assistant", REPLY),
    ("tool", "<tool_response>\n2026\n</tool_response>"),
    ("assistant", "It is 2026."),
]


def test_tell_decodes_each_stretch_of_tokens_where_there_is_a_tokenizer() -> None:
    assert roles_and_texts(a_talk(), decode=decode) == EXPECTED
    assert [said.role for said in tell(a_talk(), decode).before] == ["system", "user"]
    assert tell(a_talk(), decode).source == "decoded from the ids of the tokens"


def test_tell_takes_the_stored_response_apart_where_its_marks_fit_the_calls() -> None:
    response = decode([4, 5, 6, 7, 8])
    assert roles_and_texts(a_talk(response=response)) == EXPECTED
    assert "<|im_start|>" in tell(a_talk(response=response)).source


def test_tell_gives_the_response_whole_where_its_marks_do_not_fit_the_calls() -> None:
    """A model may have written marks as text."""
    response = decode([4, 5, 6, 7, 8]) + BETWEEN + "a third"
    story = tell(a_talk(response=response))
    assert story.whole == response
    assert all(turn.reply is None for turn in story.turns)
    assert "give --tokenizer FILE" in story.source


def test_tell_takes_kept_messages_where_nothing_decodes() -> None:
    kept = [*ASKED, {"role": "assistant", "content": REPLY},
            {"role": "tool", "name": "year", "content": "2026"},
            {"role": "assistant", "content": "It is 2026."}]  # fmt: skip
    sample = a_talk(metadata={"messages": kept})
    assert roles_and_texts(sample) == [EXPECTED[0], ("tool", "2026"), EXPECTED[2]]
    story = tell(sample, decode)
    assert story.turns[0].behind == [Said("tool", "2026", "year")]
    assert story.turns[0].reply == Said("assistant", REPLY)


def test_tell_counts_kept_replies_from_the_end_a_client_may_have_brought_some() -> None:
    kept = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, *ASKED,
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": "last"}]  # fmt: skip
    story = tell(a_talk(metadata={"messages": kept}))
    assert [said.text for said in story.before] == ["1+1?", "2", "Be brief.", "What year?"]
    replies = [turn.reply.text for turn in story.turns if turn.reply]
    assert replies == ["first", "last"]


def test_tell_says_that_there_is_no_text_where_there_is_none() -> None:
    story = tell(a_talk())
    assert [turn.reply for turn in story.turns] == [None, None]
    assert story.source.startswith("no text was kept")


def test_tell_gives_the_calls_that_the_worker_read_and_the_spans_to_their_turns() -> None:
    call = {"turn": 0, "id": "c", "name": "year", "arguments": "{}", "executed": True}
    foreign = ["no call", {"turn": 9, "name": "late"}, {"turn": "0"}]
    spans = [Span("generate", 0, 1.0, 2.0), Span("tool", 0, 3.0, 1.0), Span("generate", 1, 4.0, 1)]
    story = tell(a_talk(metadata={"tool_calls": [call, *foreign]}, spans=spans), decode)
    assert [turn.tool_calls for turn in story.turns] == [[call], []]
    assert [[span.name for span in turn.spans] for turn in story.turns] == [
        ["generate", "tool"],
        ["generate"],
    ]


def test_a_reply_that_was_stopped_and_gone_on_with_is_one_turn() -> None:
    calls = [
        Call("a", "e", 3, 5, "abort"),
        Call("b", "e", 5, 6, "stop"),
        Call("c", "e", 7, 8, "stop"),
    ]
    turns = turns_of(Sample(calls=calls))
    assert [(turn.start, turn.end, len(turn.calls)) for turn in turns] == [(3, 6, 2), (7, 8, 1)]


def test_an_environments_first_words_stand_behind_the_prompt() -> None:
    shown = [{"role": "user", "content": "You see a door."}]
    said = prompt_of(Sample(prompt="Go.", metadata={"env": {"reset": shown}}))
    assert [one.text for one in said] == ["Go.", "You see a door."]


@pytest.mark.parametrize(
    "content",
    [None, 7, [{"type": "image_url"}, {"type": "text", "text": "hi"}, 3], {"a": 1}, "\ud800"],
)
def test_messages_of_any_shape_have_a_text(content: Any) -> None:
    (said,) = prompt_of(Sample(prompt=[{"role": "user", "content": content}]))
    assert isinstance(said.text, str)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("plain", ["text"]),
        ("<think>a</think>b<tool_call>{}</tool_call>", ["reasoning", "text", "call"]),
        ("a prompt opened it</think>b", ["reasoning", "text"]),
        ("<think>never ends", ["reasoning"]),
        ("a<tool_call>1</tool_call>b<tool_call>2", ["text", "call", "text", "call"]),
        ("[TOOL_CALLS][{}]", ["call"]),
        ("", []),
    ],
)
def test_parts_of_a_reply_are_complete_and_in_order(text: str, kinds: list[str]) -> None:
    parts = parts_of(text)
    assert [kind for kind, _ in parts] == kinds
    assert "".join(part for _, part in parts) == text


def test_split_chatml_leaves_other_families_as_they_are() -> None:
    assert split_chatml("<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n2026") == [
        Said("context", "<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n2026")
    ]
    assert split_chatml("\n") == []
