"""Which reward a sample gets: conformance 162 and 163 over environment tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollstream.config import load_settings
from rollstream.errors import ConfigError, RewardFault
from rollstream.settings import RewardTable, Settings
from tests.builders import a_prompt
from worker.process.startup import asks_verifiers, build_isolated, build_scorers, says_its_kind
from worker.rewards import build_scorer
from worker.rewards.details import Detail
from worker.rewards.kinds import BUILT_IN, kind_for

from .test_scorer import MINE, replied, reward_of, scorer_of

GROUP = a_prompt()


def settings_of(text: str, folder: Path) -> Settings:
    """Return what a configuration file says."""
    file = folder / "rollstream.toml"
    file.write_text(text)
    return load_settings(["--config", str(file)], prog="worker", environ={}).settings


def kind_in(env: str, text: str, folder: Path, **metadata: Any) -> str:
    """Return the kind of a row of one environment."""
    settings = settings_of(text, folder)
    table = settings.envs()[env].reward
    return kind_for(table, metadata, is_own=says_its_kind(settings, env))


FLAT = "[reward]\nkind = 'math'\n"
OWN = FLAT + "[env.a.reward]\nkind = 'f1'\n[env.b]\nmax_turns = 2\n[env.c.reward]\ntimeout_s = 5\n"


@pytest.mark.parametrize(
    ("text", "env", "rm_type", "kind"),
    [
        (OWN, "a", "gpqa", "f1"),
        (OWN, "a", None, "f1"),
        (OWN, "b", "gpqa", "gpqa"),
        (OWN, "b", None, "math"),
        (OWN, "c", "gpqa", "gpqa"),
        (FLAT, "default", "gpqa", "gpqa"),
        (FLAT, "default", None, "math"),
        (FLAT, "default", "", "math"),
        (FLAT, "default", "  ", "math"),
        (FLAT, "default", " boxed_f1 ", "boxed_f1"),
        ("", "default", "dapo", "dapo"),
        ("", "default", None, "math"),
        ("[env.a.reward]\nkind = 'math'\n", "a", "gpqa", "math"),
        ("[reward]\nkind = 'none'\n", "default", "math", "none"),
        ("[reward]\nkind = 'my.own:f'\n", "default", "math", "my.own:f"),
        (FLAT + "[env.a.reward]\nkind = 'my.own:f'\n", "a", "gpqa", "my.own:f"),
    ],
)
def test_163_the_environments_own_kind_comes_before_the_rows_and_the_rows_before_the_flat_one(
    text: str, env: str, rm_type: str | None, kind: str, tmp_path: Path
) -> None:
    metadata = {} if rm_type is None else {"rm_type": rm_type}
    assert kind_in(env, text, tmp_path, **metadata) == kind


@pytest.mark.parametrize("named", ["os:system", f"{MINE}:reward", "mathz", "none", 5, ["math"]])
def test_162_a_row_names_built_in_rewards_only_and_nothing_is_imported_for_it(
    named: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", lambda name, *_: imported.append(name))
    with pytest.raises(RewardFault, match="is no built-in reward") as caught:
        kind_for(RewardTable(), {"rm_type": named}, is_own=False)
    assert (caught.value.detail, caught.value.retryable) == ("unknown_kind", False)
    assert imported == []


def test_162_an_unknown_name_says_the_nearest() -> None:
    with pytest.raises(RewardFault, match="did you mean 'remote'"):
        kind_for(RewardTable(), {"rm_type": "remote_rm"}, is_own=False)


async def test_162_samples_of_one_batch_have_their_own_rewards(qwen3: Any) -> None:
    scorer = build_scorer(
        RewardTable(kind="math"), renderer=qwen3, run_seed=0, isolated=None, is_own=False
    )
    replies = [
        (r"\boxed{42}", "42", {}, 1.0),
        ("hello", "hello world", {"rm_type": "f1"}, pytest.approx(2 / 3)),
        (r"\boxed{hello world}", "hello world", {"rm_type": "boxed_f1"}, 1.0),
        ("Answer: B", "A", {"rm_type": "gpqa"}, 0.0),
        ("Answer: 41", "42", {"rm_type": "dapo"}, -1.0),
        ("<think>\nhm\n</think>\n\n\\boxed{42}<|im_end|>", "42", {"rm_type": "deepscaler"}, 1.0),
    ]
    for text, label, metadata, reward in replies:
        sample = replied(qwen3, text, label=label, metadata=metadata)
        assert await reward_of(scorer, sample) == reward
    await scorer.score([], GROUP)


async def test_a_sample_whose_row_names_nonsense_is_a_fault_with_its_cause(qwen3: Any) -> None:
    scorer = build_scorer(RewardTable(), renderer=qwen3, run_seed=0, is_own=False)
    sample = replied(qwen3, r"\boxed{8}", metadata={"rm_type": "os:system"})
    with pytest.raises(RewardFault, match="no built-in reward"):
        await scorer.score(sample, GROUP)
    assert sample.reward is None


@pytest.mark.parametrize(
    ("named", "table", "message"),
    [
        ("remote", {}, "reward.url is empty"),
        ("code", {"isolated": ("math_verify",)}, "add 'code' to reward.isolated"),
        ("boxed_math_verify", {"isolated": ()}, "add 'math_verify' to reward.isolated"),
    ],
)
async def test_a_row_cannot_name_what_the_configuration_does_not_provide(
    named: str, table: dict[str, Any], message: str, qwen3: Any
) -> None:
    scorer = build_scorer(RewardTable(**table), renderer=qwen3, run_seed=0, is_own=False)
    with pytest.raises(RewardFault, match=message) as caught:
        await scorer.score(replied(qwen3, "x", metadata={"rm_type": named}), GROUP)
    assert caught.value.detail == "not_configured"


async def test_146_a_reward_that_is_there_is_kept_whatever_the_row_names(qwen3: Any) -> None:
    scorer = build_scorer(RewardTable(), renderer=qwen3, run_seed=0, is_own=False)
    sample = replied(qwen3, r"\boxed{8}", metadata={"rm_type": "nonsense"})
    sample.reward = 0.25
    assert await reward_of(scorer, sample) == 0.25


@pytest.mark.parametrize(
    ("key", "reward"),
    [
        (None, 1.0),
        ("score", {"score": 1.0, "acc": True, "pred": "42"}),
        ("acc", {"score": 1.0, "acc": True, "pred": "42"}),
        ("accuracy", 1.0),
    ],
)
async def test_dapo_is_its_score_unless_reward_key_picks_from_it(
    key: str | None, reward: Any, qwen3: Any
) -> None:
    sample = replied(qwen3, "Answer: 42", label="42")
    assert await reward_of(scorer_of(qwen3, "dapo", key=key), sample) == reward


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "remote"}, "set it"),
        ({"kind": "remote", "url": "ftp://x/"}, "http:// or https://"),
        ({"kind": "remote", "url": "http://x/", "token_file": "/nowhere"}, "token_file /nowhere"),
        ({"kind": "code", "isolated": ()}, "add it to reward.isolated"),
        ({"kind": "boxed_math_verify", "isolated": ()}, "math_verify can hang"),
        ({"kind": "boxed_none"}, "unknown reward 'boxed_none'"),
    ],
)
def test_a_reward_that_cannot_work_is_one_error_at_the_start(
    table: dict[str, Any], message: str, qwen3: Any
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_scorer(RewardTable(**table), renderer=qwen3, run_seed=0)


@pytest.mark.parametrize(
    ("text", "built", "certain"),
    [
        ("", True, False),  # a row may name math_verify
        ("[reward]\nkind = 'math_verify'\n", True, True),
        ("[reward]\nkind = 'my.own:f'\nisolated = ['my.own:f']\n", True, True),
        ("[reward]\nkind = 'my.own:f'\n", False, False),
        ("[reward]\nkind = 'none'\n", False, False),
        ("[reward]\nisolated = []\n", False, False),
        ("[env.a.reward]\nkind = 'f1'\n", False, False),
        ("[env.a.reward]\nkind = 'code'\n", True, True),
        ("[reward]\nisolated_share = 0.5\n[env.a.reward]\nkind = 'f1'\n", True, True),
    ],
)
async def test_one_process_has_one_way_to_its_verifiers_where_anything_may_ask_them(
    text: str, built: bool, certain: bool, tmp_path: Path
) -> None:
    settings = settings_of(text, tmp_path)
    isolated = build_isolated(settings, "0123456789ab")
    assert (isolated is not None, asks_verifiers(settings)) == (built, certain)
    if isolated is not None:
        await isolated.aclose()


def test_the_environments_error_names_the_environment(tmp_path: Path, qwen3: Any) -> None:
    settings = settings_of("[env.mine.reward]\nkind = 'mathz'\n", tmp_path)
    with pytest.raises(ConfigError, match="environment 'mine': unknown reward 'mathz'"):
        build_scorers(settings, qwen3, None)


def test_the_list_of_built_in_rewards_is_what_the_page_says() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text()
    missing = [kind for kind in BUILT_IN if f"`{kind.removeprefix('boxed_')}`" not in page]
    assert missing == []


def test_the_page_says_of_every_cause_whether_it_is_asked_again() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "rewards.md").read_text()
    table = page.partition("| `detail` | what happened |")[2].partition("\n\n")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name.strip(" `") for cell in first for name in cell.split(",")]
    assert sorted(named) == sorted([*Detail, "missing"])
