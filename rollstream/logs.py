"""Logging of the apps: one schema, one JSON object a line on stderr; or coloured lines for people.

Owns the schema and the one set-up that all processes share. Never imported by the client library,
whose logging stays the caller's; structlog is imported when `configure` runs, not before. Never
makes a process wait for whoever reads its log (`rollstream.log_sink`). Invariant: whoever wrote a
record (structlog, stdlib logging of a library, a warning, an exception that nobody caught), it is
one line of one shape: `ts, level, logger, event`, the ids of where it happened, then the values.

In the apps: `log = structlog.get_logger("producer")`, `log.info("event_name", rows=3)`: a constant
in snake_case, values under names that end in their unit. docs/logs.md lists every event, and a test
holds it to the code. Ids: those of a process by `bind_process`, those of a task by
`structlog.contextvars.bind_contextvars`. No prompt or completion text at INFO.
"""

from __future__ import annotations

import io
import logging
import math
import sys
import threading
import warnings
from types import TracebackType
from typing import Any, Literal, TextIO

from rollstream.log_sink import LineHandler, flush
from rollstream.urls import scrub

SCHEMA = ("ts", "level", "logger", "event")
"""What every line has, first and in this order."""
IDS = ("run", "incarnation", "group_index", "member")
"""What a line has next, where it is known: the run, the process's life, the group, its member."""
MAX_DEPTH = 4
_process: dict[str, Any] = {}


def configure(
    format: Literal["json", "console"] = "json",  # noqa: A002 - named as telemetry.log_format is
    level: str = "info",
    *,
    stream: TextIO | None = None,
) -> None:
    """Set up logging of this process; a repeated call replaces the former set-up.

    Args:
        format: `json` for machines, `console` for a person at a terminal.
        level: `debug`, `info`, `warning` or `error`.
        stream: where lines go; None is stderr (stdout belongs to what a command answers).
    """
    import structlog

    out = stream or sys.stderr
    number = getattr(logging, level.upper())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        _with_process,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = _handler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(format, colors=out.isatty()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # These two say every request and every reconnect at INFO; what matters is in our own events.
    for chatty in ("httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(number, logging.WARNING))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    if stream is None:
        _catch_what_nobody_logs()


def bind_process(**ids: Any) -> None:
    """Give ids to every line of this process, in whatever thread it is written."""
    _process.update(ids)


def group_id(name: str) -> int | str:
    """Return a group's id as lines have it: the number, or the name of an evaluation's group."""
    return int(name) if name.isdecimal() and name.isascii() and len(name) < 20 else name


def _handler(out: TextIO) -> logging.Handler:
    try:
        return LineHandler(out.fileno())
    except (OSError, ValueError, io.UnsupportedOperation):  # in memory: it never blocks
        return logging.StreamHandler(out)


def _with_process(_logger: Any, _method: str, record: Any) -> Any:
    for name, value in _process.items():
        record.setdefault(name, value)
    return record


# --- what is written without a logger ------------------------------------------------------------
def _catch_what_nobody_logs() -> None:
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    sys.unraisablehook = _unraisable
    warnings.showwarning = _warned


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("uncaught").critical("uncaught_exception", exc_info=(kind, error, trace))
    flush()


def _uncaught_in_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_value is None or issubclass(given.exc_type, SystemExit):
        return
    logging.getLogger("uncaught").error(
        "thread_died",
        exc_info=(given.exc_type, given.exc_value, given.exc_traceback),
        extra={"thread_name": given.thread.name if given.thread else ""},
    )


def _unraisable(given: Any) -> None:
    error = given.exc_value
    if error is not None:
        logging.getLogger("uncaught").error(
            "exception_ignored",
            exc_info=(type(error), error, given.exc_traceback),
            extra={"where": str(given.err_msg or "in a finaliser or callback")},
        )


def _warned(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if file is not None:
        file.write(warnings.formatwarning(message, category, filename, lineno, line))
        return
    logging.getLogger("warnings").warning(
        "python_warning",
        extra={
            "category": category.__name__,
            "warning": str(message),
            "at": f"{filename}:{lineno}",
        },
    )


# --- how a record becomes a line -----------------------------------------------------------------
def _renderers(format: str, *, colors: bool) -> list[Any]:  # noqa: A002 - the setting's own name
    import structlog

    if format == "console":
        plain = structlog.dev.plain_traceback  # the rich one prints local variables: prompts, URLs
        return [
            _cleaned,
            structlog.dev.ConsoleRenderer(
                colors=colors, timestamp_key="ts", exception_formatter=plain
            ),
        ]
    return [
        structlog.processors.format_exc_info,
        _cleaned,
        _in_order,
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]


def _cleaned(_logger: Any, _method: str, record: Any) -> Any:
    """Hide the secrets of URLs (libraries put addresses into their errors); no NaN: JSON has none.

    A lone surrogate would make a line that is not UTF-8.
    """
    for name, value in record.items():
        if type(value) not in (int, bool) and name != "exc_info":
            record[name] = _clean(value, MAX_DEPTH)
    return record


def _clean(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        if "://" in value:
            value = scrub(value)
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth and isinstance(value, list | tuple):
        return [_clean(one, depth - 1) for one in value]
    if depth and isinstance(value, dict):
        return {str(key): _clean(one, depth - 1) for key, one in value.items()}
    if value is None or isinstance(value, bool | int):
        return value
    return _clean(str(value), 0)  # an exception has addresses in it, too


def _in_order(_logger: Any, _method: str, record: Any) -> dict[str, Any]:
    """Put what every line has first, so that lines can be read by eye too."""
    first = {name: record.pop(name) for name in SCHEMA}
    ids = {name: record.pop(name) for name in IDS if name in record}
    return {**first, **ids, **record}
