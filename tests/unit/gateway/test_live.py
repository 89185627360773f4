"""A reply while it is sampled: what was read stays, what was not may be taken back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.errors import EngineFault
from worker.gateway.live import LiveReply
from worker.tito.ids import as_ids


class Numbers:
    """A reply that grows: says two ids at once, holds an odd one back, and must see all of them."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.told = 0

    def feed(self, ids: Any) -> list[dict[str, Any]]:
        """Take ids."""
        self.ids += ids.tolist()
        whole = len(self.ids) - len(self.ids) % 2
        text = "".join(map(str, self.ids[self.told : whole]))
        self.told = whole
        return [{"content": text}] if text else []

    def finish(self, message: Any) -> list[dict[str, Any]]:
        """Tell the rest."""
        text = "".join(map(str, self.ids[: self.told]))
        assert message["content"].startswith(text)
        return [{"content": message["content"][len(text) :]}]


def live() -> LiveReply:
    """Return a reply that nobody waits for."""
    return LiveReply(Numbers, lambda: None)


def text(of: LiveReply) -> str:
    """Return what was told."""
    return "".join(delta["content"] for delta in of.deltas)


IDS = st.lists(st.integers(1, 9), max_size=5)
TRY = st.tuples(st.lists(IDS, max_size=3), st.booleans())
"""What a try streams in pieces, and whether a reader reads all of it."""
CALL = st.tuples(st.lists(TRY, max_size=2), IDS, st.integers(0, 5), st.booleans())
"""Tries that broke, what the last one samples, how much of it is streamed, whether that is read."""


@given(st.lists(CALL, max_size=4))
def test_what_is_told_is_the_reply_or_breaks_behind_what_was_read(calls: Any) -> None:
    reply, sampled = live(), []
    for tries, ids, streamed, is_read in calls:
        begun = _tries(reply, tries)
        read = text(reply)[: 0 if not reply.num_read else None]
        if not begun or not reply.begin("r"):
            assert reply.num_read > 0
            assert text(reply).startswith(read)  # nothing of it was taken back
            return
        reply.add(as_ids(ids[:streamed]))
        if is_read:
            reply.num_read = len(reply.deltas)
        reply.settle(as_ids(ids))
        sampled += ids
        assert "".join(map(str, sampled)).startswith(text(reply))
    reply.finish({"content": "".join(map(str, sampled))})
    assert text(reply) == "".join(map(str, sampled))


def _tries(reply: LiveReply, tries: Any) -> bool:
    """Play tries that broke; False once another one must not be made."""
    for pieces, is_read in tries:
        if not reply.begin("r"):
            return False
        for piece in pieces:
            reply.add(as_ids(piece))
        if is_read:
            reply.num_read = len(reply.deltas)
    return True


def test_a_try_is_taken_back_to_where_the_call_before_it_ended() -> None:
    reply = live()
    reply.begin("a")
    reply.add(as_ids([1, 2, 3]))
    reply.num_read = len(reply.deltas)
    reply.settle(as_ids([1, 2, 3, 4]))
    reply.begin("b")
    reply.add(as_ids([9, 9]))
    assert text(reply) == "12" + "34" + "99"
    assert reply.begin("c")  # nobody read of it
    assert text(reply) == "12"
    reply.add(as_ids([5]))
    assert text(reply) == "1234"
    reply.settle(as_ids([5, 6]))
    reply.finish({"content": "123456"})
    assert text(reply) == "123456"


def test_a_call_that_came_to_nothing_behind_what_was_read_is_broken() -> None:
    reply = live()
    reply.begin("a")
    reply.add(as_ids([1, 2]))
    reply.num_read = 1
    with pytest.raises(EngineFault) as wrong:
        reply.settle(as_ids([]))
    assert wrong.value.retryable
