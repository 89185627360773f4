"""A finished group as a record of a dump, and back: the wire's own codec around every member.

Owns that record and its digest. Never does I/O. Invariant: the group that is read is the one that
was written: every field of every sample, arrays bit for bit, in order, with who is missing and why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.dump.format import pack
from rollstream.errors import Status, WireError
from rollstream.group import FinishedGroup, Missing, PromptGroup, Trajectory
from rollstream.sample import Sample
from rollstream.wire import decode_body, decode_prompt, encode_body, encode_prompt, encode_text

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A group that is ready to be written, whatever becomes of the objects it was made of."""

    group_index: int
    digest: bytes
    """Of what its members did; not of how late they were handed out, nor of texts."""
    payload: bytes


def encode_group(group: FinishedGroup) -> EncodedGroup:
    """Return a group's record.

    Raises:
        WireError: a value without a wire form.
    """
    leaves = group.flat()
    first = leaves[0] if leaves else Sample(group.group_index)
    n = len(group.samples) + len(group.missing)
    prompt = PromptGroup(group.group_index, n, first.prompt, first.label, env=group.env)
    members = [
        (encode_body(trajectory), encode_text(trajectory), _own(trajectory, group, first))
        for trajectory in group.samples
    ]
    missing = [(m.member, m.status.value, m.reason, m.error) for m in group.missing]
    what = f"group {group.group_index}"
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(pack({"missing": missing, "own": [own for *_, own in members]}, what))
    for body, *_ in members:
        digest.update(body)
    record = {
        "group": group.group_index,
        "n": n,
        "prompt": encode_prompt(prompt),
        "members": members,
        "missing": missing,
        "staleness": group.staleness,
        "spans": group.spans,
        "reward_key": group.reward_key,
    }
    return EncodedGroup(group.group_index, digest.digest(), pack(record, what))


def _own(
    trajectory: Trajectory, group: FinishedGroup, first: Sample
) -> list[tuple[Any, ...]] | None:
    """Return what each leaf has of its own of what a group's members share; None: nothing."""
    leaves = trajectory if isinstance(trajectory, list) else [trajectory]
    if all(
        leaf.group_index == group.group_index
        and leaf.prompt is first.prompt
        and leaf.label is first.label
        for leaf in leaves
    ):
        return None
    own = [(leaf.group_index, leaf.prompt, leaf.label) for leaf in leaves]
    shared = pack({"": (group.group_index, first.prompt, first.label)}, "group")
    # Packed, because equal is not the same: 1 and True, or NaN.
    return own if any(pack({"": one}, "leaf") != shared for one in own) else None


def decode_group(record: dict[str, Any], *, text: bool = True) -> FinishedGroup:
    """Return the group of a record; its arrays are read-only views of the file's bytes.

    Args:
        record: of `encode_group`, unpacked.
        text: with the response texts.

    Raises:
        WireError: it is none.
    """
    try:
        prompt = decode_prompt(record["prompt"], record["group"], record["n"])
        samples = [_decode_member(member, prompt, text=text) for member in record["members"]]
        missing = [
            Missing(member, Status(status), reason, error)
            for member, status, reason, error in record["missing"]
        ]
        group = FinishedGroup(
            group_index=record["group"],
            env=prompt.env,
            samples=samples,
            missing=missing,
            staleness=record["staleness"],
            spans=record["spans"],
            reward_key=record["reward_key"],
        )
        if type(group.group_index) is not int or len(samples) + len(missing) != record["n"]:
            raise ValueError(f"{len(samples)} members and {len(missing)} missing of {record['n']}")
    except WireError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"not a group: {error!r}") from None
    return group


def _decode_member(member: Sequence[Any], prompt: PromptGroup, *, text: bool) -> Trajectory:
    body, texts, own = member
    trajectory = decode_body(body, prompt, texts if text else None)
    if own is not None:
        leaves = trajectory if isinstance(trajectory, list) else [trajectory]
        for leaf, (group_index, own_prompt, label) in zip(leaves, own, strict=True):
            leaf.group_index, leaf.prompt, leaf.label = group_index, own_prompt, label
    return trajectory
