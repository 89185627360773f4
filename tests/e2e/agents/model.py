"""What a session has to make of its agent's requests: an own, small model of its policies.

Owns the tree as the agent's journal shows it, and which of its replies must be trained. Knows only
what a client saw. Invariant: a reply is a node exactly when an answer of 200 with all of it left
the gateway, whether its client waited for the last byte or not; replies that were told again under
their id are one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.e2e.agents.record import Attempt, Try
from tests.e2e.agents.scenes import Scene
from tests.e2e.agents.truth import Words, words_of
from tests.e2e.agents.words import Said, Turn, dialect_of, reply_in

Turns = tuple[Turn, ...]


@dataclass(slots=True, eq=False)
class Seen:
    """One reply, as the agent's journal has it."""

    id: int
    """In the order in which they were given out."""
    said: Said
    turns: Turns
    """Of its request."""
    parent: Seen | None
    request: tuple[Any, ...]
    """The same for the same request."""
    tries: list[Try]
    children: list[Seen] = field(default_factory=list)

    @property
    def words(self) -> Words:
        return words_of(self.said)

    def newest(self) -> int:
        """Return the id of the newest reply at or below it."""
        return max([self.id, *(child.newest() for child in self.children)])

    def path(self) -> Iterator[Seen]:
        """Yield it and what is above it."""
        node: Seen | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True)
class Session:
    """All that an agent saw."""

    nodes: list[Seen]
    problems: list[str]
    """A reply that was told in two ways."""
    lost_retries: list[str]
    """A second try of an SDK that was answered with another reply than the first."""
    num_retries: int = 0
    """Second tries of a request whose first one was answered."""
    num_joined_maybe: int = 0
    """Second tries of a request whose first one its client did not wait for."""


def read_session(attempt: Attempt) -> Session:
    """Return the tree that an agent's requests and replies are."""
    nodes: list[Seen] = []
    by_id: dict[str, Seen] = {}
    conversations: dict[tuple[str, Turns], list[Seen]] = {}
    found = Session(nodes, [], [])
    # Who left behind the last event left too late: all of the reply was given out.
    answered = [t for t in attempt.tries if t.raw and t.status == 200]
    for one in sorted(answered, key=lambda t: t.at_s):
        reply = reply_in(one.path, one.raw)
        if reply is None:
            continue
        said = dialect_of(one.path).said(reply)
        earlier = by_id.get(said.id)
        if earlier is not None:
            if words_of(said) != earlier.words or said.finish != earlier.said.finish:
                found.problems.append(f"try {one.n}: reply {said.id} is told in two ways")
            earlier.tries.append(one)
            continue
        tools = json.dumps(one.body.get("tools"), sort_keys=True)
        turns = _turns(one, by_id)
        parent = _parent(turns, tools, conversations)
        start = 0 if parent is None else len(parent.turns) + 1
        request = (parent.id if parent else -1, tools if parent is None else "", turns[start:])
        node = Seen(len(nodes), said, turns, parent, request, [one])
        nodes.append(node)
        by_id[said.id] = node
        conversations.setdefault((tools, (*turns, said.turn())), []).append(node)
        if parent is not None:
            parent.children.append(node)
    _retries(attempt, found)
    return found


def _turns(one: Try, by_id: dict[str, Seen]) -> Turns:
    turns = tuple(dialect_of(one.path).turns_of(one.body))
    previous = by_id.get(one.body.get("previous_response_id") or "")
    if previous is None:
        return turns
    return (*previous.turns, previous.said.turn(), *turns)


def _parent(
    turns: Turns, tools: str, conversations: dict[tuple[str, Turns], list[Seen]]
) -> Seen | None:
    for end in range(len(turns) - 1, 0, -1):
        if turns[end - 1].role == "assistant":
            found = conversations.get((tools, turns[:end]))
            if found is not None:
                return max(found, key=lambda node: (_num_named(node, turns), node.id))
    return None


def _num_named(node: Seen, turns: Turns) -> int:
    """Return how many replies up to a node these turns name by the ids of their calls."""
    own = [(len(one.turns), one.said.turn().call_ids) for one in node.path()]
    return sum(bool(ids) and turns[place].call_ids == ids for place, ids in own)


def _retries(attempt: Attempt, found: Session) -> None:
    """Find second tries whose first one was answered, and hold the replies against each other."""
    told = {t.n: node.said.id for node in found.nodes for t in node.tries}
    before: dict[int, Try] = {}
    for one in attempt.tries:
        first, before[one.line] = before.get(one.line), one
        if one.retry == 0 or first is None or one.n not in told:
            continue
        if first.how == "left":
            found.num_joined_maybe += 1
        if first.how != "lost" or first.n not in told:
            continue
        found.num_retries += 1
        if told[one.n] != told[first.n]:
            found.lost_retries.append(
                f"try {one.n} got {told[one.n]}, its first try had got {told[first.n]}"
            )


def must_train(session: Session, scene: Scene) -> list[Seen]:
    """Return the replies that a sample has to hold."""
    leaves = leaves_of(session.nodes, scene)
    kept = {node.id: node for leaf in leaves for node in leaf.path()}
    return [kept[number] for number in sorted(kept)]


def leaves_of(nodes: Sequence[Seen], scene: Scene) -> list[Seen]:
    """Return the ends of what has to be trained, by the policy of a scene."""
    if not nodes:
        return []
    leaves = [node for node in nodes if not node.children]
    if scene.policy == "all":
        return leaves
    if scene.policy == "keep_prefix":
        return [nodes[-1]]
    gone = _outdone(nodes)
    if scene.policy == "fork":
        gone |= _taken_back(nodes)
    return [leaf for leaf in leaves if not any(node.id in gone for node in leaf.path())]


def _outdone(nodes: Sequence[Seen]) -> set[int]:
    """Return replies to a request that was sent again, but for the one whose line goes on last."""
    twins: dict[tuple[Any, ...], list[Seen]] = {}
    for node in nodes:
        twins.setdefault(node.request, []).append(node)
    gone: set[int] = set()
    for group in twins.values():
        kept = max(group, key=Seen.newest)
        gone |= {node.id for node in group if node is not kept}
    return gone


def _taken_back(nodes: Sequence[Seen]) -> set[int]:
    """Return replies whose turn the next one took over, and that nothing went on from."""
    gone: set[int] = set()
    for newest, node in pairwise(nodes):
        is_again = node.parent is newest.parent and (
            node.parent is not None or node.request == newest.request
        )
        is_beside = (
            node.parent is not None
            and node.parent is not newest
            and node.parent.request == newest.request
        )
        if (is_again or is_beside) and not newest.children:
            gone.add(newest.id)
    return gone
