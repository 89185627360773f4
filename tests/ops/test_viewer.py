"""`show --html` in a browser: a real run's groups, hostile ones, and long ones."""

from __future__ import annotations

import json
import math
import re
import struct
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from rollstream.cli.gather import of_finished
from rollstream.cli.html.escape import visible
from rollstream.cli.html.page import page
from rollstream.sample import Sample
from tests.builders import a_group, a_sample
from tests.ops.chromium import read_page, take_picture
from tests.ops.viewer_run import GROUPS, Played, played, rollstream, with_most_turns
from tests.unit.cli.test_page import HOSTILE, Letters, hostile_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "viewer.png"
VOID = {"meta", "br", "link", "img", "base", "input"}


class Dom(HTMLParser):
    """What a person sees of a page: messages, calls of tools, and what tokens say by hovering."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.title = ""
        self.says: list[tuple[str, str]] = []
        """(classes, text) of every message, in order."""
        self.strips: dict[str, list[tuple[str, str, str]]] = {}
        """Per strip (class, text, what hovering shows) of every token."""
        self.pieces: dict[str, int] = {}
        self.text = ""
        self._open: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        if tag == "article":
            self.says.append((known["class"], ""))
        strip = self._strip()
        if tag == "s" and strip is not None:
            self.strips[strip].append((known["class"], "", known["title"]))
        elif tag == "div" and strip is not None:
            self.pieces[strip] += 1
        if known.get("class") == "strip":
            self.strips[known["id"]], self.pieces[known["id"]] = [], 0
        if tag not in VOID:
            self._open.append((tag, known))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, text: str) -> None:
        tags = [tag for tag, _ in self._open]
        if "script" in tags or "style" in tags:
            return
        self.text += text
        if tags[-1:] == ["title"] and "svg" not in tags:
            self.title += text
        strip = self._strip()
        if strip is not None and tags[-1] == "s":
            kind, said, told = self.strips[strip][-1]
            self.strips[strip][-1] = (kind, said + text, told)
        elif "article" in tags:
            kind, said = self.says[-1]
            self.says[-1] = (kind, said + text)

    def _strip(self) -> str | None:
        return next((a["id"] for _, a in self._open if a.get("class") == "strip"), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Played]:
    with played(tmp_path_factory.mktemp("run")) as playing:
        yield playing


def opened(file: Path, where: str = "#all") -> Dom:
    """Open a page with everything unfolded; nothing of it is refused and nothing breaks."""
    text, console = read_page(file.as_uri() + where)
    assert console == []
    return Dom(text)


def check_turns(dom: Dom, samples: list[Sample]) -> None:
    """Every message of every sample is on the page, in order, with the calls of tools."""
    shown = iter(dom.says)
    for sample in samples:
        calls = sample.metadata.get("tool_calls", [])
        turn = 0
        for message in sample.metadata["messages"]:
            classes, text = next(shown)
            assert classes == f"say {message['role']}"
            if message["role"] != "assistant":
                assert message["content"] in text
                continue
            assert f"turn {turn} · " in text
            missing = [line for line in message["content"].splitlines() if line not in text]
            assert missing == []
            for call in (call for call in calls if call["turn"] == turn):
                ran = "ran" if call["executed"] else "not run"
                assert f"{ran} {call['name']}{call['arguments']}" in text
            turn += 1
        assert turn == len(sample.calls)
    assert next(shown, None) is None


def check_tokens(dom: Dom, samples: list[Sample], inner: Any) -> None:
    """Every token says its id, text, log-prob, version, call and engine when it is pointed at."""
    assert len(dom.strips) == len(samples)
    for strip, sample in zip(dom.strips.values(), samples, strict=True):
        assert len(strip) == len(sample.tokens)
        sampled = sample.sampled_mask()
        log_probs, mask = sample.rollout_log_probs, sample.loss_mask
        assert log_probs is not None
        for place, (number, (kind, _, told)) in enumerate(zip(sample.tokens, strip, strict=True)):
            first, *rest = told.split("\n")
            text = visible(inner.decode([int(number)], skip_special_tokens=False))
            if "\ufffd" not in text:
                assert first == f"#{place}  id {number}  {json.dumps(text, ensure_ascii=False)}"
            r = place - sample.prompt_length
            is_sampled = r >= 0 and sampled[r]
            trains = is_sampled and (mask is None or mask[r])
            assert kind.split()[0] == ("k1" if trains else "k2" if is_sampled else "k0")
            if not is_sampled:
                assert len(rest) == 1
                continue
            call = next(c for c in sample.calls if c.start <= place < c.end)
            shown = float(rest[0].removeprefix("log-prob ").partition(" ")[0])
            assert math.isclose(shown, float(log_probs[r]), rel_tol=1e-4, abs_tol=1e-6)
            assert f"version {call.versions[0][0]}" in rest
            assert rest[-1] == f"{call.engine}  {call.rid}"


def test_a_page_of_a_real_run_says_every_turn_every_call_and_every_token(
    run: Played, vocabulary: Path, tmp_path: Path
) -> None:
    samples = run.samples()
    group = with_most_turns(samples)
    called = [c for s in samples[group] for c in s.metadata.get("tool_calls", [])]
    assert any(call["executed"] for call in called), "the run called no tool: it proves nothing"
    page_file = tmp_path / "group.html"

    run.rollstream("show", group, "--html", str(page_file), "--tokenizer", str(vocabulary))

    dom = opened(page_file)
    assert dom.title.startswith(f"group {group} ")
    check_turns(dom, samples[group])
    check_tokens(dom, samples[group], tokenizers.Tokenizer.from_file(str(vocabulary)))
    for name in ("queue_wait", "generate", "tool", "reward"):
        assert name in dom.text
    for said in ("versions of tokens", "staleness", "reward"):
        assert said in dom.text
    picture = tmp_path / "group.png"
    take_picture(f"{page_file.as_uri()}#tokens", picture, width=1000, height=1200)
    head = picture.read_bytes()[:24]
    assert struct.unpack(">II", head[16:24]) == (1000, 1200)
    assert picture.stat().st_size > 40_000  # a blank one has 5 KB


def test_a_page_without_a_tokenizer_says_the_same_turns_and_shows_ids(
    run: Played, tmp_path: Path
) -> None:
    samples = run.samples()
    group = with_most_turns(samples)
    page_file = tmp_path / "group.html"

    run.rollstream("show", group, "--html", str(page_file))

    dom = opened(page_file)
    check_turns(dom, samples[group])
    assert "no tokenizer was given" in dom.text
    strip = next(iter(dom.strips.values()))
    assert [text for _, text, _ in strip] == [str(t) for t in samples[group][0].tokens]


def test_the_terminal_and_a_dump_say_the_same_as_the_page(
    run: Played, vocabulary: Path, tmp_path: Path
) -> None:
    samples = run.samples()
    group = with_most_turns(samples)
    told = run.rollstream("show", group, "--text")
    for sample in samples[group]:
        for message in sample.metadata["messages"]:
            for line in message["content"].strip().splitlines():
                assert visible(line) in told
    folder = tmp_path / "dump"
    run.rollstream("dump", str(folder), "--groups", str(GROUPS), "--peek")
    page_file = tmp_path / "dumped.html"
    rollstream("show", group, "--dump", str(folder), "--html", str(page_file),
               "--tokenizer", str(vocabulary))  # fmt: skip
    dom = opened(page_file)
    check_turns(dom, samples[group])
    check_tokens(dom, samples[group], tokenizers.Tokenizer.from_file(str(vocabulary)))


class Kept(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing; its server keeps what was asked."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        super().do_GET()


def test_a_hostile_page_runs_nothing_and_asks_for_nothing(tmp_path: Path) -> None:
    """Even where a hole in the escaping had let something through: its policy forbids it."""
    text = "".join(page(hostile_group(), Letters()))  # type: ignore[arg-type]
    hole = "<script>document.title='hacked'</script><img src='/stolen.png' onerror='x()'>"
    whole = text.replace("</footer>", f"</footer>{hole}<i style='background:url(/s.png)'></i>")
    (tmp_path / "escaped.html").write_text(text, encoding="utf-8")
    (tmp_path / "hole.html").write_text(whole, encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Kept, directory=str(tmp_path)))
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        place = f"http://127.0.0.1:{server.server_port}"
        escaped, console = read_page(f"{place}/escaped.html#all")
        broken, refused = read_page(f"{place}/hole.html")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert console == []
    dom = Dom(escaped)
    assert "img" not in dom.tags
    assert dom.title.startswith("group 7")
    assert "<img src=x onerror=alert(1)>" in dom.text
    assert sum(len(strip) for strip in dom.strips.values()) == 3 * 5
    for strip in dom.strips.values():
        for place, (_, _, told) in enumerate(strip):
            piece = json.dumps(visible(HOSTILE[place + 1]), ensure_ascii=False)
            assert told.partition("\n")[0] == f"#{place}  id {place + 1}  {piece}"
    assert Dom(broken).title.startswith("group 7")
    assert any("Content Security Policy" in line for line in refused)
    asked = set(server.asked)  # type: ignore[attr-defined]
    assert asked - {"/favicon.ico"} == {"/escaped.html", "/hole.html"}


def test_a_page_of_many_turns_and_tokens_makes_elements_for_those_in_view_only(
    tmp_path: Path,
) -> None:
    turns = [(list(range(100, 180)), list(range(20)))] * 2000
    sample = a_sample(7, 0, turns=turns)
    assert len(sample.tokens) > 200_000 - 1
    page_file = tmp_path / "long.html"
    group = of_finished(a_group(7, [sample]), "dump")
    page_file.write_text("".join(page(group, None)), encoding="utf-8")
    dom = opened(page_file)
    assert len([kind for kind, _ in dom.says if kind == "say assistant"]) == 2000
    assert dom.pieces["m0-l0-strip"] == math.ceil(len(sample.tokens) / 512)
    assert 512 <= len(dom.strips["m0-l0-strip"]) <= 20 * 512


def test_the_picture_of_the_docs_is_there_and_small() -> None:
    raw = PICTURE.read_bytes()
    assert raw.startswith(b"\x89PNG")
    assert 40_000 < len(raw) < 400_000
    assert re.search(r"images/viewer\.png", (PICTURE.parents[1] / "viewer.md").read_text())
