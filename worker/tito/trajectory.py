"""One trajectory while it grows: what the engine saw and sampled, and nothing else.

Owns the chunks of ids and log-probs, the JSON of the next request, and the calls that prove where
every token came from. Never tokenizes, never changes or drops an id.
Invariant: append-only. `tokens[:call.start]` is exactly the prompt of that call, and an id is
stored once as int32, written as JSON once, and copied once more: into the finished sample. Rows of
routed experts are asked for once, kept as they came, and copied once into one array.

Axes: L all tokens, R everything after the first prompt, C sampled tokens of one reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from rollstream.errors import ContractError, MergeFault
from rollstream.sample import (
    UNKNOWN_VERSION,
    Call,
    LogProbs,
    LossMask,
    PrefixCacheInfo,
    Sample,
    SpecInfo,
    TokenIds,
    empty_ids,
)

from ..types import Completion, Finish, PromptIds, RequestIds
from .ids import as_ids, ids_json, prompt_ids
from .replay import ReplayRows
from .turns import PER_TOKEN, REPLAY, versions_of

_Scalar = TypeVar("_Scalar", bound=np.generic)


class _Chunk:
    """Ids that came together; observed where `log_probs` is None."""

    __slots__ = ("ids", "log_probs", "mask")

    def __init__(
        self, ids: TokenIds, log_probs: LogProbs | None = None, mask: LossMask | None = None
    ) -> None:
        self.ids, self.log_probs, self.mask = ids, log_probs, mask


class _Calls(Sequence[Call]):
    """The calls, each with what its sampling parameters share with earlier ones stored once.

    A record of 13 parameters is as large as 60 tokens, and all calls of a trajectory have the same
    but for the seed and the cap.
    """

    __slots__ = ("_base", "_held")

    def __init__(self) -> None:
        self._held: list[tuple[Call, dict[str, Any]]] = []
        self._base: dict[str, Any] = {}

    def append(self, call: Call) -> None:
        base, given = self._base, call.sampling
        if not base or not given.keys() >= base.keys():
            base = self._base = dict(given)
        changed = {k: v for k, v in given.items() if k not in base or base[k] != v}
        self._held.append((replace(call, sampling=changed), base))

    def __len__(self) -> int:
        return len(self._held)

    @overload
    def __getitem__(self, place: int) -> Call: ...
    @overload
    def __getitem__(self, place: slice) -> list[Call]: ...
    def __getitem__(self, place: int | slice) -> Call | list[Call]:
        if isinstance(place, slice):
            return [self._whole(*held) for held in self._held[place]]
        return self._whole(*self._held[place])

    @staticmethod
    def _whole(call: Call, base: dict[str, Any]) -> Call:
        return replace(call, sampling=base | call.sampling)


class Trajectory:
    """The append-only token record of one member.

    Example:
        >>> trajectory = Trajectory(prompt, renderer.stop_token_ids)
        >>> reply = await engine.generate(trajectory.request(), sampling, ...)
        >>> trajectory.add_completion(reply, dispatched_version=7, sampling=sampling.to_dict())
        >>> trajectory.add_observation(
        ...     renderer.extend(trajectory.window(), trajectory.last_completion(), messages, tools)
        ... )
        >>> trajectory.write_to(sample, renderer.decode)
    """

    __slots__ = (
        "_cache", "_calls", "_chunks", "_logprob_mode", "_num_tokens", "_num_turns", "_open",
        "_pieces", "_prompt", "_rows", "_spec", "_stop_ids",
    )  # fmt: skip

    def __init__(
        self, prompt: PromptIds, stop_token_ids: Sequence[int], replay: bool = False
    ) -> None:
        """Begin with a rendered prompt, whose arrays and JSON are shared, not copied.

        Args:
            prompt: of the group.
            stop_token_ids: ids that end a turn; `window` is cut at them.
            replay: ask for routed experts, from the first row that is not there yet, and keep what
                replies bring.
        """
        self._prompt = prompt
        self._stop_ids = tuple(stop_token_ids)
        self._chunks: list[_Chunk] = []
        self._pieces: list[bytes] = [prompt.json] if prompt.json else []
        self._num_tokens = len(prompt.ids)
        self._calls = _Calls()
        self._num_turns = 0
        self._open = 0
        """How many of the last chunks are the current turn's reply (more than one if resumed)."""
        self._spec, self._cache = SpecInfo(), PrefixCacheInfo()
        self._logprob_mode = "temperature"
        self._rows = {name: ReplayRows(of) for name, of in REPLAY.items()} if replay else None

    @classmethod
    def from_sample(
        cls,
        sample: Sample,
        stop_token_ids: Sequence[int],
        prompt: PromptIds | None = None,
        replay: bool = False,
    ) -> Trajectory:
        """Continue a sample that was aborted or parked; `sample` itself is left alone.

        Every position that a call covers stays sampled, with its log-prob and its mask. A record
        without calls (of another system) gets one call per run of trained tokens, of unknown
        version and engine, if it has log-probs; without them its response counts as observed.
        Rows of routed experts that it lacks are asked for with the next call.

        Args:
            sample: its `tokens` begin with the prompt.
            stop_token_ids: as for the constructor.
            prompt: the group's, so that its members share it; must be the sample's own prompt.
            replay: as for the constructor.

        Raises:
            ContractError: the sample breaks its invariant, or `prompt` is another prompt.
        """
        sample.validate()
        own = sample.tokens[: sample.prompt_length]
        if prompt is None:
            prompt = prompt_ids(own)
        elif not np.array_equal(prompt.ids, own):
            raise ContractError(
                f"sample {sample.group_index}:{sample.member} has a prompt of {len(own)} ids that "
                f"is not the group's ({len(prompt.ids)} ids)"
            )
        held = cls(prompt, stop_token_ids, replay)
        held._logprob_mode = sample.logprob_mode
        held._spec.add(sample.spec_info)
        held._cache.add(sample.prefix_cache_info)
        calls = sample.calls or _calls_of_mask(sample)
        at = held._num_tokens
        for call in calls:
            if call.start > at:
                held.add_observation(sample.tokens[at : call.start])
            held._resume(call, sample)
            at = call.end
        if at < len(sample.tokens):
            held.add_observation(sample.tokens[at:])
        held._resume_rows(sample)
        return held

    @property
    def num_tokens(self) -> int:
        """L: the length of the next request."""
        return self._num_tokens

    @property
    def response_length(self) -> int:
        """R: everything after the first prompt, sampled or observed."""
        return self._num_tokens - len(self._prompt.ids)

    @property
    def num_turns(self) -> int:
        """Replies of the model; one that was aborted and resumed is one."""
        return self._num_turns

    @property
    def num_sampled(self) -> int:
        """Tokens that an engine sampled."""
        return sum(len(c.ids) for c in self._chunks if c.log_probs is not None)

    @property
    def calls(self) -> Sequence[Call]:
        """Every engine request and its reply, in order; each look at one makes a new record."""
        return self._calls

    @property
    def prompt(self) -> PromptIds:
        """The first prompt, as given."""
        return self._prompt

    def request(self) -> RequestIds:
        """Return the ids of the next request: the JSON of every chunk, none encoded again."""
        return RequestIds(tuple(self._pieces), self._num_tokens, self._replay_start())

    def add_completion(
        self,
        completion: Completion,
        *,
        dispatched_version: int,
        sampling: dict[str, Any],
        current_version: int | None = None,
    ) -> Call:
        """Append what an engine sampled, and record the call.

        Args:
            completion: answers the request that `request` gave last.
            dispatched_version: the weight version known when it was sent.
            sampling: the effective parameters; recorded as given.
            current_version: the weight version known when the reply came. Where the engine
                reports none and the two differ, the call records both: the older one over its
                tokens and the newer one as an empty span, since nobody knows where it changed.

        Raises:
            ContractError: ids and log-probs of different lengths.
            MergeFault: `replay`: rows that do not join those that are there.
        """
        count = len(completion.ids)
        if len(completion.log_probs) != count:
            raise ContractError(
                f"call {completion.rid}: {count} ids and {len(completion.log_probs)} log-probs"
            )
        start = self._num_tokens
        self._add_rows(completion)
        call = Call(
            rid=completion.rid,
            engine=completion.engine,
            start=start,
            end=start + count,
            finish=completion.finish.value,
            versions=[
                (version, start + a, start + b)
                for version, a, b in versions_of(completion, dispatched_version, current_version)
            ],
            dispatched_version=dispatched_version,
            logprob_mode=completion.logprob_mode,
            sampling=sampling,
        )
        ids, log_probs = _own(completion.ids, np.int32), _own(completion.log_probs, np.float32)
        self._append_reply(call, _Chunk(ids, log_probs), completion.json or ids_json(ids))
        self._spec.add(completion.spec)
        self._cache.add(completion.cache)
        self._logprob_mode = completion.logprob_mode
        return call

    def add_observation(self, ids: TokenIds, json: bytes = b"") -> None:
        """Append ids that no policy sampled: mask 0, log-prob 0.0.

        Shape: [any]; nothing happens for no ids.

        Args:
            ids: to append.
            json: of these very ids, where it is there already.

        Raises:
            ValueError: no whole numbers of 32 bits.
        """
        if len(ids) == 0:
            return
        own = _own(as_ids(ids), np.int32)
        self._chunks.append(_Chunk(own))
        self._pieces.append(json or ids_json(own))
        self._num_tokens += len(own)
        self._open = 0

    def last_completion(self) -> TokenIds:
        """Return what was sampled since the last observation.

        Shape: [C], empty where the last thing was an observation.
        """
        if self._open == 0:
            return empty_ids()
        if self._open == 1:
            return self._chunks[-1].ids
        return np.concatenate([chunk.ids for chunk in self._chunks[-self._open :]])

    def window(self) -> TokenIds:
        """Return the tail of what the engine saw before `last_completion`.

        It begins at the last id that closes a turn, or is everything where there is none: a
        template's suffix depends on nothing before a closed turn, so a bridge over the window
        costs the same however long the trajectory is.
        """
        parts: list[TokenIds] = []
        for place in range(len(self._chunks) - self._open - 1, -2, -1):
            ids = self._prompt.ids if place < 0 else self._chunks[place].ids
            at = last_of(ids, self._stop_ids)
            if at >= 0:
                parts.append(ids[at:])
                break
            parts.append(ids)
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    def response_ids(self) -> TokenIds:
        """Return everything after the first prompt.

        Shape: [R]
        """
        if not self._chunks:
            return empty_ids()
        return np.concatenate([chunk.ids for chunk in self._chunks])

    def write_to(
        self,
        sample: Sample,
        decode: Callable[[TokenIds], str] | None = None,
        *,
        response: str | None = None,
    ) -> Sample:
        """Fill `sample` with the tokens and their provenance, validate and return it.

        Per-token fields and replay rows that `sample` had of fewer tokens are taken away: they were
        of what it was, and what made them makes them again.

        Args:
            sample: gets new arrays; its status, reward and metadata stay.
            decode: gives the response text from the response's ids.
            response: the text itself, where it was decoded elsewhere (in a thread, if long).

        Raises:
            ContractError: the invariant of `Sample.validate` is broken.
            MergeFault: `replay`: a reply brought no rows, though others did.
        """
        length = self.response_length
        tokens = np.concatenate([self._prompt.ids, *(c.ids for c in self._chunks)])
        self._write_rows(sample, tokens)
        sample.tokens = tokens
        sample.response_length = length
        sample.loss_mask = np.zeros(length, dtype=np.uint8)
        sample.rollout_log_probs = np.zeros(length, dtype=np.float32)
        at = 0
        for chunk in self._chunks:
            end = at + len(chunk.ids)
            if chunk.log_probs is not None:
                sample.rollout_log_probs[at:end] = chunk.log_probs
                sample.loss_mask[at:end] = 1 if chunk.mask is None else chunk.mask
            at = end
        sample.calls = list(self._calls)
        sample.derive_weight_versions()
        sample.spec_info, sample.prefix_cache_info = SpecInfo(), PrefixCacheInfo()
        sample.spec_info.add(self._spec)
        sample.prefix_cache_info.add(self._cache)
        sample.logprob_mode = self._logprob_mode
        if response is not None:
            sample.response = response
        elif decode is not None:
            sample.response = decode(sample.tokens[len(sample.tokens) - length :])
        sample.validate()
        return sample

    def _replay_start(self) -> int | None:
        if self._rows is None:
            return None
        return next((rows.known for rows in self._rows.values() if not rows.is_dormant), 0)

    def _add_rows(self, completion: Completion) -> None:
        if self._rows is None:
            return
        aborted = completion.finish is Finish.ABORT
        for name, rows in self._rows.items():
            given = getattr(completion, REPLAY[name])
            try:
                rows.add(given, self._num_tokens, len(completion.ids), aborted=aborted)
            except ValueError as error:
                raise MergeFault(f"call {completion.rid}: {error}", detail="replay") from None

    def _write_rows(self, sample: Sample, tokens: TokenIds) -> None:
        if not np.array_equal(sample.tokens, tokens):
            for name in (*PER_TOKEN, *REPLAY):
                setattr(sample, name, None)
        if self._rows is None:
            return
        for name, rows in self._rows.items():
            try:
                setattr(sample, name, rows.joined(max(0, len(tokens) - 1)))
            except ValueError as error:
                raise MergeFault(str(error), detail="replay") from None

    def _resume_rows(self, sample: Sample) -> None:
        """Go on from the rows that a parked sample has; what it lacks is asked for next."""
        if self._rows is None:
            return
        for name, rows in self._rows.items():
            held = getattr(sample, name)
            if held is not None:
                rows.resume(held)

    def _resume(self, call: Call, sample: Sample) -> None:
        offset = sample.prompt_length
        span = slice(call.start - offset, call.end - offset)
        log_probs, mask = sample.rollout_log_probs, sample.loss_mask
        if log_probs is None:
            raise ContractError(
                f"sample {sample.group_index}:{sample.member}: call {call.rid} has no log-probs"
            )
        ids = np.array(sample.tokens[call.start : call.end], dtype=np.int32)
        kept = None if mask is None else np.array(mask[span], dtype=np.uint8)
        chunk = _Chunk(ids, np.array(log_probs[span], dtype=np.float32), kept)
        self._append_reply(call, chunk, ids_json(ids))

    def _append_reply(self, call: Call, chunk: _Chunk, json: bytes) -> None:
        self._calls.append(call)
        if self._open == 0:
            self._num_turns += 1
        self._chunks.append(chunk)
        self._open += 1
        if json:
            self._pieces.append(json)
        self._num_tokens += len(chunk.ids)


def _own(array: npt.NDArray[Any], dtype: type[_Scalar]) -> npt.NDArray[_Scalar]:
    """Return `array` with `dtype`, copied where it is a view that keeps something larger alive."""
    if array.dtype == dtype and array.base is None:
        return array
    return np.array(array, dtype=dtype)


def last_of(ids: TokenIds, wanted: Sequence[int]) -> int:
    """Return the last position of any of `wanted`, -1 for none; looks at the tail first."""
    end, block = len(ids), 1024
    while end > 0:
        start = max(0, end - block)
        hits = np.zeros(end - start, dtype=np.bool_)
        for number in wanted:  # np.isin costs twenty times this for two numbers
            hits |= ids[start:end] == number
        found = hits.nonzero()[0]
        if len(found):
            return start + int(found[-1])
        end, block = start, block * 8
    return -1


def _calls_of_mask(sample: Sample) -> list[Call]:
    """Return a call for every run of trained tokens of a record that has no calls."""
    length = sample.response_length
    if length == 0 or sample.rollout_log_probs is None:
        return []
    mask = np.ones(length, dtype=np.uint8) if sample.loss_mask is None else sample.loss_mask
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (mask != 0).astype(np.int8), [0]))))
    offset = sample.prompt_length
    return [
        Call(
            rid="",
            engine="",
            start=offset + int(a),
            end=offset + int(b),
            finish="abort",
            versions=[(UNKNOWN_VERSION, offset + int(a), offset + int(b))],
            logprob_mode=sample.logprob_mode,
        )
        for a, b in zip(edges[::2], edges[1::2], strict=True)
    ]
