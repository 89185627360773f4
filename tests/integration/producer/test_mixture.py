"""Sources of several environments, enqueued on a real server."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rollstream.queue.queue import Queue
from rollstream.settings import Settings
from rollstream.wire import decode_prompt

from .scene import Trainer, producing


def a_mixture(url: str, run: str, folder: Path, weights: dict[str, float]) -> Settings:
    """Return settings of environments whose n is the length of their name."""
    envs = {}
    for name, weight in weights.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps({'prompt': f'{name} {k}'})}\n" for k in range(10)))
        source = f"jsonl:{path}"
        envs[name] = {"weight": weight, "source": source, "n_samples_per_prompt": len(name)}
    return Settings.model_validate(
        {
            "redis": {"url": url},
            "run": {"name": run},
            "worker": {"lease_s": 2},
            "producer": {"capacity_groups": 12, "epochs": 2, "shuffle_seed": 1},
            "env": envs,
        }
    )


async def enqueued(queue: Queue, groups: set[int]) -> dict[int, tuple[str, int, str]]:
    """Return (environment, n, prompt) of live groups, as they stand in Redis."""
    found = {}
    for g in groups:
        record, n = await queue.client.hmget(f"{queue.prefix}g:{g}", "prompt", "n")
        group = decode_prompt(record, g, int(n))
        found[g] = (group.env, group.n, str(group.prompt))
    return found


async def test_a_mixture_keeps_its_shares_whatever_producer_enqueues_it(
    valkey_url: str, run_name: str, tmp_path: Path
) -> None:
    settings = a_mixture(valkey_url, run_name, tmp_path, {"math": 5, "code": 3, "qa": 2})
    seen: dict[int, tuple[str, int, str]] = {}
    async with Trainer(valkey_url, run_name) as trainer:
        for first in range(0, 60, 12):
            # A producer is killed each time, and another one goes on.
            async with producing(settings) as it:
                await trainer.until_live(range(first, first + 12))
                seen |= await enqueued(it.queue, await trainer.live())
                await trainer.ack(*range(first, first + 12))
                await it.kill()
        await trainer.check_accounts()

    assert sorted(seen) == list(range(60))
    envs = [seen[g][0] for g in range(60)]
    for k in range(10, 61, 10):
        assert Counter(envs[k - 10 : k]) == {"math": 5, "code": 3, "qa": 2}
    assert all((len(env), env) == (n, prompt.split()[0]) for env, n, prompt in seen.values())
    assert Counter(prompt for env, _, prompt in seen.values() if env == "math") == {
        f"math {k}": 3 for k in range(10)
    }
