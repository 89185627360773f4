"""What training may not sample with: refused at start and row by row, marked where permitted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rollstream.errors import ConfigError
from rollstream.settings import EnvTable, SamplingTable, Settings
from tests.integration.worker.parts import a_run, wait_until
from tests.unit.test_parameters import OFF
from tests.unit.worker.works import a_book, a_work, an_env, answer, leased
from worker.members.groups import new_sample
from worker.process.startup import env_runtimes
from worker.sampling import Sampling
from worker.types import GenerateInput, GenerateOutput


class Renderer:
    """As much of one as the start looks at."""

    stop_token_ids = (2,)


def started(sampling: dict[str, Any], *, permitted: bool) -> Any:
    """Return the environment of a worker that starts with these parameters of its own."""
    settings = Settings(
        env={"math": EnvTable(sampling=sampling)},
        sampling=SamplingTable(allow_off_distribution=permitted),
    )
    renderer: Any = Renderer()
    (env,) = env_runtimes(settings, renderer, {"math": None}).values()
    return env


@pytest.mark.parametrize("name", OFF)
def test_a_worker_does_not_start_with_what_leaves_the_distribution_unless_it_is_permitted(
    name: str,
) -> None:
    with pytest.raises(ConfigError) as caught:
        started({name: OFF[name]}, permitted=False)
    assert f"environment 'math': sampling.{name} = " in str(caught.value)
    assert "allow_off_distribution" in str(caught.value)
    env = started({name: OFF[name]}, permitted=True)
    assert env.marks == (name,)
    assert new_sample(
        a_work(a_book(env, allow_off_distribution=True), leased(env="math"))
    ).metadata["off_distribution"] == [name]


def test_the_ids_that_end_a_turn_stop_a_reply_whatever_an_environment_adds() -> None:
    env = started({"stop_token_ids": [9], "temperature": 0.5}, permitted=False)
    assert env.sampling.stop_token_ids == (2, 9)
    assert env.marks == ()


def test_a_rows_own_parameters_mark_its_samples_where_they_are_permitted() -> None:
    book = a_book(an_env(), allow_off_distribution=True)
    for sampling, marks in (
        ({"top_p": 0.5, "min_p": 0.1}, ["top_p", "min_p"]), ({"temperature": 0.5}, None), ({}, None)
    ):  # fmt: skip
        work = a_work(book, leased(len(sampling), sampling=sampling))
        assert new_sample(work).metadata.get("off_distribution") == marks
    # What the environment asks for is undone by a row that asks for the plain value.
    cut = an_env(sampling=Sampling(top_p=0.9), marks=("top_p",))
    work = a_work(a_book(cut, allow_off_distribution=True), leased(sampling={"top_p": 1.0}))
    assert "off_distribution" not in new_sample(work).metadata


@pytest.mark.parametrize("name", OFF)
def test_an_evaluation_may_sample_as_it_likes_and_a_training_group_of_the_same_row_may_not(
    name: str,
) -> None:
    book, row = a_book(an_env()), leased(7, sampling={name: OFF[name]})
    evaluation = book.join(dataclasses.replace(row, group_index="e:exam:7"))
    assert evaluation.problem == ""
    assert evaluation.sampling.off_distribution() == [name]
    assert "allow_off_distribution" in book.join(row).problem


async def test_rows_that_leave_the_distribution_end_and_the_others_are_sampled(
    valkey_url: str, run_name: str
) -> None:
    ran: list[int | None] = []

    async def generate(given: GenerateInput) -> GenerateOutput:
        ran.append(given.sample.group_index)
        return GenerateOutput(answer(given, reward=float(given.sample.member % 2)))

    async with a_run(valkey_url, run_name) as run:
        for group_index, (name, value) in enumerate(OFF.items()):
            await run.enqueue(group_index, 2, sampling={name: value})
        good = len(OFF)
        await run.enqueue(good, 2, sampling={"temperature": 0.5})
        run.worker(generate=generate).start()
        await run.ready(1)

        async def all_dropped() -> bool:
            return await run.drops() == {"short_group": len(OFF)}

        await wait_until(all_dropped, what="every refused group dropped")
        assert set(ran) == {good}, "no reply was asked for under what training may not use"
        assert await run.state_of(good, 2) == "ready"
        await run.audit()
