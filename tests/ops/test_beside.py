"""docs/beside.md: its compose files are sound and fit ours, and its functions run.

miles, slime and TRL are not installed here. The doubles below have the fields and signatures that
the functions use, as they stand in slime's and miles' `utils/types.py` and `rollout/base_types.py`
and in TRL 1.16.0's `GRPOTrainer._generate`; the stream and the server are real.
"""

from __future__ import annotations

import enum
import json
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from rollstream.errors import StreamError
from rollstream.group import INDEX_STRIDE
from rollstream.queue import calls
from rollstream.queue.reads import RunInfo
from rollstream.sample import Sample
from rollstream.stream import GroupStream
from tests.backstage import Backstage
from tests.builders import a_sample
from tests.ops.composed import ROOT, load, problems

PAGE = (ROOT / "docs" / "beside.md").read_text()
DEPLOY = (ROOT / "docs" / "deploy.md").read_text()


def blocks(language: str, page: str = PAGE) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert found
    return found


# --- the compose files ---------------------------------------------------------------------------
def test_every_compose_file_of_the_page_follows_the_specification() -> None:
    assert [problems(text) for text in blocks("yaml")] == [[], [], []]
    assert problems(blocks("yaml")[0].replace("ulimits:", "ulimit:"))


def test_every_compose_file_of_the_page_on_deployment_follows_the_specification() -> None:
    files = [text for text in blocks("yaml", DEPLOY) if text.startswith("services:")]
    assert len(files) == 3
    assert [problems(text) for text in files] == [[], [], []]


@pytest.mark.parametrize("text", blocks("yaml"), ids=["slime", "miles", "trl"])
def test_trainers_join_the_networks_and_the_volume_that_our_compose_file_makes(text: str) -> None:
    ours, theirs = load(), yaml.safe_load(text)
    made = {f"{ours['name']}_{network}" for network in ours["networks"]}
    for network, given in theirs["networks"].items():
        assert given == {"external": True}
        assert network in made
    for volume, given in theirs["volumes"].items():
        if given:
            assert given == {"external": True}
            assert volume in {f"{ours['name']}_{name}" for name in ours["volumes"]}
    assert theirs["name"] != ours["name"]
    trainer = theirs["services"]["trainer"]
    assert {f"{ours['name']}_store"} <= set(trainer["networks"])
    assert f"{ours['name']}_secrets:/run/rollstream:ro" in trainer["volumes"]
    environment = trainer["environment"]
    values = {name for name in environment if name.startswith("ROLLSTREAM_")}
    names = ("REDIS__URL_FILE", "RUN__NAME", "ENGINE__URLS")
    assert values == {f"ROLLSTREAM_{name}" for name in names}
    worker = ours["services"]["worker"]["environment"]
    assert environment["ROLLSTREAM_REDIS__URL_FILE"] == worker["ROLLSTREAM_REDIS__URL_FILE"]
    assert environment["ROLLSTREAM_RUN__NAME"] == worker["ROLLSTREAM_RUN__NAME"]
    assert "COPY . /src/rollstream" in trainer["build"]["dockerfile_inline"]


def test_engine_of_a_trainers_file_has_the_name_that_our_workers_call() -> None:
    engine = yaml.safe_load(blocks("yaml")[2])["services"]["engine"]
    (alias,) = engine["networks"]["rollstream_engines"]["aliases"]
    port = engine["command"][engine["command"].index("--port") + 1]
    url = load()["services"]["worker"]["environment"]["ROLLSTREAM_ENGINE__URLS"]
    assert url == f"http://{alias}:{port}"


# --- slime and miles -----------------------------------------------------------------------------
@dataclass
class TheirSample:
    """The fields that slime's and miles' `Sample` share and the page fills."""

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainOutput:
    samples: list[list[TheirSample]]
    metrics: dict[str, Any] | None = None


@pytest.fixture
def beside(valkey_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The three values, as a container of a trainer has them; the folder for its checkpoints."""
    file = tmp_path / "redis_url"
    file.write_text(f"{valkey_url}\n")
    monkeypatch.setenv("ROLLSTREAM_REDIS__URL_FILE", str(file))
    monkeypatch.setenv("ROLLSTREAM_RUN__NAME", run_name)
    monkeypatch.setenv("ROLLSTREAM_ENGINE__URLS", "")
    monkeypatch.setattr(GroupStream, "engines", lambda *_: ["http://10.0.0.1:30000"])
    return tmp_path / "checkpoints"


@pytest.fixture
def backstage(valkey_url: str, run_name: str) -> Iterator[Backstage]:
    with Backstage(valkey_url, run_name) as played:
        yield played.open()


def module_of(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a block of the page beside doubles of the packages that it imports."""
    for package in ("slime", "miles"):
        for name in (package, f"{package}.rollout", f"{package}.utils"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        base = types.ModuleType(f"{package}.rollout.base_types")
        base.RolloutFnTrainOutput = TrainOutput  # type: ignore[attr-defined]
        records = types.ModuleType(f"{package}.utils.types")
        records.Sample = TheirSample  # type: ignore[attr-defined]
        for made in (base, records):
            monkeypatch.setitem(sys.modules, made.__name__, made)
    names: dict[str, Any] = {}
    exec(compile(text, "docs/beside.md", "exec"), names)
    return names


def told(group_index: int, member: int) -> Sample:
    """Two calls and what a tool said between them; every member is told apart by its tokens."""
    turns = (((40 + member, 5), (7, 7, 7)), ((8,), ()))
    return a_sample(group_index, member, prompt_ids=(10 + group_index, 2), turns=turns)


def finish(backstage: Backstage, num_groups: int) -> None:
    """Have groups ready, and nobody alive who would have to obey a pause."""
    backstage.finish(*range(num_groups), make=told)
    backstage.queue.call(calls.present("worker", backstage.worker, leaving=True))


def info(backstage: Backstage) -> RunInfo:
    found = backstage.queue.info()
    assert found is not None
    return found


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_rollout_function_of_the_page_feeds_slime_and_miles(
    package: str, beside: Path, backstage: Backstage, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = blocks("python")[0].replace("from slime.", f"from {package}.")
    args = SimpleNamespace(
        save=str(beside), rollout_batch_size=2, sglang_router_ip="10.0.0.1", sglang_router_port=3000
    )
    module = module_of(text, monkeypatch)
    finish(backstage, 4)
    first = module["generate_rollout"](args, 0, None)
    stream: GroupStream = module["stream"]
    assert [len(group) for group in first.samples] == [2, 2]
    for group in first.samples:
        for given in group:
            ours = told(given.group_index, given.index % INDEX_STRIDE)
            assert given.tokens == ours.tokens.tolist()
            assert given.loss_mask == ours.loss_mask.tolist()
            assert given.rollout_log_probs == ours.rollout_log_probs.tolist()
            assert len(given.loss_mask) == given.response_length
            assert given.reward == ours.reward
            assert given.status is TheirSample.Status.COMPLETED
    assert first.metrics["batch/groups"] == 2
    # The run stands still while the trainer learns and pushes; the next call ends that.
    standing = info(backstage)
    assert (standing.pause_mode, standing.version) == ("abort", 1)
    assert standing.engines == ("router+http://10.0.0.1:3000",)
    state = json.loads((beside / "rollstream_0.json").read_text())
    second = module["generate_rollout"](args, 1, None)
    assert info(backstage).version == 2
    seen = {s.group_index for out in (first, second) for group in out.samples for s in group}
    assert seen == {0, 1, 2, 3}
    module["update"].close()
    abandoned = stream.version
    stream.close()
    # From the first checkpoint: what was trained later comes again, and only that.
    again = module_of(text, monkeypatch)
    again["connected"](args, 1)
    restored = again["stream"].state_dict()
    assert restored.pop("weight_version") > abandoned
    state.pop("weight_version")
    assert restored == state
    again["stream"].close()
    with pytest.raises(NotImplementedError, match="evaluate"):
        module["generate_rollout"](args, 2, None, evaluation=True)


# --- TRL -----------------------------------------------------------------------------------------
def test_rollout_function_of_the_page_feeds_trl(
    beside: Path, backstage: Backstage, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(blocks("python")[1], monkeypatch)
    pushed = []
    module["push_weights"] = lambda trainer, engines, version: pushed.append(version)
    trainer = SimpleNamespace(num_generations=2, state=SimpleNamespace(global_step=0))
    stream = module["connect"]()
    finish(backstage, 6)
    prompts = [""] * 4
    first = module["rollout"](prompts, trainer)
    assert {"prompt_ids", "completion_ids", "logprobs"} <= first.keys()
    assert {len(values) for values in first.values()} == {len(prompts)}
    keys = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "verdict")
    rows = list(zip(*(first[key] for key in keys), strict=True))
    members = [(ids[0] - 10, completion[0] - 40) for ids, completion, *_ in rows]
    assert members[0][0] == members[1][0] != members[2][0] == members[3][0], "whole groups in a row"
    for (group, member), row in zip(members, rows, strict=True):
        ours = told(group, member)
        prompt, completion, log_probs, mask, verdict = row
        assert [*prompt, *completion] == ours.tokens.tolist()
        assert len(prompt) == 2
        assert mask == ours.loss_mask.tolist() == [1, 1, 0, 0, 0, 1]
        assert log_probs == ours.rollout_log_probs.tolist()
        assert verdict == ours.reward
    assert module["reward"]([None] * 4, **first | {"prompts": prompts}) == first["verdict"]
    assert pushed == []
    with pytest.raises(StreamError, match="not acked"):
        stream.state_dict()
    trainer.state.global_step = 5
    module["rollout"](prompts, trainer)
    assert pushed == [1]
    assert info(backstage).version == 1
    assert backstage.queue.counters()["acked"] == 2
    with pytest.raises(ValueError, match="n_samples_per_prompt"):
        module["rollout"]([""] * 5, trainer)
    stream.close()


def test_push_of_the_page_asks_every_engine_and_says_which_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = module_of(blocks("python")[2], monkeypatch)
    asked = []

    class Reply:
        def __init__(self, success: bool) -> None:
            self.text = json.dumps({"success": success, "message": "no such folder"})

        def __enter__(self) -> Reply:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self) -> str:
            return self.text

    def urlopen(request: Any, timeout: float) -> Reply:
        asked.append((request.full_url, json.loads(request.data)))
        return Reply("bad" not in request.full_url)

    monkeypatch.setattr(module["urllib"].request, "urlopen", urlopen)
    trainer = SimpleNamespace(save_model=lambda folder: asked.append(folder))
    with pytest.raises(RuntimeError, match="http://bad:1: no such folder"):
        module["push_weights"](trainer, ["http://good:1", "http://bad:1"], 7)
    body = {"model_path": "/weights/7", "weight_version": "7", "abort_all_requests": False}
    assert asked == ["/weights/7"] + [
        (f"http://{name}:1/update_weights_from_disk", body) for name in ("good", "bad")
    ]
