"""What of a configuration of agents is refused at the start; what one without them imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.config import load_settings
from rollstream.errors import ConfigError
from rollstream.settings import Settings
from worker.process.agents import agents_of, asked_turns

ROOT = Path(__file__).resolve().parents[3]
AGENT = "tests.unit.worker.test_agents:run"


async def run(base_url: str, prompt: object, request_kwargs: object, metadata: object) -> None:
    """An agent that makes no call."""


async def wrong(given: object) -> None:
    """A generate function, given as an agent."""


def settings(*argv: str) -> Settings:
    return load_settings(argv, prog="test", environ={}, folder=Path("/nonexistent")).settings


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ([], []),
        (["--worker.generate=agent", f"--worker.agent={AGENT}"], ["default"]),
        (["--env.a.generate=agent", f"--env.a.agent={AGENT}", "--env.b.max_turns=3"], ["a"]),
        # The worker's is the default of the environments that want one.
        (["--env.a.generate=agent", f"--worker.agent={AGENT}", "--env.b.max_turns=3"], ["a"]),
        (["--worker.generate=agent", f"--env.a.agent={AGENT}"], ["a"]),
        (
            ["--worker.generate=agent", f"--worker.agent={AGENT}", "--gateway.session=tree"],
            ["default"],
        ),
        (["--gateway.session=tree", "--gateway.on_divergence=fork"], []),
    ],
)
def test_environments_with_an_agent_have_it_resolved(argv: list[str], names: list[str]) -> None:
    agents = agents_of(settings(*argv))
    assert list(agents) == names
    assert all(agent.function is run for agent in agents.values())


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--worker.generate=agent"], ["'default'", "worker.agent", "env.NAME.agent"]),
        (["--env.a.generate=agent"], ["'a'", "worker.agent"]),
        ([f"--worker.agent={AGENT}"], ["worker.agent is given", 'worker.generate = "agent"']),
        (
            [f"--env.a.agent={AGENT}", "--env.b.generate=agent", f"--env.b.agent={AGENT}"],
            ["env.a.agent is given", "'multi_turn'"],
        ),
        (["--worker.generate=agent", "--worker.agent=nope"], ["'default'", "'nope'"]),
        (
            ["--worker.generate=agent", f"--worker.agent={AGENT.replace(':run', ':wrong')}"],
            ["'default'", "request_kwargs"],
        ),
        (
            ["--worker.generate=agent", f"--worker.agent={AGENT}", "--gateway.session=tree",
             "--gateway.on_divergence=keep_prefix"],
            ["gateway.on_divergence", "gateway.picker"],
        ),
    ],
)  # fmt: skip
def test_what_makes_no_sense_of_agents_is_one_error_at_the_start(
    argv: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        agents_of(settings(*argv))
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("argv", "turns"),
    [
        ([], None),
        (["--worker.max_turns=3"], 3),
        (["--env.a.max_turns=2"], 2),
        (["--worker.max_turns=3", "--env.a.max_turns=2"], 2),
        (["--worker.max_turns=3", "--env.b.max_turns=2"], 3),
        (["--worker.max_turns=8"], 8),
    ],
)
def test_an_agent_has_as_many_turns_as_were_asked_for(argv: list[str], turns: int | None) -> None:
    assert asked_turns(settings("--env.a.generate=agent", *argv), "a") == turns


def test_a_worker_without_agents_imports_no_server() -> None:
    code = (
        "import sys\n"
        "import worker.process.app, worker.process.agents\n"
        "print('HEAVY', sorted({'starlette', 'uvicorn', 'h11'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("HEAVY []")
