"""Sessions under whatever an agent does: no token is lost, and none trains twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.errors import EngineFault
from rollstream.sample import Sample
from tests.generate_stage import Asked, Says
from tests.toy import CLOSE, toy_renderer
from tests.unit.gateway.play import Held, Play, echo, system, take, user
from worker.gateway.picker import resolve_picker
from worker.gateway.types import Refusal
from worker.types import DivergencePolicy

RENDERER = toy_renderer()
RULES: list[dict[str, Any]] = [
    *({"on_divergence": policy} for policy in DivergencePolicy),
    {"kind": "tree"},
    {"kind": "tree", "picker": resolve_picker("all")},
]
OPS = (
    "ask", "ask", "new", "resend", "resend", "retry", "begin", "begin", "join", "finish", "finish",
    "leave", "fault", "cut", "stopped", "rewrite", "stream", "overflow",
)  # fmt: skip
SCRIPT = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 6), st.integers(0, 2)), max_size=18
)


def says(number: int) -> Says:
    """Return a reply that no other one is."""
    return Says([30 + number % 3, *(1097 + int(digit) for digit in str(number)), CLOSE])


class Script:
    """One random session."""

    def __init__(self, rules: dict[str, Any]) -> None:
        self.number = self.faults = 0
        self.play = Play(
            default=self._says, renderer=RENDERER, rules={"rejoin_s": 60, **rules}, opened=_opened
        )
        self.histories: list[list[Any]] = [[]]
        self.requests: list[list[Any]] = []
        self.pending: list[tuple[Any, Held, list[Any]]] = []
        self.left: list[Held] = []
        self.steps: dict[str, Held] = {}

    def _says(self, asked: Asked) -> Says:
        self.number += 1
        return says(self.number)

    def _next(self, *steps: Any) -> None:
        self.play.engine._steps[:0] = steps

    async def run(self, script: Sequence[tuple[str, int, int]]) -> None:
        for name, i, j in script:
            with contextlib.suppress(Refusal):
                await getattr(self, f"_{name}")(self.histories[i % len(self.histories)], i, j)
            self.play.engine._steps.clear()

    async def _send(self, messages: list[Any], **fields: Any) -> None:
        self.requests.append(messages)
        reply = await self.play.ask(messages, **fields)
        self.histories.append([*messages, echo(reply)])

    async def _ask(self, history: list[Any], i: int, j: int) -> None:
        await self._send([*history, user(f"u{j}")])

    async def _stream(self, history: list[Any], i: int, j: int) -> None:
        await self._send([*history, user(f"u{j}")], stream=True)

    async def _new(self, history: list[Any], i: int, j: int) -> None:
        await self._send([system(f"s{i % 2}"), user(f"u{j}")])

    async def _resend(self, history: list[Any], i: int, j: int) -> None:
        if self.requests:
            await self._send(self.requests[-1 - i % len(self.requests)])

    async def _retry(self, history: list[Any], i: int, j: int) -> None:
        if self.requests and not self.pending:
            for step in self.left:  # it may join what a client has left
                step.go.set()
            await self._send(self.requests[-1 - i % len(self.requests)], retry=1)

    async def _rewrite(self, history: list[Any], i: int, j: int) -> None:
        if history:
            other = [*history[:-1], {"role": "assistant", "content": f"x{i}"}]
            await self._send([*other, user(f"u{j}")])

    async def _cut(self, history: list[Any], i: int, j: int) -> None:
        self._next(Says([30], "length"))
        await self._send([*history, user(f"u{j}")], max_tokens=1)

    async def _stopped(self, history: list[Any], i: int, j: int) -> None:
        self._next(Says([30, 31], "abort"), Says([], "abort"))
        await self._send([*history, user(f"u{j}")], stream=j == 0)

    async def _fault(self, history: list[Any], i: int, j: int) -> None:
        detail = "context_overflow" if j == 0 else "reset"

        async def breaks(prompt: Any) -> Says:
            self.faults += j != 0
            raise EngineFault("down", retryable=True, detail=detail)

        self._next(breaks)
        await self._send([*history, user(f"u{j}")])

    async def _overflow(self, history: list[Any], i: int, j: int) -> None:
        await self._send([*history, user("x" * 5000)])

    async def _begin(self, history: list[Any], i: int, j: int) -> None:
        self.number += 1
        step = Held(says(self.number))
        self._next(step)
        messages = [*history, user(f"u{j}")]
        self.requests.append(messages)
        exchange = await self.play.begin(messages)
        while self.play.engine._steps:
            await asyncio.sleep(0)
        self.steps[exchange.reply_id] = step
        self.pending.append((exchange, step, messages))

    async def _join(self, history: list[Any], i: int, j: int) -> None:
        if self.pending:
            _, _, messages = self.pending[i % len(self.pending)]
            exchange = await self.play.begin(messages, retry=1)
            # Of twins it may be another one that it joins, or one that was answered.
            step = self.steps.get(exchange.reply_id) or Held(None)
            self.pending.append((exchange, step, messages))

    async def _finish(self, history: list[Any], i: int, j: int) -> None:
        if self.pending:
            exchange, step, messages = self.pending.pop(i % len(self.pending))
            step.go.set()
            reply = await take(exchange)
            self.histories.append([*messages, echo(reply)])

    async def _leave(self, history: list[Any], i: int, j: int) -> None:
        if self.pending:
            exchange, step, _ = self.pending.pop(i % len(self.pending))
            exchange.leave()
            self.left.append(step)


async def _opened() -> None:
    """No gate is ever shut."""


async def play_out(rules: dict[str, Any], script: Sequence[tuple[str, int, int]]) -> None:
    """Play a script to its end and check what comes of it."""
    session = Script(rules)
    async with asyncio.timeout(15):
        await session.run(script)
    samples = await session.play.end()  # checks tokens, log-probs, calls and counts
    nodes = session.play.session._tree.nodes
    stats = session.play.session.stats
    assert stats["failed"] == session.faults
    assert stats["committed"] == len(nodes)
    if not nodes:
        assert len(samples) == 1
        assert len(samples[0].tokens) == 0
        return
    _check_snapshots(samples, nodes, rules)
    trained = sorted(call.rid for sample in samples for call in _trained(sample))
    kept = {id(node): node for sample in samples for node in _path(sample, nodes)}
    assert trained == sorted(
        answer.completion.rid for node in kept.values() for answer in node.context.answers
    )
    if rules.get("picker") is not None or rules.get("on_divergence") is DivergencePolicy.FORK:
        lost = [node for node in nodes if id(node) not in kept]
        assert all(node.superseded or _is_dropped_twin(node, nodes) for node in lost)
        assert not lost or rules.get("picker") is None


def _check_snapshots(samples: Sequence[Sample], nodes: Sequence[Any], rules: Any) -> None:
    """Assert that a sample is all that was in front of and in its leaf's reply."""
    for sample in samples:
        path = _path(sample, nodes)
        assert len(sample.tokens) == path[-1].context.num_tokens
        assert sample.prompt_length == path[0].context.num_prompt
    if rules.get("kind") != "tree" and rules["on_divergence"] is not DivergencePolicy.FORK:
        assert len(samples) == 1
        assert _path(samples[0], nodes)[-1] is nodes[-1]


def _path(sample: Sample, nodes: Sequence[Any]) -> list[Any]:
    """Return the nodes whose calls a sample has."""
    rid = sample.calls[-1].rid
    leaf = next(n for n in nodes if n.context.answers[-1].completion.rid == rid)
    path: list[Any] = leaf.path()
    return path


def _trained(sample: Sample) -> list[Any]:
    """Return the calls of which all tokens train; of the others none must."""
    assert sample.loss_mask is not None
    found = []
    for call in sample.calls:
        mask = sample.loss_mask[call.start - sample.prompt_length : call.end - sample.prompt_length]
        assert mask.all() or not mask.any()
        if mask.any():
            found.append(call)
    return found


def _is_dropped_twin(node: Any, nodes: Sequence[Any]) -> bool:
    """Return whether a node, or one before it, is a reply to a request that was sent again."""
    counts: dict[int, int] = {}
    for one in nodes:
        counts[one.twins] = counts.get(one.twins, 0) + 1
    return any(counts[one.twins] > 1 or one.superseded for one in node.path())


@given(st.sampled_from(RULES), SCRIPT)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_119_every_kept_reply_trains_once_behind_what_its_engine_saw(
    rules: dict[str, Any], script: list[tuple[str, int, int]]
) -> None:
    asyncio.run(play_out(rules, script))


TURNS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=6
)


async def _retried(rules: dict[str, Any], turns: Sequence[tuple[int, int, bool]]) -> Sample:
    """Play turns that are asked again, and gone on with one of the answers."""
    number = 0

    def default(asked: Asked) -> Says:
        nonlocal number
        number += 1
        return says(number)

    play = Play(default=default, renderer=RENDERER, rules=rules)
    history: list[Any] = []
    for turn, (again, chosen, stream) in enumerate(turns):
        history.append(user(f"u{turn}"))
        replies = [await play.ask(history, stream=stream) for _ in range(again + 1)]
        history.append(echo(replies[chosen % len(replies)]))
    (sample,) = await play.end()
    return sample


@given(TURNS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_120_of_retries_alone_every_kind_of_session_makes_the_same_sample(
    turns: list[tuple[int, int, bool]],
) -> None:
    samples = [asyncio.run(_retried(rules, turns)) for rules in RULES[:4]]
    first = samples[0]
    for sample in samples[1:]:
        for name in ("tokens", "loss_mask", "rollout_log_probs"):
            assert getattr(sample, name).tobytes() == getattr(first, name).tobytes()
        assert sample.calls == first.calls
