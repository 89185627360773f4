"""What the scripts say of themselves, held against their text and the table of states."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

from rollstream.queue.scripts import SCRIPT_NAMES, load_scripts, parse_header
from rollstream.states import (
    GROUP_TRANSITIONS,
    MEMBER_TRANSITIONS,
    GroupEvent,
    GroupState,
    MemberEvent,
    MemberState,
)

FOLDER = files("rollstream.queue") / "scripts"


@pytest.fixture(params=SCRIPT_NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_file_is_a_script_and_every_script_a_file() -> None:
    found = {path.name.removesuffix(".lua") for path in FOLDER.iterdir() if path.is_file()}
    assert found == set(SCRIPT_NAMES)


def test_header_names_events_of_the_table(name: str) -> None:
    header = load_scripts()[name].header
    assert {GroupEvent(word) for word in header.group_events} <= {e for _, e in GROUP_TRANSITIONS}
    assert {MemberEvent(word) for word in header.member_events} <= {
        e for _, e in MEMBER_TRANSITIONS
    }


def test_only_enqueue_creates_a_group_and_in_its_first_states() -> None:
    creates = {name: script.header.creates for name, script in load_scripts().items()}
    assert creates.pop("enqueue") == (GroupState.OPEN, MemberState.QUEUED)
    assert set(creates.values()) == {()}


def test_every_event_of_the_table_is_made_by_a_script() -> None:
    headers = [script.header for script in load_scripts().values()]
    made = set(itertools.chain.from_iterable(h.group_events for h in headers))
    assert made == set(GroupEvent)
    made = set(itertools.chain.from_iterable(h.member_events for h in headers))
    assert made == set(MemberEvent)


def test_header_names_at_least_every_key_that_the_script_itself_writes_out(name: str) -> None:
    text = (FOLDER / f"{name}.lua").read_text()
    named = {key for key, _ in load_scripts()[name].header.keys}
    body = "\n".join(line for line in text.splitlines() if not line.startswith("--"))
    written = set(re.findall(r"K \.\. '([a-z]+)'", body))
    written |= {"m"} if re.search(r"\bM\b", body) else set()
    written |= {"g:<gid>"} if "group_key(" in body else set()
    written |= {"b:<gid>"} if "body_key(" in body else set()
    assert written <= named


def test_header_is_refused_where_a_line_is_missing() -> None:
    with pytest.raises(ValueError, match=r"x\.lua: the header has no line 'member'"):
        parse_header("x", "-- x: y\n-- keys: m HASH\n-- group: -\n")


def test_each_shared_piece_comes_once_and_behind_what_it_uses(name: str) -> None:
    header, source = load_scripts()[name].header, load_scripts()[name].source
    texts = {
        path.name.removesuffix(".lua"): path.read_text() for path in (FOLDER / "shared").iterdir()
    }
    at = {piece: source.find(text) for piece, text in texts.items() if text in source}
    assert {"prelude", *header.uses, *header.lazily} <= set(at)
    for piece in at:
        # What two lazy pieces use is made by either: it may come once in each.
        assert source.count(texts[piece]) == 1 or (header.lazily and piece not in header.uses)
        for used in re.findall(r"^-- uses: (.*)$", texts[piece], re.MULTILINE):
            assert all(at[word] < at[piece] for word in used.split())


def test_script_calls_no_function_that_its_pieces_do_not_define(name: str) -> None:
    source = re.sub(r"--.*", "", load_scripts()[name].source)
    # What a lazy piece defines is known inside of it only.
    lazy = r"^(local function (\w+)\(\.\.\.\)\n).*?^return \2\(\.\.\.\)\nend\n"
    plain, num_lazy = re.subn(lazy, r"\1", source, flags=re.MULTILINE | re.DOTALL)
    assert num_lazy == len(load_scripts()[name].header.lazily)
    check_calls(plain)
    check_calls(source)


def check_calls(source: str) -> None:
    source = re.sub(r"'[^']*'", "''", source)
    called = set(re.findall(r"(?<![\w.:])([a-z_]+)\(", source))
    defined = set(re.findall(r"local function ([a-z_]+)", source)) | {"call"}
    known = {"and", "or", "not", "if", "elseif", "function", "return", "in", "until", "while",
             "tonumber", "tostring", "ipairs", "pairs", "unpack", "type", "next", "select",
             "pcall", "error"}  # fmt: skip
    assert called <= defined | known
