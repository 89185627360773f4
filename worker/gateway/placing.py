"""Where a request stands in a session's tree, and whether it may stand there.

Owns attachment and the policies of linear sessions. Never changes the tree, never renders.
Invariant: the answer depends on the request and on what was committed, and on nothing else; what is
refused says which message, and why.

    linear   goes on from the newest reply; asks its turn again, as it was or edited (the newest
             reply is superseded once the new one is given out), or goes on from an earlier try of
             it; anything else *diverges*: `gateway.on_divergence`
    tree     goes on from anywhere
"""

from __future__ import annotations

from enum import Enum

from rollstream.errors import StopReason

from ..types import DivergencePolicy
from .matchers import first_difference
from .rules import SessionRules
from .tree import Echo, Node, Tree
from .types import ChatRequest, ErrorKind, Refusal

_SHOWN_CHARS = 64


class Limited(Refusal):
    """A request that a limit of the session turns down.

    Attributes:
        limit: that one.
    """

    def __init__(self, kind: ErrorKind, message: str, limit: StopReason) -> None:
        super().__init__(kind, message, param="messages")
        self.limit = limit


class Line(Enum):
    """What a request of a linear session is to its newest reply."""

    GOES_ON = "goes_on"
    AGAIN = "again"
    """Its turn again, as it was or edited; or going on from an earlier try of it."""
    DIVERGES = "diverges"


class Place:
    """Where a request stands in the tree, seen when it arrived.

    Attributes:
        echo: its messages.
        parent: the node that it goes on from; None begins a root.
        start: the first of its messages behind that.
        overlap: how many of its messages are known from somewhere.
        rewritten: it begins with a known conversation and goes on with a turn that its client wrote
            itself. Templates append to a reply, and not in its place, so it begins anew.
        tools_key: of its tools.
        version: of the tree.
    """

    __slots__ = ("echo", "overlap", "parent", "rewritten", "start", "tools_key", "version")

    def __init__(
        self,
        echo: Echo,
        attached: Node | None,
        start: int,
        *,
        overlap: int,
        tools_key: bytes,
        version: int,
    ) -> None:
        self.echo, self.overlap, self.tools_key, self.version = echo, overlap, tools_key, version
        self.rewritten = attached is not None and any(
            message.get("role") == "assistant" for message in echo.messages[start:]
        )
        self.parent, self.start = (None, 0) if self.rewritten else (attached, start)


class Places:
    """Finds the places of one session."""

    def __init__(self, tree: Tree, rules: SessionRules) -> None:
        self._tree, self._rules = tree, rules

    def of(self, request: ChatRequest, echo: Echo, tools_key: bytes) -> Place:
        """Return where a request stands, whatever the policy says.

        Raises:
            Refusal: it has nothing new, or continues what nobody knows.
        """
        if not request.messages:
            raise Refusal(
                ErrorKind.INVALID, "messages is empty; send at least one message", param="messages"
            )
        if not request.continues:
            return self._attached(echo, tools_key)
        node = self._tree.of_reply(request.continues)
        if node is None:
            raise Refusal(
                ErrorKind.NOT_FOUND,
                f"this session gave no reply {request.continues[:_SHOWN_CHARS]!r} to go on from",
            )
        place = self._place(echo, node, 0, node.num_messages, tools_key)
        if place.rewritten or node.tools_key != tools_key:
            return self._attached(Echo([*node.conversation(), *request.messages]), tools_key)
        return place

    def known(self, echo: Echo, tools_key: bytes) -> Node | None:
        """Return the node whose conversation, reply included, these messages are."""
        node = self._tree.attach(echo, tools_key).node
        return node if node is not None and node.num_messages == len(echo.messages) else None

    def check(self, place: Place) -> None:
        """Check that a request may stand where it does.

        Raises:
            Limited: the reply before it was cut, or the last that there may be; or the session
                holds as much as it may.
            Refusal: it diverges, and the policy is `reject`.
        """
        parent, most = place.parent, self._rules.max_turns
        if parent is not None and parent.cut is not None:
            raise Limited(
                ErrorKind.CONFLICT,
                f"the reply before message {place.start} was cut ({parent.cut.value}) and cannot "
                "be gone on from; ask for it again, or end here",
                parent.cut,
            )
        if parent is not None and parent.depth >= most:
            raise Limited(
                ErrorKind.INVALID,
                f"this conversation has {parent.depth} replies and may have {most}; end here",
                StopReason.MAX_TURNS,
            )
        if self._tree.num_tokens >= self._rules.max_tokens:
            raise Limited(
                ErrorKind.INVALID,
                f"this session holds {self._tree.num_tokens} tokens in all its lines and may hold "
                f"{self._rules.max_tokens} (gateway.max_session_tokens); end here",
                StopReason.RESPONSE_LENGTH,
            )
        if (
            self._rules.kind == "linear"
            and self._rules.on_divergence is DivergencePolicy.REJECT
            and self.line(place) is Line.DIVERGES
        ):
            raise self._diverged(place)

    def line(self, place: Place) -> Line:
        """Return what a request is to the newest reply, as it is now."""
        newest, parent = self._tree.newest, place.parent
        if newest is None or parent is newest:
            return Line.GOES_ON
        twin = self._tree.twin(parent, place.echo, place.start, place.tools_key)
        if twin is not None and twin.twins == newest.twins:
            return Line.AGAIN
        if parent is None:
            return Line.DIVERGES
        is_again = parent is newest.parent
        # Or it goes on from another try of the newest one's request.
        is_again = is_again or (parent.parent is newest.parent and parent.twins == newest.twins)
        return Line.AGAIN if is_again else Line.DIVERGES

    def _attached(self, echo: Echo, tools_key: bytes) -> Place:
        found = self._tree.attach(echo, tools_key)
        if found.num_known == len(echo.messages):
            raise Refusal(
                ErrorKind.INVALID,
                f"message {found.num_known - 1} is this session's own reply and nothing follows "
                "it; add what the model is to answer",
                param="messages",
            )
        return self._place(echo, found.node, found.num_known, found.overlap, tools_key)

    def _place(
        self, echo: Echo, node: Node | None, start: int, overlap: int, tools_key: bytes
    ) -> Place:
        version = self._tree.version
        return Place(echo, node, start, overlap=overlap, tools_key=tools_key, version=version)

    def _diverged(self, place: Place) -> Refusal:
        newest = self._tree.newest
        assert newest is not None
        found = None
        what, param = "the tools are not those of its conversation", "tools"
        if place.tools_key == newest.tools_key:
            found = first_difference(
                self._rules.matcher, newest.conversation(), place.echo.messages
            )
        if found is not None:
            what, param = (
                f"message {found[0]} is not the one that it knows ({found[1]})",
                "messages",
            )
        return Refusal(
            ErrorKind.INVALID,
            f"history was rewritten: {what}. This session goes on from its last reply or asks its "
            'last turn again, and nothing else (gateway.on_divergence = "reject")',
            param=param,
        )
