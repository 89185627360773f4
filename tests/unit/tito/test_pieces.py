"""What one id stands for: bytes, so that half a character is told as what it is."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models

from tests.toy import toy_tokenizer
from worker.tito.tokenizer import Tokenizer

EMOJI = [1240, 1159, 1153, 1130]


def bytes_of(pieces: list[str]) -> list[bytes]:
    return [piece.encode("utf-8", "surrogateescape") for piece in pieces]


def test_pieces_are_the_bytes_of_half_characters() -> None:
    pieces = toy_tokenizer().pieces([*EMOJI, 2, 30, 10])
    assert bytes_of(pieces)[:4] == [b"\xf0", b"\x9f", b"\x99", b"\x82"]
    assert pieces[4:] == ["<|im_end|>", "hello", "\n"]


def test_pieces_joined_are_the_text_whatever_the_ids() -> None:
    tokenizer = toy_tokenizer()
    text = "hello 日本語 \x00\xad é\u0100 \n<|im_end|>"
    ids = tokenizer.encode(text)
    assert b"".join(bytes_of(tokenizer.pieces(ids))).decode() == text == tokenizer.decode(ids)


def test_pieces_of_an_id_that_the_vocabulary_lacks_are_empty() -> None:
    assert toy_tokenizer().pieces([999_999]) == [""]


def test_pieces_read_byte_fallback_and_the_sign_of_a_space() -> None:
    vocab = {"<unk>": 0, "\u2581hi": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x99>": 4, "<0x82>": 5}
    inner = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens([AddedToken("</s>", special=True)])
    pieces = Tokenizer(inner, "fallback").pieces([1, 2, 3, 4, 5, 6])
    assert b"".join(bytes_of(pieces)).decode() == " hi🙂</s>"


def test_pieces_of_a_vocabulary_of_plain_text_are_its_tokens() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"<0x41>": 0, "Ġb": 1}, unk_token="<0x41>"))
    assert Tokenizer(inner, "words").pieces([0, 1]) == ["<0x41>", "Ġb"]
