"""Builders of leased members and rollouts without a queue, for the tests of one attempt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rollstream.queue.answers import Lease, LeasedGroup, LeasedMember
from rollstream.sample import Call, Sample
from rollstream.wire import encode_prompt
from tests.builders import a_prompt
from worker.generate.finish import finish
from worker.members.groups import GroupBook
from worker.members.rollout import Rollout
from worker.members.work import EnvRuntime, Work
from worker.sampling import Sampling
from worker.tito.ids import prompt_ids
from worker.types import GenerateInput, GenerateOutput, Limits

PROMPT = prompt_ids([1, 2, 3])


def answer(given: GenerateInput, *, reward: Any = 1.0, ids: tuple[int, ...] = (4, 5)) -> Sample:
    """Fill the given sample with one call's reply."""
    sample, start = given.sample, len(given.prompt.ids)
    end = start + len(ids)
    sample.tokens = np.array([*given.prompt.ids, *ids], dtype=np.int32)
    sample.response_length = len(ids)
    sample.rollout_log_probs = np.full(len(ids), -0.5, dtype=np.float32)
    version = given.version()
    sample.calls = [
        Call("0" * 32, "http://engine", start, end, "stop", [(version, start, end)], version)
    ]
    sample.reward = reward
    return sample


async def plain(given: GenerateInput) -> GenerateOutput:
    """Answer at once; members of a group differ in their reward."""
    return GenerateOutput(answer(given, reward=float(given.sample.member % 2)))


def an_env(generate: Callable[..., Any] = plain, **fields: Any) -> EnvRuntime:
    """Return an environment around a generate function."""
    known: dict[str, Any] = {"limits": Limits(8, 4096), "sampling": Sampling()}
    return EnvRuntime("default", generate, "test:generate", **(known | fields))


def a_book(env: EnvRuntime, render: Callable[..., Any] = lambda *_: PROMPT, **kw: Any) -> GroupBook:
    """Return a book of groups of one environment."""
    return GroupBook(run="test", envs={env.name: env}, render=render, **kw)


def a_rollout(
    book: GroupBook,
    *,
    version: Callable[[], int] = lambda: 0,
    engine: Any = None,
    renderer: Any = None,
) -> Rollout:
    """Return a rollout; without an engine its generate functions ask none."""
    return Rollout(
        engine=engine, renderer=renderer, book=book, finish=finish, version=version, run_seed=7
    )


def leased(group_index: int = 0, n: int = 2, members: int = 1, **fields: Any) -> LeasedGroup:
    """Return a lease answer's group with its first `members` members."""
    record = encode_prompt(a_prompt(group_index, n, **fields))
    return LeasedGroup(
        str(group_index),
        n,
        None,
        record,
        [LeasedMember(Lease(str(group_index), i, f"w-1-{i}"), 0, 0, 0) for i in range(members)],
    )


def a_work(book: GroupBook, group: LeasedGroup | None = None, member: int = 0) -> Work:
    """Return one leased member."""
    group = group or leased()
    shared = book.join(group)
    lease = group.members[member].lease
    return Work(lease, shared, 0, time.time(), time.monotonic() + 60)
