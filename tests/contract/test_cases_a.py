"""Cases 1 to 11 of the public reports through a whole rollout: `multi_turn`, the real client, HTTP.

The same conversations as `tests/unit/tito/test_cases_a.py`, which plays them on a `Trajectory`;
here what is held against the sample are the bodies that the engine got and the bytes it answered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rollstream.errors import Status, StopReason
from rollstream.group import PromptGroup
from rollstream.sample import Sample
from rollstream.wire import decode_body, decode_text, encode_body, encode_text
from tests.generate_stage import OverHttp, engine_of, given
from tests.scripted_engine import a_reply
from tests.toy import A1, A1_LOG_PROBS, A2, A2_LOG_PROBS, HI, O1, P0, toy_renderer
from worker.generate import multi_turn, single_turn
from worker.sampling import Sampling
from worker.tools import FunctionTool
from worker.types import AssistantMessage, ToolCall

EMOJI = [1240, 1159, 1153, 1130]
"""The four bytes of one character."""


@dataclass
class Reply:
    """What the engine says once; log-probs are -(i + 1) / 64 where none are given."""

    ids: Sequence[int]
    log_probs: list[float] = field(default_factory=list)
    finish: str = "stop"
    version: int = 1

    def __post_init__(self) -> None:
        self.log_probs = self.log_probs or [-(i + 1) / 64 for i in range(len(self.ids))]

    def to_bytes(self) -> bytes:
        """Return it in SGLang's words, the text of every token broken."""
        finish: dict[str, Any] = {"type": self.finish}
        finish |= {"matched": self.ids[-1]} if self.finish == "stop" else {"length": len(self.ids)}
        body = json.loads(
            a_reply(self.ids, log_probs=self.log_probs, finish=finish,
                    weight_version=str(self.version))
        )  # fmt: skip
        for entry in body["meta_info"]["output_token_logprobs"]:
            entry[2] = "\ufffd"
        return json.dumps(body).encode()


LAST = Reply(A2, A2_LOG_PROBS, version=2)


class FirstCalls:
    """The toy renderer, reading a call of `f` in the first reply whatever its ids are."""

    def __init__(self, first: Sequence[int], opener: Sequence[int] = ()) -> None:
        self._inner, self._first = toy_renderer(opener=opener), list(first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def parse(self, completion: Any, prompt_tail: Any, tools: Any = None) -> AssistantMessage:
        message: AssistantMessage = self._inner.parse(completion, prompt_tail, tools)
        if completion.tolist() == self._first:
            message.tool_calls = [ToolCall("call_1", "f", {})]
        return message


def f() -> str:
    """Say ok."""
    return "ok"


async def ran(
    *replies: Reply, generate: Any = multi_turn, prompt: Any = HI, max_new_tokens: int = 64,
    opener: Sequence[int] = (),
) -> tuple[Sample, list[list[int]]]:  # fmt: skip
    """Run a conversation; return the sample and the prompt ids of every request."""
    renderer = FirstCalls(replies[0].ids, opener)
    steps = [(200, reply.to_bytes()) for reply in replies]
    async with engine_of("http", *steps) as engine:
        assert isinstance(engine, OverHttp)
        stage = given(
            engine, renderer, prompt, tools={"f": FunctionTool(f)} if len(replies) > 1 else None,
            sampling=Sampling(max_new_tokens=max_new_tokens),
        )  # fmt: skip
        sample = (await generate(stage)).samples
        requests = [body["input_ids"] for body in engine.server.requests]
    assert isinstance(sample, Sample)
    _check_invariants(sample, requests, replies)
    return sample, requests


def _check_invariants(
    sample: Sample, requests: Sequence[Sequence[int]], replies: Sequence[Reply]
) -> None:
    """Rebuild tokens, mask and log-probs from the wire alone."""
    assert len(requests) == len(replies) == len(sample.calls)
    tokens: list[int] = []
    mask: list[int] = []
    log_probs: list[float] = []
    for request, reply in zip(requests, replies, strict=True):
        assert list(request)[: len(tokens)] == tokens
        observed = len(request) - len(tokens)
        tokens = [*request, *reply.ids]
        mask += [0] * observed + [1] * len(reply.ids)
        log_probs += [0.0] * observed + reply.log_probs
    first = len(requests[0])
    assert sample.tokens.tolist() == tokens
    assert sample.response_length == len(tokens) - first
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert sample.loss_mask.tolist() == mask[first:]
    expected = np.array(log_probs[first:], dtype=np.float32)
    assert sample.rollout_log_probs.tobytes() == expected.tobytes()
    assert sample.response == toy_renderer().decode(sample.tokens[first:])


async def test_case_1_and_10_base_is_one_completed_sample_of_what_was_sampled() -> None:
    sample, requests = await ran(Reply(A1, A1_LOG_PROBS), LAST)
    assert requests == [P0, P0 + A1 + O1]
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert (len(sample.tokens), sample.response_length) == (26, 16)
    assert sample.tokens.tolist().count(30) == 1
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1, 1, 1] + [0] * 11 + [1, 1]
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert sample.weight_versions == [1, 2]


async def test_case_2_a_cut_reply_has_as_many_tokens_as_ids() -> None:
    cut = Reply([1104, 1101, 1108, 1108], finish="length")
    sample, _ = await ran(cut, max_new_tokens=4)
    assert len(toy_renderer().encode(sample.response)) == 3
    assert (sample.response_length, sample.status) == (4, Status.TRUNCATED)
    assert sample.stop_reason is StopReason.TURN_LENGTH


async def test_case_4_the_separator_is_there_once_whether_sampled_or_not() -> None:
    sample, _ = await ran(Reply(A1, A1_LOG_PROBS), LAST)
    assert sample.tokens[12:15].tolist() == [2, 10, 1]
    sampled = Reply([*A1, 10], [*A1_LOG_PROBS, -0.0625])
    sample, requests = await ran(sampled, LAST)
    assert requests[1] == [*P0, *A1, *O1]
    assert sample.calls[0].end == 14
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1] * 4 + [0] * 10 + [1, 1]


async def test_case_6_an_unusual_end_is_kept_closed_and_told() -> None:
    sample, requests = await ran(Reply([31, 32, 3]), LAST)
    assert requests[1] == [*P0, 31, 32, 3, 2, *O1]
    assert sample.metadata["abnormal_ends"] == 1
    usual, _ = await ran(Reply(A1), LAST)
    assert "abnormal_ends" not in usual.metadata


async def test_case_7_the_opener_of_reasoning_stays_in_the_generation_prompts() -> None:
    opener = [4, 10]
    sample, requests = await ran(Reply([30, 5, 10, 30, 2]), LAST, opener=opener)
    prompt = [*P0, *opener]
    assert requests == [prompt, [*prompt, 30, 5, 10, 30, 2, *O1, *opener]]
    tokens = sample.tokens.tolist()
    assert [place for place, number in enumerate(tokens) if number == 4] == [10, 28]
    assert sample.loss_mask is not None
    assert [tokens[i] for i in (np.flatnonzero(sample.loss_mask) + len(prompt)).tolist()] == [
        30, 5, 10, 30, 2, *A2,
    ]  # fmt: skip
    text = ",".join(map(str, tokens))
    assert "4,10,10,5" not in text


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
async def test_case_8_the_join_of_prompt_and_reply_is_where_they_came_from(generate: Any) -> None:
    sample, requests = await ran(Reply([32, 2]), generate=generate, prompt="he")
    assert requests == [[31]]
    assert sample.tokens.tolist() == [31, 32, 2]
    assert (sample.prompt_length, sample.response_length) == (1, 2)
    assert toy_renderer().encode("hello").tolist() == [30]


async def test_case_9_special_ids_inside_a_reply_shift_nothing() -> None:
    sample, _ = await ran(Reply([31, 4, 5, 32, 2]), LAST)
    assert (len(sample.tokens), sample.response_length) == (28, 18)
    assert sample.tokens[15:19].tolist() == [10, 1, 23, 10]


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
async def test_case_11_an_emoji_is_whole_where_the_engines_texts_are_broken(generate: Any) -> None:
    sample, _ = await ran(Reply([*EMOJI, 2]), generate=generate)
    assert sample.response == "\U0001f642<|im_end|>" == bytes(
        number - 1000 for number in EMOJI
    ).decode() + "<|im_end|>"  # fmt: skip
    assert sample.response_length == 5


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
async def test_case_11b_half_an_emoji_is_truncated_and_still_serializes(generate: Any) -> None:
    sample, _ = await ran(Reply(EMOJI[:2], finish="length"), generate=generate, max_new_tokens=2)
    assert sample.tokens[-2:].tolist() == EMOJI[:2]
    assert sample.status is Status.TRUNCATED
    back = decode_body(encode_body(sample), PromptGroup(3, 1, HI))
    assert isinstance(back, Sample)
    assert back.tokens.tolist() == sample.tokens.tolist()
    assert decode_text(encode_text(sample)) == [sample.response]
    assert json.loads(json.dumps(sample.to_dict()))["response"] == sample.response
