"""A batch of finished groups, as the trainer gets it.

Owns `Batch`: its groups, its arrays, its ack. Never reads Redis itself.
Invariant: a group belongs to one batch only, and a batch is acked as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import overload

import numpy as np

from rollstream.arrays import TrainArrays, effective_mask, micro_batches, rows_of, stack
from rollstream.errors import Status
from rollstream.group import FinishedGroup, reward_number
from rollstream.sample import Sample


@dataclass(slots=True, eq=False)
class Batch:
    """Finished groups that are trained on in one step.

    Example:
        >>> for batch in stream.batches(groups=32):
        ...     loss = train(batch.to_arrays(pad_id=0))
        ...     batch.ack()
    """

    groups: list[FinishedGroup]
    number: int = 0
    """Counts the batches that this process was handed, from 1."""
    wait_s: float = 0.0
    """How long the trainer waited for this batch."""
    acked: bool = False
    """Set once Redis confirmed the ack."""
    ack_through: Callable[[Batch], None] | None = field(default=None, repr=False)
    """The stream's `ack`; None for a batch made by hand."""

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[FinishedGroup]:
        return iter(self.groups)

    def flat(self) -> list[Sample]:
        """Return every sample of every group, leaves side by side, groups never mixed."""
        return [sample for group in self.groups for sample in group.flat()]

    @property
    def group_indexes(self) -> list[int]:
        """The ids of the groups, in order."""
        return [group.group_index for group in self.groups]

    def ack(self) -> None:
        """Say that the step is done: frees the groups' memory and their capacity; repeatable.

        Raises:
            ConsumerTaken: another trainer took the run over; nothing was acked.
            StreamError: Redis did not answer in time; the batch is still held, ack it again.
        """
        if self.ack_through is not None:
            self.ack_through(self)

    @overload
    def to_arrays(self, pad_id: int = 0, max_tokens: None = None) -> TrainArrays: ...
    @overload
    def to_arrays(self, pad_id: int = 0, *, max_tokens: int) -> Iterator[TrainArrays]: ...

    def to_arrays(
        self, pad_id: int = 0, max_tokens: int | None = None
    ) -> TrainArrays | Iterator[TrainArrays]:
        """Return the batch as padded, writable numpy arrays, one row per sample.

        Position i of a row speaks of token i: `loss_mask[b, i]` says whether a loss may be taken on
        predicting token i (from the logits at i - 1), and `log_probs[b, i]` is the engine's
        log-prob of that very token. Leaves of a trajectory are rows of their own that share
        `rollout_id`; `rollout_mask_sum` counts the trainable tokens of all of them over the whole
        batch, also where `max_tokens` puts them into different pieces. A removed sample keeps its
        row, with a mask of zeros.

        Shape: [B, L] per token, [B] per row; see `TrainArrays`.

        Args:
            pad_id: token id behind the end of a row.
            max_tokens: where given, an iterator of micro-batches, longest rows first, none with
                more than this many padded tokens.

        Raises:
            ValueError: one sample alone is longer than `max_tokens`.
        """
        rows = rows_of(self.groups)
        return (
            stack(rows, pad_id) if max_tokens is None else micro_batches(rows, pad_id, max_tokens)
        )

    def metrics(self) -> dict[str, float]:
        """Return figures of this batch for a tracker, all under `batch/`.

        Unit: seconds, tokens, versions. Rewards count members: nine leaves of one trajectory weigh
        one.
        """
        flat = self.flat()
        figures: dict[str, float] = {
            "batch/groups": len(self.groups),
            "batch/samples": len(flat),
            "batch/tokens": sum(len(s.tokens) for s in flat),
            "batch/sampled_tokens": sum(s.num_sampled for s in flat),
            "batch/trainable_tokens": sum(int(effective_mask(s).sum()) for s in flat),
            "batch/removed": sum(s.remove_sample for s in flat),
            "batch/truncated": sum(s.status is Status.TRUNCATED for s in flat),
            "batch/wait_s": self.wait_s,
        }
        _summarise(figures, "batch/reward", self._rewards(), ("mean", "std", "min", "max"))
        _summarise(figures, "batch/response_length", [s.response_length for s in flat])
        _summarise(figures, "batch/staleness", [g.staleness for g in self.groups])
        figures["batch/missing"] = sum(len(g.missing) for g in self.groups)
        for group in self.groups:
            for member in group.missing:
                key = f"batch/missing/{member.reason or member.status.value}"
                figures[key] = figures.get(key, 0) + 1
        for name, seconds in self._spans(flat).items():
            _summarise(figures, f"batch/span/{name}_s", seconds)
        return figures

    def _rewards(self) -> list[float]:
        rewards = []
        for group in self.groups:
            for trajectory in group.samples:
                sample = trajectory[0] if isinstance(trajectory, list) else trajectory
                number = reward_number(sample.reward, group.reward_key)
                if number is not None:
                    rewards.append(number)
        return rewards

    def _spans(self, flat: list[Sample]) -> dict[str, list[float]]:
        spans: dict[str, list[float]] = {}
        for sample in flat:
            for span in sample.spans:
                spans.setdefault(span.name, []).append(span.duration_s)
        for group in self.groups:
            for name, seconds in group.spans.items():
                spans.setdefault(name, []).extend(seconds)
        return spans


def _summarise(
    figures: dict[str, float],
    name: str,
    values: list[float] | list[int],
    which: tuple[str, ...] = ("mean", "max"),
) -> None:
    """Add `name`_mean, _std, _min, _max; nothing where there is no value."""
    if values:
        array = np.asarray(values, dtype=np.float64)
        for kind in which:
            figures[f"{name}_{kind}"] = float(getattr(array, kind)())
