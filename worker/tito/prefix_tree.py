"""Which recorded turns continue which, found by their ids.

Owns the tree of everything that the engines were sent and sampled: one path per turn, shared as far
as ids agree. Never copies an id, never judges. Invariant: the depth of a node is a number of ids,
and two turns pass through one node exactly where all ids before it agree.

Ids are compared once per turn and position: a prompt that is a view of the memory of an earlier
prompt begins at the end of the last such one, whoever sent others in between. Stretches between
nodes are views, so the tree holds a few objects per turn whatever its length.

Axis: T turns; at most 4 nodes a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rollstream.sample import TokenIds, empty_ids

from .ids import same_memory, shared_length


@dataclass(slots=True, eq=False)
class Node:
    """A place where a turn's ids begin to differ from another's, or a prompt or a reply ends."""

    depth: int
    """Ids from the beginning to here."""
    edge: TokenIds
    """[depth - parent.depth] the ids between."""
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    """By the first id of their edges."""
    turn: int | None = None
    """The newest turn whose prompt and output end here."""


class PrefixTree:
    """All turns so far, in order."""

    def __init__(self) -> None:
        self.root = Node(0, empty_ids(), None)
        self.prompts: list[Node] = []
        """Per turn, where its prompt ends."""
        self.ends: list[Node] = []
        """Per turn, where its output ends."""
        self._by_memory: dict[int, tuple[TokenIds, Node]] = {}
        """The last prompt that begins at an address, kept so that the address stays its own."""

    def add(self, prompt: TokenIds, output: TokenIds) -> int | None:
        """Add the next turn; returns the newest of the turns whose ids are the most of its prompt.

        That is the turn that it continues: its prompt begins with all that one was sent and
        sampled. None where there is no such turn.
        """
        start, address = self.root, prompt.__array_interface__["data"][0]
        last = self._by_memory.get(address)
        if last is not None and len(prompt) >= len(last[0]) and same_memory(prompt, last[0]):
            start = last[1]
        at = self._grow(start, prompt[start.depth :])
        parent = next((node.turn for node in _upwards(at) if node.turn is not None), None)
        end = self._grow(at, output)
        end.turn = len(self.ends)
        self.prompts.append(at)
        self.ends.append(end)
        self._by_memory[address] = (prompt, at)
        return parent

    def _grow(self, node: Node, ids: TokenIds) -> Node:
        """Return the node `ids` below `node`, made where there is none."""
        while len(ids):
            child = node.children.get(int(ids[0]))
            if child is None:
                child = Node(node.depth + len(ids), ids, node)
                node.children[int(ids[0])] = child
                return child
            count = shared_length(child.edge, ids)
            node = child if count == len(child.edge) else _split(child, count)
            ids = ids[count:]
        return node


def _split(node: Node, count: int) -> Node:
    """Return a new node `count` ids into the edge of `node`, which stays below it."""
    above = node.parent
    assert above is not None
    middle = Node(above.depth + count, node.edge[:count], above)
    above.children[int(node.edge[0])] = middle
    node.parent, node.edge = middle, node.edge[count:]
    middle.children[int(node.edge[0])] = node
    return middle


def _upwards(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def shared_depth(a: Node, b: Node) -> int:
    """Return how many ids the paths to two nodes have in common."""
    while a is not b:
        deeper = a if a.depth >= b.depth else b
        assert deeper.parent is not None
        if deeper is a:
            a = deeper.parent
        else:
            b = deeper.parent
    return a.depth


class SharedWith:
    """How many ids the paths to any nodes share with the path to one; linear over all of them."""

    def __init__(self, node: Node) -> None:
        """Mark the path to `node`."""
        self._known = {id(one): one.depth for one in _upwards(node)}

    def depth(self, node: Node) -> int:
        """Return how many ids the path to `node` shares with the marked one."""
        passed = []
        for one in _upwards(node):
            if id(one) in self._known:
                shared = self._known[id(one)]
                break
            passed.append(one)
        self._known.update((id(one), shared) for one in passed)
        return shared
