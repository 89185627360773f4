"""From the worker to the trainer's hands: groups are never mixed (case H 102)."""

from __future__ import annotations

import asyncio

from rollstream.errors import EngineFault
from rollstream.queue import calls
from rollstream.stream import GroupStream
from tests.unit.worker.works import answer
from worker.types import GenerateInput, GenerateOutput

from .parts import a_run, wait_until

REWARDS = {(0, 0): 1.0, (0, 1): 3.0, (1, 0): 5.0}


async def test_members_that_arrive_interleaved_are_delivered_by_their_group(
    valkey_url: str, run_name: str
) -> None:
    turn = asyncio.Condition()
    order = [(0, 0), (1, 0), (1, 1), (0, 1)]

    async def generate(given: GenerateInput) -> GenerateOutput:
        sample = given.sample
        assert sample.group_index is not None
        key = (sample.group_index, sample.member)
        async with turn:
            await turn.wait_for(lambda: order[0] == key)
            order.pop(0)
            order.append((-1, -1))
            turn.notify_all()
        if key not in REWARDS:
            raise EngineFault("gone", detail="refused")
        return GenerateOutput(answer(given, reward=REWARDS[key], ids=(40 + key[0], 50 + key[1])))

    async with a_run(valkey_url, run_name) as run:
        for g in (0, 1):
            await run.enqueue(g, 2)
        await run.queue.call(calls.end_of_data(1))
        parts = run.worker(generate=generate, min_samples=1, slots=4)
        parts.start()
        await run.ready(2)

        def train() -> dict[int, list[tuple[int, float, list[int]]]]:
            got = {}
            with GroupStream.connect(valkey_url, run=run_name) as stream:
                for batch in stream.batches(groups=2, timeout_s=45):
                    for group in batch:
                        got[group.group_index] = [
                            (s.member, s.reward, s.tokens.tolist()[3:]) for s in group.flat()
                        ]
                        missing = [(m.member, m.reason) for m in group.missing]
                        assert missing == ([] if group.group_index == 0 else [(1, "engine_error")])
                    batch.ack()
            return got

        got = await asyncio.to_thread(train)
        await wait_until(lambda: parts.shift.num_busy == 0)
        await run.audit()

    assert got == {
        0: [(0, 1.0, [40, 50]), (1, 3.0, [40, 51])],
        1: [(0, 5.0, [41, 50])],
    }
