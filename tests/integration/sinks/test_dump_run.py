"""A real run into a dump beside its training, and the same training again from the files alone."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rollstream.dump import read_groups
from rollstream.stream import GroupStream
from tests.integration.sinks.stage import GROUPS, N, Stage, audited

pytestmark = pytest.mark.slow
SIZE = 4096
"""Of the toy's vocabulary: ids are hashed into it."""


def trained(stream: GroupStream) -> tuple[list[list[int]], npt.NDArray[np.float64]]:
    """Train a toy (one weight per token) on all there is; return its batches and its weights.

    Each update depends on the one before, so another order or another token ends elsewhere.
    """
    weights = np.zeros(SIZE)
    seen: list[list[int]] = []
    for batch in stream.batches(groups=3, timeout_s=60.0):
        arrays = batch.to_arrays(pad_id=0)
        kept = arrays["loss_mask"].astype(bool)
        tokens = arrays["tokens"][kept] % SIZE
        behind = np.exp(np.clip(weights[tokens] - arrays["log_probs"][kept], -5.0, 5.0))
        np.add.at(weights, tokens, 1e-3 * behind)
        weights *= 0.999
        seen.append(batch.group_indexes)
        with stream.updating_weights(stream.version + 1, ack=batch, post=False):
            pass
    return seen, weights


def test_a_training_from_the_dump_alone_is_the_training_that_was(
    stage: Stage, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"stderr": subprocess.DEVNULL}
    stage.start("producer", **how)
    worker = stage.start("worker", **how)
    stage.wait_ready(worker)
    with GroupStream.connect(
        stage.redis_url, run=stage.run, connect_timeout_s=60.0, text=True, dump_dir=tmp_path
    ) as stream:
        live = trained(stream)
        stream.close()
        assert stream.metrics()["stream/dumped_groups"] == GROUPS
    assert audited(stage) == (GROUPS, GROUPS)
    stage.end()
    with GroupStream.from_dump(tmp_path) as stream:
        again = trained(stream)
    assert again[0] == live[0]
    assert again[1].any()
    assert again[1].tobytes() == live[1].tobytes(), "bit for bit"
    samples = [sample for group in read_groups(tmp_path) for sample in group.flat()]
    assert len(samples) == GROUPS * N
    for sample in samples:
        sample.validate()
        assert sample.response, "texts were asked for"
