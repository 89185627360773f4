"""The tree of a session's replies: where a request is attached."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollstream.errors import StopReason
from rollstream.sample import Sample
from tests.toy import a_completion
from tests.unit.gateway.play import LightEngine, Play, refused, system, user
from worker.gateway.context import Answer, Context
from worker.gateway.matchers import Matcher, rendered
from worker.gateway.tree import Echo, Node, Tree
from worker.gateway.types import ChatReply, ErrorKind
from worker.sampling import Sampling
from worker.tito.ids import as_ids, prompt_ids

S = system("s")
U1, U2, U3 = user("u1"), user("u2"), user("u3")


def a(text: str) -> dict[str, str]:
    """Return a reply."""
    return {"role": "assistant", "content": text}


def calling(call_id: str) -> dict[str, Any]:
    """Return a reply that calls a tool."""
    function = {"name": "f", "arguments": "{}"}
    return a("") | {"tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def grow(tree: Tree, messages: Sequence[Any], said: str | dict[str, Any], key: bytes = b"") -> Node:
    """Attach a request and commit a reply to it."""
    message = a(said) if isinstance(said, str) else said
    echo = Echo(list(messages))
    found = tree.attach(echo, key)
    number = len(tree.nodes)
    parent = found.node
    if parent is None:
        context = Context(None, prompt_ids([1, number]))
    else:
        context = Context.behind(parent.context, as_ids([2, number]))
    context.add(Answer(a_completion([3, number], rid=f"{number:032x}"), 0, 0, Sampling()))
    reply = ChatReply(f"r{number}", message, "stop", as_ids([3]), np.zeros(1, np.float32), (), 1, 0, 0.0)  # fmt: skip # noqa: E501
    return tree.add(
        parent, echo, found.num_known, reply, context,
        tools=None, tools_key=key, cut=None, now_unix_s=time.time(),
    )  # fmt: skip


def two_turns(matcher: Matcher = rendered) -> Tree:
    """Return [sys, u1] a1, [u2] a2."""
    tree = Tree(matcher)
    grow(tree, [S, U1], "a1")
    grow(tree, [S, U1, a("a1"), U2], "a2")
    return tree


def attached(tree: Tree, *messages: Any, key: bytes = b"") -> tuple[int | None, int]:
    """Return (node, overlap) of a request."""
    found = tree.attach(Echo(list(messages)), key)
    return None if found.node is None else found.node.id, found.overlap


def test_109_a_full_extension_is_attached_to_the_deepest_node() -> None:
    assert attached(two_turns(), S, U1, a("a1"), U2, a("a2"), U3) == (1, 5)


def test_109_a_resend_is_attached_to_the_parent_of_the_last_node_and_makes_a_sibling() -> None:
    tree = two_turns()
    assert attached(tree, S, U1, a("a1"), U2) == (0, 4)
    node = grow(tree, [S, U1, a("a1"), U2], "a3")
    assert (node.parent, node.twins) == (tree.nodes[0], 1)
    assert node.delta is tree.nodes[1].delta  # held once


def test_109_a_request_that_diverges_behind_the_first_turn_is_attached_to_it() -> None:
    assert attached(two_turns(), S, U1, a("a1"), U3) == (0, 3)


def test_109_a_request_that_diverges_at_the_root_begins_another_one() -> None:
    assert attached(two_turns(), S, U3) == (None, 1)


def test_109_a_shorter_request_than_a_roots_own_begins_another_one() -> None:
    tree = Tree(rendered)
    grow(tree, [S, U1, a("few-shot")], "a1")
    assert attached(tree, S, U1) == (None, 2)


def test_109_a_rewritten_reply_is_attached_to_the_one_before_it() -> None:
    assert attached(two_turns(), S, U1, a("a1"), U2, a("other"), U3) == (0, 4)


def test_109_of_identical_twins_the_latest_is_gone_on_from() -> None:
    tree = two_turns()
    grow(tree, [S, U1, a("a1"), U2], "a2")
    assert attached(tree, S, U1, a("a1"), U2, a("a2"), U3) == (2, 5)


def test_109_of_identical_twins_the_one_that_was_gone_on_with_is_deeper() -> None:
    tree = two_turns()
    grow(tree, [S, U1, a("a1"), U2, a("a2"), U3], "a3")
    grow(tree, [S, U1, a("a1"), U2], "a2")
    assert attached(tree, S, U1, a("a1"), U2, a("a2"), U3, a("a3"), U1) == (2, 7)


@pytest.mark.parametrize("gone_on_with", ["call_1", "call_2"])
def test_of_twins_the_one_is_gone_on_from_whose_calls_come_back_by_their_ids(
    gone_on_with: str,
) -> None:
    tree = Tree(rendered)
    first, second = (grow(tree, [S, U1], calling(name)) for name in ("call_1", "call_2"))
    result = {"role": "tool", "tool_call_id": gone_on_with, "content": "1"}
    found = {"call_1": first, "call_2": second}[gone_on_with]
    assert attached(tree, S, U1, calling(gone_on_with), result) == (found.id, 3)
    # One turn later too, where both lines say the same.
    for name in ("call_1", "call_2"):
        answer = {"role": "tool", "tool_call_id": name, "content": "1"}
        grow(tree, [S, U1, calling(name), answer], "a1")
    node, _ = attached(tree, S, U1, calling(gone_on_with), result, a("a1"), U2)
    assert node is not None
    assert tree.nodes[node].parent is found


def test_109_an_empty_request_begins_a_root() -> None:
    assert attached(two_turns()) == (None, 0)


async def test_109_a_line_of_1024_replies_is_allowed_and_one_more_is_not() -> None:
    play = Play(engine=LightEngine([30, 2]), limits={"max_context": 1 << 20})
    history: list[Any] = []
    for number in range(1024):
        reply = await play.ask([user(str(number))], continues=history[-1] if history else "")
        history.append(reply.id)
    deepest = play.session._tree.newest
    assert deepest is not None
    assert deepest.depth == 1024
    wrong = await refused(play.ask([U1], continues=history[-1]))
    assert wrong.kind is ErrorKind.INVALID
    assert "1024" in wrong.message
    assert play.session.ended_by is StopReason.MAX_TURNS
    await play.session.close()
    sample = await play.session.collect()
    assert isinstance(sample, Sample)
    assert len(sample.calls) == 1024


def test_other_tools_are_another_root() -> None:
    tree = two_turns()
    assert attached(tree, S, U1, a("a1"), U2, key=b"t") == (None, 0)
    node = grow(tree, [S, U1], "a1", b"t")
    assert (node.parent, node.twins) == (None, 2)
    assert attached(tree, S, U1, a("a1"), U2, key=b"t") == (2, 3)


def test_conversation_and_path_are_those_of_the_line() -> None:
    tree = two_turns()
    node = grow(tree, [S, U1, a("a1"), U3], "a3")
    assert node.conversation() == [S, U1, a("a1"), U3, a("a3")]
    assert [one.id for one in node.path()] == [0, 2]
    assert [leaf.id for leaf in tree.leaves()] == [1, 2]
    assert [child.id for child in tree.children(None)] == [0]
    assert tree.of_reply("r2") is node
    assert tree.of_reply("r9") is None


def test_what_came_back_before_is_known_without_the_matcher() -> None:
    """The matcher sees each echo of a reply once, so a session's cost is linear in its turns."""
    seen = 0

    def counting(stored: Any, echoed: Any) -> bool:
        nonlocal seen
        seen += 1
        return rendered(stored, echoed)

    tree = Tree(counting)
    history: list[Any] = [S]
    for turn in range(64):
        history.append(user(f"u{turn}"))
        grow(tree, history, f"a{turn}")
        # Each time spelled anew, with what SDKs add to a message.
        history.append(a(f"a{turn}") | {"refusal": None})
    assert len(tree.nodes[-1].path()) == 64
    assert seen <= 4 * 64


def test_a_spelling_that_changed_is_compared_anew() -> None:
    tree = two_turns()
    plain = [S, U1, a("a1"), U2, a("a2"), U3]
    assert attached(tree, *plain) == (1, 5)
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a1"}]}
    assert attached(tree, S, U1, parts, U2, a("a2"), U3) == (1, 5)
    assert attached(tree, S, U1, a("a1 "), U2, a("a2"), U3) == (None, 2)


@pytest.mark.parametrize("number", [1 << 80, float("nan"), "\ud800"])
def test_a_message_that_no_json_has_is_digested_all_the_same(number: Any) -> None:
    message = {"role": "user", "content": "x", "odd": number}
    assert len(Echo([message]).key(0, 1)) == 16
    assert Echo([message]).key(0, 1) != Echo([U1]).key(0, 1)


def test_attach_asks_the_matcher_once_for_each_root_when_a_history_is_rewritten_every_turn() -> (
    None
):
    asked = 0

    def counting(stored: Any, echoed: Any) -> bool:
        nonlocal asked
        asked += 1
        return rendered(stored, echoed)

    tree = Tree(counting)
    history: list[Any] = [S, U1]
    for turn in range(40):
        found = tree.attach(Echo(history), b"")
        assert (found.node, found.overlap) == (None, max(0, len(history) - 2))
        asked = 0
        grow(tree, history, f"said {turn}")
        assert asked <= turn + 1  # and not once for each message of each root
        history = [*history, a(f"rewritten {turn}"), U2]


def test_twins_and_overlaps_are_the_matchers_own_when_spellings_change_in_their_midst() -> None:
    respelled = {"content": [{"type": "text", "text": "u1"}], "role": "user"}
    tree = Tree(rendered)
    first = grow(tree, [S, U1, U2], "a1")
    second = grow(tree, [S, respelled, U2], "a2")
    assert second.twins == first.id
    assert tree.attach(Echo([S, respelled, U2, a("a1"), U3]), b"").node is first
    found = tree.attach(Echo([S, respelled, U3]), b"")
    assert (found.node, found.overlap) == (None, 2)
    assert tree.attach(Echo([S, respelled]), b"").overlap == 2
