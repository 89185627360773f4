"""Every event is a constant with a row in docs/logs.md, and none says what was sampled."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from rollstream.logs import IDS, SCHEMA
from tests.unit.logs.calls import ROOT, LogCall, log_calls

ROW = re.compile(r"^\| `(\w+)` \| ([\w/]+) \| (.*?) \| (.+) \|$", re.MULTILINE)
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
WITHOUT_A_CALL = {"log_record_unprintable": ({"error"}, {"error"})}
"""Made without a logger: the record that could not be written was one."""
TEXTS = {
    "prompt", "prompts", "response", "responses", "completion", "completions", "content", "text",
    "texts", "messages", "output", "outputs", "body", "label", "decoded", "reasoning",
}  # fmt: skip
"""Names under which prompts and completions go in this code."""


def documented() -> dict[str, tuple[set[str], set[str]]]:
    page = (ROOT / "docs" / "logs.md").read_text()
    rows = {m[1]: (set(m[2].split("/")), set(re.findall(r"`(\w+)`", m[3])))
            for m in ROW.finditer(page)}  # fmt: skip
    assert len(rows) > 80
    return rows


def test_every_event_is_a_constant_in_snake_case() -> None:
    wrong = [c.where for c in log_calls() if c.event is None or not NAME.fullmatch(c.event)]
    assert wrong == []


def test_the_page_has_every_event_with_its_levels_and_keys_and_no_others() -> None:
    in_code: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    is_open: set[str] = set()
    for call in log_calls():
        levels, keys = in_code[str(call.event)]
        levels.add(call.level)
        keys.update(call.keys)
        if call.has_more:
            is_open.add(str(call.event))
    rows = documented()
    assert sorted(rows) == sorted({*in_code, *WITHOUT_A_CALL})
    for event, (levels, keys) in {**in_code, **WITHOUT_A_CALL}.items():
        assert rows[event][0] == levels, event
        more = rows[event][1] - keys
        assert keys <= rows[event][1], event
        assert not more or event in is_open, f"{event}: nothing says {more}"


def test_no_value_takes_the_name_of_what_every_line_has() -> None:
    reserved = {*SCHEMA, "exception", "stack", "name", "msg", "args"}
    assert [c.where for c in log_calls() if reserved & set(c.keys)] == []


def test_ids_have_one_name_each() -> None:
    other_names = {"group", "gid", "group_id", "sample", "idx", "member_index", "worker"}
    assert [c.where for c in log_calls() if other_names & set(c.keys)] == []
    assert set(IDS) >= {"run", "incarnation", "group_index", "member"}


def test_no_prompt_or_completion_is_logged_from_info_up() -> None:
    wrong = [
        f"{call.where}: {key}={ast.unparse(value)}"
        for call in log_calls()
        if call.level != "debug"
        for key, value in call.keys.items()
        if key in TEXTS or _names(value) & TEXTS
    ]
    assert wrong == []


def _names(value: ast.expr) -> set[str]:
    attributes = {node.attr for node in ast.walk(value) if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def test_the_search_sees_what_it_is_to_find() -> None:
    by_event: dict[str, list[LogCall]] = defaultdict(list)
    for call in log_calls():
        by_event[str(call.event)].append(call)
    assert by_event["event_loop_blocked"][0].has_more, "handed on by partial"
    assert by_event["rollout_bug"][0].level == "error", "log.exception"
    assert "error" in by_event["user_code_stopped_the_loop"][0].keys, "extra= of stdlib logging"
    assert by_event["run_seen"][0].level == "info", "handed on as a function"
