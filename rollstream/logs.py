"""Logging of the apps: one JSON object a line on stderr, or coloured lines for a person.

Owns the one set-up that producer and worker share. Never imported by the client library, whose
logging stays the caller's; structlog is imported when `configure` runs, not before. Invariant:
records of structlog and of stdlib logging (redis, rq, httpx) come out in the same shape:
`ts, level, logger, event`, then the values, and one record is one line.

In the apps: `log = structlog.get_logger("producer")`, `log.info("event_name", rows=3)`; ids are
bound with `structlog.contextvars.bind_contextvars`. No prompt or completion text at INFO.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

from rollstream.urls import scrub


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
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = logging.StreamHandler(out)
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


def _renderers(format: str, *, colors: bool) -> list[Any]:  # noqa: A002 - the setting's own name
    import structlog

    if format == "console":
        plain = structlog.dev.plain_traceback  # the rich one prints local variables: prompts, URLs
        return [
            _scrubbed,
            structlog.dev.ConsoleRenderer(
                colors=colors, timestamp_key="ts", exception_formatter=plain
            ),
        ]
    return [
        structlog.processors.format_exc_info,
        _scrubbed,
        _in_order,
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]


def _scrubbed(_logger: Any, _method: str, record: Any) -> Any:
    """Hide the secrets of URLs: libraries put addresses into their errors."""
    for name, value in record.items():
        if isinstance(value, str) and "://" in value:
            record[name] = scrub(value)
    return record


def _in_order(_logger: Any, _method: str, record: Any) -> dict[str, Any]:
    """Put what every line has first, so that lines can be read by eye too."""
    first = {name: record.pop(name) for name in ("ts", "level", "logger", "event")}
    return {**first, **record}
