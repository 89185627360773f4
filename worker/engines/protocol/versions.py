"""What an engine's label of its weights means: a version of the run, or unknown.

Owns the labels that the trainer gave. Never talks to anybody. Invariant: a label has one version;
what nobody mapped and is no number is unknown, and never a guess; nor is what is sampled while new
weights are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollstream.labels import is_between
from rollstream.sample import UNKNOWN_VERSION

BETWEEN_VERSIONS = -2
"""Of an engine in the midst of an update: no version, and known to be none. Within a pool only."""
_DEFAULT_LABEL = "default"
_VERSION_DIGITS = 18
_BEYOND_VERSIONS = 10**_VERSION_DIGITS


class VersionMap:
    """The labels of one run; shared by every client of a pool."""

    __slots__ = ("_labels",)

    def __init__(self) -> None:
        self._labels: dict[str, int] = {}

    def set(self, labels: Mapping[str, int]) -> None:
        """Take over what the trainer has named by now."""
        self._labels = dict(labels)

    def of(self, label: str | int | None, dispatched: int) -> int:
        """Return the weight version that an engine's label means.

        A label that the trainer gave wins. A number of at most 18 digits is itself, as a string or
        not (beyond is a digest, and nothing that the wire can hold). `default` is what SGLang says
        from its start until the first update: version 0 if nothing newer was current at dispatch,
        else unknown (a restarted engine, or one whose updates set no version). The name of an
        engine whose weights are being replaced is `BETWEEN_VERSIONS`.
        """
        if label is None:
            return UNKNOWN_VERSION
        named = self._labels.get(str(label)) if self._labels else None
        if named is not None:
            return named
        if isinstance(label, int):
            return label if 0 <= label < _BEYOND_VERSIONS else UNKNOWN_VERSION
        if label.isascii() and label.isdigit():
            return int(label) if len(label) <= _VERSION_DIGITS else UNKNOWN_VERSION
        if is_between(label):
            return BETWEEN_VERSIONS
        return 0 if label == _DEFAULT_LABEL and dispatched == 0 else UNKNOWN_VERSION


def recorded(spans: Sequence[tuple[int, int, int]], dispatched: int) -> list[tuple[int, int, int]]:
    """Return the spans of a reply as they are recorded: what an update made unknown stays so.

    Where it begins with that, an empty span in front says which version its tokens are at least
    of: an age is counted from there, and a reply without any other is not one of an engine that
    names nothing.
    """
    if all(version != BETWEEN_VERSIONS for version, _, _ in spans):
        return list(spans)
    read = [(max(version, UNKNOWN_VERSION), start, end) for version, start, end in spans]
    if read[0][0] == UNKNOWN_VERSION:
        read.insert(0, (dispatched, 0, 0))
    return read
