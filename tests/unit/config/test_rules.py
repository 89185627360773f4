"""What every process knows of an environment, from the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from producer.identity import opening
from rollstream.errors import ConfigError
from rollstream.group import EnvRule
from rollstream.settings import AggregatorTable, EnvTable, RewardTable, Settings
from rollstream.wire import decode_envs
from worker.process.startup import env_judges

GROUP = "tests.e2e.judges:alike"


def settings(reward: dict[str, Any], env: dict[str, Any] | None = None) -> Settings:
    """Return settings with this reward, and maybe one environment with its own."""
    tables = {} if env is None else {"own": EnvTable(reward=RewardTable(**env))}
    return Settings(reward=RewardTable(**reward), env=tables)


@pytest.mark.parametrize(
    ("reward", "rule"),
    [
        ({}, EnvRule()),
        ({"kind": "none"}, EnvRule(needs_reward=False)),
        ({"kind": "none", "group": GROUP, "key": "x"}, EnvRule("x", group_reward=True)),
    ],
)
def test_a_reward_says_who_scores_and_whether_a_member_without_one_is_of_use(
    reward: dict[str, Any], rule: EnvRule
) -> None:
    (table,) = settings(reward).envs().values()
    assert table.rule() == rule


@pytest.mark.parametrize(
    ("reward", "env"),
    [
        ({"group": GROUP}, None),
        ({"group": GROUP, "kind": "f1"}, None),
        ({}, {"group": GROUP}),
        ({"kind": "none", "group": GROUP}, {"kind": "math"}),
    ],
)
def test_a_group_reward_beside_a_reward_of_each_sample_is_refused_by_producer_and_worker(
    reward: dict[str, Any], env: dict[str, Any] | None
) -> None:
    wrong = settings(reward, env)
    for start in (lambda: opening(wrong, "data", 1), lambda: env_judges(wrong)):
        with pytest.raises(ConfigError, match=r"set reward\.kind to 'none'") as refused:
            start()
        assert GROUP in str(refused.value)


def test_the_producer_tells_the_run_what_the_aggregator_judges_by() -> None:
    given = Settings(
        aggregator=AggregatorTable(on_truncated="mask", keep_when_insufficient=True),
        reward=RewardTable(kind="none", group=GROUP),
        env={"a": EnvTable(), "b": EnvTable(on_truncated="drop")},
    )
    args = opening(given, "data", 1).args
    told = args[args.index("envs") + 1]
    assert isinstance(told, bytes)
    judges = env_judges(given)
    assert decode_envs(told) == {name: judge.rule for name, judge in judges.items()}
    assert judges["a"].rule == EnvRule(group_reward=True, on_truncated="mask")
    assert judges["b"].rule.on_truncated == "drop"
    assert judges["a"].group_reward is not None
    assert judges["a"].runs_user_code
