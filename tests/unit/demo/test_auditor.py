"""The demo's auditor: silent on what was sampled, and not on any damage to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples.demo.auditor import Auditor, Recomputed, Recorded, questions_of
from rollstream import Sample
from rollstream.sample import TokenIds
from tests.builders import a_group, a_sample

QUESTION = "A farmer has 7 hens and buys 5 more. How many hens are there?"
SAMPLING = {"max_new_tokens": 1024, "temperature": 1.0}
SEEDS = (11, 12)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("answers") / "rows.jsonl"
    path.write_text(json.dumps({"prompt": QUESTION, "label": "12"}) + "\n")
    return f"jsonl:{path}"


@pytest.fixture(scope="module")
def evidence(vocabulary: Path, answers: str) -> Recomputed:
    return Recomputed(vocabulary, answers)


@pytest.fixture(scope="module")
def encode(vocabulary: Path) -> Callable[[str], TokenIds]:
    tokenizer = Tokenizer.from_file(str(vocabulary))
    return lambda text: np.array(
        tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32
    )


@pytest.fixture
def sampled(evidence: Recomputed, encode: Callable[[str], TokenIds]) -> Sample:
    """Two turns as a faultless engine samples them, with a tool's answer in between."""
    prompt = encode(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    observed = encode(
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    first = evidence.policy.reply(prompt, SAMPLING | {"seed": SEEDS[0]})
    held = np.concatenate([prompt, first.ids, observed])
    second = evidence.policy.reply(held, SAMPLING | {"seed": SEEDS[1]})
    sample = a_sample(
        prompt=QUESTION,
        prompt_ids=prompt.tolist(),
        turns=[(first.ids.tolist(), observed.tolist()), (second.ids.tolist(), ())],
    )
    sample.rollout_log_probs = np.concatenate(
        [first.log_probs, np.zeros(len(observed), np.float32), second.log_probs]
    )
    for call, seed in zip(sample.calls, SEEDS, strict=True):
        call.sampling = SAMPLING | {"seed": seed}
    return sample


@pytest.fixture
def recorded(sampled: Sample, tmp_path: Path) -> Recorded:
    """The same two calls as a worker records them."""
    first = sampled.prompt_length
    assert sampled.rollout_log_probs is not None
    for call in sampled.calls:
        request = {
            "sampling_params": {"sampling_seed": call.sampling["seed"]},
            "input_ids": sampled.tokens[: call.start].tolist(),
        }
        ids = sampled.tokens[call.start : call.end].tolist()
        probs = sampled.rollout_log_probs[call.start - first : call.end - first].tolist()
        entries = [[p, i, None] for p, i in zip(probs, ids, strict=True)]
        reply = {"output_ids": ids, "meta_info": {"output_token_logprobs": entries}}
        (tmp_path / f"{call.rid}.req").write_text(json.dumps(request))
        (tmp_path / f"{call.rid}.rep").write_text(json.dumps(reply))
    return Recorded(tmp_path)


def change_id(sample: Sample) -> None:
    sample.tokens[sample.calls[1].start + 2] += 1


def change_log_prob(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    at = sample.calls[0].start - sample.prompt_length + 1
    sample.rollout_log_probs[at] = np.nextafter(sample.rollout_log_probs[at], np.float32(-9))


def shift_log_probs(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    span = slice(0, sample.calls[0].end - sample.prompt_length)
    sample.rollout_log_probs[span] = np.roll(sample.rollout_log_probs[span], 1)


def shift_start(sample: Sample) -> None:
    call = sample.calls[1]
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    at = call.start - sample.prompt_length
    sample.loss_mask[at], sample.rollout_log_probs[at] = 0, 0.0
    call.start += 1
    call.versions = [(0, call.start, call.end)]


def change_prompt(sample: Sample) -> None:
    sample.tokens[sample.prompt_length - 12] += 1


def change_observation(sample: Sample) -> None:
    sample.tokens[sample.calls[0].end + 3] += 1


def change_seed(sample: Sample) -> None:
    sample.calls[0].sampling = sample.calls[0].sampling | {"seed": 99}


def train_an_observation(sample: Sample) -> None:
    assert sample.loss_mask is not None
    sample.loss_mask[sample.calls[0].end - sample.prompt_length] = 1


def give_an_observation_a_log_prob(sample: Sample) -> None:
    assert sample.rollout_log_probs is not None
    sample.rollout_log_probs[sample.calls[0].end - sample.prompt_length] = -0.5


def leave_a_version_gap(sample: Sample) -> None:
    call = sample.calls[0]
    call.versions = [(0, call.start, call.end - 1)]


def cut_a_whole_reply(sample: Sample) -> None:
    call = sample.calls[1]
    sample.tokens = sample.tokens[:-3]
    sample.response_length -= 3
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    sample.loss_mask = sample.loss_mask[:-3]
    sample.rollout_log_probs = sample.rollout_log_probs[:-3]
    call.end -= 3
    call.versions = [(0, call.start, call.end)]


DAMAGES = [
    change_id,
    change_log_prob,
    shift_log_probs,
    shift_start,
    change_prompt,
    change_observation,
    change_seed,
    train_an_observation,
    give_an_observation_a_log_prob,
    leave_a_version_gap,
    cut_a_whole_reply,
]


def audited(evidence: Any, sample: Sample, **options: Any) -> Auditor:
    auditor = Auditor(evidence, **options)
    auditor.check([a_group(samples=[sample])])
    return auditor


def test_recomputing_auditor_finds_nothing_in_what_was_sampled(
    evidence: Recomputed, sampled: Sample
) -> None:
    auditor = audited(evidence, sampled)
    assert (auditor.calls, auditor.mismatches, auditor.findings) == (2, 0, [])


def test_recording_auditor_finds_nothing_in_what_was_recorded(
    recorded: Recorded, sampled: Sample
) -> None:
    auditor = audited(recorded, sampled)
    assert (auditor.calls, auditor.mismatches, auditor.findings) == (2, 0, [])


@pytest.mark.parametrize("damage", DAMAGES)
def test_recomputing_auditor_sees_damage(
    evidence: Recomputed, sampled: Sample, damage: Callable[[Sample], None]
) -> None:
    damage(sampled)
    assert audited(evidence, sampled).mismatches >= 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_recording_auditor_sees_damage(
    recorded: Recorded, sampled: Sample, damage: Callable[[Sample], None]
) -> None:
    damage(sampled)
    assert audited(recorded, sampled).mismatches >= 1


def test_recording_auditor_counts_a_call_without_a_record(
    recorded: Recorded, sampled: Sample
) -> None:
    (recorded.folder / f"{sampled.calls[0].rid}.rep").unlink()
    auditor = audited(recorded, sampled)
    assert auditor.mismatches == 1
    assert "cannot be read" in auditor.findings[0]


def test_recomputing_auditor_accepts_a_reply_that_a_fault_cut(
    evidence: Recomputed, sampled: Sample
) -> None:
    cut_a_whole_reply(sampled)
    sampled.calls[1].finish = "abort"
    assert audited(evidence, sampled).findings == []


def test_auditor_sees_the_problem_of_another_group(evidence: Recomputed, sampled: Sample) -> None:
    assert audited(evidence, sampled, questions={0: QUESTION}).mismatches == 0
    assert audited(evidence, sampled, questions={0: "What is 1+7?"}).mismatches == 1


def test_questions_of_groups_repeat_with_every_epoch() -> None:
    questions = questions_of("gsm_symbolic", size=3, seed=5, num_groups=7)
    assert list(questions) == list(range(7))
    assert questions[0] == questions[3] == questions[6] != questions[1]


def test_auditor_counts_every_finding_and_keeps_the_text_of_the_first(
    evidence: Recomputed, sampled: Sample
) -> None:
    change_id(sampled)
    auditor = Auditor(evidence)
    for _ in range(30):
        auditor.check_sample(sampled)
    assert (auditor.mismatches, len(auditor.findings)) == (30, 20)
