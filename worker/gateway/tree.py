"""A session's conversation as a tree: every reply that was committed, and what it stands behind.

Owns the nodes, and which of them a request goes on from. Never renders, never calls an engine,
never removes a node. Invariant: append-only. A node's id is the order of its commit, so a child's
is greater than its parent's; its messages are the very objects of its first request and of the
reply that its client got, whatever spelling comes back later.

A request is *attached* to the deepest node whose whole conversation, reply included, it begins
with, by the matcher; of identical twins to the latest. What it brings behind that is its *delta*.
Two nodes are *twins* where they stand behind the same node with the same delta: a request that was
sent twice.

Cost: messages that came in the very words they are known by are known by their digests, so the
matcher sees what is new, and spellings that changed. An agent that rewrites its history on every
turn makes a root of each, and all of them have most of its messages in common: a root costs a
request a comparison of bytes, and one call of the matcher where they part.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from rollstream.errors import StopReason
from rollstream.sample import Message

from .context import Context
from .matchers import Matcher
from .types import ChatReply

_DIGEST_BYTES = 16


@dataclass(slots=True, eq=False)
class Node:
    """One committed reply."""

    id: int
    parent: Node | None
    delta: tuple[Message, ...]
    """What its request brought behind the parent's conversation; all of it for a root."""
    message: Message
    """The reply, as its client got it."""
    context: Context
    reply: ChatReply
    tools: list[Message] | None
    """Of the root's request: no other tools are ever rendered below it."""
    tools_key: bytes
    cut: StopReason | None
    """The limit that cut the reply; None where its turn is complete."""
    committed_unix_s: float
    delta_key: bytes
    """Of `delta`, as it stands there."""
    depth: int
    """Calls from the root to here, itself included."""
    num_messages: int
    """Of its whole conversation, its reply included."""
    twins: int
    """Id of the first node of the same request."""
    superseded: bool = False
    """Linear sessions: another reply to its turn took its place, and nothing went on from it."""
    echo: bytes = b""
    """Digest of delta and reply as they came back last."""

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled for this reply."""
        return self.context.num_sampled

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def conversation(self) -> list[Message]:
        """Return all messages up to its reply, as they were first sent and given."""
        return [message for node in self.path() for message in (*node.delta, node.message)]


class Echo:
    """The messages of one request, each with a digest that is made once."""

    __slots__ = ("_digests", "messages")

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._digests = bytearray()

    def key(self, start: int, end: int) -> bytes:
        """Return what is the same for the same JSON of `messages[start:end]`: a digest of each."""
        for message in self.messages[len(self._digests) // _DIGEST_BYTES : end]:
            self._digests += blake2b(_text(message), digest_size=_DIGEST_BYTES).digest()
        return bytes(self._digests[start * _DIGEST_BYTES : end * _DIGEST_BYTES])


def _num_same(one: bytes, other: bytes) -> int:
    """Return how many digests two keys begin with alike."""
    low, high = 0, min(len(one), len(other)) // _DIGEST_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        known, end = low * _DIGEST_BYTES, middle * _DIGEST_BYTES
        if one[known:end] == other[known:end]:
            low = middle
        else:
            high = middle - 1
    return low


def _names(echoed: Message, given: Message) -> bool:
    """Return whether a message that came back names the calls of this reply, and not their like."""
    calls = given.get("tool_calls")
    return bool(calls) and _call_ids(echoed) == _call_ids(given)


def _call_ids(message: Message) -> list[object]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [call.get("id") if isinstance(call, dict) else None for call in calls]


def _text(message: Message) -> bytes:
    try:
        return msgspec.json.encode(message)
    except (UnicodeEncodeError, OverflowError):  # lone surrogates, numbers beyond 64 bits
        return json.dumps(message).encode()


@dataclass(frozen=True, slots=True)
class Attached:
    """Where a request belongs."""

    node: Node | None
    """None begins a new root."""
    overlap: int
    """How many of its messages are the same as those of some conversation, from the first on."""

    @property
    def num_known(self) -> int:
        """How many of its messages the node's conversation covers."""
        return 0 if self.node is None else self.node.num_messages


class Tree:
    """All committed replies of one session."""

    def __init__(self, matcher: Matcher) -> None:
        self._same = matcher
        self.nodes: list[Node] = []
        self.num_tokens = 0
        """Held by all nodes, each once."""
        self._children: dict[int, list[Node]] = {}
        """By the parent's id, -1 for roots; nodes do not know theirs, so nothing is a cycle."""

    @property
    def newest(self) -> Node | None:
        """The node that was committed last."""
        return self.nodes[-1] if self.nodes else None

    @property
    def version(self) -> int:
        """How often anything was committed."""
        return len(self.nodes)

    def children(self, node: Node | None) -> list[Node]:
        """Return what stands right behind a node, the roots for None, in order of commit."""
        return self._children.get(-1 if node is None else node.id, [])

    def leaves(self) -> list[Node]:
        """Return the nodes that nothing stands behind, in order of commit."""
        return [node for node in self.nodes if node.id not in self._children]

    def of_reply(self, reply_id: str) -> Node | None:
        """Return the node of a reply that was given out."""
        return next((node for node in reversed(self.nodes) if node.reply.id == reply_id), None)

    def attach(self, echo: Echo, tools_key: bytes) -> Attached:
        """Return where a request belongs.

        Raises:
            ContractError: the matcher broke its promise.
        """
        best: Node | None = None
        rank = (0, 0, 0)
        overlap = 0
        waiting: list[tuple[Node | None, int, int]] = [(None, 0, 0)]
        while waiting:
            above, at, num_named = waiting.pop()
            seen: dict[int, int] = {}
            for node in self.children(above):
                if above is None and node.tools_key != tools_key:
                    continue
                shared = self._shared(node, echo, at, seen)
                overlap = max(overlap, at + shared)
                if shared <= len(node.delta):
                    continue
                # Replies that say the same are told apart by the calls' ids, which we gave them.
                named = num_named + _names(echo.messages[node.num_messages - 1], node.message)
                waiting.append((node, node.num_messages, named))
                if best is None or (node.num_messages, named, node.id) > rank:
                    best, rank = node, (node.num_messages, named, node.id)
        return Attached(best, overlap)

    def twin(self, parent: Node | None, delta: Echo, start: int, tools_key: bytes) -> Node | None:
        """Return the first node of the same request, `delta.messages[start:]` behind `parent`."""
        count = len(delta.messages) - start
        key = delta.key(start, len(delta.messages))
        for node in self.children(parent):
            if node.twins != node.id or len(node.delta) != count:
                continue
            if parent is None and node.tools_key != tools_key:
                continue
            if node.delta_key == key or self._shared_of(node, delta, start) == count:
                return node
        return None

    def add(
        self,
        parent: Node | None,
        echo: Echo,
        start: int,
        reply: ChatReply,
        context: Context,
        *,
        tools: list[Message] | None,
        tools_key: bytes,
        cut: StopReason | None,
        now_unix_s: float,
    ) -> Node:
        """Append a node and return it.

        Args:
            parent: where its request was attached.
            echo: of its request.
            start: the first message of its delta.
            reply: as it is given out.
            context: with all of its calls.
            tools: of its request.
            tools_key: of these.
            cut: the limit that cut the reply.
            now_unix_s: the time of the commit.
        """
        twin = self.twin(parent, echo, start, tools_key)
        number = len(self.nodes)
        delta = tuple(echo.messages[start:]) if twin is None else twin.delta
        node = Node(
            id=number,
            parent=parent,
            delta=delta,
            message=reply.message,
            context=context,
            reply=reply,
            tools=tools if parent is None else parent.tools,
            tools_key=tools_key if parent is None else parent.tools_key,
            cut=cut,
            committed_unix_s=now_unix_s,
            delta_key=echo.key(start, len(echo.messages)) if twin is None else twin.delta_key,
            depth=1 if parent is None else parent.depth + 1,
            num_messages=(0 if parent is None else parent.num_messages) + len(delta) + 1,
            twins=number if twin is None else twin.id,
        )
        self.nodes.append(node)
        self.num_tokens += context.num_own
        self._children.setdefault(-1 if parent is None else parent.id, []).append(node)
        return node

    def _shared(self, node: Node, echo: Echo, at: int, seen: dict[int, int]) -> int:
        """Return how many messages of a node, its reply the last, the request has from `at` on.

        Args:
            node: to look at.
            echo: of the request.
            at: where the conversation in front of the node ends.
            seen: what was found of deltas, which twins share.
        """
        end = at + len(node.delta) + 1
        if node.echo and end <= len(echo.messages) and node.echo == echo.key(at, end):
            return end - at
        shared = seen.get(id(node.delta), -1)
        if shared < 0:
            shared = self._shared_of(node, echo, at)
            seen[id(node.delta)] = shared
        if shared < len(node.delta):
            return shared
        if end > len(echo.messages) or not self._same(node.message, echo.messages[end - 1]):
            return shared
        node.echo = echo.key(at, end)
        return end - at

    def _shared_of(self, node: Node, echo: Echo, at: int) -> int:
        """Return how many messages of a node's delta the request has from `at` on."""
        most = min(len(node.delta), len(echo.messages) - at)
        for place in range(_num_same(node.delta_key, echo.key(at, at + most)), most):
            if not self._same(node.delta[place], echo.messages[at + place]):
                return place
        return most
