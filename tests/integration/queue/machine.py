"""The same model under hypothesis, which shrinks what breaks to a few acts.

Owns the state machine: one rule an act, all choices of an act drawn by hypothesis. The walk goes
deep and this goes short: a failure is printed as the acts that lead to it. Longer than the test:

    python -m tests.integration.queue.machine [--examples N] [--steps N]
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from rollstream.queue.scripts import Script
from tests.integration.queue.walk import ACTIONS, Walk

RANDOM = st.randoms(use_true_random=False)
"""Every choice of an act is hypothesis's, so it can make it smaller."""
_numbers = itertools.count(1_000_000)


class QueueMachine(RuleBasedStateMachine):
    """One run per example; `client` and `scripts` are set by `explore`."""

    client: redis.Redis
    scripts: Mapping[str, Script] | None = None
    stats: Counter[str]
    walk: Walk | None = None

    @initialize(rng=RANDOM)
    def begin(self, rng: random.Random) -> None:
        """Open a run with budgets of hypothesis's choice."""
        self.walk = Walk(self.client, next(_numbers), self.scripts, rng, sizes=[8, 14])
        self.walk.begin()

    def act(self, name: str, rng: random.Random) -> None:
        """Do one act and check everything, as the walk does."""
        assert self.walk is not None
        self.walk.rng = rng
        self.walk.step(name)

    def teardown(self) -> None:
        """Every example has to drain, too."""
        if self.walk is None:
            return
        try:
            if sys.exc_info()[0] is None:
                self.walk.rng = random.Random(0)
                self.walk.drain()
        finally:
            self.walk.clean()
        self.stats.update(self.walk.stats)


def _rule(name: str) -> Any:
    def act(self: QueueMachine, rng: random.Random) -> None:
        self.act(name, rng)

    act.__name__ = name
    return rule(rng=RANDOM)(act)


for _name in ACTIONS:
    # A rule an act: hypothesis finds them as attributes of the class.
    setattr(QueueMachine, f"do_{_name}", _rule(_name))


def explore(
    client: redis.Redis,
    *,
    examples: int,
    steps: int,
    scripts: Mapping[str, Script] | None = None,
    shrink: bool = True,
) -> Counter[str]:
    """Run the machine and return what happened.

    Raises:
        AssertionError: an invariant broke; hypothesis prints the acts that lead to it.
    """
    found: Counter[str] = Counter()
    names = {"client": client, "scripts": scripts, "stats": found}
    machine = type("QueueMachine", (QueueMachine,), names)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            print_blob=False,
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return found


def main() -> int:
    """Explore longer than the test does, on a server of its own."""
    from examples.devserver import DevServer

    parser = argparse.ArgumentParser(prog="python -m tests.integration.queue.machine")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    logging.disable()
    with DevServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        stats = explore(client, examples=given.examples, steps=given.steps)
    print("\n".join(f"{k:36} {v}" for k, v in sorted(stats.items())))  # noqa: T201 - the report
    return 0


if __name__ == "__main__":
    sys.exit(main())
