"""Parked members: what is stored of a trajectory that stopped half-way, and what is believed of it.

Owns the way there and back: a sample into a body, a body into the sample that an attempt goes on
from. Never decides whether a member is parked, never talks to Redis (it is given a way to fetch).
Invariant: what comes back is the group's prompt and exactly the tokens, log-probs and calls that
were parked, or the member begins anew; a body is never trusted because it is there.

A body is a result's body (`rollstream.wire.encode_body`) whose metadata says how often the member
was resumed, with a digest of all that is trained.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Awaitable, Callable

import numpy as np

from rollstream.errors import ContractError, Status, StopReason, WireError
from rollstream.group import PromptGroup
from rollstream.queue.answers import Lease
from rollstream.sample import SAMPLE_FIELDS, Sample
from rollstream.wire import decode_body, encode_body

from ..generate.finish import check_record
from ..types import PromptIds

RESUMES = "resumes"
"""Metadata: how often the member was resumed."""
EARLIER = "earlier_attempts"
"""Metadata: the lifecycles of the attempts that parked it, in order."""
_DIGEST = "parked_digest"
_FETCHES = 4
"""Bodies that are fetched at once: after an update all slots want one, and each fetch is a
connection."""
_OF_THE_MEMBER = frozenset(
    ("group_index", "member", "index", "rollout_id", "prompt", "label", "generate_function_path",
     "reward_spec", "routing_key", "sampling", "attempts", "reward", "remove_sample", "response",
     "metadata", "spans")
)  # fmt: skip
"""What the new attempt has of its own: it is the group's or the queue's, not the trajectory's."""
_OF_THE_TRAJECTORY = tuple(name for name in SAMPLE_FIELDS if name not in _OF_THE_MEMBER)
_SAME = ("index", "rollout_id", "member", "generate_function_path")

Fetch = Callable[[Lease], Awaitable[bytes | None]]


class Unusable(Exception):
    """What is parked cannot be gone on from; the member begins anew."""


class Parking:
    """Where members are parked, as one worker sees it."""

    def __init__(self, fetch: Fetch, *, max_token_id: int, max_resumes: int) -> None:
        """Begin with nothing fetched.

        Args:
            fetch: returns what a leased member parked.
            max_token_id: the highest id of the vocabulary.
            max_resumes: how often one member may be resumed.
        """
        self._fetch, self._max_token_id, self._max_resumes = fetch, max_token_id, max_resumes
        self._few = asyncio.Semaphore(_FETCHES)

    async def resume(
        self, lease: Lease, group: PromptGroup, prompt: PromptIds, pending: Sample
    ) -> Sample:
        """Return the sample to go on from: what was parked, under the new attempt's name.

        Args:
            lease: of the member.
            group: its group.
            prompt: the group's rendered prompt.
            pending: the new attempt's sample; it is left alone.

        Raises:
            Unusable: nothing is parked there, it cannot be read, it is not this member's, or it was
                resumed as often as it may be.
        """
        async with self._few:
            body = await self._fetch(lease)
        if body is None:
            raise Unusable("nothing is parked there")
        try:
            parked = decode_body(body, group)
            if not isinstance(parked, Sample):
                raise ValueError("it is a tree of samples")
            resumes = self._believe(parked, prompt, pending)
        except (
            WireError,
            ContractError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            OverflowError,
        ) as error:
            raise Unusable(f"it cannot be gone on from: {error}") from error
        if resumes >= self._max_resumes:
            raise Unusable(f"it was resumed {resumes} times without coming to an end")
        return _under_new_name(parked, pending, resumes + 1)

    def _believe(self, parked: Sample, prompt: PromptIds, pending: Sample) -> int:
        """Check everything; return how often it was resumed so far."""
        if parked.status is not Status.ABORTED or parked.stop_reason is not (
            StopReason.ABORT_WEIGHTS
        ):
            raise ValueError(f"it ended as {parked.status} ({parked.stop_reason})")
        for name in _SAME:
            was, now = getattr(parked, name), getattr(pending, name)
            if was != now:
                raise ValueError(f"its {name} is {was!r}, expected {now!r}")
        if not parked.calls or parked.loss_mask is None or parked.rollout_log_probs is None:
            raise ValueError("it has no calls, mask or log-probs")
        check_record(parked, self._max_token_id)
        if not np.array_equal(parked.tokens[: parked.prompt_length], prompt.ids):
            raise ValueError(
                f"its prompt of {parked.prompt_length} ids is not the group's ({len(prompt.ids)})"
            )
        resumes = parked.metadata.get(RESUMES)
        if type(resumes) is not int or resumes < 0:
            raise ValueError(f"metadata[{RESUMES!r}] is {resumes!r}")
        if parked.metadata.pop(_DIGEST, None) != digest_of(parked):
            raise ValueError("its tokens, log-probs or calls are not those that were parked")
        return resumes


def parked_body(sample: Sample, resumes: int) -> bytes:
    """Return what is stored of a sample that was resumed `resumes` times so far.

    Raises:
        WireError: it has no wire form.
    """
    stored = copy.copy(sample)
    stored.metadata = sample.metadata | {RESUMES: resumes, _DIGEST: digest_of(sample)}
    return encode_body(stored)


def digest_of(sample: Sample) -> bytes:
    """Return a digest of the tokens, the mask, the log-probs and where each comes from."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (sample.tokens, sample.loss_mask, sample.rollout_log_probs):
        raw = b"" if array is None else np.ascontiguousarray(array).tobytes()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    for call in sample.calls:
        spans = [tuple(map(int, span)) for span in call.versions]
        text = f"{call.rid} {call.start} {call.end} {call.finish} {call.dispatched_version} {spans}"
        digest.update(text.encode(errors="surrogatepass"))
    return digest.digest()


def _under_new_name(parked: Sample, pending: Sample, resumes: int) -> Sample:
    sample = copy.copy(pending)
    for name in _OF_THE_TRAJECTORY:
        setattr(sample, name, getattr(parked, name))
    sample.metadata = pending.metadata | parked.metadata | {RESUMES: resumes}
    before = sample.metadata.pop("attempt", None)
    if before is not None:
        earlier = sample.metadata.get(EARLIER)
        sample.metadata[EARLIER] = [*(earlier if isinstance(earlier, list) else ()), before]
    sample.spans = parked.spans
    sample.extra = parked.extra
    return sample
