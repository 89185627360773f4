"""What the exporter says of a run that goes its way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollstream.errors import MemberReason, Report
from rollstream.group import EnvRule
from rollstream.queue import calls
from rollstream.wire import encode_envs
from tests.backstage import Backstage, Connect
from tests.integration.producer.scene import Trainer, producing, rows_file, settings_of, until
from tests.series import num_series
from worker.telemetry import catalog

from .scene import watching


def series_of(envs: tuple[str, ...]) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series that the catalog gives an exporter, but for what says its version."""
    return {
        (spec.name, tuple(sorted(zip(spec.labels, values, strict=True))))
        for spec in catalog.EXPORTER
        if spec.kind != "info"
        for values in spec.children(envs)
    }


def say_envs(run: Backstage, *names: str) -> None:
    """Let the run say which environments it has."""
    rules: Mapping[str, EnvRule] = {name: EnvRule() for name in names}
    run.queue.client.hset(f"{run.queue.prefix}m", "envs", encode_envs(rules))


async def test_exporter_has_every_series_before_it_saw_a_run_and_no_other_afterwards(
    valkey_url: str, run: Backstage
) -> None:
    say_envs(run, "math", "code")
    async with watching(valkey_url, run.queue.run, "--env.math.weight=1") as it:
        shown = {key for key in it.series if key[0] != "rollout_build_info"}
        assert shown == series_of(("math", "other"))
        await it.look()
        shown = {key for key in it.series if key[0] != "rollout_build_info"}
        assert shown == series_of(("code", "math", "other"))
        assert num_series(it.exporter.figures) == len(it.series)


async def test_one_look_is_one_round_trip_however_much_there_is(
    valkey_url: str, run: Backstage, connect: Connect
) -> None:
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()  # the server learns the scripts
        it.queue.trips.clear()
        await it.exporter.look()
        assert len(it.queue.trips) == 1
        size = len(it.queue.trips[0])
        run.finish(*range(6), n=8)
        run.enqueue(6, 7, n=8)
        it.queue.trips.clear()
        await it.exporter.look()
        assert [len(trip) for trip in it.queue.trips] == [size]
        # A trainer that is there and does not wait: the list of connections, once in a while.
        connect()
        it.queue.trips.clear()
        for _ in range(3):
            await it.exporter.look()
        assert [len(trip) for trip in it.queue.trips] == [size, 1, size, size]


async def test_depths_ages_and_words_of_the_run_are_those_of_redis(
    valkey_url: str, run: Backstage, connect: Connect
) -> None:
    stream = connect()
    run.finish(0, 1, 2)
    run.enqueue(3)
    run.complete(run.lease())  # full, and nobody judges
    run.enqueue(4, 5, 6)
    (lease, *_) = run.lease(limit=1)
    run.queue.call(calls.fail(lease, Report.RETRY, MemberReason.ENGINE_ERROR, "", delay_s=60))
    run.lease(limit=2)
    batch = stream.next_batch(1, 5.0)
    assert batch is not None
    stream.set_weight_version(7)
    run.queue.call(calls.pause())
    run.queue.call(calls.present("aggregator", "a"))
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()
        assert it.nonzero("queue_depth") == {
            ("queued",): 3, ("delayed",): 1, ("leased",): 2, ("full",): 1, ("ready",): 2,
            ("delivered",): 1, ("live",): 7,
        }  # fmt: skip
        assert all(
            0 <= it.value("queue_oldest_age_seconds", queue=queue) < 60
            for queue in ("queued", "full", "ready", "delivered")
        )
        assert it.value("groups_enqueued_total") == 7
        assert (it.value("capacity_groups"), it.value("policy_version")) == (8, 7)
        assert it.nonzero("run_state") == {("paused",): 1}
        assert it.value("paused") == 1
        assert it.nonzero("processes") == {("worker",): 1, ("aggregator",): 1, ("producer",): 1}
        assert it.value("accounting_difference") == 0
        assert it.value("redis_up") == 1
        assert it.value("exporter_read_seconds") > 0


async def test_ages_rise_with_the_servers_clock_and_are_0_where_empty(
    valkey_url: str, run: Backstage
) -> None:
    run.finish(0)
    run.enqueue(1)
    client, prefix = run.queue.client, run.queue.prefix
    client.hincrby(f"{prefix}g:1", "since", -90_000)
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()
        assert 90 <= it.value("queue_oldest_age_seconds", queue="queued") < 150
        assert 0 < it.value("queue_oldest_age_seconds", queue="ready") < 60
        assert it.value("queue_oldest_age_seconds", queue="full") == 0
        assert it.value("queue_oldest_age_seconds", queue="delivered") == 0


@pytest.mark.parametrize("how", ["again", "later", "back", "expired"])
async def test_a_member_that_came_back_waits_since_then_and_not_since_its_group_came(
    valkey_url: str, run: Backstage, how: str
) -> None:
    """Long trajectories: what is tried again after half an hour has not waited for half an hour."""
    run.enqueue(0)
    client, prefix = run.queue.client, run.queue.prefix
    (lease, _) = run.lease()
    client.hincrby(f"{prefix}g:0", "since", -3600_000)
    if how == "expired":
        for lease_id in client.zrange(f"{prefix}l", 0, -1):
            client.zadd(f"{prefix}l", {lease_id: 0})
        assert run.queue.call(calls.sweep()).expired == 2
    else:
        kind = Report.BACK if how == "back" else Report.RETRY
        delay_s = 0.01 if how == "later" else 0.0
        reason = MemberReason.ENGINE_ERROR
        run.queue.call(calls.fail(lease, kind, reason, "", delay_s=delay_s))
    async with watching(valkey_url, run.queue.run) as it:

        async def is_back() -> bool:
            run.queue.call(calls.sweep())
            await it.look()
            return it.value("queue_depth", queue="queued") > 0

        await until(is_back, bool)
        assert it.value("queue_oldest_age_seconds", queue="queued") < 600


async def test_ends_by_environment_add_up_to_the_queues_own_counts(
    valkey_url: str, run: Backstage, connect: Connect
) -> None:
    say_envs(run, "math", "code")
    stream = connect()
    run.finish(0, 1, env="math", drop={1})
    run.finish(2, env="code")
    run.finish(3, env="unheard of", drop={3})
    run.finish(4)  # as a member of an older version enqueues it
    for _ in range(3):
        batch = stream.next_batch(1, 5.0)
        assert batch is not None
        batch.ack()
    run.enqueue(5, env="code")
    run.queue.call(calls.withdraw("5"))
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()
        assert it.nonzero("groups_total") == {
            ("math", "acked", ""): 1,
            ("math", "dropped", "zero_std"): 1,
            ("code", "acked", ""): 1,
            ("code", "dropped", "withdrawn"): 1,
            ("other", "dropped", "zero_std"): 1,
            ("other", "acked", ""): 1,
        }
        assert it.value("groups_enqueued_total") == 6
        assert it.value("accounting_difference") == 0


async def test_environments_beyond_the_bound_are_other_and_none_is_lost(
    valkey_url: str, run: Backstage
) -> None:
    names = [f"env{j:02}" for j in range(40)]
    say_envs(run, *names)
    for j, name in enumerate(names):
        run.finish(j, env=name, drop={j})
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()
        found = it.nonzero("groups_total")
        assert len({env for env, *_ in found}) == catalog.EXPORTER_ENV_LABELS
        assert sum(found.values()) == 40
        assert found["other", "dropped", "zero_std"] == 41 - catalog.EXPORTER_ENV_LABELS


async def test_a_real_producer_says_the_environment_of_each_group(
    valkey_url: str, run_name: str, connect: Connect, tmp_path: Path
) -> None:
    envs = ["math", "code", "math", "math", "code"]
    rows = [{"prompt": f"p{j}", "env": env} for j, env in enumerate(envs)]
    path = rows_file(tmp_path, rows)
    argv = [f"--env.{env}.n_samples_per_prompt=2" for env in set(envs)]
    settings = settings_of(valkey_url, run_name, path, *argv)
    async with producing(settings), Trainer(valkey_url, run_name) as trainer:
        await trainer.until_done()
    with Backstage(valkey_url, run_name) as backstage:
        backstage.work(drop={1})
    stream = connect()
    batch = stream.next_batch(4, 5.0)
    assert batch is not None
    batch.ack()
    async with watching(valkey_url, run_name) as it:
        await it.look()
        assert it.nonzero("groups_total") == {
            ("math", "acked", ""): 3,
            ("code", "acked", ""): 1,
            ("code", "dropped", "zero_std"): 1,
        }


async def test_failures_requeues_and_stale_groups_are_counted(
    valkey_url: str, run_name: str
) -> None:
    with Backstage(valkey_url, run_name, cap=8, max_stale=0).open() as run:
        run.queue.call(calls.connect("trainer", 1))
        run.enqueue(0, 1)
        (first, *_) = run.lease()
        run.queue.call(calls.fail(first, Report.FINAL, MemberReason.TOOL_ERROR, "it broke"))
        run.queue.call(calls.requeue("1", 0))
        run.queue.call(calls.set_version(3))
        run.queue.call(calls.sweep())
        async with watching(valkey_url, run_name) as it:
            await it.look()
            assert it.nonzero("members_failed_total") == {("tool_error",): 1}
            assert it.value("requeued_total") == 1
            assert it.nonzero("stale_groups_total") == {("running",): 1}


async def test_a_group_that_is_counted_nowhere_is_a_difference(
    valkey_url: str, run: Backstage
) -> None:
    run.finish(0, 1)
    run.queue.client.srem(f"{run.queue.prefix}gs", "1")
    async with watching(valkey_url, run.queue.run) as it:
        await it.look()
        assert it.value("accounting_difference") == 1


@pytest.mark.parametrize("apart", [False, True])
async def test_verifiers_and_waiting_jobs_are_what_rq_knows(
    valkey_url: str, run: Backstage, apart: bool
) -> None:
    import redis
    import rq

    from worker.isolation.messages import QUEUE

    url = f"{valkey_url}/9"
    with redis.Redis.from_url(url) as client:
        queue = rq.Queue(QUEUE, connection=client)
        jobs = [queue.enqueue(print) for _ in range(3)]
        verifier = rq.Worker([queue], connection=client)
        verifier.register_birth()
        client.sadd(f"rq:workers:{QUEUE}", "rq:worker:killed long ago")
        async with watching(valkey_url, run.queue.run, f"--rq.url={url}") as it:
            await it.look()
            assert (it.value("verifiers"), it.value("verifier_jobs_waiting")) == (1, 3)
            verifier.register_death()
            if apart:
                run.queue.client.delete(f"{run.queue.prefix}m")
            for job in jobs:
                job.delete()
            await it.look()
            assert (it.value("verifiers"), it.value("verifier_jobs_waiting")) == (0, 0)
