"""`python -m examples.agents [NAME]`: one of the agents, offline, against the real stack.

Starts Valkey, the simulated engine (a stand-in for a model), the producer and one worker whose
gateway the agent calls, and plays the trainer: each sample is printed in a few lines. Everything
ends with it. Exit code 0 where every sample was there and none of an infrastructure's faults.
"""

from __future__ import annotations

import argparse
import sys

from examples.small_run import SmallRun, play, samples_of
from rollstream.group import FinishedGroup
from rollstream.sample import Sample

AGENTS = ("openai_sdk", "anthropic_sdk", "openai_agents", "mini_swe")
SHOWN_CHARS = 100


def main() -> int:
    """Run one agent; return the exit code."""
    options = _options()
    source = f"reasoning_gym:gsm_symbolic?size={options.groups}&seed=1"
    tables = {
        "producer": {"source": source},
        "worker": {"generate": "agent", "agent": f"examples.agents.{options.agent}:run"},
        "gateway": {"port": 0, "session": options.session},
        "reward": {"kind": "math"},
    }
    return play(SmallRun("agents", tables, source, options.groups, options.n), _show)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.agents", description=__doc__)
    parser.add_argument("agent", nargs="?", default=AGENTS[0], choices=AGENTS)
    parser.add_argument("--groups", type=int, default=2, metavar="N", help="prompts (default 2)")
    parser.add_argument("--n", type=int, default=2, metavar="N", help="samples of each (default 2)")
    parser.add_argument("--session", default="linear", choices=("linear", "tree"))
    return parser.parse_args()


def _show(group: FinishedGroup) -> None:
    for sample in samples_of(group):
        _show_sample(sample)


def _show_sample(sample: Sample) -> None:
    agent = sample.metadata.get("agent", {})
    told = {k: v for k, v in sample.metadata.items() if k in ("turns", "steps", "handed_in")}
    print(
        f"group {sample.group_index}, member {sample.member}: {sample.status.value} "
        f"({sample.stop_reason}), reward {sample.reward}, {len(sample.calls)} calls, "
        f"{sample.num_sampled} tokens sampled of {len(sample.tokens)}, "
        f"{agent.get('dropped_tokens', 0)} dropped, the agent says {told}"
    )
    text = " ".join(sample.response.split())
    print(f"    … {text[-SHOWN_CHARS:]}")


if __name__ == "__main__":
    sys.exit(main())
