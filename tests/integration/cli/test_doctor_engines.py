"""`rollstream doctor` asks engines in both protocols what they serve, and never for a token."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.devserver import free_port
from rollstream.cli.__main__ import main
from rollstream.cli.engine_check import engine_findings
from rollstream.health import Finding
from rollstream.queue import calls
from rollstream.queue.reads import RunInfo
from rollstream.updates.confirmed import EngineView
from tests.integration.worker.parts import a_run
from tests.scripted_engine import GENERATIONS, ScriptedEngine, scripted
from worker.engines.sim.http import Exchange

KINDS = ["sglang", "vllm"]
both = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
async def info(valkey_url: str, run_name: str) -> RunInfo:
    """A run at version 3, whose trainer has named one label."""
    async with a_run(valkey_url, run_name) as run:
        for version, label in ((2, "two"), (3, "three")):
            await run.queue.call(calls.set_version(version, label))
        found = await run.queue.info()
        assert found is not None
        return found


async def asked(
    engine: ScriptedEngine | str, kind: str, info: RunInfo | None, *views: EngineView
) -> tuple[dict[str, str], list[Finding]]:
    """Ask one engine, as the command does, in a thread."""
    url = engine if isinstance(engine, str) else engine.url
    return await asyncio.to_thread(
        engine_findings, [url], kind, timeout_s=5.0, info=info, views=views
    )


@both
@pytest.mark.parametrize(
    ("label", "says"),
    [
        ("3", []), ("4", []), ("three", []), ("2", ["serves version 2, the run is at 3"]),
        ("two", ["serves version 2"]),
        ("default", ["says no version that the run knows (default)"]),
    ],
)  # fmt: skip
async def test_an_engines_weights_are_held_against_the_runs(
    info: RunInfo, kind: str, label: str, says: list[str]
) -> None:
    async with scripted() as engine:
        engine.weight_version = label
        words, findings = await asked(engine, kind, info)
    assert words == {engine.url: f"answers, weights {label!r}"}
    assert len(findings) == len(says)
    assert all(part in finding.what for part, finding in zip(says, findings, strict=True))
    assert {finding.level for finding in findings} <= (
        {"note"} if label == "default" else {"problem"}
    )
    assert engine.requests == []
    assert not set(engine.paths()) & {"/generate", "/v1/completions", "/health", "/health_generate"}


@both
async def test_a_pause_is_a_finding_while_the_run_is_running_and_none_in_an_update(
    info: RunInfo, kind: str
) -> None:
    async with scripted() as engine:
        engine.weight_version, engine.paused = "3", True
        words, findings = await asked(engine, kind, info)
        assert words[engine.url].endswith(", paused")
        assert [finding.what for finding in findings] == [
            f"{engine.url} is paused while the run is running"
        ]
        assert (await asked(engine, kind, replace(info, state="paused")))[1] == []
        assert (await asked(engine, kind, None))[1] == [], "without a run there is nothing to hold"


@pytest.mark.parametrize(
    ("route", "path"), [("generate", GENERATIONS[1]), ("completions", GENERATIONS[2])]
)
async def test_a_vllm_that_does_not_serve_the_workers_route_is_a_finding_that_says_what_to_do(
    info: RunInfo, route: str, path: str
) -> None:
    def look() -> tuple[dict[str, str], list[Finding]]:
        return engine_findings([engine.url], "vllm", timeout_s=5.0, info=info, vllm_route=route)

    async with scripted() as engine:
        engine.weight_version = "3"
        assert (await asyncio.to_thread(look))[1] == []
        assert engine.requests == [], "nothing was sampled"
        for engine.off, engine.absent in (((path,), ()), ((), (path,))):
            _, [finding] = await asyncio.to_thread(look)
            assert f"{path}: status" in finding.what
            assert "--enable-scale-out" in finding.what


async def test_a_vllm_without_its_control_calls_is_there_and_says_no_version(info: RunInfo) -> None:
    async with scripted() as engine:
        engine.is_dev = False
        words, findings = await asked(engine, "vllm", info)
        assert words == {engine.url: "answers, version unknown"}
        assert [finding.level for finding in findings] == ["note"]
        assert "VLLM_SERVER_DEV_MODE=1" in findings[0].do
        engine.info_status = 500
        assert "status 500" in (await asked(engine, "vllm", info))[1][0].what


@both
async def test_what_does_not_answer_or_answers_nonsense_is_said(info: RunInfo, kind: str) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    words, findings = await asked(gone, kind, info)
    assert "refused" in words[gone]
    assert [finding.check for finding in findings] == ["engine"]
    assert f"no engine answers at {gone}" in findings[0].what

    class Nonsense(ScriptedEngine):
        def handle(self, exchange: Exchange) -> None:
            exchange.answer(200, b"[[" * 5000)

    engine = Nonsense([b""])
    await engine.start()
    try:
        words, findings = await asked(engine, kind, info)
    finally:
        await engine.stop()
    assert words == {engine.url: "answers, version unknown"}
    assert [finding.level for finding in findings] == ["note"]


async def test_names_and_routers_are_what_they_stand_for(info: RunInfo) -> None:
    async with scripted() as engine:
        engine.weight_version = "3"
        words, findings = await asked(f"dns+http://localhost:{engine.port}", "sglang", info)
        assert words[f"http://127.0.0.1:{engine.port}"] == "answers, weights '3'"
        listed = {"workers": [{"url": f"{engine.url}@0"}, {"url": f"{engine.url}@1"}, {"id": 3}]}

        class Router(ScriptedEngine):
            def handle(self, exchange: Exchange) -> None:
                exchange.answer(200, json.dumps(listed).encode())

        router = Router([b""])
        await router.start()
        try:
            words, findings = await asked(f"router+{router.url}", "sglang", info)
            assert (words, findings) == ({engine.url: "answers, weights '3'"}, [])
            listed["workers"] = []
            words, findings = await asked(f"router+{router.url}", "sglang", info)
            assert "the router has no workers" in findings[0].what
        finally:
            await router.stop()
    words, findings = await asked("dns+http://nobody.invalid:30000", "sglang", info)
    assert "cannot be looked up" in findings[0].what


async def test_raw_log_probs_are_those_that_workers_refuse(info: RunInfo) -> None:
    async with scripted() as engine:
        engine.weight_version = "3"
        view = EngineView(engine.url)
        view.states["refused"] += 2
        _, findings = await asked(engine, "vllm", info, view)
    assert [finding.what for finding in findings] == [f"{engine.url} reports raw log-probs"]
    assert "processed_logprobs" in findings[0].do


async def test_doctor_asks_the_engines_of_the_configuration_or_those_that_the_trainer_named(
    valkey_url: str, run_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    async with scripted() as engine, scripted() as other, a_run(valkey_url, run_name) as run:
        file = tmp_path / "rollstream.toml"
        file.write_text(
            f'[redis]\nurl = "{valkey_url}"\n[run]\nname = "{run_name}"\n'
            f'[engine]\nkind = "vllm"\nurls = ["{engine.url}"]\n'
        )

        async def facts() -> Any:
            command = ["doctor", "--json", "--config", str(file)]
            await asyncio.to_thread(main, command)
            return json.loads(capsys.readouterr().out)["facts"]["engines"]

        assert await facts() == {engine.url: "answers, weights 'default'"}
        await run.queue.call(calls.set_engines([other.url]))
        assert list(await facts()) == [other.url]
