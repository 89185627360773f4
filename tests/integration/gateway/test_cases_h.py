"""Cases 106 and 107 of the public reports: agents that end before they ask a model anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from rollstream.arrays import effective_mask
from rollstream.errors import Report, Status, StopReason
from tests.integration.gateway.stage import gateway_stage
from tests.integration.gateway.test_agent_endings import Agent, play
from worker.members.work import ending_of

DOCS = Path(__file__).resolve().parents[3] / "docs" / "agents.md"


def documented_agent(own_folder: Path) -> Agent:
    """Return the agent of the section on commands, as it stands there."""
    section = DOCS.read_text().partition("### An agent that is a command")[2]
    [code] = re.findall(r"```python\n(async def run.*?)```", section.partition("###")[0], re.DOTALL)
    names: dict[str, Any] = {
        "asyncio": asyncio, "contextlib": contextlib, "os": os, "signal": signal,
        "own_folder": own_folder, "score": lambda _: 1.0,
    }  # fmt: skip
    exec(code, names)
    agent: Agent = names["run"]
    return agent


def a_command(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a command `my-agent` on the PATH."""
    command = folder / "my-agent"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


async def test_case_106_a_command_that_breaks_before_any_call_is_an_error_with_its_last_words(
    qwen3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = "yes noise | head -c 100000 >&2"
    a_command(tmp_path, f"{noise}; echo 'no such model' >&2; exit 3", monkeypatch)
    async with gateway_stage(qwen3) as stage:
        played = await play(stage, documented_agent(tmp_path))
    sample = played.only
    assert played.asked == 0
    assert (sample.status, sample.stop_reason) == (Status.FAILED, StopReason.AGENT_ERROR)
    assert "my-agent ended with exit code 3: " in sample.metadata["error"]
    assert sample.metadata["error"].endswith("no such model\n")
    assert len(sample.metadata["error"]) < 700
    assert ending_of(sample).stop_reason is StopReason.AGENT_ERROR


async def test_case_107_a_session_without_a_call_has_no_token_to_train(
    qwen3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_command(tmp_path, "exit 0", monkeypatch)
    async with gateway_stage(qwen3) as stage:
        played = await play(stage, documented_agent(tmp_path))
    sample = played.only
    assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.NO_MODEL_CALL)
    assert (sample.response_length, sample.num_sampled) == (0, 0)
    assert effective_mask(sample).sum() == 0
    assert ending_of(sample).report is Report.COMPLETE
