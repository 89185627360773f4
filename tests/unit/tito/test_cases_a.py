"""Token fidelity across turns: cases 1 to 11 of the public reports, with the toy vocabulary.

`toy.play` checks the invariants of every trajectory: lengths, the mask exactly on sampled ids,
their own log-probs, and every turn's prompt equal to the tokens up to it.
"""

from __future__ import annotations

import json

import numpy as np

from rollstream.group import PromptGroup
from rollstream.sample import Sample
from rollstream.wire import decode_body, decode_text, encode_body, encode_text
from tests import toy
from tests.toy import A1, A1_LOG_PROBS, A2, A2_LOG_PROBS, HI, NO, O1, OK, P0, U1, a_completion
from worker.tito.ids import prompt_ids
from worker.tito.trajectory import Trajectory
from worker.types import Finish


def _base(first: list[int] = A1, log_probs: list[float] | None = None) -> toy.Played:
    return toy.play(
        toy.toy_renderer(),
        HI,
        [a_completion(first, log_probs), a_completion(A2, A2_LOG_PROBS)],
        [OK],
    )


def test_case_1_ids_that_are_not_the_canonical_encoding_stay() -> None:
    played = _base(A1, A1_LOG_PROBS)
    tokens = played.sample.tokens.tolist()
    assert tokens == P0 + A1 + O1 + A2
    assert len(tokens) == 26
    assert tokens[10:13] == [31, 32, 2]
    assert played.requests == [P0, P0 + A1 + O1]
    assert tokens.count(30) == 1
    assert tokens.index(30) == 24
    assert played.sample.response_length == 16
    assert played.sample.weight_versions == [1, 2]


def test_case_2_lengths_come_from_ids_when_text_would_be_shorter() -> None:
    ids = [1104, 1101, 1108, 1108]
    renderer = toy.toy_renderer()
    assert len(renderer.encode("hell")) == 3
    sample = toy.play(renderer, HI, [a_completion(ids, finish=Finish.LENGTH)]).sample
    assert sample.response_length == 4
    assert sample.tokens[-4:].tolist() == ids
    assert sample.response == "hell"
    assert sample.calls[0].finish == "length"


def test_case_4a_separator_appears_once_between_reply_and_tool() -> None:
    sample = _base(A1, A1_LOG_PROBS).sample
    assert sample.tokens[12:15].tolist() == [2, 10, 1]
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask[3] == 0
    assert sample.rollout_log_probs[3] == 0.0


def test_case_4b_sampled_newline_behind_the_close_is_kept_and_not_doubled() -> None:
    log_probs = [*A1_LOG_PROBS, -0.0625]
    sample = _base([*A1, 10], log_probs).sample
    assert sample.tokens.tolist() == [*P0, *A1, 10, *O1[1:], *A2]
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask[:5].tolist() == [1, 1, 1, 1, 0]
    assert sample.rollout_log_probs[3] == np.float32(-0.0625)


def test_case_4c_anything_else_sampled_behind_the_close_is_kept_and_closed_again() -> None:
    played = _base([*A1, 10, 30])
    assert played.requests[1] == [*P0, *A1, 10, 30, 2, *O1]
    assert played.abnormal[0] is False


def test_case_6_unusual_end_token_stays_and_the_template_close_follows_it() -> None:
    played = _base([31, 32, 3])
    assert played.requests[1] == [*P0, 31, 32, 3, 2, *O1]
    assert played.sample.loss_mask is not None
    assert played.sample.loss_mask[:5].tolist() == [1, 1, 1, 0, 0]
    assert played.abnormal == [True, False]


def test_case_6_reply_without_any_end_gets_the_close_with_mask_0() -> None:
    played = _base([31, 32])
    assert played.requests[1] == [*P0, 31, 32, 2, *O1]
    assert played.sample.loss_mask is not None
    assert played.sample.loss_mask[:4].tolist() == [1, 1, 0, 0]
    assert played.abnormal == [True, False]


def test_case_7_think_opener_stays_in_the_generation_prompt() -> None:
    renderer = toy.toy_renderer(opener=[4, 10])
    prompt, reply = [*P0, 4, 10], [30, 5, 10, 30, 2]
    played = toy.play(renderer, HI, [a_completion(reply), a_completion(A2)], [NO])
    tokens = played.sample.tokens.tolist()
    assert played.requests == [prompt, [*prompt, *reply, *U1, 4, 10]]
    openers = [i for i, number in enumerate(tokens) if number == 4]
    assert openers == [10, len(prompt) + len(reply) + len(U1)]
    sampled = played.sample.sampled_mask()
    assert not any(sampled[i - len(prompt)] for i in openers if i >= len(prompt))
    assert not any(tokens[i : i + 4] == [4, 10, 10, 5] for i in range(len(tokens)))
    message = renderer.parse(toy.array(reply), toy.array(prompt[6:]))
    assert (message.reasoning, message.content) == ("hello", "hello")


def test_case_8_boundary_is_where_the_ids_came_from_when_a_merge_spans_it() -> None:
    renderer = toy.toy_renderer()
    assert renderer.encode("hello").tolist() == [30]
    played = toy.play(renderer, prompt_ids([31]), [a_completion([32, 2])])
    sample = played.sample
    assert sample.tokens.tolist() == [31, 32, 2]
    assert (sample.prompt_length, sample.response_length) == (1, 2)
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1, 1]


def test_case_9_special_ids_inside_a_reply_stay_in_ids_and_text() -> None:
    played = _base([31, 4, 5, 32, 2])
    sample = played.sample
    assert len(sample.tokens) == 28
    assert sample.response_length == 18
    assert sample.tokens[15:19].tolist() == O1[:4]
    assert sample.response.startswith("he<think></think>llo<|im_end|>\n<|im_start|>tool\nok")
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1] * 5 + [0] * 11 + [1, 1]


def test_case_10_mask_and_log_probs_speak_of_the_token_itself() -> None:
    sample = _base(A1, A1_LOG_PROBS).sample
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask.tolist() == [1, 1, 1] + [0] * 11 + [1, 1]
    expected = np.array([-0.5, -0.25, -0.125] + [0.0] * 11 + [-0.1, -0.2], dtype=np.float32)
    assert sample.rollout_log_probs.tolist() == expected.tolist()
    assert sample.effective_response_length == 5


def test_case_11_emoji_of_byte_tokens_is_whole_in_the_text() -> None:
    ids = [1240, 1159, 1153, 1130, 2]
    renderer = toy.toy_renderer()
    sample = toy.play(renderer, HI, [a_completion(ids)]).sample
    assert sample.response_length == 5
    assert sample.response == bytes([240, 159, 153, 130]).decode() + "<|im_end|>"


def test_case_11b_cut_emoji_keeps_its_ids_and_serializes() -> None:
    sample = toy.play(
        toy.toy_renderer(), HI, [a_completion([1240, 1159], finish=Finish.LENGTH)]
    ).sample
    assert sample.tokens[-2:].tolist() == [1240, 1159]
    assert "\ufffd" in sample.response
    group = PromptGroup(group_index=0, n=1, prompt="hi")
    back = decode_body(encode_body(sample), group, encode_text(sample))
    assert isinstance(back, Sample)
    assert back.tokens.tolist() == sample.tokens.tolist()
    assert decode_text(encode_text(sample)) == [sample.response]
    assert json.loads(json.dumps(sample.to_dict()))["response"] == sample.response


def test_case_19_tool_and_user_appended_together_follow_as_one_suffix() -> None:
    renderer = toy.toy_renderer()
    trajectory = Trajectory(prompt_ids(P0), renderer.stop_token_ids)
    trajectory.add_completion(a_completion(A1), dispatched_version=1, sampling={})
    suffix = renderer.extend(trajectory.window(), trajectory.last_completion(), OK + NO, None)
    assert suffix.tolist() == (
        [10, 1, 23, 10, 1111, 1107, 2, 10, 1, 21, 10, 1110, 1111, 2, 10, 1, 22, 10]
    )
