"""What clients make up cannot fill a log."""

from __future__ import annotations

from structlog.testing import capture_logs

from worker.gateway.dialects.unknown import MAX_NAMES, UnknownFields


def test_unknown_fields_are_told_of_once_each_and_so_many_at_most() -> None:
    unknown = UnknownFields("chat")
    with capture_logs() as logs:
        for number in range(10 * MAX_NAMES):
            unknown.tell(("again", f"x{number}"))
    told = [name for entry in logs for name in entry["fields"]]
    assert len(told) == len(set(told)) == MAX_NAMES
    assert told[:2] == ["again", "x0"]
    assert {entry["dialect"] for entry in logs} == {"chat"}
