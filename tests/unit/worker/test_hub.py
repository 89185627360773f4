"""Where `model.tokenizer` is: paths, and the hub's files without a network."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from rollstream.errors import ConfigError
from rollstream.settings import ModelTable
from tests.unit.tito.families import toyvocab
from tests.unit.tito.families.spelling import NAMES
from worker import hub
from worker.hub import FILES, is_hub_id, locate
from worker.model import load_model
from worker.tito.families import FAMILIES


class _Hub:
    """Stands for `snapshot_download`: what is in its cache, and what the network gives."""

    def __init__(self, cache: dict[str, Path], network: dict[str, Any]) -> None:
        self.cache, self.network = cache, network
        self.asked: list[dict[str, Any]] = []

    def __call__(self, repo: str, *, revision: str | None, **options: Any) -> str:
        self.asked.append({"repo": repo, "revision": revision, **options})
        key = repo if revision is None else f"{repo}@{revision}"
        if options["local_files_only"]:
            if key not in self.cache:
                raise FileNotFoundError("not in the cache")
            return str(self.cache[key])
        found = self.network.get(key)
        if isinstance(found, Path):
            return str(found)
        if isinstance(found, threading.Event):
            found.wait(10)
        raise ConnectionError("no route\nand a second line")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models--org--name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _use(monkeypatch: pytest.MonkeyPatch, **given: dict[str, Any]) -> _Hub:
    fake = _Hub(given.get("cache", {}), given.get("network", {}))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


@pytest.mark.parametrize(
    ("given", "is_one"),
    [
        ("Qwen/Qwen3-8B", True),
        ("Qwen/Qwen3-8B@main", True),
        ("org/name@refs/pr/1", True),
        ("qwen3", False),
        ("/models/qwen3", False),
        ("./models/qwen3", False),
        ("a/b/c", False),
        ("models/tokenizer.json", False),
        ("", False),
    ],
)
def test_hub_id_is_two_names_and_a_revision(given: str, is_one: bool) -> None:
    assert is_hub_id(given) is is_one


def test_path_that_exists_wins_and_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _use(monkeypatch)
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name") == Path("org/name")
    assert locate("/nowhere/tokenizer.json") == Path("/nowhere/tokenizer.json")
    assert fake.asked == []


@pytest.mark.parametrize("name", {FAMILIES[name].module: name for name in NAMES}.values())
def test_a_renderer_of_a_path_is_loaded_and_used_without_a_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []  # not an exception alone: a library might swallow it

    def refuse(*given: Any, **_: Any) -> None:
        asked.append(given)
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for call in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, call, refuse)
    toyvocab.vocabulary(name).save(str(tmp_path / "tokenizer.json"))
    renderer = load_model(ModelTable(tokenizer=str(tmp_path), renderer=name))
    renderer.parse(
        renderer.encode_raw("x"), renderer.render([{"role": "user", "content": "?"}], None)
    )
    assert asked == []


def test_files_of_the_local_cache_are_taken_without_a_network(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _use(monkeypatch, cache={"org/name@v1": model})
    assert locate("org/name@v1") == model
    (asked,) = fake.asked
    assert asked["local_files_only"] is True


def test_small_files_are_fetched_where_the_cache_lacks_them(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = _use(monkeypatch, network={"org/name": model})
    assert locate("org/name") == model
    assert [asked["local_files_only"] for asked in fake.asked] == [True, False]
    assert fake.asked[1]["allow_patterns"] == list(FILES)
    assert not any("safetensors" in name or "*" in name.partition("/")[0] for name in FILES)


def test_hub_that_cannot_be_reached_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch)
    with pytest.raises(
        ConfigError, match=r"no path 'org/name', .* at revision 'v2': ConnectionError: no route;"
    ) as caught:
        locate("org/name@v2")
    assert "second line" not in str(caught.value)
    assert "model.tokenizer" in str(caught.value)


def test_repository_without_a_tokenizer_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "tokenizer.json").unlink()
    _use(monkeypatch, cache={"org/name": model}, network={"org/name": model})
    with pytest.raises(ConfigError, match=r"it has no tokenizer\.json"):
        locate("org/name")


def test_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = threading.Event()
    _use(monkeypatch, network={"org/name": silent})
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.05)
    with pytest.raises(ConfigError, match=r"no answer within 0\.05 s"):
        locate("org/name")
    silent.set()
