"""Records of scenes that never ran: what a faultless service would have left behind.

Owns the writing of samples from the policy, with stops, resumes and versions where a test wants
them. Never runs a process. Invariant: the judge finds nothing in a record from here.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.errors import Status, StopReason
from rollstream.group import sample_index
from rollstream.sample import Call, Sample, TokenIds
from tests.e2e.weights.record import (
    Attempt,
    EngineCall,
    Evaluation,
    Execution,
    Handed,
    HandedGroup,
    Record,
    Update,
)
from tests.e2e.weights.rollout import value_of
from tests.e2e.weights.rows import HELD_OUT, TEMPERATURES, question_of
from tests.e2e.weights.scenes import (
    GROUPS_A_BATCH,
    MAX_NEW_TOKENS,
    MAX_RESPONSE,
    MAX_TURNS,
    SAMPLES_A_GROUP,
    Scene,
)
from worker.engines.sim.policy import Policy, expected_log_probs
from worker.sampling import Sampling, call_seed
from worker.tools import FunctionTool
from worker.types import Renderer

PID = 7


@dataclass
class Hand:
    """Writes one record."""

    scene: Scene
    policy: Policy
    renderer: Renderer
    seed: int = 11
    record: Record = field(init=False)
    _clock: Iterator[float] = field(default_factory=lambda: itertools.count(1000.0, 0.01))

    def __post_init__(self) -> None:
        from tests.e2e.weights.rollout import compute

        self.record = Record(self.scene, self.seed)
        self._specs = [FunctionTool(compute).spec]

    def write(self) -> Record:
        """Write every batch of the scene, its updates, and one evaluation."""
        groups, version = iter(range(self.scene.rows)), 0
        while handed := [
            self._group(group, version) for group in itertools.islice(groups, GROUPS_A_BATCH)
        ]:
            self.record.handed.append(Handed(version, handed))
            self.record.acked.append([group.group for group in handed])
            if version < self.scene.num_updates:
                at, mode = next(self._clock), self.scene.modes[version]
                version += 1
                # Behind all calls so far: those take 0.3 s.
                at += 1.0
                self.record.updates.append(
                    Update(version, mode, at, at + 0.001, at + 0.002, at + 0.003)
                )
                self._clock = itertools.count(at + 0.01, 0.01)
        samples = [
            self.sample(f"e:held-out/{member}", HELD_OUT, member, (0,)) for member in range(2)
        ]
        self.record.evaluations.append(Evaluation("held-out", 2, samples, [], (0, 0)))
        return self.record

    def _group(self, group: int, version: int) -> HandedGroup:
        """Write a group that is at most two versions old."""
        versions = tuple(range(max(0, version - 2), version + 1))
        samples = [
            self.sample(str(group), group, member, versions) for member in range(SAMPLES_A_GROUP)
        ]
        since = min(v for s in samples for c in s.calls for v, a, b in c.versions if b > a)
        return HandedGroup(group, samples, version - since)

    def sample(self, group: str, row: int, member: int, versions: tuple[int, ...]) -> Sample:
        """Write one sample, whose calls get these versions in turn.

        With `partial` every other reply is stopped half-way and goes on; without it a version
        changes within a reply.
        """
        prompt = [{"role": "user", "content": question_of(row)}]
        tokens = self.renderer.render(prompt, self._specs)
        sample = Sample(
            group_index=int(group) if group.isdecimal() else None,
            member=member,
            index=sample_index(row, member),
            prompt=prompt,
            metadata={"row": row, "group_id": f"{self.scene.name}-{group}"},
            status=Status.COMPLETED,
        )
        temperature = TEMPERATURES[row % len(TEMPERATURES)]
        heard = len(tokens)
        labels: list[int] = []
        weights = itertools.cycle(versions)
        for turn in range(MAX_TURNS):
            asked = Sampling(
                temperature=temperature,
                max_new_tokens=min(MAX_NEW_TOKENS, MAX_RESPONSE - (len(tokens) - heard)),
                seed=call_seed(self.seed, _key(group), member, turn),
            ).to_dict()
            reply = self.policy.reply(tokens, asked)
            start = len(tokens)
            tokens = np.concatenate([tokens, reply.ids])
            for call, spans in self._calls(start, len(reply.ids), reply.finish, asked, turn):
                call.versions = [(next(weights), a, b) for a, b in spans]
                call.dispatched_version = call.versions[0][0]
                sample.calls.append(call)
            if reply.finish == "length" or turn + 1 == MAX_TURNS:
                break
            observed = self._observe(sample, group, turn, tokens, start)
            if observed is None:
                break
            if len(tokens) + len(observed) - heard >= MAX_RESPONSE:
                break
            tokens = np.concatenate([tokens, observed])
        return self._finished(sample, tokens, heard, temperature, labels)

    def _calls(
        self, start: int, count: int, finish: str, asked: dict[str, Any], turn: int
    ) -> Iterator[tuple[Call, list[tuple[int, int]]]]:
        middle, end = start + count // 2, start + count
        if self.scene.partial and turn % 2 == 0 and count > 3:
            rest = {**asked, "max_new_tokens": asked["max_new_tokens"] - (middle - start)}
            yield self._call(start, middle, "abort", asked), [(start, middle)]
            yield self._call(middle, end, finish, rest), [(middle, end)]
        else:
            yield self._call(start, end, finish, asked), [(start, middle), (middle, end)]

    def _call(self, start: int, end: int, finish: str, asked: dict[str, Any]) -> Call:
        rid, at = secrets.token_hex(16), next(self._clock)
        self.record.engine_calls[rid] = EngineCall(rid, at, at + 0.3, end - start, finish)
        self.record.pid_of[rid] = PID
        return Call(rid, "http://engine", start, end, finish, sampling=asked)

    def _observe(
        self, sample: Sample, group: str, turn: int, tokens: TokenIds, start: int
    ) -> TokenIds | None:
        message = self.renderer.parse(tokens[start:], tokens[:start], self._specs)
        if not message.tool_calls:
            return None
        attempt = secrets.token_hex(8)
        self.record.attempts[attempt] = Attempt(attempt, group, sample.member, PID, 0, "completed")
        told = []
        for place, call in enumerate(message.tool_calls):
            nonce = secrets.token_hex(6)
            self.record.executions.append(
                Execution(
                    attempt, group, sample.member, turn, sample.calls[-1].rid, place, nonce, PID
                )
            )
            said = f"{value_of(call.arguments['expression'])} (run {nonce})"
            told.append({"role": "tool", "tool_call_id": call.id, "content": said})
        return self.renderer.extend(tokens[:start], tokens[start:], told, self._specs)

    def _finished(
        self, sample: Sample, tokens: TokenIds, heard: int, temperature: float, labels: list[int]
    ) -> Sample:
        length = len(tokens) - heard
        sample.tokens, sample.response_length = tokens.astype(np.int32), length
        sample.rollout_log_probs = np.zeros(length, dtype=np.float32)
        sample.loss_mask = np.zeros(length, dtype=np.uint8)
        newest = max(v for call in sample.calls for v, _, _ in call.versions)
        for call in sample.calls:
            for version, start, end in call.versions:
                sample.rollout_log_probs[start - heard : end - heard] = expected_log_probs(
                    tokens[:end],
                    start,
                    temperature=temperature,
                    version=self.scene.label_of(version),
                )
                fresh = version == newest or not self.scene.mask_offpolicy
                sample.loss_mask[start - heard : end - heard] = fresh
        sample.derive_weight_versions()
        sample.finish(StopReason.STOP, Status.COMPLETED)
        sample.validate()
        return sample


def _key(group: str) -> int | str:
    return int(group) if group.isdecimal() else group
