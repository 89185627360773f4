"""`python -m examples.mcp_tools`: a small run whose model calls the tool of an MCP server, offline.

The server is `examples/mcp_server.py`, a process of its own; the engine is simulated (a stand-in
for a model). Each sample is printed with what its tool was asked. Everything ends with it. Exit
code 0 where every sample came and the tool was called.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from examples.demo.children import Child, stop_all
from examples.demo.options import ROOT
from examples.devserver import free_port
from examples.small_run import EXIT_WRONG, READY_S, SmallRun, play, samples_of
from rollstream.group import FinishedGroup

SHOWN_CHARS = 100


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.mcp_tools", description=__doc__)
    parser.add_argument("--groups", type=int, default=3, metavar="N", help="prompts (default 3)")
    parser.add_argument("--n", type=int, default=2, metavar="N", help="samples of each (default 2)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollstream-mcp-") as folder:
        port = free_port()
        server = mcp_server(port, Path(folder))
        try:
            server.start()
            server.wait_ready(READY_S)
            return _run(options.groups, options.n, f"http://127.0.0.1:{port}/mcp")
        finally:
            stop_all([server])


def mcp_server(port: int, folder: Path) -> Child:
    """Return the server as a process, not started."""
    return Child(
        "mcp-server",
        [sys.executable, "-m", "examples.mcp_server", "--port", str(port)],
        folder=folder,
        environment=dict(os.environ),
        cwd=ROOT,
        ready_url=f"http://127.0.0.1:{port}/health",
    )


def tables(url: str, source: str) -> dict[str, dict[str, object]]:
    """Return the configuration, beside what every small run has."""
    return {
        "producer": {"source": source},
        "mcp.arithmetic": {"url": url},
        "tool.evaluate": {"timeout_s": 10.0},
        "worker": {"generate": "multi_turn", "tools": ["mcp:arithmetic"], "max_turns": 4},
        "reward": {"kind": "math"},
    }


def _run(groups: int, n: int, url: str) -> int:
    num_calls = 0

    def show(group: FinishedGroup) -> None:
        nonlocal num_calls
        for sample in samples_of(group):
            calls = sample.metadata.get("tool_calls", [])
            num_calls += sum(call["executed"] for call in calls)
            print(f"group {sample.group_index}, member {sample.member}: reward {sample.reward}")
            for call in calls:
                print(f"    {call['name']} {call['arguments']}")
            if errors := sample.metadata.get("tool_errors"):
                print(f"    errors: {errors}")
            print(f"    … {' '.join(sample.response.split())[-SHOWN_CHARS:]}")

    source = f"reasoning_gym:gsm_symbolic?size={groups}&seed=1"
    run = SmallRun("mcp_tools", tables(url, source), answers=source, groups=groups, n=n)
    code = play(run, show)
    print(f"{num_calls} calls of the server's tool")
    return code if num_calls else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
