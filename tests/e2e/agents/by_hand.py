"""Records of a faultless service, written by hand: what the judge has to find nothing in.

Owns the writing, with the policy's own replies and no gateway. Never judges. Invariant: a record
holds what three witnesses would have said of the same sessions.

Each session: a turn; a turn whose answer was lost and told again to the SDK's second try; that turn
once more, as a new request; a turn that goes on from there, of an engine that stopped half-way
where that is permitted; in trees also another branch from the first turn, and a sub-agent.
"""

from __future__ import annotations

import itertools
import json
import uuid
from typing import Any

import numpy as np

from rollstream.errors import Status, StopReason
from rollstream.sample import Call, Sample, TokenIds
from tests.e2e.agents.breaks import encode
from tests.e2e.agents.record import (
    Attempt,
    EngineCall,
    HandedGroup,
    HandedMember,
    Record,
    Try,
)
from tests.e2e.agents.scenes import SAMPLES_A_GROUP, Protocol, Scene
from tests.e2e.agents.truth import Truth, words_in
from tests.e2e.agents.words import DIALECTS, Item
from tests.e2e.chaos.rows import question_of

PATH = "/sessions/0/v1/chat/completions"
_STATS = ("requests", "calls", "committed", "joined", "replayed", "refused", "failed", "left",
          "superseded", "sampled_tokens", "dropped_tokens")  # fmt: skip


def scene_by_hand(kind: str, policy: str) -> Scene:
    """Return a scene of two groups."""
    return Scene("by-hand", Protocol.SGLANG, kind, policy, True, 2)  # type: ignore[arg-type]


def write(scene: Scene, truth: Truth) -> Record:
    """Return the record of a faultless service."""
    record = Record(scene, 1)
    for group in range(scene.groups):
        members = [_Session(record, truth, group, m).play() for m in range(SAMPLES_A_GROUP)]
        record.handed.append(HandedGroup(str(group), members))
        record.acked.append(str(group))
    return record


class _Node:
    """One reply."""

    def __init__(self, parent: _Node | None, observed: TokenIds) -> None:
        self.parent, self.observed = parent, observed
        self.calls: list[EngineCall] = []
        self.outs: list[TokenIds] = []
        self.log_probs: list[Any] = []
        self.items: list[Item] = []

    def path(self) -> list[_Node]:
        return [*(self.parent.path() if self.parent else []), self]

    def tokens(self) -> TokenIds:
        before = self.parent.tokens() if self.parent else np.empty(0, np.int32)
        return np.concatenate([before, self.observed, *self.outs])


class _Session:
    def __init__(self, record: Record, truth: Truth, group: int, member: int) -> None:
        self.record, self.truth, self.group, self.member = record, truth, group, member
        self.nonce = f"{group:06x}{member:06x}"
        self.attempt = Attempt(self.nonce, str(group), member, 1, "chat", False)
        record.attempts[self.nonce] = self.attempt
        self.counts: dict[str, int] = dict.fromkeys(_STATS, 0)
        self.clock = itertools.count(1)
        self.seeds = itertools.count(1)
        self.dialect = DIALECTS["chat"]

    def play(self) -> HandedMember:
        scene = self.record.scene
        first = self._ask(None, "You help.", f"{question_of(self.group)} [session {self.nonce}]")
        old = self._ask(first, "You help.", "And with 3 more?", lost=True)
        new = self._ask(first, "You help.", "And with 3 more?")
        last = self._ask(new, "You help.", "And with 5 more?", stops=scene.partial)
        leaves = {
            "keep_prefix": [last], "fork": [last], "drop_retries": [last], "all": [last, old],
        }[scene.policy]  # fmt: skip
        if scene.kind == "tree":
            branch = self._ask(first, "You help.", "And with 4 more instead?")
            sub = self._ask(None, "Sub.", f"Look at it. [session {self.nonce}]")
            leaves = sorted([*leaves, branch, sub], key=lambda node: -len(node.path()))
        else:
            self.counts["superseded"] += 1
        self.attempt.ended_s = float(next(self.clock))
        self._count(leaves)
        samples = self._samples(leaves)
        return HandedMember(self.member, samples, scene.kind == "tree")

    def _ask(self, parent: _Node | None, system: str, text: str, *, lost: bool = False,
             stops: bool = False) -> _Node:  # fmt: skip
        before = parent.tokens() if parent else np.empty(0, np.int32)
        head = f"<|im_start|>system\n{system}<|im_end|>\n" if parent is None else "\n"
        chat = f"{head}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        observed = np.array(encode(chat), np.int32)
        sampling = {"seed": next(self.seeds), "temperature": 1.0, "max_new_tokens": 320}
        node = _Node(parent, observed)
        whole, _ = self.truth.policy.expected(np.concatenate([before, observed]), sampling)
        ends = [len(whole) // 2, len(whole)] if stops else [len(whole)]
        for end in ends:
            self._call(node, sampling, end, "stop" if end == len(whole) else "abort")
        items = [*(parent.items if parent else []), *self.dialect.user(text)]
        body = self.dialect.body(system, items, tool=None, most=320, stream=False, previous="")
        reply = _reply(f"chatcmpl-{len(self.record.engine_calls)}", self.truth.decode(whole))
        self._tries(body, json.dumps(reply), lost=lost)
        node.items = [*items, *self.dialect.said(reply).items]
        self.counts["committed"] += 1
        return node

    def _call(self, node: _Node, sampling: dict[str, Any], end: int, finish: str) -> None:
        at = node.tokens()
        count = end - sum(map(len, node.outs))
        rid = uuid.uuid4().hex
        sampled = {**sampling, "max_new_tokens": 320 - sum(map(len, node.outs))}
        start_s, end_s = float(next(self.clock)), float(next(self.clock))
        call = EngineCall(rid, at, sampled, False, start_s, end_s, count, finish)
        self.record.engine_calls[rid] = call
        ids, log_probs = self.truth.sampled(call)
        node.calls.append(call)
        node.outs.append(ids)
        node.log_probs.append(log_probs)
        self.counts["calls"] += 1
        self.counts["sampled_tokens"] += count

    def _tries(self, body: dict[str, Any], raw: str, *, lost: bool) -> None:
        for retry, how in enumerate(["lost", "got"] if lost else ["got"]):
            number = len(self.attempt.tries)
            sent_s, at_s = float(next(self.clock)), float(next(self.clock))
            self.attempt.tries.append(
                Try(number, 0, PATH, body, retry, sent_s, "pass", how, 200, raw, at_s)
            )
            self.counts["requests"] += 1
            self.counts["replayed"] += retry

    def _count(self, leaves: list[_Node]) -> None:
        kept = {id(node): node for leaf in leaves for node in leaf.path()}
        tokens = sum(len(out) for node in kept.values() for out in node.outs)
        self.counts["dropped_tokens"] = self.counts["sampled_tokens"] - tokens

    def _samples(self, leaves: list[_Node]) -> list[Sample]:
        owned: set[int] = set()
        samples = []
        for leaf in leaves:
            sample = self._sample(leaf, owned)
            owned |= {id(node) for node in leaf.path()}
            samples.append(sample)
        samples[0].metadata["agent"] = self.counts
        return samples

    def _sample(self, leaf: _Node, owned: set[int]) -> Sample:
        path, tokens = leaf.path(), leaf.tokens()
        first = len(path[0].observed)
        length = len(tokens) - first
        log_probs, mask = np.zeros(length, np.float32), np.zeros(length, np.uint8)
        calls = []
        for node in path:
            for call, out, told in zip(node.calls, node.outs, node.log_probs, strict=True):
                start, end = len(call.ids), len(call.ids) + len(out)
                log_probs[start - first : end - first] = told
                mask[start - first : end - first] = id(node) not in owned
                calls.append(
                    Call(call.rid, "", start, end, call.finish, [(0, start, end)], 0,
                         sampling=call.sampling)
                )  # fmt: skip
        sample = Sample(
            group_index=self.group, member=self.member, index=self.group * 4096 + self.member,
            rollout_id=self.group * 4096 + self.member, tokens=tokens, response_length=length,
            loss_mask=mask, rollout_log_probs=log_probs, calls=calls,
            metadata={"nonce": self.nonce},
        )  # fmt: skip
        sample.finish(StopReason.STOP, Status.COMPLETED)
        sample.validate()
        return sample


def _reply(reply_id: str, text: str) -> dict[str, Any]:
    """Return a chat completion of a model's text; it calls nothing, since it has no tools."""
    thought, _, content = text.removesuffix("<|im_end|>").rpartition("</think>")
    thought = thought.removeprefix("<think>").strip()
    message = {"role": "assistant", "content": content.strip(), "reasoning_content": thought}
    assert not words_in(text).calls
    return {"id": reply_id, "choices": [{"message": message, "finish_reason": "stop"}]}
