"""Text to ids and back over the real vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError
from tests import toy
from worker.tito.backend import RenderersBackend
from worker.tito.tokenizer import CUT, LONG_TEXT_CHARS, Tokenizer

pytestmark = pytest.mark.xdist_group("tito")  # one process loads the vocabularies

CONTROLS = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>", "<|fim_prefix|>"),
]


@pytest.fixture(scope="session")
def uncontrolled(vocabulary: Path) -> tokenizers.Tokenizer:
    """The vocabulary without any added token: what plain text encodes to."""
    text = vocabulary.read_text()
    start = text.index('"added_tokens": [')
    end = text.index("]", start)
    return tokenizers.Tokenizer.from_str(text[:start] + '"added_tokens": [' + text[end:])


def test_encode_gives_the_ids_of_the_model(qwen: RenderersBackend) -> None:
    assert qwen.encode("What is 1+7?").tolist() == [3838, 374, 220, 16, 10, 22, 30]
    assert qwen.encode("\\boxed{8}").tolist() == [59, 79075, 90, 23, 92]


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("a", "b"), (" ", "."), ("1", "'s\n")])
def test_encode_plain_makes_text_of_a_control_string(
    control: str, before: str, after: str, qwen: RenderersBackend,
    uncontrolled: tokenizers.Tokenizer,
) -> None:  # fmt: skip
    text = before + control + after
    ids = qwen.encode(text).tolist()
    assert ids == uncontrolled.encode(text, add_special_tokens=False).ids
    assert max(ids) < 151643
    assert qwen.decode(toy.array(ids)) == text


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(CONTROLS), st.text(max_size=8)), max_size=8))
@example(parts=["e\u0301", "<|im_end|>", "\u0338", "\u212a"])
def test_encode_plain_round_trips_any_text_without_control_ids(
    parts: list[str], qwen: RenderersBackend, uncontrolled: tokenizers.Tokenizer
) -> None:
    text = "".join(parts)
    ids = qwen.encode(text).tolist()
    assert ids == uncontrolled.encode(text, add_special_tokens=False).ids
    assert qwen.decode(toy.array(ids)) == normalize("NFC", text)  # as the model's tokenizer does


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(st.sampled_from(CONTROLS), st.text(max_size=8)), max_size=8))
def test_encode_raw_gives_what_the_library_gives(
    parts: list[str], qwen: RenderersBackend, bare: tokenizers.Tokenizer
) -> None:
    text = "".join(parts)
    assert qwen.encode_raw(text).tolist() == bare.encode(text, add_special_tokens=False).ids


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from([*CONTROLS, CUT, CUT[:9], CUT[9:], "<"]), st.text(max_size=8)),
        max_size=8,
    )
)
def test_escaped_text_never_becomes_a_control_id_whatever_a_template_does_to_it(
    parts: list[str], qwen: RenderersBackend
) -> None:
    text = "".join(parts)
    tokenizer = qwen.tokenizer
    escaped = tokenizer.escape(text)
    assert tokenizer.unescape(escaped) == text
    for written, meant in [
        (escaped, text),
        (json.dumps(escaped), json.dumps(text)),
        (
            json.dumps({"x": [escaped]}, ensure_ascii=False),
            json.dumps({"x": [text]}, ensure_ascii=False),
        ),
        (repr(escaped), repr(text)),
        (escaped.strip(), text.strip()),
    ]:
        ids = tokenizer.encode(written)
        assert max(ids, default=0) < 151643
        assert tokenizer.decode(ids) == normalize("NFC", meant)


def test_encode_reads_every_control_string_of_template_text_as_its_id(
    qwen: RenderersBackend,
) -> None:
    tokenizer = qwen.tokenizer
    for control in CONTROLS:
        assert tokenizer.encode(control) == [tokenizer.token_id(control)]
        assert tokenizer.encode(f"a{control}b")[1:-1] == [tokenizer.token_id(control)]
    mixed = f"<|im_start|>user\n{tokenizer.escape('<|im_end|>')}<|im_end|>"
    assert [number for number in tokenizer.encode(mixed) if number >= 151643] == [151644, 151645]


def test_escape_name_changes_an_id_only_where_a_control_string_would_come_of_it(
    qwen: RenderersBackend, uncontrolled: tokenizers.Tokenizer
) -> None:
    tokenizer = qwen.tokenizer
    for name in ("think", "</think", "think>", "/think"):
        told = tokenizer.escape_name(name)
        assert tokenizer.unescape(told) == name
        harmless = f"<|im_end|>{told}ing<|im_end|>"
        assert tokenizer.encode(harmless) == tokenizer.encode_raw(tokenizer.unescape(harmless))
        for text in (f"<{told}>", f"</{told}>", f"<function={told}>\n"):
            plain = uncontrolled.encode(tokenizer.unescape(text), add_special_tokens=False).ids
            assert tokenizer.encode(text) == plain
    assert tokenizer.escape_name("query") == "query"
    assert tokenizer.escape_name("\ud800") == "\ufffd"


def test_escape_keeps_what_it_is_told_to_keep(qwen: RenderersBackend) -> None:
    keep = frozenset({"<think>", "</think>"})
    escaped = qwen.tokenizer.escape("<think>a<|im_end|></think>", keep)
    ids = qwen.tokenizer.encode(escaped)
    assert [number for number in ids if number >= 151643] == [151667, 151668]


def _vocabulary(*tokens: tokenizers.AddedToken, normalizer: Any = None) -> Tokenizer:
    inner = toy.toy_inner()
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.add_tokens(list(tokens))
    return Tokenizer(inner, "toy")


@pytest.mark.parametrize("text", ["[ab", "[abc]", "ab]", "[[abc]ab]c]", "[a[abc]b", "[abcab]"])
def test_escape_leaves_no_control_string_where_they_overlap(text: str) -> None:
    tokenizer = _vocabulary(
        *(tokenizers.AddedToken(t, normalized=False) for t in ("[ab", "[abc]", "ab]", "c]"))
    )
    ids = tokenizer.encode_plain(text)
    assert all(number >= 1000 for number in ids)
    assert tokenizer.decode(ids) == text


def test_escape_cuts_a_control_string_that_is_the_beginning_of_a_longer_one() -> None:
    # The toy cuts in front of "hello", so what is left of the cut is a control string itself.
    tokenizer = _vocabulary(
        *(tokenizers.AddedToken(t, normalized=False) for t in ("[a", "[ahello]"))
    )
    ids = tokenizer.encode_plain("[ahello]")
    assert not set(ids) & tokenizer.control_ids
    assert tokenizer.decode(ids) == "[ahello]"


def test_escape_sees_a_control_string_that_only_the_normalizer_makes() -> None:
    kelvin = tokenizers.AddedToken("<|OK|>", normalized=True)
    tokenizer = _vocabulary(kelvin, normalizer=tokenizers.normalizers.NFC())
    assert tokenizer.encode("<|O\u212a|>") == [tokenizer.token_id("<|OK|>")]
    assert tokenizer.decode(tokenizer.encode_plain("<|O\u212a|>")) == "<|OK|>"
    assert tokenizer.token_id("<|OK|>") not in tokenizer.encode_plain("<|O\u212a|>")


def test_runs_of_spaces_and_single_characters_are_text_even_where_they_are_added_tokens() -> None:
    tokenizer = _vocabulary(*(tokenizers.AddedToken(t) for t in ("\n\n", "é")))
    assert tokenizer.escape("a\n\né") == "a\n\né"
    assert tokenizer.controls == frozenset(toy.CONTROLS)


def test_memo_gives_the_generation_prompt_with_its_control_id(qwen: RenderersBackend) -> None:
    found = qwen.tokenizer.encode("<|im_start|>assistant\n")
    assert found == [151644, 77091, 198]
    found.append(0)
    assert qwen.tokenizer.encode("<|im_start|>assistant\n") == [151644, 77091, 198]


def test_lone_surrogates_become_replacement_characters(qwen: RenderersBackend) -> None:
    assert qwen.decode(qwen.encode("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"
    assert qwen.tokenizer.decode(qwen.tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_long_text_encodes_and_decodes_like_short_text(
    qwen: RenderersBackend, bare: tokenizers.Tokenizer
) -> None:
    text = "word 12 日本\n" * (LONG_TEXT_CHARS // 4)
    ids = qwen.encode(text)
    assert ids.tolist() == bare.encode(text, add_special_tokens=False).ids
    assert qwen.decode(ids) == text


def test_decode_keeps_special_tokens_and_takes_no_ids(qwen: RenderersBackend) -> None:
    assert qwen.decode(toy.array([151644, 151645])) == "<|im_start|><|im_end|>"
    assert qwen.decode(toy.array([])) == ""
    assert qwen.tokenizer.decode([151644, 59], skip_special_tokens=True) == "\\"


def test_max_token_id_is_the_last_of_the_vocabulary(
    qwen: RenderersBackend, bare: tokenizers.Tokenizer
) -> None:
    assert qwen.max_token_id == max(bare.get_vocab().values()) == 151668
    assert toy.toy_tokenizer().max_token_id == 1255  # a vocabulary with holes


def test_load_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer: no file .*absent.*tokenizer\.json"):
        Tokenizer.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no file"):
        Tokenizer.load(tmp_path)


def test_load_names_the_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=r"tokenizer\.json' is no tokenizer"):
        Tokenizer.load(tmp_path)
