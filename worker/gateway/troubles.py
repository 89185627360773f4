"""What broke a session's requests, and what of it was made good.

Owns the faults of infrastructure, by the place in the tree of the request that they broke. Never
tries anything again, never judges an agent. Invariant: a fault stands until a reply was sampled at
its place, or its conversation went on from the reply before it: what an agent does elsewhere
meanwhile (another line, its own end, a reward) makes nothing good.
"""

from __future__ import annotations

from rollstream.errors import EngineFault, EnvFault

from .placing import Place

Fault = EngineFault | EnvFault
_ROOT = -1


class Troubles:
    """The faults of one session that still stand."""

    __slots__ = ("_faults", "_own")

    def __init__(self) -> None:
        """Begin with none."""
        self._faults: dict[tuple[int, bytes, bool], Fault] = {}
        """By (id of the reply before it, the messages behind that, nothing was committed yet)."""
        self._own: EnvFault | None = None

    @property
    def newest(self) -> Fault | None:
        """The last one that stands; a bug of ours first."""
        return self._own or next(reversed(self._faults.values()), None)

    def note(self, place: Place, fault: Fault) -> None:
        """Take what broke the request at a place."""
        key = _key(place)
        self._faults.pop(key, None)
        self._faults[key] = fault

    def note_bug(self, fault: EnvFault) -> None:
        """Take a bug of ours, which nothing makes good."""
        self._own = self._own or fault

    def heal(self, place: Place) -> None:
        """Forget what a reply at a place makes good.

        That is what broke at the same place, whatever goes on from the same reply, and, of a
        session's first conversation, every attempt to begin it.
        """
        above, messages, is_first = _key(place)
        self._faults = {
            key: fault
            for key, fault in self._faults.items()
            if not (
                (key[0] == above != _ROOT) or key[:2] == (above, messages) or (key[2] and is_first)
            )
        }


def _key(place: Place) -> tuple[int, bytes, bool]:
    above = _ROOT if place.parent is None else place.parent.id
    messages = place.tools_key + place.echo.key(place.start, len(place.echo.messages))
    return above, messages, place.version == 0
