"""The proof of promise 1 on a real model: the model, the teacher, and a short run of all of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.devserver import die_with_parent
from examples.tiny_model import grammar, write_tiny_model
from tests.e2e.fidelity.breaks import BREAKS
from tests.e2e.fidelity.options import Options
from tests.e2e.fidelity.proof import Rollouts, encode, judge, roll_out
from tests.e2e.fidelity.report import Report
from tests.e2e.fidelity.teacher import Exam, Teacher
from tests.hf import need_torch

need_torch()
ROOT = Path(__file__).resolve().parents[2]
BEGUN = """<|im_start|>user
What is 1 + 7?<|im_end|>
<|im_start|>assistant
<tool_call>{"name":"add","arguments":{"a":1"""


# --- the model and the teacher -------------------------------------------------------------------
@pytest.fixture(scope="module")
def models(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a policy."""
    above = tmp_path_factory.mktemp("models")
    return [
        write_tiny_model(above / str(seed), tokenizer_json=vocabulary, seed=seed) for seed in (0, 1)
    ]


@lru_cache(maxsize=2)
def net_of(folder: Path) -> Any:
    """Return a model as transformers loads it."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def log_probs_of(folder: Path, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return log softmax(logits / T) behind each row of equally long tokens, [B, V]."""
    import torch

    with torch.inference_mode():
        ids = torch.from_numpy(np.atleast_2d(tokens).astype(np.int64))
        logits = net_of(folder)(ids, logits_to_keep=1).logits[:, 0]
        found: np.ndarray = torch.log_softmax(logits.double() / temperature, -1).numpy()
    return found


def test_tiny_model_speaks_qwen3_and_every_earlier_token_counts(models: list[Path]) -> None:
    config = json.loads((models[0] / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("qwen3", 151_936)
    tokens = np.array(encode(BEGUN), np.int32)
    plain = log_probs_of(models[0], tokens)[0]
    # Behind `"a":1` the grammar goes on, and what it goes on with is nearly certain.
    following = [encode(text)[0] for text in grammar()["1"]]
    assert np.exp(plain[following]).sum() > 0.9
    changed = np.repeat(tokens[None], len(tokens), axis=0)
    np.fill_diagonal(changed, encode(" sum")[0])
    moved = np.abs(log_probs_of(models[0], changed) - plain).max(axis=1)
    assert moved.min() > 1e-3
    assert np.abs(log_probs_of(models[1], tokens)[0] - plain).max() > 0.1


def test_tiny_model_is_the_same_for_the_same_seed(models: list[Path], vocabulary: Path) -> None:
    again = write_tiny_model(models[0].parent / "again", tokenizer_json=vocabulary, seed=0)
    file = "model.safetensors"
    assert (again / file).read_bytes() == (models[0] / file).read_bytes()
    assert (again / file).read_bytes() != (models[1] / file).read_bytes()


def test_teacher_says_what_the_whole_model_says_in_batches_of_any_lengths(
    models: list[Path],
) -> None:
    draw = np.random.default_rng(3)
    exams = []
    for length in (9, 23, 23, 40):
        positions = np.sort(draw.choice(np.arange(1, length), 6, replace=False)).astype(np.int64)
        tokens = draw.integers(0, 151_000, length).astype(np.int32)
        versions = draw.integers(0, 2, 6).astype(np.int64)
        exams.append(Exam(tokens, positions, draw.choice([0.7, 1.0], 6), versions))
    exams[1].versions[2] = -1
    found = Teacher(lambda version: models[version], threads=2).log_probs(exams)
    for exam, answers in zip(exams, found, strict=True):
        for k, place in enumerate(exam.positions):
            if exam.versions[k] < 0:
                assert np.isnan(answers[k])
                continue
            before = exam.tokens[:place]
            said = log_probs_of(models[exam.versions[k]], before, exam.temperatures[k])
            assert abs(answers[k] - said[0, exam.tokens[place]]) < 1e-5


@pytest.mark.parametrize("place", [0, 1000, 77_777, 151_930])
@pytest.mark.parametrize("mode", ["temperature", "raw", "processed"])
def test_engine_keeps_the_mass_of_rare_tokens_in_a_log_prob(place: int, mode: str) -> None:
    # What this proof found first: float32 lanes lost 1.3e-4 of it.
    import torch

    from worker.engines.hf.params import Params
    from worker.engines.hf.sampler import LogprobMode, Row, draw, scores

    logits = torch.randn(1, 151_936, generator=torch.Generator().manual_seed(0)) * 0.5
    logits[0, place] = 18.0
    exact = float(torch.log_softmax(logits.double(), -1)[0, place])
    (drawn,) = draw(logits, [Row(Params(), 5, 7, Counter(), frozenset())], LogprobMode(mode))
    assert drawn.token == place
    assert drawn.log_prob == pytest.approx(exact, abs=2e-6)
    assert scores(logits, [place]) == pytest.approx([exact], abs=2e-6)


# --- all of it -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def rollouts(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Rollouts, Report]:
    """A short run of both halves on real processes."""
    assert vocabulary.exists()
    report = Report(asked=24)
    options = Options(json=True, samples=24, seed=1, damage=None)
    folder = tmp_path_factory.mktemp("fidelity")
    return roll_out(options, folder, report, lambda _: None), report


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_short_run_proves_the_promise(rollouts: tuple[Rollouts, Report]) -> None:
    found, report = rollouts
    findings = judge(found, report, None, lambda _: None)
    assert [str(finding) for finding in findings] == []
    assert (report.broken, report.missing) == ([], [])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("damage", BREAKS)
def test_short_run_fails_for_every_damage(rollouts: tuple[Rollouts, Report], damage: str) -> None:
    found = dataclasses.replace(rollouts[0], cut=[])
    resumed = [s for s in found.samples if any(call.finish == "abort" for call in s.calls)]
    found.samples = [*resumed[:3], *[s for s in found.samples if s not in resumed][:3]]
    report = Report(asked=6, top_p_refused=True)
    judge(found, report, damage, lambda _: None)
    assert report.broken
    assert report.mismatches > 0
    if damage in ("retokenize", "drop", "observed"):
        assert report.prefix_breaks > 0
    if damage in ("shift", "temperature", "versions", "drop", "retokenize", "rounded"):
        assert report.max_abs_difference > 1e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engine_that_reports_another_distribution_is_found_by_the_teacher_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.fidelity", "--json", "--samples", "16", "--break", "raw"],
        cwd=ROOT,
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        preexec_fn=die_with_parent,
    )
    assert done.returncode == 1, done.stderr
    line = json.loads(done.stdout)
    assert line["prefix_breaks"] == 0
    assert line["max_abs_difference"] > 1e-2
    assert "a log-prob is off by" in done.stderr
