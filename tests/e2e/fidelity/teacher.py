"""A forward pass that owes nothing to the engine: what the model says of tokens that are given.

Owns plain transformers models, one a weight version: float32, whole sequences, no KV cache, no
chunks, eager attention. Never samples. Invariant: a log-prob is log softmax(logits / T) of the
position before, of the version that is asked for.

Axes: B samples of a batch, L tokens, K sampled positions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.sample import Sample, TokenIds

_BATCH_TOKENS = 2048
_ROWS = 16
"""Positions whose logits are held at once: 152k floats each."""
_NUCLEUS = 4096

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Exam:
    """What the teacher is asked about one sample."""

    tokens: TokenIds
    positions: npt.NDArray[np.int64]
    """[K] of sampled tokens."""
    temperatures: Floats
    """[K]"""
    versions: npt.NDArray[np.int64]
    """[K]"""


def exam_of(sample: Sample) -> Exam:
    """Return the exam of a sample: what its calls say about every token that they cover."""
    positions: list[int] = []
    temperatures: list[float] = []
    versions: list[int] = []
    for call in sample.calls:
        positions += range(call.start, call.end)
        temperatures += [float(call.sampling["temperature"])] * (call.end - call.start)
        version_at = {i: v for v, start, end in call.versions for i in range(start, end)}
        versions += [version_at.get(i, -1) for i in range(call.start, call.end)]
    return Exam(
        np.array(sample.tokens, dtype=np.int32),
        np.array(positions, dtype=np.int64),
        np.array(temperatures, dtype=np.float64),
        np.array(versions, dtype=np.int64),
    )


class Teacher:
    """Knows the models by version."""

    def __init__(self, folder_of: Callable[[int], Path], *, threads: int | None = None) -> None:
        self._folder_of = folder_of
        self._threads = threads or os.cpu_count() or 1
        self._nets: dict[Path, Any] = {}

    def log_probs(self, exams: Sequence[Exam]) -> list[Floats]:
        """Return for every exam the log-prob of each of its positions; NaN for an unknown version.

        Shape: [K] each.
        """
        import torch

        found = [np.full(len(exam.positions), np.nan) for exam in exams]
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # whole batches side by side: no barrier between two operations
        try:
            with ThreadPoolExecutor(self._threads) as pool:
                running = []
                for version in sorted({int(v) for exam in exams for v in exam.versions if v >= 0}):
                    self._net(version)
                    chosen = [i for i, exam in enumerate(exams) if (exam.versions == version).any()]
                    for batch in _batches(chosen, [len(exams[i].tokens) for i in chosen]):
                        asked, answers = [exams[i] for i in batch], [found[i] for i in batch]
                        running.append(pool.submit(self._batch, version, asked, answers))
                for one in running:
                    one.result()
        finally:
            torch.set_num_threads(before)
        return found

    def nucleus(self, exam: Exam, top_p: float) -> tuple[npt.NDArray[np.bool_], Floats]:
        """Return whether each position's token is in the nucleus, and the nucleus' log mass.

        Of every position: the likeliest tokens until their mass reaches `top_p`.
        """
        import torch

        inside: list[bool] = []
        masses: list[float] = []
        version = int(exam.versions[0])
        hidden = self._hidden(version, [exam])[0]
        for place, temperature in zip(exam.positions, exam.temperatures, strict=True):
            with torch.inference_mode():
                logits = self._net(version).lm_head(hidden[place - 1]) / temperature
                ranked, order = torch.softmax(logits.double(), -1).topk(_NUCLEUS)
                kept = int((ranked.cumsum(-1) - ranked <= top_p).sum())
                assert kept < _NUCLEUS, "the nucleus has more tokens than were looked at"
                token = int(exam.tokens[place])
            inside.append(bool((order[:kept] == token).any()))
            masses.append(float(ranked[:kept].sum().log()))
        return np.array(inside), np.array(masses)

    def _net(self, version: int) -> Any:
        folder = self._folder_of(version)
        if folder not in self._nets:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

            logging.disable_progress_bar()
            self._nets[folder] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
            ).eval()
        return self._nets[folder]

    def _hidden(self, version: int, exams: Sequence[Exam]) -> Any:
        """Return the last hidden states, [B, L, H]; padded behind, where nothing looks."""
        import torch

        longest = max(len(exam.tokens) for exam in exams)
        ids = torch.zeros(len(exams), longest, dtype=torch.long)
        real = torch.zeros_like(ids)
        for row, exam in enumerate(exams):
            ids[row, : len(exam.tokens)] = torch.from_numpy(exam.tokens.astype(np.int64))
            real[row, : len(exam.tokens)] = 1
        with torch.inference_mode():
            return (
                self._net(version)
                .model(input_ids=ids, attention_mask=real, use_cache=False)
                .last_hidden_state
            )

    def _batch(self, version: int, exams: Sequence[Exam], found: Sequence[Floats]) -> None:
        import torch

        hidden = self._hidden(version, exams)
        head = self._net(version).lm_head.weight.T
        # One block of memory for all: new pages for every block would cost more than the sums.
        block = torch.empty(_ROWS, head.shape[1])
        for row, (exam, answers) in enumerate(zip(exams, found, strict=True)):
            wanted = np.flatnonzero(exam.versions == version)
            for start in range(0, len(wanted), _ROWS):
                part = wanted[start : start + _ROWS]
                at = torch.from_numpy(exam.positions[part])
                targets = torch.from_numpy(exam.tokens[exam.positions[part]].astype(np.int64))
                heat = torch.from_numpy(exam.temperatures[part].astype(np.float32))
                with torch.inference_mode():
                    logits = torch.mm(hidden[row, at - 1], head, out=block[: len(part)])
                    logits.div_(heat[:, None])
                    largest = logits.amax(-1, keepdim=True)
                    chosen = (logits.gather(1, targets[:, None]) - largest)[:, 0].double()
                    # `log_softmax` would lose 2e-4 of 152k terms; `sum` adds them pairwise.
                    total = logits.sub_(largest).exp_().sum(-1).double()
                answers[part] = (chosen - total.log()).numpy()


def _batches(chosen: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of samples of similar length, none of too many tokens."""
    order = sorted(range(len(chosen)), key=lambda i: lengths[i])
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * lengths[i] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(chosen[i])
    if batch:
        yield batch
