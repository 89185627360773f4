"""What a run is made of: its fingerprint, and opening it.

Owns the words in which a run is compared with the one of the same name. Never enqueues.
Invariant: two producers with one fingerprint put the same prompt under the same group index, and
sample it as often; a run of another fingerprint is refused and left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollstream.errors import RunMismatch
from rollstream.queue.calls import ScriptCall, open_run
from rollstream.queue.keys import SCHEMA
from rollstream.settings import Settings
from rollstream.wire import encode_envs

from .budgets import budgets_of
from .sources import Rows


def fingerprint_of(settings: Settings, source: Rows) -> str:
    """Return what decides the groups of a run, as JSON that people can read."""
    producer = settings.producer
    parts: dict[str, Any] = {
        "source": source.fingerprint,
        "rows": len(source),
        "n": {name: env.n_samples_per_prompt for name, env in settings.envs().items()},
        "epochs": producer.epochs,
        "shuffle_seed": producer.shuffle_seed,
        "seed": settings.run.seed,
    }
    if producer.keys:
        parts["keys"] = producer.keys
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def opening(settings: Settings, fingerprint: str, total: int) -> ScriptCall[list[str]]:
    """Return the call that creates the run of `total` groups, or sets its budgets anew.

    Raises:
        ConfigError: the budgets make no run (`budgets.pace_of`), or a reward is given twice.
    """
    rules = {name: env.rule() for name, env in settings.envs().items()}
    budgets = budgets_of(settings) | {"envs": encode_envs(rules), "total": total}
    return open_run(SCHEMA, fingerprint, budgets)


def check_opened(answer: list[str], run: str, fingerprint: str) -> str:
    """Return the state of the run that was opened.

    Raises:
        RunMismatch: there is another run of that name.
    """
    if answer[0] != "mismatch":
        return answer[1]
    schema, theirs = answer[1], answer[2]
    if schema != str(SCHEMA):
        difference = f"was written by another version (layout {schema}, this one has {SCHEMA})"
    else:
        difference = f"exists already with other data: {_differences(theirs, fingerprint)}"
    raise RunMismatch(
        f"run {run!r} {difference}. The run was left as it is: take another run.name, "
        f"or begin anew: python -m producer --fresh (or: rollstream runs --remove {run})"
    )


def _differences(theirs: str, ours: str) -> str:
    there, here = _parts(theirs), _parts(ours)
    names = [name for name in (*here, *there) if there.get(name) != here.get(name)]
    return "; ".join(
        f"{name} is {json.dumps(there.get(name))} there and {json.dumps(here.get(name))} here"
        for name in dict.fromkeys(names)
    )


def _parts(fingerprint: str) -> Mapping[str, Any]:
    try:
        parts = json.loads(fingerprint)
    except ValueError:
        parts = None
    return parts if isinstance(parts, dict) else {"fingerprint": fingerprint}
