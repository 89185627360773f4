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
