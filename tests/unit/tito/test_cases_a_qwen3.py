"""Token fidelity with the real vocabulary: conversations whose ids text would not give back."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rollstream.sample import Sample
from tests import toy
from worker.tito.backend import RenderersBackend
from worker.tito.ids import prompt_ids
from worker.types import Finish

QUESTION = [{"role": "user", "content": "What is 42 + year + temperature?"}]
RESULTS = [{"role": "tool", "content": "2026"}, {"role": "tool", "content": "-60"}]


def _ids(qwen: RenderersBackend, *texts: str) -> list[int]:
    return [number for text in texts for number in qwen.encode_raw(text).tolist()]


@pytest.mark.parametrize("split", [("H", "AVING"), ("HAVI", "NG"), ("a", " ", '"b'), ("i", "ng")])
def test_case_1_splits_that_the_vocabulary_would_merge_stay(
    split: tuple[str, ...], qwen: RenderersBackend
) -> None:
    sampled = [*_ids(qwen, *split), 151645]
    assert sampled != [*_ids(qwen, "".join(split)), 151645]
    played = toy.play(
        qwen,
        QUESTION,
        [toy.a_completion(sampled), toy.a_completion(_ids(qwen, "ok<|im_end|>"))],
        [RESULTS],
    )
    start = len(played.requests[0])
    assert played.requests[1][start : start + len(sampled)] == sampled
    assert played.sample.response.startswith("".join(split) + "<|im_end|>\n<|im_start|>user\n")


def test_case_2_length_is_the_number_of_sampled_ids(qwen: RenderersBackend) -> None:
    sampled = _ids(qwen, "h", "e", "l", "l")
    played = toy.play(qwen, QUESTION, [toy.a_completion(sampled, finish=Finish.LENGTH)])
    assert (played.sample.response_length, len(qwen.encode("hell"))) == (4, 1)


def test_case_8_prompt_and_reply_that_would_merge_stay_apart(qwen: RenderersBackend) -> None:
    assert len(qwen.encode("hello")) == 1
    reply = toy.a_completion(_ids(qwen, "llo<|im_end|>"))
    played = toy.play(qwen, prompt_ids(qwen.encode("he")), [reply])
    assert (played.sample.prompt_length, played.sample.response) == (1, "llo<|im_end|>")


def test_case_11_bytes_of_one_character_in_two_tokens_are_whole_in_the_text(
    qwen: RenderersBackend,
) -> None:
    sampled = _ids(qwen, "𒀀")
    assert len(sampled) > 1
    cut = toy.play(qwen, QUESTION, [toy.a_completion(sampled[:1], finish=Finish.LENGTH)])
    assert "\ufffd" in cut.sample.response
    assert toy.play(qwen, QUESTION, [toy.a_completion(sampled)]).sample.response == "𒀀"


def test_two_turns_with_parallel_calls_are_chunks_of_sampled_and_observed(
    qwen: RenderersBackend,
) -> None:
    calls = (
        '<tool_call>\n{"name": "get_year", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_temperature", "arguments": {"location": "Mars"}}\n</tool_call><|im_end|>'
    )
    first, last = _ids(qwen, calls), _ids(qwen, "The answer is 2008.<|im_end|>")
    replies = [toy.a_completion(ids, [-i / 128 for i in range(len(ids))]) for ids in (first, last)]
    sample = toy.play(qwen, QUESTION, replies, [RESULTS]).sample
    observed = (
        "\n<|im_start|>user\n<tool_response>\n2026\n</tool_response>\n<tool_response>\n-60\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert _chunks(qwen, sample) == [
        (calls, 1, [-i / 128 for i in range(len(first))]),
        (observed, 0, [0.0] * len(_ids(qwen, observed))),
        ("The answer is 2008.<|im_end|>", 1, [-i / 128 for i in range(len(last))]),
    ]
    assert sample.response == calls + observed + "The answer is 2008.<|im_end|>"


def _chunks(qwen: RenderersBackend, sample: Sample) -> list[tuple[str, int, list[float]]]:
    """Return runs of one mask value: (text, mask, log-probs)."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    mask, response = sample.loss_mask.tolist(), sample.tokens[sample.prompt_length :]
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [
        (qwen.decode(response[a:b]), mask[a], sample.rollout_log_probs[a:b].tolist())
        for a, b in pairwise(edges)
    ]
