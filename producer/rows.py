"""From a row to a prompt group: every check that a prompt passes before it is enqueued.

Owns the columns and what each may hold. Never reads a file, never talks to Redis. Invariant: a
group that comes out has a wire form, a configured environment and parameters that training
allows; whatever has not is a `BadRow` that says where and why.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.errors import ConfigError, WireError
from rollstream.group import INDEX_STRIDE, PromptGroup
from rollstream.parameters import is_whole, leaving, off_problem, problem_of
from rollstream.wire import encode_prompt

from .sources import BadRow, Row

COLUMNS = ("prompt", "label", "metadata", "tools", "n", "sampling", "env")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class RowRules:
    """What rows are read by."""

    samples_per_prompt: Mapping[str, int]
    """{environment: n where the row has none}."""
    keys: Mapping[str, str]
    """{our name: the file's name}."""
    allow_off_distribution: bool = False
    timeout_s: float = 0.0
    max_record_bytes: int | None = None
    """Of a group's record: its prompt, label, metadata and tools together."""
    clock: Callable[[], float] = time.time
    """Unix seconds."""

    def __post_init__(self) -> None:
        """Refuse renamed columns that do not exist.

        Raises:
            ConfigError: a name of ours that is none.
        """
        for name in self.keys:
            if name not in COLUMNS:
                near = difflib.get_close_matches(name, COLUMNS, 1)
                hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(COLUMNS)}"
                raise ConfigError(f"producer.keys: {name!r} is no column of ours; {hint}")

    def group(self, row: Row, group_index: int) -> tuple[PromptGroup, bytes]:
        """Return the group of a row, and its record for the wire.

        Raises:
            BadRow: with where and why.
        """
        reader = _Reader(row, self)
        env = reader.env()
        group = PromptGroup(
            group_index=group_index,
            n=reader.n(self.samples_per_prompt[env]),
            prompt=reader.prompt(),
            label=reader.column("label"),
            tools=reader.tools(),
            metadata=reader.an_object("metadata"),
            sampling=reader.sampling(),
            env=env,
            timeout_s=self.timeout_s,
            # What the worker's span `queue_wait` begins with; a group that was enqueued before
            # keeps the record it has.
            enqueued_unix_s=self.clock(),
        )
        try:
            record = encode_prompt(group)
        except WireError as error:
            reason = str(error).partition(": ")[2]
            raise BadRow(row.where, reason) from None
        if self.max_record_bytes is not None and len(record) > self.max_record_bytes:
            raise BadRow(
                row.where,
                f"its record (prompt, label, metadata and tools) takes {len(record)} bytes, "
                f"allowed are {self.max_record_bytes} (worker.max_body_bytes)",
            )
        return group, record

    def unused(self, rows: Iterable[Row]) -> list[str]:
        """Return the columns of `rows` that nothing reads: usually more data, rarely a typo."""
        read = {self.keys.get(name, name) for name in COLUMNS}
        return sorted({name for row in rows for name in row.values} - read)


class _Reader:
    """One row while it is read."""

    def __init__(self, row: Row, rules: RowRules) -> None:
        self._row, self._rules = row, rules

    def column(self, name: str) -> Any:
        return self._row.values.get(self._rules.keys.get(name, name))

    def bad(self, name: str, reason: str) -> BadRow:
        theirs = self._rules.keys.get(name, name)
        renamed = f" ({name})" if theirs != name else ""
        return BadRow(self._row.where, f"{theirs}{renamed}: {reason}")

    def prompt(self) -> Any:
        value = self.column("prompt")
        if value is None:
            have = ", ".join(list(self._row.values)[:8]) or "none"
            raise self.bad("prompt", f"missing; the row has {have} (producer.keys renames columns)")
        if isinstance(value, str):
            if not value:
                raise self.bad("prompt", "empty")
            return value
        if not isinstance(value, list):
            raise self.bad("prompt", "expected text or a list of messages")
        if not value:
            raise self.bad("prompt", "an empty list of messages")
        for place, message in enumerate(value):
            problem = _message_problem(message)
            if problem:
                raise self.bad("prompt", f"message {place}: {problem}")
        return value

    def env(self) -> str:
        value, known = self.column("env"), self._rules.samples_per_prompt
        if self._row.env:
            if value not in (None, self._row.env):
                raise self.bad("env", f"{value!r} in the source of {self._row.env!r}")
            return self._row.env
        if value is None:
            if "default" in known:
                return "default"
            if len(known) == 1:
                return next(iter(known))
            raise self.bad("env", f"missing; the configured ones are {', '.join(known)}")
        if not isinstance(value, str) or value not in known:
            raise self.bad("env", f"{value!r} is not configured; there is {', '.join(known)}")
        return value

    def n(self, default: int) -> int:
        value = self.column("n")
        if value is None:
            return default
        if not is_whole(value) or not 1 <= value <= INDEX_STRIDE:
            raise self.bad("n", f"{value!r}: expected a whole number from 1 to {INDEX_STRIDE}")
        return int(value)

    def tools(self) -> list[dict[str, Any]] | None:
        value = self.column("tools")
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.bad("tools", "expected a list of tool specifications")
        for place, tool in enumerate(value):
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise self.bad(
                    "tools", f'tool {place}: expected {{"type": "function", "function": {{"name"…}}'
                )
        return value

    def an_object(self, name: str) -> dict[str, Any]:
        value = self.column(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.bad(name, "expected an object")
        return value

    def sampling(self) -> dict[str, Any]:
        value = self.an_object("sampling")
        for name, given in value.items():
            if problem := problem_of(name, given):
                raise self.bad("sampling", problem)
        for name in () if self._rules.allow_off_distribution else leaving(value):
            raise self.bad("sampling", off_problem(name, value[name]))
        return value


def _message_problem(message: Any) -> str:
    if not isinstance(message, dict):
        return "expected an object with role and content"
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        return f"role {role!r} is not one of {', '.join(ROLES)}"
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return ""
    if isinstance(content, list) and content and all(map(_is_text_part, content)):
        return ""
    if content is None:
        return "content is missing"
    return "content is not text (other kinds are not supported)"


def _is_text_part(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def texts_of(prompt: Any) -> list[str]:
    """Return the texts of a prompt that passed: itself, or the content of every message."""
    if isinstance(prompt, str):
        return [prompt]
    return [_text_of(message.get("content")) for message in prompt]


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""
