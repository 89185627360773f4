"""What an engine sampled for given ids, computed again, and what a model's text says.

Owns the policy's side of the truth and a reading of ChatML of its own. Never asks the gateway's
parser. Invariant: nothing here is read from a sample but what is held against it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollstream.sample import LogProbs, TokenIds
from tests.e2e.agents.record import EngineCall, Record
from tests.e2e.agents.words import Said, sorted_json
from worker.engines.sim.answers import load_answers
from worker.engines.sim.policy import Policy
from worker.engines.sim.script import PolicyConfig

MARKER = re.compile(r"session ([0-9a-f]{12})")
OPENER = "<|im_start|>assistant\n"
_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_END = "<|im_end|>"


class Words(NamedTuple):
    """What a reply says, without the space that separates its parts."""

    thought: str
    text: str
    calls: tuple[tuple[str, str], ...]


def words_of(said: Said) -> Words:
    """Return what a client read."""
    calls = tuple((name, sorted_json(arguments)) for _, name, arguments in said.calls)
    return Words(_packed(said.thought), _packed(said.text), calls)


def words_in(text: str) -> Words:
    """Return what a model's text says, control tokens shown."""
    is_cut = not text.endswith(_END)
    text = text.removesuffix(_END)
    thought = ""
    if found := _THOUGHT.match(text):
        thought, text = found[1], text[found.end() :]
    calls: list[tuple[str, str]] = []

    def take(block: re.Match[str]) -> str:
        try:
            call = json.loads(block[1])
            calls.append((call["name"], json.dumps(call["arguments"], sort_keys=True)))
        except (ValueError, KeyError, TypeError):
            return block[0]  # what is no call is text
        return ""

    if not is_cut:  # nobody runs the calls of a reply that was cut: they are text
        text = _CALL.sub(take, text)
    return Words(_packed(thought), _packed(text), tuple(calls))


def _packed(text: str) -> str:
    return "".join(text.split())


@dataclass(slots=True)
class Reply:
    """What an engine sampled for one turn: in one call, or several where it was stopped."""

    calls: list[EngineCall]
    prompt: TokenIds
    """[P] of the first call."""
    ids: TokenIds
    """[C] of all calls."""
    words: Words
    prompt_text: str

    @property
    def rids(self) -> list[str]:
        return [call.rid for call in self.calls]


@dataclass(slots=True)
class Truth:
    """Computes again what engines said."""

    policy: Policy
    checked: int = 0
    """Tokens that were held against it."""
    _sampled: dict[str, tuple[TokenIds, LogProbs]] = field(default_factory=dict)

    @classmethod
    def load(cls, tokenizer: Path, answers: str, config: PolicyConfig) -> Truth:
        """Read a vocabulary and a table of answers."""
        return cls(Policy.load(str(tokenizer), load_answers(answers), config))

    def decode(self, ids: TokenIds) -> str:
        """Return the text of ids, control tokens shown."""
        return self.policy.vocabulary.decode(ids)

    def sampled(self, call: EngineCall) -> tuple[TokenIds, LogProbs]:
        """Return what a call got: as many tokens of what the policy says as the engine sent out.

        Shape: [C] int32, [C] float32.
        """
        if call.rid not in self._sampled:
            ids, log_probs = self.policy.expected(call.ids, call.sampling)
            count = call.num_tokens
            self._sampled[call.rid] = ids[:count], log_probs[:count]
        return self._sampled[call.rid]

    def attribute(self, record: Record) -> None:
        """Say of every engine call whose attempt it was: all of its prompts name it."""
        for call in record.engine_calls.values():
            found = MARKER.search(self.decode(call.ids))
            call.nonce = found[1] if found else ""

    def replies(self, calls: list[EngineCall]) -> list[Reply]:
        """Return the replies of one attempt: calls that go on behind a stopped one are one."""
        found: list[Reply] = []
        stopped: dict[bytes, Reply] = {}
        for call in sorted(calls, key=lambda one: one.started_s):
            if not call.is_whole:
                continue
            ids, _ = self.sampled(call)
            reply = stopped.pop(call.ids.tobytes(), None)
            if reply is None:
                reply = Reply([call], call.ids, ids, Words("", "", ()), self.decode(call.ids))
                found.append(reply)
            else:
                reply.calls.append(call)
                reply.ids = np.concatenate([reply.ids, ids])
            if call.finish == "abort":
                stopped[np.concatenate([call.ids, ids]).tobytes()] = reply
        for reply in found:
            reply.words = words_in(self.decode(reply.ids))
        return found

    def contradiction(self, sample: Any, call: Any, seen: EngineCall) -> str | None:
        """Return how one call of a sample differs from what its engine was sent and sampled."""
        if not np.array_equal(sample.tokens[: call.start], seen.ids):
            return _first_difference(sample.tokens[: call.start], seen.ids, "was sent")
        ids, log_probs = self.sampled(seen)
        self.checked += len(ids)
        held = sample.tokens[call.start : call.end]
        if not np.array_equal(held, ids):
            return _first_difference(held, ids, "was sampled")
        first = call.start - sample.prompt_length
        told = sample.rollout_log_probs[first : first + len(ids)]
        differs = np.flatnonzero(
            np.ascontiguousarray(told).view("<u4") != np.ascontiguousarray(log_probs).view("<u4")
        )
        if len(differs):
            at = int(differs[0])
            return f"log-prob {at} is {told[at]!r}, {log_probs[at]!r} was sampled"
        return _other_sampling(call.sampling, seen.sampling)


def _other_sampling(recorded: Mapping[str, Any], sent: Mapping[str, Any]) -> str | None:
    for name in ("seed", "temperature", "max_new_tokens"):
        if recorded.get(name) != sent.get(name):
            return f"{name} {recorded.get(name)} is recorded, {sent.get(name)} was sent"
    return None


def _first_difference(held: TokenIds, true: TokenIds, what: str) -> str:
    if len(held) != len(true):
        return f"{len(held)} ids where {len(true)} {what}"
    at = int(np.flatnonzero(held != true)[0])
    return f"id {at} is {int(held[at])}, {int(true[at])} {what}"
