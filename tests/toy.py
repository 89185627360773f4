"""A toy vocabulary and template with ids that a test can spell: a real `tokenizers.Tokenizer`.

Greedy longest match: `1 <|im_start|>`, `2 <|im_end|>`, `3 <|endoftext|>`, `4 <think>`,
`5 </think>`, `6 <tool_call>`, `7 </tool_call>`, `10` newline, `20 system`, `21 user`,
`22 assistant`, `23 tool`, `30 hello`, `31 he`, `32 llo`; any other byte b is `1000 + b`.
A message is `<|im_start|>ROLE\\nTEXT<|im_end|>\\n`, the generation prompt
`<|im_start|>assistant\\n`.

The template speaks the protocol of the package `renderers`, so what wraps it in tests is what
wraps Qwen3: `worker.tito.backend.RenderersBackend`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from examples.vocabulary import byte_level_spelling
from rollstream.sample import UNKNOWN_VERSION, Sample, TokenIds
from worker.tito.backend import RenderersBackend, import_renderers
from worker.tito.ids import as_ids, ids_json, prompt_ids
from worker.tito.tokenizer import Tokenizer
from worker.tito.trajectory import Trajectory
from worker.types import Completion, Finish, PromptIds

CONTROLS = {
    "<|im_start|>": 1,
    "<|im_end|>": 2,
    "<|endoftext|>": 3,
    "<think>": 4,
    "</think>": 5,
    "<tool_call>": 6,
    "</tool_call>": 7,
}
WORDS = {
    "\n": 10, "system": 20, "user": 21, "assistant": 22, "tool": 23,
    "hello": 30, "he": 31, "llo": 32,
}  # fmt: skip
START, CLOSE, END, THINK, THINK_END, CALL, CALL_END, NEWLINE = 1, 2, 3, 4, 5, 6, 7, 10

P0 = [1, 21, 10, 1104, 1105, 2, 10, 1, 22, 10]
"""user "hi" and the generation prompt."""
A1 = [31, 32, 2]
A1_LOG_PROBS = [-0.5, -0.25, -0.125]
O1 = [10, 1, 23, 10, 1111, 1107, 2, 10, 1, 22, 10]
"""newline, tool "ok", generation prompt."""
U1 = [10, 1, 21, 10, 1110, 1111, 2, 10, 1, 22, 10]
"""newline, user "no", generation prompt."""
A2 = [30, 2]
A2_LOG_PROBS = [-0.1, -0.2]
HI = [{"role": "user", "content": "hi"}]
OK = [{"role": "tool", "content": "ok"}]
NO = [{"role": "user", "content": "no"}]


def toy_inner() -> tokenizers.Tokenizer:
    """Return the vocabulary itself."""
    spell = byte_level_spelling()
    vocab = {spell[b]: 1000 + b for b in range(256)}
    vocab |= {"".join(spell[b] for b in word.encode()): number for word, number in WORDS.items()}
    vocab |= CONTROLS
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= set(vocab)
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    words = "|".join(sorted(WORDS, key=len, reverse=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    return inner


def toy_tokenizer() -> Tokenizer:
    """Return the vocabulary behind the worker's own wrapper."""
    scaffold = ("\n", "<|im_start|>assistant\n")
    return Tokenizer(toy_inner(), "toy", scaffold)


def write_toy_tokenizer(folder: Path) -> Path:
    """Write the vocabulary as a `tokenizer.json` and return its path."""
    target = folder / "tokenizer.json"
    toy_inner().save(str(target))
    return target


class ToyTemplate:
    """The template, in the protocol of the package `renderers`.

    `opener` is written behind the generation prompt (a reasoning block that the model continues).
    `damage`, where given, changes every bridge: a broken template, for tests of what notices it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        opener: Sequence[int] = (),
        damage: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        self._tokenizer, self._opener, self._damage = tokenizer, list(opener), damage

    def render_ids(
        self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool
    ) -> list[int]:
        del tools
        ids = [number for message in messages for number in self._message(message)]
        return ids + (self._generation_prompt() if add_generation_prompt else [])

    def bridge_to_next_turn(
        self, held: list[int], sampled: list[int], messages: list[dict[str, Any]], *, tools: Any
    ) -> SimpleNamespace | None:
        del tools
        ids = [*held, *sampled]
        if not any(number in (CLOSE, END) for number in sampled):
            ids.append(CLOSE)
        while ids[-1] not in (CLOSE, END):
            ids.pop()
        ids.append(NEWLINE)
        for message in messages:
            ids += self._message(message)
        ids += self._generation_prompt()
        return SimpleNamespace(token_ids=self._damage(ids) if self._damage else ids)

    def parse_response(self, ids: list[int], *, prompt_ids: list[int], tools: Any = None) -> Any:
        del tools
        parsing, reasoning = import_renderers("parsing"), import_renderers("reasoning")
        return parsing.parse_qwen3(
            self._tokenizer, ids, stop_ids={CLOSE, END}, tool_call_id=CALL,
            tool_call_end_id=CALL_END, reasoning_end_id=THINK_END,
            prefilled_thinking=reasoning.prompt_ends_in_reasoning(
                self._tokenizer, prompt_ids, stop_ids={CLOSE, END}
            ),
        )  # fmt: skip

    def get_stop_token_ids(self) -> list[int]:
        return [CLOSE, END]

    def _message(self, message: dict[str, Any]) -> list[int]:
        ids = [START, CONTROLS.get(message["role"]) or WORDS[message["role"]], NEWLINE]
        ids += self._tokenizer.encode(message["content"])
        for call in message.get("tool_calls") or ():
            ids += [CALL, *self._tokenizer.encode(json.dumps(call["function"])), CALL_END]
        return [*ids, CLOSE, NEWLINE]

    def _generation_prompt(self) -> list[int]:
        return [START, WORDS["assistant"], NEWLINE, *self._opener]


def toy_renderer(
    *, opener: Sequence[int] = (), damage: Callable[[list[int]], list[int]] | None = None
) -> RenderersBackend:
    """Return the worker's backend over the toy template and vocabulary."""
    tokenizer = toy_tokenizer()
    template = ToyTemplate(tokenizer, opener=opener, damage=damage)
    return RenderersBackend(tokenizer, template, CLOSE, (THINK, THINK_END))


def a_completion(
    ids: Sequence[int],
    log_probs: Sequence[float] | None = None,
    *,
    finish: Finish = Finish.STOP,
    version: int = UNKNOWN_VERSION,
    rid: str = "r" * 32,
    **fields: Any,
) -> Completion:
    """Return an engine's reply; position i has log-prob -(i + 1) / 128 where none are given."""
    given = [-(i + 1) / 128 for i in range(len(ids))] if log_probs is None else log_probs
    known: dict[str, Any] = {
        "ids": as_ids(ids),
        "log_probs": np.array(given, dtype=np.float32),
        "json": ids_json(as_ids(ids)),
        "finish": finish,
        "versions": [(version, 0, len(ids))],
        "engine": "http://engine",
        "rid": rid,
    }
    return Completion(**(known | fields))


@dataclass
class Played:
    """What `play` saw."""

    trajectory: Trajectory
    requests: list[list[int]]
    """The ids of every request, read back from its JSON."""
    replies: list[Completion]
    sample: Sample
    abnormal: list[bool]
    """Per turn, whether its end was abnormal."""


def play(
    renderer: Any,
    prompt: list[dict[str, Any]] | PromptIds,
    replies: Sequence[Completion],
    observations: Sequence[list[dict[str, Any]]] = (),
    tools: list[dict[str, Any]] | None = None,
) -> Played:
    """Run a conversation: every reply but the last is followed by its observation.

    Checks the invariants of every trajectory before it returns.
    """
    if not isinstance(prompt, PromptIds):
        prompt = prompt_ids(renderer.render(prompt, tools))
    trajectory = Trajectory(prompt, renderer.stop_token_ids)
    requests, abnormal = [], []
    for turn, reply in enumerate(replies):
        requests.append(sent_ids(trajectory))
        window = trajectory.window()
        trajectory.add_completion(reply, dispatched_version=turn + 1, sampling={"seed": turn})
        abnormal.append(renderer.parse(trajectory.last_completion(), window).abnormal_end)
        if turn < len(observations):
            trajectory.add_observation(
                renderer.extend(
                    trajectory.window(), trajectory.last_completion(), observations[turn], tools
                )
            )
    sample = trajectory.write_to(Sample(group_index=0, prompt="hi"), renderer.decode)
    check_invariants(sample, requests, replies)
    assert sample.response == renderer.decode(sample.tokens[sample.prompt_length :])
    return Played(trajectory, requests, list(replies), sample, abnormal)


def sent_ids(trajectory: Trajectory) -> list[int]:
    """Return the ids of the next request, as the engine reads them from the body."""
    request = trajectory.request()
    ids: list[int] = json.loads(b"[" + b",".join(request.pieces) + b"]")
    assert len(ids) == request.num_tokens == trajectory.num_tokens
    return ids


def check_invariants(
    sample: Sample, requests: Sequence[Sequence[int]], replies: Sequence[Completion]
) -> None:
    """Assert what every trajectory must fulfil, from the requests and replies as they were."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    length = sample.response_length
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == length
    assert len(sample.tokens) == sample.prompt_length + length
    expected_mask, expected_log_probs = [0] * length, [0.0] * length
    tokens = sample.tokens.tolist()
    assert len(sample.calls) == len(requests) == len(replies)
    for call, request, reply in zip(sample.calls, requests, replies, strict=True):
        assert tokens[: call.start] == list(request)
        assert tokens[call.start : call.end] == reply.ids.tolist()
        for place, log_prob in enumerate(reply.log_probs.tolist(), call.start):
            expected_mask[place - sample.prompt_length] = 1
            expected_log_probs[place - sample.prompt_length] = log_prob
        assert call.versions[0][1] == call.start
        assert call.versions[-1][2] == call.end
    assert sample.loss_mask.tolist() == expected_mask
    assert sample.rollout_log_probs.tolist() == expected_log_probs
    assert len(sample.weight_versions) == len(replies)
    sample.validate()


def array(ids: Sequence[int]) -> TokenIds:
    """Return ids as the arrays that cross the worker's seams."""
    return as_ids(ids)
