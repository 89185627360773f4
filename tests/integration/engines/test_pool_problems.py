"""Why an engine is of no use: said once, and wherever the engine is shown."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from rollstream.errors import ConfigError, EngineFault
from tests.engine_pool import a_pool, ask, one_token, wait_until
from tests.scripted_engine import a_reply, a_vllm_reply, scripted
from worker.engines.fleet.pooled import MAX_PROBLEM_CHARS, cut


async def test_engine_without_its_route_says_so_once_and_wherever_it_is_shown() -> None:
    async with scripted() as engine, a_pool(engine.url, kind="vllm", check_logprobs=True) as pool:
        engine.off = ("/inference/v1/generate",)
        with capture_logs() as said:
            assert not await pool.probe()
            looks = len(engine.paths()) + 6
            await wait_until(lambda: len(engine.paths()) > looks)
            [line] = [line for line in said if line["event"] == "engine_is_down"]
        assert (line["engine"], line["log_level"]) == (engine.url, "warning")
        [seen] = pool.states()
        assert seen.state == "down"
        assert "403" in seen.problem
        assert "--enable-scale-out" in seen.problem
        assert "--enable-scale-out" in pool.said()
        with pytest.raises(EngineFault, match=r"no engine is up.*--enable-scale-out"):
            await ask(pool)
        engine.off = ()
        engine.steps[:] = [a_vllm_reply([7], log_probs=[-1.0], finish="length")]
        await wait_until(pool.healthy)
        assert pool.states()[0].problem == ""


async def test_engine_whose_log_probs_are_none_is_down_for_that_reason_said_once() -> None:
    broken = a_reply([7], log_probs=[0.5])
    async with scripted(broken) as engine, a_pool(engine.url, check_logprobs=True) as pool:
        with capture_logs() as said:
            assert not await pool.probe()
            await wait_until(lambda: len(engine.requests) >= 3 * 24)
            [line] = [line for line in said if line["event"] == "engine_is_down"]
        assert "log-prob 0 is 0.5" in line["message"]
        assert pool.states()[0].problem == "log-prob 0 is 0.5"


async def test_another_reason_is_said_again_and_another_request_is_none() -> None:
    async with scripted() as engine, a_pool(engine.url, probe_interval_s=60.0) as pool:
        assert await pool.probe()
        [member] = pool._fleet.members
        with capture_logs() as said:
            for message in (f"{'a' * 32} at 1", f"{'b' * 32} at 27", "no connection"):
                pool._fleet.looks._say_why(member, EngineFault(message, detail="reset"))
        assert [line["message"] for line in said] == [f"{'a' * 32} at 1", "no connection"]


async def test_engine_that_calls_put_aside_says_why() -> None:
    async with (
        scripted((500, b'{"error":"out of memory"}')) as engine,
        a_pool(engine.url, probe_interval_s=60.0) as pool,
    ):
        engine.info_status = 500
        with capture_logs() as said, pytest.raises(EngineFault):
            await ask(pool)
        lines = [line["message"] for line in said if line["event"] == "engine_is_down"]
        assert len(lines) >= 1
        assert "out of memory" in lines[0]


async def test_refused_engine_says_what_to_do_and_long_reasons_keep_their_end() -> None:
    async with (
        scripted(one_token("raw", a_reply())) as engine,
        a_pool(engine.url, check_logprobs=True, scaled=True) as pool,
    ):
        with pytest.raises(ConfigError):
            await pool.probe()
        [seen] = pool.states()
        assert seen.state == "refused"
        assert seen.problem.endswith("--logprobs-mode processed_logprobs")
        assert len(seen.problem) <= MAX_PROBLEM_CHARS
    long = f"begins{'x' * 500}: do this"
    assert len(cut(long)) == MAX_PROBLEM_CHARS
    assert cut(long).startswith("begins")
    assert cut(long).endswith(": do this")
