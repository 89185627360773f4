"""The gate on a real server: back-pressure, the frontier, rewinds, and servers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.devserver import DevServer
from producer.app import check_startable
from producer.identity import fingerprint_of
from producer.sources import BadRow, open_source
from rollstream.errors import RunFailed, RunMismatch
from rollstream.queue import calls, keys
from rollstream.wire import decode_prompt

from .scene import Trainer, producing, rows_file, settings_of, until


@pytest.fixture
def own_server() -> Iterator[DevServer]:
    """A server that the test may kill."""
    with DevServer() as server:
        yield server


# --- back-pressure -------------------------------------------------------------------------------
async def test_gate_keeps_as_many_groups_live_as_the_capacity_and_never_more(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 30), "--producer.capacity_groups=5"
    )
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live(range(5))
        assert it.gate.standing.waiting_for == "capacity"
        for ended in range(25):
            await trainer.ack(ended)
            live = await until(trainer.live, lambda live, top=ended + 5: top in live)
            assert live == set(range(ended + 1, ended + 6))
        await trainer.until_done()
        assert await trainer.count("enqueued") == 30
        await trainer.check_accounts()


async def test_gate_sends_sixteen_groups_a_round_trip_and_each_once(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(valkey_url, run_name, rows_file(tmp_path, 160))
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_done()
        assert it.queue.enqueues() == [list(range(k, k + 16)) for k in range(0, 160, 16)]


async def test_gate_sends_only_the_prompts_that_fit_once_it_was_refused(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 100), "--producer.capacity_groups=20"
    )
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live(range(20))
        await until(lambda: asyncio.sleep(0, it.gate.standing.waiting_for), bool)
        it.queue.trips.clear()
        await trainer.ack(*range(8))
        await trainer.until_live(range(8, 28))
        await trainer.ack(*range(8, 28))
        await trainer.until_live(range(28, 48))
        sent = [g for trip in it.queue.enqueues() for g in trip]
        assert sent == list(range(20, 48))


async def test_gate_waits_for_the_oldest_group_at_the_end_of_the_window(
    valkey_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MIN_WINDOW", 16)
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 40), "--producer.capacity_groups=2"
    )
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        for ended in range(1, 16):
            await until(trainer.live, lambda live, g=ended: g in live)
            await trainer.ack(ended)
        await until(lambda: asyncio.sleep(0.01, it.gate.standing.waiting_for), "window".__eq__)
        assert await trainer.live() == {0}
        await trainer.ack(0)
        await trainer.until_live({16, 17})


async def test_gate_takes_full_memory_as_full(own_server: DevServer, tmp_path: Path) -> None:
    settings = settings_of(
        own_server.url, "r", rows_file(tmp_path, 40), "--producer.capacity_groups=5"
    )
    async with producing(settings) as it, Trainer(own_server.url, "r") as trainer:
        await trainer.until_live(range(5))
        await trainer.queue.client.config_set("maxmemory", 1)
        await trainer.connect()
        assert await trainer.ack(*range(5)) == ["acked"] * 5
        it.queue.trips.clear()
        await until(lambda: asyncio.sleep(0.01, len(it.queue.enqueues())), lambda trips: trips > 2)
        assert await trainer.live() == set()
        await until(lambda: asyncio.sleep(0.01, it.gate.standing.waiting_for), "memory".__eq__)
        # Refused once, it offers one prompt at a time.
        assert [len(trip) for trip in it.queue.enqueues()[1:]] == [1] * len(it.queue.enqueues()[1:])
        await trainer.queue.client.config_set("maxmemory", 0)
        await trainer.until_live(range(5, 10))


async def test_gate_adds_nothing_to_a_drained_run_and_does_not_take_it_for_full_memory(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 40), "--producer.capacity_groups=5"
    )
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live(range(5))
        await trainer.queue.call(calls.drain())
        await trainer.ack(*range(5))
        await until(lambda: asyncio.sleep(0.01, it.gate.standing.waiting_for), "drain".__eq__)
        it.queue.trips.clear()
        # Longer than a wait for room: it looks again, and sends no prompt.
        await until(lambda: asyncio.sleep(0.01, len(it.queue.trips)), lambda trips: trips > 2)
        assert it.queue.enqueues() == []
        assert await trainer.live() == set()
        await trainer.queue.call(calls.drain(on=False))
        await trainer.until_live(range(5, 10))


async def test_gate_that_is_refused_by_a_drain_in_mid_flight_waits_for_its_end(
    valkey_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 40), "--producer.capacity_groups=5"
    )
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live(range(5))
        read, stale = it.gate._read_room, [5]  # as read a moment before the drain
        monkeypatch.setattr(
            it.gate,
            "_read_room",
            lambda scan: asyncio.sleep(0, stale.pop()) if stale else read(scan),
        )
        it.queue.trips.clear()
        await trainer.queue.call(calls.drain())
        await trainer.ack(0)
        await until(lambda: asyncio.sleep(0.01, it.gate.standing.waiting_for), "drain".__eq__)
        assert it.queue.enqueues() != []  # it was refused
        assert it.gate._full_since_mono_s is None


# --- what is enqueued ----------------------------------------------------------------------------
async def test_gate_puts_under_each_id_the_row_of_the_seeded_order(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 7),
        "--producer.epochs=2", "--producer.shuffle_seed=11", "--aggregator.group_timeout_s=60",
    )  # fmt: skip
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_done()
        stored = await trainer.queue.groups([(str(g), 2) for g in range(14)])
        order = it.gate._supply.order
        for g, group in enumerate(stored):
            assert group.prompt is not None
            assert decode_prompt(group.prompt, g, 2).label == order.row(g)
            assert decode_prompt(group.prompt, g, 2).timeout_s == 60
        assert (
            await trainer.queue.client.hget(f"{trainer.queue.prefix}g:3", "timeout_ms") == b"60000"
        )


async def test_gate_opens_the_run_with_its_budgets_and_environments(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 1),
        "--producer.capacity_groups=9000", "--worker.max_attempts=5", "--weights.max_staleness=2",
        "--env.math.reward.key=score", "--env.plain.reward.kind=none",
        "--worker.max_body_bytes=4096",
    )  # fmt: skip
    with pytest.raises(Exception, match="env: missing; the configured ones are math, plain"):
        async with producing(settings):
            pass
    rows_file(tmp_path, [{"prompt": "p", "env": "math"}])
    async with producing(settings), Trainer(valkey_url, run_name) as trainer:
        info = await trainer.queue.info()
        assert info is not None
        assert (info.lease_s, info.capacity, info.window) == (2.0, 9000, 72_000)
        assert (info.max_attempts, info.max_crashes, info.max_stale) == (5, 4, 2)
        assert info.max_body_bytes == 4096
        rules = info.envs
        assert (rules["math"].reward_key, rules["math"].needs_reward) == ("score", True)
        assert (rules["plain"].reward_key, rules["plain"].needs_reward) == (None, False)


async def test_gate_keeps_no_more_groups_live_than_the_steps_that_may_lie_between(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path, paced = rows_file(tmp_path, 40), "--weights.groups_per_step=3"
    settings = settings_of(valkey_url, run_name, path, paced, "--weights.max_staleness=1")
    async with Trainer(valkey_url, run_name) as trainer:
        async with producing(settings) as it:
            await trainer.until_live(range(6))
            await until(
                lambda: asyncio.sleep(0, it.gate.standing.waiting_for),
                lambda waiting_for: waiting_for == "capacity",
            )
            await trainer.ack(0, 1, 2)
            await trainer.until_live(range(3, 9))
        # Another mode and other budgets, of the same run: they are set anew, nothing else is.
        strict = settings_of(
            valkey_url, run_name, path, paced, "--weights.mode=on_policy",
            "--weights.max_requeues=7",
        )  # fmt: skip
        with contextlib.closing(open_source(settings.producer.source)) as source:
            assert fingerprint_of(strict, source) == fingerprint_of(settings, source)
        async with producing(strict):
            record = await trainer.queue.client.hmget(
                f"{trainer.queue.prefix}m",
                "cap", "max_stale", "on_stale", "max_requeues", "weights_mode",
            )  # fmt: skip
            assert record == [b"3", b"0", b"requeue", b"7", b"on_policy"]
            await trainer.ack(3, 4, 5)
            assert await trainer.live() == {6, 7, 8}, "three are live: there is no room"
            await trainer.ack(6)
            await trainer.until_live([7, 8, 9])
        await trainer.check_accounts()


async def test_gate_skips_bad_rows_and_the_frontier_passes_them(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    rows = [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, "not json", {"prompt": "c"}]
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, rows),
        "--producer.on_bad_row=skip", "--producer.epochs=2",
    )  # fmt: skip
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_done()
        assert await trainer.live() == {0, 2, 4, 5, 7, 9}
        assert await trainer.count("skipped") == 4
        assert it.gate._supply.skipped == {"bad_row": 4}
        await trainer.ack(0, 2, 4, 5, 7, 9)
        info = await trainer.queue.info()
        assert info is not None
        assert info.frontier == 10
        await trainer.check_accounts()


async def test_gate_stops_at_a_bad_row_with_everything_before_it_enqueued(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    rows = [*[{"prompt": f"{k}"} for k in range(20)], {"prompt": ""}, {"prompt": "last"}]
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, rows), "--producer.capacity_groups=19"
    )
    async with producing(settings, checked=5) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live(range(19))
        await trainer.ack(0, 1)
        with pytest.raises(BadRow, match=r"prompts\.jsonl:21: prompt: empty"):
            await asyncio.wait_for(it.task, 5)
        assert await trainer.live() == set(range(2, 20))
        await trainer.check_accounts()


async def test_gate_skips_prompts_over_the_token_limit(
    valkey_url: str, run_name: str, tmp_path: Path, vocabulary: Path
) -> None:
    long = [{"role": "system", "content": "one two"}, {"role": "user", "content": "three four"}]
    rows = [{"prompt": "one two three"}, {"prompt": "one two three four"}, {"prompt": long}]
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, rows),
        "--producer.max_prompt_tokens=3", f"--model.tokenizer={vocabulary}",
    )  # fmt: skip
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_done()
        assert await trainer.live() == {0}
        assert it.gate._supply.skipped == {"too_long": 2}
        assert await trainer.count("skipped") == 2


# --- the frontier --------------------------------------------------------------------------------
async def test_gate_scans_from_the_frontier_after_a_restart_and_reads_no_terminal_row(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 60), "--producer.capacity_groups=40"
    )
    async with Trainer(valkey_url, run_name) as trainer:
        async with producing(settings) as it:
            await trainer.until_live(range(40))
            await it.kill()
        await trainer.ack(*range(10), 12, 30, 31)
        async with producing(settings) as it:
            await trainer.until_live({*range(10, 53)} - {12, 30, 31})
            offered = {g for trip in it.queue.enqueues() for g in trip}
            assert offered.isdisjoint({*range(10), 12, 30, 31})
        assert await trainer.count("enqueued") == 53
        await trainer.check_accounts()


async def test_gate_enqueues_again_what_a_rewind_took_back(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(valkey_url, run_name, rows_file(tmp_path, 20))
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_done()
        await trainer.ack(*range(20))
        # The checkpoint knows 0..2 and, of 3.. on, 5 and 9 (bits from 0 on).
        await trainer.rewind("r1", 3, bytes([0b11100100, 0b01000000]))
        await trainer.until_live({*range(3, 20)} - {5, 9})
        await trainer.until_done()
        assert it.gate.standing.waiting_for == "rewind"
        assert await trainer.count("enqueued") == 35
        await trainer.check_accounts()


async def test_two_producers_of_one_run_add_each_group_once(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 50), "--producer.capacity_groups=20"
    )
    async with (
        producing(settings, name="a"),
        producing(settings, name="b"),
        Trainer(valkey_url, run_name) as trainer,
    ):
        for first in range(0, 50, 10):
            batch = range(first, first + 10)
            await until(trainer.live, lambda live, b=batch: live >= set(b))
            await trainer.ack(*batch)
        await trainer.until_done()
        assert await trainer.count("enqueued") == 50
        assert (await trainer.queue.presence())["producers"] == 2
        await trainer.check_accounts()


# --- servers that come and go --------------------------------------------------------------------
async def test_gate_opens_the_run_again_where_the_server_lost_it(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = settings_of(valkey_url, run_name, rows_file(tmp_path, 12))
    async with producing(settings), Trainer(valkey_url, run_name) as trainer:
        await trainer.until_done()
        await trainer.ack(0, 1, 2)
        client = trainer.queue.client
        await client.delete(*[key async for key in client.scan_iter(f"{trainer.queue.prefix}*")])
        await trainer.until_live(range(12))
        await trainer.until_done()
        await trainer.check_accounts()


async def test_gate_outlives_an_outage_and_fills_up_a_server_that_went_back_in_time(
    own_server: DevServer, tmp_path: Path
) -> None:
    settings = settings_of(
        own_server.url, "r", rows_file(tmp_path, 30), "--producer.capacity_groups=5"
    )
    async with producing(settings) as it, Trainer(own_server.url, "r") as trainer:
        await trainer.until_live(range(5))
        await trainer.queue.client.save()  # what the server will remember
        await trainer.ack(0, 1, 2, 3, 4)
        await trainer.until_live(range(5, 10))
        own_server.kill()
        await until(lambda: asyncio.sleep(0.01, it.gate._link.up), lambda up: not up)
        own_server.start()
        await trainer.until_live(range(5))
        await trainer.connect()  # the server forgot this trainer too
        await trainer.ack(0, 1, 2, 3, 4)
        await trainer.until_live(range(5, 10))
        await trainer.check_accounts()
        assert not it.task.done()


# --- the end -------------------------------------------------------------------------------------
async def test_gate_stays_after_the_end_of_data_and_leaves_without_stay(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    path = rows_file(tmp_path, 3)
    async with Trainer(valkey_url, run_name) as trainer:
        async with producing(settings_of(valkey_url, run_name, path)) as it:
            await trainer.until_done()
            assert not it.task.done()
            await it.gate.leave()
            assert (await trainer.queue.presence())["producers"] == 0
        settings = settings_of(valkey_url, run_name, path, "--producer.stay=false")
        async with producing(settings) as it:
            await asyncio.wait_for(it.task, 5)


@pytest.mark.parametrize("restarted", [False, True])
async def test_gate_helps_an_aborted_run_to_its_end(
    valkey_url: str, run_name: str, tmp_path: Path, restarted: bool
) -> None:
    settings = settings_of(valkey_url, run_name, rows_file(tmp_path, 40))
    async with Trainer(valkey_url, run_name) as trainer:
        async with producing(settings) as it:
            await trainer.until_done()
            if restarted:
                await it.kill()
            await trainer.queue.call(calls.abort_run("enough"))
            if not restarted:
                await asyncio.wait_for(it.task, 5)
        if restarted:
            async with producing(settings) as it:
                await asyncio.wait_for(it.task, 5)
        info = await trainer.queue.info()
        assert info is not None
        assert info.state == "ended"
        assert await trainer.count("dropped:run_aborted") == 40
        await trainer.check_accounts()
        with pytest.raises(RunMismatch, match="has ended"):
            check_startable(info.state, run_name)


async def test_gate_says_why_a_run_failed(valkey_url: str, run_name: str, tmp_path: Path) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 40), "--producer.capacity_groups=5"
    )
    async with producing(settings) as it, Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live(range(5))
        await trainer.queue.call(calls.fail_run("engine refused"))
        with pytest.raises(RunFailed, match="engine refused"):
            await asyncio.wait_for(it.task, 5)


async def test_gate_sweeps_while_it_waits(valkey_url: str, run_name: str, tmp_path: Path) -> None:
    settings = settings_of(
        valkey_url, run_name, rows_file(tmp_path, 3), "--producer.capacity_groups=1",
        "--worker.lease_s=0.5",
    )  # fmt: skip
    async with producing(settings), Trainer(valkey_url, run_name) as trainer:
        await trainer.until_live({0})
        leased = await trainer.queue.call(calls.lease("0123456789ab", 1, 2))
        assert len(leased.groups[0].members) == 2
        # Nobody beats and nobody else sweeps: the leases expire and the members wait again.
        await until(trainer.queue.depths, lambda d: d["l"] == 0 and d["q"] + d["d"] == 2)
