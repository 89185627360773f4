"""A coding agent as a black box: the command line of mini-swe-agent, in a folder of its own.

In the configuration: `worker.generate = "agent"`, `worker.agent = "examples.agents.mini_swe:run"`.
Nothing of the agent is changed or imported: it is told where its model is, works in a shell, and
what it hands in is compared with the label.

Its commands run as this user on this machine: give it a container for models that you do not trust.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from examples.agents.tools import task_of

STEPS = 12
SYSTEM = (
    "You solve tasks in a shell. Every answer calls the tool bash. To hand in, run "
    "`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo ANSWER`."
)


async def run(
    base_url: str,
    prompt: str | list[dict[str, Any]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    *,
    label: Any = None,
    api_key: str = "none",
) -> dict[str, Any]:
    """Work on one task; the reward is whether what was handed in is the label."""
    with tempfile.TemporaryDirectory(prefix="mini-swe-") as name:
        folder = Path(name)
        config, told = folder / "config.yaml", folder / "told.json"
        config.write_text(json.dumps(_config(base_url, api_key, request_kwargs)))
        await _mini(folder, "-c", str(config), "-o", str(told), "-t", task_of(prompt))
        info = json.loads(told.read_text())["info"]
    handed_in = str(info["submission"]).strip()
    return {
        "reward": float(info["exit_status"] == "Submitted" and handed_in == str(label).strip()),
        "exit_status": info["exit_status"],
        "handed_in": handed_in,
        "steps": info["model_stats"]["api_calls"],
    }


def _config(base_url: str, api_key: str, request_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "agent": {
            "agent_class": "default",
            "system_template": SYSTEM,
            "instance_template": "{{task}}",
            "step_limit": STEPS,
            "cost_limit": 0,
        },
        "model": {
            "model_class": "litellm",
            "model_name": "openai/policy",
            "model_kwargs": {
                "api_base": base_url,
                "api_key": api_key,
                "max_tokens": request_kwargs["max_tokens"],
            },
            "cost_tracking": "ignore_errors",
        },
    }


async def _mini(folder: Path, *arguments: str) -> None:
    """Run the agent to its end, and take everything that it started along when we are stopped.

    Raises:
        RuntimeError: it broke; with the end of what it said.
    """
    work = folder / "work"
    work.mkdir()
    environment = os.environ | {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "settings"),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "MSWEA_SILENT_STARTUP": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched from the network
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "minisweagent", "--yolo", "--exit-immediately", *arguments),
        cwd=work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        end = said[-400:].decode(errors="replace")  # longer messages lose their end
        raise RuntimeError(f"mini-swe-agent ended with {process.returncode}: {end}")
