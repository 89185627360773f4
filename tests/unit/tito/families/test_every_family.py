"""What must hold of every family, over a small vocabulary that has its control tokens.

Golden ids over published vocabularies are tests of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError, MergeFault
from rollstream.sample import TokenIds
from tests.unit.tito.families import toyvocab
from tests.unit.tito.families.spelling import NAMES, SAME_AS, SPELLINGS
from worker.tito.backend import RenderersBackend
from worker.tito.families import FAMILIES, Proof
from worker.tito.ids import as_ids
from worker.tito.load import load_renderer
from worker.tito.selftest import Kind, self_test
from worker.tito.tokenizer import Tokenizer
from worker.types import ProblemKind

pytestmark = pytest.mark.xdist_group("families")

every_family = pytest.mark.parametrize("name", NAMES)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "What does né mean?"},
]
ONLY_FIRST = {
    "deepseek-v4", "deepseek-v4-thinking", "minimax-m2",
    "nemotron-3", "nemotron-3-no-thinking", "nemotron-3-ultra", "nemotron-3.5",
    "qwen3.5", "qwen3.5-no-thinking", "qwen3.6", "qwen3.8",
}  # fmt: skip
"""Families whose template has no system message but the first."""


def result(text: str, place: int = 0) -> dict[str, Any]:
    call = f"functions.look:{place}"
    return {"role": "tool", "name": "look", "tool_call_id": call, "content": text}


def said(name: str, *, reasoning: str = "", content: str = "", calls: Any = None) -> dict[str, Any]:
    """Return the message that `SPELLINGS[name].turn` of the same arguments spells."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning and SPELLINGS[name].reasons:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"functions.{function}:{place}",
                "type": "function",
                "function": {"name": function, "arguments": arguments},
            }
            for place, (function, arguments) in enumerate(calls)
        ]
    return message


def parallel(name: str) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = [("look", {"word": "né"}), ("look", {"word": "nu"})]
    return calls if FAMILIES[name].parallel_calls else calls[:1]


def window_of(renderer: RenderersBackend, held: list[int]) -> list[int]:
    stops = renderer.stop_token_ids
    return held[max((i for i, number in enumerate(held) if number in stops), default=0) :]


def extended(
    renderer: RenderersBackend, held: list[int], reply: list[int], new: list[dict[str, Any]]
) -> list[int]:
    """Return the suffix, and assert that the tail of what was held is enough for it."""
    whole = renderer.extend(as_ids(held), as_ids(reply), new, TOOLS).tolist()
    tail = window_of(renderer, held)
    assert renderer.extend(as_ids(tail), as_ids(reply), new, TOOLS).tolist() == whole
    assert isinstance(whole, list)
    return whole


def text_of(renderer: RenderersBackend, ids: list[int]) -> str:
    return renderer.decode(as_ids(ids))


def control_ids(name: str, ids: TokenIds | list[int]) -> list[int]:
    """Return the ids of control tokens in `ids`, in order."""
    tokenizer = toyvocab.renderer(name).tokenizer
    known = {tokenizer.token_id(token) for token in toyvocab.control_tokens(name)}
    return [number for number in np.asarray(ids).tolist() if number in known]


def ids_of(name: str, text: str) -> list[int]:
    ids: list[int] = toyvocab.renderer(name).encode_raw(text).tolist()
    return ids


def opening(name: str) -> list[int]:
    """Return a prompt whose last turn is the user's."""
    ids: list[int] = toyvocab.renderer(name).render(ASKED, TOOLS).tolist()
    return ids


# --- the table -----------------------------------------------------------------------------------
def test_every_family_that_may_be_chosen_is_tried_here() -> None:
    tried = {name for name, family in FAMILIES.items() if family.proof is not Proof.NOT_RUN}
    assert tried == {*NAMES, *SAME_AS}
    assert set(SAME_AS.values()) <= set(NAMES)


def test_a_hub_id_belongs_to_one_family() -> None:
    ids = [model for family in FAMILIES.values() for model in family.models]
    assert len(ids) == len(set(ids))
    assert all(model.count("/") == 1 for model in ids)


@pytest.mark.parametrize("name", [*NAMES, *SAME_AS])
def test_self_test_passes_from_a_file(name: str, tmp_path: Path) -> None:
    toyvocab.vocabulary(name).save(str(tmp_path / "tokenizer.json"))
    assert load_renderer(tmp_path, name).stop_token_ids == toyvocab.renderer(name).stop_token_ids


@every_family
def test_a_vocabulary_without_one_of_the_family_s_tokens_is_refused_by_its_name(
    name: str, tmp_path: Path
) -> None:
    tokens = toyvocab.control_tokens(name)
    needed = [token for token in tokens if token in FAMILIES[name].tokens]
    for lacking in (needed[0], needed[-1]):
        file = tmp_path / "tokenizer.json"
        toyvocab.vocabulary(name).save(str(file))
        spelled = json.dumps(lacking, ensure_ascii=False)[1:-1]
        file.write_text(file.read_text().replace(f'"{spelled}"', '"<another>"'))
        with pytest.raises(ConfigError, match=re.escape(lacking)):
            load_renderer(file, name)


@pytest.mark.parametrize("lacking", ["<|vision_start|>", "<|media_pad|>"])
def test_a_token_that_only_the_package_looks_up_is_refused_by_its_name(lacking: str) -> None:
    name = "qwen3.5" if "vision" in lacking else "kimi-k2.5"
    text = toyvocab.vocabulary(name).to_str().replace(f'"{lacking}"', '"<another>"')
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(text), "mine", ())
    with pytest.raises(ConfigError, match=re.escape(lacking)):
        RenderersBackend.of_family(tokenizer, FAMILIES[name], name)


@every_family
def test_tool_cycles_are_equal_to_the_whole_rendering(name: str) -> None:
    family = FAMILIES[name]
    checked = self_test(toyvocab.renderer(name), name, **family.traits)
    first = checked[:2]
    assert [turn.roles for turn in first] == [("tool",) * len(parallel(name)), ("tool",)]
    # R1's template leaves reasoning out as soon as a turn is over.
    expected = Kind.APPEND_ONLY if name == "deepseek-r1" else Kind.EQUAL
    assert {turn.kind for turn in first} == {expected}


# --- append-only ---------------------------------------------------------------------------------
ROUNDS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"reasoning": "Hm.", "content": "I look.", "calls": True}, [result("born\n"), result("", 1)]),
    ({"reasoning": "Ah.", "content": "Born."}, [{"role": "user", "content": " Sure?\n"}]),
    (
        {"reasoning": "Again.", "calls": True},
        [result("yes"), result("no", 1), {"role": "user", "content": "Go on."}],
    ),
]


@every_family
def test_three_rounds_are_append_only_and_end_as_the_whole_rendering_ends(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    messages, held = list(ASKED), opening(name)
    for told, following in ROUNDS:
        turn = told | ({"calls": parallel(name)} if told.get("calls") else {})
        if name == "llama-3" and turn.get("calls"):
            turn.pop("content", None)  # a call is the whole reply
        new = [
            m for m in following if FAMILIES[name].parallel_calls or m != result(m["content"], 1)
        ]
        reply = ids_of(name, spelling.turn(**turn))
        suffix = extended(renderer, held, reply, new)
        messages = [*messages, said(name, **turn), *new]
        whole = renderer.render(messages, TOOLS).tolist()
        end = reply[-1:] if spelling.answer_end.startswith("<|user") else []
        assert whole[-len(suffix) - len(end) :] == end + suffix
        held = [*held, *reply, *suffix]
        parsed = renderer.parse(as_ids(reply), as_ids(held[: -len(reply + suffix)]), TOOLS)
        assert not parsed.abnormal_end
        assert [call.problem for call in parsed.tool_calls] == [None] * len(turn.get("calls", []))


@every_family
def test_late_system_and_developer_messages_render_as_in_the_whole_or_are_refused(
    name: str,
) -> None:
    renderer = toyvocab.renderer(name)
    held, reply = opening(name), ids_of(name, SPELLINGS[name].turn(content="Born."))
    answer = said(name, content="Born.")
    for role in ("system", "developer"):
        new = [{"role": role, "content": "Now in French."}, {"role": "user", "content": "And?"}]
        if name in ONLY_FIRST:
            with pytest.raises(MergeFault, match=r"message 0: .*system message only as the first"):
                extended(renderer, held, reply, new)
            with pytest.raises(ValueError, match=r"message 3: .*system message only as the first"):
                renderer.render([*ASKED, answer, *new], TOOLS)
            continue
        suffix = extended(renderer, held, reply, new)
        assert renderer.render([*ASKED, answer, *new], TOOLS).tolist()[-len(suffix) :] == suffix
        assert text_of(renderer, suffix).count("Now in French.") == 1


@every_family
def test_a_leading_developer_message_is_the_system_message(name: str) -> None:
    renderer = toyvocab.renderer(name)
    as_developer = [{**ASKED[0], "role": "developer"}, *ASKED[1:]]
    assert renderer.render(as_developer, TOOLS).tolist() == opening(name)


@every_family
def test_begin_tokens_stand_once_at_the_start_and_in_no_suffix(name: str) -> None:
    begins = {
        "deepseek": ["<｜begin▁of▁sentence｜>"], "llama-3": ["<|begin_of_text|>"],
        "glm": ["[gMASK]", "<sop>"], "minimax": ["]~!b["],
    }  # fmt: skip
    mine = next((tokens for start, tokens in begins.items() if name.startswith(start)), [])
    renderer = toyvocab.renderer(name)
    numbers = [renderer.tokenizer.token_id(token) for token in mine]
    prompt = opening(name)
    reply = ids_of(name, SPELLINGS[name].turn(content="Born."))
    suffix = extended(renderer, prompt, reply, [{"role": "user", "content": "Sure?"}])
    assert prompt[: len(numbers)] == numbers
    assert all(prompt.count(number) == 1 and number not in suffix for number in numbers)


# --- ends that are unusual -----------------------------------------------------------------------
def closing_of(name: str) -> list[int]:
    """Return what stands behind a turn that did not close itself."""
    family = FAMILIES[name]
    return ids_of(name, family.close) if family.close else []


@every_family
def test_a_reply_that_was_cut_is_closed_and_keeps_every_id(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    new = [{"role": "user", "content": "Go on."}]
    held = opening(name)
    whole = spelling.turn(content="Bor")
    behind = extended(renderer, held, ids_of(name, whole), new)
    if not closing_of(name):
        behind = ids_of(name, "<|user|>") + behind  # which the whole turn had sampled
    cut = ids_of(name, whole.removesuffix(spelling.answer_end))
    assert extended(renderer, held, cut, new) == closing_of(name) + behind
    assert renderer.parse(as_ids(cut), as_ids(held)).abnormal_end


@pytest.mark.parametrize("name", [n for n in NAMES if SPELLINGS[n].reasons])
def test_a_reply_that_was_cut_inside_reasoning_gets_its_marker_and_a_close(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    new = [{"role": "user", "content": "Go on."}]
    for held in (opening(name), after_tools(name)):
        cut = ids_of(name, ("" if spelling.opened else spelling.think[0]) + "I think th")
        suffix = extended(renderer, held, cut, new)
        marker = [] if spelling.answer else ids_of(name, spelling.think[1])
        close = closing_of(name)
        assert suffix[: len(marker + close)] == marker + close
        assert renderer.parse(as_ids(cut), as_ids(held)).reasoning == "I think th"
        assert renderer.parse(as_ids(cut), as_ids(held)).content == ""


@every_family
def test_a_reply_that_was_cut_inside_a_call_is_closed_behind_it(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    held, new = opening(name), [{"role": "user", "content": "Go on."}]
    whole = ids_of(name, spelling.turn(reasoning="Hm.", calls=[("look", {"word": "né"})]))
    for end in range(len(whole) - 1, len(whole) - 12, -1):
        suffix = extended(renderer, held, whole[:end], new)
        assert "Go on." in text_of(renderer, suffix)
        close = closing_of(name)
        if not spelling.answer:
            assert suffix[: len(close)] == close
        found = renderer.parse(as_ids(whole[:end]), as_ids(held), TOOLS)
        assert found.abnormal_end
        assert all(call.problem or call.name == "look" for call in found.tool_calls)


@every_family
def test_another_stop_id_and_text_behind_the_close_stay_and_a_close_follows(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    held, new = opening(name), [{"role": "user", "content": "Go on."}]
    family = FAMILIES[name]
    ends = {ids_of(name, token)[0] for token in (family.closes or (family.close,))}
    others = [number for number in renderer.stop_token_ids if number not in ends]
    whole = ids_of(name, spelling.turn(content="Born."))
    behind = [[*whole[:-1], other] for other in others] + [whole + ids_of(name, " and")]
    for reply in behind:
        suffix = extended(renderer, held, reply, new)
        assert suffix[: len(closing_of(name))] == closing_of(name)
        assert text_of(renderer, suffix).count("Go on.") == 1


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("glm")])
def test_134_glm_the_sampled_role_token_is_the_next_message_s(name: str) -> None:
    renderer = toyvocab.renderer(name)
    user, observation, end = (
        ids_of(name, token)[0] for token in ("<|user|>", "<|observation|>", "<|endoftext|>")
    )
    held, body = opening(name), ids_of(name, SPELLINGS[name].turn(content="Born."))[:-1]
    asks, results = [{"role": "user", "content": "Sure?"}], [result("born")]
    for new, own, other in ((asks, user, observation), (results, observation, user)):
        suffix = extended(renderer, held, [*body, own], new)
        assert suffix[0] not in (user, observation)
        assert extended(renderer, held, body, new) == [own, *suffix]
        assert extended(renderer, held, [*body, end], new) == [own, *suffix]
        assert extended(renderer, held, [*body, other], new) == [own, *suffix]


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("gpt-oss")])
def test_gpt_oss_ends_stay_as_sampled_and_results_need_their_function(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    held = opening(name)
    answer = ids_of(name, spelling.turn(reasoning="Hm.", content="Born."))
    call = ids_of(name, spelling.turn(reasoning="Hm.", calls=[("look", {"word": "né"})]))
    user = extended(renderer, held, answer, [{"role": "user", "content": "Sure?"}])
    assert text_of(renderer, user) == ("<|start|>user<|message|>Sure?<|end|><|start|>assistant")
    named = extended(renderer, held, call, [result("born")])
    assert text_of(renderer, named) == (
        "<|start|>functions.look to=assistant<|channel|>commentary<|message|>born<|end|>"
        "<|start|>assistant"
    )
    assert extended(renderer, held, call, [{"role": "tool", "content": "born"}]) == named
    nameless = extended(renderer, held, answer, [{"role": "tool", "content": "born"}])
    assert "functions.unknown" in text_of(renderer, nameless)


@pytest.mark.parametrize(
    ("sampled", "closing"),
    [
        ("", "<|channel|>final<|message|><|end|>"),
        (" to=functions.look", "<|channel|>final<|message|><|end|>"),
        ("<|channel|>ana", "<|message|><|end|>"),
        ("<|channel|>analysis<|message|>Hm", "<|end|>"),
        ("<|channel|>analysis<|message|>Hm<|end|>", ""),
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assi",
            "<|channel|>final<|message|><|end|>",
        ),
        ("<|channel|>final<|message|>Born<|return|> no", "<|end|>"),
    ],
)
def test_gpt_oss_a_turn_that_was_cut_becomes_whole_messages(sampled: str, closing: str) -> None:
    renderer = toyvocab.renderer("gpt-oss")
    suffix = extended(
        renderer,
        opening("gpt-oss"),
        ids_of("gpt-oss", sampled),
        [{"role": "system", "content": "S"}],
    )
    assert text_of(renderer, suffix) == (
        f"{closing}<|start|>developer<|message|># Instructions\n\nS<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("end", ["", "<|end|>", "<|return|>", "<|start|>"])
def test_gpt_oss_a_call_without_its_own_end_is_not_executed(end: str) -> None:
    renderer = toyvocab.renderer("gpt-oss")
    call = '<|channel|>commentary to=functions.look<|message|>{"word": "né"}'
    found = renderer.parse(as_ids(ids_of("gpt-oss", call + end)), as_ids(opening("gpt-oss")), TOOLS)
    assert [(one.name, one.problem) for one in found.tool_calls] == [("look", ProblemKind.UNCLOSED)]


# --- control strings -----------------------------------------------------------------------------
@every_family
def test_control_strings_of_anybody_s_text_are_never_control_ids(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    plain = [
        {"role": "system", "content": "S"}, {"role": "user", "content": "U"},
        said(name, reasoning="R", content="A", calls=[("look", {"word": "W"})]),
        {**result("T"), "content": "T"},
    ]  # fmt: skip
    if name == "llama-3":
        plain[2]["content"] = ""
    specs = json.loads(json.dumps(TOOLS).replace("Look a word up.", "D"))
    expected = control_ids(name, renderer.render(plain, specs))
    for token in toyvocab.control_tokens(name):

        def evil(value: Any, token: str = token) -> Any:
            text = json.dumps(value)
            for letter in "SURWTD":
                text = text.replace(f'"{letter}"', json.dumps(letter + token + letter))
            return json.loads(text)

        messages, tools = evil(plain), evil(specs)
        whole = renderer.render(messages, tools)
        assert control_ids(name, whole) == expected, token
        assert renderer.decode(whole).count(f"U{token}U") == 1
        held, reply = opening(name), ids_of(name, spelling.turn(content="Born."))
        for new in (messages[1:2], messages[3:]):
            quiet = plain[1:2] if new[0]["role"] == "user" else plain[3:]
            assert control_ids(name, extended(renderer, held, reply, new)) == control_ids(
                name, extended(renderer, held, reply, quiet)
            )


# --- calls ---------------------------------------------------------------------------------------
@every_family
def test_calls_parse_in_order_with_what_was_said_before_them(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    content = "" if name == "llama-3" else "I look."
    calls = parallel(name)
    reply = ids_of(name, spelling.turn(reasoning="Hm.", content=content, calls=calls))
    for held in (opening(name), after_tools(name)):
        found = renderer.parse(as_ids(reply), as_ids(window_of(renderer, held)), TOOLS)
        assert [(call.name, call.arguments, call.problem) for call in found.tool_calls] == [
            (function, arguments, None) for function, arguments in calls
        ]
        assert found.content == content
        assert (found.reasoning or "") == ("Hm." if spelling.reasons else "")
        assert not found.abnormal_end


BROKEN = [(name, what) for name in NAMES for what in SPELLINGS[name].broken]


@pytest.mark.parametrize(("name", "what"), BROKEN)
def test_a_malformed_call_is_a_problem_and_is_not_lost(name: str, what: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    end = spelling.calls_end
    opened = spelling.think[1] if spelling.opened else ""
    reply = ids_of(name, f"{opened}{spelling.broken[what]}{end}")
    found = renderer.parse(as_ids(reply), as_ids(opening(name)), TOOLS)
    assert len(found.tool_calls) == 1
    call = found.tool_calls[0]
    assert isinstance(call.problem, ProblemKind)
    assert call.problem_text
    assert call.raw
    suffix = extended(renderer, opening(name), reply, [result("wrong")])
    assert "wrong" in text_of(renderer, suffix)


@pytest.mark.parametrize("name", [n for n in NAMES if SPELLINGS[n].reasons])
def test_a_call_inside_reasoning_is_reasoning(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    if spelling.answer:
        pytest.skip("a call is a message of its own")
    draft = spelling.calls([("look", {"word": "né"})])
    opener = "" if spelling.opened else spelling.think[0]
    for held in (opening(name), after_tools(name)):
        for text, content in (
            (f"{opener}Hm {draft} no{spelling.think[1]}Born.{spelling.answer_end}", "Born."),
            (f"{opener}Hm {draft}{spelling.answer_end}", ""),
            (f"{opener}Hm {draft}", ""),
        ):
            found = renderer.parse(as_ids(ids_of(name, text)), as_ids(held), TOOLS)
            assert (found.tool_calls, found.content) == ([], content)
            assert "Hm" in (found.reasoning or "")
            assert "look" in (found.reasoning or "")


MARKERLESS = ("gpt-oss", "llama-3")
"""Families without markers of reasoning: channels, and none at all."""
marked = pytest.mark.parametrize("name", [n for n in NAMES if n not in MARKERLESS])


def late_blocks(name: str) -> list[tuple[str, str, str, list[str]]]:
    """Return (reply, content, what the reasoning ends with, words of the good calls)."""
    spelling = SPELLINGS[name]
    draft, call = (spelling.calls([("look", {"word": word})]) for word in ("né", "nu"))
    end, calls_end = spelling.answer_end, spelling.calls_end
    first = ("" if spelling.opened else "<think>") + "a</think>"
    found = [
        (f"{first}b<think>c {draft}{calls_end}", "b", "look", []),
        (f"{first}b<think>c {draft}", "b", "look", []),
        (f"{first}b<think>c {draft}</think>d{end}", "b\nd", "look", []),
        (f"{first}b<think>c {draft}</think>{call}{calls_end}", "b", "look", ["nu"]),
        (f"{first}{call}<think>c {draft}{calls_end}", "", "look", ["nu"]),
        (f"{first}b<think>c<think>{draft}</think>d{end}", "b\nd", "look", []),
        (f"{first}b</think>{call}{calls_end}", "b</think>", "a", ["nu"]),
        (f"{first}b<think>{end}", "b", "a", []),
    ]
    if not spelling.opened:
        found += [
            (f"x <think>c {draft}{calls_end}", "x", "look", []),
            (f"x <think>c {draft}</think>{call}{calls_end}", "x", "look", ["nu"]),
        ]
    return found


@marked
def test_a_call_inside_a_later_block_is_reasoning_whether_the_block_ends_or_not(name: str) -> None:
    renderer = toyvocab.renderer(name)
    for held in (opening(name), after_tools(name)):
        for text, content, thought, words in late_blocks(name):
            tail = as_ids(window_of(renderer, held))
            found = renderer.parse(as_ids(ids_of(name, text)), tail, TOOLS)
            calls = [(call.arguments.get("word"), call.problem) for call in found.tool_calls]
            assert calls == [(word, None) for word in words], text
            assert found.content == content, text
            assert thought in (found.reasoning or ""), text
            assert "<think>" not in (found.reasoning or "")


@marked
def test_a_block_inside_a_call_leaves_no_call_with_other_arguments(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    first = "a</think>" if spelling.opened else ""
    for inside in ("n<think>hm</think>u", "n<think>u"):
        text = first + spelling.calls([("look", {"word": inside})]) + spelling.calls_end
        found = renderer.parse(as_ids(ids_of(name, text)), as_ids(opening(name)), TOOLS)
        assert found.tool_calls, "an attempt is never lost"
        assert all(call.problem for call in found.tool_calls)


@marked
def test_a_reply_that_was_cut_inside_a_later_block_gets_its_marker_and_a_close(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    held, new = opening(name), [{"role": "user", "content": "Go on."}]
    cut = ids_of(name, ("a</think>" if spelling.opened else "") + "b<think>c")
    closing = ids_of(name, "</think>") + closing_of(name)
    assert extended(renderer, held, cut, new)[: len(closing)] == closing
    closed = [*cut, *ids_of(name, "</think>d")]
    assert extended(renderer, held, closed, new)[: len(closing)] != closing


@pytest.mark.parametrize("name", MARKERLESS)
def test_what_looks_like_a_late_block_is_no_call_where_a_family_has_no_markers(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    draft = spelling.calls([("look", {"word": "né"})])
    reply = ids_of(name, f"{spelling.answer}b<think>c {draft}{spelling.calls_end}")
    found = renderer.parse(as_ids(reply), as_ids(opening(name)), TOOLS)
    assert [call for call in found.tool_calls if call.problem is None] == []


@pytest.mark.parametrize(
    "start", ["", "<|channel|>analysis<|message|>a<|end|><|start|>assistant",
              "<|channel|>commentary<|message|>b<|end|><|start|>assistant"],
)  # fmt: skip
def test_gpt_oss_a_call_that_begins_inside_reasoning_is_reasoning(start: str) -> None:
    renderer, held = toyvocab.renderer("gpt-oss"), as_ids(opening("gpt-oss"))
    draft = SPELLINGS["gpt-oss"].calls([("look", {"word": "né"})])
    thinks = f"{start}<|channel|>analysis<|message|>Hm"
    for between in (" ", "<|start|>assistant"):
        text = f"{thinks}{between}{draft}<|call|>"
        found = renderer.parse(as_ids(ids_of("gpt-oss", text)), held, TOOLS)
        assert found.tool_calls == []
        assert found.content == ("b" if "commentary" in start else "")
        assert "look" in (found.reasoning or "")
    whole = renderer.parse(
        as_ids(ids_of("gpt-oss", f"{thinks}<|end|><|start|>assistant{draft}<|call|>")), held, TOOLS
    )
    assert [call.problem for call in whole.tool_calls] == [None]
    cut = renderer.parse(as_ids(ids_of("gpt-oss", thinks)), held, TOOLS)
    assert cut.content == ("b" if "commentary" in start else "")


@pytest.mark.parametrize("name", ["qwen3", "glm-5", "deepseek-r1"])
def test_a_reply_of_many_blocks_is_read_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = toyvocab.renderer(name)
    seen: list[int] = []
    decode = renderer.tokenizer.decode

    def counted(ids: Any, **options: Any) -> str:
        seen.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(renderer.tokenizer, "decode", counted)
    counts = []
    for blocks in (50, 100):
        seen.clear()
        reply = ids_of(name, "a</think>b<think>" * blocks)
        renderer.parse(as_ids(reply), as_ids(opening(name)), TOOLS)
        counts.append(sum(seen))
    assert counts[1] < 2.2 * counts[0]


@every_family
def test_a_spelled_marker_begins_no_call(name: str) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    if name == "llama-3":
        pytest.skip("its calls have no marker")
    written = renderer.encode(spelling.calls([("look", {"word": "né"})])).tolist()
    opened = ids_of(name, spelling.think[1] if spelling.opened else "")
    reply = [*opened, *ids_of(name, spelling.answer), *written, *ids_of(name, spelling.answer_end)]
    found = renderer.parse(as_ids(reply), as_ids(opening(name)), TOOLS)
    assert found.tool_calls == []
    assert "look" in found.content


# --- what people write in many ways --------------------------------------------------------------
@every_family
def test_absent_content_and_empty_calls_render_alike_and_never_say_none(name: str) -> None:
    renderer = toyvocab.renderer(name)
    behind = {"role": "user", "content": "Go on."}
    ways: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "assistant", "content": "", "tool_calls": None},
    ]
    rendered = {tuple(renderer.render([*ASKED, way, behind], TOOLS).tolist()) for way in ways}
    assert len(rendered) == 1
    texts: list[dict[str, Any]] = [
        {"role": "user", "content": "né\nnu"},
        {"role": "user", "content": ["né", {"type": "text", "text": "\nnu"}]},
    ]
    rendered |= {tuple(renderer.render([*ASKED, text], TOOLS).tolist()) for text in texts}
    assert len(rendered) == 2
    empty = [{"role": "tool", "name": "look", "tool_call_id": "functions.look:0", **more}
             for more in ({"content": None}, {}, {"content": ""}, {"content": []})]  # fmt: skip
    reply = ids_of(name, SPELLINGS[name].turn(calls=[("look", {"word": "né"})]))
    suffixes = {tuple(extended(renderer, opening(name), reply, [one])) for one in empty}
    assert len(suffixes) == 1
    for ids in [*rendered, *suffixes]:
        assert "None" not in text_of(renderer, list(ids))
        assert "null" not in text_of(renderer, list(ids))


@every_family
def test_arguments_as_object_or_text_render_alike_and_other_ones_are_not_lost(name: str) -> None:
    renderer = toyvocab.renderer(name)

    def rendered(**function: Any) -> str:
        call = {
            "id": "functions.look:0",
            "type": "function",
            "function": {"name": "look", **function},
        }
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        ids = renderer.render([*ASKED, turn, result("born")], TOOLS).tolist()
        assert "None" not in text_of(renderer, ids)
        return text_of(renderer, ids)

    assert rendered(arguments={"word": "né"}) == rendered(arguments='{"word": "né"}')
    assert rendered(arguments={}) == rendered() == rendered(arguments=None)
    for other, shown in (("look né up", "look né up"), ([1, "né"], "né"), (7, "7"), ("", "")):
        assert shown in rendered(arguments=other)
    assert "look né up" in rendered(arguments="look né up")


# --- anything ------------------------------------------------------------------------------------
@every_family
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_ids_of_a_reply_are_kept_and_read_without_an_exception(
    name: str, data: st.DataObject
) -> None:
    renderer, spelling = toyvocab.renderer(name), SPELLINGS[name]
    controls = [renderer.tokenizer.token_id(t) or 0 for t in toyvocab.control_tokens(name)]
    pieces = ids_of(name, spelling.turn(reasoning="Hm", content="I", calls=parallel(name)))
    some = st.one_of(st.sampled_from(controls), st.integers(300, 618), st.sampled_from(pieces)).map(
        lambda number: [number]
    )
    spans = st.tuples(st.integers(0, len(pieces)), st.integers(0, len(pieces))).map(
        lambda ends: pieces[min(ends) : max(ends)]
    )
    reply = [n for piece in data.draw(st.lists(some | spans, max_size=12)) for n in piece]
    held = data.draw(st.sampled_from([opening(name), after_tools(name)]))
    found = renderer.parse(as_ids(reply), as_ids(held), TOOLS)
    assert isinstance(found.content, str)
    assert all(call.problem or call.name for call in found.tool_calls)
    for new in ([result("born")], [{"role": "user", "content": "Go on."}]):
        suffix = extended(renderer, held, reply, new)
        ends = "".join(str(message["content"]) for message in new)
        assert ends in text_of(renderer, suffix)


def after_tools(name: str) -> list[int]:
    """Return what is held before a reply that follows a tool result."""
    renderer = toyvocab.renderer(name)
    prompt = opening(name)
    reply = ids_of(name, SPELLINGS[name].turn(reasoning="So.", calls=[("look", {"word": "né"})]))
    return [*prompt, *reply, *extended(renderer, prompt, reply, [result("born")])]


def _named(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a conversation and tools in which a function and an argument have this name."""
    parameters = {
        "type": "object",
        "properties": {name: {"type": "string", "z": {name: "d"}}},
        "required": [name],
    }
    call = {"name": name, "arguments": {name: "né", "n": 1}}
    return [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "functions.look:0", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "functions.look:0", "name": name, "content": "born"},
    ], [{"type": "function", "function": {"name": name, "parameters": parameters}}]


@pytest.mark.parametrize("name", NAMES)
def test_names_make_no_control_id_with_what_the_template_writes_beside_them(name: str) -> None:
    renderer = toyvocab.renderer(name)
    plain = renderer.render(*_named("zz"))
    wanted = [number for number in plain.tolist() if number in renderer.control_ids]
    for token in toyvocab.control_tokens(name):
        for named in (token, f"x{token[:-1]}", f"{token[1:]}x", token.strip("<>[]{}|｜")):
            ids = renderer.render(*_named(named))
            assert [n for n in ids.tolist() if n in renderer.control_ids] == wanted, named
            assert renderer.decode(ids) == renderer.decode(plain).replace("zz", named)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_control_tokens_have_the_ids_of_the_whole_text(name: str) -> None:
    renderer = toyvocab.renderer(name)
    for token in toyvocab.control_tokens(name):
        inside = token.strip("<>[]{}|｜/")
        ids = renderer.render(*_named(inside))
        assert ids.tolist() == renderer.encode_raw(renderer.decode(ids)).tolist(), inside


def test_gpt_oss_shows_a_required_argument_as_required_whatever_its_name() -> None:
    renderer = toyvocab.renderer("gpt-oss")
    for named in ("word", "message", "call"):
        text = renderer.decode(renderer.render(*_named(named)))
        assert f"\n{named}: string,\n" in text


def test_nemotron_writes_a_key_of_a_schema_between_brackets_and_no_marker_comes_of_it() -> None:
    renderer = toyvocab.renderer("nemotron-3")
    for named in ("think", "/think", "tool_call>"):
        properties = {"word": {"type": "string", named: "d"}}
        parameters = {"type": "object", "properties": properties}
        specs = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
        ids = renderer.render([{"role": "user", "content": "?"}], specs)
        assert f"<{named}>d</{named}>" in renderer.decode(ids)
        plain = renderer.render([{"role": "user", "content": "?"}], _TOOLS_WITHOUT)
        count = [sum(n in renderer.control_ids for n in one.tolist()) for one in (ids, plain)]
        assert count[0] == count[1]


_TOOLS_WITHOUT = _named("look")[1]
