"""The page of `show --html`: nothing of anybody runs in it, and it asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from rollstream.cli.decoding import Decoder
from rollstream.cli.gather import GroupFacts, MemberFacts, of_finished
from rollstream.cli.html.escape import MAX_CHARS, data, html, visible
from rollstream.cli.html.page import page
from rollstream.cli.html.strip import kinds_of, runs_of
from rollstream.cli.html.timeline import timeline
from rollstream.errors import Status
from rollstream.group import Missing
from rollstream.sample import Sample, Span
from tests.builders import a_group, a_sample
from tests.toy import toy_inner

HOSTILE = (
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\"' onload=\"x",
    "<!-- <script>", "]]>", "&lt;b&gt;", "\u202egnp.exe\u2066", "\x00\x07\x1b[31m\x9b31m",
    "\ud800\udfff", "\u2028\u2029\ufeff", "javascript:alert(1)", "</pre></article></details><h1>x",
    "{{7*7}}${7*7}", "</style><link rel=stylesheet href=//evil.example/x.css>", "\r\n\t ok",
    "<base href=https://evil.example/>", "http://evil.example/",
)  # fmt: skip
REFERENCES = frozenset(
    "src href action formaction data poster background cite srcset ping xlink:href manifest "
    "style".split()
)


class Parsed(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[tuple[dict[str, Any], str]] = []
        self.styles: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in ("meta", "br", "link", "img", "base", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_data(self, text: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            known, held = self.scripts[-1]
            self.scripts[-1] = (known, held + text)
        elif inside == "style":
            self.styles.append(text)
        else:
            self.text += text


class Letters:
    """A vocabulary of hostile pieces, as `Decoder` is used."""

    file = "vocabulary</script>"

    def decode(self, ids: Any) -> str:
        return "".join(HOSTILE[number % len(HOSTILE)] for number in ids)

    def pieces(self, ids: Any) -> dict[int, str]:
        return {number: self.decode([number]) for number in ids}


def hostile_group() -> GroupFacts:
    """Return a group that says something bad wherever anybody may say something."""
    evil = "".join(HOSTILE)
    messages = [{"role": evil, "content": evil, "name": evil},
                {"role": "assistant", "content": f"<think>{evil}</think>{evil}",
                 "tool_calls": [{"id": evil, "function": {"name": evil, "arguments": evil}}]},
                {"role": "tool", "name": evil, "content": evil}]  # fmt: skip
    calls = [{"turn": 0, "name": evil, "arguments": evil, "executed": False}]
    spans = [Span(evil, 0, 1e9, 1.0, evil), Span("generate", 0, 1e9, float("nan"))]
    samples = []
    for member, notes in enumerate((
        {"messages": messages, "tool_calls": calls, evil: {evil: [evil]}},
        {"error": evil, "error_detail": evil, "messages": evil, "env": {"reset": [{evil: evil}]}},
        {"tool_calls": calls},
    )):  # fmt: skip
        asked = evil if member else [{"role": evil, "content": evil}]
        sample = a_sample(7, member, prompt=asked, metadata=notes, spans=spans, response=evil)
        sample.reward = {evil: evil}
        sample.calls[0].engine = sample.calls[0].rid = sample.calls[0].finish = evil
        sample.label = sample.generate_function_path = evil
        sample.sampling = {evil: evil}
        samples.append(sample)
    missing = [Missing(3, Status.FAILED, evil, evil)]
    return of_finished(a_group(7, samples, missing=missing, spans={evil: [1.0]}), evil)


def rendered(group: GroupFacts, decoder: Any = None) -> str:
    text = "".join(page(group, decoder))
    text.encode("utf-8")
    return text


@pytest.mark.parametrize("decoder", [None, Letters()])
def test_hostile_text_makes_no_tag_no_attribute_and_no_script_of_its_own(decoder: Any) -> None:
    parsed = Parsed(rendered(hostile_group(), decoder))
    assert parsed.open == []
    assert not {"img", "link", "base", "iframe", "object", "form"} & set(parsed.tags)
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    assert "<img src=x onerror=alert(1)>" in parsed.text
    assert "{{7*7}}${7*7}" in parsed.text
    programs = [held for known, held in parsed.scripts if "type" not in known]
    assert len(programs) == 1
    for known, held in parsed.scripts:
        if "type" in known:
            assert known["type"] == "application/json"
            json.loads(held)


@pytest.mark.parametrize("decoder", [None, Letters()])
def test_the_page_refers_to_nothing_outside_of_itself(decoder: Any) -> None:
    parsed = Parsed(rendered(hostile_group(), decoder))
    references = [value for _, name, value in parsed.attributes if name in REFERENCES]
    assert references, "the members are linked to"
    assert [value for value in references if not re.fullmatch(r"#m\d+", value)] == []
    assert not re.search(r"url\(|@import|src\s*:|//", "".join(parsed.styles))
    (program,) = [held for known, held in parsed.scripts if "type" not in known]
    asks = r"fetch|XMLHttp|WebSocket|EventSource|import\s*\(|sendBeacon|innerHTML|eval|https?:"
    assert not re.search(asks, program)


def test_the_policy_lets_nothing_run_but_the_pages_own_style_and_script() -> None:
    parsed = Parsed(rendered(hostile_group()))
    names = {name: value for tag, name, value in parsed.attributes if tag == "meta"}
    assert names["http-equiv"] == "Content-Security-Policy"
    (policy,) = [v for t, n, v in parsed.attributes if t == "meta" and "default-src" in v]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (program,) = [held for known, held in parsed.scripts if "type" not in known]
    assert rules == {
        "default-src": "'none'", "base-uri": "'none'", "form-action": "'none'",
        "style-src": f"'sha256-{digest(parsed.styles[0])}'",
        "script-src": f"'sha256-{digest(program)}'",
    }  # fmt: skip
    assert len(parsed.styles) == 1


def digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_hidden_characters_are_marks() -> None:
    assert html("a\u202eb\x00\ud800") == (
        'a<i class="u">U+202E</i>b<i class="u">U+0000</i><i class="u">U+D800</i>'
    )
    assert visible("a\x1b[31m\r") == "a⟨U+001B⟩[31m⟨U+000D⟩"
    assert html("tab\tline\nÄ漢🙂") == "tab\tline\nÄ漢🙂"
    assert data({"a": "</script>\u2028\ud800"}) == '{"a":"\\u003c/script\\u003e\\u2028\\ud800"}'


def test_a_huge_text_loses_its_middle_and_says_how_much() -> None:
    shown = html("a" + "x" * (3 * MAX_CHARS) + "z")
    assert len(shown) < MAX_CHARS + 200
    assert f"… {2 * MAX_CHARS + 2:,} characters are left out …" in shown
    assert (shown[0], shown[-1]) == ("a", "z")


def test_the_page_says_everything_that_is_known_of_a_group_and_its_members() -> None:
    sample = a_sample(7, 1, reward={"score": 0.5, "format": True}, versions=3,
                      spans=[Span("generate", 0, 1e9, 2.0)])  # fmt: skip
    group = a_group(7, [sample], missing=[Missing(0, Status.FAILED, "engine_error", "it broke")],
                    staleness=4)  # fmt: skip
    text = Parsed(rendered(of_finished(group, "dump d"))).text
    for said in ("group 7", "dump d", "4 when it was handed out", "1 delivered, 1 missing",
                 "member 0", "engine_error", "it broke", "member 1", "completed", '"score": 0.5',
                 "versions of tokens", "turn 0 · 2 tokens · v3 · stop · generate 2.00 s",
                 "http://engine", "5 tokens: 2 sampled, 0 sampled and masked, 3 context",
                 "no tokenizer was given"):  # fmt: skip
        assert said in text, said


def test_a_call_that_ran_is_told_from_one_that_did_not() -> None:
    calls = [{"turn": 0, "name": "first", "arguments": "{}", "executed": True},
             {"turn": 0, "name": "last", "arguments": '{"a": 1}', "executed": False}]  # fmt: skip
    sample = a_sample(7, 0, metadata={"tool_calls": calls})
    text = Parsed(rendered(of_finished(a_group(7, [sample]), "d"))).text
    assert "ran first{}" in text
    assert 'not run last{"a": 1}' in text


def test_the_strip_has_every_token_exactly() -> None:
    turns = (((4, 5), (6, 7)), ((8,), ()))
    sample = a_sample(7, 0, turns=turns, versions=[2, 5])
    assert sample.loss_mask is not None
    sample.loss_mask[4] = 0
    parsed = Parsed(rendered(of_finished(a_group(7, [sample]), "d")))
    held = next(json.loads(h) for known, h in parsed.scripts if known.get("id") == "m0-l0-data")
    assert np.frombuffer(base64.b64decode(held["ids"]), "<i4").tolist() == sample.tokens.tolist()
    log_probs = np.frombuffer(base64.b64decode(held["lp"]), "<f4")
    assert np.array_equal(log_probs, sample.rollout_log_probs)
    assert held["runs"] == [[0, 3, 0], [3, 5, 1], [5, 7, 0], [7, 8, 2]]
    assert held["versions"] == [[3, 5, 2], [7, 8, 5]]
    assert [(start, end, turn) for start, end, _, _, _, turn in held["calls"]] == [
        (3, 5, 0),
        (7, 8, 1),
    ]
    assert held["engines"] == ["http://engine"]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, [0, 0, 0, 1, 1]),
        ({"remove_sample": True}, [0, 0, 0, 2, 2]),
        ({"loss_mask": None}, [0, 0, 0, 1, 1]),
        ({"calls": []}, [0, 0, 0, 0, 1]),
        ({"calls": [], "loss_mask": None}, [0, 0, 0, 1, 1]),
    ],
)
def test_kinds_of_tokens(changes: dict[str, Any], kinds: list[int]) -> None:
    sample = a_sample()
    if changes.get("calls") == [] and "loss_mask" not in changes:
        changes = changes | {"loss_mask": np.array([0, 1], np.uint8)}
    for name, value in changes.items():
        setattr(sample, name, value)
    assert kinds_of(sample).tolist() == kinds
    assert runs_of(np.zeros(0, np.uint8)) == []


def test_a_page_of_many_tokens_has_no_element_for_each() -> None:
    turns = [(range(1, 301), range(1, 31))] * 400
    sample = a_sample(7, 0, turns=[(list(a), list(b)) for a, b in turns])
    text = rendered(of_finished(a_group(7, [sample]), "d"))
    tokens = len(sample.tokens)
    assert tokens > 130_000
    assert text.count("<") < 40 * 400
    assert len(text) < 16 * tokens


def test_a_group_of_which_only_the_drop_is_known_has_a_page() -> None:
    drops = [{"at": "2026-01-01", "reason": "zero_std", "detail": "std 0"}] * 2
    facts = GroupFacts("4711", "run r", "dropped", {"reason": "zero_std", "means": "no spread"},
                       [MemberFacts(0, "failed", error="it broke")], drops)  # fmt: skip
    text = Parsed(rendered(facts)).text
    for said in ("group 4711", "dropped", "no spread", "it broke", "It was dropped 2 times"):
        assert said in text


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span("generate", 0, 0.0, 1.0)],
        [Span("generate", 0, 1e9, -1.0)],
        [Span("generate", 0, float("inf"), 1.0)],
        [Span("generate", 0, 1e9, float("inf"))],
    ],
)
def test_a_timeline_of_nothing_sound_is_empty(spans: list[Span]) -> None:
    assert timeline(spans) == ""


def test_a_timeline_has_a_bar_for_every_span_in_the_order_of_a_trajectory() -> None:
    spans = [Span("reward", -1, 1e9 + 3, 1.0, "error"), Span("generate", 0, 1e9, 2.0),
             Span("mine", 1, 1e9, 0.0), Span("queue_wait", -1, 1e9 - 1, 1.0)]  # fmt: skip
    drawn = timeline(spans)
    assert re.findall(r'text-anchor="end">([a-z_]+)<', drawn) == [
        "queue_wait", "generate", "reward", "mine",
    ]  # fmt: skip
    assert drawn.count('<rect class="span') == 4
    assert "reward: 1.00 s, from 4.00 s on, error" in drawn


def test_an_empty_sample_has_a_page() -> None:
    facts = of_finished(a_group(7, [Sample(group_index=7, status=Status.FAILED)]), "d")
    assert "member 0" in Parsed(rendered(facts, Letters())).text


def test_a_decoder_shows_half_characters_as_bytes_and_unknown_ids_as_such() -> None:
    decoder = Decoder(toy_inner(), "toy")
    pieces = decoder.pieces([30, 2, 1000 + 0xE2, 1000 + 0x68, 999_999, -1])
    assert pieces == {
        30: "hello", 2: "<|im_end|>", 1000 + 0xE2: "⟨e2⟩", 1000 + 0x68: "h",
        999_999: "⟨no id 999999⟩", -1: "⟨no id -1⟩",
    }  # fmt: skip
