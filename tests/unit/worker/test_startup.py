"""What a worker says at its start of a configuration that is right and surprising."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollstream.errors import ConfigError
from rollstream.settings import RewardTable, Settings
from tests.unit.tito.families import toyvocab
from tests.unit.tito.template.folder import backend
from worker.process.startup import env_runtimes, warn_of_unseen_tools
from worker.tito.families import FAMILIES

pytestmark = pytest.mark.xdist_group("families")


def warned(renderer: Any, *tools: str) -> list[Any]:
    settings = Settings()
    worker = settings.worker.model_copy(update={"tools": tools})
    settings = settings.model_copy(update={"worker": worker})
    with capture_logs() as said:
        envs = env_runtimes(settings, renderer, dict.fromkeys(settings.envs()))
        warn_of_unseen_tools(envs, renderer)
    return list(said)


def test_tools_that_the_chat_format_does_not_show_are_one_warning() -> None:
    for name in ("deepseek-v3", "deepseek-r1"):
        [said] = warned(toyvocab.renderer(name), "calculator")
        assert (said["event"], said["log_level"]) == ("tools_not_shown_to_the_model", "warning")
        assert (said["renderer"], said["tools"]) == (name, ["calculator"])
        assert said["environments"] == ["default"]
        assert "describe them in the prompts' system message" in said["message"]
        assert warned(toyvocab.renderer(name)) == []
    assert warned(toyvocab.renderer("kimi-k2"), "calculator") == []


@pytest.mark.parametrize("name", toyvocab.FAMILIES)
def test_every_family_shows_specs_as_its_record_says(name: str) -> None:
    renderer = toyvocab.renderer(name)
    asked = [{"role": "user", "content": "?"}]
    function = {"name": "quxname", "description": "d", "parameters": {"type": "object"}}
    shown = renderer.decode(renderer.render(asked, [{"type": "function", "function": function}]))
    assert ("quxname" in shown) is FAMILIES[name].shows_tools is renderer.shows_tools


def test_templates_show_specs_where_they_write_them_and_take_calls(tmp_path: Path) -> None:
    shown = backend(tmp_path / "a", "qwen_like", tool_parser="qwen3")
    assert warned(shown, "calculator") == []
    for name in ("strip", "items"):
        [said] = warned(backend(tmp_path / name, name), "calculator")
        assert said["renderer"] == "template"


def test_a_group_reward_beside_a_reward_of_each_sample_stops_a_worker_that_only_generates() -> None:
    reward = RewardTable(group="tests.e2e.judges:alike")
    settings = Settings(reward=reward)
    with pytest.raises(ConfigError, match=r"environment 'default': reward\.group = .* 'none'"):
        env_runtimes(settings, toyvocab.renderer("kimi-k2"), dict.fromkeys(settings.envs()))
