"""Which lines of a tree become samples.

Owns the built-in pickers, `resolve_picker`, and the checks on a function of the user's. Never
changes a node. Invariant: what is picked are leaves of the tree, each once, at least one, in the
order of samples: by the length of their path, the longest first, then the latest; a function that
breaks loses nothing that was generated.

    drop_retries   (the default) of replies to the same request, only the one stays whose line goes
                   on the latest
    all            every leaf
    pkg.module:f   a function of one's own, `def f(leaves: list[Leaf]) -> list[Leaf]`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import structlog

from rollstream.errors import AgentFault, ConfigError, StopReason
from rollstream.sample import Message

from ..bounded import Exited, LeakedCancel, Overdue, run_bounded
from ..functions import describe, is_path, resolve, unknown_name
from ..tools.text import clean
from .tree import Node, Tree

DROP_RETRIES, ALL = "drop_retries", "all"
BUILT_IN = (DROP_RETRIES, ALL)
TIMEOUT_S = 30.0
"""How long a function of the user's may take."""
log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One line of a session, as a picker of the user's sees it."""

    id: int
    """Of its last reply; replies are counted in the order in which they were given out."""
    path: tuple[int, ...]
    """The ids of its replies, from the first to the last."""
    twins: tuple[int, ...]
    """Of each of these, the id of the first reply to the same request."""
    messages: list[Message]
    """The whole conversation, as it was sent and given out."""
    num_tokens: int
    num_sampled: int
    """Tokens that were sampled on the whole path."""
    stop_reason: StopReason
    committed_unix_s: float


@dataclass(frozen=True, slots=True)
class Picked:
    """What becomes samples."""

    leaves: list[Node]
    """In the order of samples."""
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    """How a function of the user's broke; the leaves are those of `drop_retries` then."""


PickFunction: TypeAlias = Callable[[list[Leaf]], Sequence[Leaf]]


@dataclass(frozen=True, slots=True)
class Picker:
    """A picker by its name."""

    name: str
    function: PickFunction | None = None
    """Of the user's; None is the built-in one of this name."""

    async def pick(self, tree: Tree) -> Picked:
        """Return which leaves become samples.

        Of a function of the user's that raised, took too long, or returned other things than some
        of its leaves, each once: those of `drop_retries`, with an error that says its path.
        """
        if self.function is None:
            return Picked(in_order(tree.leaves())) if self.name == ALL else drop_retries(tree)
        try:
            return Picked(in_order(await _asked(self.name, self.function, tree.leaves())))
        except AgentFault as fault:
            kept, what = drop_retries(tree), clean(fault.message)
            return Picked(kept.leaves, [*kept.warnings, what], f"AgentFault: {what}")


def resolve_picker(name: str) -> Picker:
    """Return the picker of a name.

    Args:
        name: `drop_retries`, `all`, `pkg.module:name` or `PATH.py:name`.

    Raises:
        ConfigError: with the path, what failed and what to do.
    """
    if name in BUILT_IN:
        return Picker(name)
    if not is_path(name):
        raise unknown_name(name, "picker", list(BUILT_IN))
    try:
        return Picker(name, resolve(name, "picker", kind="sync", num_args=1))
    except ConfigError as error:
        raise ConfigError(f"failed to resolve picker {name!r}: {error}") from error


def in_order(leaves: Sequence[Node]) -> list[Node]:
    """Return leaves in the order of samples."""
    return sorted(leaves, key=lambda node: (-node.depth, -node.id))


def drop_retries(tree: Tree) -> Picked:
    """Return the leaves without those of requests that were sent again.

    Of replies to the same request the one stays whose subtree has the newest reply.
    """
    newest = [node.id for node in tree.nodes]
    deepest = [node.depth for node in tree.nodes]
    for node in reversed(tree.nodes):  # a child stands behind its parent
        if node.parent is not None:
            above = node.parent.id
            newest[above] = max(newest[above], newest[node.id])
            deepest[above] = max(deepest[above], deepest[node.id])
    twins: dict[int, list[Node]] = {}
    for node in tree.nodes:
        twins.setdefault(node.twins, []).append(node)
    dropped: set[int] = set()
    warnings: list[str] = []
    for group in twins.values():
        if len(group) == 1:
            continue
        kept = max(group, key=lambda node: newest[node.id])
        dropped.update(node.id for node in group if node is not kept)
        warnings += _warnings(group, kept, deepest)
    for node in tree.nodes:
        if node.parent is not None and node.parent.id in dropped:
            dropped.add(node.id)
    kept_leaves = [node for node in tree.leaves() if node.id not in dropped]
    for warning in warnings:
        log.warning("retry_dropped", message=warning)
    return Picked(in_order(kept_leaves), warnings)


def _warnings(group: Sequence[Node], kept: Node, deepest: Sequence[int]) -> list[str]:
    """Return what is odd about twins, in order of commit."""
    found: list[str] = []
    for place, node in enumerate(group):
        later = group[place + 1 :]
        if node is not kept and later and deepest[node.id] > max(deepest[one.id] for one in later):
            found.append(
                f"reply {node.id} is dropped for a later try of its request, though its line is "
                "longer than every later sibling's deepest leaf"
            )
        if later and later[0].committed_unix_s < node.committed_unix_s:
            found.append(
                f"wall-clock rollback: reply {later[0].id} was given out after reply {node.id} and "
                "has an earlier time; the order of replies counts"
            )
    return found


async def _asked(path: str, function: PickFunction, leaves: Sequence[Node]) -> list[Node]:
    """Return what a function of the user's picks.

    Raises:
        AgentFault: it broke its promise (`Picker.pick`).
    """
    shown = [_leaf(node) for node in leaves]
    nodes = {id(leaf): node for leaf, node in zip(shown, leaves, strict=True)}
    try:
        picked: Any = await run_bounded(function, list(shown), timeout_s=TIMEOUT_S)
    except Overdue:
        raise _wrong(path, f"did not return within {TIMEOUT_S:g} s") from None
    except (LeakedCancel, Exited) as error:
        raise _wrong(path, f"raised {error}") from None
    except Exception as error:  # a user's code may raise anything
        raise _wrong(path, f"raised {describe(error)}") from error
    if not isinstance(picked, list | tuple):
        raise _wrong(path, f"returned {type(picked).__name__}, expected a list of its leaves")
    if any(id(leaf) not in nodes for leaf in picked):
        raise _wrong(path, "must return a subset of the very leaves that it was given")
    if len({id(leaf) for leaf in picked}) != len(picked):
        raise _wrong(path, "returned duplicates: each leaf is one sample")
    if not picked:
        raise _wrong(path, "returned no leaf; a trajectory has at least one sample")
    return [nodes[id(leaf)] for leaf in picked]


def _wrong(path: str, what: str) -> AgentFault:
    return AgentFault(f"picker {path!r} {what}")


def _leaf(node: Node) -> Leaf:
    path = node.path()
    return Leaf(
        id=node.id,
        path=tuple(one.id for one in path),
        twins=tuple(one.twins for one in path),
        messages=node.conversation(),
        num_tokens=node.context.num_tokens,
        num_sampled=sum(one.num_sampled for one in path),
        stop_reason=node.cut or StopReason.STOP,
        committed_unix_s=node.committed_unix_s,
    )
