"""A stage for generate functions: scripted replies, in process, or as an engine's bytes over HTTP.

The same replies and the same record of requests whatever the way, so a test is one text for all:
what was asked is shown in SGLang's words, also where it was asked in vLLM's.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from rollstream.errors import EngineFault
from rollstream.sample import UNKNOWN_VERSION, PrefixCacheInfo, Sample, SpecInfo
from tests.scripted_engine import ScriptedEngine, a_reply, a_vllm_reply
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.sampling import Sampling, call_seed
from worker.telemetry.spans import SpanList
from worker.tito.ids import as_ids, ids_json
from worker.tito.load import render_prompt
from worker.types import Completion, Finish, GenerateInput, Limits, RequestIds, Tool

MAX_TOKEN_ID = 151668
RUN_SEED = 7
PROTOCOL = "sglang"
"""What is spoken over HTTP; a fixture makes it `vllm` for tests of both."""


@dataclass
class Says:
    """One reply of the engine; the log-prob of output i is -i/128, from 0 in every reply."""

    ids: Sequence[int]
    finish: str = "stop"
    version: int = 0
    cached: int = 0
    matched: int | str | None = None
    accepted: int = 0
    drafted: int = 0
    verified: int = 0
    dispatched: int = UNKNOWN_VERSION
    """In process only: the version at the try that brought it."""


Step: TypeAlias = "Says | EngineFault | tuple[int, bytes] | Callable[[], Any]"


@dataclass
class Asked:
    """One request as the engine saw it."""

    ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    routing_key: str
    body: Mapping[str, Any] = field(default_factory=dict)
    """All of it, where it came over HTTP."""


class InProcess:
    """An engine that is a list of replies."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        self.asked: list[Asked] = []

    async def generate(
        self,
        prompt: RequestIds,
        sampling: Sampling,
        *,
        routing_key: str,
        version: int,
        deadline_s: float | None = None,
        salt: int | None = None,
    ) -> Completion:
        del version, salt
        assert sampling.max_new_tokens >= 1
        assert deadline_s is None or deadline_s > 0
        ids = json.loads(b"[" + b",".join(prompt.pieces) + b"]")
        assert len(ids) == prompt.num_tokens
        number = len(self.asked)
        self.asked.append(
            Asked(ids, sampling.max_new_tokens, sampling.temperature, sampling.seed, routing_key)
        )
        step = self._steps.pop(0)
        if callable(step):
            step = await step()
        if isinstance(step, EngineFault):
            raise step
        assert isinstance(step, Says)
        return Completion(
            ids=as_ids(step.ids),
            log_probs=np.array([-i / 128 for i in range(len(step.ids))], dtype=np.float32),
            json=ids_json(as_ids(step.ids)),
            finish=Finish(step.finish),
            versions=[(step.version, 0, len(step.ids))] if step.ids else [],
            engine="http://in-process",
            rid=f"{number:032x}",
            matched=step.matched,
            cache=PrefixCacheInfo(step.cached, len(ids)),
            spec=SpecInfo(step.accepted, step.drafted, step.verified, len(step.ids)),
            dispatched_version=step.dispatched,
        )

    async def probe(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is open."""


class OverHttp(EnginePool):
    """The worker's own client, in front of a server that answers the same replies as bytes."""

    server: ScriptedEngine

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """What the server was asked, in SGLang's words."""
        return [in_sglangs_words(body) for body in self.server.requests]

    @property
    def asked(self) -> list[Asked]:
        """What the server was asked, read back from the bodies."""
        return [
            Asked(
                body["input_ids"],
                body["sampling_params"]["max_new_tokens"],
                body["sampling_params"]["temperature"],
                body["sampling_params"]["sampling_seed"],
                body.get("routing_key", ""),
                body,
            )
            for body in self.bodies
        ]


_SGLANGS = {
    "token_ids": "input_ids", "max_tokens": "max_new_tokens", "seed": "sampling_seed",
    "request_id": "rid", "cache_salt": "extra_key", "min_tokens": "min_new_tokens",
}  # fmt: skip


def in_sglangs_words(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with the names that SGLang has for what vLLM names otherwise."""
    return {
        _SGLANGS.get(name, name): in_sglangs_words(value) if isinstance(value, dict) else value
        for name, value in body.items()
    }


AnEngine: TypeAlias = "InProcess | OverHttp"


@asynccontextmanager
async def engine_of(over: str, *steps: Step) -> AsyncIterator[AnEngine]:
    """Yield an engine that gives these replies in order, `over` "process" or "http"."""
    if over == "process":
        yield InProcess(steps)
        return
    server = ScriptedEngine([_bytes_of(step) for step in steps] or [(500, b"{}")])
    await server.start()
    pool = OverHttp(
        [server.url],
        kind=PROTOCOL,
        max_token_id=MAX_TOKEN_ID,
        policy=RetryPolicy(max_retries=0),
    )
    pool.server = server
    try:
        yield pool
    finally:
        await pool.aclose()
        await server.stop()


def _bytes_of(step: Step) -> Any:
    if not isinstance(step, Says):
        return step
    if PROTOCOL == "vllm":
        return _vllm_bytes_of(step)
    finish: dict[str, Any] = {"type": step.finish}
    if step.finish == "stop":
        finish["matched"] = step.matched
    elif step.finish == "abort":
        finish |= {"message": "aborted", "status_code": None}
    else:
        finish["length"] = len(step.ids)
    return a_reply(
        step.ids,
        finish=finish,
        cached_tokens=step.cached,
        weight_version=str(step.version),
        weight_versions=_spans_of(step),
        spec_num_correct_drafts=step.accepted,
        spec_num_proposed_drafts=step.drafted,
        spec_verify_ct=step.verified,
    )


def _spans_of(step: Says) -> list[dict[str, Any]]:
    return [{"version": str(step.version), "start": 0, "end": len(step.ids)}]


def _vllm_bytes_of(step: Says) -> bytes:
    spans = _spans_of(step)
    # An end id of the model's own has no stop reason there.
    reason = step.matched if step.matched != (step.ids or [None])[-1] else None
    return a_vllm_reply(
        list(step.ids),
        finish=step.finish,
        stop_reason=reason,
        weight_versions=spans if step.ids else [],
    )


def given(
    engine: Any,
    renderer: Any,
    prompt: Any = "What is 1+7?",
    *,
    tools: Mapping[str, Tool] | None = None,
    limits: Mapping[str, Any] | None = None,
    sampling: Sampling | None = None,
    member: int = 0,
    group_index: int = 3,
    version: Callable[[], int] = lambda: 0,
    sample: Sample | None = None,
    **fields: Any,
) -> GenerateInput:
    """Return a generate function's input for one member of group 3."""
    specs = [tool.spec for tool in (tools or {}).values()] or None
    index = group_index * 4096 + member
    pending = sample or Sample(
        group_index=group_index, member=member, index=index, rollout_id=index, prompt=prompt,
        label="8", routing_key=f"run-{group_index}",
    )  # fmt: skip
    known: dict[str, Any] = {"max_turns": 4, "max_context": 4096} | dict(limits or {})
    return GenerateInput(
        sample=pending,
        sampling=sampling or Sampling(temperature=0.7, max_new_tokens=64),
        engine=engine,
        renderer=renderer,
        tools=tools or {},
        spans=SpanList(),
        deadline=time.monotonic() + 60,
        prompt=render_prompt(renderer, prompt, specs),
        limits=Limits(**known),
        version=version,
        turn_seed=lambda turn: call_seed(RUN_SEED, group_index, member, turn),
        **fields,
    )


def check(sample: Sample, asked: Sequence[Asked], replies: Sequence[Says]) -> None:
    """Assert what every trajectory must fulfil, from what was really asked and answered."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
    assert len(asked) == len(replies)
    # An abort before the first token leaves nothing.
    left = [(a, r) for a, r in zip(asked, replies, strict=True) if r.ids or r.finish != "abort"]
    assert len(sample.calls) == len(left)
    tokens = sample.tokens.tolist()
    mask, log_probs = [0] * sample.response_length, [0.0] * sample.response_length
    for call, (request, reply) in zip(sample.calls, left, strict=True):
        assert tokens[: call.start] == request.ids
        assert tokens[call.start : call.end] == list(reply.ids)
        assert call.sampling["seed"] == request.seed
        assert call.sampling["max_new_tokens"] == request.max_new_tokens
        for i in range(len(reply.ids)):
            at = call.start + i - sample.prompt_length
            mask[at], log_probs[at] = 1, float(np.float32(-i / 128))
    assert sample.loss_mask.tolist() == mask
    assert sample.rollout_log_probs.tolist() == log_probs
    sample.validate()


def chunks_of(sample: Sample, decode: Callable[[Any], str]) -> list[tuple[str, int]]:
    """Return the response as (text, mask value) of every stretch of one mask value."""
    assert sample.loss_mask is not None
    ids, mask = sample.tokens[sample.prompt_length :], sample.loss_mask
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(decode(ids[a:b]), int(mask[a])) for a, b in itertools.pairwise(edges)]
