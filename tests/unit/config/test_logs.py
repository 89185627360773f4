"""Logs: one JSON object a line, whoever wrote the record."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from rollstream.logs import configure


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    yield stream
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()
    root.handlers[:], root.level = handlers, level


def records(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_structlog_and_stdlib_records_have_one_shape(lines: io.StringIO) -> None:
    structlog.contextvars.bind_contextvars(run="r")
    structlog.get_logger("a").info("event_one", rows=3, text="é\n{")
    logging.getLogger("b").warning("event_two", extra={"rows": 3})
    one, two = records(lines)
    assert list(one)[:4] == list(two)[:4] == ["ts", "level", "logger", "event"]
    assert (one["event"], one["rows"], one["text"], one["run"]) == ("event_one", 3, "é\n{", "r")
    assert (two["event"], two["rows"], two["run"], two["logger"]) == ("event_two", 3, "r", "b")


def test_records_below_the_level_are_not_written(lines: io.StringIO) -> None:
    structlog.get_logger("a").debug("quiet")
    logging.getLogger("httpx").info("HTTP Request: POST …")
    assert records(lines) == []


def test_secrets_of_urls_are_not_written(lines: io.StringIO) -> None:
    url = "redis://:hunter2@host"
    try:
        raise ValueError(url)
    except ValueError as error:
        structlog.get_logger("a").exception("broke", error=f"at {error}")
    assert "hunter2" not in lines.getvalue()
    assert [record["error"] for record in records(lines)] == ["at redis://:***@host"]


def test_an_exception_stays_within_its_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("x")
    except ValueError:
        structlog.get_logger("a").exception("broke")
        logging.getLogger("b").exception("broke")
    for record in records(lines):
        assert "ValueError: x" in str(record["exception"])
