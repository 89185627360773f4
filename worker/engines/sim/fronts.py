"""What the two protocol fronts have in common: routes, bodies, and the transport's faults.

Owns no state. Never reads a request's fields. Invariant: a fault of the transport looks the same in
both protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from ..server_words import Refused
from .core import SimCore
from .damage import OVERFLOW_WORDS, STATUS_WORDS, mark_nan, not_json
from .faults import Fault
from .http import Exchange

Routes: TypeAlias = Mapping[str, tuple[str, Callable[[Exchange], None]]]
"""(methods with a space between, handler) by path."""


def json_object(raw: bytes) -> dict[str, Any]:
    """Return a body that must be a JSON object; none is an empty one.

    Raises:
        Refused: it is something else.
    """
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object")
    return body


def status_words(core: SimCore, fault: Fault) -> str:
    """Return the message of a fault that is an HTTP status; overflows take turns."""
    if fault is Fault.OVERFLOW:
        return OVERFLOW_WORDS[(core.counts[fault.value] - 1) % len(OVERFLOW_WORDS)]
    return STATUS_WORDS[fault]


DONE = b"data: [DONE]\n\n"


def send_event(exchange: Exchange, raw: bytes, fault: Fault | None = None) -> None:
    """Send an event of a stream that goes on."""
    exchange.write(b"data: %b\n\n" % (mark_nan(raw) if fault is Fault.LOGPROB_NAN else raw))


def end_stream(exchange: Exchange, *events: bytes, fault: Fault | None = None) -> None:
    """End a stream with these events, or with what a fault of the transport leaves of them."""
    if fault is Fault.HALF_BODY:
        exchange.break_piece(b"data: %b\n\n" % events[0])
        return
    for raw in events:
        send_event(exchange, not_json(raw) if fault is Fault.NOT_JSON else raw, fault)
    exchange.write(DONE)
    exchange.end()


def send(exchange: Exchange, raw: bytes, fault: Fault | None) -> None:
    """Answer with a body, or with what a fault of the transport leaves of it."""
    if fault is Fault.HALF_BODY:
        exchange.break_off(200, raw)
    elif fault is Fault.NOT_JSON:
        exchange.answer(200, not_json(raw))
    elif fault is Fault.LOGPROB_NAN:
        exchange.answer(200, mark_nan(raw))
    else:
        exchange.answer(200, raw)
