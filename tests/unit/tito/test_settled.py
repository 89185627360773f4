"""What is certain of a text of ids while they come, over every kind of vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from tests import toy
from worker.tito.pieces import Joins
from worker.tito.reasoning import Reasoning
from worker.tito.settled import (
    CONTENT,
    REASONING,
    Decoding,
    Guard,
    Marked,
    Openings,
    Settled,
    Stripped,
)
from worker.tito.tokenizer import Tokenizer

PIECES = ["\u2581", "\u2581I", "look", "\u2581a", "\ufffd", "é", "<", "\n"]
LLAMA = decoders.Sequence(
    [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
GEMMA = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
)


def falls_back(decoder: Any) -> Tokenizer:
    """Return a vocabulary as SentencePiece makes them: bytes only where there is no piece."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + place for place, piece in enumerate(PIECES)} | {"<s>": 300, "</s>": 301}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoder
    inner.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(inner, "falls back")


TOY = toy.toy_tokenizer()
VOCABULARIES = {"toy": TOY, "llama": falls_back(LLAMA), "gemma": falls_back(GEMMA)}
EMOJI = list("né🎉👩‍👩‍👧".encode())
BYTES = st.sampled_from([*EMOJI, 0xFF, 0xC3, 0x20, 0x41]) | st.integers(0, 255)
OF = {
    "toy": st.sampled_from([1, 4, 6, 30, 31, 10, 5000]) | BYTES.map(lambda byte: 1000 + byte),
    "llama": st.integers(256, 255 + len(PIECES)) | st.sampled_from([300, 5000]) | BYTES,
    "gemma": st.integers(256, 255 + len(PIECES)) | st.sampled_from([300, 5000]) | BYTES,
}


def whole_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids) if ids else ""


@pytest.mark.parametrize("name", VOCABULARIES)
@given(data=st.data())
def test_what_is_decoded_bit_by_bit_is_what_the_whole_decodes_to(
    name: str, data: st.DataObject
) -> None:
    tokenizer = VOCABULARIES[name]
    parts = data.draw(st.lists(st.lists(OF[name], max_size=5), max_size=8))
    decoding, said = Decoding(tokenizer), ""
    ids: list[int] = []
    for part in parts:
        said += decoding.add(part)
        ids += part
        assert whole_text(tokenizer, ids).startswith(said)
    assert said + decoding.end() == whole_text(tokenizer, ids)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_character_comes_once_it_is_whole_and_text_as_it_comes(name: str) -> None:
    tokenizer = VOCABULARIES[name]
    base = 1000 if name == "toy" else 0
    ids = [base + byte for byte in "🎉🎉".encode()] + ([30, 31] if base else [258, 258])
    decoding = Decoding(tokenizer)
    said = [decoding.add([number]) for number in ids]
    assert "\ufffd" not in "".join(said)
    assert said[-1]
    if base:
        assert said == ["", "", "", "🎉", "", "", "", "🎉", "hello", "he"]


@pytest.mark.parametrize(
    ("decoder", "joins"),
    [
        (decoders.ByteLevel(), Joins.BYTES),
        (decoders.Sequence([decoders.ByteLevel()]), Joins.BYTES),
        (LLAMA, Joins.RUNS),
        (GEMMA, Joins.RUNS),
        (decoders.Metaspace(), Joins.UNKNOWN),
        (decoders.WordPiece(), Joins.UNKNOWN),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 1)]), Joins.UNKNOWN),
    ],
)
def test_how_a_vocabulary_joins_texts_is_read_from_its_decoder(decoder: Any, joins: Joins) -> None:
    inner = toy.toy_inner()
    inner.decoder = decoder
    assert Tokenizer(inner, "any").joins is joins


class Counting:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num_ids = tokenizer, 0

    def decode(self, ids: list[int]) -> str:
        self.num_ids += len(ids)
        return self._tokenizer.decode(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    "unit",
    [[30], [1000 + byte for byte in "é🎉".encode()], [1000 + 0x80], [1000 + 0xF0], [1000 + 0x20]],
    ids=["words", "characters of several ids", "no text", "beginnings", "spaces"],
)
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_the_ids_that_are_decoded_grow_with_the_reply_and_no_faster(
    unit: list[int], size: int
) -> None:
    for length in (500, 4000):
        counting: Any = Counting(TOY)
        reasoning = Reasoning(counting, ("<think>", "</think>"), [2])
        reader = Marked(counting, [2], reasoning)
        ids = (unit * length)[:length]
        for at in range(0, length, size):
            reader.feed(ids[at : at + size])
        assert counting.num_ids <= 13 * length


# --- the parts -----------------------------------------------------------------------------------
TEXTS = st.lists(st.text(alphabet="a \n\u3000<", max_size=4), max_size=6)


@given(st.lists(TEXTS, max_size=4))
def test_parts_are_stripped_and_joined_as_they_grow(parts: list[list[str]]) -> None:
    stripped, said = Stripped("\n\n"), ""
    for part in parts:
        for text in part:
            said += stripped.add(text)
        stripped.end_part()
    wanted = [text for part in parts if (text := "".join(part).strip())]
    assert said == "\n\n".join(wanted)


@given(st.lists(st.text(alphabet="<tool_call>ab ", max_size=5), max_size=8))
def test_a_guard_lets_through_what_is_before_an_opening(texts: list[str]) -> None:
    guard = Guard(Openings(texts=("<tool_call>", "ab")))
    said = "".join(map(guard.add, texts)) + guard.end()
    whole = "".join(texts)
    places = [at for opening in ("<tool_call>", "ab") if (at := whole.find(opening)) >= 0]
    assert said == whole[: min(places, default=len(whole))]


def test_a_guard_holds_all_that_begins_as_a_whole_reply_may() -> None:
    guard = Guard(Openings(first="{"))
    assert guard.add("\n ") == "\n "
    assert guard.add('{"a"') == guard.add(": 1}") == guard.end() == ""
    assert guard.is_shut
    other = Guard(Openings(first="{"))
    assert other.add("x") + other.add("{") == "x{"


def settled(texts: list[str]) -> list[list[Settled]]:
    reader = Marked(TOY, [2, 3], Reasoning(TOY, ("<think>", "</think>"), [2, 3]))
    return [reader.feed(TOY.encode_raw(text)) for text in texts]


def test_text_is_certain_up_to_the_first_token_that_may_begin_a_call() -> None:
    said = settled(["<think> hm ", "so</think>", "yes ", "and", "<tool_call>", "x", "<think>y"])
    assert said == [
        [(REASONING, "hm")], [(REASONING, " so")], [(CONTENT, "yes")], [(CONTENT, " and")], [], [],
        [(REASONING, "\n\ny")],
    ]  # fmt: skip
    assert settled(["a<", "tool_call>", "b"]) == [
        [(CONTENT, "a<")], [(CONTENT, "tool_call>")], [(CONTENT, "b")]
    ], "what is only spelled begins no call where markers are tokens"  # fmt: skip


def test_half_a_character_of_what_is_held_is_no_part_of_the_reasoning_behind_it() -> None:
    """Calls that are only spelled shut the guard in the middle of a piece."""
    reader = Marked(
        TOY,
        [2],
        Reasoning(TOY, ("<think>", "</think>"), [2]),
        openings=Openings(texts=("<tool",)),
    )
    emoji = [1000 + byte for byte in "🎉".encode()]
    assert reader.feed([*TOY.encode("a<tool"), *emoji[:2]]) == [(CONTENT, "a")]
    assert reader.feed([*emoji[2:], 4, 30]) == [(REASONING, "hello")]


def test_nothing_behind_a_stop_is_said() -> None:
    assert settled(["a<|im_end|>b", "c"]) == [[(CONTENT, "a")], []]
    assert settled(["<think>a<|endoftext|>", "b"]) == [[(REASONING, "a")], []]
