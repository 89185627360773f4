"""A reply as its client gets it while it is sampled: the same message however it was cut.

Over every family, with its toy vocabulary, and over chat templates whose markers are tokens or
text; what is streamed is held against `reply_message(parse(all ids))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import toy
from tests.unit.tito.families import toyvocab
from tests.unit.tito.families.spelling import NAMES, SAME_AS, SPELLINGS
from tests.unit.tito.families.test_every_family import TOOLS, after_tools, ids_of, opening, parallel
from tests.unit.tito.template.folder import backend
from tests.unit.tito.template.test_parse import wordy
from worker.gateway.growing import GrowingReply, StreamDiverged
from worker.gateway.reply import reply_message
from worker.gateway.types import CallRule, Delta
from worker.tito.backend import RenderersBackend
from worker.tito.deltas import CallGatherer
from worker.tito.ids import as_ids
from worker.types import Renderer

pytestmark = pytest.mark.xdist_group("families")

EMOJI = "né 🎉 👩‍👩‍👧 日本"


def joined(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the message that a client has in the end."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    gatherer = CallGatherer()
    for delta in deltas:
        assert len(delta) == 1, "one thing at a time"
        assert all(delta.values()), "nothing empty"
        for name in ("reasoning_content", "content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        gatherer.add(delta.get("tool_calls"))
    if calls := gatherer.calls():
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def streamed(
    renderer: Renderer,
    held: list[int],
    ids: list[int],
    size: int = 1,
    rule: CallRule = CallRule.AUTO,
    max_calls: int | None = None,
) -> tuple[list[Delta], dict[str, Any]]:
    """Return what came before the end, and the message; all deltas together are the message."""
    window = as_ids(held)
    growing = GrowingReply(renderer, window)
    early = [
        delta for at in range(0, len(ids), size) for delta in growing.feed(ids[at : at + size])
    ]
    message = reply_message(renderer.parse(as_ids(ids), window, TOOLS), rule, max_calls)
    late = growing.finish(message)
    assert all("tool_calls" not in delta for delta in early)
    assert joined([*early, *late]) == message
    kinds = [name for delta in late for name in delta]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    return early, message


# --- replies -------------------------------------------------------------------------------------
def texts_of(name: str) -> list[str]:
    """Return what models of a family write, good and bad."""
    spelling = SPELLINGS[name]
    opener, closer = spelling.think
    draft = spelling.calls([("look", {"word": EMOJI})])
    return [
        "Hm", EMOJI, " I look.\n\n", "\n", "a<b </", "<", "{", '{"name": "x"', "\ufdd0", "\ufffd",
        "<think>", "</think>", opener, closer, spelling.answer, spelling.answer_end,
        spelling.calls(parallel(name)), draft, *spelling.broken.values(),
        f"{opener}Hm {draft} no{closer}",
        spelling.turn(reasoning=f"Hm {EMOJI}", content=f"I {EMOJI}\nlook.", calls=parallel(name)),
        spelling.turn(reasoning="Hm.", content=f"No {EMOJI}. "),
    ]  # fmt: skip


def replies(
    raw: Callable[[str], list[int]],
    plain: Callable[[str], list[int]],
    texts: list[str],
    odd: list[int],
) -> st.SearchStrategy[list[int]]:
    """Return replies of pieces: with markers, as characters only, cut anywhere, of any ids."""
    whole = st.sampled_from([raw(text) for text in texts])
    cut = st.tuples(whole, st.integers(0, 99), st.integers(0, 99)).map(
        lambda given: given[0][given[1] % (len(given[0]) + 1) :][: given[2]]
    )
    characters = st.sampled_from([plain(text) for text in texts])
    some = st.lists(st.sampled_from(odd), max_size=3)
    return st.lists(whole | characters | cut | some, max_size=6).map(
        lambda pieces: [number for piece in pieces for number in piece]
    )


@cache
def family(name: str) -> tuple[RenderersBackend, list[list[int]], st.SearchStrategy[list[int]]]:
    """Return a family's renderer, what may stand before a reply, and replies."""
    base = SAME_AS.get(name, name)
    renderer = toyvocab.renderer(name)
    tokens = [renderer.tokenizer.token_id(one) or 0 for one in toyvocab.control_tokens(name)]
    odd = [*tokens, *range(300, 619, 7), 300 + 0xF0, 300 + 0x9F, 300 + 0xC3, 300 + 0xFF, 99_999]
    helds = [opening(name)] + ([after_tools(name)] if base == name else [])

    def plain(text: str) -> list[int]:
        ids: list[int] = renderer.encode(text).tolist()
        return ids

    return renderer, helds, replies(lambda text: ids_of(name, text), plain, texts_of(base), odd)


every_family = pytest.mark.parametrize("name", [*NAMES, *SAME_AS])
SIZES = st.sampled_from([1, 2, 5, 16, 1000])
RULES = st.sampled_from([(CallRule.AUTO, None), (CallRule.AUTO, 1), (CallRule.NONE, None)])


@every_family
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_message_for_any_reply_however_it_is_cut(
    name: str, data: st.DataObject
) -> None:
    renderer, helds, some = family(name)
    ids, held = data.draw(some), data.draw(st.sampled_from(helds))
    rule, max_calls = data.draw(RULES)
    streamed(renderer, held, ids, data.draw(SIZES), rule, max_calls)


@every_family
def test_a_stream_is_the_message_for_what_models_write_stopped_anywhere(name: str) -> None:
    renderer, helds, _ = family(name)
    spelling = SPELLINGS[SAME_AS.get(name, name)]
    text = spelling.turn(
        reasoning=f"Hm {EMOJI}. ", content=f"I {EMOJI}.", calls=parallel(SAME_AS.get(name, name))
    )
    ids = ids_of(name, text)
    for end in range(0, len(ids) + 1, 3):
        streamed(renderer, helds[0], ids[:end])
    for whole in texts_of(SAME_AS.get(name, name)):
        streamed(renderer, helds[0], ids_of(name, whole), max_calls=1)
    _, message = streamed(renderer, helds[0], ids)
    assert message.get("tool_calls") or name == "llama-3"


@every_family
def test_an_answer_really_streams_and_no_character_comes_in_pieces(name: str) -> None:
    renderer, helds, _ = family(name)
    spelling = SPELLINGS[SAME_AS.get(name, name)]
    if "no-thinking" in name and spelling.reasons:
        pytest.skip("spelled as its family with reasoning is")
    said = f"The answer {EMOJI} is 42. " * 4
    ids = ids_of(name, spelling.turn(reasoning=said, content=said))
    early, message = streamed(renderer, helds[0], ids)
    kinds = ["content", "reasoning_content"] if spelling.reasons else ["content"]
    for kind in kinds:
        pieces = [delta[kind] for delta in early if kind in delta]
        assert "".join(pieces) == message[kind] == said.strip()
        assert len(pieces) > 40
        assert not any("\ufffd" in piece for piece in pieces)


@every_family
def test_content_in_front_of_a_call_comes_before_the_call_is_there(name: str) -> None:
    renderer, helds, _ = family(name)
    spelling = SPELLINGS[SAME_AS.get(name, name)]
    if name == "llama-3" or ("no-thinking" in name and spelling.reasons):
        pytest.skip("its calls are a whole reply, or it is spelled as its family with reasoning is")
    text = spelling.turn(
        reasoning="Hm.", content="I look.", calls=parallel(SAME_AS.get(name, name))
    )
    early, message = streamed(renderer, helds[0], ids_of(name, text))
    assert "".join(delta.get("content", "") for delta in early) == "I look."
    assert message["content"] == "I look."
    assert len(message["tool_calls"]) == len(parallel(SAME_AS.get(name, name)))


HARMONY_ANALYSIS = "<|channel|>analysis<|message|>"
HARMONY_FINAL = "<|channel|>final<|message|>"
HARMONY_NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{HARMONY_ANALYSIS}a<|start|>assistant{HARMONY_FINAL}b{HARMONY_NEXT}{HARMONY_FINAL}c",
         f"a<|start|>assistant{HARMONY_FINAL}b", "c"),
        (f"{HARMONY_ANALYSIS}a{HARMONY_NEXT}{HARMONY_ANALYSIS}b", "a\nb", ""),
        (f"{HARMONY_ANALYSIS}a{HARMONY_NEXT}{HARMONY_ANALYSIS} {HARMONY_NEXT}{HARMONY_ANALYSIS}b",
         "a\n \nb", ""),
        (f"{HARMONY_FINAL}a {HARMONY_NEXT}{HARMONY_FINAL} b <|return|>c", None, "a  b"),
        (f"{HARMONY_FINAL}a<|start|>assistant{HARMONY_FINAL}b", None, "ab"),
        (f"{HARMONY_FINAL}a<|message|>b<|channel|>c", None, "a<|message|>b<|channel|>c"),
        (f"<|channel|>final{HARMONY_NEXT}{HARMONY_FINAL}b", None, "<|channel|>finalb"),
        ("<|channel|>analysis", None, "<|channel|>analysis"),
        (f"{HARMONY_FINAL}a<|end|><|end|><|start|><|start|>{HARMONY_FINAL}b", None, "ab"),
        (f"<|channel|>commentary<|message|>a{HARMONY_NEXT}", None, "aassistant"),
    ],
)  # fmt: skip
def test_gpt_oss_its_messages_are_told_as_they_are_sampled(
    text: str, reasoning: str | None, content: str
) -> None:
    renderer, helds, _ = family("gpt-oss")
    for size in (1, 3, 1000):
        early, message = streamed(renderer, helds[0], ids_of("gpt-oss", text), size)
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
        if content == "ab":
            assert joined(early) == message


# --- chat templates ------------------------------------------------------------------------------
DEEPSEEK = [f"<｜tool▁{part}｜>" for part in
            ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]  # fmt: skip
TEMPLATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "no parser": (backend, {}),
    "no reasoning": (backend, {"reasoning_parser": "none"}),
    "json by id": (backend, {"tool_parser": "qwen3"}),
    "json by text": (wordy, {"tool_parser": "hermes"}),
    "all by text": (wordy, {"tool_parser": "hermes", "reasoning_parser": "think"}),
    "tags": (backend, {"tool_parser": "qwen3.5", "reasoning_parser": "think"}),
    "glm": (backend, {"name": "glm_like", "tool_parser": "glm"}),
    "deepseek": (backend, {"controls": DEEPSEEK, "tool_parser": "deepseek-v3"}),
}
GOOD = '<tool_call>\n{"name": "f", "arguments": {"a": "🎉 </tool_call> <think>"}}\n</tool_call>'
BEGIN, END, CALL, CALL_END, SEP = DEEPSEEK
TEXTS = [
    "hi", EMOJI, " yes.\n\n", "\n", "a<b </", "<", "<thi", "nk>", "</th", "<tool_",
    "call>", "\ufffd",
    "<think>", "</think>", "<think>hm", " so</think>", "<tool_call>", "</tool_call>",
    GOOD, GOOD[:-9],
    "<tool_call>{bad</tool_call>", f"<think>{GOOD}</think>", "<|im_end|>", "<|endoftext|>",
    "<tool_call>\n<function=f>\n<parameter=a>\nx y\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    f'{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{CALL_END}{END}',
]  # fmt: skip


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a renderer for each row."""
    return {
        row: make(tmp_path_factory.mktemp("template") / "of", **options)
        for row, (make, options) in TEMPLATES.items()
    }


@pytest.mark.parametrize("row", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_stream_is_the_message_under_any_template_however_it_is_cut(
    row: str, data: st.DataObject, templates: dict[str, Any]
) -> None:
    renderer = templates[row]

    def raw(text: str) -> list[int]:
        ids: list[int] = renderer.encode_raw(text).tolist()
        return ids

    def plain(text: str) -> list[int]:
        ids: list[int] = renderer.encode(text).tolist()
        return ids

    odd = [*renderer.control_ids, 30, 31, 10, *range(1000, 1256, 11), 1000 + 0xF0, 1000 + 0x9F]
    ids = data.draw(replies(raw, plain, TEXTS, odd))
    held = raw("<|im_end|>\n<|im_start|>assistant\n" + data.draw(st.sampled_from(["", "<think>"])))
    rule, max_calls = data.draw(RULES)
    streamed(renderer, held, ids, data.draw(SIZES), rule, max_calls)


@pytest.mark.parametrize("row", TEMPLATES)
def test_an_answer_streams_under_any_template(row: str, templates: dict[str, Any]) -> None:
    renderer = templates[row]
    ids = renderer.encode_raw(f"The answer {EMOJI} is <b>42</b>.").tolist()
    early, message = streamed(renderer, [], ids)
    assert "".join(delta["content"] for delta in early) == message["content"]
    assert len(early) > 20


# --- Qwen3's published vocabulary ----------------------------------------------------------------
def test_an_ordinary_answer_of_qwen3_comes_in_many_deltas_before_its_end(
    qwen3: RenderersBackend,
) -> None:
    said = "The sum of 2 and 2 is 4, as 🎉 shows. 日本語も。"
    ids = qwen3.encode_raw(f"<think>\nLet me see.\n</think>\n\n{said}<|im_end|>").tolist()
    held = qwen3.render(toy.HI, None).tolist()
    early, message = streamed(qwen3, held, ids)
    assert message == {
        "role": "assistant",
        "reasoning_content": "Let me see.",
        "content": said,
    }
    assert joined(early) == message, "all of it came before the end"
    content = [delta["content"] for delta in early if "content" in delta]
    assert len(content) > 15
    assert content[:3] == ["The", " sum", " of"]


def test_calls_of_qwen3_come_whole_and_in_order_behind_what_was_said(
    qwen3: RenderersBackend,
) -> None:
    good = '<tool_call>\n{"name": "f", "arguments": {"a": "🎉"}}\n</tool_call>'
    broken = '<tool_call>\n{"name": "f", "arguments": {\n</tool_call>'
    ids = qwen3.encode_raw(f"I look. {good}\n{broken}\n{good}<|im_end|>").tolist()
    early, message = streamed(qwen3, qwen3.render(toy.HI, None).tolist(), ids)
    assert joined(early)["content"] == "I look."
    assert message["content"] == f"I look.\n{broken}"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a":"🎉"}'] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2


# --- what is promised where nothing is known, or something is wrong ------------------------------
class Plain:
    """A renderer of a user's own: it only parses."""

    def __init__(self, inner: RenderersBackend) -> None:
        self.parse = inner.parse


def test_a_reply_of_a_renderer_that_says_nothing_comes_at_its_end() -> None:
    inner: Any = Plain(toy.toy_renderer())
    early, message = streamed(inner, toy.P0, [30, 10, 31, 2])
    assert early == []
    assert message["content"] == "hello\nhe"


def test_what_is_no_beginning_of_the_reply_is_an_error_that_shows_both() -> None:
    growing = GrowingReply(toy.toy_renderer(), as_ids(toy.P0))
    assert growing.feed([30, 10, 31]) == [{"content": "hello\nhe"}]
    with pytest.raises(StreamDiverged, match=r"'he' was streamed at character 6, .* 'llo'"):
        growing.finish({"role": "assistant", "content": "hello\nllo"})
    with pytest.raises(StreamDiverged, match="at character 5"):
        growing.finish({"role": "assistant", "content": "hello"})
    assert growing.finish({"role": "assistant", "content": "hello\nhe"}) == []


def test_ids_that_are_no_tokens_are_no_text_and_raise_nothing() -> None:
    growing = GrowingReply(toy.toy_renderer(), as_ids(toy.P0))
    assert growing.feed([30, 2**31 - 1, 5000]) == [{"content": "hello"}]
    assert growing.feed([-1, 30]) == growing.feed([30]) == growing.feed([]) == []


@pytest.mark.parametrize("pieces", [1, 3, 64])
def test_case_45_arguments_come_in_pieces_under_one_index(pieces: int) -> None:
    arguments = '{"x":"' + "ü" * 40 + '"}'
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for n in range(2)
    ]
    size = -(-len(arguments) // pieces)
    growing = GrowingReply(toy.toy_renderer(), as_ids(toy.P0), piece_chars=size)
    deltas = growing.finish({"role": "assistant", "content": "", "tool_calls": calls})
    entries = [entry for delta in deltas for entry in delta["tool_calls"]]
    assert len(entries) == len(deltas), "one entry in each"
    heads = [entry for entry in entries if "id" in entry]
    assert [(h["index"], h["id"], h["type"], h["function"]["name"]) for h in heads] == [
        (0, "c0", "function", "f"), (1, "c1", "function", "f")
    ]  # fmt: skip
    assert all(entry["function"].keys() == {"arguments"} for entry in entries if "id" not in entry)
    for index in range(2):
        own = [entry["function"]["arguments"] for entry in entries if entry["index"] == index]
        assert "".join(own) == arguments
        assert max(map(len, own)) <= size
