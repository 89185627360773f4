"""Case I 117: the engine that serves a turn is killed in mid-reply; a survivor answers it."""

from __future__ import annotations

from rollstream.sample import Sample
from tests.engine_pool import chosen
from tests.generate_stage import given
from tests.scripted_engine import ScriptedEngine, Step, a_reply, scripted
from tests.toy import A1, A2, CLOSE, HI, O1, P0, toy_renderer
from tests.unit.generate.test_budgets import Calling, f
from worker.engines.fleet.pool import EnginePool, RetryPolicy
from worker.engines.sim.http import Exchange
from worker.generate.multi_turn import multi_turn
from worker.tools.function import FunctionTool

V3 = {"version": "3", "start": 0, "end": len(A1)}
V4 = {"version": "4", "start": 0, "end": len(A2)}
FIRST = a_reply(A1, finish={"type": "stop", "matched": CLOSE}, weight_versions=[V3])
SECOND = a_reply(A2, finish={"type": "stop", "matched": CLOSE}, weight_versions=[V4])
DEAD = a_reply([31, 31, 31, 2], finish={"type": "stop", "matched": CLOSE}, weight_version="3")


def half_of(body: bytes) -> Step:
    """Return a step that dies half-way through its answer."""

    def dies(exchange: Exchange) -> None:
        connection = exchange._connection
        assert connection is not None
        assert connection._transport is not None
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection._transport.write(head + body[: len(body) // 2])
        connection._transport.close()

    return dies


async def test_case_117_a_turn_whose_engine_dies_is_the_survivors_alone() -> None:
    async with scripted(FIRST, half_of(DEAD)) as dies, scripted(SECOND) as survives:
        policy = RetryPolicy(max_retries=3, backoff_s=0.01, backoff_max_s=0.02)
        pool = EnginePool([dies.url, survives.url], max_token_id=151668, policy=policy)
        try:
            sample = await base_on(pool, first=dies)
        finally:
            await pool.aclose()
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert sample.loss_mask is not None
    assert sample.loss_mask.tolist() == [1, 1, 1] + [0] * 11 + [1, 1]
    assert [call.engine for call in sample.calls] == [dies.url, survives.url]
    assert [call.versions[0][0] for call in sample.calls] == [3, 4]
    # Both engines were asked for the second turn, by requests of their own, from the same prefix.
    asked = [dies.requests[1], survives.requests[0]]
    assert [body["input_ids"] for body in asked] == [P0 + A1 + O1] * 2
    assert asked[0]["rid"] != asked[1]["rid"] == sample.calls[1].rid
    assert len(survives.requests) == 1


async def base_on(pool: EnginePool, first: ScriptedEngine) -> Sample:
    """Run BASE with a routing key whose home is `first`."""
    for group_index in range(1000):
        if chosen(pool, f"run-{group_index}") == first.url:
            break
    stage = given(
        pool, Calling(toy_renderer()), HI, tools={"f": FunctionTool(f)}, group_index=group_index
    )
    sample = (await multi_turn(stage)).samples
    assert isinstance(sample, Sample)
    sample.validate()
    return sample
