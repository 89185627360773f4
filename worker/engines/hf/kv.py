"""The KV cache of everybody in the batch: where each request's keys and values lie.

Owns the tensors and the masks over them. Never knows what a request is. Invariant: the key of token
t of a request lies at index t of its row, a query attends to indices up to its own position and to
nothing else, and what no request holds is zero (0 times a stale NaN would be NaN).

Two ways. `SlotKv`: one tensor [rows, heads, capacity, dim] a layer, so a decode step is one forward
pass over all rows; for models of full attention. `LoneKv`: transformers' own cache of one request,
and a forward pass for each; for everything else (sliding windows, recurrent states).

Axes: R rows, H heads, S capacity, D dimension of a head, N new tokens of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

_MIN_CAPACITY = 64


class Forward(Protocol):
    """A forward pass of the model."""

    def __call__(
        self, ids: torch.Tensor, cache: Any, positions: torch.Tensor | None, mask: Any, keep: int
    ) -> torch.Tensor:
        """Return logits [B, keep, V]."""
        ...


@dataclass(slots=True, eq=False)
class Place:
    """Where one request's KV lies."""

    row: int = 0
    length: int = 0
    cache: Any = None


class Kv(Protocol):
    """What both ways can do."""

    batched: bool
    """Whether `decode` takes more than one place."""

    def open(self) -> Place:
        """Return an empty place."""
        ...

    def close(self, place: Place) -> None:
        """Give a place back."""
        ...

    def reset(self, place: Place) -> None:
        """Empty a place."""
        ...

    def prefill(self, place: Place, ids: Sequence[int], keep: int) -> torch.Tensor:
        """Feed in ids behind what the place holds; return logits [keep, V] of the last ones."""
        ...

    def decode(self, places: Sequence[Place], ids: Sequence[int]) -> torch.Tensor:
        """Feed one id into each place; return logits [B, V] in their order."""
        ...

    def save(self, place: Place) -> tuple[Any, int]:
        """Return a copy that outlives the place (or what it held), and its bytes."""
        ...

    def load(self, place: Place, saved: Any, length: int) -> None:
        """Fill an empty place with the first `length` tokens of what was saved."""
        ...

    def copy(self, source: Place, target: Place, length: int) -> None:
        """Fill an empty place with the first `length` tokens of another."""
        ...

    def clear(self) -> None:
        """Forget every place."""
        ...


@dataclass(slots=True)
class _Step:
    """What the layers must know of the forward pass that is running."""

    rows: torch.Tensor | None = None
    """[B] of a decode step; None of a prefill."""
    row: int = 0
    """Of a prefill, or the first of consecutive rows."""
    consecutive: int = 0
    """B where the rows are consecutive, else 0."""
    start: torch.Tensor | int = 0
    """[B] positions of a decode step, or the first position of a prefill."""
    limit: int = 0
    """Keys up to here are handed out."""


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values of all rows; its shape is known once it is first written."""

    is_sliding = False

    def __init__(self, step: _Step, rows: int, capacity: int) -> None:
        super().__init__()
        self.step, self.rows, self.capacity = step, rows, capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def zeros(like: torch.Tensor) -> torch.Tensor:
            shape = (self.rows, like.shape[1], self.capacity, like.shape[3])
            return torch.zeros(shape, dtype=like.dtype, device=like.device)

        self.keys, self.values = zeros(key_states), zeros(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        step = self.step
        if step.rows is None:
            held[step.row, :, step.start : step.limit] = new[0]
            return held[step.row : step.row + 1, :, : step.limit]
        held[step.rows, :, step.start] = new[:, :, 0]
        if step.consecutive:
            return held[step.row : step.row + step.consecutive, :, : step.limit]
        return held[step.rows, :, : step.limit]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.step.limit, 0

    def get_seq_length(self) -> int:
        return self.step.limit

    def get_max_length(self) -> int:
        return -1

    def grow(self, rows: int, capacity: int) -> None:
        """Make room; what is held stays where it is.

        Never shrinks: an earlier try may have run out of memory between two layers.
        """
        rows, capacity = max(rows, self.rows), max(capacity, self.capacity)
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                shape = (rows, old.shape[1], capacity, old.shape[3])
                new = torch.zeros(shape, dtype=old.dtype, device=old.device)
                new[: old.shape[0], :, : old.shape[2]] = old
                setattr(self, name, new)
        self.rows, self.capacity = rows, capacity


class SlotKv:
    """Rows of one tensor a layer; see the module."""

    batched = True

    def __init__(
        self, forward: Forward, *, num_layers: int, device: Any, dtype: Any, additive_mask: bool
    ) -> None:
        self._forward = forward
        self._device, self._dtype, self._additive = device, dtype, additive_mask
        self._step = _Step()
        self._num_layers = num_layers
        self._places: list[Place] = []
        self._cache: Any = None
        self._rows = self._capacity = 0

    def open(self) -> Place:
        """Return the next row."""
        place = Place(row=len(self._places))
        self._reserve(len(self._places) + 1, _MIN_CAPACITY)
        self._places.append(place)
        return place

    def close(self, place: Place) -> None:
        """Give the row back; the last row moves into its place."""
        self.reset(place)
        last = self._places.pop()
        if last is not place:
            self.copy(last, place, last.length)
            length = last.length
            self.reset(last)
            last.row, last.length = place.row, length
            self._places[last.row] = last
        if not self._places:
            self.clear()

    def clear(self) -> None:
        """Forget every row."""
        self._places.clear()
        self._cache, self._rows, self._capacity = None, 0, 0

    def reset(self, place: Place) -> None:
        """Zero a row."""
        for layer in self._layers():
            layer.keys[place.row, :, : layer.capacity].zero_()
            layer.values[place.row, :, : layer.capacity].zero_()
        place.length = 0

    def prefill(self, place: Place, ids: Sequence[int], keep: int) -> torch.Tensor:
        """Feed ids into one row."""
        start, end = place.length, place.length + len(ids)
        self._reserve(0, end)
        step = self._step
        step.rows, step.row, step.consecutive, step.start, step.limit = (
            None,
            place.row,
            0,
            start,
            end,
        )
        positions = torch.arange(start, end, device=self._device)
        mask = torch.arange(end, device=self._device)[None, :] <= positions[:, None]
        tokens = torch.tensor([list(ids)], device=self._device)
        logits = self._forward(
            tokens, self._cache, positions[None, :], self._mask(mask[None, None]), keep
        )
        place.length = end
        return logits[0]

    def decode(self, places: Sequence[Place], ids: Sequence[int]) -> torch.Tensor:
        """Feed one id into each row, in one forward pass."""
        limit = max(place.length for place in places) + 1
        self._reserve(0, limit)
        order = sorted(range(len(places)), key=lambda i: places[i].row)
        rows = [places[i].row for i in order]
        positions = torch.tensor([places[i].length for i in order], device=self._device)
        step = self._step
        step.rows = torch.tensor(rows, device=self._device)
        step.row, step.start, step.limit = rows[0], positions, limit
        step.consecutive = len(rows) if rows[-1] - rows[0] == len(rows) - 1 else 0
        mask = torch.arange(limit, device=self._device)[None, :] <= positions[:, None]
        tokens = torch.tensor([[ids[i]] for i in order], device=self._device)
        logits = self._forward(
            tokens, self._cache, positions[:, None], self._mask(mask[:, None, None]), 1
        )
        for place in places:
            place.length += 1
        if order == list(range(len(places))):
            return logits[:, 0]
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        return logits[back.to(self._device), 0]

    def save(self, place: Place) -> tuple[Any, int]:
        """Return copies of a row, layer by layer."""
        kept = [
            (
                layer.keys[place.row, :, : place.length].clone(),
                layer.values[place.row, :, : place.length].clone(),
            )
            for layer in self._layers()
        ]
        return kept, sum(tensor.nbytes for pair in kept for tensor in pair)

    def load(self, place: Place, saved: Any, length: int) -> None:
        """Fill a row from copies."""
        self._reserve(0, length)
        if not self._layers():  # nothing was fed in yet: the shapes are those of what was saved
            for layer, (keys, values) in zip(self._cache.layers, saved, strict=True):
                layer.lazy_initialization(keys[None], values[None])
        for layer, (keys, values) in zip(self._layers(), saved, strict=True):
            layer.keys[place.row, :, :length] = keys[:, :length]
            layer.values[place.row, :, :length] = values[:, :length]
        place.length = length

    def copy(self, source: Place, target: Place, length: int) -> None:
        """Fill a row from another."""
        for layer in self._layers():
            layer.keys[target.row, :, :length] = layer.keys[source.row, :, :length]
            layer.values[target.row, :, :length] = layer.values[source.row, :, :length]
        target.length = length

    def _layers(self) -> list[Any]:
        """Return the layers that hold something."""
        if self._cache is None:
            return []
        return [layer for layer in self._cache.layers if layer.is_initialized]

    def _mask(self, allowed: torch.Tensor) -> torch.Tensor:
        if not self._additive:
            return allowed
        lowest = torch.finfo(self._dtype).min
        return torch.zeros(allowed.shape, dtype=self._dtype, device=self._device).masked_fill(
            ~allowed, lowest
        )

    def _reserve(self, rows: int, capacity: int) -> None:
        """Have at least so many rows of so many tokens; both grow by doubling."""
        rows, capacity = _at_least(self._rows, rows), _at_least(self._capacity, capacity)
        if self._cache is None:
            layers = [_SlotLayer(self._step, rows, capacity) for _ in range(self._num_layers)]
            self._cache = Cache(layers=layers)
        elif (rows, capacity) != (self._rows, self._capacity):
            for layer in self._cache.layers:
                layer.grow(rows, capacity)
        self._rows, self._capacity = rows, capacity


def _at_least(held: int, wanted: int) -> int:
    if wanted <= held:
        return held
    return 1 << (wanted - 1).bit_length()


@dataclass(slots=True)
class LoneKv:
    """One cache a request, as transformers makes it; see the module."""

    forward: Forward
    config: Any
    device: Any
    batched: bool = field(default=False, init=False)

    def open(self) -> Place:
        """Return an empty cache of transformers'."""
        return Place(cache=DynamicCache(config=self.config))

    def close(self, place: Place) -> None:
        """Forget a cache."""
        place.cache = None

    def reset(self, place: Place) -> None:
        """Begin with a new cache."""
        place.cache, place.length = DynamicCache(config=self.config), 0

    def prefill(self, place: Place, ids: Sequence[int], keep: int) -> torch.Tensor:
        """Feed ids into one cache."""
        tokens = torch.tensor([list(ids)], device=self.device)
        end = place.length + len(ids)
        positions = torch.arange(place.length, end, device=self.device)[None, :]
        logits = self.forward(tokens, place.cache, positions, None, keep)
        place.length = end
        return logits[0]

    def decode(self, places: Sequence[Place], ids: Sequence[int]) -> torch.Tensor:
        """Feed one id into one cache."""
        (place,) = places
        return self.prefill(place, ids, 1)

    def save(self, place: Place) -> tuple[Any, int]:
        """Return the cache itself."""
        tensors = [
            value
            for layer in place.cache.layers
            for held in vars(layer).values()
            for value in (held.values() if isinstance(held, dict) else [held])
            if isinstance(value, torch.Tensor)
        ]
        return place.cache, sum(tensor.nbytes for tensor in tensors)

    def load(self, place: Place, saved: Any, length: int) -> None:
        """Take a cache over."""
        place.cache, place.length = saved, length

    def copy(self, source: Place, target: Place, length: int) -> None:
        """Is never asked for: `batched` is false."""
        raise NotImplementedError("a lone cache is not copied")

    def clear(self) -> None:
        """Caches are held by their places only."""
