"""What a trainer saves of its stream, and how it is read back.

Owns the plain data of `state_dict()`. Never talks to Redis. Invariant: a checkpoint belongs to one
run and one fingerprint of its source, and is refused elsewhere: its ids would mean other prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollstream.errors import RunMismatch
from rollstream.frontier import TerminalIds

FRESH = "fresh"
"""The state of a trainer that has learned nothing yet: every prompt is to come."""
STATE_VERSION = 1
MAX_VERSION = 1 << 53
"""Weight versions beyond this are not exact in Redis's scripts."""


@dataclass(slots=True)
class Checkpoint:
    """Which groups a trainer counts as ended, of which run."""

    run: str
    fingerprint: str
    terminal: TerminalIds
    weight_version: int = 0
    dump_epoch: int = 0
    """Of a stream that repeats a dump: which pass its ids are of, from 0."""

    def to_plain(self) -> dict[str, Any]:
        """Return what JSON, pickle and `torch.save` keep alike."""
        epoch = {"dump_epoch": self.dump_epoch} if self.dump_epoch else {}
        return {
            "version": STATE_VERSION,
            "run": self.run,
            "fingerprint": self.fingerprint,
            "weight_version": self.weight_version,
            **epoch,
            **self.terminal.to_plain(),
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any] | str) -> Checkpoint:
        """Read what `to_plain` returned.

        Raises:
            ValueError: not such data (a text is none), or of a newer version.
        """
        if not isinstance(data, Mapping) or type(data.get("version")) is not int:
            raise ValueError(
                "state is neither what GroupStream.state_dict() returned (it has no 'version') "
                f"nor {FRESH!r}"
            )
        if data["version"] < 1:
            raise ValueError(f"state has version {data['version']}, which never was")
        if data["version"] > STATE_VERSION:
            raise ValueError(
                f"state has version {data['version']}, newer than {STATE_VERSION}; "
                "upgrade rollstream on this side"
            )
        run, fingerprint = data.get("run"), data.get("fingerprint")
        weight_version = data.get("weight_version", 0)
        if not isinstance(run, str) or not isinstance(fingerprint, str):
            raise ValueError("state lacks 'run' or 'fingerprint'")
        if type(weight_version) is not int or not 0 <= weight_version <= MAX_VERSION:
            raise ValueError(
                f"state's 'weight_version' is {weight_version!r}, expected an integer from 0"
            )
        dump_epoch = data.get("dump_epoch", 0)
        if type(dump_epoch) is not int or dump_epoch < 0:
            raise ValueError(f"state's 'dump_epoch' is {dump_epoch!r}, expected an integer from 0")
        try:
            terminal = TerminalIds.from_plain(dict(data))
        except ValueError as error:
            raise ValueError(f"state: {error}") from None
        return cls(run, fingerprint, terminal, weight_version, dump_epoch)

    def refuse_dump_epochs(self) -> None:
        """Refuse the state of a second pass over a dump: a run hands out every group once.

        Raises:
            ValueError: it is one.
        """
        if self.dump_epoch:
            raise ValueError(
                f"the state is of pass {self.dump_epoch + 1} over a dump, which a run cannot go on "
                "with: give it to GroupStream.from_dump"
            )

    def check_belongs_to(self, run: str, fingerprint: str) -> None:
        """Refuse another run, or the same name over other data.

        Raises:
            RunMismatch: with both sides.
        """
        if self.run != run:
            raise RunMismatch(
                f"the state is of run {self.run!r}, connected is {run!r}: connect to the run that "
                "the checkpoint was made in, or start without a state"
            )
        if self.fingerprint != fingerprint:
            raise RunMismatch(
                f"run {run!r} has other data than the checkpoint: fingerprint {fingerprint!r} "
                f"there, {self.fingerprint!r} in the state (source, file content, seed or n "
                "changed). Start the producer with the old data, or start without a state"
            )
